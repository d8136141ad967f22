// out = silu(x * scale + shift) + residual, for rows of 4096 columns.
//
//   three_kernels  Scale and shift, SiLU, and the addition are kernels of their own. Each writes
//                  its result to `out`, where the next one reads it: seven arrays in all.
//   fused          One kernel keeps the intermediate values in registers: three arrays.
//
// All kernels use 16-byte accesses, one per thread and array.

#include <cuda_runtime.h>

constexpr int WIDTH = 4096;
constexpr int THREADS = 256;

__device__ float4 scale_shift(float4 x, float4 scale, float4 shift) {
    return {fmaf(x.x, scale.x, shift.x), fmaf(x.y, scale.y, shift.y),
            fmaf(x.z, scale.z, shift.z), fmaf(x.w, scale.w, shift.w)};
}

__device__ float silu(float x) { return x / (1 + __expf(-x)); }

__device__ float4 silu(float4 x) { return {silu(x.x), silu(x.y), silu(x.z), silu(x.w)}; }

__device__ float4 add(float4 a, float4 b) {
    return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}

__device__ int index() { return blockIdx.x * THREADS + threadIdx.x; }
__device__ int column(int i) { return i % (WIDTH / 4); }

__global__ void scale_shift_kernel(const float4* x, const float4* scale, const float4* shift,
                                   float4* out) {
    const int i = index();
    out[i] = scale_shift(x[i], scale[column(i)], shift[column(i)]);
}

__global__ void silu_kernel(float4* out) { out[index()] = silu(out[index()]); }

__global__ void add_kernel(const float4* residual, float4* out) {
    const int i = index();
    out[i] = add(out[i], residual[i]);
}

__global__ void fused_kernel(const float4* x, const float4* scale, const float4* shift,
                             const float4* residual, float4* out) {
    const int i = index();
    out[i] = add(silu(scale_shift(x[i], scale[column(i)], shift[column(i)])), residual[i]);
}

int blocks_for(int rows) { return rows * (WIDTH / 4 / THREADS); }

extern "C" cudaError_t three_kernels(const float4* x, const float4* scale, const float4* shift,
                                     const float4* residual, float4* out, int rows,
                                     cudaStream_t stream) {
    const int blocks = blocks_for(rows);
    scale_shift_kernel<<<blocks, THREADS, 0, stream>>>(x, scale, shift, out);
    silu_kernel<<<blocks, THREADS, 0, stream>>>(out);
    add_kernel<<<blocks, THREADS, 0, stream>>>(residual, out);
    return cudaGetLastError();
}

extern "C" cudaError_t fused(const float4* x, const float4* scale, const float4* shift,
                             const float4* residual, float4* out, int rows, cudaStream_t stream) {
    fused_kernel<<<blocks_for(rows), THREADS, 0, stream>>>(x, scale, shift, residual, out);
    return cudaGetLastError();
}
