// out = a * b^T in bf16 with fp32 sums: from the warps of Ampere to the warpgroups of Hopper.
// a is m x k, b is n x k, out is m x n, all row-major: the layout of a linear layer.
//
//   mma_sync      The tile program of Ampere: 256 threads copy tiles of 64 columns to shared memory
//                 (cp.async, three stages), each warp loads fragments into registers (ldmatrix) and
//                 multiplies 16 x 8 x 16. The tensor cores of an H200 reach 36 % of their rate:
//                 for 16 columns of both tiles the warps read 24 KiB of fragments, 192 clocks of
//                 shared memory at 128 bytes a clock, where the products would take 128 clocks.
//                 Copies come on top, and a warp first loads, then multiplies.
//   wgmma         The same copies, but four warps together name whole tiles in shared memory
//                 (descriptors) and 64 x 128 x 16 is one instruction, which runs asynchronously.
//                 What threads wrote must be fenced for it: it reads through another path. A step
//                 waits for its product, since the copies that come next overwrite its tiles.
//   tma           Two changes. The copy engine fetches the tiles: one thread asks for a whole
//                 tile, and an mbarrier tells when its bytes have landed. No address arithmetic,
//                 no fence. And the next product is under way while the block waits for the one
//                 before, in whose place a tile is then fetched.
//   specialised   One thread only fetches, four stages ahead; two warpgroups only multiply, 64 by
//                 256 each, with the registers that the producers give up. One block an SM walks
//                 through the tiles: the next tile's fetches run during the stores of this one.

#include "hopper.cuh"

// --- Tiles of 128 x 128, three stages of both operands, two blocks an SM ------------------------
constexpr int SIDE = 128, TILE_BYTES = SIDE * ROW_BYTES, STAGES = 3, THREADS = 256;
constexpr int SHARED = STAGES * 2 * TILE_BYTES + SWIZZLE_ALIGN;

__device__ void copy_tile(const bf16* from, int k, uint32_t to) {
    for (int i = threadIdx.x; i < SIDE * 8; i += THREADS) {
        const int row = i / 8, chunk = i % 8;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                     :: "r"(to + swizzled_offset(row, chunk)), "l"(from + size_t(row) * k + chunk * 8));
    }
}

// The loop of both cp.async rungs.
template <typename Product>
__device__ void copied(const bf16* a, const bf16* b, bf16* out, int m, int n, int k) {
    extern __shared__ unsigned char memory[];
    const uint32_t tiles = swizzle_aligned(memory);
    const TileOrigin origin = grouped_tile_origin<SIDE, SIDE>(blockIdx.x, m, n);
    const int steps = k / TILE_K;
    auto copy = [&](int step) {
        const uint32_t to = tiles + step % STAGES * 2 * TILE_BYTES;
        if (step < steps) {
            copy_tile(a + size_t(origin.row) * k + step * TILE_K, k, to);
            copy_tile(b + size_t(origin.column) * k + step * TILE_K, k, to + TILE_BYTES);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");  // an empty one keeps the count
    };
    Product product;
    for (int step = 0; step < STAGES - 1; ++step) copy(step);
    for (int step = 0; step < steps; ++step) {
        asm volatile("cp.async.wait_group %0;" :: "n"(STAGES - 2) : "memory");
        if (Product::READS_ASYNC) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncthreads();  // this step's tiles are there, and those of the last one are used up
        copy(step + STAGES - 1);
        const uint32_t at = tiles + step % STAGES * 2 * TILE_BYTES;
        product.step(at, at + TILE_BYTES);
    }
    product.finish(out, n, origin.row, origin.column);
}

struct WarpProduct {  // 8 warps, 2 x 4, of 64 x 32 each
    static constexpr bool READS_ASYNC = false;
    float sums[4][4][4] = {};
    const int lane = threadIdx.x % 32, row = threadIdx.x / 128 * 64;
    const int column = threadIdx.x / 32 % 4 * 32;
    static __device__ void load(uint32_t (&to)[4], uint32_t at) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(at) : "memory");
    }
    __device__ void step(uint32_t a, uint32_t b) {
        for (int k = 0; k < TILE_K / 16; ++k) {
            uint32_t x[4][4], y[2][4];
            for (int i = 0; i < 4; ++i)
                load(x[i], a + swizzled_offset(row + i * 16 + lane % 16, 2 * k + lane / 16));
            for (int j = 0; j < 2; ++j)
                load(y[j], b + swizzled_offset(column + j * 16 + lane / 16 * 8 + lane % 8,
                                        2 * k + lane / 8 % 2));
            for (int i = 0; i < 4; ++i)
                for (int j = 0; j < 4; ++j) {
                    float(&d)[4] = sums[i][j];
                    const uint32_t* z = &y[j / 2][j % 2 * 2];
                    asm volatile(
                        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
                        "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(x[i][0]),
                          "r"(x[i][1]), "r"(x[i][2]), "r"(x[i][3]), "r"(z[0]), "r"(z[1]));
                }
        }
    }
    __device__ void finish(bf16* out, int n, int top, int left) {
        for (int i = 0; i < 4; ++i)
            for (int j = 0; j < 4; ++j)
                store_fragments(sums[i][j], out, n, top + row + i * 16, left + column + j * 8);
    }
};

