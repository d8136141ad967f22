// Items of very different length on a persistent grid: who takes which?
//
// An item is a walk of length[item] steps through a table of 16 Ki words, for 256 lanes at once. A
// block first copies the table to its shared memory (64 KiB), which is worth it only for many
// items: one block a multiprocessor stays until all is done.
//
//   static_split  Block b takes items b, b + blocks, b + 2 blocks, ... Whoever draws several long
//                 ones keeps all waiting.
//   queue         A block takes its next item from a counter that all share: one atomic addition an
//                 item. The answer is a trip to the L2 cache away, so a block asks when it begins
//                 an item for the one after it, and has the answer when it is done.
//   chunked       The same, 4 items at a time, asked for when the last of four begins: a quarter of
//                 the atomics, for a coarser end.

#include <cstdint>
#include <cuda_runtime.h>

constexpr int LANES = 256;
constexpr int WORDS = 16384;

__device__ int next_item;

__device__ void load_table(const int* table, int* shared) {
    for (int i = threadIdx.x; i < WORDS; i += LANES) shared[i] = table[i];
    __syncthreads();
}

// Each step's address comes from the step before: a latency each, however long the walk.
__device__ void walk(const int* table, int steps, int item, int* out) {
    int at = item * LANES + threadIdx.x;
    for (int i = 0; i < steps; ++i) at = table[(at ^ i) & (WORDS - 1)];
    out[item * LANES + threadIdx.x] = at;
}

__global__ void __launch_bounds__(LANES)
walk_static(const int* table, const int* lengths, int* out, int items) {
    extern __shared__ int shared[];
    load_table(table, shared);
    for (int item = blockIdx.x; item < items; item += gridDim.x)
        walk(shared, lengths[item], item, out);
}

template <int CHUNK>
__global__ void __launch_bounds__(LANES)
walk_queue(const int* table, const int* lengths, int* out, int items) {
    extern __shared__ int shared[];
    __shared__ int taken;
    int ticket = 0;  // in thread 0: the items to take next
    if (threadIdx.x == 0) ticket = atomicAdd(&next_item, CHUNK);
    load_table(table, shared);
    while (true) {
        if (threadIdx.x == 0) taken = ticket;
        __syncthreads();
        const int first = taken, end = min(first + CHUNK, items);
        __syncthreads();  // all have read it before it is overwritten
        if (first >= items) return;
        for (int item = first; item < end - 1; ++item) walk(shared, lengths[item], item, out);
        // not before the last item: what a busy block has taken nobody else can do
        if (threadIdx.x == 0) ticket = atomicAdd(&next_item, CHUNK);
        walk(shared, lengths[end - 1], end - 1, out);
    }
}

using Kernel = void (*)(const int*, const int*, int*, int);

cudaError_t launch(Kernel kernel, const int* table, const int* lengths, int* out, int items,
                   cudaStream_t stream) {
    constexpr int bytes = WORDS * sizeof(int);
    int device, blocks;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&blocks, cudaDevAttrMultiProcessorCount, device);
    if (cudaError_t error = cudaFuncSetAttribute(
            kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes))
        return error;
    kernel<<<blocks, LANES, bytes, stream>>>(table, lengths, out, items);
    return cudaGetLastError();
}

cudaError_t reset_queue(cudaStream_t stream) {
    void* counter;
    if (cudaError_t error = cudaGetSymbolAddress(&counter, next_item)) return error;
    return cudaMemsetAsync(counter, 0, sizeof(int), stream);
}

extern "C" cudaError_t static_split(const int* table, const int* lengths, int* out, int items,
                                    cudaStream_t stream) {
    return launch(walk_static, table, lengths, out, items, stream);
}

extern "C" cudaError_t queue(const int* table, const int* lengths, int* out, int items,
                             cudaStream_t stream) {
    if (cudaError_t error = reset_queue(stream)) return error;
    return launch(walk_queue<1>, table, lengths, out, items, stream);
}

extern "C" cudaError_t chunked(const int* table, const int* lengths, int* out, int items,
                               cudaStream_t stream) {
    if (cudaError_t error = reset_queue(stream)) return error;
    return launch(walk_queue<4>, table, lengths, out, items, stream);
}
