// Breadth-first depths of a tree's nodes: the size of each launch depends on the level before.
//
// The children of node i are children[first[i]] ... children[first[i + 1] - 1] (CSR). The kernel of
// a level writes the depth of its nodes' children and appends them to the next frontier. Their
// number is known only when the kernel has finished.
//
//   host_loop        The host copies the count back, waits, and launches a grid of that size.
//   device_launch    Dynamic parallelism: the last block of a level launches the next grid. A tail
//                    launch starts when its parent grid has finished, without the host.
//   persistent       One cooperative grid processes all levels, with a grid barrier after each. It
//                    launches nothing more, but its size is fixed.
//
// All three expand a level in the same way. A warp takes 32 nodes, adds up their numbers of
// children (warp scan), reserves space in the next frontier with one atomic, and then its lanes
// take the children in turn, wherever they belong: a node with many children does not keep a single
// lane busy.
//
// Device-side launches need relocatable device code (-rdc=true) and the device runtime. They nest
// at most 24 deep; here each level nests one deeper.

#include <cooperative_groups.h>
#include <cuda_runtime.h>

namespace cg = cooperative_groups;

constexpr int THREADS = 256;
constexpr int MAX_LEVELS = 64;  // levels whose sizes fit in Scratch

struct Tree {
    const int* first;
    const int* children;
    int* depths;
};

struct Scratch {
    int counts[MAX_LEVELS];  // nodes in each level, appended so far
    unsigned blocks_done;    // finished blocks of this level, for `device_launch`
};

// Append the children of `node` to `next`. All lanes of a warp call this; a lane without a node
// passes -1.
__device__ void append_children(const Tree& tree, int node, int level, int* next, int* count) {
    const unsigned lane = threadIdx.x % 32;
    int begin = 0, child_count = 0;
    if (node >= 0) {
        begin = tree.first[node];
        child_count = tree.first[node + 1] - begin;
    }
    int end = child_count;  // inclusive prefix sum over the warp
    for (int offset = 1; offset < 32; offset *= 2) {
        const int before = __shfl_up_sync(~0u, end, offset);
        if (lane >= offset) end += before;
    }
    const int total = __shfl_sync(~0u, end, 31);
    if (total == 0) return;
    int position = 0;
    if (lane == 0) position = atomicAdd(count, total);
    position = __shfl_sync(~0u, position, 0);
    const int shift = begin - (end - child_count);  // from an index in the warp to one in children
    for (int base = 0; base < total; base += 32) {
        const int i = base + lane;
        int owner = 0;  // the first lane with end > i, by bisection
        for (int half = 16; half > 0; half /= 2)
            if (__shfl_sync(~0u, end, owner + half - 1) <= i) owner += half;
        const int index = i + __shfl_sync(~0u, shift, owner);
        if (i >= total) continue;
        const int child = tree.children[index];
        tree.depths[child] = level + 1;
        next[position + i] = child;
    }
}

template <bool LAUNCH_NEXT>
__global__ void expand(Tree tree, int* nodes, int* next, Scratch* scratch, int level) {
    const int i = blockIdx.x * THREADS + threadIdx.x;
    const int count = scratch->counts[level];
    int* const next_count = &scratch->counts[level + 1];
    append_children(tree, i < count ? nodes[i] : -1, level, next, next_count);
    if (!LAUNCH_NEXT) return;
    __syncthreads();  // all warps of this block have added their children
    if (threadIdx.x != 0) return;
    __threadfence();
    if (atomicAdd(&scratch->blocks_done, 1) != gridDim.x - 1) return;  // not the last block
    const int launch_count = atomicAdd(next_count, 0);
    scratch->blocks_done = 0;
    if (launch_count > 0)
        expand<true><<<(launch_count + THREADS - 1) / THREADS, THREADS, 0, cudaStreamTailLaunch>>>(
            tree, next, nodes, scratch, level + 1);
}

// Node 0 is the root.
__global__ void init_root(int* depths, int* nodes, Scratch* scratch) {
    scratch->counts[threadIdx.x] = threadIdx.x == 0;
    if (threadIdx.x != 0) return;
    depths[0] = nodes[0] = 0;
    scratch->blocks_done = 0;
}

// In the functions below, `frontier` holds two levels of up to `capacity` nodes each, `scratch` is
// device memory of MAX_LEVELS + 1 ints, and `pinned` is pinned host memory for one int.
extern "C" cudaError_t host_loop(const int* first, const int* children, int* depths, int* frontier,
                                 int capacity, int* scratch, int* pinned, cudaStream_t stream) {
    auto* const state = reinterpret_cast<Scratch*>(scratch);
    int *nodes = frontier, *next = frontier + capacity;
    init_root<<<1, MAX_LEVELS, 0, stream>>>(depths, nodes, state);
    for (int level = 0, count = 1; count > 0; ++level, count = *pinned) {
        if (level + 1 == MAX_LEVELS) return cudaErrorInvalidValue;
        expand<false><<<(count + THREADS - 1) / THREADS, THREADS, 0, stream>>>(
            {first, children, depths}, nodes, next, state, level);
        cudaMemcpyAsync(pinned, &state->counts[level + 1], sizeof(int), cudaMemcpyDeviceToHost,
                        stream);
        if (cudaError_t error = cudaStreamSynchronize(stream)) return error;
        int* previous = nodes;
        nodes = next;
        next = previous;
    }
    return cudaGetLastError();
}

extern "C" cudaError_t device_launch(const int* first, const int* children, int* depths,
                                     int* frontier, int capacity, int* scratch, int* pinned,
                                     cudaStream_t stream) {
    auto* const state = reinterpret_cast<Scratch*>(scratch);
    init_root<<<1, MAX_LEVELS, 0, stream>>>(depths, frontier, state);
    expand<true><<<1, THREADS, 0, stream>>>({first, children, depths}, frontier,
                                            frontier + capacity, state, 0);
    return cudaGetLastError();
}

__global__ void __launch_bounds__(THREADS)
expand_all(Tree tree, int* frontier, int capacity, Scratch* scratch) {
    const cg::grid_group grid = cg::this_grid();
    for (int level = 0; level + 1 < MAX_LEVELS; ++level) {
        // counts and frontiers were written by other SMs: read them from the L2 cache
        const int count = __ldcg(&scratch->counts[level]);
        if (count == 0) return;
        const int* nodes = frontier + level % 2 * capacity;
        int* next = frontier + (level + 1) % 2 * capacity;
        for (int base = blockIdx.x * THREADS; base < count; base += gridDim.x * THREADS) {
            const int i = base + threadIdx.x;
            append_children(tree, i < count ? __ldcg(nodes + i) : -1, level, next,
                            &scratch->counts[level + 1]);
        }
        grid.sync();
    }
}

extern "C" cudaError_t persistent(const int* first, const int* children, int* depths, int* frontier,
                                  int capacity, int* scratch, int* pinned, cudaStream_t stream) {
    auto* state = reinterpret_cast<Scratch*>(scratch);
    int device, blocks;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&blocks, cudaDevAttrMultiProcessorCount, device);
    init_root<<<1, MAX_LEVELS, 0, stream>>>(depths, frontier, state);
    Tree tree = {first, children, depths};
    void* arguments[] = {&tree, &frontier, &capacity, &state};
    return cudaLaunchCooperativeKernel(expand_all, dim3(blocks), dim3(THREADS), arguments, 0,
                                       stream);
}
