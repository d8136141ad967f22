// RMSNorm of rows that are longer than one multiprocessor can hold:
// out = x * rstd, rstd = 1 / sqrt(mean(x^2) + epsilon), a row at a time.
//
//   two_kernels   One kernel sums the squares of each row, a second one scales the row. The rows
//                 do not fit in the L2 cache between the two, so device memory is read twice and
//                 written once: 3 passes.
//   one_block     One block walks over its row twice. The rows of the blocks that run at one time
//                 take about as much as the L2 cache holds, so most of the second walk should find
//                 its row there.
//   cluster_4/8   The blocks of a cluster run at the same time on neighbouring multiprocessors and
//                 may read each other's shared memory (DSMEM). Each block keeps its part of a row
//                 in shared memory and publishes one sum of squares; after one cluster barrier it
//                 reads the sums of its peers and scales what it still holds. 2 passes, and no
//                 second walk.
//
// In clusters of 4 a block needs 64 KiB for its part of a row of 64 Ki floats, so that blocks of
// several rows take turns on a multiprocessor. With 128 KiB, in clusters of 2, one has it to itself,
// and nothing is done while it waits.

#include <cooperative_groups.h>
#include <cstdint>
#include <cuda_runtime.h>

namespace cg = cooperative_groups;

constexpr float EPSILON = 1e-5f;

__device__ float squares(float4 v) { return v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w; }

__device__ float4 scaled(float4 v, float by) {
    return make_float4(v.x * by, v.y * by, v.z * by, v.w * by);
}

// The sum over a block, in thread 0.
template <int THREADS>
__device__ float block_sum(float value) {
    __shared__ float warps[THREADS / 32];
    for (int lane = 16; lane > 0; lane /= 2) value += __shfl_down_sync(~0u, value, lane);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
    __syncthreads();
    if (threadIdx.x == 0)
        for (int warp = 1; warp < THREADS / 32; ++warp) value += warps[warp];
    return value;
}

// 1 / the root mean square of a row, for a block of 1024, in thread 0.
__device__ float rstd_of(const float4* row, int vectors) {
    float sum = 0;
#pragma unroll 4
    for (int i = threadIdx.x; i < vectors; i += 1024) sum += squares(row[i]);
    return rsqrtf(block_sum<1024>(sum) / (4.0f * vectors) + EPSILON);
}

__global__ void __launch_bounds__(1024) row_rstd(const float4* x, float* rstd, int vectors) {
    const float scale = rstd_of(x + size_t(blockIdx.x) * vectors, vectors);
    if (threadIdx.x == 0) rstd[blockIdx.x] = scale;
}

__global__ void __launch_bounds__(1024)
scale_rows(const float4* x, const float* rstd, float4* out, int vectors) {
    const size_t start = size_t(blockIdx.y) * vectors;
    const int i = blockIdx.x * 1024 + threadIdx.x;
    if (i < vectors) out[start + i] = scaled(x[start + i], rstd[blockIdx.y]);
}

__global__ void __launch_bounds__(1024, 2)
norm_one_block(const float4* x, float4* out, float* rstd, int vectors) {
    __shared__ float shared;
    const size_t start = size_t(blockIdx.x) * vectors;
    float scale = rstd_of(x + start, vectors);
    if (threadIdx.x == 0) rstd[blockIdx.x] = shared = scale;
    __syncthreads();
    scale = shared;
#pragma unroll 4
    for (int i = threadIdx.x; i < vectors; i += 1024)  // the last use: both may leave the cache
        __stcs(out + start + i, scaled(__ldcs(x + start + i), scale));
}

template <int BLOCKS, int THREADS>
__global__ void __launch_bounds__(THREADS)
norm_cluster(const float4* x, float4* out, float* rstd, int vectors) {
    extern __shared__ float4 held[];
    __shared__ float mine;
    const cg::cluster_group cluster = cg::this_cluster();
    const int rank = cluster.block_rank(), row = blockIdx.x / BLOCKS, part = vectors / BLOCKS;
    const size_t start = size_t(row) * vectors + rank * part;

    // 16 bytes at a time straight into shared memory: all of the part is under way at once
    const uint32_t to = __cvta_generic_to_shared(held);
    for (int i = threadIdx.x; i < part; i += THREADS)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                     :: "r"(to + i * 16), "l"(x + start + i) : "memory");
    asm volatile("cp.async.wait_all;" ::: "memory");

    float sum = 0;  // a thread reads back what it copied itself, so no barrier is needed yet
    for (int i = threadIdx.x; i < part; i += THREADS) sum += squares(held[i]);
    sum = block_sum<THREADS>(sum);
    if (threadIdx.x == 0) mine = sum;
    cluster.sync();  // all sums of this row are published

    sum = 0;
    for (int peer = 0; peer < BLOCKS; ++peer) sum += *cluster.map_shared_rank(&mine, peer);
    const float scale = rsqrtf(sum / (4.0f * vectors) + EPSILON);
    for (int i = threadIdx.x; i < part; i += THREADS) out[start + i] = scaled(held[i], scale);
    if (rank == 0 && threadIdx.x == 0) rstd[row] = scale;
    cluster.sync();  // a block stays until its peers have read its sum
}

extern "C" cudaError_t two_kernels(const float* x, float* out, float* rstd, int rows, int columns,
                                   cudaStream_t stream) {
    if (columns % 4) return cudaErrorInvalidValue;
    const int vectors = columns / 4;
    const auto* from = reinterpret_cast<const float4*>(x);
    row_rstd<<<rows, 1024, 0, stream>>>(from, rstd, vectors);
    scale_rows<<<dim3((vectors + 1023) / 1024, rows), 1024, 0, stream>>>(
        from, rstd, reinterpret_cast<float4*>(out), vectors);
    return cudaGetLastError();
}

extern "C" cudaError_t one_block(const float* x, float* out, float* rstd, int rows, int columns,
                                 cudaStream_t stream) {
    if (columns % 4) return cudaErrorInvalidValue;
    norm_one_block<<<rows, 1024, 0, stream>>>(reinterpret_cast<const float4*>(x),
                                              reinterpret_cast<float4*>(out), rstd, columns / 4);
    return cudaGetLastError();
}

template <int BLOCKS, int THREADS>
cudaError_t launch(const float* x, float* out, float* rstd, int rows, int columns,
                   cudaStream_t stream) {
    if (columns % (4 * BLOCKS)) return cudaErrorInvalidValue;
    const auto kernel = norm_cluster<BLOCKS, THREADS>;
    const int bytes = columns / BLOCKS * 4;
    if (cudaError_t error = cudaFuncSetAttribute(
            kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes))
        return error;
    cudaLaunchAttribute cluster;
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {BLOCKS, 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(rows * BLOCKS);
    config.blockDim = dim3(THREADS);
    config.dynamicSmemBytes = bytes;
    config.stream = stream;
    config.attrs = &cluster;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, kernel, reinterpret_cast<const float4*>(x),
                              reinterpret_cast<float4*>(out), rstd, columns / 4);
}

extern "C" cudaError_t cluster_4(const float* x, float* out, float* rstd, int rows, int columns,
                                 cudaStream_t stream) {
    return launch<4, 512>(x, out, rstd, rows, columns, stream);
}

extern "C" cudaError_t cluster_8(const float* x, float* out, float* rstd, int rows, int columns,
                                 cudaStream_t stream) {
    return launch<8, 256>(x, out, rstd, rows, columns, stream);
}
