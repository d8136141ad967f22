// out = x * w^T with both operands in NVFP4: x is quantized here in each call, w beforehand. The
// memory layout of numbers and scales is described in nvfp4.py.
//
//   quantize_rows  One thread per group of 16 neighbors: their largest magnitude gives the E4M3
//                  scale, and one instruction converts two values to a byte.
//   linear         A warp-specialized GEMM with tcgen05.mma.block_scale: 64 values along k per
//                  instruction, twice as many as in fp8. Descriptors point to the operands in
//                  shared memory; 64 numbers are 32 bytes, so a stage of 256 along k has the layout
//                  of 64 bf16. The scales must be in tensor memory: tcgen05.cp copies a block of
//                  512 bytes (128 rows x 4 scales) into 4 columns.
//
// Thread 32 is the producer (bulk copies), thread 0 copies scales to tensor memory and issues the
// MMAs, and then all four warps run the epilogue. Each stage has its own scale columns, so they are
// free again as soon as the MMAs of the stage are done.

#include <cuda_fp4.h>
#include <cuda_fp8.h>

#include "../ch10/hopper.cuh"

constexpr int TILE = 128;                         // rows of x and of w per tile of the result
constexpr int STAGE_K = 256;                      // numbers along k per stage: 128 bytes per row
constexpr int STAGES = 4;                         // stages of the shared-memory pipeline
constexpr int TILE_BYTES = TILE * ROW_BYTES;      // 128 x 256 numbers
constexpr int SCALE_BYTES = TILE * STAGE_K / 16;  // 4 blocks of 512 bytes
constexpr int STAGE_BYTES = 2 * (TILE_BYTES + SCALE_BYTES);
constexpr int SHARED_BYTES = STAGES * STAGE_BYTES + SWIZZLE_ALIGN;
constexpr int TMEM_COLUMNS = 256;                 // 128 for accumulators, 32 per stage for scales

static_assert(TILE + STAGES * 2 * 16 <= TMEM_COLUMNS);
static_assert(STAGE_BYTES % SWIZZLE_ALIGN == 0, "each stage starts at a swizzle boundary");

// Shared-memory descriptor of an operand: 128-byte swizzle, groups of 8 rows 1024 bytes apart.
constexpr __host__ __device__ uint64_t operand_descriptor(uint32_t address) {
    return uint64_t((address & 0x3FFFF) >> 4) | 1ull << 16 | uint64_t(1024 >> 4) << 32 |
           1ull << 46 | 2ull << 61;
}

// Shared-memory descriptor of a block of scales: no swizzle, 32 rows of 16 bytes, groups of 8 rows
// 128 bytes apart.
constexpr __host__ __device__ uint64_t scale_descriptor(uint32_t address) {
    return uint64_t((address & 0x3FFFF) >> 4) | 1ull << 16 | uint64_t(128 >> 4) << 32 | 1ull << 46;
}

// E2M1 operands (1 in the fields at bits 7 and 10), n / 8 at bit 17, E4M3 scales (bit 23 is 0),
// m / 16 at bit 24.
constexpr uint32_t INSTRUCTION_DESCRIPTOR =
    1u << 7 | 1u << 10 | (TILE / 8) << 17 | (TILE / 16) << 24;

static_assert(INSTRUCTION_DESCRIPTOR == 0x08200480);
static_assert(scale_descriptor(0x12400) == 0x0000400800011240ull);

