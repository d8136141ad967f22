// Breadth-first depths of a tree's nodes: the size of each launch depends on the level before.
//
// The children of node i are children[first[i]] ... children[first[i + 1] - 1] (CSR). The kernel of
// a level writes the depth of its nodes' children and appends them to the next frontier. Their
// number is known only when the kernel has finished.
//
//   host_loop        The host copies the count back, waits, and launches a grid of that size.
//   device_launch    Dynamic parallelism: the last block of a level launches the next grid. A tail
//                    launch starts when its parent grid has finished, without the host.
//   persistent       One cooperative grid processes all levels, with grid barriers after each. It
//                    launches nothing more, but its size is fixed.
//
// Device-side launches need relocatable device code (-rdc=true) and the device runtime. They nest
// at most 24 deep; here each level nests one deeper.

#include <cooperative_groups.h>
#include <cuda_runtime.h>

namespace cg = cooperative_groups;

constexpr int THREADS = 256;

__device__ int next_count;         // nodes appended to the next level so far
__device__ unsigned blocks_done;   // finished blocks of this level
__device__ int level_counts[2];    // nodes in even and odd levels, for `persistent`

__device__ void append_children(const int* first, const int* children, int* depths, int node,
                              int level, int* next, int* count) {
    const int begin = first[node], child_count = first[node + 1] - begin;
    if (child_count == 0) return;
    const int position = atomicAdd(count, child_count);
    for (int i = 0; i < child_count; ++i) {
        const int child = children[begin + i];
        depths[child] = level + 1;
        next[position + i] = child;
    }
}

__device__ bool is_last_block() {
    __shared__ bool is_last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) is_last = atomicAdd(&blocks_done, 1) == gridDim.x - 1;
    __syncthreads();
    return is_last;
}

template <bool LAUNCH_NEXT>
__global__ void expand(const int* first, const int* children, int* depths, int* nodes, int* next,
                       int count, int level) {
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i < count) append_children(first, children, depths, nodes[i], level, next, &next_count);
    if (!LAUNCH_NEXT) return;
    if (!is_last_block() || threadIdx.x != 0) return;
    const int launch_count = atomicExch(&next_count, 0);
    blocks_done = 0;
    __threadfence();
    if (launch_count > 0)
        expand<true><<<(launch_count + THREADS - 1) / THREADS, THREADS, 0, cudaStreamTailLaunch>>>(
            first, children, depths, next, nodes, launch_count, level + 1);
}

// Node 0 is the root. The `frontier` of the functions below holds two levels of up to `capacity`
// nodes each.
__global__ void init_root(int* depths, int* nodes) {
    depths[0] = nodes[0] = 0;
    level_counts[0] = 1;
    level_counts[1] = next_count = 0;
    blocks_done = 0;
}

extern "C" cudaError_t host_loop(const int* first, const int* children, int* depths, int* frontier,
                                 int capacity, int* pinned, cudaStream_t stream) {
    void* counter;
    if (cudaError_t error = cudaGetSymbolAddress(&counter, next_count)) return error;
    int *nodes = frontier, *next = frontier + capacity;
    init_root<<<1, 1, 0, stream>>>(depths, nodes);
    for (int level = 0, count = 1; count > 0; ++level, count = *pinned) {
        expand<false><<<(count + THREADS - 1) / THREADS, THREADS, 0, stream>>>(
            first, children, depths, nodes, next, count, level);
        cudaMemcpyAsync(pinned, counter, sizeof(int), cudaMemcpyDeviceToHost, stream);
        cudaMemsetAsync(counter, 0, sizeof(int), stream);
        if (cudaError_t error = cudaStreamSynchronize(stream)) return error;
        int* previous = nodes;
        nodes = next;
        next = previous;
    }
    return cudaGetLastError();
}

extern "C" cudaError_t device_launch(const int* first, const int* children, int* depths,
                                     int* frontier, int capacity, int* pinned,
                                     cudaStream_t stream) {
    init_root<<<1, 1, 0, stream>>>(depths, frontier);
    expand<true><<<1, THREADS, 0, stream>>>(first, children, depths, frontier, frontier + capacity,
                                            1, 0);
    return cudaGetLastError();
}

__global__ void __launch_bounds__(THREADS)
expand_all(const int* first, const int* children, int* depths, int* frontier, int capacity) {
    const cg::grid_group grid = cg::this_grid();
    for (int level = 0;; ++level) {
        const int parity = level % 2, count = *(volatile int*)&level_counts[parity];
        if (count == 0) return;
        for (int i = blockIdx.x * THREADS + threadIdx.x; i < count; i += gridDim.x * THREADS)
            append_children(first, children, depths, __ldcg(frontier + parity * capacity + i),
                            level, frontier + (1 - parity) * capacity, &level_counts[1 - parity]);
        grid.sync();
        if (grid.thread_rank() == 0) level_counts[parity] = 0;  // all blocks have read it
        grid.sync();  // the next level adds its children to this count
    }
}

extern "C" cudaError_t persistent(const int* first, const int* children, int* depths, int* frontier,
                                  int capacity, int* pinned, cudaStream_t stream) {
    int device, blocks;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&blocks, cudaDevAttrMultiProcessorCount, device);
    init_root<<<1, 1, 0, stream>>>(depths, frontier);
    void* arguments[] = {&first, &children, &depths, &frontier, &capacity};
    return cudaLaunchCooperativeKernel(expand_all, dim3(blocks), dim3(THREADS), arguments, 0,
                                       stream);
}
