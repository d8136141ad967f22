// Hopper's mbarriers, TMA copies and wgmma: short functions named after the PTX instructions.
#pragma once

#include <cstdint>
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

using bf16 = __nv_bfloat16;

// --- Tiles -----------------------------------------------------------------------------------
//
// A tile row has 64 bf16 = 128 bytes: 8 chunks of 16 bytes, which cover each shared-memory bank
// once. The 128-byte swizzle stores chunk c of row r at position c ^ (r % 8), so that the same
// chunk of 8 consecutive rows lies in 8 different bank groups. TMA writes this layout and wgmma
// reads it. Both derive it from address bits, so a tile starts at a multiple of 1024 bytes.

constexpr int TILE_K = 64;             // elements along k per tile
constexpr int ROW_BYTES = 2 * TILE_K;
constexpr int SWIZZLE_ALIGN = 1024;    // the swizzle pattern repeats every 8 rows

constexpr __host__ __device__ uint32_t swizzled_offset(int row, int chunk) {
    return row * ROW_BYTES + (chunk ^ row % 8) * 16;
}

__device__ inline uint32_t shared_address(const void* p) { return __cvta_generic_to_shared(p); }

__device__ inline uint32_t swizzle_aligned(const void* dynamic_shared) {
    return (shared_address(dynamic_shared) + SWIZZLE_ALIGN - 1) / SWIZZLE_ALIGN * SWIZZLE_ALIGN;
}

// Grouped tile order of an m x n result (L2 swizzle, GROUP_M = 16): tiles are numbered column by
// column within groups of 16 tile rows, so that concurrent blocks share rows of a and b in the L2.
struct TileOrigin {
    int row, column;
};

template <int ROWS, int COLUMNS>
__device__ TileOrigin grouped_tile_origin(int index, int m, int n) {
    const int tile_columns = n / COLUMNS, group_begin = index / (16 * tile_columns) * 16;
    const int group_rows = min(16, m / ROWS - group_begin);
    const int index_in_group = index - group_begin * tile_columns;
    return {(group_begin + index_in_group % group_rows) * ROWS,
            index_in_group / group_rows * COLUMNS};
}

// Store mma accumulator fragments of 16 x 8: a lane holds two adjacent elements of row lane / 4 and
// the two that lie 8 rows below them.
template <int COUNT>
__device__ void store_fragments(const float (&acc)[COUNT], bf16* out, int n, int row, int column) {
    const int lane = threadIdx.x % 32;
    bf16* fragment = out + size_t(row + lane / 4) * n + column + lane % 4 * 2;
    for (int i = 0; i < COUNT / 4; ++i, fragment += 8) {
        *reinterpret_cast<__nv_bfloat162*>(fragment) =
            __floats2bfloat162_rn(acc[4 * i], acc[4 * i + 1]);
        *reinterpret_cast<__nv_bfloat162*>(fragment + 8 * size_t(n)) =
            __floats2bfloat162_rn(acc[4 * i + 2], acc[4 * i + 3]);
    }
}

__device__ inline uint32_t pack(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
}

// Write accumulator fragments of 16 x 64, of all warps of a warpgroup, into a swizzled tile of 64 x
// 64 bf16. A warp's 16 rows begin at row `row`.
__device__ inline void stage_fragments(const float* acc, uint32_t tile, int row) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 4; ++i, acc += 8)
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                     :: "r"(tile + swizzled_offset(row + lane % 16, 2 * i + lane / 16)),
                        "r"(pack(acc[0], acc[1])), "r"(pack(acc[2], acc[3])),
                        "r"(pack(acc[4], acc[5])), "r"(pack(acc[6], acc[7])) : "memory");
}

// --- mbarriers ---------------------------------------------------------------------------------
//
// A phase completes when all arrivals and all expected bytes have arrived.

__device__ inline void mbarrier_init(uint64_t* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
                 :: "r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

// Make initialised mbarriers visible to TMA. A __syncthreads must follow, for the other threads.
__device__ inline void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ inline void arrive(uint64_t* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];"
                 :: "r"(shared_address(barrier)) : "memory");
}

__device__ inline void arrive_expect_tx(uint64_t* barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 :: "r"(shared_address(barrier)), "r"(bytes) : "memory");
}

// Phases alternate between parity 0 and 1. On a new barrier, waiting for parity 1 returns at once.
__device__ inline void wait(uint64_t* barrier, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" :: "r"(shared_address(barrier)), "r"(parity) : "memory");
}

// --- TMA: bulk tensor copies between global and shared memory -----------------------------------

__device__ inline void tma_load_2d(uint32_t to, const CUtensorMap* map, int column, int row,
                                  uint64_t* barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3}], [%4];"
                 :: "r"(to), "l"(map), "r"(column), "r"(row), "r"(shared_address(barrier))
                 : "memory");
}

// Start to store a tile as one bulk group of this thread. Threads that wrote the tile must have
// passed fence_async_proxy and a barrier.
__device__ inline void tma_store_2d(const CUtensorMap* map, uint32_t from, int column, int row) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];\n"
                 "cp.async.bulk.commit_group;"
                 :: "l"(map), "r"(column), "r"(row), "r"(from) : "memory");
}
template <int PENDING>
__device__ inline void tma_store_wait_read() {  // until at most PENDING groups still read
    asm volatile("cp.async.bulk.wait_group.read %0;" :: "n"(PENDING) : "memory");
}

// Make this thread's writes to shared memory visible to TMA and wgmma.
__device__ inline void fence_async_proxy() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// A barrier of the 128 threads of one warpgroup: named barriers 1 and up, as 0 is __syncthreads.
__device__ inline void warpgroup_sync(int warpgroup) {
    asm volatile("bar.sync %0, 128;" :: "r"(1 + warpgroup) : "memory");
}

