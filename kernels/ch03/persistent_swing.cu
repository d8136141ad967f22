// Simulates n pendulums for a number of time steps; `in` and `out` may be the same array.
//
// The kernel is persistent: as many blocks as `sms` SMs hold at a time, each with a loop over
// pendulums. All of them run from the start of the kernel to its end; until then, no block of
// another kernel finds room on these SMs. A kernel of few pendulums has few blocks.

#include <algorithm>
#include <cuda_runtime.h>

constexpr int THREADS = 256;
constexpr float TIME_STEP = 5e-4f;

__global__ void __launch_bounds__(THREADS)
    swing_kernel(const float* in, float* out, int n, int steps) {
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < n; i += gridDim.x * THREADS) {
        float angle = in[i];
#pragma unroll 1
        for (int k = 0; k < steps; ++k) angle -= TIME_STEP * sinf(angle);
        out[i] = angle;
    }
}

extern "C" cudaError_t swing(const float* in, float* out, int n, int steps, int sms,
                             cudaStream_t stream) {
    int blocks_per_sm;
    if (cudaError_t error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(
            &blocks_per_sm, swing_kernel, THREADS, 0))
        return error;
    const int blocks = std::min((n + THREADS - 1) / THREADS, sms * blocks_per_sm);
    swing_kernel<<<blocks, THREADS, 0, stream>>>(in, out, n, steps);
    return cudaGetLastError();
}

__global__ void sm_ids_kernel(int* out) {
    if (threadIdx.x == 0) asm volatile("mov.u32 %0, %%smid;" : "=r"(out[blockIdx.x]));
}

// out[i] = the SM that block i runs on.
extern "C" cudaError_t sm_ids(int* out, int blocks, cudaStream_t stream) {
    sm_ids_kernel<<<blocks, THREADS, 0, stream>>>(out);
    return cudaGetLastError();
}
