// out = a * b^T in bf16 with fp32 accumulation: from Ampere's mma.sync to Hopper's wgmma.
// a is m x k, b is n x k, out is m x n, all row-major: the layout of a linear layer.
//
//   mma_sync     The Ampere kernel: cp.async in three stages, ldmatrix, mma.sync. Per 16 columns of
//                k, loading the fragments takes 192 clocks (24 KiB at 128 bytes per clock), and the
//                tensor cores need 128. That alone limits it to two thirds of their rate; copies
//                come on top, and each warp alternates between loading and multiplying.
//   wgmma        A warpgroup (four warps) passes descriptors of tiles in shared memory; one
//                asynchronous instruction multiplies 64 x 128 x 16. It reads through the async
//                proxy, so data written by threads need a proxy fence. Each step waits for its
//                product, because the next copies overwrite its tiles.
//   in_flight    One product stays in flight while the block waits for the one before and refills
//                its stage, which costs a second block barrier per step.
//   tma          One thread issues TMA loads instead of cp.async by all, and an mbarrier completes
//                when the bytes have arrived: no address arithmetic, no fence, one block barrier.
//   wide         Tiles of 128 x 256, one block per SM. One instruction multiplies 64 x 256 x 16, so
//                that each element of a that it reads serves twice as many products.
//   specialised  Warp specialisation. A producer thread loads four stages ahead, and mbarriers per
//                stage replace the block barrier. Two consumer warpgroups get registers that the
//                producer's warpgroup releases (setmaxnreg).
//   persistent   One block per SM loops over the tiles, so that the producer loads the next tile
//                during the epilogue of this one.
//   tma_store    The epilogue stages the result in shared memory with stmatrix, and TMA writes it.
//                Stores by threads write 16 bytes per row; TMA writes lines of 128 bytes, and
//                consumers go on with the next tile while it does.
//   pingpong     The consumer warpgroups take turns. Each has tiles of its own, of 64 x 256, and
//                stages one result while the other warpgroup multiplies. Where k is small, staging
//                is a large part of the time. The price is that a tile of b serves only 64 rows, so
//                the block loads more bytes for as many products.

#include "hopper.cuh"

// --- Tiles of 128 x 128, three stages of both operands, two blocks per SM -----------------------
constexpr int TILE_MN = 128, TILE_BYTES = TILE_MN * ROW_BYTES, STAGES = 3, THREADS = 256;
constexpr int SMEM_BYTES = STAGES * 2 * TILE_BYTES + SWIZZLE_ALIGN;

__device__ void copy_tile(const bf16* source, int k, uint32_t shared) {
    for (int i = threadIdx.x; i < TILE_MN * 8; i += THREADS) {
        const int row = i / 8, chunk = i % 8;
        const uint32_t to = shared + swizzled_offset(row, chunk);
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                     :: "r"(to), "l"(source + size_t(row) * k + chunk * 8));
    }
}

