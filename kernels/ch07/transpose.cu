// Transposing a matrix of n x n floats (n a multiple of 64) at the speed of a copy.
//
// Either the reads or the writes of a plain transposition walk down a column, a float here, a float
// n floats further on. A tile in shared memory takes the turn instead: a block reads rows, turns
// the tile there, and writes rows. What is left to decide is where the tile keeps (row, column).
//
//   conflicted  Tiles of 32 x 32, 32 words a row. Device memory is happy, but a column of the tile
//               lies in one of the 32 banks of shared memory, so that the 32 lanes that read it are
//               served one after the other: 1024 clocks a tile, more than device memory needs.
//   padded      33 words a row: a column meets all 32 banks, and 32 clocks do.
//   swizzled    Tiles of 64 x 64 and 16-byte accesses everywhere. A thread reads 4 x 4 floats,
//               turns them in its registers, and stores four vectors in shared memory. Padding
//               would cost 16 bytes a row here; instead the vectors of each row are dealt out in an
//               order of their own: XOR with row / 4. Eight lanes (what 16-byte accesses are served
//               by) then meet all eight groups of four banks, both when they write, eight rows four
//               apart, and when they read, eight neighbours in a row.

#include <cuda_runtime.h>

constexpr int TILE = 32;
constexpr int ROWS = 8;  // of a block of 32 x 8 threads; each takes TILE / ROWS of the tile's rows

template <int PITCH>
__device__ void turn(float (*tile)[PITCH], const float* in, float* out, int n) {
    const int x = blockIdx.x * TILE, y = blockIdx.y * TILE;
    const int column = threadIdx.x, row = threadIdx.y;  // the first of four rows, eight apart
    for (int k = 0; k < TILE; k += ROWS)
        tile[row + k][column] = in[size_t(y + row + k) * n + x + column];
    __syncthreads();
    for (int k = 0; k < TILE; k += ROWS)
        out[size_t(x + row + k) * n + y + column] = tile[column][row + k];
}

__global__ void transpose_conflicted(const float* in, float* out, int n) {
    __shared__ float tile[TILE][TILE];
    turn(tile, in, out, n);
}

__global__ void transpose_padded(const float* in, float* out, int n) {
    __shared__ float tile[TILE][TILE + 1];
    turn(tile, in, out, n);
}

constexpr int SIDE = 64;           // of a swizzled tile
constexpr int VECTORS = SIDE / 4;  // in a row
constexpr int THREADS = VECTORS * VECTORS;

__device__ int at(int row, int vector) { return row * VECTORS + (vector ^ row / 4); }

__global__ void __launch_bounds__(THREADS) transpose_swizzled(const float* in, float* out, int n) {
    __shared__ float4 tile[SIDE * VECTORS];  // already transposed
    const int x = blockIdx.x * SIDE, y = blockIdx.y * SIDE;
    const int vector = threadIdx.x % VECTORS, group = threadIdx.x / VECTORS;

    float4 a[4];  // rows 4 * group + i, columns 4 * vector ...
    const float* from = in + size_t(y + 4 * group) * n + x + 4 * vector;
    for (int i = 0; i < 4; ++i) a[i] = *reinterpret_cast<const float4*>(from + size_t(i) * n);
    tile[at(4 * vector + 0, group)] = make_float4(a[0].x, a[1].x, a[2].x, a[3].x);
    tile[at(4 * vector + 1, group)] = make_float4(a[0].y, a[1].y, a[2].y, a[3].y);
    tile[at(4 * vector + 2, group)] = make_float4(a[0].z, a[1].z, a[2].z, a[3].z);
    tile[at(4 * vector + 3, group)] = make_float4(a[0].w, a[1].w, a[2].w, a[3].w);
    __syncthreads();
    for (int k = 0; k < SIDE; k += VECTORS)
        *reinterpret_cast<float4*>(out + size_t(x + group + k) * n + y + 4 * vector) =
            tile[at(group + k, vector)];
}

extern "C" cudaError_t conflicted(const float* in, float* out, int n, cudaStream_t stream) {
    if (n % SIDE) return cudaErrorInvalidValue;
    transpose_conflicted<<<dim3(n / TILE, n / TILE), dim3(TILE, ROWS), 0, stream>>>(in, out, n);
    return cudaGetLastError();
}

extern "C" cudaError_t padded(const float* in, float* out, int n, cudaStream_t stream) {
    if (n % SIDE) return cudaErrorInvalidValue;
    transpose_padded<<<dim3(n / TILE, n / TILE), dim3(TILE, ROWS), 0, stream>>>(in, out, n);
    return cudaGetLastError();
}

extern "C" cudaError_t swizzled(const float* in, float* out, int n, cudaStream_t stream) {
    if (n % SIDE) return cudaErrorInvalidValue;
    transpose_swizzled<<<dim3(n / SIDE, n / SIDE), THREADS, 0, stream>>>(in, out, n);
    return cudaGetLastError();
}