__global__ void quantize_rows(const bf16* x, uint2* numbers, uint8_t* scales, int groups) {
    const int group = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y;
    if (group >= groups) return;
    const auto* pairs = reinterpret_cast<const __nv_bfloat162*>(x);
    const auto* source = pairs + (size_t(row) * groups + group) * 8;
    float2 values[8];
    float max_magnitude = 0;
    for (int i = 0; i < 8; ++i) {
        values[i] = __bfloat1622float2(source[i]);
        max_magnitude = fmaxf(max_magnitude, fmaxf(fabsf(values[i].x), fabsf(values[i].y)));
    }
    const auto scale = __nv_cvt_float_to_fp8(max_magnitude / 6, __NV_SATFINITE, __NV_E4M3);
    const float rounded = __half2float(__half(__nv_cvt_fp8_to_halfraw(scale, __NV_E4M3)));
    const float inverse = rounded > 0 ? 1 / rounded : 0;
    uint32_t packed[2] = {};
    for (int i = 0; i < 8; ++i) {
        const float2 scaled = make_float2(values[i].x * inverse, values[i].y * inverse);
        const uint32_t pair = __nv_cvt_float2_to_fp4x2(scaled, __NV_E2M1, cudaRoundNearest);
        packed[i / 4] |= pair << i % 4 * 8;
    }
    numbers[size_t(row) * groups + group] = make_uint2(packed[0], packed[1]);
    const size_t block = size_t(row / 128) * (groups / 4) + group / 4;
    scales[block * 512 + row % 32 * 16 + row % 128 / 32 * 4 + group % 4] = scale;
}

__device__ void bulk_copy(uint32_t to, const uint8_t* from, uint32_t bytes, uint64_t* full) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];"
                 :: "r"(to), "l"(from), "r"(bytes), "r"(shared_address(full)) : "memory");
}

// Copies a block of scales into 4 columns, replicated for the lanes of all four warps.
__device__ void copy_scales_to_tmem(uint32_t columns, uint32_t block) {
    asm volatile("tcgen05.cp.cta_group::1.32x128b.warpx4 [%0], %1;"
                 :: "r"(columns), "l"(scale_descriptor(block)) : "memory");
}

__device__ void mma_block_scaled(uint32_t accumulator, uint32_t x, uint32_t w, uint32_t x_scales,
                                 uint32_t w_scales, bool add) {
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %6, 0;\n"
                 "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.scale_vec::4X "
                 "[%0], %1, %2, %3, [%4], [%5], add;\n}"
                 :: "r"(accumulator), "l"(operand_descriptor(x)), "l"(operand_descriptor(w)),
                    "r"(INSTRUCTION_DESCRIPTOR), "r"(x_scales), "r"(w_scales), "r"(int(add))
                 : "memory");
}

// Arrive on the barrier when all MMAs issued so far are complete.
__device__ void commit(uint64_t* barrier) {
    asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];"
                 :: "r"(shared_address(barrier)) : "memory");
}

__device__ void fence_before_thread_sync() {
    asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
}

__device__ void fence_after_thread_sync() {
    asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
}

// Epilogue: lane l of warp w holds row 32 * w + l of the tile.
__device__ void store_rows(uint32_t accumulator, bf16* out, int n, float scale) {
    for (int column = 0; column < TILE; column += 8) {
        uint32_t v[8];
        asm volatile("tcgen05.ld.sync.aligned.32x32b.x8.b32 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8];"
                     : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]), "=r"(v[4]), "=r"(v[5]),
                       "=r"(v[6]), "=r"(v[7])
                     : "r"(accumulator + (threadIdx.x / 32 * 32 << 16) + column));
        asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
        __nv_bfloat162 packed[4];
        for (int i = 0; i < 4; ++i)
            packed[i] = __floats2bfloat162_rn(__uint_as_float(v[2 * i]) * scale,
                                              __uint_as_float(v[2 * i + 1]) * scale);
        *reinterpret_cast<uint4*>(out + size_t(threadIdx.x) * n + column) =
            *reinterpret_cast<const uint4*>(packed);
    }
}

