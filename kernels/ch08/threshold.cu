// A costly function of the few elements over a threshold, the others left as they are.
//
// The function is the root w of w * exp(w) = x (Lambert's W), found by halving an interval 24
// times: some 200 instructions. A warp runs a branch when any of its 32 lanes wants it, and the
// other lanes are switched off for as long. With 7 % of the elements over the threshold, 9 of 10
// warps have at least one.
//
//   branch     if (x > threshold) on each element: 9 of 10 warps pay for all lanes.
//   compacted  A block reads 2048 elements into shared memory and notes in a queue which ones are
//              over the threshold (about 140; an atomic counter hands out the places). Then its
//              threads take elements from the queue, neighbours side by side: 5 warps work with all
//              lanes, the others with none. The tile is written as it was read, coalesced.

#include <cstdint>
#include <cuda_runtime.h>

constexpr int THREADS = 256;
constexpr int EACH = 8;  // elements that a thread loads
constexpr int TILE = EACH * THREADS;

// For x of 0 to 14: W(14) is below 2.
__device__ float lambert_w(float x) {
    float low = 0, high = 2;
    for (int i = 0; i < 24; ++i) {
        const float middle = 0.5f * (low + high);
        if (middle * __expf(middle) < x)
            low = middle;
        else
            high = middle;
    }
    return high;
}

__global__ void __launch_bounds__(THREADS)
    apply_branch(const float* in, float* out, float threshold, size_t n) {
    const size_t i = size_t(blockIdx.x) * THREADS + threadIdx.x;
    if (i >= n) return;
    const float x = in[i];
    out[i] = x > threshold ? lambert_w(x) : x;
}

__global__ void __launch_bounds__(THREADS)
    apply_compacted(const float* in, float* out, float threshold, size_t n) {
    __shared__ float tile[TILE];
    __shared__ uint16_t queue[TILE];
    __shared__ int queued;
    const size_t begin = size_t(blockIdx.x) * TILE + threadIdx.x;
    float x[EACH];
    for (int k = 0; k < EACH; ++k)
        x[k] = begin + k * THREADS < n ? in[begin + k * THREADS] : threshold;
    if (threadIdx.x == 0) queued = 0;
    __syncthreads();
    for (int k = 0; k < EACH; ++k) {
        const int at = k * THREADS + threadIdx.x;
        tile[at] = x[k];
        if (x[k] > threshold) queue[atomicAdd(&queued, 1)] = at;
    }
    __syncthreads();
    for (int k = threadIdx.x; k < queued; k += THREADS) tile[queue[k]] = lambert_w(tile[queue[k]]);
    __syncthreads();
    for (int k = 0; k < EACH; ++k)
        if (begin + k * THREADS < n) out[begin + k * THREADS] = tile[k * THREADS + threadIdx.x];
}

extern "C" cudaError_t branch(const float* in, float* out, float threshold, int n,
                              cudaStream_t stream) {
    apply_branch<<<n / THREADS + 1, THREADS, 0, stream>>>(in, out, threshold, n);
    return cudaGetLastError();
}

extern "C" cudaError_t compacted(const float* in, float* out, float threshold, int n,
                                 cudaStream_t stream) {
    apply_compacted<<<n / TILE + 1, THREADS, 0, stream>>>(in, out, threshold, n);
    return cudaGetLastError();
}
