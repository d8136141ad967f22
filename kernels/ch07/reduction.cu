// Sums n floats: a tree in shared memory, and four steps towards device-memory read bandwidth.
//
//   tree         Each thread of a block loads one element into shared memory. Nine steps halve the
//                number of summands, with a barrier before each. The same kernel then sums the
//                blocks' sums, until one is left. Most threads idle in most steps, and 4 bytes in
//                flight per thread are too few to saturate memory.
//   shuffle      The same passes, but lanes exchange values in registers: five shuffles within a
//                warp, one barrier, five shuffles over the sums of the 16 warps.
//   grid_stride  A grid of as many blocks as are resident at once loops over the array (grid-stride
//                loop) and adds in registers. Shuffles run once per thread instead of once per
//                element, and one atomicAdd per block replaces the other passes.
//   in_flight    The same loop with four loads in flight per thread instead of one.
//   wide         The same loop over float4: each of the four loads has 16 bytes.
//
// Adding floats in another order rounds differently. All add in trees or in short chains, so
// their error stays far below that of one long chain. The order of the atomic additions varies from
// call to call.
//
// cub_sum calls DeviceReduce::Sum of CUB, the library of parallel primitives.

#include <cstdint>
#include <cub/device/device_reduce.cuh>
#include <cuda_runtime.h>

constexpr int BLOCK = 512;
constexpr int WARPS = BLOCK / 32;
constexpr size_t MAX_SUMMANDS = size_t(BLOCK) << 20;

// The blocks' sums. Each pass reads one buffer and writes the other.
__device__ float partial[2][MAX_SUMMANDS / BLOCK];

__global__ void sum_tree(const float* in, float* out, size_t n) {
    __shared__ float values[BLOCK];
    const size_t i = size_t(blockIdx.x) * BLOCK + threadIdx.x;
    values[threadIdx.x] = i < n ? in[i] : 0.0f;
    for (int half = BLOCK / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) values[threadIdx.x] += values[threadIdx.x + half];
    }
    if (threadIdx.x == 0) out[blockIdx.x] = values[0];
}

__device__ float warp_sum(float value) {
    for (int offset = 16; offset > 0; offset /= 2) value += __shfl_down_sync(~0u, value, offset);
    return value;  // valid in lane 0
}

// The sum of `value` over all threads of the block, valid in thread 0.
__device__ float block_sum(float value) {
    __shared__ float warp_sums[WARPS];
    value = warp_sum(value);
    if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = value;
    __syncthreads();
    return threadIdx.x < 32 ? warp_sum(threadIdx.x < WARPS ? warp_sums[threadIdx.x] : 0.0f) : 0.0f;
}

__global__ void sum_shuffle(const float* in, float* out, size_t n) {
    const size_t i = size_t(blockIdx.x) * BLOCK + threadIdx.x;
    const float sum = block_sum(i < n ? in[i] : 0.0f);
    if (threadIdx.x == 0) out[blockIdx.x] = sum;
}

__device__ float sum(float v) { return v; }
__device__ float sum(float4 v) { return (v.x + v.y) + (v.z + v.w); }
__device__ float plus(float a, float b) { return a + b; }
__device__ float4 plus(float4 a, float4 b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// Add the sum of the array to *out, with loads of type Vector: float or float4. A thread has
// IN_FLIGHT of them in flight at a time.
template <typename Vector, int IN_FLIGHT>
__device__ void add_in_loop(const float* in, float* out, size_t n) {
    constexpr size_t WIDTH = sizeof(Vector) / sizeof(float);
    const auto* vectors = reinterpret_cast<const Vector*>(in);
    const size_t threads = size_t(gridDim.x) * BLOCK;
    size_t i = size_t(blockIdx.x) * BLOCK + threadIdx.x;
    Vector total{};
#pragma unroll 1  // else the compiler keeps the loads of several iterations in flight
    for (; i + (IN_FLIGHT - 1) * threads < n / WIDTH; i += IN_FLIGHT * threads) {
        Vector loaded[IN_FLIGHT];
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; ++k) loaded[k] = vectors[i + k * threads];
        if constexpr (IN_FLIGHT == 4)
            loaded[0] = plus(plus(loaded[0], loaded[1]), plus(loaded[2], loaded[3]));
        total = plus(total, loaded[0]);
    }
    float rest = 0;
#pragma unroll 1
    for (; i < n / WIDTH; i += threads) rest += sum(vectors[i]);
    if (blockIdx.x == 0 && threadIdx.x < n % WIDTH) rest += in[n / WIDTH * WIDTH + threadIdx.x];
    const float value = block_sum(sum(total) + rest);
    if (threadIdx.x == 0) atomicAdd(out, value);
}

