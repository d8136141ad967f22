// Simulates n pendulums for a number of time steps; `in` and `out` may be the same array.
//
// The work of a thread is short, and there is no persistent loop: blocks end all the time, and each
// gives the GPU a chance to start a block of another kernel.

#include <cuda_runtime.h>

constexpr int THREADS = 256;
constexpr float TIME_STEP = 5e-4f;

__global__ void swing_kernel(const float* in, float* out, int n, int steps) {
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= n) return;
    float angle = in[i];
#pragma unroll 1
    for (int k = 0; k < steps; ++k) angle -= TIME_STEP * sinf(angle);
    out[i] = angle;
}

extern "C" cudaError_t swing(const float* in, float* out, int n, int steps, cudaStream_t stream) {
    swing_kernel<<<(n + THREADS - 1) / THREADS, THREADS, 0, stream>>>(in, out, n, steps);
    return cudaGetLastError();
}