// The main loop of all cp.async rungs.
template <typename Mma>
__device__ void cp_async_gemm(const bf16* a, const bf16* b, bf16* out, int m, int n, int k) {
    extern __shared__ unsigned char memory[];
    const uint32_t tiles = swizzle_aligned(memory);
    const TileOrigin origin = grouped_tile_origin<TILE_MN, TILE_MN>(blockIdx.x, m, n);
    const int steps = k / TILE_K;
    auto copy = [&](int step) {
        const uint32_t stage = tiles + step % STAGES * 2 * TILE_BYTES;
        if (step < steps) {
            copy_tile(a + size_t(origin.row) * k + step * TILE_K, k, stage);
            copy_tile(b + size_t(origin.column) * k + step * TILE_K, k, stage + TILE_BYTES);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");  // also if empty: the wait counts
    };
    Mma mma;
    for (int step = 0; step < STAGES - 1; ++step) copy(step);
    for (int step = 0; step < steps; ++step) {
        asm volatile("cp.async.wait_group %0;" :: "n"(STAGES - 2) : "memory");
        if (Mma::ASYNC_PROXY) fence_async_proxy();
        __syncthreads();  // this stage is full; without products in flight, the previous is free
        if (!Mma::IN_FLIGHT) copy(step + STAGES - 1);
        const uint32_t stage = tiles + step % STAGES * 2 * TILE_BYTES;
        mma.k_tile(stage, stage + TILE_BYTES);
        if (Mma::IN_FLIGHT) {
            __syncthreads();  // both warpgroups have finished the previous product
            copy(step + STAGES - 1);
        }
    }
    mma.epilogue(out, n, origin.row, origin.column);
}

struct WarpMma {  // 2 x 4 warps of 64 x 32 each
    static constexpr bool ASYNC_PROXY = false, IN_FLIGHT = false;
    float acc[4][4][4] = {};
    const int lane = threadIdx.x % 32, row = threadIdx.x / 128 * 64;
    const int column = threadIdx.x / 32 % 4 * 32;
    static __device__ void ldmatrix(uint32_t (&fragment)[4], uint32_t address) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
                     : "r"(address) : "memory");
    }
    __device__ void k_tile(uint32_t a, uint32_t b) {
        for (int k = 0; k < TILE_K / 16; ++k) {
            uint32_t x[4][4], y[2][4];
            for (int i = 0; i < 4; ++i)
                ldmatrix(x[i], a + swizzled_offset(row + i * 16 + lane % 16, 2 * k + lane / 16));
            for (int j = 0; j < 2; ++j)
                ldmatrix(y[j], b + swizzled_offset(column + j * 16 + lane / 16 * 8 + lane % 8,
                                                   2 * k + lane / 8 % 2));
            for (int i = 0; i < 4; ++i)
                for (int j = 0; j < 4; ++j) {
                    float(&d)[4] = acc[i][j];
                    const uint32_t* z = &y[j / 2][j % 2 * 2];
                    asm volatile(
                        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
                        "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(x[i][0]),
                          "r"(x[i][1]), "r"(x[i][2]), "r"(x[i][3]), "r"(z[0]), "r"(z[1]));
                }
        }
    }
    __device__ void epilogue(bf16* out, int n, int top, int left) {
        for (int i = 0; i < 4; ++i)
            for (int j = 0; j < 4; ++j)
                store_fragments(acc[i][j], out, n, top + row + i * 16, left + column + j * 8);
    }
};

template <int PENDING>  // products in flight after a step
struct WarpgroupMma {   // 2 warpgroups of 64 x 128 each
    static constexpr bool ASYNC_PROXY = true, IN_FLIGHT = PENDING > 0;
    float acc[64] = {};
    const int row = threadIdx.x / 128 * 64;

    __device__ void k_tile(uint32_t a, uint32_t b) {
        wgmma_k_tile(acc, a + row * ROW_BYTES, b, 1);
        wgmma_wait<PENDING>();
    }
    __device__ void epilogue(bf16* out, int n, int top, int left) {
        if (IN_FLIGHT) wgmma_wait<0>();
        store_fragments(acc, out, n, top + row + threadIdx.x / 32 % 4 * 16, left);
    }
};

__global__ void __launch_bounds__(THREADS, 2)
gemm_mma_sync(const bf16* a, const bf16* b, bf16* out, int m, int n, int k) {
    cp_async_gemm<WarpMma>(a, b, out, m, n, k);
}

__global__ void __launch_bounds__(THREADS, 2)
gemm_wgmma(const bf16* a, const bf16* b, bf16* out, int m, int n, int k) {
    cp_async_gemm<WarpgroupMma<0>>(a, b, out, m, n, k);
}

__global__ void __launch_bounds__(THREADS, 2)
gemm_in_flight(const bf16* a, const bf16* b, bf16* out, int m, int n, int k) {
    cp_async_gemm<WarpgroupMma<1>>(a, b, out, m, n, k);
}

