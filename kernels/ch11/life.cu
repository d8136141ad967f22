// A step of Conway's Game of Life on a square torus of cells, 0 or 1, one byte each.

#include <cuda_runtime.h>

constexpr int THREADS = 256;

__global__ void life_step(const unsigned char* now, unsigned char* next, int side) {
    const int cell = blockIdx.x * THREADS + threadIdx.x;
    if (cell >= side * side) return;
    const int row = cell / side, column = cell % side;
    const int left = column ? column - 1 : side - 1, right = column < side - 1 ? column + 1 : 0;
    const unsigned char* above = now + size_t(row ? row - 1 : side - 1) * side;
    const unsigned char* here = now + size_t(row) * side;
    const unsigned char* below = now + size_t(row < side - 1 ? row + 1 : 0) * side;
    const int alive = above[left] + above[column] + above[right] + here[left] + here[right]
        + below[left] + below[column] + below[right];
    next[cell] = alive == 3 || (alive == 2 && here[column]);
}

// `steps` is even, so that the result is in `state`.
extern "C" cudaError_t advance(unsigned char* state, unsigned char* scratch, int side, int steps,
                               cudaStream_t stream) {
    const int blocks = (side * side + THREADS - 1) / THREADS;
    for (int step = 0; step < steps; step += 2) {
        life_step<<<blocks, THREADS, 0, stream>>>(state, scratch, side);
        life_step<<<blocks, THREADS, 0, stream>>>(scratch, state, side);
    }
    return cudaGetLastError();
}
