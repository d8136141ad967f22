// out = a * b^T in bf16 with fp32 sums on Blackwell: a is m x k, b is n x k, all row-major.
//
// tcgen05.mma takes both operands from shared memory and adds to tensor memory (TMEM): 128 lanes
// and 512 columns of 32 bits on each multiprocessor, a place for sums that costs no registers. One
// thread starts it for the whole block; it tells by an mbarrier when it has read its operands.
//
//   two_stage    One thread fetches and multiplies by turns: it may fetch into a stage only when
//                the product before last has read it, so one tile is under way beside the product.
//                When all is summed, the four warps carry the sums from TMEM to memory.
//   specialised  A warp fetches, four stages deep, a warp multiplies, and four warps store.
//                Two accumulators of 256 columns take turns: a tile is stored while the next one is
//                summed. One block a multiprocessor walks through the tiles.

#include "hopper.cuh"

constexpr int ROWS = 128, COLUMNS = 256;  // of a tile of the result
constexpr int A_BYTES = ROWS * ROW_BYTES, STAGE_BYTES = A_BYTES + COLUMNS * ROW_BYTES;

// As for wgmma, with a version in bits 46-47 and 2 in the top three bits for 128-byte swizzle.
constexpr __host__ __device__ uint64_t descriptor(uint32_t address) {
    return uint64_t((address & 0x3FFFF) >> 4) | 1ull << 16 | uint64_t(1024 >> 4) << 32 |
           1ull << 46 | 2ull << 61;
}

// fp32 sums (bit 4), bf16 operands (bits 7 and 10), n / 8 from bit 17, m / 16 from bit 24; both
// operands have k in the direction of their rows (bits 15 and 16 are 0).
constexpr uint32_t INSTRUCTION =
    1u << 4 | 1u << 7 | 1u << 10 | (COLUMNS / 8) << 17 | (ROWS / 16) << 24;

static_assert(descriptor(0x12400) == 0x4000404000011240ull);
static_assert(INSTRUCTION == 0x08400490);

__device__ void multiply(uint32_t sums, uint64_t a, uint64_t b, bool add) {
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %4, 0;\n"
                 "tcgen05.mma.cta_group::1.kind::f16 [%0], %1, %2, %3, add;\n}"
                 :: "r"(sums), "l"(a), "l"(b), "r"(INSTRUCTION), "r"(int(add)) : "memory");
}

// Let a barrier hear when all products so far have read their operands and added.
__device__ void tell(uint64_t* barrier) {
    asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];"
                 :: "r"(shared_address(barrier)) : "memory");
}

// Four products of depth 16.
__device__ void multiply_stage(uint32_t sums, uint32_t tiles, bool add, uint64_t* used) {
    for (int k = 0; k < 4; ++k)
        multiply(sums, descriptor(tiles + 32 * k), descriptor(tiles + A_BYTES + 32 * k), add || k);
    tell(used);
}

__device__ void fetch(uint32_t to, const CUtensorMap* a, const CUtensorMap* b, TileOrigin origin,
                      int step, uint64_t* full) {
    arrive_expect_tx(full, STAGE_BYTES);
    tma_load_2d(to, a, step * TILE_K, origin.row, full);
    tma_load_2d(to + A_BYTES, b, step * TILE_K, origin.column, full);
}

__device__ void reserve_tensor_memory(uint32_t* at, int columns) {  // by one warp
    asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;"
                 :: "r"(shared_address(at)), "r"(columns) : "memory");
    asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;" ::: "memory");
}

__device__ void free_tensor_memory(uint32_t at, int columns) {  // by the same warp
    asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;"
                 :: "r"(at), "r"(columns) : "memory");
}

__device__ void before_signal() { asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory"); }
__device__ void after_signal() { asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory"); }

#define W8(v, i) "=r"(v[i]), "=r"(v[i + 1]), "=r"(v[i + 2]), "=r"(v[i + 3]), \
                 "=r"(v[i + 4]), "=r"(v[i + 5]), "=r"(v[i + 6]), "=r"(v[i + 7])

// A warp reaches the 32 lanes of its place among four; a lane is a row, 32 columns at a time.
__device__ void store_rows(uint32_t sums, bf16* out, int n, TileOrigin origin) {
    const int row = threadIdx.x % 128;
    __syncwarp();
    bf16* to = out + size_t(origin.row + row) * n + origin.column;
    for (int column = 0; column < COLUMNS; column += 32) {
        uint32_t v[32];
        asm volatile("tcgen05.ld.sync.aligned.32x32b.x32.b32 {%0, %1, %2, %3, %4, %5, %6, %7, "
                     "%8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
                     "%23, %24, %25, %26, %27, %28, %29, %30, %31}, [%32];"
                     : W8(v, 0), W8(v, 8), W8(v, 16), W8(v, 24)
                     : "r"(sums + (row / 32 * 32 << 16) + column));
        asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
        __nv_bfloat162 packed[16];
        for (int i = 0; i < 16; ++i)
            packed[i] = __floats2bfloat162_rn(__uint_as_float(v[2 * i]),
                                              __uint_as_float(v[2 * i + 1]));
        for (int i = 0; i < 4; ++i)
            reinterpret_cast<uint4*>(to + column)[i] = reinterpret_cast<const uint4*>(packed)[i];
    }
}

__global__ void __launch_bounds__(128)
gemm_two_stage(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
               bf16* out, int m, int n, int k) {
    extern __shared__ unsigned char memory[];
    __shared__ uint64_t full[2], used[2], summed;
    __shared__ uint32_t tensor_memory;
    const uint32_t tiles = swizzle_aligned(memory);
    const TileOrigin origin = grouped_tile_origin<ROWS, COLUMNS>(blockIdx.x, m, n);
    const int steps = k / TILE_K;
    if (threadIdx.x < 32) reserve_tensor_memory(&tensor_memory, COLUMNS);
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < 2; ++stage) {
            mbarrier_init(&full[stage], 1);
            mbarrier_init(&used[stage], 1);
        }
        mbarrier_init(&summed, 1);
        fence_mbarrier_init();
    }
    before_signal();
    __syncthreads();
    after_signal();
    const uint32_t sums = tensor_memory;
    if (threadIdx.x == 0) {
        fetch(tiles, &a, &b, origin, 0, &full[0]);
        for (int step = 0; step < steps; ++step) {
            const int stage = step % 2, next = step + 1;
            if (next < steps) {
                if (step > 0) wait(&used[next % 2], (step - 1) / 2 % 2);
                fetch(tiles + next % 2 * STAGE_BYTES, &a, &b, origin, next, &full[next % 2]);
            }
            wait(&full[stage], step / 2 % 2);
            after_signal();
            multiply_stage(sums, tiles + stage * STAGE_BYTES, step > 0, &used[stage]);
        }
        tell(&summed);
    }
    __syncwarp();
    wait(&summed, 0);
    after_signal();
    store_rows(sums, out, n, origin);
    before_signal();
    __syncthreads();
    if (threadIdx.x < 32) free_tensor_memory(sums, COLUMNS);
}

