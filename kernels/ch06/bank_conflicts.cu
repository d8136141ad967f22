// Turning 32 x 32 tiles by a quarter, again and again: what the layout of a shared tile costs.
//
// A block turns one tile `turns` times: out[row][column] = in[column][31 - row]. For each turn it
// writes the rows of the tile to shared memory and reads them back as columns; device memory sees
// the tile twice, shared memory 2 * turns times, so shared memory is what binds. (With one turn for
// each trip to device memory the trip would hide most of what a layout costs.)
//
// Shared memory has 32 banks of 4-byte words and gives a warp one word of each bank per clock. The
// ladder is nothing but the place of (row, column) in the tile:
//
//   conflicted  row * 32 + column          What one writes first. A row is as long as there are
//                                          banks, so a column lies in a single bank, and the 32
//                                          lanes that read it are served one after the other.
//   padded      row * 33 + column          One unused word at the end of each row moves the next
//                                          row on by a bank. (row, column) is now in bank
//                                          (row + column) % 32: rows and columns both meet all 32.
//   swizzled    row * 32 + (column ^ row)  The same without the unused word: XOR deals out the
//                                          columns of each row in an order of its own. The index
//                                          costs a few instructions, and the tile stays dense and
//                                          aligned, as 16-byte accesses and bulk copies want it.
//
// A warp writes a row and reads a column in 1 + 32 clocks with the first layout and in 1 + 1 with
// the others: 16.5 times is the most that padding can win here.

#include <cuda_runtime.h>

constexpr int SIDE = 32;  // lanes of a warp, banks of shared memory, rows and columns of a tile
constexpr int WARPS = 8;
constexpr int ROWS = SIDE / WARPS;  // a warp's share of the tile

struct Conflicted {
    static constexpr int WORDS = SIDE * SIDE;
    static __device__ int at(int row, int column) { return row * SIDE + column; }
};

struct Padded {
    static constexpr int WORDS = SIDE * (SIDE + 1);
    static __device__ int at(int row, int column) { return row * (SIDE + 1) + column; }
};

struct Swizzled {
    static constexpr int WORDS = SIDE * SIDE;
    static __device__ int at(int row, int column) { return row * SIDE + (column ^ row); }
};

template <typename Layout>
__global__ void turn(const float* in, float* out, int turns) {
    __shared__ float tile[Layout::WORDS];
    const int column = threadIdx.x;
    const int row = threadIdx.y;  // the first of four rows, eight apart
    const size_t corner = size_t(blockIdx.x) * SIDE * SIDE;

    float held[ROWS];
    for (int k = 0; k < ROWS; ++k) held[k] = in[corner + (row + k * WARPS) * SIDE + column];

    for (int i = 0; i < turns; ++i) {
        for (int k = 0; k < ROWS; ++k) tile[Layout::at(row + k * WARPS, column)] = held[k];
        __syncthreads();
        for (int k = 0; k < ROWS; ++k)
            held[k] = tile[Layout::at(column, SIDE - 1 - (row + k * WARPS))];
        __syncthreads();  // all of the tile is read before any of it is overwritten
    }

    for (int k = 0; k < ROWS; ++k) out[corner + (row + k * WARPS) * SIDE + column] = held[k];
}

template <typename Layout>
cudaError_t launch(const float* in, float* out, int tiles, int turns, cudaStream_t stream) {
    turn<Layout><<<tiles, dim3(SIDE, WARPS), 0, stream>>>(in, out, turns);
    return cudaGetLastError();
}

extern "C" cudaError_t conflicted(const float* in, float* out, int tiles, int turns,
                                  cudaStream_t stream) {
    return launch<Conflicted>(in, out, tiles, turns, stream);
}

extern "C" cudaError_t padded(const float* in, float* out, int tiles, int turns,
                              cudaStream_t stream) {
    return launch<Padded>(in, out, tiles, turns, stream);
}

extern "C" cudaError_t swizzled(const float* in, float* out, int tiles, int turns,
                                cudaStream_t stream) {
    return launch<Swizzled>(in, out, tiles, turns, stream);
}
