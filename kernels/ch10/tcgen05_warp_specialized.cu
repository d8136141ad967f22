// out = a * b^T in bf16 with fp32 accumulation on Blackwell: a is m x k, b is n x k, all row-major.
//
// Compiled and disassembled for sm_100a and sm_103a; it has not been executed yet.
//
// tcgen05.mma reads both operands from shared memory and accumulates in tensor memory (TMEM): 128
// lanes x 512 columns of 32 bits per SM, so accumulators take no registers. A single thread issues
// it for the block. tcgen05.commit makes an mbarrier track its completion.
//
//   two_stage    One thread alternates between loading and multiplying. It refills a stage after
//                the product that read it has completed, so one load is in flight beside one
//                product. The epilogue (TMEM to global memory) runs after the last product.
//   specialised  Warp specialisation: one warp loads (TMA, four stages), one warp issues the MMAs,
//                four warps run the epilogue. Two accumulators of 256 columns alternate, so the
//                epilogue of a tile overlaps the products of the next. One persistent block per SM
//                loops over the tiles.

#include "hopper.cuh"

constexpr int TILE_M = 128, TILE_N = 256;
constexpr int A_BYTES = TILE_M * ROW_BYTES, STAGE_BYTES = A_BYTES + TILE_N * ROW_BYTES;

// Matrix descriptor: like wgmma's, with a version in bits 46-47 and 2 in the top three bits for the
// 128-byte swizzle.
constexpr __host__ __device__ uint64_t matrix_descriptor(uint32_t address) {
    return uint64_t((address & 0x3FFFF) >> 4) | 1ull << 16 | uint64_t(1024 >> 4) << 32 |
           1ull << 46 | 2ull << 61;
}

// Instruction descriptor: fp32 accumulation (bit 4), bf16 operands (bits 7 and 10), n / 8 from bit
// 17, m / 16 from bit 24; both operands are K-major (bits 15 and 16 are 0).
constexpr uint32_t INSTRUCTION =
    1u << 4 | 1u << 7 | 1u << 10 | (TILE_N / 8) << 17 | (TILE_M / 16) << 24;

static_assert(matrix_descriptor(0x12400) == 0x4000404000011240ull);
static_assert(INSTRUCTION == 0x08400490);

__device__ void mma(uint32_t acc, uint64_t a, uint64_t b, bool add) {
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %4, 0;\n"
                 "tcgen05.mma.cta_group::1.kind::f16 [%0], %1, %2, %3, add;\n}"
                 :: "r"(acc), "l"(a), "l"(b), "r"(INSTRUCTION), "r"(int(add)) : "memory");
}

// Arrive on the barrier when all MMAs issued so far are complete.
__device__ void commit(uint64_t* barrier) {
    asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];"
                 :: "r"(shared_address(barrier)) : "memory");
}

// Multiply a stage: four k slices of 16, 32 bytes apart. `empty` completes when the stage is free.
__device__ void mma_stage(uint32_t acc, uint32_t stage, bool add, uint64_t* empty) {
    for (int k = 0; k < 4; ++k)
        mma(acc, matrix_descriptor(stage + 32 * k), matrix_descriptor(stage + A_BYTES + 32 * k),
            add || k);
    commit(empty);
}

__device__ void load_stage(uint32_t stage, const CUtensorMap* a, const CUtensorMap* b,
                           TileOrigin origin, int step, uint64_t* full) {
    arrive_expect_tx(full, STAGE_BYTES);
    tma_load_2d(stage, a, step * TILE_K, origin.row, full);
    tma_load_2d(stage + A_BYTES, b, step * TILE_K, origin.column, full);
}

__device__ void tmem_alloc(uint32_t* address, int columns) {  // called by one warp
    asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;"
                 :: "r"(shared_address(address)), "r"(columns) : "memory");
    asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;" ::: "memory");
}

__device__ void tmem_dealloc(uint32_t address, int columns) {  // called by the same warp
    asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;"
                 :: "r"(address), "r"(columns) : "memory");
}

__device__ void fence_before_thread_sync() {
    asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
}
__device__ void fence_after_thread_sync() {
    asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
}

