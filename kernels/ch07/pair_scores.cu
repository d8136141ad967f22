// out[i] = contexts[i] . items[ids[i]]: scores of pairs of a context and an item.
//
// A context is 32 floats, and is needed once. An item is 32 int8 values, 32 bytes of a table that
// all pairs share, so a pair reads one sector of the table at a random place. Eight lanes share a
// pair: each loads 16 bytes of the context and 4 of the item, and three shuffles add up their
// parts. Each thread has four pairs in flight. The kernels differ only in how the L2 cache treats
// their lines:
//
//   no_policy  All alike: a line that has not been used for a while is evicted for the next one.
//   hints      Contexts and ids are read, and scores are written, as evict-first (ld.global.cs and
//              st.global.cs): their lines make room for each other before a line of the table goes.
//   window     The loads are those of "no_policy". An access-policy window, an attribute of the
//              launch, makes the lines of the table persisting: they take the part of the cache
//              that set_aside() reserves, and only other persisting lines evict them from there.
//              Afterwards, a second kernel reads each row once through a window that makes its line
//              normal, because persisting lines would stay and keep later kernels out of that part.

#include <cuda_runtime.h>

constexpr int THREADS = 256;
constexpr int WIDTH = 32;           // dimensions of a context and of an item
constexpr int LANES = 8;            // lanes per pair
constexpr int IN_FLIGHT = 4;        // pairs per group of lanes
constexpr int GROUPS = THREADS / LANES;

template <bool HINTS, typename T> __device__ T load(const T* at) {
    return HINTS ? __ldcs(at) : *at;
}

// The part of a dot product that one lane computes: four dimensions.
__device__ float multiply(float4 context, char4 item) {
    return context.x * item.x + context.y * item.y + context.z * item.z + context.w * item.w;
}

template <bool HINTS>
__global__ void __launch_bounds__(THREADS)
    score(const float4* contexts, const int* ids, const char4* items, float* out, int pairs) {
    const int lane = threadIdx.x % LANES;
    const int first = blockIdx.x * GROUPS * IN_FLIGHT + threadIdx.x / LANES;
    int id[IN_FLIGHT];
    float4 context[IN_FLIGHT];
    char4 item[IN_FLIGHT];
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
        sum += __shfl_xor_sync(~0u, sum, 4);
        const int pair = first + k * GROUPS;
        if (lane != 0 || pair >= pairs) continue;
        if (HINTS)
            __stcs(out + pair, sum);
        else
            out[pair] = sum;
    }
}

// Read one word of each row. A row is one sector, and volatile keeps the compiler from leaving out
// loads whose results nobody uses.
__global__ void touch_rows(const volatile int* items, int entries) {
    const int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row < entries) items[size_t(row) * (WIDTH / sizeof(int))];
}

cudaLaunchAttribute window_over(const void* items, size_t bytes, cudaAccessProperty property) {
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeAccessPolicyWindow;
    cudaAccessPolicyWindow& window = attribute.val.accessPolicyWindow;
    window.base_ptr = const_cast<void*>(items);
    window.num_bytes = bytes;
    window.hitRatio = 1;  // the whole table: it is smaller than the part set aside
    window.hitProp = property;
    window.missProp = cudaAccessPropertyNormal;
    return attribute;
}

template <bool HINTS>
cudaError_t score_pairs(const float* contexts, const int* ids, const signed char* items, float* out,
                        int pairs, cudaLaunchAttribute* attribute, cudaStream_t stream) {
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((pairs + GROUPS * IN_FLIGHT - 1) / (GROUPS * IN_FLIGHT));
    config.blockDim = dim3(THREADS);
    config.stream = stream;
    config.attrs = attribute;
    config.numAttrs = attribute ? 1 : 0;
    return cudaLaunchKernelEx(&config, score<HINTS>, reinterpret_cast<const float4*>(contexts), ids,
                              reinterpret_cast<const char4*>(items), out, pairs);
}

extern "C" cudaError_t no_policy(const float* contexts, const int* ids, const signed char* items,
                                 float* out, int pairs, int entries, cudaStream_t stream) {
    return score_pairs<false>(contexts, ids, items, out, pairs, nullptr, stream);
}

extern "C" cudaError_t hints(const float* contexts, const int* ids, const signed char* items,
                             float* out, int pairs, int entries, cudaStream_t stream) {
    return score_pairs<true>(contexts, ids, items, out, pairs, nullptr, stream);
}

extern "C" cudaError_t window(const float* contexts, const int* ids, const signed char* items,
                              float* out, int pairs, int entries, cudaStream_t stream) {
    const size_t bytes = size_t(entries) * WIDTH;
    cudaLaunchAttribute attribute = window_over(items, bytes, cudaAccessPropertyPersisting);
    const cudaError_t error =
        score_pairs<false>(contexts, ids, items, out, pairs, &attribute, stream);
    if (error) return error;
    attribute = window_over(items, bytes, cudaAccessPropertyNormal);
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((entries + THREADS - 1) / THREADS);
    config.blockDim = dim3(THREADS);
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, touch_rows, reinterpret_cast<const volatile int*>(items),
                              entries);
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
