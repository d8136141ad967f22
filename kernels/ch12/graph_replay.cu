// Euler steps of angle' = -sin(angle), two tiny kernels per step, launched one by one from C++.
//
// The kernels are split as an eager framework would run them: one writes sin(angle) to a temporary
// array, the next one subtracts it. A launch costs the host a few microseconds, more than the
// kernel takes. No Python and no dispatcher is involved, so a CUDA graph of these launches saves
// only what the launches themselves cost.

#include <cuda_runtime.h>

constexpr int THREADS = 128;
constexpr float TIME_STEP = 0.01f;

__global__ void sine(const float* angle, float* result, int n) {
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i < n) result[i] = sinf(angle[i]);
}

__global__ void subtract(float* angle, const float* sine, int n) {
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i < n) angle[i] -= TIME_STEP * sine[i];
}

// `temporary` holds n floats.
extern "C" cudaError_t integrate(const float* angle, float* out, float* temporary, int n, int steps,
                                 cudaStream_t stream) {
    const int blocks = (n + THREADS - 1) / THREADS;
    cudaMemcpyAsync(out, angle, n * sizeof(float), cudaMemcpyDeviceToDevice, stream);
    for (int step = 0; step < steps; ++step) {
        sine<<<blocks, THREADS, 0, stream>>>(out, temporary, n);
        subtract<<<blocks, THREADS, 0, stream>>>(out, temporary, n);
    }
    return cudaGetLastError();
}