template <int COLUMNS, int STAGES>
__device__ void tma_gemm(const CUtensorMap* a, const CUtensorMap* b, bf16* out, int m, int n,
                         int k) {
    extern __shared__ unsigned char memory[];
    __shared__ uint64_t full[STAGES];
    constexpr int STAGE_BYTES = (TILE_MN + COLUMNS) * ROW_BYTES;
    const uint32_t tiles = swizzle_aligned(memory);
    const TileOrigin origin = grouped_tile_origin<TILE_MN, COLUMNS>(blockIdx.x, m, n);
    const int steps = k / TILE_K, row = threadIdx.x / 128 * 64;  // row: the warpgroup's first
    auto load = [&](int step) {
        const uint32_t stage = tiles + step % STAGES * STAGE_BYTES;
        uint64_t* barrier = &full[step % STAGES];
        arrive_expect_tx(barrier, STAGE_BYTES);
        tma_load_2d(stage, a, step * TILE_K, origin.row, barrier);
        tma_load_2d(stage + TILE_BYTES, b, step * TILE_K, origin.column, barrier);
    };
    if (threadIdx.x == 0) {
        for (auto& barrier : full) mbarrier_init(&barrier, 1);
        fence_mbarrier_init();
        for (int step = 0; step < min(STAGES, steps); ++step) load(step);
    }
    __syncthreads();
    float acc[COLUMNS / 2] = {};
    for (int step = 0; step < steps; ++step) {
        wait(&full[step % STAGES], step / STAGES % 2);
        const uint32_t stage = tiles + step % STAGES * STAGE_BYTES;
        wgmma_k_tile(acc, stage + row * ROW_BYTES, stage + TILE_BYTES, 1);
        wgmma_wait<1>();  // this warpgroup's previous product is complete
        __syncthreads();  // the other warpgroup's too: the stage may be overwritten
        const int next = step - 1 + STAGES;
        if (threadIdx.x == 0 && step > 0 && next < steps) load(next);
    }
    wgmma_wait<0>();
    store_fragments(acc, out, n, origin.row + row + threadIdx.x / 32 % 4 * 16, origin.column);
}

__global__ void __launch_bounds__(THREADS, 2)
gemm_tma(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b, bf16* out,
         int m, int n, int k) {
    tma_gemm<TILE_MN, STAGES>(&a, &b, out, m, n, k);
}

// --- Tiles of 128 x 256, four stages, one block per SM -------------------------------------------
constexpr int WIDE_N = 256, WIDE_STAGES = 4;
constexpr int WIDE_STAGE_BYTES = (TILE_MN + WIDE_N) * ROW_BYTES;
constexpr int WIDE_SMEM_BYTES = WIDE_STAGES * WIDE_STAGE_BYTES + SWIZZLE_ALIGN;
constexpr int PART_BYTES = 64 * ROW_BYTES;  // a staged part of the result: 64 x 64
constexpr int STORE_SMEM_BYTES = WIDE_SMEM_BYTES + 4 * PART_BYTES;  // two parts per warpgroup

__global__ void __launch_bounds__(THREADS, 1)
gemm_wide(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b, bf16* out,
          int m, int n, int k) {
    tma_gemm<WIDE_N, WIDE_STAGES>(&a, &b, out, m, n, k);
}

// Stage the 64 x 256 results of a warpgroup in parts of 64 x 64, in two buffers by turns.
__device__ void store_parts(const float (&acc)[128], uint32_t buffers, const CUtensorMap* out,
                            int row, int column, int warpgroup) {
    const bool issuer = threadIdx.x % 128 == 0;
#pragma unroll
    for (int part = 0; part < WIDE_N / 64; ++part) {
        const uint32_t buffer = buffers + part % 2 * PART_BYTES;
        if (issuer) tma_store_wait_read<1>();  // the last but one store has read this buffer
        warpgroup_sync(warpgroup);
        stage_fragments(acc + part * 32, buffer, threadIdx.x / 32 % 4 * 16);
        fence_async_proxy();
        warpgroup_sync(warpgroup);
        if (issuer) tma_store_2d(out, buffer, column + part * 64, row);
    }
}

