// A chain of small layers, state[l + 1] = relu(weights[l] * state[l]), one kernel each.
//
// A layer needs the state before it, but not for everything: its weights can be fetched at any
// time, and fetching them is most of its work.
//
//   plain       In stream order, a kernel starts when the one before it has ended and been flushed:
//               each layer waits a launch latency, and then for its first bytes of memory.
//   overlapped  Programmatic dependent launch: each kernel allows the next one to start at once
//               (griddepcontrol.launch_dependents), and that one fetches its weights to shared
//               memory beside it. Only then does it wait (griddepcontrol.wait) until the kernel
//               before it has ended and its writes are visible. A block takes 64 KiB of shared
//               memory, so up to three layers' blocks share a multiprocessor.
//
// Nothing that the kernel before wrote may be read before the wait, and nothing that it reads may
// be written.

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

constexpr int WIDTH = 2048;           // inputs and outputs of a layer
constexpr int THREADS = 256;
constexpr int ROWS = 16;              // outputs of a block, two for each warp
constexpr int BYTES = ROWS * WIDTH * 2;

template <bool OVERLAPPED>
__device__ void layer(const __nv_bfloat16* weights, const float* in, float* out) {
    extern __shared__ uint4 held[];  // 8 weights each
    if (OVERLAPPED) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");

    const auto* rows = reinterpret_cast<const uint4*>(weights + size_t(blockIdx.x) * ROWS * WIDTH);
    const uint32_t to = __cvta_generic_to_shared(held);
    for (int i = threadIdx.x; i < BYTES / 16; i += THREADS)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                     :: "r"(to + i * 16), "l"(rows + i) : "memory");
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();

    if (OVERLAPPED) asm volatile("griddepcontrol.wait;" ::: "memory");  // now `in` is there

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float sums[2] = {};
    for (int i = lane; i < WIDTH / 8; i += 32) {
        const float4 low = __ldcg(reinterpret_cast<const float4*>(in) + 2 * i);
        const float4 high = __ldcg(reinterpret_cast<const float4*>(in) + 2 * i + 1);
        for (int r = 0; r < 2; ++r) {
            const uint4 packed = held[(2 * warp + r) * (WIDTH / 8) + i];
            const auto* pair = reinterpret_cast<const __nv_bfloat162*>(&packed);
            const float2 a = __bfloat1622float2(pair[0]), b = __bfloat1622float2(pair[1]);
            const float2 c = __bfloat1622float2(pair[2]), d = __bfloat1622float2(pair[3]);
            sums[r] += a.x * low.x + a.y * low.y + b.x * low.z + b.y * low.w +
                       c.x * high.x + c.y * high.y + d.x * high.z + d.y * high.w;
        }
    }
    for (int r = 0; r < 2; ++r) {
        for (int apart = 16; apart > 0; apart /= 2)
            sums[r] += __shfl_xor_sync(~0u, sums[r], apart);
        if (lane == 0) out[blockIdx.x * ROWS + 2 * warp + r] = fmaxf(sums[r], 0);
    }
}

__global__ void __launch_bounds__(THREADS)
layer_plain(const __nv_bfloat16* weights, const float* in, float* out) {
    layer<false>(weights, in, out);
}

__global__ void __launch_bounds__(THREADS)
layer_overlapped(const __nv_bfloat16* weights, const float* in, float* out) {
    layer<true>(weights, in, out);
}

// `states` has a row for the state after each layer.
cudaError_t chain(bool overlapped, const __nv_bfloat16* weights, const float* start, float* states,
                  int layers, cudaStream_t stream) {
    const auto kernel = overlapped ? layer_overlapped : layer_plain;
    if (cudaError_t error = cudaFuncSetAttribute(
            kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES))
        return error;
    cudaLaunchAttribute early;
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(WIDTH / ROWS);
    config.blockDim = dim3(THREADS);
    config.dynamicSmemBytes = BYTES;
    config.stream = stream;
    config.attrs = &early;
    for (int l = 0; l < layers; ++l) {
        config.numAttrs = overlapped && l > 0;  // the first one follows whatever ran before
        const float* in = l ? states + size_t(l - 1) * WIDTH : start;
        if (cudaError_t error = cudaLaunchKernelEx(
                &config, kernel, weights + size_t(l) * WIDTH * WIDTH, in,
                states + size_t(l) * WIDTH))
            return error;
    }
    return cudaSuccess;
}

extern "C" cudaError_t plain(const __nv_bfloat16* weights, const float* start, float* states,
                             int layers, cudaStream_t stream) {
    return chain(false, weights, start, states, layers, stream);
}

extern "C" cudaError_t overlapped(const __nv_bfloat16* weights, const float* start, float* states,
                                  int layers, cudaStream_t stream) {
    return chain(true, weights, start, states, layers, stream);
}
