// A chain of small layers, state[l + 1] = relu(weights[l] * state[l]), one kernel per layer.
//
// A layer depends on the state of the layer before, but its weights do not, and loading the weights
// is most of its work.
//
//   plain       In stream order a kernel starts after the kernel before has finished and its writes
//               are flushed. Then it loads weights and state together. Each layer pays a launch
//               latency and the latency of its first loads.
//   overlapped  Programmatic dependent launch (PDL): each kernel lets the next one start at once
//               (griddepcontrol.launch_dependents). The next kernel loads its weights to shared
//               memory, waits until the kernel before has finished and its writes are visible
//               (griddepcontrol.wait), and loads the state. A block takes 72 KiB of shared memory,
//               so blocks of up to three layers are resident on an SM.
//
// Captured in a CUDA graph, the launches of "overlapped" are joined by programmatic edges and keep
// their overlap.
//
// Before the wait, a kernel must not read what the kernel before writes, nor write what the kernel
// before reads.

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

constexpr int WIDTH = 2048;           // inputs and outputs per layer
constexpr int THREADS = 256;
constexpr int ROWS = 16;              // outputs per block, two per warp
constexpr int WEIGHT_BYTES = ROWS * WIDTH * 2;  // shared memory for a block's weight rows
constexpr int STATE_BYTES = WIDTH * 4;          // shared memory for the state

// Asynchronous copy to shared memory in units of 16 bytes, all in flight at once.
__device__ void copy_async(const void* source, void* destination, int bytes) {
    const uint32_t shared = __cvta_generic_to_shared(destination);
    for (int offset = threadIdx.x * 16; offset < bytes; offset += THREADS * 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                     :: "r"(shared + offset), "l"(static_cast<const char*>(source) + offset)
                     : "memory");
}

template <bool OVERLAPPED>
__device__ void layer(const __nv_bfloat16* weights, const float* in, float* out) {
    extern __shared__ float4 memory[];
    auto* rows = reinterpret_cast<uint2*>(memory);  // 4 weights per uint2
    float4* state = memory + WEIGHT_BYTES / 16;
    if (OVERLAPPED) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    copy_async(weights + size_t(blockIdx.x) * ROWS * WIDTH, rows, WEIGHT_BYTES);
    if (OVERLAPPED) asm volatile("griddepcontrol.wait;" ::: "memory");  // `in` is now complete
    copy_async(in, state, STATE_BYTES);
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
        for (int offset = 16; offset > 0; offset /= 2)
            sums[r] += __shfl_xor_sync(~0u, sums[r], offset);
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

// `states` holds the state after each layer, one row per layer.
cudaError_t launch_chain(bool overlapped, const __nv_bfloat16* weights, const float* start,
                         float* states, int layers, cudaStream_t stream) {
    const auto kernel = overlapped ? layer_overlapped : layer_plain;
    if (cudaError_t error = cudaFuncSetAttribute(
            kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, WEIGHT_BYTES + STATE_BYTES))
        return error;
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(WIDTH / ROWS);
    config.blockDim = dim3(THREADS);
    config.dynamicSmemBytes = WEIGHT_BYTES + STATE_BYTES;
    config.stream = stream;
    config.attrs = &attribute;
    for (int l = 0; l < layers; ++l) {
        config.numAttrs = overlapped && l > 0;  // layer 0 follows the caller's work in stream order
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
    return launch_chain(false, weights, start, states, layers, stream);
}

extern "C" cudaError_t overlapped(const __nv_bfloat16* weights, const float* start, float* states,
                                  int layers, cudaStream_t stream) {
    return launch_chain(true, weights, start, states, layers, stream);
}
