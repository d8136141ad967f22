// Scratch memory for each step of a computation, from cudaMalloc or from a stream-ordered pool.
//
// Each row is smoothed twice through a scratch buffer that is allocated and freed per row, as in a
// library that does not know its caller's next request. The launcher waits for the stream at the
// end, because the caller needs the result.
//
//   malloc_free  cudaMalloc maps physical memory. cudaFree waits until the whole GPU is idle and
//                unmaps it, so the host cannot launch ahead.
//   pool         cudaMallocFromPoolAsync and cudaFreeAsync are stream-ordered: a row reuses the
//                memory that the row before freed, without waiting. The default release threshold
//                is 0, so each synchronisation returns unused memory to the system, and the next
//                call maps it again.
//   retained     The same pool with the maximum release threshold: it keeps its memory, and nothing
//                is mapped after the first call.
//
// The alternative is a framework's caching allocator: it keeps freed memory and reuses it within a
// stream, without calling the driver. `smooth_row` smooths one row; its caller passes the scratch
// memory and waits.

#include <cstdint>
#include <cuda_runtime.h>

constexpr int THREADS = 256;

__global__ void smooth(const float* in, float* out, int n) {
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= n) return;
    const float left = in[i ? i - 1 : n - 1], right = in[i + 1 < n ? i + 1 : 0];
    out[i] = (left + in[i] + right) * (1 / 3.f);
}

cudaError_t smooth_twice(const float* in, float* scratch, float* out, int n, cudaStream_t stream) {
    const int blocks = (n + THREADS - 1) / THREADS;
    smooth<<<blocks, THREADS, 0, stream>>>(in, scratch, n);
    smooth<<<blocks, THREADS, 0, stream>>>(scratch, out, n);
    return cudaGetLastError();
}

template <typename Allocate, typename Free>
cudaError_t smooth_rows(const float* in, float* out, int rows, int n, cudaStream_t stream,
                        Allocate allocate, Free free) {
    for (int row = 0; row < rows; ++row) {
        const size_t first = size_t(row) * n;
        void* memory;
        if (const cudaError_t error = allocate(&memory, n * sizeof(float))) return error;
        auto* scratch = static_cast<float*>(memory);
        if (const cudaError_t error = smooth_twice(in + first, scratch, out + first, n, stream))
            return error;
        if (const cudaError_t error = free(memory)) return error;
    }
    return cudaStreamSynchronize(stream);
}

// A memory pool of the current device that keeps up to `threshold` bytes at a synchronisation.
struct Pool {
    cudaMemPool_t handle = nullptr;
    cudaError_t status;

    explicit Pool(uint64_t threshold) {
        cudaMemPoolProps props = {};
        props.allocType = cudaMemAllocationTypePinned;
        props.location.type = cudaMemLocationTypeDevice;
        status = cudaGetDevice(&props.location.id);
        if (!status) status = cudaMemPoolCreate(&handle, &props);
        if (!status)
            status = cudaMemPoolSetAttribute(handle, cudaMemPoolAttrReleaseThreshold, &threshold);
    }
};

cudaError_t smooth_rows_from(const Pool& pool, const float* in, float* out, int rows, int n,
                             cudaStream_t stream) {
    if (pool.status) return pool.status;
    return smooth_rows(
        in, out, rows, n, stream,
        [&](void** memory, size_t bytes) {
            return cudaMallocFromPoolAsync(memory, bytes, pool.handle, stream);
        },
        [&](void* memory) { return cudaFreeAsync(memory, stream); });
}

extern "C" cudaError_t malloc_free(const float* in, float* out, int rows, int n,
                                   cudaStream_t stream) {
    return smooth_rows(
        in, out, rows, n, stream,
        [](void** memory, size_t bytes) { return cudaMalloc(memory, bytes); },
        [](void* memory) { return cudaFree(memory); });
}

extern "C" cudaError_t pool(const float* in, float* out, int rows, int n, cudaStream_t stream) {
    static const Pool releasing(0);
    return smooth_rows_from(releasing, in, out, rows, n, stream);
}

extern "C" cudaError_t retained(const float* in, float* out, int rows, int n,
                                cudaStream_t stream) {
    static const Pool retaining(UINT64_MAX);
    return smooth_rows_from(retaining, in, out, rows, n, stream);
}

extern "C" cudaError_t smooth_row(const float* in, float* scratch, float* out, int n,
                                  cudaStream_t stream) {
    return smooth_twice(in, scratch, out, n, stream);
}
