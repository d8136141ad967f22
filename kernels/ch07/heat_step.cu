// One explicit step of the heat equation on n x n halves: five ways to load a tile with its halo.
//
// out = u + 0.1 * laplacian(u), fourth order: the stencil is a plus with arms of two points, and u
// is 0 beyond the edges. A block computes a tile of 128 x 32 points and needs a halo of 2 points on
// each side. The stencil code is the same in all rungs. They differ in how the points get into
// shared memory.
//
//   by_element    For each point, a thread computes the address, tests it against the edges, loads
//                 2 bytes into a register and stores them to shared memory: a dozen instructions
//                 per point, more than the stencil itself needs.
//   by_pair       The same with two points per load (half2): half as many addresses and tests.
//   async_words   cp.async, two points at a time. It bypasses the registers and writes 0 where its
//                 source size is 0: no thread waits for a load before it stores.
//   async_vectors cp.async with 16 bytes, its widest form. A halo of 2 points does not start on a
//                 16-byte boundary, so the box is widened to 8 points on each side: 9 % more
//                 points, but 648 copies instead of 2376, at most three per thread.
//   tensor_map    One thread issues one TMA copy (tensor memory accelerator) with the corner of the
//                 box. A tensor map, encoded on the host, describes the array. The TMA computes all
//                 addresses, fills in 0 beyond the edges, and counts the bytes on an mbarrier. Its
//                 boxes are multiples of 16 bytes too, hence the same box as in async_vectors.

#include <cuda.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

constexpr int WIDTH = 128, HEIGHT = 32;        // the tile that a block computes
constexpr int HALO = 2;                        // points needed on each side of the tile
constexpr int LEFT = 8;                        // points loaded left of the tile: 16 bytes, aligned
constexpr int PITCH = LEFT + WIDTH + 8;        // points per row in shared memory
constexpr int ROWS = HALO + HEIGHT + HALO;     // rows of the box in shared memory
constexpr int COLUMNS = HALO + WIDTH + HALO;   // points that the stencil needs per row
constexpr int VECTOR = 8;                      // points in 16 bytes
constexpr int PAIRS = WIDTH / 2, GROUPS = 4;   // a thread computes 8 rows of a column pair
constexpr int THREADS = PAIRS * GROUPS;

__device__ float2 add(float2 a, float2 b) { return make_float2(a.x + b.x, a.y + b.y); }

// Apply the stencil to a tile in shared memory. Each thread walks down two columns: it keeps the
// points above and below in registers and reads those to the left and right from shared memory.
__device__ void stencil(const __half* tile, __half* out, int n) {
    const int pair = threadIdx.x % PAIRS, first = threadIdx.x / PAIRS * (HEIGHT / GROUPS);
    const int x = blockIdx.x * WIDTH + 2 * pair, y = blockIdx.y * HEIGHT + first;
    const auto* at = reinterpret_cast<const __half2*>(tile + first * PITCH + LEFT) + pair;
    float2 window[5];  // five points of each column; window[2] is the current one
    for (int k = 0; k < 4; ++k) window[k] = __half22float2(at[k * PITCH / 2]);
#pragma unroll
    for (int row = 0; row < HEIGHT / GROUPS; ++row) {
        window[4] = __half22float2(at[(row + 4) * PITCH / 2]);
        const float2 left = __half22float2(at[(row + 2) * PITCH / 2 - 1]);
        const float2 right = __half22float2(at[(row + 2) * PITCH / 2 + 1]);
        const float2 u = window[2];
        float2 near = add(window[1], window[3]), far = add(window[0], window[4]);
        near = add(near, make_float2(left.y + u.y, u.x + right.x));
        far = add(far, make_float2(left.x + right.x, left.y + right.y));
        const float2 next = make_float2(0.5f * u.x + (0.1f * 4 / 3) * near.x - (0.1f / 12) * far.x,
                                        0.5f * u.y + (0.1f * 4 / 3) * near.y - (0.1f / 12) * far.y);
        if (x < n && y + row < n)
            *reinterpret_cast<__half2*>(out + size_t(y + row) * n + x) = __float22half2_rn(next);
        for (int k = 0; k < 4; ++k) window[k] = window[k + 1];
    }
}

