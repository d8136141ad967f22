// out = a * b in fp32 (a is m x k, b is k x n, all row-major): from one dot product per thread to
// double-buffered tiles with 64 outputs per thread, one change at a time.
//
// Each output takes k multiply-adds (FMAs), and each FMA needs one element of a and one of b. An SM
// executes 128 FMAs per clock. It can load far fewer operands from device memory, and 32 words per
// clock from shared memory. So the ladder is about reuse: first by the threads of a block, in
// shared memory; then by the outputs of a thread, in registers.
//
//   naive            One thread per output. threadIdx.x counts rows, so for each k the lanes of a
//                    warp read 32 elements of a that are a whole row apart: 32 sectors.
//   coalesced        threadIdx.x counts columns. The lanes read one element of a together and 32
//                    neighbouring elements of b: 5 sectors. Each FMA still takes two loads.
//   shared           A block loads 32 x 32 tiles of a and b into shared memory and uses each
//                    element 32 times. Each FMA takes two operands from shared memory; nvcc merges
//                    four loads of `as`, so 32 FMAs take 32 LDS and 8 LDS.128.
//   registers_1d     Each thread computes 8 outputs of a column, in registers. An element of b is
//                    loaded once for all 8. Half as many threads now cover a 64 x 64 tile.
//   registers_2d     Each thread computes 8 x 8 outputs. 8 elements of a and 8 of b give 64 FMAs: a
//                    quarter of a load per FMA. The block's tile is 128 x 128.
//   vector           The same with 16-byte loads, from device memory and from shared memory. The
//                    tile of a is transposed on the way, so that four rows of one k are adjacent.
//   double_buffered  Two buffers in shared memory. While the block multiplies the tiles in one, its
//                    threads load the next tiles into registers, so that the FMAs hide the latency
//                    of the loads, and then store them to the other. One barrier per tile is
//                    enough, because no thread reads the buffer that is being written.
//
// All rungs add the products of an output in the same order. Elements beyond the edges are loaded
// as 0, and outputs beyond them are not stored. 16-byte loads need n and k to be multiples of 4.

#include <cstdint>
#include <cuda_runtime.h>

__global__ void matmul_naive(const float* a, const float* b, float* out, int m, int n, int k) {
    const int row = blockIdx.y * 32 + threadIdx.x, column = blockIdx.x * 32 + threadIdx.y;
    if (row >= m || column >= n) return;
    float sum = 0;
    for (int i = 0; i < k; ++i) sum = fmaf(a[size_t(row) * k + i], b[size_t(i) * n + column], sum);
    out[size_t(row) * n + column] = sum;
}

__global__ void matmul_coalesced(const float* a, const float* b, float* out, int m, int n, int k) {
    const int row = blockIdx.y * 32 + threadIdx.y, column = blockIdx.x * 32 + threadIdx.x;
    if (row >= m || column >= n) return;
    float sum = 0;
    for (int i = 0; i < k; ++i) sum = fmaf(a[size_t(row) * k + i], b[size_t(i) * n + column], sum);
    out[size_t(row) * n + column] = sum;
}

// Element (row, column) of a matrix, and 0 beyond its edges.
__device__ float element(const float* matrix, int row, int column, int rows, int columns) {
    return row < rows && column < columns ? matrix[size_t(row) * columns + column] : 0.0f;
}

__global__ void matmul_shared(const float* a, const float* b, float* out, int m, int n, int k) {
    __shared__ float as[32][32], bs[32][32];
    const int x = threadIdx.x, y = threadIdx.y;
    const int row = blockIdx.y * 32 + y, column = blockIdx.x * 32 + x;
    float sum = 0;
    for (int first = 0; first < k; first += 32) {
        as[y][x] = element(a, row, first + x, m, k);
        bs[y][x] = element(b, first + y, column, k, n);
        __syncthreads();
        for (int i = 0; i < 32; ++i) sum = fmaf(as[y][i], bs[i][x], sum);
        __syncthreads();  // all threads have used the tiles before they are overwritten
    }
    if (row < m && column < n) out[size_t(row) * n + column] = sum;
}