inline int sm_count() {
    int device = 0, count = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
    return count;
}

// Encode the TMA descriptor of a row-major matrix of bf16 (or of bytes) that is loaded in tiles of
// tile_rows x 128 bytes.
inline cudaError_t make_tensor_map(CUtensorMap* map, const void* matrix, int rows, int columns,
                            int tile_rows, bool bytes = false) {
    const int element_size = bytes ? 1 : 2;
    static const auto encode = [] {  // resolved at run time, so that linking needs no -lcuda
        void* function = nullptr;
        cudaDriverEntryPointQueryResult status;
        const cudaError_t error = cudaGetDriverEntryPointByVersion(
            "cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &status);
        return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(error ? nullptr : function);
    }();
    if (!encode) return cudaErrorNotSupported;
    const cuuint64_t sizes[] = {cuuint64_t(columns), cuuint64_t(rows)};
    const cuuint64_t pitch[] = {cuuint64_t(columns) * element_size};  // bytes between rows
    const cuuint32_t box[] = {cuuint32_t(ROW_BYTES / element_size), cuuint32_t(tile_rows)};
    const cuuint32_t strides[] = {1, 1};
    const CUresult status = encode(
        map, bytes ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2,
        const_cast<void*>(matrix), sizes, pitch, box, strides,
        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
        CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return status == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// --- wgmma (sm_90a): a warpgroup (4 warps) multiplies 64 x 16 by 16 x N in shared memory -------

// Matrix descriptor of a K-major tile with 128-byte swizzle. Address and stride are in units of
// 16 bytes: groups of 8 rows are 1024 bytes apart, and 1 in the top two bits selects the swizzle.
constexpr __host__ __device__ uint64_t wgmma_descriptor(uint32_t address) {
    return uint64_t((address & 0x3FFFF) >> 4) | 1ull << 16 | uint64_t(1024 >> 4) << 32 | 1ull << 62;
}

// The address at which the tensor cores read byte `byte` of row `row` of a tile at `start`.
constexpr uint32_t descriptor_address(uint32_t start, int row, int byte) {
    const uint32_t address = start + row / 8 * 1024 + row % 8 * ROW_BYTES + byte;
    return address ^ (address >> 7 & 7) << 4;  // XOR with row % 8
}

// Whether the tensor cores read every chunk of a tile where the copies write it, in all four k
// slices of 16.
constexpr bool layouts_agree(uint32_t tile, int rows) {
    for (int k = 0; k < 4; ++k)
        for (int row = 0; row < rows; ++row)
            for (int chunk = 0; chunk < 2; ++chunk)
                if (descriptor_address(tile + 32 * k, row, 16 * chunk) !=
                    tile + swizzled_offset(row, 2 * k + chunk))
                    return false;
    return true;
}

// Matrix descriptor of an MN-major tile with 128-byte swizzle: rows run along k, and each holds 64
// elements along n. Groups of 8 rows are 1024 bytes apart. An operand with N > 64 lies in several
// such tiles, `tile_stride` bytes apart.
constexpr __host__ __device__ uint64_t transposed_descriptor(uint32_t address,
                                                             uint32_t tile_stride) {
    return uint64_t((address & 0x3FFFF) >> 4) | uint64_t(tile_stride >> 4) << 16 |
           uint64_t(1024 >> 4) << 32 | 1ull << 62;
}

static_assert(layouts_agree(3 * SWIZZLE_ALIGN, 128), "TMA and wgmma use different layouts");
static_assert(wgmma_descriptor(0x12400) == 0x4000004000011240ull);

__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int PENDING>
__device__ inline void wgmma_wait() {  // waits until at most PENDING are in flight
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(PENDING) : "memory");
}

#define D8(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), \
                 "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define D64(d, i) D8(d, i), D8(d, i + 8), D8(d, i + 16), D8(d, i + 24), \
                  D8(d, i + 32), D8(d, i + 40), D8(d, i + 48), D8(d, i + 56)
#define R0_63 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define R64_127 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
    "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// d = a * b, or d += a * b if `add` is not 0.
__device__ inline void wgmma(float (&d)[64], uint64_t a, uint64_t b, int add) {
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" R0_63 "}, "
                 "%64, %65, add, 1, 1, 0, 0;\n}"
                 : D64(d, 0) : "l"(a), "l"(b), "r"(add));
}

__device__ inline void wgmma(float (&d)[128], uint64_t a, uint64_t b, int add) {
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %130, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" R0_63 ", " R64_127 "}, "
                 "%128, %129, add, 1, 1, 0, 0;\n}"
                 : D64(d, 0), D64(d, 64) : "l"(a), "l"(b), "r"(add));
}

// d += a * b with a in registers, in the layout of mma.sync's fragments, and b MN-major.
__device__ inline void wgmma_transposed(float (&d)[64], const uint32_t* a, uint64_t b) {
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, 1, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" R0_63 "}, "
                 "{%64, %65, %66, %67}, %68, add, 1, 1, 1;\n}"
                 : D64(d, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// Keep the compiler from moving reads of an accumulator above the wait for its product.
template <int N>
__device__ inline void pin(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i]) :: "memory");
}

// Issue one k tile as a wgmma group: four k slices of 16, 32 bytes apart. The swizzle is a function
// of the address bits, so adding 32 to the start address selects the next slice.
template <int N>
__device__ inline void wgmma_k_tile(float (&d)[N], uint32_t a, uint32_t b, int add) {
    wgmma_fence();
    for (int k = 0; k < 4; ++k)
        wgmma(d, wgmma_descriptor(a + 32 * k), wgmma_descriptor(b + 32 * k), add | k);
    wgmma_commit();
}
