// Jacobi steps on a grid of 512 x 512 cells: next = (up + down + left + right + source) / 4, where
// cells outside of the grid are 0.
//
//   launch_per_step  The end of each kernel is the barrier between two steps. Each thread computes
//                    one cell.
//   grid_sync        One cooperative kernel runs all steps, with grid.sync() after each. One block
//                    per SM is resident; its threads go through the cells in a grid-stride loop.
//
// States are not read through `const __restrict__` pointers: those loads may take the read-only
// path, which does not see what other blocks write while the kernel runs.

#include <cooperative_groups.h>
#include <cuda_runtime.h>

constexpr int WIDTH = 512;  // and height
constexpr int CELLS = WIDTH * WIDTH;

__device__ void update(const float* now, const float* source, float* next, int cell) {
    const int row = cell / WIDTH, column = cell % WIDTH;
    const float up = row > 0 ? now[cell - WIDTH] : 0;
    const float down = row < WIDTH - 1 ? now[cell + WIDTH] : 0;
    const float left = column > 0 ? now[cell - 1] : 0;
    const float right = column < WIDTH - 1 ? now[cell + 1] : 0;
    next[cell] = (up + down + left + right + source[cell]) * 0.25f;
}

// Step s reads states[(s + 1) % 2] and writes states[s % 2]. Counted from the end, the last step is
// 0, so that its result is in states[0].
__device__ __host__ float* state_of(float* states, int steps_left) {
    return states + (steps_left % 2) * CELLS;
}

__global__ void jacobi_step(const float* now, const float* source, float* next) {
    update(now, source, next, blockIdx.x * blockDim.x + threadIdx.x);
}

__global__ void __launch_bounds__(1024)
jacobi_steps(const float* start, const float* source, float* states, int steps) {
    const auto grid = cooperative_groups::this_grid();
    for (int left = steps - 1; left >= 0; --left) {
        const float* now = left == steps - 1 ? start : state_of(states, left + 1);
        float* next = state_of(states, left);
        for (int cell = grid.thread_rank(); cell < CELLS; cell += grid.size())
            update(now, source, next, cell);
        if (left > 0) grid.sync();
    }
}

extern "C" cudaError_t launch_per_step(const float* start, const float* source, float* states,
                                       int steps, cudaStream_t stream) {
    constexpr int THREADS = 256;
    for (int left = steps - 1; left >= 0; --left) {
        const float* now = left == steps - 1 ? start : state_of(states, left + 1);
        jacobi_step<<<CELLS / THREADS, THREADS, 0, stream>>>(now, source, state_of(states, left));
    }
    return cudaGetLastError();
}

extern "C" cudaError_t grid_sync(const float* start, const float* source, float* states, int steps,
                                 cudaStream_t stream) {
    int device, sm_count;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&sm_count, cudaDevAttrMultiProcessorCount, device);
    void* arguments[] = {&start, &source, &states, &steps};
    return cudaLaunchCooperativeKernel(reinterpret_cast<void*>(jacobi_steps), dim3(sm_count),
                                       dim3(1024), arguments, 0, stream);
}
