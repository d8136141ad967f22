// Mean and standard deviation of the background of each frame, without its stars: sigma clipping.
//
// A pass sums the pixels that lie within three standard deviations of the mean, and the next pass
// clips by the mean and deviation of these. The first pass takes all pixels, then five clip. A pass
// cannot begin before the previous one has ended, and all pixels may count again, so each pass
// reads the whole frame. Arms differ in the order, and in how a pass waits for the previous one:
//
//   sweeps    Each pass over all frames, one kernel per pass. When the next pass begins with the
//             first frame, the L2 cache holds the last ones.
//   resident  All passes over a few frames, then the next frames, in one persistent kernel, with a
//             group of blocks per frame in flight. The blocks of a group meet at a barrier between
//             passes, and load the first pixels of the next pass while they wait. Other groups work
//             meanwhile: an SM has blocks of several groups. Only the first pass reads device
//             memory; the others read the L2 cache. The L1 cache does not help: the fence of a
//             barrier invalidates it.
//
// Calls share the sums, so they must run one after the other.

#include <algorithm>
#include <cmath>
#include <cuda_runtime.h>

constexpr int THREADS = 256;
constexpr int IN_FLIGHT = 4;  // vectors of 4 floats that a thread loads at a time, all in `sweeps`
constexpr int PASSES = 6;
constexpr int MAX_FRAMES = 1024;
constexpr int BLOCKS_PER_SM = 4;  // of `resident`: 64 KiB of loads in flight per SM
constexpr size_t FRAMES_BYTES = 24 << 20;  // of frames in flight; half of the L2 cache holds them
constexpr float MAX_DEVIATIONS = 3;

// Of each pass and frame: the number of pixels, the sum of their differences from the mean of the
// pass before, and the sum of the squares of these.
__device__ double sums[PASSES][MAX_FRAMES][3];
__device__ unsigned arrived[PASSES][MAX_FRAMES];  // blocks of `resident` that have added their sums

struct Background {
    float mean, deviation;
};
__device__ Background clipped_by[PASSES][MAX_FRAMES];  // what each pass of `sweeps` clips by

// The result of a pass, which has corrected the mean of the one before.
__device__ Background corrected(Background before, int pass, int frame) {
    // from the L2 cache: `resident` reads sums that other SMs add in the same kernel
    const double count = __ldcg(&sums[pass][frame][0]);
    const double correction = __ldcg(&sums[pass][frame][1]) / count;
    const double squares = __ldcg(&sums[pass][frame][2]) / count;
    return {float(before.mean + correction),
            float(sqrt(fmax(squares - correction * correction, 0.0)))};
}

// The result of the first `passes` passes.
__device__ Background background(int passes, int frame) {
    Background result = {0, INFINITY};
    for (int pass = 0; pass < passes; ++pass) result = corrected(result, pass, frame);
    return result;
}

__device__ float warp_sum(float value) {
    for (int offset = 16; offset > 0; offset /= 2) value += __shfl_down_sync(~0u, value, offset);
    return value;  // valid in lane 0
}

// The pixels that a block loads at a time, from vector `start` on.
__device__ void load(float4 (&loaded)[IN_FLIGHT], const float4* pixels, int start, int vectors) {
#pragma unroll
    for (int k = 0; k < IN_FLIGHT; ++k) {
        const int i = start + k * THREADS + threadIdx.x;
        loaded[k] = i < vectors ? pixels[i] : make_float4(NAN, NAN, NAN, NAN);  // never counted
    }
}

// Add up the sums of a pass over a part of a frame: the pixels from vector `first` on, which are
// loaded already, and as many again every `step` vectors.
__device__ void clip_part(float4 (&loaded)[IN_FLIGHT], const float4* pixels, int first, int step,
                          int vectors, Background before, int pass, int frame) {
    __shared__ float warp_sums[3][THREADS / 32];
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
        float4 next[IN_FLIGHT];
        load(next, pixels, start + step, vectors);
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; ++k) {
            const float4 v = loaded[k];
            add(v.x), add(v.y), add(v.z), add(v.w);
            loaded[k] = next[k];
        }
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