#define W8(v, i) "=r"(v[i]), "=r"(v[i + 1]), "=r"(v[i + 2]), "=r"(v[i + 3]), \
                 "=r"(v[i + 4]), "=r"(v[i + 5]), "=r"(v[i + 6]), "=r"(v[i + 7])

// The epilogue, by four warps. Warp w can access TMEM lanes 32 w to 32 w + 31. Each lane is a row
// of the tile; its thread loads and stores 32 columns at a time.
__device__ void epilogue(uint32_t acc, bf16* out, int n, TileOrigin origin) {
    const int row = threadIdx.x % 128;
    __syncwarp();
    bf16* out_row = out + size_t(origin.row + row) * n + origin.column;
    for (int column = 0; column < TILE_N; column += 32) {
        uint32_t v[32];
        asm volatile("tcgen05.ld.sync.aligned.32x32b.x32.b32 {%0, %1, %2, %3, %4, %5, %6, %7, "
                     "%8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
                     "%23, %24, %25, %26, %27, %28, %29, %30, %31}, [%32];"
                     : W8(v, 0), W8(v, 8), W8(v, 16), W8(v, 24)
                     : "r"(acc + (row / 32 * 32 << 16) + column));
        asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
        __nv_bfloat162 packed[16];
        for (int i = 0; i < 16; ++i)
            packed[i] = __floats2bfloat162_rn(__uint_as_float(v[2 * i]),
                                              __uint_as_float(v[2 * i + 1]));
        for (int i = 0; i < 4; ++i)
            reinterpret_cast<uint4*>(out_row + column)[i] =
                reinterpret_cast<const uint4*>(packed)[i];
    }
}

__global__ void __launch_bounds__(128)
gemm_two_stage(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
               bf16* out, int m, int n, int k) {
    extern __shared__ unsigned char memory[];
    __shared__ uint64_t full[2], empty[2], tmem_full;
    __shared__ uint32_t tmem;
    const uint32_t tiles = swizzle_aligned(memory);
    const TileOrigin origin = grouped_tile_origin<TILE_M, TILE_N>(blockIdx.x, m, n);
    const int steps = k / TILE_K;
    if (threadIdx.x < 32) tmem_alloc(&tmem, TILE_N);
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < 2; ++stage) {
            mbarrier_init(&full[stage], 1);
            mbarrier_init(&empty[stage], 1);
        }
        mbarrier_init(&tmem_full, 1);
        fence_mbarrier_init();
    }
    fence_before_thread_sync();
    __syncthreads();
    fence_after_thread_sync();
    const uint32_t acc = tmem;
    if (threadIdx.x == 0) {
        load_stage(tiles, &a, &b, origin, 0, &full[0]);
        for (int step = 0; step < steps; ++step) {
            const int stage = step % 2, next = step + 1;
            if (next < steps) {
                if (step > 0) wait(&empty[next % 2], (step - 1) / 2 % 2);
                load_stage(tiles + next % 2 * STAGE_BYTES, &a, &b, origin, next, &full[next % 2]);
            }
            wait(&full[stage], step / 2 % 2);
            fence_after_thread_sync();
            mma_stage(acc, tiles + stage * STAGE_BYTES, step > 0, &empty[stage]);
        }
        commit(&tmem_full);
    }
    __syncwarp();
    wait(&tmem_full, 0);
    fence_after_thread_sync();
    epilogue(acc, out, n, origin);
    fence_before_thread_sync();
    __syncthreads();
    if (threadIdx.x < 32) tmem_dealloc(acc, TILE_N);
}

constexpr int STAGES = 4;

