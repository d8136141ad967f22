// out = a * b^T in bf16 with fp32 sums; m is a multiple of 512, n of 256, k of 64 (sm_90a).
//
// Warp-specialised GEMM with one block per SM, as `tma_store` of wgmma_ladder.cu: a producer warp
// loads tiles of 64 columns of both operands with TMA, two consumer warpgroups multiply them, and
// TMA stores the result. Only the source of the tiles of b differs:
//
//   no_cluster      Tiles of 128 x 128. Each block loads its tiles of a and of b: 32 KiB per step.
//   cluster_2       Two blocks form a cluster and compute tiles that lie below each other in the
//                   result, so they need the same tile of b. Each loads one half of it and
//                   multicasts it to both: 24 KiB per block and step from the L2 cache.
//   cluster_4       Four blocks load a quarter each: 20 KiB per block and step.
//   wide_cluster_2  Clusters of two with tiles of 128 x 256, those of `tma_store`: 32 KiB per block
//                   and step instead of 48.
//
// A stage is overwritten in all blocks of the cluster at once. So a producer may load it again only
// when the consumers of all blocks have released it: each consumer warp arrives at the `empty`
// mbarrier of every block. The `full` mbarrier of a block expects all bytes of its own stage,
// whichever block issues the copies.

#include "hopper.cuh"

constexpr int TILE_M = 128, THREADS = 384;
constexpr int CONSUMER_WARPS = 8;
constexpr int A_BYTES = TILE_M * ROW_BYTES;
constexpr int PART_BYTES = 64 * ROW_BYTES;  // a staged part of the result: 64 x 64

// Tiles of 128 x COLUMNS, and as many stages as fit: six of 32 KiB, or four of 48.
template <int COLUMNS>
struct Tile {
    static constexpr int N = COLUMNS, STAGES = COLUMNS == 128 ? 6 : 4;
    static constexpr int SUMS = N / 2;  // of a consumer thread: 64 x N over 128 threads
    static constexpr int STAGE_BYTES = A_BYTES + N * ROW_BYTES;
    static constexpr int SMEM_BYTES = STAGES * STAGE_BYTES + 4 * PART_BYTES + SWIZZLE_ALIGN;
};

__device__ uint32_t cluster_rank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ void cluster_sync() {
    __syncwarp();  // .aligned: all threads of a warp execute it together
    asm volatile("barrier.cluster.arrive.release.aligned;\n"
                 "barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Arrive at the mbarrier that lies at the same address in block `rank` of the cluster. Consumers
// have only read, so there are no writes to release: `.release.cluster` would add a fence of the
// whole GPU (MEMBAR.ALL.GPU) to each arrival.
__device__ void arrive_in_block(uint64_t* barrier, uint32_t rank) {
    asm volatile("{\n"
                 ".reg .b32 remote;\n"
                 "mapa.shared::cluster.u32 remote, %0, %1;\n"
                 "mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [remote];\n"
                 "}" :: "r"(shared_address(barrier)), "r"(rank) : "memory");
}

// Load a tile to the same address in each block of `mask`, and count its bytes at the mbarrier that
// lies at the same address there.
__device__ void tma_multicast_2d(uint32_t to, const CUtensorMap* map, int column, int row,
                                 uint64_t* barrier, uint16_t mask) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;"
                 :: "r"(to), "l"(map), "r"(column), "r"(row), "r"(shared_address(barrier)),
                    "h"(mask) : "memory");
}

// Stage the 64 x N results of a warpgroup in parts of 64 x 64, in two buffers by turns.
template <int SUMS>
__device__ void store_parts(const float (&acc)[SUMS], uint32_t buffers, const CUtensorMap* out,
                            int row, int column, int warpgroup) {
    const bool issuer = threadIdx.x % 128 == 0;
#pragma unroll
    for (int part = 0; part < SUMS / 32; ++part) {
        const uint32_t buffer = buffers + part % 2 * PART_BYTES;
        if (issuer) tma_store_wait_read<1>();  // the last but one store has read this buffer
        warpgroup_sync(warpgroup);
        stage_fragments(acc + part * 32, buffer, threadIdx.x / 32 % 4 * 16);
        fence_async_proxy();
        warpgroup_sync(warpgroup);
        if (issuer) tma_store_2d(out, buffer, column + part * 64, row);
    }
}

