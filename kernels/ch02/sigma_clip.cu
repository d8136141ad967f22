// Mean and standard deviation of the background of each frame, without its stars: sigma clipping.
//
// A pass sums the pixels that lie within three standard deviations of the mean, and the mean and
// deviation of these are the next pass's. The first pass takes all pixels, then five clip. A pass
// cannot begin before the one before has ended, and all pixels may count again, so each pass reads
// the whole frame. One kernel runs one pass over a number of frames; arms differ in the order:
//
//   sweeps      Each pass over all frames, then the next. When a pass begins again with the first
//               frame, the L2 cache holds the last ones.
//   chunks      All passes over a few frames that fit the L2 cache together, then the next frames.
//               Only the first pass of a chunk reads device memory. But each kernel is short now,
//               and the GPU idles at the beginning and the end of each.
//   overlapped  Chunks of a fraction of that size on several streams, so that kernels of one chunk
//               run while those of another begin or end.
//
// Calls share the sums, so they must run one after the other.

#include <algorithm>
#include <cmath>
#include <cuda_runtime.h>

constexpr int THREADS = 256;
constexpr int IN_FLIGHT = 4;  // vectors of 4 floats that a thread loads at a time: all it has
constexpr int PASSES = 6;
constexpr int MAX_FRAMES = 1024;
constexpr int MAX_STREAMS = 4;
constexpr size_t CHUNK_BYTES = 16 << 20;  // of frames in flight, on all streams together
constexpr float MAX_DEVIATIONS = 3;

// Of each pass and frame: the number of pixels, the sum of their differences from the mean of the
// pass before, and the sum of the squares of these.
__device__ double sums[PASSES][MAX_FRAMES][3];

struct Background {
    float mean, deviation;
};

// The result of the first `passes` passes. Each has corrected the mean of the one before.
__device__ Background background(int passes, int frame) {
    double mean = 0, correction = 0, squares = 0;
    if (passes == 0) return {0, INFINITY};
    for (int pass = 0; pass < passes; ++pass) {
        const double* sum = sums[pass][frame];
        correction = sum[1] / sum[0];
        squares = sum[2] / sum[0];
        mean = float(mean) + correction;  // kernels subtract the rounded mean
    }
    return {float(mean), float(sqrt(fmax(squares - correction * correction, 0.0)))};
}

__device__ float warp_sum(float value) {
    for (int offset = 16; offset > 0; offset /= 2) value += __shfl_down_sync(~0u, value, offset);
    return value;  // valid in lane 0
}

__global__ void __launch_bounds__(THREADS)
clip_pass(const float4* frames, int first_frame, int vectors, int pass) {
    __shared__ float warp_sums[3][THREADS / 32];
    const int frame = first_frame + blockIdx.y;
    const float4* pixels = frames + size_t(frame) * vectors;
    float4 loaded[IN_FLIGHT];
#pragma unroll
    for (int k = 0; k < IN_FLIGHT; ++k) {
        const int i = (blockIdx.x * IN_FLIGHT + k) * THREADS + threadIdx.x;
        loaded[k] = i < vectors ? pixels[i] : make_float4(NAN, NAN, NAN, NAN);  // never counted
    }
    const Background before = background(pass, frame);
    const float limit = MAX_DEVIATIONS * before.deviation;
    float sum[3] = {};
    auto add = [&](float pixel) {
        const float difference = pixel - before.mean;
        if (!(fabsf(difference) <= limit)) return;
        sum[0] += 1;
        sum[1] += difference;
        sum[2] += difference * difference;
    };
#pragma unroll
    for (const float4& v : loaded) add(v.x), add(v.y), add(v.z), add(v.w);
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

__global__ void write_backgrounds(Background* out, int frames) {
    const int frame = blockIdx.x * blockDim.x + threadIdx.x;
    if (frame < frames) out[frame] = background(PASSES, frame);
}

// Streams and events are created once: creating them costs more than using them.
struct SideStreams {
    cudaStream_t stream[MAX_STREAMS];
    cudaEvent_t fork, join[MAX_STREAMS];

    SideStreams() {
        cudaEventCreateWithFlags(&fork, cudaEventDisableTiming);
        for (int i = 0; i < MAX_STREAMS; ++i) {
            cudaStreamCreateWithFlags(&stream[i], cudaStreamNonBlocking);
            cudaEventCreateWithFlags(&join[i], cudaEventDisableTiming);
        }
    }
};

// Run all passes over chunks of `chunk` frames, chunk after chunk on `streams` streams by turns.
cudaError_t clip(const float* frames, float* out, int count, int pixels, int chunk, int streams,
                 cudaStream_t stream) {
    if (pixels % 4 || count > MAX_FRAMES || streams > MAX_STREAMS) return cudaErrorInvalidValue;
    static const SideStreams side;
    void* all_sums = nullptr;
    if (cudaError_t error = cudaGetSymbolAddress(&all_sums, sums)) return error;
    cudaMemsetAsync(all_sums, 0, sizeof(sums), stream);
    cudaEventRecord(side.fork, stream);
    for (int i = 0; i < streams; ++i) cudaStreamWaitEvent(side.stream[i], side.fork);
    const int vectors = pixels / 4, per_block = THREADS * IN_FLIGHT;
    for (int first = 0, turn = 0; first < count; first += chunk, ++turn) {
        const dim3 blocks((vectors + per_block - 1) / per_block, std::min(chunk, count - first));
        for (int pass = 0; pass < PASSES; ++pass)
            clip_pass<<<blocks, THREADS, 0, side.stream[turn % streams]>>>(
                reinterpret_cast<const float4*>(frames), first, vectors, pass);
    }
    for (int i = 0; i < streams; ++i) {
        cudaEventRecord(side.join[i], side.stream[i]);
        cudaStreamWaitEvent(stream, side.join[i]);
    }
    write_backgrounds<<<(count + 127) / 128, 128, 0, stream>>>(reinterpret_cast<Background*>(out),
                                                               count);
    return cudaGetLastError();
}

int frames_in(size_t bytes, int pixels) {
    return std::max(1, int(bytes / (sizeof(float) * size_t(pixels))));
}

extern "C" cudaError_t sweeps(const float* frames, float* out, int count, int pixels,
                              cudaStream_t stream) {
    return clip(frames, out, count, pixels, count, 1, stream);
}

extern "C" cudaError_t chunks(const float* frames, float* out, int count, int pixels,
                              cudaStream_t stream) {
    return clip(frames, out, count, pixels, frames_in(CHUNK_BYTES, pixels), 1, stream);
}

extern "C" cudaError_t overlapped(const float* frames, float* out, int count, int pixels,
                                  cudaStream_t stream) {
    const int chunk = frames_in(CHUNK_BYTES / MAX_STREAMS, pixels);
    return clip(frames, out, count, pixels, chunk, MAX_STREAMS, stream);
}
