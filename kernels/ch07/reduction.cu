// The sum of n floats: from a tree in shared memory to the speed at which memory can be read.
//
//   tree         A block takes an element a thread into shared memory and halves the number of
//                summands nine times, all threads waiting for each other at every step. The sums of
//                the blocks are summed by the same kernel, until one is left. Most threads idle in
//                most steps, and 4 bytes a thread are too few to keep memory busy.
//   shuffle      The same, but lanes hand their values to each other directly: five steps within a
//                warp, one barrier, five steps over the sums of the 16 warps.
//   grid_stride  As many blocks as are resident at once, each walking over the whole array: 16-byte
//                loads, four under way at a time, added up in registers. The shuffles come once in
//                a thread's life instead of once an element, and one atomic addition a block makes
//                the second pass unnecessary.
//
// fp32 additions in another order give other roundings. All three add pairwise or nearly so, which
// keeps the error far below that of one long chain; the order of atomic additions changes from call
// to call.

#include <cstdint>
#include <cuda_runtime.h>

constexpr int BLOCK = 512;
constexpr int WARPS = BLOCK / 32;
constexpr size_t MOST = size_t(BLOCK) << 20;  // summands

__device__ float partial[2][MOST / BLOCK];  // the sums of blocks: from one, into the other

__global__ void sum_tree(const float* in, float* out, size_t n) {
    __shared__ float held[BLOCK];
    const size_t i = size_t(blockIdx.x) * BLOCK + threadIdx.x;
    held[threadIdx.x] = i < n ? in[i] : 0.0f;
    for (int half = BLOCK / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) held[threadIdx.x] += held[threadIdx.x + half];
    }
    if (threadIdx.x == 0) out[blockIdx.x] = held[0];
}

__device__ float warp_sum(float value) {
    for (int away = 16; away > 0; away /= 2) value += __shfl_down_sync(~0u, value, away);
    return value;  // in lane 0
}

// The sum of a value of each thread of the block, in thread 0.
__device__ float block_sum(float value) {
    __shared__ float warps[WARPS];
    value = warp_sum(value);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
    __syncthreads();
    return threadIdx.x < 32 ? warp_sum(threadIdx.x < WARPS ? warps[threadIdx.x] : 0.0f) : 0.0f;
}

__global__ void sum_shuffle(const float* in, float* out, size_t n) {
    const size_t i = size_t(blockIdx.x) * BLOCK + threadIdx.x;
    const float sum = block_sum(i < n ? in[i] : 0.0f);
    if (threadIdx.x == 0) out[blockIdx.x] = sum;
}

__device__ float sum(float4 v) { return (v.x + v.y) + (v.z + v.w); }

__global__ void __launch_bounds__(BLOCK) sum_grid_stride(const float* in, float* out, size_t n) {
    const auto* vectors = reinterpret_cast<const float4*>(in);
    const size_t threads = size_t(gridDim.x) * BLOCK;
    size_t i = size_t(blockIdx.x) * BLOCK + threadIdx.x;
    float4 total = make_float4(0, 0, 0, 0);
    for (; i + 3 * threads < n / 4; i += 4 * threads) {
        const float4 a = vectors[i], b = vectors[i + threads];
        const float4 c = vectors[i + 2 * threads], d = vectors[i + 3 * threads];
        total.x += (a.x + b.x) + (c.x + d.x);
        total.y += (a.y + b.y) + (c.y + d.y);
        total.z += (a.z + b.z) + (c.z + d.z);
        total.w += (a.w + b.w) + (c.w + d.w);
    }
    float rest = 0;
    for (; i < n / 4; i += threads) rest += sum(vectors[i]);
    if (blockIdx.x == 0 && threadIdx.x < n % 4) rest += in[n / 4 * 4 + threadIdx.x];
    const float value = block_sum(sum(total) + rest);
    if (threadIdx.x == 0) atomicAdd(out, value);
}

// Sums of blocks, sums of those sums, until there is one.
template <typename Kernel>
cudaError_t pass_by_pass(Kernel kernel, const float* in, float* out, size_t n,
                         cudaStream_t stream) {
    if (n < 1 || n > MOST) return cudaErrorInvalidValue;
    void* sums;
    if (cudaError_t error = cudaGetSymbolAddress(&sums, partial)) return error;
    auto* into = static_cast<float*>(sums);
    float* next = into + MOST / BLOCK;
    for (; n > BLOCK; n = (n + BLOCK - 1) / BLOCK) {
        kernel<<<(n + BLOCK - 1) / BLOCK, BLOCK, 0, stream>>>(in, into, n);
        in = into;
        into = next;
        next = const_cast<float*>(in);
    }
    kernel<<<1, BLOCK, 0, stream>>>(in, out, n);
    return cudaGetLastError();
}

extern "C" cudaError_t tree(const float* in, float* out, int n, cudaStream_t stream) {
    return pass_by_pass(sum_tree, in, out, n, stream);
}

extern "C" cudaError_t shuffle(const float* in, float* out, int n, cudaStream_t stream) {
    return pass_by_pass(sum_shuffle, in, out, n, stream);
}

extern "C" cudaError_t grid_stride(const float* in, float* out, int n, cudaStream_t stream) {
    if (reinterpret_cast<uintptr_t>(in) % 16) return cudaErrorMisalignedAddress;
    int device, multiprocessors, resident;
    const auto count = cudaDevAttrMultiProcessorCount;
    if (cudaError_t error = cudaGetDevice(&device)) return error;
    if (cudaError_t error = cudaDeviceGetAttribute(&multiprocessors, count, device)) return error;
    if (cudaError_t error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(
            &resident, sum_grid_stride, BLOCK, 0))
        return error;
    if (cudaError_t error = cudaMemsetAsync(out, 0, sizeof(float), stream)) return error;
    sum_grid_stride<<<resident * multiprocessors, BLOCK, 0, stream>>>(in, out, n);
    return cudaGetLastError();
}