template <bool TMA_STORE>
__device__ void specialised_gemm(const CUtensorMap* a, const CUtensorMap* b,
                                 const CUtensorMap* out_map, bf16* out, int m, int n, int k) {
    extern __shared__ unsigned char memory[];
    __shared__ uint64_t full[WIDE_STAGES], empty[WIDE_STAGES];
    const uint32_t tiles = swizzle_aligned(memory);
    const int steps = k / TILE_K, tile_count = m / TILE_MN * (n / WIDE_N);
    const int warpgroup = threadIdx.x / 128;
    if (threadIdx.x == 0) {
        for (auto& barrier : full) mbarrier_init(&barrier, 1);
        for (auto& barrier : empty) mbarrier_init(&barrier, 8);  // one arrival per consumer warp
        fence_mbarrier_init();
    }
    __syncthreads();
    int stage = 0, parity = 0;  // the parity flips when the ring of stages wraps
    auto advance = [&] { parity ^= (stage = (stage + 1) % WIDE_STAGES) == 0; };
    if (warpgroup == 0) {  // producer
        // per warpgroup: 128 x 40 + 256 x 232 registers are as many as 384 x 168
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x != 0) return;
        for (int tile = blockIdx.x; tile < tile_count; tile += gridDim.x) {
            const TileOrigin origin = grouped_tile_origin<TILE_MN, WIDE_N>(tile, m, n);
            for (int step = 0; step < steps; ++step, advance()) {
                const uint32_t a_tile = tiles + stage * WIDE_STAGE_BYTES;
                wait(&empty[stage], parity ^ 1);  // does not wait in the first turn of the ring
                arrive_expect_tx(&full[stage], WIDE_STAGE_BYTES);
                tma_load_2d(a_tile, a, step * TILE_K, origin.row, &full[stage]);
                tma_load_2d(a_tile + TILE_BYTES, b, step * TILE_K, origin.column, &full[stage]);
            }
        }
    } else {  // consumer
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        const int row = (warpgroup - 1) * 64;
        const uint32_t buffers =
            tiles + WIDE_STAGES * WIDE_STAGE_BYTES + (warpgroup - 1) * 2 * PART_BYTES;
        for (int tile = blockIdx.x; tile < tile_count; tile += gridDim.x) {
            float acc[128];  // not initialised: the first product of a tile overwrites it
            for (int step = 0; step < steps; ++step, advance()) {
                wait(&full[stage], parity);
                const uint32_t a_tile = tiles + stage * WIDE_STAGE_BYTES;
                wgmma_k_tile(acc, a_tile + row * ROW_BYTES, a_tile + TILE_BYTES, step);
                wgmma_wait<1>();  // the product before is complete: release its stage
                if (step > 0 && threadIdx.x % 32 == 0)
                    arrive(&empty[(stage + WIDE_STAGES - 1) % WIDE_STAGES]);
            }
            wgmma_wait<0>();
            if (threadIdx.x % 32 == 0) arrive(&empty[(stage + WIDE_STAGES - 1) % WIDE_STAGES]);
            const TileOrigin origin = grouped_tile_origin<TILE_MN, WIDE_N>(tile, m, n);
            if (TMA_STORE)
                store_parts(acc, buffers, out_map, origin.row + row, origin.column, warpgroup);
            else
                store_fragments(acc, out, n, origin.row + row + threadIdx.x / 32 % 4 * 16,
                                origin.column);
        }
        if (TMA_STORE && threadIdx.x % 128 == 0) tma_store_wait_read<0>();
    }
}

__global__ void __launch_bounds__(384, 1)
gemm_specialised(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                 bf16* out, int m, int n, int k) {
    specialised_gemm<false>(&a, &b, nullptr, out, m, n, k);
}

__global__ void __launch_bounds__(384, 1)
gemm_tma_store(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
               const __grid_constant__ CUtensorMap out, int m, int n, int k) {
    specialised_gemm<true>(&a, &b, &out, nullptr, m, n, k);
}

// --- Tiles of 64 x 256, one per consumer warpgroup -----------------------------------------------
constexpr int PINGPONG_M = 64, PINGPONG_A_BYTES = PINGPONG_M * ROW_BYTES;
constexpr int PINGPONG_STAGE_BYTES = (PINGPONG_M + WIDE_N) * ROW_BYTES;
constexpr int PINGPONG_SMEM_BYTES =
    WIDE_STAGES * PINGPONG_STAGE_BYTES + 4 * PART_BYTES + SWIZZLE_ALIGN;

// A warpgroup's turn is a named barrier, at which it waits and the other warpgroup arrives.
// Warpgroups are 1 and 2, and warpgroup_sync uses the barriers 2 and 3.
__device__ void wait_for_turn(int warpgroup) {
    asm volatile("bar.sync %0, 256;" :: "r"(3 + warpgroup) : "memory");
}
__device__ void give_turn_to(int warpgroup) {
    asm volatile("bar.arrive %0, 256;" :: "r"(3 + warpgroup) : "memory");
}

