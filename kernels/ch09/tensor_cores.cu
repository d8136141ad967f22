// out = a * b^T in bf16 with fp32 accumulation, on the fp32 units and on the tensor cores.
// a is m x k, b is n x k, out is m x n, all row-major: the layout of a linear layer.
//
// Both kernels compute tiles of 128 x 128 with 256 threads, two blocks per SM, and copy tiles of a
// and b to shared memory with cp.async, two steps ahead. They differ in the units that multiply:
//
//   fp32_units    Each thread computes 8 x 8 outputs. Per four columns of k it loads 16 times 8
//                 bytes from shared memory, converts 64 elements to fp32, and issues 256 FMAs. An
//                 SM executes 128 FMAs per clock.
//   tensor_cores  Each warp computes 64 x 32 outputs. ldmatrix loads fragments of 16 x 16 into the
//                 registers of its lanes, without a conversion, and one mma.sync makes the 2048
//                 FMAs of 16 x 8 outputs. The full rate of Hopper's tensor cores takes wgmma, which
//                 reads the tiles from shared memory by itself (ch10/wgmma_ladder.cu).

#include "../ch10/hopper.cuh"

constexpr int TILE = 128, TILE_BYTES = TILE * ROW_BYTES, STAGES = 3, THREADS = 256;
constexpr int BLOCKS_PER_SM = 2;
constexpr int SHARED_BYTES = STAGES * 2 * TILE_BYTES + SWIZZLE_ALIGN;

// Start the copy of a tile; `source` is its first element.
__device__ void copy_tile(const bf16* source, int k, uint32_t tile) {
    const int chunk = threadIdx.x % 8;
    source += size_t(threadIdx.x / 8) * k + chunk * 8;
    tile += swizzled_offset(threadIdx.x / 8, chunk);
#pragma unroll
    for (int row = 0; row < TILE; row += THREADS / 8) {  // 32 rows further, the swizzle is the same
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(tile + row * ROW_BYTES),
                     "l"(source + size_t(row) * k)
                     : "memory");
    }
}

template <typename Units>
__global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    multiply(const bf16* a, const bf16* b, bf16* out, int m, int n, int k) {
    extern __shared__ unsigned char memory[];
    const uint32_t tiles = swizzle_aligned(memory);
    const TileOrigin origin = grouped_tile_origin<TILE, TILE>(blockIdx.x, m, n);
    const int steps = k / TILE_K;
    const auto copy = [&](int step) {
        const uint32_t stage = tiles + step % STAGES * 2 * TILE_BYTES;
        if (step < steps) {
            copy_tile(a + size_t(origin.row) * k + step * TILE_K, k, stage);
            copy_tile(b + size_t(origin.column) * k + step * TILE_K, k, stage + TILE_BYTES);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");  // also if empty: the wait counts
    };
    Units units;
    for (int step = 0; step < STAGES - 1; ++step) copy(step);
    for (int step = 0; step < steps; ++step) {
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
        __syncthreads();  // this stage is full, and the one before has been used
        copy(step + STAGES - 1);
        const uint32_t stage = tiles + step % STAGES * 2 * TILE_BYTES;
        units.multiply(stage, stage + TILE_BYTES);
    }
    units.store(out + size_t(origin.row) * n + origin.column, n);
}

// 4 x 2 warps of 32 x 64 outputs; the lanes of a warp form 4 rows of 8 columns.
struct Fp32Units {
    float sums[8][8] = {};
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int row = warp / 2 * 32 + lane / 8;        // then every 4th row
    const int column = warp % 2 * 64 + lane % 8;     // then every 8th column

    // Load four neighbouring elements. A bf16 is the upper half of a float.
    static __device__ float4 load(uint32_t address) {
        uint32_t low, high;
        asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                     : "=r"(low), "=r"(high)
                     : "r"(address)
                     : "memory");
        constexpr uint32_t UPPER = 0xffff0000;
        return make_float4(__uint_as_float(low << 16), __uint_as_float(low & UPPER),
                           __uint_as_float(high << 16), __uint_as_float(high & UPPER));
    }
    __device__ void multiply(uint32_t a, uint32_t b) {
#pragma unroll 1
        for (int four = 0; four < TILE_K / 4; ++four) {
            const uint32_t a_offset = swizzled_offset(row, four / 2) + four % 2 * 8;
            const uint32_t b_offset = swizzled_offset(column, four / 2) + four % 2 * 8;
            float4 x[8];
#pragma unroll
            for (int i = 0; i < 8; ++i)  // 4 rows further, the swizzle exchanges 64 bytes
                x[i] = load(a + (a_offset ^ i % 2 * 64) + 4 * i * ROW_BYTES);
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const float4 y = load(b + b_offset + 8 * j * ROW_BYTES);
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    sums[i][j] = fmaf(x[i].x, y.x, sums[i][j]);
                    sums[i][j] = fmaf(x[i].y, y.y, sums[i][j]);
                    sums[i][j] = fmaf(x[i].z, y.z, sums[i][j]);
                    sums[i][j] = fmaf(x[i].w, y.w, sums[i][j]);
                }
            }
        }
    }
    __device__ void store(bf16* out, int n) {
#pragma unroll
        for (int i = 0; i < 8; ++i)
#pragma unroll
            for (int j = 0; j < 8; ++j)
                out[size_t(row + 4 * i) * n + column + 8 * j] = __float2bfloat16_rn(sums[i][j]);
    }
};

