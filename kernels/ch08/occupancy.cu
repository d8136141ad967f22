// Scale n floats with one, two, four or the maximum number of blocks of 256 threads per SM.
//
// A thread loads 16 bytes, multiplies, stores, and continues with its next 16 bytes. It waits for
// memory most of the time, and the SM stays busy only while other warps are resident. Registers,
// threads and shared memory per block limit how many blocks are resident. Here blocks reserve
// shared memory that they never use, like a kernel that reserves for its largest input. Kernel,
// block size and bytes moved are the same in every rung:
//
//   eighth   One block reserves all shared memory of an SM: 8 of 64 warps, 12.5 % occupancy.
//   quarter  Two blocks share the memory.
//   half     Four blocks share it.
//   full     No reservation: as many blocks as threads and registers allow.
//
// The grid has as many blocks as can be resident at once; each runs a grid-stride loop.

#include <cstdint>
#include <cuda_runtime.h>

constexpr int THREADS = 256;

template <int BLOCKS>  // per SM; one kernel per rung, because each sets its own carveout
__global__ void __launch_bounds__(THREADS) scale(const float4* in, float4* out, float factor,
                                                 size_t n) {
    const size_t threads = size_t(gridDim.x) * THREADS;
#pragma unroll 1  // one load in flight per thread: more must come from other warps
    for (size_t i = size_t(blockIdx.x) * THREADS + threadIdx.x; i < n; i += threads) {
        const float4 v = in[i];
        out[i] = make_float4(v.x * factor, v.y * factor, v.z * factor, v.w * factor);
    }
}

// Dynamic shared memory per block that leaves room for exactly `blocks` blocks per SM.
cudaError_t shared_bytes_for(int blocks, int device, size_t* bytes) {
    int per_sm, reserved, limit;
    const auto sm_attribute = cudaDevAttrMaxSharedMemoryPerMultiprocessor;
    const auto reserved_attribute = cudaDevAttrReservedSharedMemoryPerBlock;
    const auto limit_attribute = cudaDevAttrMaxSharedMemoryPerBlockOptin;
    if (cudaError_t error = cudaDeviceGetAttribute(&per_sm, sm_attribute, device)) return error;
    if (cudaError_t error = cudaDeviceGetAttribute(&reserved, reserved_attribute, device))
        return error;
    if (cudaError_t error = cudaDeviceGetAttribute(&limit, limit_attribute, device)) return error;
    const int equal_part = (per_sm / blocks - reserved) / 128 * 128;
    *bytes = equal_part < limit ? equal_part : limit;
    return cudaSuccess;
}

template <int BLOCKS>  // per SM; 0 for as many as fit
cudaError_t launch(const float* in, float* out, float factor, int n, cudaStream_t stream) {
    if ((reinterpret_cast<uintptr_t>(in) | reinterpret_cast<uintptr_t>(out)) % 16)
        return cudaErrorMisalignedAddress;
    if (n % 4) return cudaErrorInvalidValue;
    int device, sms, resident;
    const auto sm_count = cudaDevAttrMultiProcessorCount;
    if (cudaError_t error = cudaGetDevice(&device)) return error;
    if (cudaError_t error = cudaDeviceGetAttribute(&sms, sm_count, device)) return error;

    const auto kernel = scale<BLOCKS>;
    size_t shared = 0;
    if constexpr (BLOCKS > 0) {
        const auto limit = cudaFuncAttributeMaxDynamicSharedMemorySize;
        const auto carveout = cudaFuncAttributePreferredSharedMemoryCarveout;
        if (cudaError_t error = shared_bytes_for(BLOCKS, device, &shared)) return error;
        if (cudaError_t error = cudaFuncSetAttribute(kernel, limit, int(shared))) return error;
        if (cudaError_t error =
                cudaFuncSetAttribute(kernel, carveout, cudaSharedmemCarveoutMaxShared))
            return error;
    }
    if (cudaError_t error =
            cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, THREADS, shared))
        return error;
    if (BLOCKS > 0 && resident != BLOCKS) return cudaErrorInvalidConfiguration;
    kernel<<<resident * sms, THREADS, shared, stream>>>(
        reinterpret_cast<const float4*>(in), reinterpret_cast<float4*>(out), factor, n / 4);
    return cudaGetLastError();
}

extern "C" cudaError_t eighth(const float* in, float* out, float factor, int n,
                              cudaStream_t stream) {
    return launch<1>(in, out, factor, n, stream);
}

extern "C" cudaError_t quarter(const float* in, float* out, float factor, int n,
                               cudaStream_t stream) {
    return launch<2>(in, out, factor, n, stream);
}

extern "C" cudaError_t half(const float* in, float* out, float factor, int n,
                            cudaStream_t stream) {
    return launch<4>(in, out, factor, n, stream);
}

extern "C" cudaError_t full(const float* in, float* out, float factor, int n,
                            cudaStream_t stream) {
    return launch<0>(in, out, factor, n, stream);
}