__global__ void __launch_bounds__(THREADS) heat_by_element(const __half* in, __half* out, int n) {
    __shared__ alignas(16) __half tile[PITCH * ROWS];
    const int left = blockIdx.x * WIDTH - HALO, top = blockIdx.y * HEIGHT - HALO;
    for (int i = threadIdx.x; i < COLUMNS * ROWS; i += THREADS) {
        const int row = i / COLUMNS, column = i % COLUMNS;
        const int x = left + column, y = top + row;
        const bool inside = x >= 0 && x < n && y >= 0 && y < n;
        tile[row * PITCH + LEFT - HALO + column] = inside ? in[size_t(y) * n + x] : __half(0.0f);
    }
    __syncthreads();
    stencil(tile, out, n);
}

__global__ void __launch_bounds__(THREADS) heat_by_pair(const __half* in, __half* out, int n) {
    __shared__ alignas(16) __half tile[PITCH * ROWS];
    const int left = blockIdx.x * WIDTH - HALO, top = blockIdx.y * HEIGHT - HALO;
    for (int i = threadIdx.x; i < COLUMNS / 2 * ROWS; i += THREADS) {
        const int row = i / (COLUMNS / 2), column = i % (COLUMNS / 2) * 2;
        const int x = left + column, y = top + row;
        const bool inside = x >= 0 && x < n && y >= 0 && y < n;  // x, n even: both elements or none
        __half2 pair = __float2half2_rn(0.0f);
        if (inside) pair = *reinterpret_cast<const __half2*>(in + size_t(y) * n + x);
        *reinterpret_cast<__half2*>(tile + row * PITCH + LEFT - HALO + column) = pair;
    }
    __syncthreads();
    stencil(tile, out, n);
}

__global__ void __launch_bounds__(THREADS) heat_async_words(const __half* in, __half* out, int n) {
    __shared__ alignas(16) __half tile[PITCH * ROWS];
    const int left = blockIdx.x * WIDTH - HALO, top = blockIdx.y * HEIGHT - HALO;
    const auto shared = static_cast<uint32_t>(__cvta_generic_to_shared(tile));
    for (int i = threadIdx.x; i < COLUMNS / 2 * ROWS; i += THREADS) {
        const int row = i / (COLUMNS / 2), column = i % (COLUMNS / 2) * 2;
        const int x = left + column, y = top + row;
        const bool inside = x >= 0 && x < n && y >= 0 && y < n;  // x, n even: both elements or none
        const __half* from = inside ? in + size_t(y) * n + x : in;
        const uint32_t to = shared + sizeof(__half) * (row * PITCH + LEFT - HALO + column);
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from),
                     "r"(inside ? 4 : 0)
                     : "memory");
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
    stencil(tile, out, n);
}

__global__ void __launch_bounds__(THREADS)
    heat_async_vectors(const __half* in, __half* out, int n) {
    __shared__ alignas(16) __half tile[PITCH * ROWS];
    const int left = blockIdx.x * WIDTH - LEFT, top = blockIdx.y * HEIGHT - HALO;
    const auto shared = static_cast<uint32_t>(__cvta_generic_to_shared(tile));
    for (int i = threadIdx.x; i < PITCH / VECTOR * ROWS; i += THREADS) {
        const int row = i / (PITCH / VECTOR), column = i % (PITCH / VECTOR) * VECTOR;
        const int x = left + column, y = top + row;
        const bool inside = x >= 0 && x < n && y >= 0 && y < n;  // 8 divides x and n: all 8 or none
        const __half* from = inside ? in + size_t(y) * n + x : in;
        const uint32_t to = shared + sizeof(__half) * (row * PITCH + column);
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                     "r"(inside ? 16 : 0)
                     : "memory");
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
    stencil(tile, out, n);
}

