// RMSNorm of rows that do not fit in the shared memory of one SM:
// out = x * rstd, rstd = 1 / sqrt(mean(x^2) + epsilon), per row.
//
//   two_kernels   One kernel computes rstd per row, a second one scales the rows. The rows do not
//                 stay in the L2 cache in between, so device memory is read twice and written
//                 once: 3 passes.
//   one_block     One block per row and one row per SM, read twice. The second read goes backwards,
//                 from what was read last, and is served by the L2 cache as far as that still holds
//                 the row: 132 rows of 256 KiB on an H200 are 33 of its 60 MiB. 2 to 3 passes.
//   cluster_4/8   The blocks of a cluster run at the same time and can read each other's shared
//                 memory (distributed shared memory, DSMEM). Each block keeps its part of the row
//                 in registers and publishes its sum of squares in shared memory. After a cluster
//                 barrier it reads the sums of its peers and scales its part. 2 passes.
//
// A row of 64 Ki floats takes 256 KiB, as much as all registers of an SM. In a cluster of 4, a part
// takes 64 KiB, so blocks of two rows share an SM, and one loads while the other waits at its
// barrier; in a cluster of 8, blocks of four. In a cluster of 2, one block would fill an SM.

#include <cooperative_groups.h>
#include <cuda_runtime.h>

namespace cg = cooperative_groups;

constexpr float EPSILON = 1e-5f;
constexpr int VECTORS = 4;            // of 4 floats, per thread of a cluster
constexpr int THREADS_PER_SM = 2048;  // of clusters: blocks of several rows share an SM

__device__ float squares(float4 v) { return v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w; }

__device__ float4 scaled(float4 v, float factor) {
    return make_float4(v.x * factor, v.y * factor, v.z * factor, v.w * factor);
}

// The sum over a block, valid in thread 0.
template <int THREADS>
__device__ float block_sum(float value) {
    __shared__ float warp_sums[THREADS / 32];
    for (int offset = 16; offset > 0; offset /= 2)
        value += __shfl_down_sync(~0u, value, offset);
    if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = value;
    __syncthreads();
    if (threadIdx.x == 0)
        for (int warp = 1; warp < THREADS / 32; ++warp) value += warp_sums[warp];
    return value;
}

// 1 / the root mean square of a row, by a block of 1024 threads, valid in thread 0.
__device__ float block_rstd(const float4* row, int vectors) {
    float sum = 0;
#pragma unroll 4
    for (int i = threadIdx.x; i < vectors; i += 1024) sum += squares(row[i]);
    return rsqrtf(block_sum<1024>(sum) / (4.0f * vectors) + EPSILON);
}

__global__ void __launch_bounds__(1024) row_rstd(const float4* x, float* rstd, int vectors) {
    const float scale = block_rstd(x + size_t(blockIdx.x) * vectors, vectors);
    if (threadIdx.x == 0) rstd[blockIdx.x] = scale;
}

__global__ void __launch_bounds__(1024)
scale_rows(const float4* x, const float* rstd, float4* out, int vectors) {
    const size_t start = size_t(blockIdx.y) * vectors;
    const int i = blockIdx.x * 1024 + threadIdx.x;
    if (i < vectors) out[start + i] = scaled(x[start + i], rstd[blockIdx.y]);
}

__global__ void __launch_bounds__(1024)
norm_one_block(const float4* x, float4* out, float* rstd, int vectors) {
    __shared__ float shared_scale;
    const size_t start = size_t(blockIdx.x) * vectors;
    float scale = block_rstd(x + start, vectors);
    if (threadIdx.x == 0) rstd[blockIdx.x] = shared_scale = scale;
    __syncthreads();
    scale = shared_scale;
#pragma unroll 4
    for (int i = vectors - 1 - threadIdx.x; i >= 0; i -= 1024)  // streaming: no more reuse
        __stcs(out + start + i, scaled(__ldcs(x + start + i), scale));
}

