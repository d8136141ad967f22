// A chain of small layers, state[l + 1] = relu(weights[l] * state[l]), one kernel each.
//
// A layer needs the state before it, but not for everything: its weights can be fetched at any
// time, and fetching them is most of its work.
//
//   plain       In stream order, a kernel starts when the one before it has ended and been flushed.
//               It fetches weights and state together; each layer waits a launch latency, and then
//               for its first bytes of memory.
//   overlapped  Programmatic dependent launch: each kernel allows the next one to start at once
//               (griddepcontrol.launch_dependents), and that one fetches its weights to shared
//               memory beside it. Then it waits (griddepcontrol.wait) until the kernel before it
//               has ended and its writes are visible, and fetches the state. A block takes 72 KiB
//               of shared memory, so up to three layers' blocks share a multiprocessor.
//
// Nothing that the kernel before wrote may be read before the wait, and nothing that it reads may
// be written.

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

constexpr int WIDTH = 2048;           // inputs and outputs of a layer
constexpr int THREADS = 256;
constexpr int ROWS = 16;              // outputs of a block, two for each warp
constexpr int WEIGHTS = ROWS * WIDTH * 2;  // bytes that a block holds: of its rows,
constexpr int STATE = WIDTH * 4;           // and of the state

// Copies to shared memory, 16 bytes at a time; all of them are under way at once.
__device__ void fetch(const void* from, void* to, int bytes) {
    const uint32_t shared = __cvta_generic_to_shared(to);
    for (int at = threadIdx.x * 16; at < bytes; at += THREADS * 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                     :: "r"(shared + at), "l"(static_cast<const char*>(from) + at) : "memory");
}

template <bool OVERLAPPED>
__device__ void layer(const __nv_bfloat16* weights, const float* in, float* out) {
    extern __shared__ float4 held[];
    auto* rows = reinterpret_cast<uint2*>(held);  // 4 weights each
    float4* state = held + WEIGHTS / 16;
    if (OVERLAPPED) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    fetch(weights + size_t(blockIdx.x) * ROWS * WIDTH, rows, WEIGHTS);
    if (OVERLAPPED) asm volatile("griddepcontrol.wait;" ::: "memory");  // now `in` is there
    fetch(in, state, STATE);
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float sums[2] = {};
    for (int i = lane; i < WIDTH / 4; i += 32) {
        const float4 x = state[i];
        for (int r = 0; r < 2; ++r) {
            const uint2 packed = rows[(2 * warp + r) * (WIDTH / 4) + i];
            const auto* pair = reinterpret_cast<const __nv_bfloat162*>(&packed);
            const float2 a = __bfloat1622float2(pair[0]), b = __bfloat1622float2(pair[1]);
            sums[r] += a.x * x.x + a.y * x.y + b.x * x.z + b.y * x.w;
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
            kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, WEIGHTS + STATE))
        return error;
    cudaLaunchAttribute early;
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(WIDTH / ROWS);
    config.blockDim = dim3(THREADS);
    config.dynamicSmemBytes = WEIGHTS + STATE;
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
