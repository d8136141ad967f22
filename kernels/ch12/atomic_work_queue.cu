// Items of very different length on a persistent grid: static or dynamic assignment to blocks.
//
// An item is a walk of lengths[item] dependent loads from a table of 16 Ki words, by 256 threads. A
// block first copies the table to shared memory (64 KiB). That pays where many items follow, so the
// grid is persistent: as many blocks as fit on the GPU, which is three per SM.
//
//   static_split  Block b processes items b, b + gridDim, b + 2 gridDim, ... A block with several
//                 long items finishes last, and all others wait for it.
//   queue         Each block takes its next item from a global counter: one atomicAdd per item. The
//                 result takes a round trip to the L2 cache, so a block requests its next item when
//                 it starts the current one.
//   chunked       The same with 4 items per atomicAdd, requested when the last of the 4 starts: a
//                 quarter of the atomics, but coarser load balance at the end.
//
// The alternative is `block_per_item`, a grid of one block per item. As many blocks run at a time,
// and when one ends, the hardware starts that of the next item: this balances as well as a queue,
// and needs no counter. But each block copies the table for one item.

#include <cstdint>
#include <cuda_runtime.h>

constexpr int THREADS = 256;
constexpr int WORDS = 16384;

__device__ int next_item;

__device__ void load_table(const int* table, int* shared) {
    for (int i = threadIdx.x; i < WORDS; i += THREADS) shared[i] = table[i];
    __syncthreads();
}

// The address of each step depends on the step before, so a warp waits for the load in every step.
__device__ void walk(const int* table, int steps, int item, int* out) {
    int word = item * THREADS + threadIdx.x;
    for (int i = 0; i < steps; ++i) word = table[(word ^ i) & (WORDS - 1)];
    out[item * THREADS + threadIdx.x] = word;
}

__global__ void __launch_bounds__(THREADS)
walk_static(const int* table, const int* lengths, int* out, int items) {
    extern __shared__ int shared[];
    load_table(table, shared);
    for (int item = blockIdx.x; item < items; item += gridDim.x)
        walk(shared, lengths[item], item, out);
}

template <int CHUNK>
__global__ void __launch_bounds__(THREADS)
walk_queue(const int* table, const int* lengths, int* out, int items) {
    extern __shared__ int shared[];
    __shared__ int shared_ticket;
    int ticket = 0;  // in thread 0: the first item of the next chunk
    if (threadIdx.x == 0) ticket = atomicAdd(&next_item, CHUNK);
    load_table(table, shared);
    while (true) {
        if (threadIdx.x == 0) shared_ticket = ticket;
        __syncthreads();
        const int first = shared_ticket, end = min(first + CHUNK, items);
        __syncthreads();  // all threads have read the ticket
        if (first >= items) return;
        for (int item = first; item < end - 1; ++item) walk(shared, lengths[item], item, out);
        // reserve the next chunk only now: no other block can process items that this one reserves
        if (threadIdx.x == 0) ticket = atomicAdd(&next_item, CHUNK);
        walk(shared, lengths[end - 1], end - 1, out);
    }
}

using Kernel = void (*)(const int*, const int*, int*, int);

// Launch `blocks` blocks, or as many as fit on the GPU at a time if it is 0.
cudaError_t launch(Kernel kernel, int blocks, const int* table, const int* lengths, int* out,
                   int items, cudaStream_t stream) {
    constexpr int bytes = WORDS * sizeof(int);
    if (cudaError_t error = cudaFuncSetAttribute(
            kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes))
        return error;
    // the walks read shared memory alone, so it may take the place of the L1 cache
    if (cudaError_t error = cudaFuncSetAttribute(
            kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared))
        return error;
    if (blocks == 0) {
        int device, sms, blocks_per_sm;
        if (cudaError_t error = cudaGetDevice(&device)) return error;
        if (cudaError_t error =
                cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device))
            return error;
        if (cudaError_t error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(
                &blocks_per_sm, kernel, THREADS, bytes))
            return error;
        blocks = sms * blocks_per_sm;
    }
    kernel<<<blocks, THREADS, bytes, stream>>>(table, lengths, out, items);
    return cudaGetLastError();
}

cudaError_t reset_queue(cudaStream_t stream) {
    void* counter;
    if (cudaError_t error = cudaGetSymbolAddress(&counter, next_item)) return error;
    return cudaMemsetAsync(counter, 0, sizeof(int), stream);
}

extern "C" cudaError_t static_split(const int* table, const int* lengths, int* out, int items,
                                    cudaStream_t stream) {
    return launch(walk_static, 0, table, lengths, out, items, stream);
}

extern "C" cudaError_t queue(const int* table, const int* lengths, int* out, int items,
                             cudaStream_t stream) {
    if (cudaError_t error = reset_queue(stream)) return error;
    return launch(walk_queue<1>, 0, table, lengths, out, items, stream);
}

extern "C" cudaError_t chunked(const int* table, const int* lengths, int* out, int items,
                               cudaStream_t stream) {
    if (cudaError_t error = reset_queue(stream)) return error;
    return launch(walk_queue<4>, 0, table, lengths, out, items, stream);
}

extern "C" cudaError_t block_per_item(const int* table, const int* lengths, int* out, int items,
                                      cudaStream_t stream) {
    return launch(walk_static, items, table, lengths, out, items, stream);
}
