// out[i] = contexts[i] . items[ids[i]]: scores of pairs of a context and an item.
//
// A context is 16 floats, and is needed once. An item is 16 bf16 values, 32 bytes of a table that
// all pairs share, so a pair reads one sector of the table at a random place. Pairs come in batches,
// one kernel per batch. Four lanes share a pair: each loads 16 bytes of the context and 8 of the
// item, and two shuffles add up their parts. Each thread has four pairs in flight. The kernels
// differ only in how the L2 cache treats its lines:
//
//   no_policy  All alike: a line that has not been used for a while is evicted for the next one.
//   hints      Contexts and ids are read, and scores are written, as evict-first (ld.global.cs and
//              st.global.cs): their lines make room for each other before a line of the table goes.
//   window     The loads are those of "no_policy". An access-policy window, an attribute of the
//              launch, makes the lines of the table persisting: they take the part of the cache
//              that set_aside() reserves, and only other persisting lines evict them from there.
//              The launch of the last batch makes them normal again, because persisting lines
//              would stay and keep later kernels out of that part.

#include <algorithm>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

constexpr int THREADS = 256;
constexpr int WIDTH = 16;           // dimensions of a context and of an item
constexpr int LANES = 4;            // lanes per pair
constexpr int IN_FLIGHT = 4;        // pairs per group of lanes
constexpr int GROUPS = THREADS / LANES;
constexpr int BATCHES = 8;

template <bool HINTS, typename T> __device__ T load(const T* at) {
    return HINTS ? __ldcs(at) : *at;
}

// The part of a dot product that one lane computes: four dimensions.
__device__ float multiply(float4 context, uint2 item) {
    const float2 low = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(item.x));
    const float2 high = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(item.y));
    return context.x * low.x + context.y * low.y + context.z * high.x + context.w * high.y;
}

template <bool HINTS>
__global__ void __launch_bounds__(THREADS)
    score(const float4* contexts, const int* ids, const uint2* items, float* out, int pairs) {
    const int lane = threadIdx.x % LANES;
    const int first = blockIdx.x * GROUPS * IN_FLIGHT + threadIdx.x / LANES;
    int id[IN_FLIGHT];
    float4 context[IN_FLIGHT];
    uint2 item[IN_FLIGHT];
#pragma unroll
    for (int k = 0; k < IN_FLIGHT; ++k) {
        const int pair = min(first + k * GROUPS, pairs - 1);  // past the end: the last one again
        id[k] = load<HINTS>(ids + pair);
        context[k] = load<HINTS>(contexts + size_t(pair) * LANES + lane);
    }
#pragma unroll
    for (int k = 0; k < IN_FLIGHT; ++k) item[k] = items[size_t(id[k]) * LANES + lane];
#pragma unroll
    for (int k = 0; k < IN_FLIGHT; ++k) {
        float sum = multiply(context[k], item[k]);
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        const int pair = first + k * GROUPS;
        if (lane != 0 || pair >= pairs) continue;
        if (HINTS)
            __stcs(out + pair, sum);
        else
            out[pair] = sum;
    }
}

// The bytes of the L2 cache that are set aside for persisting lines.
size_t bytes_set_aside() {
    size_t bytes = 0;
    cudaDeviceGetLimit(&bytes, cudaLimitPersistingL2CacheSize);
    return bytes;
}

cudaLaunchAttribute window_over(const void* items, size_t bytes, cudaAccessProperty property) {
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeAccessPolicyWindow;
    cudaAccessPolicyWindow& window = attribute.val.accessPolicyWindow;
    window.base_ptr = const_cast<void*>(items);
    window.num_bytes = bytes;
    // persisting lines evict each other if the window is larger than the part set aside
    window.hitRatio = std::min(1.0f, float(bytes_set_aside()) / bytes);
    window.hitProp = property;
    window.missProp = cudaAccessPropertyNormal;
    return attribute;
}

template <bool HINTS, bool WINDOW>
cudaError_t score_batches(const float* contexts, const int* ids, const nv_bfloat16* items,
                          float* out, int pairs, int entries, cudaStream_t stream) {
    const int batch = (pairs + BATCHES - 1) / BATCHES;
    cudaLaunchConfig_t config = {};
    config.blockDim = dim3(THREADS);
    config.stream = stream;
    for (int begin = 0; begin < pairs; begin += batch) {
        const int count = std::min(batch, pairs - begin);
        const bool is_last = begin + count == pairs;
        config.gridDim = dim3((count + GROUPS * IN_FLIGHT - 1) / (GROUPS * IN_FLIGHT));
        cudaLaunchAttribute attribute;
        if (WINDOW) {
            attribute = window_over(items, size_t(entries) * WIDTH * sizeof(nv_bfloat16),
                                    is_last ? cudaAccessPropertyNormal
                                            : cudaAccessPropertyPersisting);
            config.attrs = &attribute;
            config.numAttrs = 1;
        }
        const auto batch_contexts = contexts + size_t(begin) * WIDTH;
        const cudaError_t error = cudaLaunchKernelEx(
            &config, score<HINTS>, reinterpret_cast<const float4*>(batch_contexts), ids + begin,
            reinterpret_cast<const uint2*>(items), out + begin, count);
        if (error) return error;
    }
    return cudaSuccess;
}

extern "C" cudaError_t no_policy(const float* contexts, const int* ids, const nv_bfloat16* items,
                                 float* out, int pairs, int entries, cudaStream_t stream) {
    return score_batches<false, false>(contexts, ids, items, out, pairs, entries, stream);
}

extern "C" cudaError_t hints(const float* contexts, const int* ids, const nv_bfloat16* items,
                             float* out, int pairs, int entries, cudaStream_t stream) {
    return score_batches<true, false>(contexts, ids, items, out, pairs, entries, stream);
}

extern "C" cudaError_t window(const float* contexts, const int* ids, const nv_bfloat16* items,
                              float* out, int pairs, int entries, cudaStream_t stream) {
    return score_batches<false, true>(contexts, ids, items, out, pairs, entries, stream);
}

// Reserve a part of the L2 cache for persisting lines, for the process. Fails if the GPU permits
// less.
extern "C" cudaError_t set_aside(int mib, cudaStream_t) {
    int device = 0, most = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&most, cudaDevAttrMaxPersistingL2CacheSize, device);
    const size_t bytes = size_t(mib) << 20;
    if (bytes > size_t(most)) return cudaErrorUnsupportedLimit;
    return cudaDeviceSetLimit(cudaLimitPersistingL2CacheSize, bytes);
}
