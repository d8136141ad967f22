// Walsh-Hadamard transform of 64 values per thread: registers per thread against occupancy.
//
// The matrix has 64 rows, and each thread transforms one column: six stages of 32 butterflies
// (a, b) -> (a + b, a - b), after which every output depends on every input. All 64 values are live
// throughout, so a thread needs about 80 registers. An SM has 65536 registers, enough for 768 such
// threads of the 2048 that it can hold.
//
//   full_occupancy  __launch_bounds__(256, 8) asks for all 2048 threads, which leaves 32 registers
//                   per thread. (GPUs with 1536 threads per SM: 6 blocks, 40 registers.) The other
//                   values spill to local memory, which is device memory behind the L1 and L2: each
//                   stage stores them there and loads them again.
//   unbounded       No __launch_bounds__: the compiler takes the registers it needs, and fewer
//                   threads are resident.
//   matched         __launch_bounds__(256, 2) requires only two resident blocks and allows 128
//                   registers. It documents the launch configuration and keeps later changes of the
//                   kernel from using more registers than two blocks can have.
//
// Each thread has 64 independent loads in flight. They hide the latency that more resident threads
// would otherwise have to hide.

#include <cuda_runtime.h>

constexpr int SIZE = 64;
constexpr int THREADS = 256;
#if __CUDA_ARCH__ >= 1200
constexpr int ALL_BLOCKS = 6;
#else
constexpr int ALL_BLOCKS = 8;
#endif

__device__ __forceinline__ void transform(const float* in, float* out, int columns) {
    const int column = blockIdx.x * THREADS + threadIdx.x;
    if (column >= columns) return;
    float x[SIZE];
#pragma unroll
    for (int row = 0; row < SIZE; ++row) x[row] = in[size_t(row) * columns + column];
#pragma unroll
    for (int span = 1; span < SIZE; span *= 2) {
#pragma unroll
        for (int pair = 0; pair < SIZE / 2; ++pair) {  // unrolled: x stays in registers
            const int i = pair / span * 2 * span + pair % span;
            const float a = x[i], b = x[i + span];
            x[i] = a + b;
            x[i + span] = a - b;
        }
    }
#pragma unroll
    for (int row = 0; row < SIZE; ++row) out[size_t(row) * columns + column] = x[row];
}

__global__ void __launch_bounds__(THREADS, ALL_BLOCKS)
    wht_full_occupancy(const float* in, float* out, int columns) {
    transform(in, out, columns);
}

__global__ void wht_unbounded(const float* in, float* out, int columns) {
    transform(in, out, columns);
}

__global__ void __launch_bounds__(THREADS, 2)
    wht_matched(const float* in, float* out, int columns) {
    transform(in, out, columns);
}

extern "C" cudaError_t full_occupancy(const float* in, float* out, int columns,
                                      cudaStream_t stream) {
    const int blocks = (columns + THREADS - 1) / THREADS;
    wht_full_occupancy<<<blocks, THREADS, 0, stream>>>(in, out, columns);
    return cudaGetLastError();
}

extern "C" cudaError_t unbounded(const float* in, float* out, int columns, cudaStream_t stream) {
    const int blocks = (columns + THREADS - 1) / THREADS;
    wht_unbounded<<<blocks, THREADS, 0, stream>>>(in, out, columns);
    return cudaGetLastError();
}

extern "C" cudaError_t matched(const float* in, float* out, int columns, cudaStream_t stream) {
    const int blocks = (columns + THREADS - 1) / THREADS;
    wht_matched<<<blocks, THREADS, 0, stream>>>(in, out, columns);
    return cudaGetLastError();
}
