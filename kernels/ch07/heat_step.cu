// One explicit step of the heat equation on n x n halves: four ways to fetch a tile with its halo.
//
// out = u + 0.1 * laplacian(u), to fourth order: the stencil is a plus with arms two points long,
// and beyond the edge u is 0. A block computes a tile of 128 x 32 points and needs 2 more on each
// side. All rungs compute with the same code; what differs is who brings the points to shared
// memory.
//
//   by_element    Each thread works out where its points lie, tests them against the edges, loads 2
//                 bytes into a register and stores them in shared memory: a dozen instructions a
//                 point, more than the stencil itself takes.
//   async_words   Two points at a time with cp.async, which copies past the registers and writes 0
//                 where told to read nothing: half as many addresses and tests, no waiting between.
//   async_vectors cp.async again, in its widest pieces: 16 bytes. A halo of 2 points does not begin
//                 where 16 divides, so the box is widened to 8 points on each side. That copies 9 %
//                 more points, in 648 pieces instead of 2376: three a thread at most.
//   tensor_map    One thread names a corner, and the tensor memory accelerator (TMA) does the rest:
//                 it knows the array from a descriptor made on the host, computes all addresses,
//                 fills with 0 beyond the edges, and counts the bytes in on a barrier. It, too,
//                 copies in granules of 16 bytes: the same box as async_vectors.

#include <cuda.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

constexpr int WIDE = 128, HIGH = 32;    // of the tile that a block computes
constexpr int HALO = 2;                 // points needed on each side of it
constexpr int LEFT = 8;                 // points kept before its rows: 16 bytes, for alignment
constexpr int PITCH = LEFT + WIDE + 8;  // points in a row of shared memory
constexpr int LINES = HALO + HIGH + HALO;
constexpr int NEEDED = HALO + WIDE + HALO;   // in a row
constexpr int VECTOR = 8;                    // points in 16 bytes
constexpr int LANES = WIDE / 2, GROUPS = 4;  // a thread computes 2 columns of 8 rows
constexpr int THREADS = LANES * GROUPS;

__device__ float2 plus(float2 a, float2 b) { return make_float2(a.x + b.x, a.y + b.y); }

// The tile is complete in shared memory: walk down two columns, the points above and below in
// registers, those to the left and right from shared memory.
__device__ void step(const __half* tile, __half* out, int n) {
    const int lane = threadIdx.x % LANES, first = threadIdx.x / LANES * (HIGH / GROUPS);
    const int x = blockIdx.x * WIDE + 2 * lane, y = blockIdx.y * HIGH + first;
    const auto* at = reinterpret_cast<const __half2*>(tile + first * PITCH + LEFT) + lane;
    float2 down[5];  // five points of each column, the middle one is due
    for (int k = 0; k < 4; ++k) down[k] = __half22float2(at[k * PITCH / 2]);
#pragma unroll
    for (int row = 0; row < HIGH / GROUPS; ++row) {
        down[4] = __half22float2(at[(row + 4) * PITCH / 2]);
        const float2 left = __half22float2(at[(row + 2) * PITCH / 2 - 1]);
        const float2 right = __half22float2(at[(row + 2) * PITCH / 2 + 1]);
        const float2 u = down[2];
        float2 near = plus(down[1], down[3]), far = plus(down[0], down[4]);
        near = plus(near, make_float2(left.y + u.y, u.x + right.x));
        far = plus(far, make_float2(left.x + right.x, left.y + right.y));
        const float2 next = make_float2(0.5f * u.x + (0.1f * 4 / 3) * near.x - (0.1f / 12) * far.x,
                                        0.5f * u.y + (0.1f * 4 / 3) * near.y - (0.1f / 12) * far.y);
        if (x < n && y + row < n)
            *reinterpret_cast<__half2*>(out + size_t(y + row) * n + x) = __float22half2_rn(next);
        for (int k = 0; k < 4; ++k) down[k] = down[k + 1];
    }
}

__global__ void __launch_bounds__(THREADS) heat_by_element(const __half* in, __half* out, int n) {
    __shared__ alignas(16) __half tile[PITCH * LINES];
    const int left = blockIdx.x * WIDE - HALO, top = blockIdx.y * HIGH - HALO;
    for (int i = threadIdx.x; i < NEEDED * LINES; i += THREADS) {
        const int row = i / NEEDED, column = i % NEEDED;
        const int x = left + column, y = top + row;
        const bool inside = x >= 0 && x < n && y >= 0 && y < n;
        tile[row * PITCH + LEFT - HALO + column] = inside ? in[size_t(y) * n + x] : __half(0.0f);
    }
    __syncthreads();
    step(tile, out, n);
}