constexpr int DEPTH = 8;  // columns of a and rows of b in a tile of the following rungs

__global__ void __launch_bounds__(512)
    matmul_registers_1d(const float* a, const float* b, float* out, int m, int n, int k) {
    constexpr int TILE = 64, ROWS = 8;  // ROWS outputs per thread: TILE * TILE / ROWS = 512 threads
    __shared__ float as[TILE][DEPTH], bs[DEPTH][TILE];
    const int t = threadIdx.x, top = blockIdx.y * TILE, left = blockIdx.x * TILE;
    const int x = t % TILE, y = t / TILE * ROWS;  // the thread's outputs in the tile
    float sums[ROWS] = {};
    for (int first = 0; first < k; first += DEPTH) {
        as[t / DEPTH][t % DEPTH] = element(a, top + t / DEPTH, first + t % DEPTH, m, k);
        bs[t / TILE][t % TILE] = element(b, first + t / TILE, left + t % TILE, k, n);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < DEPTH; ++i) {
            const float bi = bs[i][x];  // one load for ROWS multiply-adds
            for (int r = 0; r < ROWS; ++r) sums[r] = fmaf(as[y + r][i], bi, sums[r]);
        }
        __syncthreads();
    }
    for (int r = 0; r < ROWS; ++r)
        if (top + y + r < m && left + x < n) out[size_t(top + y + r) * n + left + x] = sums[r];
}

// --- Tiles of 128 x 128, 8 x 8 outputs per thread ---------------------------------------------

constexpr int TILE = 128, THREADS = 256;
constexpr int BLOCKS_PER_SM = 2;  // limits a thread to 128 registers, 64 of which are sums

// Eight warps compute 32 x 64 outputs each, and the lanes of a warp form 4 rows of 8 columns. Each
// half-warp is 2 rows of 8 columns: with 16 bytes per lane, it reads at most 128 different bytes of
// shared memory, as many as one clock can serve.
struct Lane {
    int row, column;  // first row and column of the warp's outputs in the block's tile
    int y, x;         // row and column of the lane in its warp
    __device__ Lane() {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        row = warp / 2 * 32, column = warp % 2 * 64;
        y = lane / 16 * 2 + lane % 2, x = lane / 2 % 8;
    }
};

__global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    matmul_registers_2d(const float* a, const float* b, float* out, int m, int n, int k) {
    __shared__ float as[TILE][DEPTH + 1];  // the unused column spreads the lanes' rows over banks
    __shared__ float bs[DEPTH][TILE];
    const int t = threadIdx.x, top = blockIdx.y * TILE, left = blockIdx.x * TILE;
    const Lane lane;
    const int y = lane.row + lane.y, x = lane.column + lane.x;  // then every 4th row, 8th column
    float sums[8][8] = {};
    for (int first = 0; first < k; first += DEPTH) {
#pragma unroll
        for (int j = 0; j < TILE * DEPTH / THREADS; ++j) {
            const int i = j * THREADS + t;
            as[i / DEPTH][i % DEPTH] = element(a, top + i / DEPTH, first + i % DEPTH, m, k);
            bs[i / TILE][i % TILE] = element(b, first + i / TILE, left + i % TILE, k, n);
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < DEPTH; ++i) {
            float column[8], row[8];  // 16 loads for 64 multiply-adds
            for (int r = 0; r < 8; ++r) column[r] = as[y + 4 * r][i];
            for (int c = 0; c < 8; ++c) row[c] = bs[i][x + 8 * c];
            for (int r = 0; r < 8; ++r)
                for (int c = 0; c < 8; ++c) sums[r][c] = fmaf(column[r], row[c], sums[r][c]);
        }
        __syncthreads();
    }
    for (int r = 0; r < 8; ++r)
        for (int c = 0; c < 8; ++c)
            if (top + y + 4 * r < m && left + x + 8 * c < n)
                out[size_t(top + y + 4 * r) * n + left + x + 8 * c] = sums[r][c];
}

