// Scaling n floats with one, two, four or all possible blocks of 256 threads on a multiprocessor.
//
// A thread reads 16 bytes, multiplies, writes, and goes on to its next 16: it spends nearly all its
// time waiting for memory, and the multiprocessor has work only as long as other warps are
// resident. How many there may be is decided by what a block asks for: registers, threads, shared
// memory. Here it is shared memory that is asked for and never used, as when a kernel reserves for
// the largest case. The kernel, the block and the number of bytes that move are the same in every
// rung:
//
//   eighth   one block has all of a multiprocessor's shared memory: 8 warps of 64, 12.5 %
//   quarter  two blocks share it
//   half     four blocks
//   full     nothing is asked for: as many blocks as threads and registers allow
//
// The grid is just the blocks that are resident at once; each walks over the array.

#include <cstdint>
#include <cuda_runtime.h>

constexpr int THREADS = 256;

template <int BLOCKS>  // a multiprocessor: settings of shared memory belong to a kernel
__global__ void __launch_bounds__(THREADS) scale(const float4* in, float4* out, float by,
                                                 size_t n) {
    const size_t threads = size_t(gridDim.x) * THREADS;
#pragma unroll 1  // one load in flight a thread: the others must come from other warps
    for (size_t i = size_t(blockIdx.x) * THREADS + threadIdx.x; i < n; i += threads) {
        const float4 v = in[i];
        out[i] = make_float4(v.x * by, v.y * by, v.z * by, v.w * by);
    }
}

// Shared memory that a block must ask for so that `blocks` share a multiprocessor's.
cudaError_t share(int blocks, int device, size_t* bytes) {
    int all, reserved, most;
    const auto of_all = cudaDevAttrMaxSharedMemoryPerMultiprocessor;
    const auto of_system = cudaDevAttrReservedSharedMemoryPerBlock;
    const auto of_block = cudaDevAttrMaxSharedMemoryPerBlockOptin;
    if (cudaError_t error = cudaDeviceGetAttribute(&all, of_all, device)) return error;
    if (cudaError_t error = cudaDeviceGetAttribute(&reserved, of_system, device)) return error;
    if (cudaError_t error = cudaDeviceGetAttribute(&most, of_block, device)) return error;
    const int fair = (all / blocks - reserved) / 128 * 128;
    *bytes = fair < most ? fair : most;
    return cudaSuccess;
}

template <int BLOCKS>  // 0 for as many as there is room for
cudaError_t launch(const float* in, float* out, float by, int n, cudaStream_t stream) {
    if ((reinterpret_cast<uintptr_t>(in) | reinterpret_cast<uintptr_t>(out)) % 16)
        return cudaErrorMisalignedAddress;
    if (n % 4) return cudaErrorInvalidValue;
    int device, multiprocessors, resident;
    const auto count = cudaDevAttrMultiProcessorCount;
    if (cudaError_t error = cudaGetDevice(&device)) return error;
    if (cudaError_t error = cudaDeviceGetAttribute(&multiprocessors, count, device)) return error;

    const auto kernel = scale<BLOCKS>;
    size_t shared = 0;
    if constexpr (BLOCKS > 0) {
        const auto limit = cudaFuncAttributeMaxDynamicSharedMemorySize;
        const auto carveout = cudaFuncAttributePreferredSharedMemoryCarveout;
        if (cudaError_t error = share(BLOCKS, device, &shared)) return error;
        if (cudaError_t error = cudaFuncSetAttribute(kernel, limit, int(shared))) return error;
        if (cudaError_t error =
                cudaFuncSetAttribute(kernel, carveout, cudaSharedmemCarveoutMaxShared))
            return error;
    }
    if (cudaError_t error =
            cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, THREADS, shared))
        return error;
    if (BLOCKS > 0 && resident != BLOCKS) return cudaErrorInvalidConfiguration;
    kernel<<<resident * multiprocessors, THREADS, shared, stream>>>(
        reinterpret_cast<const float4*>(in), reinterpret_cast<float4*>(out), by, n / 4);
    return cudaGetLastError();
}

extern "C" cudaError_t eighth(const float* in, float* out, float by, int n, cudaStream_t stream) {
    return launch<1>(in, out, by, n, stream);
}

extern "C" cudaError_t quarter(const float* in, float* out, float by, int n, cudaStream_t stream) {
    return launch<2>(in, out, by, n, stream);
}

extern "C" cudaError_t half(const float* in, float* out, float by, int n, cudaStream_t stream) {
    return launch<4>(in, out, by, n, stream);
}

extern "C" cudaError_t full(const float* in, float* out, float by, int n, cudaStream_t stream) {
    return launch<0>(in, out, by, n, stream);
}
