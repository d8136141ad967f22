// Squared distances of one query to n vectors of 1024 elements: out[i] = sum_j (x[i][j] - q[j])^2.
//
// Each warp keeps the query in registers and computes distances. Its lanes load vectors with 16-byte
// loads, eight before the first is used, and add up their sums with shuffles. All rungs have the same
// number of warps, so they have the same bytes in flight:
//
//   floats   Elements are floats, four per load: a vector takes eight loads per lane.
//   halves   Elements are halves, eight per load: the eight loads are two vectors. Elements are
//            converted, and the arithmetic is that of `floats`, so the results are as exact as the
//            stored values.
//   packed   Arithmetic on pairs (half2) without a conversion: one HADD2 subtracts two elements, and
//            one HFMA2 squares and adds two. Sums of four squares are rounded to fp16, and then added
//            in fp32.

#include <cuda_fp16.h>
#include <cuda_runtime.h>

constexpr int LENGTH = 1024;  // elements per vector
constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int LOAD_BYTES = 16;
constexpr int LOADS = 8;          // in flight per lane
constexpr int BLOCKS_PER_SM = 3;  // leaves 80 registers per thread, which `halves` takes

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
__global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    squared_distances(const typename Rung::Element* x, const typename Rung::Element* query,
                      float* out, int n) {
    constexpr int PARTS = LENGTH * sizeof(*x) / LOAD_BYTES / 32;  // loads per lane and vector
    constexpr int VECTORS = LOADS / PARTS;                        // loaded together
    const int lane = threadIdx.x % 32, warp = blockIdx.x * WARPS + threadIdx.x / 32;
    uint4 q[PARTS];
    for (int k = 0; k < PARTS; ++k) q[k] = reinterpret_cast<const uint4*>(query)[k * 32 + lane];
    for (int first = warp * VECTORS; first < n; first += gridDim.x * WARPS * VECTORS) {
        const auto* from = reinterpret_cast<const uint4*>(x + size_t(first) * LENGTH) + lane;
        uint4 parts[VECTORS][PARTS];
#pragma unroll
        for (int v = 0; v < VECTORS; ++v)
#pragma unroll
            for (int k = 0; k < PARTS; ++k)
                if (first + v < n) parts[v][k] = from[(v * PARTS + k) * 32];
        float sums[VECTORS] = {};
#pragma unroll
        for (int v = 0; v < VECTORS; ++v)
#pragma unroll
            for (int k = 0; k < PARTS; ++k) sums[v] += Rung::sum(parts[v][k], q[k]);
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            for (int step = 16; step > 0; step /= 2) sums[v] += __shfl_xor_sync(~0u, sums[v], step);
            if (lane == 0 && first + v < n) out[first + v] = sums[v];
        }
    }
}

template <typename Rung>
cudaError_t launch(const typename Rung::Element* x, const typename Rung::Element* query, float* out,
                   int n, cudaStream_t stream) {
    int device, sms;
    const auto sm_count = cudaDevAttrMultiProcessorCount;
    if (cudaError_t error = cudaGetDevice(&device)) return error;
    if (cudaError_t error = cudaDeviceGetAttribute(&sms, sm_count, device)) return error;
    squared_distances<Rung><<<sms * BLOCKS_PER_SM, THREADS, 0, stream>>>(x, query, out, n);
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