// A tile of each operand, a transposed. The four unused words per row of `a` make its 4-byte stores
// free of bank conflicts and keep its rows aligned to 16 bytes.
struct alignas(16) Tiles {
    float a[DEPTH][TILE + 4];
    float b[DEPTH][TILE];
};

// Four elements of each operand: a thread's share of a tile.
struct Share {
    float4 a, b;
};

// What a thread loads: pointers to its share of the current tiles, and how many columns of a and
// rows of b are left from there on; none if the thread is beyond the last row or column.
struct Loader {
    const float *a, *b;
    int a_left, b_left;

    __device__ Loader(const float* a_, const float* b_, int m, int n, int k) {
        const int row = blockIdx.y * TILE + a_row(), column = blockIdx.x * TILE + b_column();
        a = a_ + size_t(row) * k + a_column(), a_left = row < m ? k - a_column() : 0;
        b = b_ + size_t(b_row()) * n + column, b_left = column < n ? k - b_row() : 0;
    }
    static __device__ int a_row() { return threadIdx.x / (DEPTH / 4); }
    static __device__ int a_column() { return threadIdx.x % (DEPTH / 4) * 4; }
    static __device__ int b_row() { return threadIdx.x / (TILE / 4); }
    static __device__ int b_column() { return threadIdx.x % (TILE / 4) * 4; }

    // Load the share of one tile and step to the next tile.
    __device__ Share next(int n) {
        Share share = {};  // 4 divides n and k, so all four elements are inside or none
        if (a_left > 0) share.a = *reinterpret_cast<const float4*>(a);
        if (b_left > 0) share.b = *reinterpret_cast<const float4*>(b);
        a += DEPTH, a_left -= DEPTH;
        b += size_t(DEPTH) * n, b_left -= DEPTH;
        return share;
    }
    static __device__ void store(const Share& share, Tiles& tiles) {
        tiles.a[a_column()][a_row()] = share.a.x;
        tiles.a[a_column() + 1][a_row()] = share.a.y;
        tiles.a[a_column() + 2][a_row()] = share.a.z;
        tiles.a[a_column() + 3][a_row()] = share.a.w;
        *reinterpret_cast<float4*>(&tiles.b[b_row()][b_column()]) = share.b;
    }
};
static_assert(TILE * DEPTH == THREADS * 4, "each thread loads one vector of each operand");

// sums += the product of two tiles. A lane's outputs are four blocks of 4 x 4.
__device__ void multiply(const Tiles& tiles, const Lane& lane, float (&sums)[8][8]) {
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) {
        alignas(16) float column[8], row[8];  // 4 loads for 64 multiply-adds
        for (int h = 0; h < 2; ++h) {
            *reinterpret_cast<float4*>(&column[4 * h]) =
                *reinterpret_cast<const float4*>(&tiles.a[i][lane.row + 16 * h + 4 * lane.y]);
            *reinterpret_cast<float4*>(&row[4 * h]) =
                *reinterpret_cast<const float4*>(&tiles.b[i][lane.column + 32 * h + 4 * lane.x]);
        }
        for (int r = 0; r < 8; ++r)
            for (int c = 0; c < 8; ++c) sums[r][c] = fmaf(column[r], row[c], sums[r][c]);
    }
}

__device__ void store_sums(const float (&sums)[8][8], const Lane& lane, float* out, int m, int n) {
    for (int r = 0; r < 8; ++r)
        for (int h = 0; h < 2; ++h) {
            const int row = blockIdx.y * TILE + lane.row + r / 4 * 16 + 4 * lane.y + r % 4;
            const int column = blockIdx.x * TILE + lane.column + 32 * h + 4 * lane.x;
            const float* s = &sums[r][4 * h];
            if (row < m && column < n)
                *reinterpret_cast<float4*>(out + size_t(row) * n + column) =
                    make_float4(s[0], s[1], s[2], s[3]);
        }
}