// 2 x 4 warps of 64 x 32 outputs: 4 x 4 fragments of 16 x 8.
struct TensorCores {
    float sums[4][4][4] = {};
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int row = warp / 4 * 64, column = warp % 4 * 32;

    static __device__ void load(uint32_t (&fragments)[4], uint32_t address) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(fragments[0]), "=r"(fragments[1]), "=r"(fragments[2]),
                       "=r"(fragments[3])
                     : "r"(address)
                     : "memory");
    }
    __device__ void multiply(uint32_t a, uint32_t b) {
#pragma unroll
        for (int k = 0; k < TILE_K / 16; ++k) {
            uint32_t x[4][4], y[2][4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                load(x[i], a + swizzled_offset(row + i * 16 + lane % 16, 2 * k + lane / 16));
#pragma unroll
            for (int j = 0; j < 2; ++j)
                load(y[j], b + swizzled_offset(column + j * 16 + lane / 16 * 8 + lane % 8,
                                               2 * k + lane / 8 % 2));
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    mma_sync(sums[i][j], x[i], &y[j / 2][j % 2 * 2]);
        }
    }
    static __device__ void mma_sync(float (&sum)[4], const uint32_t* x, const uint32_t* y) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
            "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
            : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[0]), "r"(y[1]));
    }
    __device__ void store(bf16* out, int n) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j)
                store_fragments(sums[i][j], out, n, row + i * 16, column + j * 8);
    }
};

template <typename Units>
cudaError_t launch(const bf16* a, const bf16* b, bf16* out, int m, int n, int k,
                   cudaStream_t stream) {
    if (m % TILE || n % TILE || k % TILE_K) return cudaErrorInvalidValue;  // whole tiles
    if (cudaError_t error = cudaFuncSetAttribute(
            multiply<Units>, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES))
        return error;
    multiply<Units><<<m / TILE * (n / TILE), THREADS, SHARED_BYTES, stream>>>(a, b, out, m, n, k);
    return cudaGetLastError();
}

extern "C" cudaError_t fp32_units(const bf16* a, const bf16* b, bf16* out, int m, int n, int k,
                                  cudaStream_t stream) {
    return launch<Fp32Units>(a, b, out, m, n, k, stream);
}

extern "C" cudaError_t tensor_cores(const bf16* a, const bf16* b, bf16* out, int m, int n, int k,
                                    cudaStream_t stream) {
    return launch<TensorCores>(a, b, out, m, n, k, stream);
}
