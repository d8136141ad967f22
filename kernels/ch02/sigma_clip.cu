// Mean and standard deviation of the background of each frame, without its stars: sigma clipping.
//
// A pass sums the pixels that lie within three standard deviations of the mean, and the mean and
// deviation of these are the next pass's. The first pass takes all pixels, then five clip. A pass
// cannot begin before the one before has ended, and all pixels may count again, so each pass reads
// the whole frame. Arms differ in the order, and in how a pass waits for the one before:
//
//   sweeps    Each pass over all frames, one kernel per pass. When a pass begins again with the
//             first frame, the L2 cache holds the last ones.
//   chunks    All passes over a few frames that fit the L2 cache together, then the next frames, one
//             kernel per pass and chunk. Only the first pass of a chunk reads device memory. But each
//             kernel is short now, and the GPU idles at the beginning and the end of each.
//   resident  One persistent kernel, with a group of blocks per frame in flight. The blocks of a
//             group meet at a barrier between passes, and other groups work meanwhile: an SM has
//             blocks of several groups.
//
// Calls share the sums, so they must run one after the other.

#include <algorithm>
#include <cmath>
#include <cuda_runtime.h>

constexpr int THREADS = 256;
constexpr int IN_FLIGHT = 4;  // vectors of 4 floats that a thread loads at a time: all it has
constexpr int PASSES = 6;
constexpr int MAX_FRAMES = 1024;
constexpr int BLOCKS_PER_SM = 4;  // of `resident`: 64 KiB of loads in flight per SM
constexpr size_t CHUNK_BYTES = 24 << 20;  // of frames in flight; half of the L2 cache holds them
constexpr float MAX_DEVIATIONS = 3;

// Of each pass and frame: the number of pixels, the sum of their differences from the mean of the
// pass before, and the sum of the squares of these.
__device__ double sums[PASSES][MAX_FRAMES][3];
__device__ unsigned arrived[PASSES][MAX_FRAMES];  // blocks of `resident` that have added their sums

struct Background {
    float mean, deviation;
};

// The result of the first `passes` passes. Each has corrected the mean of the one before.
__device__ Background background(int passes, int frame) {
    double mean = 0, correction = 0, squares = 0;
    if (passes == 0) return {0, INFINITY};
    for (int pass = 0; pass < passes; ++pass) {
        // from the L2 cache: `resident` reads sums that other SMs add in the same kernel
        const double count = __ldcg(&sums[pass][frame][0]);
        correction = __ldcg(&sums[pass][frame][1]) / count;
        squares = __ldcg(&sums[pass][frame][2]) / count;
        mean = float(mean) + correction;  // kernels subtract the rounded mean
    }
    return {float(mean), float(sqrt(fmax(squares - correction * correction, 0.0)))};
}

__device__ float warp_sum(float value) {
    for (int offset = 16; offset > 0; offset /= 2) value += __shfl_down_sync(~0u, value, offset);
    return value;  // valid in lane 0
}

// Add up the sums of a pass over a part of a frame: as many vectors as a block loads at a time, from
// vector `first` on, and again every `step` vectors.
__device__ void clip_part(const float4* pixels, int first, int step, int vectors, int pass,
                          int frame) {
    __shared__ float warp_sums[3][THREADS / 32];
    __shared__ Background before;
    float4 loaded[IN_FLIGHT];
    auto load = [&](int start) {
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; ++k) {
            const int i = start + k * THREADS + threadIdx.x;
            loaded[k] = i < vectors ? pixels[i] : make_float4(NAN, NAN, NAN, NAN);  // never counted
        }
    };
    load(first);
    // while the loads are in flight; by one thread, as all would take longer than the L2 cache does
    if (threadIdx.x == 0) before = background(pass, frame);
    __syncthreads();
    const float limit = MAX_DEVIATIONS * before.deviation;
    float sum[3] = {};
    auto add = [&](float pixel) {
        const float difference = pixel - before.mean;
        if (!(fabsf(difference) <= limit)) return;
        sum[0] += 1;
        sum[1] += difference;
        sum[2] += difference * difference;
    };
    for (int start = first; start < vectors; start += step) {
        if (start > first) load(start);
#pragma unroll
        for (const float4& v : loaded) add(v.x), add(v.y), add(v.z), add(v.w);
    }
    for (int k = 0; k < 3; ++k) {
        const float total = warp_sum(sum[k]);
        if (threadIdx.x % 32 == 0) warp_sums[k][threadIdx.x / 32] = total;
    }
    __syncthreads();
    if (threadIdx.x < 3) {
        double total = 0;
        for (const float part : warp_sums[threadIdx.x]) total += part;
        atomicAdd(&sums[pass][frame][threadIdx.x], total);
    }
}

