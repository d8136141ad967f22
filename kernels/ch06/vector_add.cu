// Adds two vectors of n floats: the first kernel of the course, and what makes it fast.
//
// A GPU has many streaming multiprocessors (SMs), 132 on an H200. An SM runs up to 2048 threads at
// once, in warps of 32 that execute the same instruction together. A launch starts a grid of
// blocks, and each block runs on one SM. A thread finds its elements from its place in the grid.
//
//   one_thread    One block of one thread: the loop as on a CPU. One lane of one SM works, and it
//                 waits for each pair of loads before it stores their sum.
//   one_block     One block of 1024 threads. Thread t adds elements t, t + 1024, t + 2048, ...: the
//                 32 lanes of a warp access neighbouring floats in one instruction, and while one
//                 warp waits for its loads, the others run. Still only one SM works.
//   grid          One thread per element, in as many such blocks as that takes. All SMs work. This
//                 is the kernel that most people write first, and it is not bad.
//   small_blocks  The same in blocks of 256 threads, the usual size.
//   four          Four elements per thread, a block's width apart, so that each access of a warp is
//                 as coalesced as before. A thread has 32 bytes of a and b in flight instead of 8.
//   vector        One float4 per thread: as many bytes in flight, moved by a quarter of the
//                 instructions.
//
// The last block of a grid is partly beyond the end of the vectors, hence the test `i < n`. With
// float4, up to three elements are left after the last whole vector; one thread adds those.

#include <cstdint>
#include <cuda_runtime.h>

constexpr int THREADS = 256;
constexpr int MAX_THREADS = 1024;  // most threads that a block can have

__global__ void add_one_thread(const float* a, const float* b, float* out, size_t n) {
    for (size_t i = 0; i < n; ++i) out[i] = a[i] + b[i];
}

__global__ void add_one_block(const float* a, const float* b, float* out, size_t n) {
    for (size_t i = threadIdx.x; i < n; i += blockDim.x) out[i] = a[i] + b[i];
}

__global__ void add_grid(const float* a, const float* b, float* out, size_t n) {
    const size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < n) out[i] = a[i] + b[i];
}

__global__ void add_four(const float* a, const float* b, float* out, size_t n) {
    constexpr int COUNT = 4;
    const size_t first = size_t(blockIdx.x) * COUNT * blockDim.x + threadIdx.x;
    float x[COUNT], y[COUNT];
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
        const size_t i = first + size_t(k) * blockDim.x;
        x[k] = i < n ? a[i] : 0;
        y[k] = i < n ? b[i] : 0;
    }
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
        const size_t i = first + size_t(k) * blockDim.x;
        if (i < n) out[i] = x[k] + y[k];
    }
}

__device__ float4 add(float4 a, float4 b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// Add the n % 4 elements after the last whole vector.
__device__ void add_remainder(const float* a, const float* b, float* out, size_t n) {
#pragma unroll 1  // one thread of the grid runs this loop: keep the code small
    for (size_t i = n / 4 * 4; i < n; ++i) out[i] = a[i] + b[i];
}

__global__ void add_vector(const float* a, const float* b, float* out, size_t n) {
    const size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < n / 4)
        reinterpret_cast<float4*>(out)[i] = add(reinterpret_cast<const float4*>(a)[i],
                                                reinterpret_cast<const float4*>(b)[i]);
    else if (i == n / 4)
        add_remainder(a, b, out, n);
}

// A 16-byte access needs a 16-byte-aligned address.
bool aligned(const float* a, const float* b, const float* out) {
    return (reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b) |
            reinterpret_cast<uintptr_t>(out)) % 16 == 0;
}

extern "C" cudaError_t one_thread(const float* a, const float* b, float* out, int n,
                                  cudaStream_t stream) {
    add_one_thread<<<1, 1, 0, stream>>>(a, b, out, n);
    return cudaGetLastError();
}

extern "C" cudaError_t one_block(const float* a, const float* b, float* out, int n,
                                 cudaStream_t stream) {
    add_one_block<<<1, MAX_THREADS, 0, stream>>>(a, b, out, n);
    return cudaGetLastError();
}

cudaError_t launch_grid(int threads, const float* a, const float* b, float* out, int n,
                        cudaStream_t stream) {
    const unsigned blocks = n / threads + 1;  // the last block may be partly or wholly beyond n
    add_grid<<<blocks, threads, 0, stream>>>(a, b, out, n);
    return cudaGetLastError();
}

extern "C" cudaError_t grid(const float* a, const float* b, float* out, int n,
                            cudaStream_t stream) {
    return launch_grid(MAX_THREADS, a, b, out, n, stream);
}

extern "C" cudaError_t small_blocks(const float* a, const float* b, float* out, int n,
                                    cudaStream_t stream) {
    return launch_grid(THREADS, a, b, out, n, stream);
}

extern "C" cudaError_t four(const float* a, const float* b, float* out, int n,
                            cudaStream_t stream) {
    add_four<<<n / (4 * THREADS) + 1, THREADS, 0, stream>>>(a, b, out, n);
    return cudaGetLastError();
}

extern "C" cudaError_t vector(const float* a, const float* b, float* out, int n,
                              cudaStream_t stream) {
    if (!aligned(a, b, out)) return cudaErrorMisalignedAddress;
    const unsigned blocks = n / 4 / THREADS + 1;  // contains thread n / 4, for the remainder
    add_vector<<<blocks, THREADS, 0, stream>>>(a, b, out, n);
    return cudaGetLastError();
}