__global__ void __launch_bounds__(THREADS) heat_async_words(const __half* in, __half* out, int n) {
    __shared__ alignas(16) __half tile[PITCH * LINES];
    const int left = blockIdx.x * WIDE - HALO, top = blockIdx.y * HIGH - HALO;
    const auto shared = static_cast<uint32_t>(__cvta_generic_to_shared(tile));
    for (int i = threadIdx.x; i < NEEDED / 2 * LINES; i += THREADS) {
        const int row = i / (NEEDED / 2), column = i % (NEEDED / 2) * 2;
        const int x = left + column, y = top + row;
        const bool inside = x >= 0 && x < n && y >= 0 && y < n;  // n is even: both points or none
        const __half* from = inside ? in + size_t(y) * n + x : in;
        const uint32_t to = shared + sizeof(__half) * (row * PITCH + LEFT - HALO + column);
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from),
                     "r"(inside ? 4 : 0)
                     : "memory");
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
    step(tile, out, n);
}

__global__ void __launch_bounds__(THREADS)
    heat_async_vectors(const __half* in, __half* out, int n) {
    __shared__ alignas(16) __half tile[PITCH * LINES];
    const int left = blockIdx.x * WIDE - LEFT, top = blockIdx.y * HIGH - HALO;
    const auto shared = static_cast<uint32_t>(__cvta_generic_to_shared(tile));
    for (int i = threadIdx.x; i < PITCH / VECTOR * LINES; i += THREADS) {
        const int row = i / (PITCH / VECTOR), column = i % (PITCH / VECTOR) * VECTOR;
        const int x = left + column, y = top + row;
        const bool inside = x >= 0 && x < n && y >= 0 && y < n;  // 8 divides x and n: all or none
        const __half* from = inside ? in + size_t(y) * n + x : in;
        const uint32_t to = shared + sizeof(__half) * (row * PITCH + column);
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                     "r"(inside ? 16 : 0)
                     : "memory");
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
    step(tile, out, n);
}

__global__ void __launch_bounds__(THREADS)
    heat_tensor_map(const __grid_constant__ CUtensorMap in, __half* out, int n) {
    __shared__ alignas(128) __half tile[PITCH * LINES];
    __shared__ alignas(8) uint64_t barrier;
    const auto shared = static_cast<uint32_t>(__cvta_generic_to_shared(tile));
    const auto arrived = static_cast<uint32_t>(__cvta_generic_to_shared(&barrier));
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(arrived) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");  // the TMA sees it, too
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(arrived),
                     "r"(uint32_t(sizeof(tile)))
                     : "memory");
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
            " [%0], [%1, {%2, %3}], [%4];" ::"r"(shared),
            "l"(&in), "r"(int(blockIdx.x) * WIDE - LEFT), "r"(int(blockIdx.y) * HIGH - HALO),
            "r"(arrived)
            : "memory");
    }
    __syncthreads();  // nobody may ask a barrier that is not initialised
    uint32_t done = 0;
    while (!done)  // each try waits for a while
        asm volatile(
            "{\n"
            ".reg .pred complete;\n"
            "mbarrier.try_wait.parity.shared.b64 complete, [%1], 0;\n"
            "selp.u32 %0, 1, 0, complete;\n"
            "}"
            : "=r"(done)
            : "r"(arrived)
            : "memory");
    step(tile, out, n);
}

dim3 tiles(int n) { return dim3((n + WIDE - 1) / WIDE, (n + HIGH - 1) / HIGH); }

extern "C" cudaError_t by_element(const __half* in, __half* out, int n, cudaStream_t stream) {
    if (n % 8) return cudaErrorInvalidValue;
    heat_by_element<<<tiles(n), THREADS, 0, stream>>>(in, out, n);
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
    cudaDriverEntryPointQueryResult found;
    if (cudaError_t error = cudaGetDriverEntryPointByVersion(
            "cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault, &found))
        return error;
    if (found != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;

    CUtensorMap map;
    const cuuint64_t size[] = {cuuint64_t(n), cuuint64_t(n)};
    const cuuint64_t stride[] = {size[0] * sizeof(__half)};  // of a row, in bytes: 16 divides it
    const cuuint32_t box[] = {PITCH, LINES}, every[] = {1, 1};
    const CUresult made = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(encode)(
        &map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2, const_cast<__half*>(in), size, stride, box, every,
        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
        CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (made != CUDA_SUCCESS) return cudaErrorInvalidValue;
    heat_tensor_map<<<tiles(n), THREADS, 0, stream>>>(map, out, n);
    return cudaGetLastError();
}