__global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    matmul_vector(const float* a, const float* b, float* out, int m, int n, int k) {
    __shared__ Tiles tiles;
    const Lane lane;
    Loader loader(a, b, m, n, k);
    float sums[8][8] = {};
    for (int first = 0; first < k; first += DEPTH) {
        Loader::store(loader.next(n), tiles);
        __syncthreads();
        multiply(tiles, lane, sums);
        __syncthreads();
    }
    store_sums(sums, lane, out, m, n);
}

__global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    matmul_double_buffered(const float* a, const float* b, float* out, int m, int n, int k) {
    __shared__ Tiles tiles[2];
    const Lane lane;
    Loader loader(a, b, m, n, k);
    float sums[8][8] = {};
    Loader::store(loader.next(n), tiles[0]);
    __syncthreads();
#pragma unroll 2  // `current` is then a constant, and so are the addresses that depend on it
    for (int first = 0; first < k; first += DEPTH) {
        const int current = first / DEPTH % 2;
        const Share share = loader.next(n);  // zeros after the last tile, which are not used
        multiply(tiles[current], lane, sums);
        Loader::store(share, tiles[1 - current]);
        __syncthreads();
    }
    store_sums(sums, lane, out, m, n);
}

using Kernel = void (*)(const float*, const float*, float*, int, int, int);

cudaError_t launch(Kernel kernel, int tile, dim3 threads, const float* a, const float* b,
                   float* out, int m, int n, int k, cudaStream_t stream) {
    const dim3 grid((n + tile - 1) / tile, (m + tile - 1) / tile);
    kernel<<<grid, threads, 0, stream>>>(a, b, out, m, n, k);
    return cudaGetLastError();
}

// Launch a kernel that accesses 16 bytes at a time.
cudaError_t launch_vectors(Kernel kernel, const float* a, const float* b, float* out, int m, int n,
                           int k, cudaStream_t stream) {
    if (n % 4 || k % 4) return cudaErrorInvalidValue;
    if ((reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b) |
         reinterpret_cast<uintptr_t>(out)) % 16)
        return cudaErrorMisalignedAddress;
    return launch(kernel, TILE, THREADS, a, b, out, m, n, k, stream);
}

extern "C" cudaError_t naive(const float* a, const float* b, float* out, int m, int n, int k,
                             cudaStream_t stream) {
    return launch(matmul_naive, 32, dim3(32, 32), a, b, out, m, n, k, stream);
}

extern "C" cudaError_t coalesced(const float* a, const float* b, float* out, int m, int n, int k,
                                 cudaStream_t stream) {
    return launch(matmul_coalesced, 32, dim3(32, 32), a, b, out, m, n, k, stream);
}

extern "C" cudaError_t shared(const float* a, const float* b, float* out, int m, int n, int k,
                              cudaStream_t stream) {
    return launch(matmul_shared, 32, dim3(32, 32), a, b, out, m, n, k, stream);
}

extern "C" cudaError_t registers_1d(const float* a, const float* b, float* out, int m, int n,
                                    int k, cudaStream_t stream) {
    return launch(matmul_registers_1d, 64, 512, a, b, out, m, n, k, stream);
}

extern "C" cudaError_t registers_2d(const float* a, const float* b, float* out, int m, int n,
                                    int k, cudaStream_t stream) {
    return launch(matmul_registers_2d, TILE, THREADS, a, b, out, m, n, k, stream);
}

extern "C" cudaError_t vector(const float* a, const float* b, float* out, int m, int n, int k,
                              cudaStream_t stream) {
    return launch_vectors(matmul_vector, a, b, out, m, n, k, stream);
}

extern "C" cudaError_t double_buffered(const float* a, const float* b, float* out, int m, int n,
                                       int k, cudaStream_t stream) {
    return launch_vectors(matmul_double_buffered, a, b, out, m, n, k, stream);
}