template <int CLUSTER, int N>
__device__ void gemm(const CUtensorMap* a, const CUtensorMap* b, const CUtensorMap* out, int m,
                     int n, int k) {
    constexpr int STAGES = Tile<N>::STAGES, STAGE_BYTES = Tile<N>::STAGE_BYTES;
    extern __shared__ unsigned char memory[];
    __shared__ uint64_t full[STAGES], empty[STAGES];
    const uint32_t tiles = swizzle_aligned(memory);
    const int steps = k / TILE_K, tile_count = m / TILE_M * (n / N);
    const int warpgroup = threadIdx.x / 128;
    if (threadIdx.x == 0) {
        for (auto& barrier : full) mbarrier_init(&barrier, 1);
        for (auto& barrier : empty) mbarrier_init(&barrier, CONSUMER_WARPS * CLUSTER);
        fence_mbarrier_init();
    }
    if (CLUSTER > 1)
        cluster_sync();
    else
        __syncthreads();
    int stage = 0, parity = 0;
    auto advance = [&] { parity ^= (stage = (stage + 1) % STAGES) == 0; };
    auto release = [&](uint64_t* barrier) {
        const int lane = threadIdx.x % 32;
        if (CLUSTER == 1 && lane == 0) arrive(barrier);
        if (CLUSTER > 1 && lane < CLUSTER) arrive_in_block(barrier, lane);
    };
    if (warpgroup == 0) {  // producer
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == 0) {
            constexpr int SLICE = N / CLUSTER;  // rows of b that this block loads
            const int rank = CLUSTER > 1 ? cluster_rank() : 0;
            for (int tile = blockIdx.x; tile < tile_count; tile += gridDim.x) {
                const TileOrigin origin = grouped_tile_origin<TILE_M, N>(tile, m, n);
                for (int step = 0; step < steps; ++step, advance()) {
                    const uint32_t a_tile = tiles + stage * STAGE_BYTES, b_tile = a_tile + A_BYTES;
                    const int column = step * TILE_K;
                    wait(&empty[stage], parity ^ 1);
                    arrive_expect_tx(&full[stage], STAGE_BYTES);
                    tma_load_2d(a_tile, a, column, origin.row, &full[stage]);
                    if (CLUSTER == 1)
                        tma_load_2d(b_tile, b, column, origin.column, &full[stage]);
                    else
                        tma_multicast_2d(b_tile + rank * SLICE * ROW_BYTES, b, column,
                                         origin.column + rank * SLICE, &full[stage],
                                         (1 << CLUSTER) - 1);
                }
            }
        }
    } else {  // consumer
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        const int row = (warpgroup - 1) * 64;
        const uint32_t buffers = tiles + STAGES * STAGE_BYTES + (warpgroup - 1) * 2 * PART_BYTES;
        for (int tile = blockIdx.x; tile < tile_count; tile += gridDim.x) {
            float acc[Tile<N>::SUMS];
            for (int step = 0; step < steps; ++step, advance()) {
                wait(&full[stage], parity);
                const uint32_t a_tile = tiles + stage * STAGE_BYTES;
                wgmma_k_tile(acc, a_tile + row * ROW_BYTES, a_tile + A_BYTES, step);
                wgmma_wait<1>();
                if (step > 0) release(&empty[(stage + STAGES - 1) % STAGES]);
            }
            wgmma_wait<0>();
            release(&empty[(stage + STAGES - 1) % STAGES]);
            const TileOrigin origin = grouped_tile_origin<TILE_M, N>(tile, m, n);
            store_parts(acc, buffers, out, origin.row + row, origin.column, warpgroup);
        }
        if (threadIdx.x % 128 == 0) tma_store_wait_read<0>();
    }
    if (CLUSTER > 1) cluster_sync();  // other blocks may still arrive at this one's mbarriers
}

