// Rotates 32 x 32 tiles by 90 degrees, many times each, with three layouts in shared memory.
//
// A block rotates one tile `rotations` times: out[row][column] = in[column][31 - row]. Each
// rotation writes the tile to shared memory by rows and reads it back by columns. Device memory is
// accessed twice per tile, shared memory 2 * rotations times, so shared memory is the bottleneck.
// (With one rotation per tile, device memory would limit the layouts without conflicts, and they
// would gain far less.)
//
// Shared memory has 32 banks of 4-byte words. Each bank serves one word per clock. The rungs differ
// only in where the tile keeps element (row, column):
//
//   conflicted  row * 32 + column          The obvious layout. A row has as many words as there are
//                                          banks, so a column lies in a single bank, and the 32
//                                          lanes that read it are served one after the other: a
//                                          32-way bank conflict.
//   padded      row * 33 + column          One unused word per row shifts the next row by one bank.
//                                          (row, column) is in bank (row + column) % 32, so a row
//                                          and a column each touch all 32 banks.
//   swizzled    row * 32 + (column ^ row)  XOR permutes the columns of each row differently, with
//                                          no unused word. The index costs a few instructions. The
//                                          tile stays dense and aligned, which 16-byte accesses and
//                                          TMA copies need.
//
// In the conflicted layout a warp writes a row in 1 clock and reads a column in 32 clocks. In the
// other layouts, writing and reading take 1 clock each. The gain is at most 33 / 2 = 16.5x.

#include <cuda_runtime.h>

constexpr int SIDE = 32;  // lanes per warp = banks of shared memory = rows and columns of a tile
constexpr int WARPS = 8;
constexpr int ROWS = SIDE / WARPS;  // rows of the tile per warp

struct Conflicted {
    static constexpr int WORDS = SIDE * SIDE;
    static __device__ int offset(int row, int column) { return row * SIDE + column; }
};

struct Padded {
    static constexpr int WORDS = SIDE * (SIDE + 1);
    static __device__ int offset(int row, int column) { return row * (SIDE + 1) + column; }
};

struct Swizzled {
    static constexpr int WORDS = SIDE * SIDE;
    static __device__ int offset(int row, int column) { return row * SIDE + (column ^ row); }
};

template <typename Layout>
__global__ void rotate(const float* in, float* out, int rotations) {
    __shared__ float tile[Layout::WORDS];
    const int column = threadIdx.x;
    const int row = threadIdx.y;  // the first of this thread's ROWS rows, which are WARPS apart
    const size_t corner = size_t(blockIdx.x) * SIDE * SIDE;

    float values[ROWS];
    for (int k = 0; k < ROWS; ++k) values[k] = in[corner + (row + k * WARPS) * SIDE + column];

    for (int i = 0; i < rotations; ++i) {
        for (int k = 0; k < ROWS; ++k) tile[Layout::offset(row + k * WARPS, column)] = values[k];
        __syncthreads();
        for (int k = 0; k < ROWS; ++k)
            values[k] = tile[Layout::offset(column, SIDE - 1 - (row + k * WARPS))];
        __syncthreads();  // every warp has read its columns before the tile is overwritten
    }

    for (int k = 0; k < ROWS; ++k) out[corner + (row + k * WARPS) * SIDE + column] = values[k];
}

template <typename Layout>
cudaError_t launch(const float* in, float* out, int tiles, int rotations, cudaStream_t stream) {
    rotate<Layout><<<tiles, dim3(SIDE, WARPS), 0, stream>>>(in, out, rotations);
    return cudaGetLastError();
}

extern "C" cudaError_t conflicted(const float* in, float* out, int tiles, int rotations,
                                  cudaStream_t stream) {
    return launch<Conflicted>(in, out, tiles, rotations, stream);
}

extern "C" cudaError_t padded(const float* in, float* out, int tiles, int rotations,
                              cudaStream_t stream) {
    return launch<Padded>(in, out, tiles, rotations, stream);
}

extern "C" cudaError_t swizzled(const float* in, float* out, int tiles, int rotations,
                                cudaStream_t stream) {
    return launch<Swizzled>(in, out, tiles, rotations, stream);
}