__global__ void __launch_bounds__(THREADS)
    heat_tensor_map(const __grid_constant__ CUtensorMap in, __half* out, int n) {
    __shared__ alignas(128) __half tile[PITCH * ROWS];
    __shared__ alignas(8) uint64_t barrier;
    const auto shared = static_cast<uint32_t>(__cvta_generic_to_shared(tile));
    const auto mbarrier = static_cast<uint32_t>(__cvta_generic_to_shared(&barrier));
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(mbarrier) : "memory");
        // make the initialised mbarrier visible to the TMA
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(mbarrier),
                     "r"(uint32_t(sizeof(tile)))
                     : "memory");
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
            " [%0], [%1, {%2, %3}], [%4];" ::"r"(shared),
            "l"(&in), "r"(int(blockIdx.x) * WIDTH - LEFT), "r"(int(blockIdx.y) * HEIGHT - HALO),
            "r"(mbarrier)
            : "memory");
    }
    __syncthreads();  // the mbarrier is initialised before any thread waits on it
    uint32_t done = 0;
    while (!done)  // try_wait may time out: repeat it
        asm volatile(
            "{\n"
            ".reg .pred complete;\n"
            "mbarrier.try_wait.parity.shared.b64 complete, [%1], 0;\n"
            "selp.u32 %0, 1, 0, complete;\n"
            "}"
            : "=r"(done)
            : "r"(mbarrier)
            : "memory");
    stencil(tile, out, n);
}

dim3 tiles(int n) { return dim3((n + WIDTH - 1) / WIDTH, (n + HEIGHT - 1) / HEIGHT); }

extern "C" cudaError_t by_element(const __half* in, __half* out, int n, cudaStream_t stream) {
    if (n % 8) return cudaErrorInvalidValue;
    heat_by_element<<<tiles(n), THREADS, 0, stream>>>(in, out, n);
    return cudaGetLastError();
}

extern "C" cudaError_t by_pair(const __half* in, __half* out, int n, cudaStream_t stream) {
    if (n % 8) return cudaErrorInvalidValue;
    if (reinterpret_cast<uintptr_t>(in) % 4) return cudaErrorMisalignedAddress;
    heat_by_pair<<<tiles(n), THREADS, 0, stream>>>(in, out, n);
    return cudaGetLastError();
}

extern "C" cudaError_t async_words(const __half* in, __half* out, int n, cudaStream_t stream) {
    if (n % 8) return cudaErrorInvalidValue;
    heat_async_words<<<tiles(n), THREADS, 0, stream>>>(in, out, n);
    return cudaGetLastError();
}

extern "C" cudaError_t async_vectors(const __half* in, __half* out, int n, cudaStream_t stream) {
    if (n % VECTOR) return cudaErrorInvalidValue;
    if (reinterpret_cast<uintptr_t>(in) % 16) return cudaErrorMisalignedAddress;
    heat_async_vectors<<<tiles(n), THREADS, 0, stream>>>(in, out, n);
    return cudaGetLastError();
}

extern "C" cudaError_t tensor_map(const __half* in, __half* out, int n, cudaStream_t stream) {
    void* encode = nullptr;
    cudaDriverEntryPointQueryResult status;
    if (cudaError_t error = cudaGetDriverEntryPointByVersion(
            "cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault, &status))
        return error;
    if (status != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;

    CUtensorMap map;
    const cuuint64_t size[] = {cuuint64_t(n), cuuint64_t(n)};
    const cuuint64_t strides[] = {size[0] * sizeof(__half)};  // bytes per row, a multiple of 16
    const cuuint32_t box[] = {PITCH, ROWS}, element_strides[] = {1, 1};
    const CUresult result = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(encode)(
        &map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2, const_cast<__half*>(in), size, strides, box,
        element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
        CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS) return cudaErrorInvalidValue;
    heat_tensor_map<<<tiles(n), THREADS, 0, stream>>>(map, out, n);
    return cudaGetLastError();
}