struct WarpgroupProduct {  // 2 warpgroups of 64 x 128 each
    static constexpr bool READS_ASYNC = true;
    float sums[64] = {};
    const int row = threadIdx.x / 128 * 64;

    __device__ void step(uint32_t a, uint32_t b) {
        wgmma_k_tile(sums, a + row * ROW_BYTES, b, 1);
        wgmma_wait<0>();
    }
    __device__ void finish(bf16* out, int n, int top, int left) {
        store_fragments(sums, out, n, top + row + threadIdx.x / 32 % 4 * 16, left);
    }
};

__global__ void __launch_bounds__(THREADS, 2)
gemm_mma_sync(const bf16* a, const bf16* b, bf16* out, int m, int n, int k) {
    copied<WarpProduct>(a, b, out, m, n, k);
}

__global__ void __launch_bounds__(THREADS, 2)
gemm_wgmma(const bf16* a, const bf16* b, bf16* out, int m, int n, int k) {
    copied<WarpgroupProduct>(a, b, out, m, n, k);
}

__global__ void __launch_bounds__(THREADS, 2)
gemm_tma(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b, bf16* out,
         int m, int n, int k) {
    extern __shared__ unsigned char memory[];
    __shared__ uint64_t full[STAGES];
    const uint32_t tiles = swizzle_aligned(memory);
    const TileOrigin origin = grouped_tile_origin<SIDE, SIDE>(blockIdx.x, m, n);
    const int steps = k / TILE_K, mine = threadIdx.x / 128 * 64;
    auto fetch = [&](int step) {
        const uint32_t to = tiles + step % STAGES * 2 * TILE_BYTES;
        uint64_t* landed = &full[step % STAGES];
        arrive_expect_tx(landed, 2 * TILE_BYTES);
        tma_load_2d(to, &a, step * TILE_K, origin.row, landed);
        tma_load_2d(to + TILE_BYTES, &b, step * TILE_K, origin.column, landed);
    };
    if (threadIdx.x == 0) {
        for (auto& barrier : full) mbarrier_init(&barrier, 1);
        fence_mbarrier_init();
        for (int step = 0; step < min(STAGES, steps); ++step) fetch(step);
    }
    __syncthreads();
    float sums[64] = {};
    for (int step = 0; step < steps; ++step) {
        wait(&full[step % STAGES], step / STAGES % 2);
        const uint32_t at = tiles + step % STAGES * 2 * TILE_BYTES;
        wgmma_k_tile(sums, at + mine * ROW_BYTES, at + TILE_BYTES, 1);
        wgmma_wait<1>();  // the product before this one is done,
        __syncthreads();  // in both warpgroups: its tiles may be overwritten
        const int next = step - 1 + STAGES;
        if (threadIdx.x == 0 && step > 0 && next < steps) fetch(next);
    }
    wgmma_wait<0>();
    store_fragments(sums, out, n, origin.row + mine + threadIdx.x / 32 % 4 * 16, origin.column);
}

// --- Tiles of 128 x 256, four stages, one block an SM, a role for each warpgroup -----------------
constexpr int WIDE = 256, DEEP = 4;
constexpr int STAGE_BYTES = (SIDE + WIDE) * ROW_BYTES;
constexpr int SHARED_WIDE = DEEP * STAGE_BYTES + SWIZZLE_ALIGN;