__global__ void __launch_bounds__(192, 1)
gemm_specialised(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                 bf16* out, int m, int n, int k) {
    extern __shared__ unsigned char memory[];
    __shared__ uint64_t full[STAGES], empty[STAGES], tmem_full[2], tmem_empty[2];
    __shared__ uint32_t tmem;
    const uint32_t tiles = swizzle_aligned(memory);
    const int steps = k / TILE_K, tile_count = m / TILE_M * (n / TILE_N), warp = threadIdx.x / 32;
    if (warp == 4) tmem_alloc(&tmem, 2 * TILE_N);
    if (threadIdx.x == 0) {
        for (auto& barrier : full) mbarrier_init(&barrier, 1);
        for (auto& barrier : empty) mbarrier_init(&barrier, 1);
        for (auto& barrier : tmem_full) mbarrier_init(&barrier, 1);
        for (auto& barrier : tmem_empty) mbarrier_init(&barrier, 128);
        fence_mbarrier_init();
    }
    fence_before_thread_sync();
    __syncthreads();
    fence_after_thread_sync();
    const uint32_t acc = tmem;
    const bool is_leader = threadIdx.x % 32 == 0;
    if (warp == 5 && is_leader) {  // load warp
        int i = 0;
        for (int tile = blockIdx.x; tile < tile_count; tile += gridDim.x) {
            const TileOrigin origin = grouped_tile_origin<TILE_M, TILE_N>(tile, m, n);
            for (int step = 0; step < steps; ++step, ++i) {
                wait(&empty[i % STAGES], i / STAGES % 2 ^ 1);
                load_stage(tiles + i % STAGES * STAGE_BYTES, &a, &b, origin, step,
                           &full[i % STAGES]);
            }
        }
    } else if (warp == 4 && is_leader) {  // MMA warp
        int i = 0, tile_number = 0;
        for (int tile = blockIdx.x; tile < tile_count; tile += gridDim.x, ++tile_number) {
            wait(&tmem_empty[tile_number % 2], tile_number / 2 % 2 ^ 1);
            fence_after_thread_sync();
            for (int step = 0; step < steps; ++step, ++i) {
                wait(&full[i % STAGES], i / STAGES % 2);
                fence_after_thread_sync();
                mma_stage(acc + tile_number % 2 * TILE_N, tiles + i % STAGES * STAGE_BYTES,
                          step > 0, &empty[i % STAGES]);
            }
            commit(&tmem_full[tile_number % 2]);
        }
    } else if (warp < 4) {  // epilogue warps
        int tile_number = 0;
        for (int tile = blockIdx.x; tile < tile_count; tile += gridDim.x, ++tile_number) {
            wait(&tmem_full[tile_number % 2], tile_number / 2 % 2);
            fence_after_thread_sync();
            epilogue(acc + tile_number % 2 * TILE_N, out, n,
                     grouped_tile_origin<TILE_M, TILE_N>(tile, m, n));
            fence_before_thread_sync();
            arrive(&tmem_empty[tile_number % 2]);
        }
    }
    __syncwarp();
    __syncthreads();
    if (warp == 4) tmem_dealloc(acc, 2 * TILE_N);
}

template <typename Kernel>
cudaError_t launch(Kernel kernel, const bf16* a, const bf16* b, bf16* out, int m, int n, int k,
                   int blocks, int threads, int stages, cudaStream_t stream) {
    if (m % TILE_M || n % TILE_N || k % TILE_K) return cudaErrorInvalidValue;  // whole tiles only
    CUtensorMap maps[2];
    if (cudaError_t error = make_tensor_map(&maps[0], a, m, k, TILE_M)) return error;
    if (cudaError_t error = make_tensor_map(&maps[1], b, n, k, TILE_N)) return error;
    const int shared = stages * STAGE_BYTES + SWIZZLE_ALIGN;
    if (cudaError_t error = cudaFuncSetAttribute(
            kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared))
        return error;
    kernel<<<blocks, threads, shared, stream>>>(maps[0], maps[1], out, m, n, k);
    return cudaGetLastError();
}

extern "C" cudaError_t two_stage(const bf16* a, const bf16* b, bf16* out, int m, int n, int k,
                                 cudaStream_t stream) {
    const int blocks = m / TILE_M * (n / TILE_N);
    return launch(gemm_two_stage, a, b, out, m, n, k, blocks, 128, 2, stream);
}

extern "C" cudaError_t specialised(const bf16* a, const bf16* b, bf16* out, int m, int n, int k,
                                   cudaStream_t stream) {
    return launch(gemm_specialised, a, b, out, m, n, k, sm_count(), 192, STAGES, stream);
}