__global__ void __launch_bounds__(384, 1)
gemm_pingpong(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
              const __grid_constant__ CUtensorMap out, int m, int n, int k) {
    extern __shared__ unsigned char memory[];
    __shared__ uint64_t full[WIDE_STAGES], empty[WIDE_STAGES];
    const uint32_t tiles = swizzle_aligned(memory);
    const int steps = k / TILE_K, tile_count = m / PINGPONG_M * (n / WIDE_N);
    const int warpgroup = threadIdx.x / 128;
    if (threadIdx.x == 0) {
        for (auto& barrier : full) mbarrier_init(&barrier, 1);
        for (auto& barrier : empty) mbarrier_init(&barrier, 4);  // the warps of one warpgroup
        fence_mbarrier_init();
    }
    __syncthreads();
    int stage = 0, parity = 0;
    auto advance = [&] { parity ^= (stage = (stage + 1) % WIDE_STAGES) == 0; };
    if (warpgroup == 0) {  // producer: the tiles of both consumers, one after the other
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x != 0) return;
        for (int tile = blockIdx.x; tile < tile_count; tile += gridDim.x) {
            const TileOrigin origin = grouped_tile_origin<PINGPONG_M, WIDE_N>(tile, m, n);
            for (int step = 0; step < steps; ++step, advance()) {
                const uint32_t a_tile = tiles + stage * PINGPONG_STAGE_BYTES;
                wait(&empty[stage], parity ^ 1);
                arrive_expect_tx(&full[stage], PINGPONG_STAGE_BYTES);
                tma_load_2d(a_tile, &a, step * TILE_K, origin.row, &full[stage]);
                tma_load_2d(a_tile + PINGPONG_A_BYTES, &b, step * TILE_K, origin.column,
                            &full[stage]);
            }
        }
    } else {  // consumer: every other tile of this block
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        const int other = 3 - warpgroup;
        const uint32_t buffers =
            tiles + WIDE_STAGES * PINGPONG_STAGE_BYTES + (warpgroup - 1) * 2 * PART_BYTES;
        int tile = blockIdx.x;
        if (warpgroup == 2 && tile < tile_count) give_turn_to(other);
        for (int turn = 1; tile < tile_count; ++turn, tile += gridDim.x) {
            if (turn % 2 != warpgroup % 2) {  // the other's tile
                for (int step = 0; step < steps; ++step) advance();
                continue;
            }
            wait_for_turn(warpgroup);
            float acc[128];
            for (int step = 0; step < steps; ++step, advance()) {
                wait(&full[stage], parity);
                const uint32_t a_tile = tiles + stage * PINGPONG_STAGE_BYTES;
                wgmma_k_tile(acc, a_tile, a_tile + PINGPONG_A_BYTES, step);
                wgmma_wait<1>();
                if (step > 0 && threadIdx.x % 32 == 0)
                    arrive(&empty[(stage + WIDE_STAGES - 1) % WIDE_STAGES]);
            }
            if (tile + gridDim.x < tile_count) give_turn_to(other);  // products are issued
            wgmma_wait<0>();
            if (threadIdx.x % 32 == 0) arrive(&empty[(stage + WIDE_STAGES - 1) % WIDE_STAGES]);
            const TileOrigin origin = grouped_tile_origin<PINGPONG_M, WIDE_N>(tile, m, n);
            store_parts(acc, buffers, &out, origin.row, origin.column, warpgroup);
        }
        if (threadIdx.x % 128 == 0) tma_store_wait_read<0>();
    }
}

int tile_count(int m, int n, int columns = TILE_MN) { return m / TILE_MN * (n / columns); }

template <typename Kernel, typename Operand, typename Result>
cudaError_t launch(Kernel kernel, Operand a, Operand b, Result out, int m, int n, int k, int blocks,
                   int threads, int shared, cudaStream_t stream) {
    if (m % TILE_MN || n % WIDE_N || k % TILE_K) return cudaErrorInvalidValue;  // whole tiles
    if (cudaError_t error = cudaFuncSetAttribute(
            kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared))
        return error;
    kernel<<<blocks, threads, shared, stream>>>(a, b, out, m, n, k);
    return cudaGetLastError();
}

