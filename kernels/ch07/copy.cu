// Copying n floats: how near a kernel comes to the speed of device memory.
//
// Two things decide. Device memory moves sectors of 32 bytes, whether all of one is wanted or 4
// bytes; and its latency is hidden only by other requests: rate = bytes in flight / latency, which
// asks for some tens of kilobytes in flight on every multiprocessor.
//
//   strided            Neighbouring lanes are 32 floats apart, as in walking down the columns of a
//                      matrix. Each lane takes 4 bytes of a sector of its own, and by the time the
//                      next column is due the sector has left the caches: 8 times the traffic.
//   coalesced          Neighbouring lanes take neighbouring floats: the 128 bytes of a warp are 4
//                      whole sectors. But a thread has 4 bytes in flight, a full multiprocessor
//                      8 KiB.
//   vector             16 bytes a thread: 4 times the bytes in flight, a quarter of the
//                      instructions. On an H200 that is enough.
//   vector_unrolled    Four 16-byte loads a thread, all under way before the first store needs one.
//                      Where one was enough, more only wait longer, and blocks get fewer.
//
// cuda_memcpy is the library's own copy.

#include <cstdint>
#include <cuda_runtime.h>

constexpr int THREADS = 256;
constexpr int STRIDE = 32;

__global__ void copy_strided(const float* in, float* out, size_t n) {
    const size_t row = size_t(blockIdx.x) * THREADS + threadIdx.x;
    const size_t i = row * STRIDE + blockIdx.y;  // one column after the other
    if (i < n) out[i] = in[i];
}

__global__ void copy_coalesced(const float* in, float* out, size_t n) {
    const size_t i = size_t(blockIdx.x) * THREADS + threadIdx.x;
    if (i < n) out[i] = in[i];
}

// The floats that a block copies: IN_FLIGHT vectors of 4 a thread.
template <int IN_FLIGHT>
constexpr size_t CHUNK = size_t(THREADS) * IN_FLIGHT * 4;

template <int IN_FLIGHT>
__global__ void copy_vectors(const float* in, float* out, size_t n) {
    const size_t begin = blockIdx.x * CHUNK<IN_FLIGHT>;
    if (begin + CHUNK<IN_FLIGHT> > n) {  // what is left over after the last whole chunk
#pragma unroll 1  // a tail is seldom walked: keep it small
        for (size_t i = begin + threadIdx.x; i < n; i += THREADS) out[i] = in[i];
        return;
    }
    const auto* from = reinterpret_cast<const float4*>(in + begin) + threadIdx.x;
    auto* to = reinterpret_cast<float4*>(out + begin) + threadIdx.x;
    float4 held[IN_FLIGHT];  // lanes on neighbouring vectors each time: 512 bytes a warp
    for (int k = 0; k < IN_FLIGHT; ++k) held[k] = from[k * THREADS];
    for (int k = 0; k < IN_FLIGHT; ++k) to[k * THREADS] = held[k];
}

template <int IN_FLIGHT>
cudaError_t launch_vectors(const float* in, float* out, size_t n, cudaStream_t stream) {
    // a 16-byte access needs an address that 16 divides
    if ((reinterpret_cast<uintptr_t>(in) | reinterpret_cast<uintptr_t>(out)) % 16)
        return cudaErrorMisalignedAddress;
    const size_t blocks = n / CHUNK<IN_FLIGHT> + 1;  // the last one has what is left over
    copy_vectors<IN_FLIGHT><<<blocks, THREADS, 0, stream>>>(in, out, n);
    return cudaGetLastError();
}

extern "C" cudaError_t strided(const float* in, float* out, int n, cudaStream_t stream) {
    const unsigned rows = n / STRIDE + 1;
    copy_strided<<<dim3(rows / THREADS + 1, STRIDE), THREADS, 0, stream>>>(in, out, n);
    return cudaGetLastError();
}

extern "C" cudaError_t coalesced(const float* in, float* out, int n, cudaStream_t stream) {
    copy_coalesced<<<n / THREADS + 1, THREADS, 0, stream>>>(in, out, n);
    return cudaGetLastError();
}

extern "C" cudaError_t vector(const float* in, float* out, int n, cudaStream_t stream) {
    return launch_vectors<1>(in, out, n, stream);
}

extern "C" cudaError_t vector_unrolled(const float* in, float* out, int n, cudaStream_t stream) {
    return launch_vectors<4>(in, out, n, stream);
}

extern "C" cudaError_t cuda_memcpy(const float* in, float* out, int n, cudaStream_t stream) {
    return cudaMemcpyAsync(out, in, size_t(n) * sizeof(float), cudaMemcpyDeviceToDevice, stream);
}
