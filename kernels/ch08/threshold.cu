// Apply an expensive function to the elements above a threshold and copy the others.
//
// The function is Lambert's W, the root w of w * exp(w) = x, in two versions: "costly" with 24
// bisection steps (about 200 instructions), and "cheap" with a step of Halley's method (about 30).
// Bisection is there to be expensive; a faster method is the better remedy wherever there is one.
//
// A warp executes a branch when any of its 32 lanes takes it, with the other lanes masked off. With
// 7 % of the elements above the threshold, 9 of 10 warps have at least one such lane. All kernels
// load a tile of 2048 elements per block, 8 per thread, before they compute.
//
//   branch        if (x > threshold) per element: 9 of 10 warps execute the function (costly).
//   compacted     Stream compaction in shared memory (costly). A block appends the indices of the
//                 elements above the threshold (about 140) to a queue with an atomic counter.
//                 Consecutive threads then process consecutive queue entries: 5 warps with nearly
//                 all lanes active instead of 57 with two or three. The tile is stored coalesced.
//   branch_cheap  The branch around the cheap function.
//   select_cheap  Every lane computes the cheap function, and a select (or a predicated last
//                 instruction) keeps the result or x. No warp diverges, and none skips it.

#include <cstdint>
#include <cuda_runtime.h>

constexpr int THREADS = 256;
constexpr int ITEMS_PER_THREAD = 8;
constexpr int TILE = ITEMS_PER_THREAD * THREADS;

// For 0 <= x <= 14, where W(x) < 2.
__device__ float by_bisection(float x) {
    float low = 0, high = 2;
    for (int i = 0; i < 24; ++i) {
        const float mid = 0.5f * (low + high);
        if (mid * __expf(mid) < x)
            low = mid;
        else
            high = mid;
    }
    return high;
}

// For 1.4 <= x <= 14. For any other x, the result is some number or NaN.
__device__ float by_halley(float x) {
    const float guess = 0.6897f * __logf(1 + x) + 0.0924f;  // at most 0.004 from W(x)
    const float e = __expf(guess), f = guess * e - x, g = guess + 1;
    return guess - __fdividef(2 * g * f, 2 * e * g * g - (guess + 2) * f);
}

__device__ void load_tile(float (&x)[ITEMS_PER_THREAD], const float* in, size_t begin, size_t n,
                          float padding) {
    for (int k = 0; k < ITEMS_PER_THREAD; ++k)
        x[k] = begin + k * THREADS < n ? in[begin + k * THREADS] : padding;
}

template <float FUNCTION(float)>
__device__ void apply_per_element(const float* in, float* out, float threshold, size_t n) {
    const size_t begin = size_t(blockIdx.x) * TILE + threadIdx.x;
    float x[ITEMS_PER_THREAD];
    load_tile(x, in, begin, n, threshold);
    for (int k = 0; k < ITEMS_PER_THREAD; ++k)
        if (x[k] > threshold) x[k] = FUNCTION(x[k]);
    for (int k = 0; k < ITEMS_PER_THREAD; ++k)
        if (begin + k * THREADS < n) out[begin + k * THREADS] = x[k];
}

__global__ void __launch_bounds__(THREADS)
    apply_branch(const float* in, float* out, float threshold, size_t n) {
    apply_per_element<by_bisection>(in, out, threshold, n);
}

__global__ void __launch_bounds__(THREADS)
    apply_cheap_branch(const float* in, float* out, float threshold, size_t n) {
    apply_per_element<by_halley>(in, out, threshold, n);
}

// PTX, because the compiler turns `x > threshold ? f(x) : x` into a branch around f.
__device__ float select(float x, float threshold, float above, float otherwise) {
    float result;
    asm("{ .reg .pred p; setp.gt.f32 p, %1, %2; selp.f32 %0, %3, %4, p; }"
        : "=f"(result)
        : "f"(x), "f"(threshold), "f"(above), "f"(otherwise));
    return result;
}

__global__ void __launch_bounds__(THREADS)
    apply_cheap_select(const float* in, float* out, float threshold, size_t n) {
    const size_t begin = size_t(blockIdx.x) * TILE + threadIdx.x;
    float x[ITEMS_PER_THREAD];
    load_tile(x, in, begin, n, threshold);
    for (int k = 0; k < ITEMS_PER_THREAD; ++k)
        x[k] = select(x[k], threshold, by_halley(x[k]), x[k]);
    for (int k = 0; k < ITEMS_PER_THREAD; ++k)
        if (begin + k * THREADS < n) out[begin + k * THREADS] = x[k];
}

__global__ void __launch_bounds__(THREADS)
    apply_compacted(const float* in, float* out, float threshold, size_t n) {
    __shared__ float tile[TILE];
    __shared__ uint16_t queue[TILE];
    __shared__ int queued;
    const size_t begin = size_t(blockIdx.x) * TILE + threadIdx.x;
    float x[ITEMS_PER_THREAD];
    load_tile(x, in, begin, n, threshold);
    if (threadIdx.x == 0) queued = 0;
    __syncthreads();
    for (int k = 0; k < ITEMS_PER_THREAD; ++k) {
        const int index = k * THREADS + threadIdx.x;
        tile[index] = x[k];
        if (x[k] > threshold) queue[atomicAdd(&queued, 1)] = index;
    }
    __syncthreads();
    for (int k = threadIdx.x; k < queued; k += THREADS)
        tile[queue[k]] = by_bisection(tile[queue[k]]);
    __syncthreads();
    for (int k = 0; k < ITEMS_PER_THREAD; ++k)
        if (begin + k * THREADS < n) out[begin + k * THREADS] = tile[k * THREADS + threadIdx.x];
}

extern "C" cudaError_t branch(const float* in, float* out, float threshold, int n,
                              cudaStream_t stream) {
    apply_branch<<<n / TILE + 1, THREADS, 0, stream>>>(in, out, threshold, n);
    return cudaGetLastError();
}

extern "C" cudaError_t compacted(const float* in, float* out, float threshold, int n,
                                 cudaStream_t stream) {
    apply_compacted<<<n / TILE + 1, THREADS, 0, stream>>>(in, out, threshold, n);
    return cudaGetLastError();
}

extern "C" cudaError_t branch_cheap(const float* in, float* out, float threshold, int n,
                                    cudaStream_t stream) {
    apply_cheap_branch<<<n / TILE + 1, THREADS, 0, stream>>>(in, out, threshold, n);
    return cudaGetLastError();
}

extern "C" cudaError_t select_cheap(const float* in, float* out, float threshold, int n,
                                    cudaStream_t stream) {
    apply_cheap_select<<<n / TILE + 1, THREADS, 0, stream>>>(in, out, threshold, n);
    return cudaGetLastError();
}
