// Squared distances of one query to n vectors of 1024 elements: out[i] = sum_j (x[i][j] - q[j])^2.
//
// Each warp keeps the query in registers and computes one distance after the other. Its lanes load
// a vector with 16-byte loads, all of them before the first is used, and add up their sums with
// shuffles. All rungs have the same number of bytes per load and vectors per warp.
//
//   floats   Elements are floats: 8 loads of 4 elements per lane and vector.
//   halves   Elements are halves, half the bytes: 4 loads of 8 elements. They are converted, and
//            the arithmetic is that of `floats`, so the results are as exact as the stored values.
//   packed   Arithmetic on pairs (half2) without a conversion: one HADD2 subtracts two elements, and
//            one HFMA2 squares and adds two. Sums of four squares are rounded to fp16, and then added
//            in fp32.

#include <cuda_fp16.h>
#include <cuda_runtime.h>

constexpr int LENGTH = 1024;  // elements per vector
constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int LOAD_BYTES = 16;

struct Floats {
    using Element = float;
    static __device__ float sum(uint4 xs, uint4 qs) {
        const auto* x = reinterpret_cast<const float*>(&xs);
        const auto* q = reinterpret_cast<const float*>(&qs);
        float sum = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) sum = fmaf(x[j] - q[j], x[j] - q[j], sum);
        return sum;
    }
};

struct Halves {
    using Element = __half;
    static __device__ float sum(uint4 xs, uint4 qs) {
        const auto* x = reinterpret_cast<const __half2*>(&xs);
        const auto* q = reinterpret_cast<const __half2*>(&qs);
        float sum = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float2 a = __half22float2(x[j]), b = __half22float2(q[j]);
            sum = fmaf(a.x - b.x, a.x - b.x, sum);
            sum = fmaf(a.y - b.y, a.y - b.y, sum);
        }
        return sum;
    }
};

struct Packed {
    using Element = __half;
    static __device__ float sum(uint4 xs, uint4 qs) {
        const auto* x = reinterpret_cast<const __half2*>(&xs);
        const auto* q = reinterpret_cast<const __half2*>(&qs);
        __half2 sums = __float2half2_rn(0);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const __half2 difference = __hsub2(x[j], q[j]);
            sums = __hfma2(difference, difference, sums);
        }
        const float2 both = __half22float2(sums);
        return both.x + both.y;
    }
};

template <typename Rung>
__global__ void __launch_bounds__(THREADS)
    squared_distances(const typename Rung::Element* x, const typename Rung::Element* query,
                      float* out, int n) {
    constexpr int LOADS = LENGTH * sizeof(*x) / LOAD_BYTES / 32;  // per lane and vector
    const int lane = threadIdx.x % 32, warps = gridDim.x * WARPS;
    uint4 q[LOADS];
    for (int k = 0; k < LOADS; ++k) q[k] = reinterpret_cast<const uint4*>(query)[k * 32 + lane];
    for (int i = blockIdx.x * WARPS + threadIdx.x / 32; i < n; i += warps) {
        const auto* from = reinterpret_cast<const uint4*>(x + size_t(i) * LENGTH);
        uint4 v[LOADS];
#pragma unroll
        for (int k = 0; k < LOADS; ++k) v[k] = from[k * 32 + lane];
        float sum = 0;
#pragma unroll
        for (int k = 0; k < LOADS; ++k) sum += Rung::sum(v[k], q[k]);
        for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
        if (lane == 0) out[i] = sum;
    }
}

// Launches as many blocks as the SMs hold at once.
template <typename Rung>
cudaError_t launch(const typename Rung::Element* x, const typename Rung::Element* query, float* out,
                   int n, cudaStream_t stream) {
    int device, sms, blocks_per_sm;
    const auto sm_count = cudaDevAttrMultiProcessorCount;
    if (cudaError_t error = cudaGetDevice(&device)) return error;
    if (cudaError_t error = cudaDeviceGetAttribute(&sms, sm_count, device)) return error;
    if (cudaError_t error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(
            &blocks_per_sm, squared_distances<Rung>, THREADS, 0))
        return error;
    squared_distances<Rung><<<sms * blocks_per_sm, THREADS, 0, stream>>>(x, query, out, n);
    return cudaGetLastError();
}

// The launchers take the same vectors and the same query in both types.

extern "C" cudaError_t floats(const float* x, const float* query, const __half*, const __half*,
                              float* out, int n, cudaStream_t stream) {
    return launch<Floats>(x, query, out, n, stream);
}

extern "C" cudaError_t halves(const float*, const float*, const __half* x, const __half* query,
                              float* out, int n, cudaStream_t stream) {
    return launch<Halves>(x, query, out, n, stream);
}

extern "C" cudaError_t packed(const float*, const float*, const __half* x, const __half* query,
                              float* out, int n, cudaStream_t stream) {
    return launch<Packed>(x, query, out, n, stream);
}