__global__ void __launch_bounds__(THREADS)
clip_pass(const float4* frames, int first_frame, int vectors, int pass) {
    const int frame = first_frame + blockIdx.y, per_block = THREADS * IN_FLIGHT;
    clip_part(frames + size_t(frame) * vectors, blockIdx.x * per_block, gridDim.x * per_block,
              vectors, pass, frame);
}

// Wait until all blocks of the group have added their sums of a pass over a frame. All blocks of the
// grid are resident at once (cooperative launch), so every block that is waited for runs.
__device__ void group_barrier(unsigned* count, unsigned blocks) {
    __threadfence();  // the sums of this thread before the arrival of its block
    __syncthreads();
    if (threadIdx.x == 0) {
        atomicAdd(count, 1);
        while (*static_cast<volatile unsigned*>(count) < blocks) {}
        __threadfence();
    }
    __syncthreads();
}

// Groups are contiguous ranges of blocks, so that the blocks of an SM, which are a multiple of the
// number of SMs apart, belong to different groups.
__global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
clip_resident(const float4* frames, int count, int vectors, int groups) {
    const int blocks = gridDim.x / groups;  // per group
    const int group = blockIdx.x / blocks, block = blockIdx.x % blocks;
    const int per_block = THREADS * IN_FLIGHT;
    for (int frame = group; frame < count; frame += groups)
        for (int pass = 0; pass < PASSES; ++pass) {
            clip_part(frames + size_t(frame) * vectors, block * per_block, blocks * per_block,
                      vectors, pass, frame);
            group_barrier(&arrived[pass][frame], blocks);
        }
}

__global__ void write_backgrounds(Background* out, int frames) {
    const int frame = blockIdx.x * blockDim.x + threadIdx.x;
    if (frame < frames) out[frame] = background(PASSES, frame);
}

cudaError_t clear_sums(cudaStream_t stream) {
    void *all_sums = nullptr, *all_arrived = nullptr;
    if (cudaError_t error = cudaGetSymbolAddress(&all_sums, sums)) return error;
    if (cudaError_t error = cudaGetSymbolAddress(&all_arrived, arrived)) return error;
    cudaMemsetAsync(all_sums, 0, sizeof(sums), stream);
    return cudaMemsetAsync(all_arrived, 0, sizeof(arrived), stream);
}

cudaError_t write(float* out, int count, cudaStream_t stream) {
    write_backgrounds<<<(count + 127) / 128, 128, 0, stream>>>(reinterpret_cast<Background*>(out),
                                                               count);
    return cudaGetLastError();
}

// Run all passes over chunks of `chunk` frames, chunk after chunk.
cudaError_t clip(const float* frames, float* out, int count, int pixels, int chunk,
                 cudaStream_t stream) {
    if (pixels % 4 || count > MAX_FRAMES) return cudaErrorInvalidValue;
    if (cudaError_t error = clear_sums(stream)) return error;
    const int vectors = pixels / 4, per_block = THREADS * IN_FLIGHT;
    for (int first = 0; first < count; first += chunk) {
        const dim3 blocks((vectors + per_block - 1) / per_block, std::min(chunk, count - first));
        for (int pass = 0; pass < PASSES; ++pass)
            clip_pass<<<blocks, THREADS, 0, stream>>>(reinterpret_cast<const float4*>(frames),
                                                      first, vectors, pass);
    }
    return write(out, count, stream);
}

int frames_in(size_t bytes, int pixels) {
    return std::max(1, int(bytes / (sizeof(float) * size_t(pixels))));
}

extern "C" cudaError_t sweeps(const float* frames, float* out, int count, int pixels,
                              cudaStream_t stream) {
    return clip(frames, out, count, pixels, count, stream);
}

extern "C" cudaError_t chunks(const float* frames, float* out, int count, int pixels,
                              cudaStream_t stream) {
    return clip(frames, out, count, pixels, frames_in(CHUNK_BYTES, pixels), stream);
}

extern "C" cudaError_t resident(const float* frames, float* out, int count, int pixels,
                                cudaStream_t stream) {
    if (pixels % 4 || count > MAX_FRAMES) return cudaErrorInvalidValue;
    if (cudaError_t error = clear_sums(stream)) return error;
    int device = 0, sms = 0;
    if (cudaError_t error = cudaGetDevice(&device)) return error;
    if (cudaError_t error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device))
        return error;
    int groups = std::min({frames_in(CHUNK_BYTES, pixels), count, sms * BLOCKS_PER_SM});
    int vectors = pixels / 4;
    const int blocks = sms * BLOCKS_PER_SM / groups * groups;  // as many in each group
    auto* first = reinterpret_cast<const float4*>(frames);
    void* arguments[] = {&first, &count, &vectors, &groups};
    if (cudaError_t error = cudaLaunchCooperativeKernel(clip_resident, dim3(blocks), dim3(THREADS),
                                                        arguments, 0, stream))
        return error;
    return write(out, count, stream);
}
