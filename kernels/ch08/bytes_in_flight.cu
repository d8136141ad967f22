// Scale n floats with one block of 256 threads per SM: 8 of 64 warps, 12.5 % occupancy.
//
// A kernel that needs many registers or much shared memory often runs with so few warps. Bandwidth
// is bytes in flight over latency (Little's law), and the bytes in flight per SM are threads x
// loads per thread x bytes per load. With 256 threads and 16-byte loads:
//
//   one     One load per thread, then the product and the store: 4 KiB in flight.
//   two     Each thread issues all of its loads before it uses the first: 8 KiB,
//   four    16 KiB,
//   eight   32 KiB, as many as a fully occupied SM has with one load per thread.
//
// Every rung has the same grid and block, and the same coalesced 16-byte accesses.

#include <cstdint>
#include <cuda_runtime.h>

constexpr int THREADS = 256;

__device__ float4 scaled(float4 v, float factor) {
    return make_float4(v.x * factor, v.y * factor, v.z * factor, v.w * factor);
}

template <int LOADS>
__global__ void __launch_bounds__(THREADS)
    scale_in_flight(const float4* in, float4* out, float factor, size_t n) {
    const size_t chunk = size_t(THREADS) * LOADS, step = gridDim.x * chunk;
    size_t begin = blockIdx.x * chunk;
#pragma unroll 1
    for (; begin + chunk <= n; begin += step) {
        const float4* from = in + begin + threadIdx.x;
        float4* to = out + begin + threadIdx.x;
        float4 v[LOADS];
#pragma unroll
        for (int k = 0; k < LOADS; ++k) v[k] = from[k * THREADS];
#pragma unroll
        for (int k = 0; k < LOADS; ++k) to[k * THREADS] = scaled(v[k], factor);
    }
#pragma unroll 1  // the remainder: the last chunk, which only one block finds incomplete
    for (size_t i = begin + threadIdx.x; i < n && i < begin + chunk; i += THREADS)
        out[i] = scaled(in[i], factor);
}

template <int LOADS>
cudaError_t launch(const float* in, float* out, float factor, int n, cudaStream_t stream) {
    if ((reinterpret_cast<uintptr_t>(in) | reinterpret_cast<uintptr_t>(out)) % 16)
        return cudaErrorMisalignedAddress;
    if (n % 4) return cudaErrorInvalidValue;
    int device, sms;
    const auto sm_count = cudaDevAttrMultiProcessorCount;
    if (cudaError_t error = cudaGetDevice(&device)) return error;
    if (cudaError_t error = cudaDeviceGetAttribute(&sms, sm_count, device)) return error;
    scale_in_flight<LOADS><<<sms, THREADS, 0, stream>>>(
        reinterpret_cast<const float4*>(in), reinterpret_cast<float4*>(out), factor, n / 4);
    return cudaGetLastError();
}

extern "C" cudaError_t one(const float* in, float* out, float factor, int n, cudaStream_t stream) {
    return launch<1>(in, out, factor, n, stream);
}

extern "C" cudaError_t two(const float* in, float* out, float factor, int n, cudaStream_t stream) {
    return launch<2>(in, out, factor, n, stream);
}

extern "C" cudaError_t four(const float* in, float* out, float factor, int n, cudaStream_t stream) {
    return launch<4>(in, out, factor, n, stream);
}

extern "C" cudaError_t eight(const float* in, float* out, float factor, int n,
                             cudaStream_t stream) {
    return launch<8>(in, out, factor, n, stream);
}