// Each block keeps its part of the row in registers: VECTORS per thread, all loaded before the first
// is used.
template <int BLOCKS, int THREADS>
__global__ void __launch_bounds__(THREADS, THREADS_PER_SM / THREADS)
norm_cluster(const float4* x, float4* out, float* rstd, int vectors) {
    __shared__ float part_sum;
    const cg::cluster_group cluster = cg::this_cluster();
    const int rank = cluster.block_rank(), row = blockIdx.x / BLOCKS;
    const int part_vectors = vectors / BLOCKS;
    const size_t start = size_t(row) * vectors + rank * part_vectors;

    float4 part[VECTORS];
#pragma unroll
    for (int k = 0; k < VECTORS; ++k) {
        const int i = threadIdx.x + k * THREADS;
        part[k] = i < part_vectors ? __ldcs(x + start + i) : make_float4(0, 0, 0, 0);
    }
    float sum = 0;
#pragma unroll
    for (int k = 0; k < VECTORS; ++k) sum += squares(part[k]);
    sum = block_sum<THREADS>(sum);
    if (threadIdx.x == 0) part_sum = sum;
    cluster.sync();  // all partial sums of this row are visible

    sum = 0;
    for (int peer = 0; peer < BLOCKS; ++peer) sum += *cluster.map_shared_rank(&part_sum, peer);
    cluster.barrier_arrive();  // this thread has read its peers' sums
    const float scale = rsqrtf(sum / (4.0f * vectors) + EPSILON);
#pragma unroll
    for (int k = 0; k < VECTORS; ++k) {
        const int i = threadIdx.x + k * THREADS;
        if (i < part_vectors) out[start + i] = scaled(part[k], scale);
    }
    if (rank == 0 && threadIdx.x == 0) rstd[row] = scale;
    cluster.barrier_wait();  // a block must not exit before its peers have read its sum
}

extern "C" cudaError_t two_kernels(const float* x, float* out, float* rstd, int rows, int columns,
                                   cudaStream_t stream) {
    if (columns % 4) return cudaErrorInvalidValue;
    const int vectors = columns / 4;
    const auto* vectors_in = reinterpret_cast<const float4*>(x);
    row_rstd<<<rows, 1024, 0, stream>>>(vectors_in, rstd, vectors);
    scale_rows<<<dim3((vectors + 1023) / 1024, rows), 1024, 0, stream>>>(
        vectors_in, rstd, reinterpret_cast<float4*>(out), vectors);
    return cudaGetLastError();
}

extern "C" cudaError_t one_block(const float* x, float* out, float* rstd, int rows, int columns,
                                 cudaStream_t stream) {
    if (columns % 4) return cudaErrorInvalidValue;
    // The unused reservation is half of an SM's shared memory. With what each block takes besides,
    // a second block does not fit, so no more rows than SMs share the L2 cache. Registers and
    // threads would allow two.
    int device = 0, bytes = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
    bytes /= 2;
    if (cudaError_t error = cudaFuncSetAttribute(
            norm_one_block, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes))
        return error;
    norm_one_block<<<rows, 1024, bytes, stream>>>(reinterpret_cast<const float4*>(x),
                                                  reinterpret_cast<float4*>(out), rstd, columns / 4);
    return cudaGetLastError();
}

// Launch one cluster of BLOCKS blocks per row.
template <int BLOCKS, int THREADS>
cudaError_t cluster_per_row(const float* x, float* out, float* rstd, int rows, int columns,
                            cudaStream_t stream) {
    if (columns % (4 * BLOCKS) || columns > 4 * BLOCKS * THREADS * VECTORS)
        return cudaErrorInvalidValue;
    cudaLaunchAttribute cluster;
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {unsigned(BLOCKS), 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(rows * BLOCKS);
    config.blockDim = dim3(THREADS);
    config.stream = stream;
    config.attrs = &cluster;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, norm_cluster<BLOCKS, THREADS>,
                              reinterpret_cast<const float4*>(x), reinterpret_cast<float4*>(out),
                              rstd, columns / 4);
}

extern "C" cudaError_t cluster_4(const float* x, float* out, float* rstd, int rows, int columns,
                                 cudaStream_t stream) {
    return cluster_per_row<4, 1024>(x, out, rstd, rows, columns, stream);
}

extern "C" cudaError_t cluster_8(const float* x, float* out, float* rstd, int rows, int columns,
                                 cudaStream_t stream) {
    return cluster_per_row<8, 512>(x, out, rstd, rows, columns, stream);
}
