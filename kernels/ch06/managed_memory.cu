// A kernel reads data that the CPU has just written to managed memory.
//
// Managed memory has one address for CPU and GPU, and its pages lie where they were last used. All
// are in host memory when the kernel starts, because `write_on_host` has written them on the CPU:
//
//   on_demand   The first access to a page faults. The GPU reports a batch of faults to the driver
//               on the CPU, which migrates these pages and some neighbours; the warps wait.
//   prefetched  cudaMemPrefetchAsync migrates all pages before the kernel: in large pieces, at the
//               speed of the link, and without a fault.
//   copied      Without managed memory: the same data is copied from pinned memory.

#include <cstring>
#include <cuda_runtime.h>

constexpr int THREADS = 256;
constexpr int N = 1 << 25;  // capacity, in floats

float* managed_buffer() {
    static float* const buffer = [] {
        float* allocated = nullptr;
        cudaMallocManaged(&allocated, N * sizeof(float));
        return allocated;
    }();
    return buffer;
}

float* device_buffer() {
    static float* const buffer = [] {
        float* allocated = nullptr;
        cudaMalloc(&allocated, N * sizeof(float));
        return allocated;
    }();
    return buffer;
}

// Enqueues the migration of n floats of the managed buffer to the current GPU or to the host.
cudaError_t prefetch(int n, bool to_gpu, cudaStream_t stream) {
    int device = 0;
    if (cudaError_t error = cudaGetDevice(&device)) return error;
#if CUDART_VERSION >= 13000
    const cudaMemLocation location =
        to_gpu ? cudaMemLocation{cudaMemLocationTypeDevice, device}
               : cudaMemLocation{cudaMemLocationTypeHost, 0};
    return cudaMemPrefetchAsync(managed_buffer(), n * sizeof(float), location, 0, stream);
#else
    return cudaMemPrefetchAsync(managed_buffer(), n * sizeof(float),
                                to_gpu ? device : cudaCpuDeviceId, stream);
#endif
}

__global__ void scale(const float* in, float* out, int n) {
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i < n) out[i] = 2 * in[i] + 1;
}

cudaError_t launch_scale(const float* in, float* out, int n, cudaStream_t stream) {
    scale<<<(n + THREADS - 1) / THREADS, THREADS, 0, stream>>>(in, out, n);
    return cudaGetLastError();
}

// `values` are n floats in host memory.
extern "C" cudaError_t write_on_host(const float* values, int n, cudaStream_t stream) {
    if (n > N || !managed_buffer()) return cudaErrorInvalidValue;
    if (cudaError_t error = prefetch(n, false, stream)) return error;
    if (cudaError_t error = cudaStreamSynchronize(stream)) return error;
    std::memcpy(managed_buffer(), values, n * sizeof(float));
    return cudaSuccess;
}

extern "C" cudaError_t on_demand(const float* values, float* out, int n, cudaStream_t stream) {
    return launch_scale(managed_buffer(), out, n, stream);
}

extern "C" cudaError_t prefetched(const float* values, float* out, int n, cudaStream_t stream) {
    if (cudaError_t error = prefetch(n, true, stream)) return error;
    return launch_scale(managed_buffer(), out, n, stream);
}

extern "C" cudaError_t copied(const float* values, float* out, int n, cudaStream_t stream) {
    cudaMemcpyAsync(device_buffer(), values, n * sizeof(float), cudaMemcpyHostToDevice, stream);
    return launch_scale(device_buffer(), out, n, stream);
}