#define GEMM_KERNEL(name, cluster, columns)                                                        \
    __global__ void __launch_bounds__(THREADS, 1)                                                  \
    name(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,             \
         const __grid_constant__ CUtensorMap out, int m, int n, int k) {                           \
        gemm<cluster, columns>(&a, &b, &out, m, n, k);                                             \
    }
GEMM_KERNEL(gemm_no_cluster, 1, 128)
GEMM_KERNEL(gemm_cluster_2, 2, 128)
GEMM_KERNEL(gemm_cluster_4, 4, 128)
GEMM_KERNEL(gemm_wide_cluster_2, 2, 256)

// Launch as many blocks as run at the same time. A cluster lies within one GPC, whose number of SMs
// may not be a multiple of the cluster's size.
template <int CLUSTER, int N, typename Kernel>
cudaError_t launch(Kernel kernel, const bf16* a, const bf16* b, bf16* out, int m, int n, int k,
                   cudaStream_t stream) {
    if (m % (4 * TILE_M) || n % N || k % TILE_K) return cudaErrorInvalidValue;
    CUtensorMap maps[3];
    if (cudaError_t error = make_tensor_map(&maps[0], a, m, k, TILE_M)) return error;
    if (cudaError_t error = make_tensor_map(&maps[1], b, n, k, N / CLUSTER)) return error;
    if (cudaError_t error = make_tensor_map(&maps[2], out, m, n, 64)) return error;
    constexpr int SMEM_BYTES = Tile<N>::SMEM_BYTES;
    if (cudaError_t error = cudaFuncSetAttribute(
            kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SMEM_BYTES))
        return error;
    cudaLaunchAttribute shape = {};
    shape.id = cudaLaunchAttributeClusterDimension;
    shape.val.clusterDim.x = CLUSTER;
    shape.val.clusterDim.y = shape.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(sm_count());
    config.blockDim = dim3(THREADS);
    config.dynamicSmemBytes = SMEM_BYTES;
    config.stream = stream;
    config.attrs = &shape;
    config.numAttrs = CLUSTER > 1;
    if (CLUSTER > 1) {
        config.gridDim.x = config.gridDim.x / CLUSTER * CLUSTER;
        int clusters = 0;
        if (cudaError_t error = cudaOccupancyMaxActiveClusters(&clusters, kernel, &config))
            return error;
        config.gridDim.x = clusters * CLUSTER;
    }
    return cudaLaunchKernelEx(&config, kernel, maps[0], maps[1], maps[2], m, n, k);
}

extern "C" cudaError_t no_cluster(const bf16* a, const bf16* b, bf16* out, int m, int n, int k,
                                  cudaStream_t stream) {
    return launch<1, 128>(gemm_no_cluster, a, b, out, m, n, k, stream);
}

extern "C" cudaError_t cluster_2(const bf16* a, const bf16* b, bf16* out, int m, int n, int k,
                                 cudaStream_t stream) {
    return launch<2, 128>(gemm_cluster_2, a, b, out, m, n, k, stream);
}

extern "C" cudaError_t cluster_4(const bf16* a, const bf16* b, bf16* out, int m, int n, int k,
                                 cudaStream_t stream) {
    return launch<4, 128>(gemm_cluster_4, a, b, out, m, n, k, stream);
}

extern "C" cudaError_t wide_cluster_2(const bf16* a, const bf16* b, bf16* out, int m, int n, int k,
                                      cudaStream_t stream) {
    return launch<2, 256>(gemm_wide_cluster_2, a, b, out, m, n, k, stream);
}
