// Transposes a matrix of n x n floats (n a multiple of 64) with coalesced reads and writes.
//
// In a plain transpose either the reads or the writes walk down a column, one float every n floats.
// A tile in shared memory makes both coalesced: a block reads rows, transposes the tile in shared
// memory, and writes rows. The rungs differ in where the tile keeps (row, column).
//
//   conflicted  Tiles of 32 x 32 with 32 words per row. Device-memory accesses are coalesced, but a
//               column of the tile lies in one of the 32 banks of shared memory, so the 32 lanes
//               that read it are served one after the other (a 32-way bank conflict): 1024 clocks
//               per tile, more than device memory takes.
//   padded      33 words per row: a column touches all 32 banks, and a tile takes 32 clocks.
//   swizzled    32 words per row, and element (row, column) is at place column XOR row: along a
//               column the row varies, so its elements lie in 32 banks, without unused words.
//   vectors     Tiles of 64 x 64 and 16-byte accesses everywhere. A thread reads 4 x 4 floats,
//               transposes them in registers, and stores four vectors to shared memory. Padding
//               would cost 16 bytes per row. XOR with row / 4 permutes the vectors of each row
//               instead. Shared memory serves 16-byte accesses eight lanes at a time, and those
//               eight touch all eight groups of four banks: when they write (rows four apart) and
//               when they read (neighbours in a row).

#include <cuda_runtime.h>

constexpr int TILE = 32;
constexpr int ROWS = 8;  // a block has 32 x 8 threads; each thread takes TILE / ROWS rows

// `place` gives the word of a row of the tile in which a column is.
template <int PITCH, typename Place>
__device__ void transpose_tile(float (*tile)[PITCH], Place place, const float* in, float* out,
                               int n) {
    const int x = blockIdx.x * TILE, y = blockIdx.y * TILE;
    const int column = threadIdx.x, row = threadIdx.y;  // row: first of a thread's four, ROWS apart
    for (int k = 0; k < TILE; k += ROWS)
        tile[row + k][place(row + k, column)] = in[size_t(y + row + k) * n + x + column];
    __syncthreads();
    for (int k = 0; k < TILE; k += ROWS)
        out[size_t(x + row + k) * n + y + column] = tile[column][place(column, row + k)];
}

struct InOrder {
    __device__ int operator()(int, int column) const { return column; }
};

struct Swizzled {
    __device__ int operator()(int row, int column) const { return column ^ row; }
};

__global__ void transpose_conflicted(const float* in, float* out, int n) {
    __shared__ float tile[TILE][TILE];
    transpose_tile(tile, InOrder(), in, out, n);
}

__global__ void transpose_padded(const float* in, float* out, int n) {
    __shared__ float tile[TILE][TILE + 1];
    transpose_tile(tile, InOrder(), in, out, n);
}

__global__ void transpose_swizzled(const float* in, float* out, int n) {
    __shared__ float tile[TILE][TILE];
    transpose_tile(tile, Swizzled(), in, out, n);
}

constexpr int SIDE = 64;           // rows and columns of a tile of vectors
constexpr int VECTORS = SIDE / 4;  // vectors of 4 floats per row
constexpr int THREADS = VECTORS * VECTORS;

__device__ int swizzled_index(int row, int vector) { return row * VECTORS + (vector ^ row / 4); }

__global__ void __launch_bounds__(THREADS) transpose_vectors(const float* in, float* out, int n) {
    __shared__ float4 tile[SIDE * VECTORS];  // the transposed tile
    const int x = blockIdx.x * SIDE, y = blockIdx.y * SIDE;
    const int vector = threadIdx.x % VECTORS, group = threadIdx.x / VECTORS;

    float4 a[4];  // rows 4 * group + i, columns 4 * vector to 4 * vector + 3
    const float* from = in + size_t(y + 4 * group) * n + x + 4 * vector;
    for (int i = 0; i < 4; ++i) a[i] = *reinterpret_cast<const float4*>(from + size_t(i) * n);
    tile[swizzled_index(4 * vector + 0, group)] = make_float4(a[0].x, a[1].x, a[2].x, a[3].x);
    tile[swizzled_index(4 * vector + 1, group)] = make_float4(a[0].y, a[1].y, a[2].y, a[3].y);
    tile[swizzled_index(4 * vector + 2, group)] = make_float4(a[0].z, a[1].z, a[2].z, a[3].z);
    tile[swizzled_index(4 * vector + 3, group)] = make_float4(a[0].w, a[1].w, a[2].w, a[3].w);
    __syncthreads();
    for (int k = 0; k < SIDE; k += VECTORS)
        *reinterpret_cast<float4*>(out + size_t(x + group + k) * n + y + 4 * vector) =
            tile[swizzled_index(group + k, vector)];
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
    transpose_swizzled<<<dim3(n / TILE, n / TILE), dim3(TILE, ROWS), 0, stream>>>(in, out, n);
    return cudaGetLastError();
}

extern "C" cudaError_t vectors(const float* in, float* out, int n, cudaStream_t stream) {
    if (n % SIDE) return cudaErrorInvalidValue;
    transpose_vectors<<<dim3(n / SIDE, n / SIDE), THREADS, 0, stream>>>(in, out, n);
    return cudaGetLastError();
}