__global__ void __launch_bounds__(THREADS) clip_pass(const float4* frames, int vectors, int pass) {
    __shared__ Background before;
    const int frame = blockIdx.y, per_block = THREADS * IN_FLIGHT;
    const float4* pixels = frames + size_t(frame) * vectors;
    float4 loaded[IN_FLIGHT];
    load(loaded, pixels, blockIdx.x * per_block, vectors);
    // while the loads are in flight; by one thread, as all would take longer than the L2 cache does
    if (threadIdx.x == 0) {
        before = pass > 0 ? corrected(clipped_by[pass - 1][frame], pass - 1, frame)
                          : Background{0, INFINITY};
        if (blockIdx.x == 0) clipped_by[pass][frame] = before;
    }
    __syncthreads();
    clip_part(loaded, pixels, blockIdx.x * per_block, gridDim.x * per_block, vectors, before, pass,
              frame);
}

// A barrier of the blocks of a group, in two halves: a block arrives when it has added its sums.
__device__ void arrive(unsigned* count) {
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();  // the sums of the block's threads before its arrival
        atomicAdd(count, 1);
    }
}

// Wait, in one thread, until all blocks of the group have arrived. All blocks of the grid are
// resident at once (cooperative launch), so every block that is waited for runs.
__device__ void wait_for(const unsigned* count, unsigned blocks) {
    while (*static_cast<const volatile unsigned*>(count) < blocks) {}
    __threadfence();
}

// Groups are contiguous ranges of blocks. If the blocks of an SM are a multiple of the number of
// SMs apart, as usual, they belong to different groups. The pixels of a pass do not depend on the
// pass before: the first ones are loaded while the group waits.
__global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
clip_resident(const float4* frames, int count, int vectors, int groups) {
    __shared__ Background before;
    const int blocks = gridDim.x / groups;  // per group
    const int group = blockIdx.x / blocks, per_block = THREADS * IN_FLIGHT;
    const int first = blockIdx.x % blocks * per_block;
    for (int frame = group; frame < count; frame += groups) {
        const float4* pixels = frames + size_t(frame) * vectors;
        for (int pass = 0; pass < PASSES; ++pass) {
            float4 loaded[IN_FLIGHT];
            load(loaded, pixels, first, vectors);
            if (threadIdx.x == 0) {
                if (pass > 0) wait_for(&arrived[pass - 1][frame], blocks);
                before = pass > 0 ? corrected(before, pass - 1, frame) : background(0, frame);
            }
            __syncthreads();
            clip_part(loaded, pixels, first, blocks * per_block, vectors, before, pass, frame);
            arrive(&arrived[pass][frame]);
        }
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

extern "C" cudaError_t sweeps(const float* frames, float* out, int count, int pixels,
                              cudaStream_t stream) {
    if (pixels % 4 || count > MAX_FRAMES) return cudaErrorInvalidValue;
    if (cudaError_t error = clear_sums(stream)) return error;
    const int vectors = pixels / 4, per_block = THREADS * IN_FLIGHT;
    const dim3 blocks((vectors + per_block - 1) / per_block, count);
    for (int pass = 0; pass < PASSES; ++pass)
        clip_pass<<<blocks, THREADS, 0, stream>>>(reinterpret_cast<const float4*>(frames), vectors,
                                                  pass);
    return write(out, count, stream);
}

extern "C" cudaError_t resident(const float* frames, float* out, int count, int pixels,
                                cudaStream_t stream) {
    if (pixels % 4 || count > MAX_FRAMES) return cudaErrorInvalidValue;
    if (cudaError_t error = clear_sums(stream)) return error;
    int device = 0, sms = 0;
    if (cudaError_t error = cudaGetDevice(&device)) return error;
    if (cudaError_t error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device))
        return error;
    const int frames_at_once = std::max(1, int(FRAMES_BYTES / (sizeof(float) * size_t(pixels))));
    int groups = std::min({frames_at_once, count, sms * BLOCKS_PER_SM}), vectors = pixels / 4;
    const int blocks = sms * BLOCKS_PER_SM / groups * groups;  // as many in each group
    auto* first = reinterpret_cast<const float4*>(frames);
    void* arguments[] = {&first, &count, &vectors, &groups};
    if (cudaError_t error = cudaLaunchCooperativeKernel(clip_resident, dim3(blocks), dim3(THREADS),
                                                        arguments, 0, stream))
        return error;
    return write(out, count, stream);
}
