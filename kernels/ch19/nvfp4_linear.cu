// out = x * w^T with both operands in NVFP4: x is quantised here, w beforehand (nvfp4.py says how
// numbers and scales lie in memory).
//
//   quantize_rows  A thread quantises 16 neighbours: their largest magnitude gives the scale, the
//                  conversion to 4 bits is an instruction.
//   linear         tcgen05.mma with block scales: 64 products along k at once, twice as many as in
//                  fp8. The numbers come from shared memory by descriptors; 64 are 32 bytes, so
//                  a step of 256 along k looks just like 64 of bf16. The scales must lie in
//                  tensor memory: 512 bytes, for 128 rows and 4 scales each, fill 4 columns.
//
// One thread fetches, one copies scales and multiplies, then four warps store. A stage has scale
// columns of its own, so that they are free when its products are done.

#include <cuda_fp4.h>
#include <cuda_fp8.h>

#include "../ch10/hopper.cuh"

constexpr int SIDE = 128;                      // rows of x and of w in a tile of the result
constexpr int STEP = 256;                      // numbers along k in a stage: 128 bytes a row
constexpr int STAGES = 4;
constexpr int TILE_BYTES = SIDE * ROW_BYTES;   // 128 x 256 numbers
constexpr int SCALE_BYTES = SIDE * STEP / 16;  // 4 blocks of 512
constexpr int STAGE_BYTES = 2 * (TILE_BYTES + SCALE_BYTES);
constexpr int SHARED = STAGES * STAGE_BYTES + SWIZZLE_ALIGN;
constexpr int TENSOR_COLUMNS = 256;            // 128 sums, and 2 * 16 columns of scales a stage

static_assert(SIDE + STAGES * 2 * 16 <= TENSOR_COLUMNS);
static_assert(STAGE_BYTES % SWIZZLE_ALIGN == 0, "each stage begins where the swizzle does");

// 128-byte swizzle, 8 rows 1024 bytes apart.
constexpr __host__ __device__ uint64_t numbers_at(uint32_t address) {
    return uint64_t((address & 0x3FFFF) >> 4) | 1ull << 16 | uint64_t(1024 >> 4) << 32 |
           1ull << 46 | 2ull << 61;
}

// No swizzle: 32 rows of 16 bytes, 8 of them 128 bytes apart.
constexpr __host__ __device__ uint64_t scales_at(uint32_t address) {
    return uint64_t((address & 0x3FFFF) >> 4) | 1ull << 16 | uint64_t(128 >> 4) << 32 | 1ull << 46;
}

// E2M1 operands (1 in bits 7 and 10), n / 8 from bit 17, E4M3 scales (bit 23 is 0), m / 16 from 24.
constexpr uint32_t INSTRUCTION = 1u << 7 | 1u << 10 | (SIDE / 8) << 17 | (SIDE / 16) << 24;

static_assert(INSTRUCTION == 0x08200480);
static_assert(scales_at(0x12400) == 0x0000400800011240ull);

__global__ void quantize_rows(const bf16* x, uint2* numbers, uint8_t* scales, int groups) {
    const int group = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y;
    if (group >= groups) return;
    const auto* pairs = reinterpret_cast<const __nv_bfloat162*>(x);
    const auto* from = pairs + (size_t(row) * groups + group) * 8;
    float2 v[8];
    float largest = 0;
    for (int i = 0; i < 8; ++i) {
        v[i] = __bfloat1622float2(from[i]);
        largest = fmaxf(largest, fmaxf(fabsf(v[i].x), fabsf(v[i].y)));
    }
    const auto scale = __nv_cvt_float_to_fp8(largest / 6, __NV_SATFINITE, __NV_E4M3);
    const float by = __half2float(__half(__nv_cvt_fp8_to_halfraw(scale, __NV_E4M3)));
    const float inverse = by > 0 ? 1 / by : 0;
    uint32_t packed[2] = {};
    for (int i = 0; i < 8; ++i) {
        const float2 number = make_float2(v[i].x * inverse, v[i].y * inverse);
        const uint32_t pair = __nv_cvt_float2_to_fp4x2(number, __NV_E2M1, cudaRoundNearest);
        packed[i / 4] |= pair << i % 4 * 8;
    }
    numbers[size_t(row) * groups + group] = make_uint2(packed[0], packed[1]);
    const size_t block = size_t(row / 128) * (groups / 4) + group / 4;
    scales[block * 512 + row % 32 * 16 + row % 128 / 32 * 4 + group % 4] = scale;
}

__device__ void fetch_bytes(uint32_t to, const uint8_t* from, uint32_t bytes, uint64_t* full) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];"
                 :: "r"(to), "l"(from), "r"(bytes), "r"(shared_address(full)) : "memory");
}

__device__ void copy_scales(uint32_t columns, uint32_t from) {  // to all four warps' lanes
    asm volatile("tcgen05.cp.cta_group::1.32x128b.warpx4 [%0], %1;"
                 :: "r"(columns), "l"(scales_at(from)) : "memory");
}

__device__ void multiply(uint32_t sums, uint32_t x, uint32_t w, uint32_t x_scales,
                         uint32_t w_scales, bool add) {
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %6, 0;\n"
                 "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.scale_vec::4X "
                 "[%0], %1, %2, %3, [%4], [%5], add;\n}"
                 :: "r"(sums), "l"(numbers_at(x)), "l"(numbers_at(w)), "r"(INSTRUCTION),
                    "r"(x_scales), "r"(w_scales), "r"(int(add)) : "memory");
}