__global__ void __launch_bounds__(128)
linear(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap w,
       const uint8_t* x_scales, const uint8_t* w_scales, bf16* out, int m, int n, int k,
       float scale) {
    extern __shared__ unsigned char memory[];
    __shared__ uint64_t full[STAGES], empty[STAGES], accumulated;
    __shared__ uint32_t tmem_base;
    const uint32_t tiles = swizzle_aligned(memory);
    const TileOrigin origin = grouped_tile_origin<TILE, TILE>(blockIdx.x, m, n);
    const int steps = k / STAGE_K;
    if (threadIdx.x < 32) {
        asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;"
                     :: "r"(shared_address(&tmem_base)), "r"(TMEM_COLUMNS) : "memory");
        asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;" ::: "memory");
    }
    if (threadIdx.x == 0) {
        for (auto& barrier : full) mbarrier_init(&barrier, 1);
        for (auto& barrier : empty) mbarrier_init(&barrier, 1);
        mbarrier_init(&accumulated, 1);
        fence_mbarrier_init();
    }
    fence_before_thread_sync();
    __syncthreads();
    fence_after_thread_sync();
    const uint32_t accumulator = tmem_base;

    if (threadIdx.x == 32) {  // producer
        const size_t scale_pitch = size_t(k) / 64 * 512;  // bytes of scales per 128 rows
        for (int step = 0; step < steps; ++step) {
            const int stage = step % STAGES;
            const uint32_t to = tiles + stage * STAGE_BYTES;
            wait(&empty[stage], step / STAGES % 2 ^ 1);
            arrive_expect_tx(&full[stage], STAGE_BYTES);
            tma_load_2d(to, &x, step * ROW_BYTES, origin.row, &full[stage]);
            tma_load_2d(to + TILE_BYTES, &w, step * ROW_BYTES, origin.column, &full[stage]);
            bulk_copy(to + 2 * TILE_BYTES,
                      x_scales + origin.row / 128 * scale_pitch + size_t(step) * SCALE_BYTES,
                      SCALE_BYTES, &full[stage]);
            bulk_copy(to + 2 * TILE_BYTES + SCALE_BYTES,
                      w_scales + origin.column / 128 * scale_pitch + size_t(step) * SCALE_BYTES,
                      SCALE_BYTES, &full[stage]);
        }
    } else if (threadIdx.x == 0) {  // MMA issuer
        for (int step = 0; step < steps; ++step) {
            const int stage = step % STAGES;
            const uint32_t operands = tiles + stage * STAGE_BYTES;
            const uint32_t scale_columns = accumulator + TILE + stage * 32;
            wait(&full[stage], step / STAGES % 2);
            fence_after_thread_sync();
            for (int block = 0; block < 8; ++block)  // 4 blocks of x, then 4 of w
                copy_scales_to_tmem(scale_columns + block * 4,
                                    operands + 2 * TILE_BYTES + block * 512);
            for (int i = 0; i < 4; ++i)
                mma_block_scaled(accumulator, operands + 32 * i, operands + TILE_BYTES + 32 * i,
                                 scale_columns + i * 4, scale_columns + 16 + i * 4, step || i);
            commit(&empty[stage]);
        }
        commit(&accumulated);
    }
    __syncwarp();
    wait(&accumulated, 0);
    __syncwarp();
    fence_after_thread_sync();
    store_rows(accumulator, out + size_t(origin.row) * n + origin.column, n, scale);
    fence_before_thread_sync();
    __syncthreads();
    if (threadIdx.x < 32)
        asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;"
                     :: "r"(accumulator), "r"(TMEM_COLUMNS) : "memory");
}

// `numbers` and `scales` are scratch for x in NVFP4. `scale` is the matrix scale of w; x's is 1.
extern "C" cudaError_t nvfp4_linear(const bf16* x, const uint8_t* w, const uint8_t* w_scales,
                                    uint8_t* numbers, uint8_t* scales, bf16* out, int m, int n,
                                    int k, float scale, cudaStream_t stream) {
    if (m % TILE || n % TILE || k % STAGE_K) return cudaErrorInvalidValue;  // whole tiles only
    CUtensorMap maps[2];
    if (cudaError_t error = make_tensor_map(&maps[0], numbers, m, k / 2, TILE, true)) return error;
    if (cudaError_t error = make_tensor_map(&maps[1], w, n, k / 2, TILE, true)) return error;
    if (cudaError_t error = cudaFuncSetAttribute(
            linear, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES))
        return error;
    quantize_rows<<<dim3((k / 16 + 127) / 128, m), 128, 0, stream>>>(
        x, reinterpret_cast<uint2*>(numbers), scales, k / 16);
    linear<<<m / TILE * (n / TILE), 128, SHARED_BYTES, stream>>>(
        maps[0], maps[1], scales, w_scales, out, m, n, k, scale);
    return cudaGetLastError();
}
