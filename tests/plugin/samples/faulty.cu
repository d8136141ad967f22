// A write one element past the end of an array: what compute-sanitizer must find.

#include <cuda_runtime.h>

__global__ void write_beyond(float* out, int n) {
    if (threadIdx.x == 0) out[n] = 1.0f;
}

extern "C" cudaError_t beyond(float* out, int n, cudaStream_t stream) {
    write_beyond<<<1, 32, 0, stream>>>(out, n);
    return cudaGetLastError();
}