extern "C" cudaError_t mma_sync(const bf16* a, const bf16* b, bf16* out, int m, int n, int k,
                                cudaStream_t stream) {
    return launch(gemm_mma_sync, a, b, out, m, n, k, tile_count(m, n), THREADS, SMEM_BYTES,
                  stream);
}

extern "C" cudaError_t wgmma(const bf16* a, const bf16* b, bf16* out, int m, int n, int k,
                             cudaStream_t stream) {
    return launch(gemm_wgmma, a, b, out, m, n, k, tile_count(m, n), THREADS, SMEM_BYTES,
                  stream);
}

extern "C" cudaError_t in_flight(const bf16* a, const bf16* b, bf16* out, int m, int n, int k,
                                 cudaStream_t stream) {
    return launch(gemm_in_flight, a, b, out, m, n, k, tile_count(m, n), THREADS, SMEM_BYTES,
                  stream);
}

template <typename Kernel>
cudaError_t launch_tma(Kernel kernel, const bf16* a, const bf16* b, bf16* out, int m, int n, int k,
                       int columns, int blocks, int threads, int shared, cudaStream_t stream) {
    CUtensorMap maps[2];
    if (cudaError_t error = make_tensor_map(&maps[0], a, m, k, TILE_MN)) return error;
    if (cudaError_t error = make_tensor_map(&maps[1], b, n, k, columns)) return error;
    return launch(kernel, maps[0], maps[1], out, m, n, k, blocks, threads, shared, stream);
}

extern "C" cudaError_t tma(const bf16* a, const bf16* b, bf16* out, int m, int n, int k,
                           cudaStream_t stream) {
    return launch_tma(gemm_tma, a, b, out, m, n, k, TILE_MN, tile_count(m, n), THREADS, SMEM_BYTES,
                      stream);
}

extern "C" cudaError_t wide(const bf16* a, const bf16* b, bf16* out, int m, int n, int k,
                            cudaStream_t stream) {
    return launch_tma(gemm_wide, a, b, out, m, n, k, WIDE_N, tile_count(m, n, WIDE_N), THREADS,
                      WIDE_SMEM_BYTES, stream);
}

extern "C" cudaError_t specialised(const bf16* a, const bf16* b, bf16* out, int m, int n, int k,
                                   cudaStream_t stream) {
    return launch_tma(gemm_specialised, a, b, out, m, n, k, WIDE_N, tile_count(m, n, WIDE_N), 384,
                      WIDE_SMEM_BYTES, stream);
}

extern "C" cudaError_t persistent(const bf16* a, const bf16* b, bf16* out, int m, int n, int k,
                                  cudaStream_t stream) {
    return launch_tma(gemm_specialised, a, b, out, m, n, k, WIDE_N, sm_count(), 384,
                      WIDE_SMEM_BYTES, stream);
}

extern "C" cudaError_t tma_store(const bf16* a, const bf16* b, bf16* out, int m, int n, int k,
                                 cudaStream_t stream) {
    CUtensorMap maps[3];
    if (cudaError_t error = make_tensor_map(&maps[0], a, m, k, TILE_MN)) return error;
    if (cudaError_t error = make_tensor_map(&maps[1], b, n, k, WIDE_N)) return error;
    if (cudaError_t error = make_tensor_map(&maps[2], out, m, n, 64)) return error;
    return launch(gemm_tma_store, maps[0], maps[1], maps[2], m, n, k, sm_count(), 384,
                  STORE_SMEM_BYTES, stream);
}

extern "C" cudaError_t pingpong(const bf16* a, const bf16* b, bf16* out, int m, int n, int k,
                                cudaStream_t stream) {
    CUtensorMap maps[3];
    if (cudaError_t error = make_tensor_map(&maps[0], a, m, k, PINGPONG_M)) return error;
    if (cudaError_t error = make_tensor_map(&maps[1], b, n, k, WIDE_N)) return error;
    if (cudaError_t error = make_tensor_map(&maps[2], out, m, n, 64)) return error;
    return launch(gemm_pingpong, maps[0], maps[1], maps[2], m, n, k, sm_count(), 384,
                  PINGPONG_SMEM_BYTES, stream);
}
