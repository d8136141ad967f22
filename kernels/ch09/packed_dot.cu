// int8 dot products of every row of a matrix with one vector: y = W x, sums in 32 bits.
//
// Memory delivers the matrix faster than plain C can take it apart. A warp has a row; its lanes
// take neighbouring elements, and five shuffles add up what they have found. The rungs differ in
// what one instruction handles:
//
//   scalar   Plain C: a byte of the row, a byte of x, a multiplication, an addition. A warp's load
//            brings 32 bytes. (The compiler collects four bytes into a word to save multiplications;
//            of the loads it can save none.)
//   dp4a     Four int8 in a 32-bit word, and dp4a (in SASS IDP.4A) multiplies four pairs and adds
//            them to the sum. A warp's load brings 128 bytes.
//   dp4a_v4  16 bytes a lane by ld.global.nc.v4: 512 bytes a warp's load, four dp4a for it. "nc"
//            says that nothing writes the matrix meanwhile, L1::no_allocate that it is used once
//            and need not push x out of the L1 cache. C has no words for the two; PTX does.

#include <cstdint>
#include <cuda_runtime.h>

constexpr int WARPS = 8;  // rows of a block

__device__ int warp_sum(int value) {
    for (int away = 16; away > 0; away /= 2) value += __shfl_down_sync(~0u, value, away);
    return value;  // in lane 0
}

__device__ int dot4(int a, int b, int sum) {
    int result;
    asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(sum));
    return result;
}

__device__ int4 load_once(const int4* from) {
    int4 v;
    asm("ld.global.nc.L1::no_allocate.v4.s32 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"(from));
    return v;
}

__global__ void dot_scalar(const int8_t* w, const int8_t* x, int* y, int columns) {
    const int lane = threadIdx.x % 32, row = blockIdx.x * WARPS + threadIdx.x / 32;
    const int8_t* mine = w + size_t(row) * columns;
    int sum = 0;
#pragma unroll 4
    for (int i = lane; i < columns; i += 32) sum += int(mine[i]) * int(x[i]);
    sum = warp_sum(sum);
    if (lane == 0) y[row] = sum;
}

__global__ void dot_dp4a(const int8_t* w, const int8_t* x, int* y, int columns) {
    const int lane = threadIdx.x % 32, row = blockIdx.x * WARPS + threadIdx.x / 32;
    const auto* mine = reinterpret_cast<const int*>(w + size_t(row) * columns);
    const auto* other = reinterpret_cast<const int*>(x);
    int sum = 0;
#pragma unroll 4
    for (int i = lane; i < columns / 4; i += 32) sum = dot4(mine[i], other[i], sum);
    sum = warp_sum(sum);
    if (lane == 0) y[row] = sum;
}

__global__ void dot_v4_dp4a(const int8_t* w, const int8_t* x, int* y, int columns) {
    const int lane = threadIdx.x % 32, row = blockIdx.x * WARPS + threadIdx.x / 32;
    const auto* mine = reinterpret_cast<const int4*>(w + size_t(row) * columns);
    const auto* other = reinterpret_cast<const int4*>(x);
    int sum = 0;
#pragma unroll 4
    for (int i = lane; i < columns / 16; i += 32) {
        const int4 a = load_once(mine + i), b = other[i];
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
