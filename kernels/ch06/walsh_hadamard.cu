// The Walsh-Hadamard transform of 64 values a thread: registers against resident threads.
//
// The matrix has 64 rows; each thread transforms a column: six stages of 32 butterflies
// (a, b) -> (a + b, a - b), after which every output depends on every input. All 64 values are
// alive all the time, so a thread needs about 80 registers. A multiprocessor has 65536: enough for
// 768 such threads, a third of the 2048 that it could hold.
//
//   full_occupancy  __launch_bounds__(256, 8) asks for all 2048 threads (on GPUs that hold 1536, 6
//                   blocks are all), so the compiler may use 32 registers (40). What does not fit
//                   goes to local memory, which is device memory behind the caches: each stage
//                   stores it there and fetches it again.
//   unbounded       No bounds: the compiler takes what it needs, and fewer threads are resident.
//   matched         __launch_bounds__(256, 2): two blocks must fit, 128 registers are allowed. It
//                   says what the kernel is launched with, and guards against later growth.
//
// The 64 independent loads of a thread hide the latency that the missing threads would have hidden.

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
        for (int pair = 0; pair < SIZE / 2; ++pair) {  // every index is known when compiling
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