__global__ void __launch_bounds__(384, 1)
gemm_specialised(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                 bf16* out, int m, int n, int k) {
    extern __shared__ unsigned char memory[];
    __shared__ uint64_t full[DEEP], empty[DEEP];
    const uint32_t tiles = swizzle_aligned(memory);
    const int steps = k / TILE_K, count = m / SIDE * (n / WIDE), group = threadIdx.x / 128;
    if (threadIdx.x == 0) {
        for (auto& barrier : full) mbarrier_init(&barrier, 1);
        for (auto& barrier : empty) mbarrier_init(&barrier, 8);  // the warps that multiply
        fence_mbarrier_init();
    }
    __syncthreads();
    int stage = 0, parity = 0;
    auto advance = [&] { parity ^= (stage = (stage + 1) % DEEP) == 0; };
    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x != 0) return;
        for (int tile = blockIdx.x; tile < count; tile += gridDim.x) {
            const TileOrigin origin = grouped_tile_origin<SIDE, WIDE>(tile, m, n);
            for (int step = 0; step < steps; ++step, advance()) {
                const uint32_t to = tiles + stage * STAGE_BYTES;
                wait(&empty[stage], parity ^ 1);
                arrive_expect_tx(&full[stage], STAGE_BYTES);
                tma_load_2d(to, &a, step * TILE_K, origin.row, &full[stage]);
                tma_load_2d(to + TILE_BYTES, &b, step * TILE_K, origin.column, &full[stage]);
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        const int mine = (group - 1) * 64;
        for (int tile = blockIdx.x; tile < count; tile += gridDim.x) {
            float sums[128];
            for (int step = 0; step < steps; ++step, advance()) {
                wait(&full[stage], parity);
                const uint32_t at = tiles + stage * STAGE_BYTES;
                wgmma_k_tile(sums, at + mine * ROW_BYTES, at + TILE_BYTES, step);
                wgmma_wait<1>();
                if (step > 0 && threadIdx.x % 32 == 0) arrive(&empty[(stage + DEEP - 1) % DEEP]);
            }
            wgmma_wait<0>();
            if (threadIdx.x % 32 == 0) arrive(&empty[(stage + DEEP - 1) % DEEP]);
            const TileOrigin origin = grouped_tile_origin<SIDE, WIDE>(tile, m, n);
            store_fragments(sums, out, n, origin.row + mine + threadIdx.x / 32 % 4 * 16, origin.column);
        }
    }
}

int tiles_of(int m, int n) { return m / SIDE * (n / SIDE); }

template <typename Kernel, typename Operand>
cudaError_t launch(Kernel kernel, Operand a, Operand b, bf16* out, int m, int n, int k, int blocks,
                   int threads, int shared, cudaStream_t stream) {
    if (m % SIDE || n % WIDE || k % TILE_K) return cudaErrorInvalidValue;  // whole tiles only
    if (cudaError_t error = cudaFuncSetAttribute(
            kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared))
        return error;
    kernel<<<blocks, threads, shared, stream>>>(a, b, out, m, n, k);
    return cudaGetLastError();
}

extern "C" cudaError_t mma_sync(const bf16* a, const bf16* b, bf16* out, int m, int n, int k,
                                cudaStream_t stream) {
    return launch(gemm_mma_sync, a, b, out, m, n, k, tiles_of(m, n), THREADS, SHARED, stream);
}

extern "C" cudaError_t wgmma(const bf16* a, const bf16* b, bf16* out, int m, int n, int k,
                             cudaStream_t stream) {
    return launch(gemm_wgmma, a, b, out, m, n, k, tiles_of(m, n), THREADS, SHARED, stream);
}

template <typename Kernel>
cudaError_t launch_mapped(Kernel kernel, const bf16* a, const bf16* b, bf16* out, int m, int n,
                          int k, int columns, int blocks, int threads, int shared,
                          cudaStream_t stream) {
    CUtensorMap maps[2];
    if (cudaError_t error = make_tensor_map(&maps[0], a, m, k, SIDE)) return error;
    if (cudaError_t error = make_tensor_map(&maps[1], b, n, k, columns)) return error;
    return launch(kernel, maps[0], maps[1], out, m, n, k, blocks, threads, shared, stream);
}

extern "C" cudaError_t tma(const bf16* a, const bf16* b, bf16* out, int m, int n, int k,
                           cudaStream_t stream) {
    return launch_mapped(gemm_tma, a, b, out, m, n, k, SIDE, tiles_of(m, n), THREADS, SHARED,
                         stream);
}

extern "C" cudaError_t specialised(const bf16* a, const bf16* b, bf16* out, int m, int n, int k,
                                   cudaStream_t stream) {
    return launch_mapped(gemm_specialised, a, b, out, m, n, k, WIDE, sm_count(), 384,
                         SHARED_WIDE, stream);
}
