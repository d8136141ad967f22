// Depths of a tree's nodes, level by level: the data decide how large the next launch is.
//
// The children of node i are children[first[i]] ... children[first[i + 1] - 1]. A level's kernel
// gives the children of its nodes their depth and lists them; how many there are is known only
// when it has ended.
//
//   host_loop        The host copies the count back, waits, and launches a grid of that size.
//   device_launch    The last block of a level launches the next grid itself (dynamic parallelism).
//                    A tail launch starts when its parent has ended: no host, no waiting inside.
//   persistent       One cooperative grid does all levels, with a grid barrier after each. Shown
//                    because it often wins: it launches nothing, but its size is fixed.
//
// Device-side launches need relocatable code and the device runtime, and may nest 24 deep: `levels`
// launches follow each other here.

#include <cooperative_groups.h>
#include <cuda_runtime.h>

namespace cg = cooperative_groups;

constexpr int THREADS = 256;

__device__ int listed;        // nodes of the next level so far
__device__ unsigned done;     // blocks of this level that have ended
__device__ int counts[2];     // nodes of a level, of even and odd ones: for `persistent`

__device__ void list_children(const int* first, const int* children, int* depths, int node,
                              int level, int* next, int* count) {
    const int from = first[node], number = first[node + 1] - from;
    if (number == 0) return;
    const int to = atomicAdd(count, number);
    for (int i = 0; i < number; ++i) {
        const int child = children[from + i];
        depths[child] = level + 1;
        next[to + i] = child;
    }
}

__device__ bool last_block() {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(&done, 1) == gridDim.x - 1;
    __syncthreads();
    return last;
}

template <bool LAUNCHES>
__global__ void expand(const int* first, const int* children, int* depths, int* nodes, int* next,
                       int count, int level) {
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i < count) list_children(first, children, depths, nodes[i], level, next, &listed);
    if (!LAUNCHES) return;
    if (!last_block() || threadIdx.x != 0) return;
    const int following = atomicExch(&listed, 0);
    done = 0;
    __threadfence();
    if (following > 0)
        expand<true><<<(following + THREADS - 1) / THREADS, THREADS, 0, cudaStreamTailLaunch>>>(
            first, children, depths, next, nodes, following, level + 1);
}

// Node 0 is the root. Both rooms of `frontier` hold as many nodes as a level may have.
__global__ void plant(int* depths, int* nodes) {
    depths[0] = nodes[0] = 0;
    counts[0] = 1;
    counts[1] = listed = 0;
    done = 0;
}

extern "C" cudaError_t host_loop(const int* first, const int* children, int* depths, int* frontier,
                                 int room, int* pinned, cudaStream_t stream) {
    void* counter;
    if (cudaError_t error = cudaGetSymbolAddress(&counter, listed)) return error;
    int *nodes = frontier, *next = frontier + room;
    plant<<<1, 1, 0, stream>>>(depths, nodes);
    for (int level = 0, count = 1; count > 0; ++level, count = *pinned) {
        expand<false><<<(count + THREADS - 1) / THREADS, THREADS, 0, stream>>>(
            first, children, depths, nodes, next, count, level);
        cudaMemcpyAsync(pinned, counter, sizeof(int), cudaMemcpyDeviceToHost, stream);
        cudaMemsetAsync(counter, 0, sizeof(int), stream);
        if (cudaError_t error = cudaStreamSynchronize(stream)) return error;
        int* last = nodes;
        nodes = next;
        next = last;
    }
    return cudaGetLastError();
}

extern "C" cudaError_t device_launch(const int* first, const int* children, int* depths,
                                     int* frontier, int room, int* pinned, cudaStream_t stream) {
    plant<<<1, 1, 0, stream>>>(depths, frontier);
    expand<true><<<1, THREADS, 0, stream>>>(first, children, depths, frontier, frontier + room, 1,
                                            0);
    return cudaGetLastError();
}

__global__ void __launch_bounds__(THREADS)
expand_all(const int* first, const int* children, int* depths, int* frontier, int room) {
    const cg::grid_group grid = cg::this_grid();
    for (int level = 0;; ++level) {
        const int now = level % 2, count = *(volatile int*)&counts[now];
        if (count == 0) return;
        for (int i = blockIdx.x * THREADS + threadIdx.x; i < count; i += gridDim.x * THREADS)
            list_children(first, children, depths, __ldcg(frontier + now * room + i), level,
                          frontier + (1 - now) * room, &counts[1 - now]);
        grid.sync();
        if (grid.thread_rank() == 0) counts[now] = 0;  // the next level counts here,
        grid.sync();                                   // once all have left this one
    }
}

extern "C" cudaError_t persistent(const int* first, const int* children, int* depths, int* frontier,
                                  int room, int* pinned, cudaStream_t stream) {
    int device, blocks;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&blocks, cudaDevAttrMultiProcessorCount, device);
    plant<<<1, 1, 0, stream>>>(depths, frontier);
    void* arguments[] = {&first, &children, &depths, &frontier, &room};
    return cudaLaunchCooperativeKernel(expand_all, dim3(blocks), dim3(THREADS), arguments, 0,
                                       stream);
}