__device__ void tell(uint64_t* barrier) {  // when all products so far are done
    asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];"
                 :: "r"(shared_address(barrier)) : "memory");
}

__device__ void before_signal() { asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory"); }
__device__ void after_signal() { asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory"); }

__device__ void store_rows(uint32_t sums, bf16* out, int n, float scale) {
    for (int column = 0; column < SIDE; column += 8) {
        uint32_t v[8];
        asm volatile("tcgen05.ld.sync.aligned.32x32b.x8.b32 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8];"
                     : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]), "=r"(v[4]), "=r"(v[5]),
                       "=r"(v[6]), "=r"(v[7])
                     : "r"(sums + (threadIdx.x / 32 * 32 << 16) + column));
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
    __shared__ uint64_t full[STAGES], used[STAGES], summed;
    __shared__ uint32_t tensor_memory;
    const uint32_t tiles = aligned_tiles(memory);
    const Corner corner = tile_corner<SIDE, SIDE>(blockIdx.x, m, n);
    const int steps = k / STEP;
    if (threadIdx.x < 32) {
        asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;"
                     :: "r"(shared_address(&tensor_memory)), "r"(TENSOR_COLUMNS) : "memory");
        asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;" ::: "memory");
    }
    if (threadIdx.x == 0) {
        for (auto& barrier : full) init_barrier(&barrier, 1);
        for (auto& barrier : used) init_barrier(&barrier, 1);
        init_barrier(&summed, 1);
        publish_barriers();
    }
    before_signal();
    __syncthreads();
    after_signal();
    const uint32_t sums = tensor_memory;

    if (threadIdx.x == 32) {  // fetches
        const size_t blocks = size_t(k) / 64 * 512;  // bytes of the scales of 128 rows
        for (int step = 0; step < steps; ++step) {
            const int stage = step % STAGES;
            const uint32_t to = tiles + stage * STAGE_BYTES;
            wait(&used[stage], step / STAGES % 2 ^ 1);
            arrive_expecting(&full[stage], STAGE_BYTES);
            fetch_tile(to, &x, step * ROW_BYTES, corner.row, &full[stage]);
            fetch_tile(to + TILE_BYTES, &w, step * ROW_BYTES, corner.column, &full[stage]);
            fetch_bytes(to + 2 * TILE_BYTES,
                        x_scales + corner.row / 128 * blocks + size_t(step) * SCALE_BYTES,
                        SCALE_BYTES, &full[stage]);
            fetch_bytes(to + 2 * TILE_BYTES + SCALE_BYTES,
                        w_scales + corner.column / 128 * blocks + size_t(step) * SCALE_BYTES,
                        SCALE_BYTES, &full[stage]);
        }
    } else if (threadIdx.x == 0) {  // multiplies
        for (int step = 0; step < steps; ++step) {
            const int stage = step % STAGES;
            const uint32_t at = tiles + stage * STAGE_BYTES, columns = sums + SIDE + stage * 32;
            wait(&full[stage], step / STAGES % 2);
            after_signal();
            for (int block = 0; block < 8; ++block)  // 4 of x, then 4 of w
                copy_scales(columns + block * 4, at + 2 * TILE_BYTES + block * 512);
            for (int i = 0; i < 4; ++i)
                multiply(sums, at + 32 * i, at + TILE_BYTES + 32 * i, columns + i * 4,
                         columns + 16 + i * 4, step || i);
            tell(&used[stage]);
        }
        tell(&summed);
    }
    __syncwarp();
    wait(&summed, 0);
    __syncwarp();
    after_signal();
    store_rows(sums, out + size_t(corner.row) * n + corner.column, n, scale);
    before_signal();
    __syncthreads();
    if (threadIdx.x < 32)
        asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;"
                     :: "r"(sums), "r"(TENSOR_COLUMNS) : "memory");
}

// `numbers` and `scales` take x in NVFP4; `scale` is the matrix scale of w.
extern "C" cudaError_t nvfp4_linear(const bf16* x, const uint8_t* w, const uint8_t* w_scales,
                                    uint8_t* numbers, uint8_t* scales, bf16* out, int m, int n,
                                    int k, float scale, cudaStream_t stream) {
    if (m % SIDE || n % SIDE || k % STEP) return cudaErrorInvalidValue;  // whole tiles only
    CUtensorMap maps[2];
    if (cudaError_t error = describe(&maps[0], numbers, m, k / 2, SIDE, true)) return error;
    if (cudaError_t error = describe(&maps[1], w, n, k / 2, SIDE, true)) return error;
    if (cudaError_t error = cudaFuncSetAttribute(
            linear, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED))
        return error;
    quantize_rows<<<dim3((k / 16 + 127) / 128, m), 128, 0, stream>>>(
        x, reinterpret_cast<uint2*>(numbers), scales, k / 16);
    linear<<<m / SIDE * (n / SIDE), 128, SHARED, stream>>>(maps[0], maps[1], scales, w_scales, out,
                                                           m, n, k, scale);
    return cudaGetLastError();
}
