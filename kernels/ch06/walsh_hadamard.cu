// Walsh-Hadamard transform of 128 values per thread: launch bounds decide the registers per thread.
//
// The matrix has 128 rows, and each thread transforms one column: seven stages of 64 butterflies
// (a, b) -> (a + b, a - b), after which every output depends on every input. All 128 values are
// live throughout, as in a GEMM whose threads hold 128 accumulators, so a thread needs more than
// 128 of the SM's 65536 registers. Both kernels are launched with blocks of 128 threads.
//
//   any_block   __launch_bounds__(1024) allows every block size up to the largest. A block of 1024
//               threads must fit the SM, so the compiler may use 64 registers per thread. The other
//               values spill to local memory, which is device memory behind the L1 and L2: most
//               stages store them there and load them again.
//   matched     __launch_bounds__(128) states the block size of the launch: each thread may have
//               the 255 registers that an instruction can address, and the compiler uses 206. Two
//               blocks are resident. Without bounds the compiler makes the same code.
//
// Each thread has 128 independent loads in flight. They hide the latency that more resident threads
// would otherwise have to hide.

#include <cuda_runtime.h>

constexpr int SIZE = 128;
constexpr int THREADS = 128;

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

__global__ void __launch_bounds__(1024) wht_any_block(const float* in, float* out, int columns) {
    transform(in, out, columns);
}

__global__ void __launch_bounds__(THREADS) wht_matched(const float* in, float* out, int columns) {
    transform(in, out, columns);
}

template <typename Kernel>
cudaError_t launch(Kernel kernel, const float* in, float* out, int columns, cudaStream_t stream) {
    const int blocks = (columns + THREADS - 1) / THREADS;
    kernel<<<blocks, THREADS, 0, stream>>>(in, out, columns);
    return cudaGetLastError();
}

extern "C" cudaError_t any_block(const float* in, float* out, int columns, cudaStream_t stream) {
    return launch(wht_any_block, in, out, columns, stream);
}

extern "C" cudaError_t matched(const float* in, float* out, int columns, cudaStream_t stream) {
    return launch(wht_matched, in, out, columns, stream);
}