__global__ void __launch_bounds__(BLOCK) sum_grid_stride(const float* in, float* out, size_t n) {
    add_in_loop<float, 1>(in, out, n);
}

__global__ void __launch_bounds__(BLOCK) sum_in_flight(const float* in, float* out, size_t n) {
    add_in_loop<float, 4>(in, out, n);
}

__global__ void __launch_bounds__(BLOCK) sum_wide(const float* in, float* out, size_t n) {
    add_in_loop<float4, 4>(in, out, n);
}

// Sum each block's elements, then the blocks' sums, until one sum is left.
template <typename Kernel>
cudaError_t multi_pass(Kernel kernel, const float* in, float* out, size_t n,
                       cudaStream_t stream) {
    if (n < 1 || n > MAX_SUMMANDS) return cudaErrorInvalidValue;
    void* buffer;
    if (cudaError_t error = cudaGetSymbolAddress(&buffer, partial)) return error;
    auto* sums = static_cast<float*>(buffer);
    float* next = sums + MAX_SUMMANDS / BLOCK;
    for (; n > BLOCK; n = (n + BLOCK - 1) / BLOCK) {
        kernel<<<(n + BLOCK - 1) / BLOCK, BLOCK, 0, stream>>>(in, sums, n);
        in = sums;
        sums = next;
        next = const_cast<float*>(in);
    }
    kernel<<<1, BLOCK, 0, stream>>>(in, out, n);
    return cudaGetLastError();
}

extern "C" cudaError_t tree(const float* in, float* out, int n, cudaStream_t stream) {
    return multi_pass(sum_tree, in, out, n, stream);
}

extern "C" cudaError_t shuffle(const float* in, float* out, int n, cudaStream_t stream) {
    return multi_pass(sum_shuffle, in, out, n, stream);
}

// Launch a kernel that adds to *out on as many blocks as the SMs hold at once.
template <typename Kernel>
cudaError_t single_pass(Kernel kernel, const float* in, float* out, size_t n,
                        cudaStream_t stream) {
    int device, sms, blocks_per_sm;
    const auto count = cudaDevAttrMultiProcessorCount;
    if (cudaError_t error = cudaGetDevice(&device)) return error;
    if (cudaError_t error = cudaDeviceGetAttribute(&sms, count, device)) return error;
    if (cudaError_t error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(
            &blocks_per_sm, kernel, BLOCK, 0))
        return error;
    if (cudaError_t error = cudaMemsetAsync(out, 0, sizeof(float), stream)) return error;
    kernel<<<blocks_per_sm * sms, BLOCK, 0, stream>>>(in, out, n);
    return cudaGetLastError();
}

extern "C" cudaError_t grid_stride(const float* in, float* out, int n, cudaStream_t stream) {
    return single_pass(sum_grid_stride, in, out, n, stream);
}

extern "C" cudaError_t in_flight(const float* in, float* out, int n, cudaStream_t stream) {
    return single_pass(sum_in_flight, in, out, n, stream);
}

extern "C" cudaError_t wide(const float* in, float* out, int n, cudaStream_t stream) {
    if (reinterpret_cast<uintptr_t>(in) % 16) return cudaErrorMisalignedAddress;
    return single_pass(sum_wide, in, out, n, stream);
}

__device__ char workspace[1 << 20];  // for CUB

extern "C" cudaError_t cub_sum(const float* in, float* out, int n, cudaStream_t stream) {
    void* buffer;
    size_t needed = 0;
    if (cudaError_t error = cudaGetSymbolAddress(&buffer, workspace)) return error;
    if (cudaError_t error = cub::DeviceReduce::Sum(nullptr, needed, in, out, n, stream))
        return error;
    if (needed > sizeof(workspace)) return cudaErrorMemoryAllocation;
    return cub::DeviceReduce::Sum(buffer, needed, in, out, n, stream);
}
