// out = scale[row] * a + bias[column] on a matrix: which index of a 2-D grid is which axis?
//
// A block of 32 x 8 threads has threadIdx.x in 0 ... 31 and threadIdx.y in 0 ... 7. The hardware
// counts threadIdx.x first, so the 32 lanes of a warp have the same y and consecutive x. The matrix
// is stored by rows: the elements of a row are neighbours in memory, and those of a column are a
// whole row apart. Memory transfers sectors of 32 bytes.
//
//   y_fast        x counts rows and y counts columns, as in the (row, column) of mathematics. The
//                 lanes of a warp access one column: 32 sectors, of which each lane uses 4 bytes.
//   x_fast        x counts columns and y counts rows: only the two indices are exchanged. The lanes
//                 of a warp access 32 neighbouring floats, 4 whole sectors: a coalesced access.
//   x_fast_four   Each thread computes four columns, 32 apart, so that each access of a warp is
//                 as before: four times the bytes in flight.
//   x_fast_vec4   The four columns of a thread are neighbours, and it accesses them with 16 bytes:
//                 as many bytes in flight, in a quarter of the instructions.
//
// Neither side of the matrix has to be a multiple of the block: threads beyond an edge return.

#include <cstdint>
#include <cuda_runtime.h>

constexpr int BLOCK_X = 32;
constexpr int BLOCK_Y = 8;
constexpr int COLUMNS = 4;  // per thread, in x_fast_four and x_fast_vec4

__global__ void scale_y_fast(const float* a, const float* scale, const float* bias, float* out,
                             int rows, int columns) {
    const int row = blockIdx.x * BLOCK_X + threadIdx.x;
    const int column = blockIdx.y * BLOCK_Y + threadIdx.y;
    if (row >= rows || column >= columns) return;
    const size_t i = size_t(row) * columns + column;
    out[i] = fmaf(scale[row], a[i], bias[column]);
}

__global__ void scale_x_fast(const float* a, const float* scale, const float* bias, float* out,
                             int rows, int columns) {
    const int column = blockIdx.x * BLOCK_X + threadIdx.x;
    const int row = blockIdx.y * BLOCK_Y + threadIdx.y;
    if (row >= rows || column >= columns) return;
    const size_t i = size_t(row) * columns + column;
    out[i] = fmaf(scale[row], a[i], bias[column]);
}

__global__ void scale_x_fast_four(const float* a, const float* scale, const float* bias, float* out,
                                  int rows, int columns) {
    const int first = blockIdx.x * BLOCK_X * COLUMNS + threadIdx.x;
    const int row = blockIdx.y * BLOCK_Y + threadIdx.y;
    if (row >= rows) return;
    const size_t begin = size_t(row) * columns;
    const float s = scale[row];
    float x[COLUMNS], y[COLUMNS];
#pragma unroll
    for (int k = 0; k < COLUMNS; ++k) {
        const int column = first + k * BLOCK_X;
        x[k] = column < columns ? a[begin + column] : 0;
        y[k] = column < columns ? bias[column] : 0;
    }
#pragma unroll
    for (int k = 0; k < COLUMNS; ++k) {
        const int column = first + k * BLOCK_X;
        if (column < columns) out[begin + column] = fmaf(s, x[k], y[k]);
    }
}

__global__ void scale_x_fast_vec4(const float* a, const float* scale, const float* bias, float* out,
                                  int rows, int columns) {
    const int column = (blockIdx.x * BLOCK_X + threadIdx.x) * COLUMNS;
    const int row = blockIdx.y * BLOCK_Y + threadIdx.y;
    if (row >= rows || column >= columns) return;  // 4 divides columns: all four are inside
    const size_t i = size_t(row) * columns + column;
    const float s = scale[row];
    const float4 x = *reinterpret_cast<const float4*>(a + i);
    const float4 y = *reinterpret_cast<const float4*>(bias + column);
    *reinterpret_cast<float4*>(out + i) =
        make_float4(fmaf(s, x.x, y.x), fmaf(s, x.y, y.y), fmaf(s, x.z, y.z), fmaf(s, x.w, y.w));
}

// Blocks of `size` elements that cover `count` elements.
unsigned cover(int count, int size) { return (count + size - 1) / size; }

constexpr unsigned MAX_GRID_Y = 65535;  // gridDim.x may be 2^31 - 1, gridDim.y only this

extern "C" cudaError_t y_fast(const float* a, const float* scale, const float* bias, float* out,
                              int rows, int columns, cudaStream_t stream) {
    const dim3 grid(cover(rows, BLOCK_X), cover(columns, BLOCK_Y));
    if (grid.y > MAX_GRID_Y) return cudaErrorInvalidValue;
    scale_y_fast<<<grid, dim3(BLOCK_X, BLOCK_Y), 0, stream>>>(a, scale, bias, out, rows, columns);
    return cudaGetLastError();
}

extern "C" cudaError_t x_fast(const float* a, const float* scale, const float* bias, float* out,
                              int rows, int columns, cudaStream_t stream) {
    const dim3 grid(cover(columns, BLOCK_X), cover(rows, BLOCK_Y));
    if (grid.y > MAX_GRID_Y) return cudaErrorInvalidValue;
    scale_x_fast<<<grid, dim3(BLOCK_X, BLOCK_Y), 0, stream>>>(a, scale, bias, out, rows, columns);
    return cudaGetLastError();
}

extern "C" cudaError_t x_fast_four(const float* a, const float* scale, const float* bias,
                                   float* out, int rows, int columns, cudaStream_t stream) {
    const dim3 grid(cover(columns, BLOCK_X * COLUMNS), cover(rows, BLOCK_Y));
    if (grid.y > MAX_GRID_Y) return cudaErrorInvalidValue;
    scale_x_fast_four<<<grid, dim3(BLOCK_X, BLOCK_Y), 0, stream>>>(a, scale, bias, out, rows,
                                                                  columns);
    return cudaGetLastError();
}

extern "C" cudaError_t x_fast_vec4(const float* a, const float* scale, const float* bias,
                                   float* out, int rows, int columns, cudaStream_t stream) {
    const dim3 grid(cover(columns, BLOCK_X * COLUMNS), cover(rows, BLOCK_Y));
    if (columns % COLUMNS || grid.y > MAX_GRID_Y) return cudaErrorInvalidValue;
    if ((reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(bias) |
         reinterpret_cast<uintptr_t>(out)) % 16)
        return cudaErrorMisalignedAddress;
    scale_x_fast_vec4<<<grid, dim3(BLOCK_X, BLOCK_Y), 0, stream>>>(a, scale, bias, out, rows,
                                                                  columns);
    return cudaGetLastError();
}
