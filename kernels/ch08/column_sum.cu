// Sums of the columns of a row-major matrix, one thread per column: unrolling the loop over rows.
//
// Neighbouring threads read neighbouring columns, so each load is coalesced. Each thread adds its
// column's elements in order. A thread waits at the first instruction that needs a loaded value,
// here the addition:
//
//   rolled        One load, one addition, then the loop's own instructions (pointer, counter,
//                 comparison, branch). One load per thread is in flight.
//   unrolled_4    The compiler repeats the body four times and moves all four loads before the
//                 first addition. Four loads are in flight, and the loop's own instructions are
//                 executed once per four rows.
//   unrolled_16   The same with sixteen: what nvcc does by itself without a pragma.
//
// The additions stay in the same order, so all results are bit-identical. The kernel stores nothing
// in the loop: a store that could alias the matrix would keep the compiler from moving loads.

#include <cuda_runtime.h>

constexpr int THREADS = 256;

template <int UNROLL>
__global__ void __launch_bounds__(THREADS)
    column_sum(const float* in, float* out, int rows, int columns) {
    const int column = blockIdx.x * THREADS + threadIdx.x;
    if (column >= columns) return;
    float sum = 0;
#pragma unroll UNROLL
    for (int row = 0; row < rows; ++row) sum += in[size_t(row) * columns + column];
    out[column] = sum;
}

template <int UNROLL>
cudaError_t launch(const float* in, float* out, int rows, int columns, cudaStream_t stream) {
    const int blocks = (columns + THREADS - 1) / THREADS;
    column_sum<UNROLL><<<blocks, THREADS, 0, stream>>>(in, out, rows, columns);
    return cudaGetLastError();
}

extern "C" cudaError_t rolled(const float* in, float* out, int rows, int columns,
                              cudaStream_t stream) {
    return launch<1>(in, out, rows, columns, stream);
}

extern "C" cudaError_t unrolled_4(const float* in, float* out, int rows, int columns,
                                  cudaStream_t stream) {
    return launch<4>(in, out, rows, columns, stream);
}

extern "C" cudaError_t unrolled_16(const float* in, float* out, int rows, int columns,
                                   cudaStream_t stream) {
    return launch<16>(in, out, rows, columns, stream);
}