constexpr int STAGES = 4;

__global__ void __launch_bounds__(192, 1)
gemm_specialised(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                 bf16* out, int m, int n, int k) {
    extern __shared__ unsigned char memory[];
    __shared__ uint64_t full[STAGES], used[STAGES], summed[2], stored[2];
    __shared__ uint32_t tensor_memory;
    const uint32_t tiles = swizzle_aligned(memory);
    const int steps = k / TILE_K, count = m / ROWS * (n / COLUMNS), warp = threadIdx.x / 32;
    if (warp == 4) reserve_tensor_memory(&tensor_memory, 2 * COLUMNS);
    if (threadIdx.x == 0) {
        for (auto& barrier : full) mbarrier_init(&barrier, 1);
        for (auto& barrier : used) mbarrier_init(&barrier, 1);
        for (auto& barrier : summed) mbarrier_init(&barrier, 1);
        for (auto& barrier : stored) mbarrier_init(&barrier, 128);
        fence_mbarrier_init();
    }
    before_signal();
    __syncthreads();
    after_signal();
    const uint32_t sums = tensor_memory;
    const bool leads = threadIdx.x % 32 == 0;
    if (warp == 5 && leads) {  // fetches
        int i = 0;
        for (int tile = blockIdx.x; tile < count; tile += gridDim.x) {
            const TileOrigin origin = grouped_tile_origin<ROWS, COLUMNS>(tile, m, n);
            for (int step = 0; step < steps; ++step, ++i) {
                wait(&used[i % STAGES], i / STAGES % 2 ^ 1);
                fetch(tiles + i % STAGES * STAGE_BYTES, &a, &b, origin, step, &full[i % STAGES]);
            }
        }
    } else if (warp == 4 && leads) {  // multiplies
        int i = 0, turn = 0;
        for (int tile = blockIdx.x; tile < count; tile += gridDim.x, ++turn) {
            wait(&stored[turn % 2], turn / 2 % 2 ^ 1);
            after_signal();
            for (int step = 0; step < steps; ++step, ++i) {
                wait(&full[i % STAGES], i / STAGES % 2);
                after_signal();
                multiply_stage(sums + turn % 2 * COLUMNS, tiles + i % STAGES * STAGE_BYTES,
                               step > 0, &used[i % STAGES]);
            }
            tell(&summed[turn % 2]);
        }
    } else if (warp < 4) {  // store
        int turn = 0;
        for (int tile = blockIdx.x; tile < count; tile += gridDim.x, ++turn) {
            wait(&summed[turn % 2], turn / 2 % 2);
            after_signal();
            store_rows(sums + turn % 2 * COLUMNS, out, n, grouped_tile_origin<ROWS, COLUMNS>(tile, m, n));
            before_signal();
            arrive(&stored[turn % 2]);
        }
    }
    __syncwarp();
    __syncthreads();
    if (warp == 4) free_tensor_memory(sums, 2 * COLUMNS);
}

template <typename Kernel>
cudaError_t launch(Kernel kernel, const bf16* a, const bf16* b, bf16* out, int m, int n, int k,
                   int blocks, int threads, int stages, cudaStream_t stream) {
    if (m % ROWS || n % COLUMNS || k % TILE_K) return cudaErrorInvalidValue;  // whole tiles only
    CUtensorMap maps[2];
    if (cudaError_t error = make_tensor_map(&maps[0], a, m, k, ROWS)) return error;
    if (cudaError_t error = make_tensor_map(&maps[1], b, n, k, COLUMNS)) return error;
    const int shared = stages * STAGE_BYTES + SWIZZLE_ALIGN;
    if (cudaError_t error = cudaFuncSetAttribute(
            kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared))
        return error;
    kernel<<<blocks, threads, shared, stream>>>(maps[0], maps[1], out, m, n, k);
    return cudaGetLastError();
}

extern "C" cudaError_t two_stage(const bf16* a, const bf16* b, bf16* out, int m, int n, int k,
                                 cudaStream_t stream) {
    const int blocks = m / ROWS * (n / COLUMNS);
    return launch(gemm_two_stage, a, b, out, m, n, k, blocks, 128, 2, stream);
}

extern "C" cudaError_t specialised(const bf16* a, const bf16* b, bf16* out, int m, int n, int k,
                                   cudaStream_t stream) {
    return launch(gemm_specialised, a, b, out, m, n, k, sm_count(), 192, STAGES, stream);
}
