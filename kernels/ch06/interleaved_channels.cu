// Applies a different function to each of eight interleaved channels: out[i] = f[i % 8](in[i]).
//
// A warp has one instruction stream. At the switch over the functions, the hardware executes each
// case that any of its 32 lanes needs, with the other lanes masked off (warp divergence). Both
// kernels load and store the same tiles of 1024 elements coalesced, four elements per thread. They
// differ in which thread computes which element:
//
//   by_lane   Each thread computes the elements that it has loaded. Neighbouring lanes have
//             neighbouring channels, so every warp executes all eight functions, each with four
//             active lanes.
//   by_warp   The block exchanges the tile through shared memory, so that warp c computes channel c
//             and executes one function with all lanes active. One unused word per 32 keeps the
//             accesses with a stride of eight words free of bank conflicts.

#include <cuda_runtime.h>

constexpr int CHANNELS = 8;
constexpr int THREADS = 32 * CHANNELS;  // one warp per channel
constexpr int ITEMS = 4;                // elements per thread
constexpr int TILE = ITEMS * THREADS;

__device__ void apply(int channel, float (&x)[ITEMS]) {
#define CASE(CHANNEL, FUNCTION)                            \
    case CHANNEL:                                          \
        for (int k = 0; k < ITEMS; ++k) x[k] = FUNCTION(x[k]); \
        break
    switch (channel) {
        CASE(0, sinf);
        CASE(1, expf);
        CASE(2, log1pf);
        CASE(3, erff);
        CASE(4, tanhf);
        CASE(5, atanf);
        CASE(6, lgammaf);
        CASE(7, j0f);
    }
#undef CASE
}

__global__ void __launch_bounds__(THREADS) apply_by_lane(const float* in, float* out, size_t n) {
    const size_t begin = size_t(blockIdx.x) * TILE + threadIdx.x;
    float x[ITEMS];
    for (int k = 0; k < ITEMS; ++k)
        x[k] = begin + k * THREADS < n ? in[begin + k * THREADS] : 0.5f;
    apply(threadIdx.x % CHANNELS, x);  // CHANNELS divides THREADS: one channel per thread
    for (int k = 0; k < ITEMS; ++k)
        if (begin + k * THREADS < n) out[begin + k * THREADS] = x[k];
}

__device__ int padded(int index) { return index + index / 32; }

__global__ void __launch_bounds__(THREADS) apply_by_warp(const float* in, float* out, size_t n) {
    __shared__ float tile[TILE + TILE / 32];
    const size_t begin = size_t(blockIdx.x) * TILE + threadIdx.x;
    float x[ITEMS];
    for (int k = 0; k < ITEMS; ++k)
        x[k] = begin + k * THREADS < n ? in[begin + k * THREADS] : 0.5f;
    for (int k = 0; k < ITEMS; ++k) tile[padded(k * THREADS + threadIdx.x)] = x[k];
    __syncthreads();
    const int channel = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int k = 0; k < ITEMS; ++k)
        x[k] = tile[padded(k * THREADS + lane * CHANNELS + channel)];
    apply(channel, x);
    for (int k = 0; k < ITEMS; ++k)
        tile[padded(k * THREADS + lane * CHANNELS + channel)] = x[k];
    __syncthreads();
    for (int k = 0; k < ITEMS; ++k)
        if (begin + k * THREADS < n)
            out[begin + k * THREADS] = tile[padded(k * THREADS + threadIdx.x)];
}

template <typename Kernel>
cudaError_t launch(Kernel kernel, const float* in, float* out, int n, cudaStream_t stream) {
    kernel<<<n / TILE + 1, THREADS, 0, stream>>>(in, out, n);
    return cudaGetLastError();
}

extern "C" cudaError_t by_lane(const float* in, float* out, int n, cudaStream_t stream) {
    return launch(apply_by_lane, in, out, n, stream);
}

extern "C" cudaError_t by_warp(const float* in, float* out, int n, cudaStream_t stream) {
    return launch(apply_by_warp, in, out, n, stream);
}
