// out[t] = sum over i of tables[t][indices[i]]: a gather whose order does not matter.
//
// There is one kernel. Each block takes one table (blockIdx.y) and loops over the indices with four
// loads of indices, then four loads of elements in flight per thread; shuffles and one atomicAdd
// per block add up the sums. What differs between the arms is the order of the indices:
//
//   random  The 32 lanes of a warp read from 32 places of the table: 32 sectors of 32 bytes, each
//           for 4 bytes. If the table exceeds the L2 cache, most of them are DRAM accesses of 64
//           bytes.
//   sorted  Neighbouring lanes have neighbouring indices. They share sectors, and the warps walk
//           through the table from its start to its end, so each sector is loaded about once.
//
// A sum of floats in another order rounds differently: here by less than its tolerance, because the
// elements are positive and each thread adds only about a hundred of them.

#include <cuda_runtime.h>

constexpr int THREADS = 256;
constexpr int IN_FLIGHT = 4;  // indices that a thread loads before it uses the first

__device__ float warp_sum(float value) {
    for (int offset = 16; offset > 0; offset /= 2) value += __shfl_down_sync(~0u, value, offset);
    return value;  // valid in lane 0
}

__global__ void __launch_bounds__(THREADS)
    gather_sum_kernel(const float* tables, const int* indices, float* out, size_t rows, size_t n) {
    const float* table = tables + blockIdx.y * rows;
    const size_t step = size_t(gridDim.x) * THREADS * IN_FLIGHT;
    float sum = 0;
    for (size_t i = size_t(blockIdx.x) * THREADS * IN_FLIGHT + threadIdx.x; i < n; i += step) {
        int at[IN_FLIGHT];
        float values[IN_FLIGHT];
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; ++k) {
            const size_t j = i + k * THREADS;
            at[k] = j < n ? indices[j] : -1;
        }
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; ++k) values[k] = at[k] >= 0 ? table[at[k]] : 0.0f;
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; ++k) sum += values[k];
    }
    __shared__ float warp_sums[THREADS / 32];
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x < 32) {
        sum = warp_sum(threadIdx.x < THREADS / 32 ? warp_sums[threadIdx.x] : 0.0f);
        if (threadIdx.x == 0) atomicAdd(out + blockIdx.y, sum);
    }
}

// `count` tables of `rows` floats each, one after the other; n indices from 0 to rows - 1.
extern "C" cudaError_t gather_sum(const float* tables, const int* indices, float* out, int count,
                                  int rows, int n, cudaStream_t stream) {
    if (count < 1 || count > 65535) return cudaErrorInvalidValue;  // the limit of gridDim.y
    int device, sms, blocks_per_sm;
    const auto multiprocessors = cudaDevAttrMultiProcessorCount;
    if (cudaError_t error = cudaGetDevice(&device)) return error;
    if (cudaError_t error = cudaDeviceGetAttribute(&sms, multiprocessors, device)) return error;
    if (cudaError_t error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(
            &blocks_per_sm, gather_sum_kernel, THREADS, 0))
        return error;
    if (cudaError_t error = cudaMemsetAsync(out, 0, count * sizeof(float), stream)) return error;
    const dim3 grid(sms * blocks_per_sm, count);  // the blocks of one table fill the GPU
    gather_sum_kernel<<<grid, THREADS, 0, stream>>>(tables, indices, out, rows, n);
    return cudaGetLastError();
}
