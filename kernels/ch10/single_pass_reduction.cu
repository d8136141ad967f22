// Sums n floats in one kernel instead of two.
//
// A block cannot wait until all others are done, because some of them may only start when it ends.
// So a sum over the whole grid usually takes a second kernel. Both arms sum the same elements in
// the same blocks, with 16-byte loads and shuffles. They differ in what adds up the blocks' sums:
//
//   two_pass     Each block writes its sum. A second kernel of one block, launched after the first
//                has ended, adds them up.
//   single_pass  Each block writes its sum, then takes a ticket from an atomic counter. When a
//                block draws the last ticket, all sums are written, and it adds them up. The fence
//                between the sum and the ticket makes the sum visible to that block, which also
//                resets the counter for the next call.
//
// Both add the sums in a fixed order, so equal inputs have bit-identical results, which a sum of
// atomicAdds of floats does not give. Calls share the buffer of sums and the counter, so they must
// run one after the other.

#include <cstdint>
#include <cuda_runtime.h>

constexpr int THREADS = 512;
constexpr int MAX_BLOCKS = 4096;
constexpr int IN_FLIGHT = 2;  // vectors of 4 floats that a thread loads at a time

__device__ float block_sums[MAX_BLOCKS];
__device__ unsigned tickets;  // 0 between calls

__device__ float warp_sum(float value) {
    for (int offset = 16; offset > 0; offset /= 2) value += __shfl_down_sync(~0u, value, offset);
    return value;  // valid in lane 0
}

// The sum of `value` over all threads of the block, valid in thread 0.
__device__ float block_sum(float value) {
    __shared__ float warp_sums[THREADS / 32];
    value = warp_sum(value);
    if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = value;
    __syncthreads();
    if (threadIdx.x >= 32) return 0;
    return warp_sum(threadIdx.x < THREADS / 32 ? warp_sums[threadIdx.x] : 0.0f);
}

__device__ float sum(float4 v) { return (v.x + v.y) + (v.z + v.w); }

// The sum of this block's share of the elements, valid in thread 0.
__device__ float sum_of_elements(const float* in, size_t n) {
    const auto* vectors = reinterpret_cast<const float4*>(in);
    const size_t threads = size_t(gridDim.x) * THREADS;
    size_t i = size_t(blockIdx.x) * THREADS + threadIdx.x;
    float total = 0;
    for (; i + threads < n / 4; i += IN_FLIGHT * threads) {
        const float4 a = vectors[i], b = vectors[i + threads];
        total += sum(a) + sum(b);
    }
    if (i < n / 4) total += sum(vectors[i]);
    if (blockIdx.x == 0 && threadIdx.x < n % 4) total += in[n / 4 * 4 + threadIdx.x];
    return block_sum(total);
}

// The sum of all blocks' sums, valid in thread 0.
__device__ float sum_of_blocks(int blocks) {
    float total = 0;
    // not from the L1 cache, which may hold a value from before another block's store
    for (int i = threadIdx.x; i < blocks; i += THREADS) total += __ldcg(&block_sums[i]);
    return block_sum(total);
}

__global__ void __launch_bounds__(THREADS) sum_first_pass(const float* in, size_t n) {
    const float value = sum_of_elements(in, n);
    if (threadIdx.x == 0) block_sums[blockIdx.x] = value;
}

__global__ void __launch_bounds__(THREADS) sum_second_pass(float* out, int blocks) {
    const float value = sum_of_blocks(blocks);
    if (threadIdx.x == 0) *out = value;
}

__global__ void __launch_bounds__(THREADS)
    sum_single_pass(const float* in, float* out, size_t n) {
    __shared__ bool is_last;
    const float value = sum_of_elements(in, n);
    if (threadIdx.x == 0) {
        block_sums[blockIdx.x] = value;
        __threadfence();  // the sum is visible before the ticket is taken
        is_last = atomicAdd(&tickets, 1u) == gridDim.x - 1;
    }
    __syncthreads();  // also: warp_sums may be used again
    if (!is_last) return;
    __threadfence();  // no sum is read before the ticket is taken
    const float total = sum_of_blocks(gridDim.x);
    if (threadIdx.x == 0) {
        *out = total;
        tickets = 0;
    }
}

// As many blocks as are resident at once, but no more than there are vectors for.
cudaError_t count_blocks(int n, int* blocks) {
    int device, sms, blocks_per_sm;
    const auto count = cudaDevAttrMultiProcessorCount;
    if (cudaError_t error = cudaGetDevice(&device)) return error;
    if (cudaError_t error = cudaDeviceGetAttribute(&sms, count, device)) return error;
    if (cudaError_t error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(
            &blocks_per_sm, sum_single_pass, THREADS, 0))
        return error;
    const int resident = sms * blocks_per_sm, needed = n / (4 * THREADS) + 1;
    *blocks = resident < needed ? resident : needed;
    return *blocks <= MAX_BLOCKS ? cudaSuccess : cudaErrorInvalidValue;
}

extern "C" cudaError_t two_pass(const float* in, float* out, int n, cudaStream_t stream) {
    int blocks;
    if (reinterpret_cast<uintptr_t>(in) % 16) return cudaErrorMisalignedAddress;
    if (cudaError_t error = count_blocks(n, &blocks)) return error;
    sum_first_pass<<<blocks, THREADS, 0, stream>>>(in, n);
    sum_second_pass<<<1, THREADS, 0, stream>>>(out, blocks);
    return cudaGetLastError();
}

extern "C" cudaError_t single_pass(const float* in, float* out, int n, cudaStream_t stream) {
    int blocks;
    if (reinterpret_cast<uintptr_t>(in) % 16) return cudaErrorMisalignedAddress;
    if (cudaError_t error = count_blocks(n, &blocks)) return error;
    sum_single_pass<<<blocks, THREADS, 0, stream>>>(in, out, n);
    return cudaGetLastError();
}
