// Jacobi steps on a grid of 512 x 512 cells: next = (up + down + left + right + source) / 4, where
// cells outside of the grid are 0.
//
//   launch_per_step  The end of each kernel is the barrier between two steps.
//   grid_sync        One cooperative kernel runs all steps, with grid.sync() after each.
//
// Both run the same 128 blocks, and differ only in launches and barriers: a thread computes four
// neighboring cells, and an SM has at most one block.
//
// States are not read through `const __restrict__` pointers: those loads may take the read-only
// path, which does not see what other blocks write while the kernel runs.

#include <cooperative_groups.h>
#include <cuda_runtime.h>

constexpr int WIDTH = 512;  // and height
constexpr int CELLS = WIDTH * WIDTH;
constexpr int VECTORS_PER_ROW = WIDTH / 4;
constexpr int THREADS = 512;
constexpr int BLOCKS = CELLS / 4 / THREADS;

__device__ void update(const float* now, const float* source, float* next) {
    const int i = blockIdx.x * THREADS + threadIdx.x, cell = 4 * i;
    const int row = i / VECTORS_PER_ROW, column = i % VECTORS_PER_ROW;
    const auto* vectors = reinterpret_cast<const float4*>(now);
    const float4 outside = {};
    const float4 center = vectors[i];
    const float4 up = row > 0 ? vectors[i - VECTORS_PER_ROW] : outside;
    const float4 down = row < WIDTH - 1 ? vectors[i + VECTORS_PER_ROW] : outside;
    const float left = column > 0 ? now[cell - 1] : 0;
    const float right = column < VECTORS_PER_ROW - 1 ? now[cell + 4] : 0;
    const float4 added = reinterpret_cast<const float4*>(source)[i];
    reinterpret_cast<float4*>(next)[i] = {
        (up.x + down.x + left + center.y + added.x) * 0.25f,
        (up.y + down.y + center.x + center.z + added.y) * 0.25f,
        (up.z + down.z + center.y + center.w + added.z) * 0.25f,
        (up.w + down.w + center.z + right + added.w) * 0.25f,
    };
}

// Step s reads states[(s + 1) % 2] and writes states[s % 2]. Counted from the end, the last step is
// 0, so that its result is in states[0].
__device__ __host__ float* state_of(float* states, int steps_left) {
    return states + (steps_left % 2) * CELLS;
}

__global__ void __launch_bounds__(THREADS)
jacobi_step(const float* now, const float* source, float* next) {
    update(now, source, next);
}

__global__ void __launch_bounds__(THREADS)
jacobi_steps(const float* start, const float* source, float* states, int steps) {
    const auto grid = cooperative_groups::this_grid();
    for (int left = steps - 1; left >= 0; --left) {
        const float* now = left == steps - 1 ? start : state_of(states, left + 1);
        update(now, source, state_of(states, left));
        if (left > 0) grid.sync();
    }
}

extern "C" cudaError_t launch_per_step(const float* start, const float* source, float* states,
                                       int steps, cudaStream_t stream) {
    for (int left = steps - 1; left >= 0; --left) {
        const float* now = left == steps - 1 ? start : state_of(states, left + 1);
        jacobi_step<<<BLOCKS, THREADS, 0, stream>>>(now, source, state_of(states, left));
    }
    return cudaGetLastError();
}

extern "C" cudaError_t grid_sync(const float* start, const float* source, float* states, int steps,
                                 cudaStream_t stream) {
    void* arguments[] = {&start, &source, &states, &steps};
    return cudaLaunchCooperativeKernel(reinterpret_cast<void*>(jacobi_steps), dim3(BLOCKS),
                                       dim3(THREADS), arguments, 0, stream);
}
