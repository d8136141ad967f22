// out[i] = table[rows[i]], for rows of 128 floats of a table in pinned host memory.
//
// With unified addressing, a pinned page has the same address on the host and on the GPU. A load
// from it goes over PCIe as a read of up to 128 bytes, for which the warp waits a microsecond or
// two. So the link is busy only if many such reads are in flight: each warp reads a row of 512
// bytes with one 16-byte load per lane, and loads two rows before it stores the first.

#include <cuda_runtime.h>

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int ROWS_PER_WARP = 2;
constexpr int VECTORS = 32;  // 16-byte vectors per row, one per lane

__global__ void gather_kernel(const float4* table, const int* rows, float4* out, int count) {
    const int warp = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    float4 vectors[ROWS_PER_WARP];
#pragma unroll
    for (int k = 0; k < ROWS_PER_WARP; ++k) {
        const int i = warp * ROWS_PER_WARP + k;
        if (i < count) vectors[k] = table[size_t(rows[i]) * VECTORS + lane];
    }
#pragma unroll
    for (int k = 0; k < ROWS_PER_WARP; ++k) {
        const int i = warp * ROWS_PER_WARP + k;
        if (i < count) out[size_t(i) * VECTORS + lane] = vectors[k];
    }
}

extern "C" cudaError_t gather(const float* table, const int* rows, float* out, int count,
                              cudaStream_t stream) {
    constexpr int PER_BLOCK = WARPS * ROWS_PER_WARP;
    const auto* vectors = reinterpret_cast<const float4*>(table);
    gather_kernel<<<(count + PER_BLOCK - 1) / PER_BLOCK, THREADS, 0, stream>>>(
        vectors, rows, reinterpret_cast<float4*>(out), count);
    return cudaGetLastError();
}
