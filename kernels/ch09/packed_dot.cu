// int8 matrix-vector product y = W x (GEMV) with int32 accumulation.
//
// Each warp computes one row: its lanes load consecutive elements, and five shuffles add the lanes'
// partial sums. Every rung multiplies with dp4a (SASS: IDP.4A), which adds four int8 products to an
// int32 sum. The rungs differ in the width of the loads:
//
//   scalar   Plain C, one byte of the row and one of x per lane: 32 bytes per warp load. The
//            compiler packs four bytes into a word (PRMT) for each dp4a, but every byte is still a
//            load instruction of its own.
//   dp4a     Lanes load words of four int8, ready for dp4a: 128 bytes per warp load. CUDA C++ has
//            the intrinsic __dp4a for the same instruction; here it is inline PTX.
//   dp4a_v4  16 bytes per lane (ld.global.nc.v4): 512 bytes per warp load, which feed four dp4a.
//            "nc" promises that no thread writes the matrix during the kernel (__ldg does the
//            same). L1::no_allocate keeps the matrix, which is read once, from evicting x from the
//            L1 cache; this qualifier needs PTX.

#include <cstdint>
#include <cuda_runtime.h>

constexpr int WARPS = 8;  // per block, one row each

__device__ int warp_sum(int value) {
    for (int offset = 16; offset > 0; offset /= 2)
        value += __shfl_down_sync(~0u, value, offset);
    return value;  // valid in lane 0
}

__device__ int dot4(int a, int b, int sum) {
    int result;
    asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(sum));
    return result;
}

__device__ int4 load_streaming(const int4* address) {
    int4 v;
    asm("ld.global.nc.L1::no_allocate.v4.s32 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"(address));
    return v;
}

__global__ void dot_scalar(const int8_t* w, const int8_t* x, int* y, int columns) {
    const int lane = threadIdx.x % 32, row = blockIdx.x * WARPS + threadIdx.x / 32;
    const int8_t* row_bytes = w + size_t(row) * columns;
    int sum = 0;
#pragma unroll 4
    for (int i = lane; i < columns; i += 32) sum += int(row_bytes[i]) * int(x[i]);
    sum = warp_sum(sum);
    if (lane == 0) y[row] = sum;
}

__global__ void dot_dp4a(const int8_t* w, const int8_t* x, int* y, int columns) {
    const int lane = threadIdx.x % 32, row = blockIdx.x * WARPS + threadIdx.x / 32;
    const auto* row_words = reinterpret_cast<const int*>(w + size_t(row) * columns);
    const auto* x_words = reinterpret_cast<const int*>(x);
    int sum = 0;
#pragma unroll 4
    for (int i = lane; i < columns / 4; i += 32) sum = dot4(row_words[i], x_words[i], sum);
    sum = warp_sum(sum);
    if (lane == 0) y[row] = sum;
}

__global__ void dot_v4_dp4a(const int8_t* w, const int8_t* x, int* y, int columns) {
    const int lane = threadIdx.x % 32, row = blockIdx.x * WARPS + threadIdx.x / 32;
    const auto* row_vectors = reinterpret_cast<const int4*>(w + size_t(row) * columns);
    const auto* x_vectors = reinterpret_cast<const int4*>(x);
    int sum = 0;
#pragma unroll 4
    for (int i = lane; i < columns / 16; i += 32) {
        const int4 a = load_streaming(row_vectors + i), b = x_vectors[i];
        sum = dot4(a.x, b.x, sum);
        sum = dot4(a.y, b.y, sum);
        sum = dot4(a.z, b.z, sum);
        sum = dot4(a.w, b.w, sum);
    }
    sum = warp_sum(sum);
    if (lane == 0) y[row] = sum;
}

template <typename Kernel>
cudaError_t launch(Kernel kernel, const int8_t* w, const int8_t* x, int* y, int rows, int columns,
                   cudaStream_t stream) {
    if (rows % WARPS || columns % 16) return cudaErrorInvalidValue;
    if ((reinterpret_cast<uintptr_t>(w) | reinterpret_cast<uintptr_t>(x)) % 16)
        return cudaErrorMisalignedAddress;
    kernel<<<rows / WARPS, 32 * WARPS, 0, stream>>>(w, x, y, columns);
    return cudaGetLastError();
}

extern "C" cudaError_t scalar(const int8_t* w, const int8_t* x, int* y, int rows, int columns,
                              cudaStream_t stream) {
    return launch(dot_scalar, w, x, y, rows, columns, stream);
}

extern "C" cudaError_t dp4a(const int8_t* w, const int8_t* x, int* y, int rows, int columns,
                            cudaStream_t stream) {
    return launch(dot_dp4a, w, x, y, rows, columns, stream);
}

extern "C" cudaError_t dp4a_v4(const int8_t* w, const int8_t* x, int* y, int rows, int columns,
                               cudaStream_t stream) {
    return launch(dot_v4_dp4a, w, x, y, rows, columns, stream);
}
