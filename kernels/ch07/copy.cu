// Copies n floats: how close a kernel comes to device-memory bandwidth.
//
// Two things decide that. The caches transfer sectors of 32 bytes, and device memory 64 bytes per
// access, whether a warp uses all of them or 4 bytes. And bandwidth = bytes in flight / latency:
// full bandwidth takes tens of kilobytes in flight per SM.
//
//   strided            Neighbouring lanes are 32 floats apart, as in a walk down the columns of a
//                      matrix. Each lane uses 4 bytes of its own sector. Walking one column
//                      touches a sector of every row, and a large array evicts a sector from the L2
//                      before the next column needs it: 8 times the sectors, and 16 times the bytes
//                      of device memory.
//   coalesced          Neighbouring lanes access neighbouring floats: a warp's 128 bytes are 4
//                      whole sectors. A thread has 4 bytes in flight, a fully occupied SM 8 KiB.
//   vector             16 bytes per thread: 4 times the bytes in flight with a quarter of the
//                      instructions.
//   vector_unrolled    Four 16-byte loads per thread, all issued before the first store. Once
//                      memory is saturated, more loads in flight gain nothing.
//
// cuda_memcpy calls cudaMemcpyAsync, the copy of the CUDA runtime.

#include <cstdint>
#include <cuda_runtime.h>

constexpr int THREADS = 256;
constexpr int STRIDE = 32;

__global__ void copy_strided(const float* in, float* out, size_t n) {
    const size_t row = size_t(blockIdx.x) * THREADS + threadIdx.x;
    const size_t i = row * STRIDE + blockIdx.y;  // blockIdx.y: the column
    if (i < n) out[i] = in[i];
}

__global__ void copy_coalesced(const float* in, float* out, size_t n) {
    const size_t i = size_t(blockIdx.x) * THREADS + threadIdx.x;
    if (i < n) out[i] = in[i];
}

// Floats per block: IN_FLIGHT vectors of 4 floats per thread.
template <int IN_FLIGHT>
constexpr size_t CHUNK = size_t(THREADS) * IN_FLIGHT * 4;

template <int IN_FLIGHT>
__global__ void copy_vectors(const float* in, float* out, size_t n) {
    const size_t begin = blockIdx.x * CHUNK<IN_FLIGHT>;
    if (begin + CHUNK<IN_FLIGHT> > n) {  // the remainder after the last whole chunk
#pragma unroll 1  // only the last block runs this loop: keep the code small
        for (size_t i = begin + threadIdx.x; i < n; i += THREADS) out[i] = in[i];
        return;
    }
    const auto* from = reinterpret_cast<const float4*>(in + begin) + threadIdx.x;
    auto* to = reinterpret_cast<float4*>(out + begin) + threadIdx.x;
    float4 vectors[IN_FLIGHT];  // neighbouring lanes, neighbouring vectors: 512 bytes per warp
    for (int k = 0; k < IN_FLIGHT; ++k) vectors[k] = from[k * THREADS];
    for (int k = 0; k < IN_FLIGHT; ++k) to[k * THREADS] = vectors[k];
}

template <int IN_FLIGHT>
cudaError_t launch_vectors(const float* in, float* out, size_t n, cudaStream_t stream) {
    // a 16-byte access needs a 16-byte-aligned address
    if ((reinterpret_cast<uintptr_t>(in) | reinterpret_cast<uintptr_t>(out)) % 16)
        return cudaErrorMisalignedAddress;
    const size_t blocks = n / CHUNK<IN_FLIGHT> + 1;  // the last block takes the remainder
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
