// out = scale * charge for n particles of 16 floats (64 bytes): the layout decides the bytes that
// one field costs.
//
// Memory transfers sectors of 32 bytes, whole or not at all. The kernels are the same except for
// where the charge of particle i is:
//
//   aos         particles[i].charge        An array of structures (AoS), as in most programs. The
//                                          charges of neighbouring lanes are 64 bytes apart: each
//                                          lane uses 4 bytes of a sector of its own, and the warp
//                                          loads 32 sectors.
//   aosoa       groups[i / 32]             An array of structures of arrays (AoSoA): each field of
//                   .charge[i % 32]        32 particles is contiguous, so a warp loads 128 bytes,
//                                          4 whole sectors. All fields of a particle lie within
//                                          2 KiB.
//   soa         charges[i]                 A structure of arrays (SoA): each field is one array of
//                                          its own. A warp loads 4 whole sectors, too.
//   soa_vector  charges[4 * i ...]         A thread loads and stores four of them with 16-byte
//                                          accesses.
//
// The number of particles is rounded up to whole groups in all layouts: `capacity`. The kernels
// compute the first n of them.

#include <cstdint>
#include <cuda_runtime.h>

constexpr int THREADS = 256;
constexpr int FIELDS = 16;
constexpr int CHARGE = 7;  // position of the field in a particle
constexpr int GROUP = 32;  // particles whose fields are together in an AoSoA: the lanes of a warp

__global__ void scale_aos(const float* particles, float* out, float scale, size_t n) {
    const size_t i = size_t(blockIdx.x) * THREADS + threadIdx.x;
    if (i < n) out[i] = scale * particles[i * FIELDS + CHARGE];
}

__global__ void scale_aosoa(const float* groups, float* out, float scale, size_t n) {
    const size_t i = size_t(blockIdx.x) * THREADS + threadIdx.x;
    if (i < n) out[i] = scale * groups[(i / GROUP * FIELDS + CHARGE) * GROUP + i % GROUP];
}

__global__ void scale_soa(const float* charges, float* out, float scale, size_t n) {
    const size_t i = size_t(blockIdx.x) * THREADS + threadIdx.x;
    if (i < n) out[i] = scale * charges[i];
}

__global__ void scale_soa_vector(const float* charges, float* out, float scale, size_t n) {
    const size_t i = size_t(blockIdx.x) * THREADS + threadIdx.x;
    if (i < n / 4) {
        const float4 c = reinterpret_cast<const float4*>(charges)[i];
        reinterpret_cast<float4*>(out)[i] =
            make_float4(scale * c.x, scale * c.y, scale * c.z, scale * c.w);
    } else if (i == n / 4) {  // the remainder after the last whole vector
#pragma unroll 1
        for (size_t k = n / 4 * 4; k < n; ++k) out[k] = scale * charges[k];
    }
}

// All launchers take the same particles in three layouts and read one of them. In `soa`, each field
// is an array of `capacity` floats, which is a multiple of GROUP.

extern "C" cudaError_t aos(const float* aos, const float* aosoa, const float* soa, float* out,
                           float scale, int n, int capacity, cudaStream_t stream) {
    if (n > capacity || capacity % GROUP) return cudaErrorInvalidValue;
    scale_aos<<<n / THREADS + 1, THREADS, 0, stream>>>(aos, out, scale, n);
    return cudaGetLastError();
}

extern "C" cudaError_t aosoa(const float* aos, const float* aosoa, const float* soa, float* out,
                             float scale, int n, int capacity, cudaStream_t stream) {
    if (n > capacity || capacity % GROUP) return cudaErrorInvalidValue;
    scale_aosoa<<<n / THREADS + 1, THREADS, 0, stream>>>(aosoa, out, scale, n);
    return cudaGetLastError();
}

extern "C" cudaError_t soa(const float* aos, const float* aosoa, const float* soa, float* out,
                           float scale, int n, int capacity, cudaStream_t stream) {
    if (n > capacity || capacity % GROUP) return cudaErrorInvalidValue;
    const float* charges = soa + size_t(CHARGE) * capacity;
    scale_soa<<<n / THREADS + 1, THREADS, 0, stream>>>(charges, out, scale, n);
    return cudaGetLastError();
}

extern "C" cudaError_t soa_vector(const float* aos, const float* aosoa, const float* soa,
                                  float* out, float scale, int n, int capacity,
                                  cudaStream_t stream) {
    if (n > capacity || capacity % GROUP) return cudaErrorInvalidValue;
    const float* charges = soa + size_t(CHARGE) * capacity;
    if ((reinterpret_cast<uintptr_t>(charges) | reinterpret_cast<uintptr_t>(out)) % 16)
        return cudaErrorMisalignedAddress;
    const unsigned blocks = n / 4 / THREADS + 1;  // contains thread n / 4, for the remainder
    scale_soa_vector<<<blocks, THREADS, 0, stream>>>(charges, out, scale, n);
    return cudaGetLastError();
}
