// A small MLP for each of n points (4 inputs, two hidden layers of 32, 4 outputs): where are its
// 1280 weights, and how often does a thread load them?
//
// A thread evaluates whole points, with both hidden layers in registers, so memory sees only 16
// bytes in and 16 bytes out per point. All lanes of a warp need the same weight at the same time.
//
//   global         Each weight comes from global memory, four per 16-byte load. All lanes have the
//                  same address and the weights stay in the L1 cache: one load per four FMAs, and
//                  each waits for the latency of the L1.
//   shared         Each block first copies the weights to shared memory, which has a shorter
//                  latency and needs no tag lookup. There are as many loads as before.
//   shared_2       A thread evaluates two points, and uses each weight twice: one load per eight
//                  FMAs. The points are independent, so their FMAs fill each other's latency too
//                  (instruction-level parallelism).
//   constant_2     Two points per thread, and the weights in constant memory. All lanes have one
//                  address, so a weight is loaded once per warp: on Hopper into a uniform register
//                  from which FMAs take it. The weights are copied there first, in each call.
//
// The order of the additions is the same in all rungs, so the results are bit-identical.

#include <cstdint>
#include <cuda_runtime.h>

constexpr int THREADS = 128;
constexpr int INPUTS = 4, HIDDEN = 32, OUTPUTS = 4;
constexpr int PART = 16;  // elements of the second hidden layer that are live at a time
constexpr int WEIGHTS = INPUTS * HIDDEN + HIDDEN * HIDDEN + HIDDEN * OUTPUTS;

// Adds in[p] * weights to out[p], for K rows of N weights that are `pitch` floats apart.
template <int POINTS, int K, int N>
__device__ __forceinline__ void add_product(const float (&in)[POINTS][K], float (&out)[POINTS][N],
                                            const float* weights, int pitch) {
#pragma unroll
    for (int k = 0; k < K; ++k) {
#pragma unroll
        for (int j = 0; j < N; j += 4) {
            const float4 w = *reinterpret_cast<const float4*>(weights + k * pitch + j);
#pragma unroll
            for (int p = 0; p < POINTS; ++p) {
                out[p][j] = fmaf(in[p][k], w.x, out[p][j]);
                out[p][j + 1] = fmaf(in[p][k], w.y, out[p][j + 1]);
                out[p][j + 2] = fmaf(in[p][k], w.z, out[p][j + 2]);
                out[p][j + 3] = fmaf(in[p][k], w.w, out[p][j + 3]);
            }
        }
    }
}

template <int POINTS, int N>
__device__ __forceinline__ void relu(float (&x)[POINTS][N]) {
#pragma unroll
    for (int p = 0; p < POINTS; ++p)
#pragma unroll
        for (int j = 0; j < N; ++j) x[p][j] = fmaxf(x[p][j], 0.0f);
}

template <int POINTS>
__device__ __forceinline__ void mlp(const float4* in, const float* weights, float4* out, int n) {
    const float *w1 = weights, *w2 = w1 + INPUTS * HIDDEN, *w3 = w2 + HIDDEN * HIDDEN;
    const int first = blockIdx.x * THREADS * POINTS + threadIdx.x;
    float x[POINTS][INPUTS], h1[POINTS][HIDDEN] = {}, y[POINTS][OUTPUTS] = {};
#pragma unroll
    for (int p = 0; p < POINTS; ++p) {
        const int i = first + p * THREADS;
        const float4 v = i < n ? in[i] : make_float4(0, 0, 0, 0);
        x[p][0] = v.x, x[p][1] = v.y, x[p][2] = v.z, x[p][3] = v.w;
    }
    add_product(x, h1, w1, HIDDEN);
    relu(h1);
#pragma unroll
    for (int part = 0; part < HIDDEN; part += PART) {
        float h2[POINTS][PART] = {};
        add_product(h1, h2, w2 + part, HIDDEN);
        relu(h2);
        add_product(h2, y, w3 + part * OUTPUTS, OUTPUTS);
    }
#pragma unroll
    for (int p = 0; p < POINTS; ++p) {
        const int i = first + p * THREADS;
        if (i < n) out[i] = make_float4(y[p][0], y[p][1], y[p][2], y[p][3]);
    }
}

__global__ void __launch_bounds__(THREADS)
    mlp_global(const float4* in, const float* weights, float4* out, int n) {
    mlp<1>(in, weights, out, n);
}

template <int POINTS>
__global__ void __launch_bounds__(THREADS)
    mlp_shared(const float4* in, const float* weights, float4* out, int n) {
    __shared__ alignas(16) float copies[WEIGHTS];
    for (int i = threadIdx.x; i < WEIGHTS; i += THREADS) copies[i] = weights[i];
    __syncthreads();
    mlp<POINTS>(in, copies, out, n);
}

__constant__ alignas(16) float constants[WEIGHTS];

__global__ void __launch_bounds__(THREADS)
    mlp_constant(const float4* in, const float*, float4* out, int n) {
    mlp<2>(in, constants, out, n);
}

template <typename Kernel>
cudaError_t launch(Kernel kernel, int points, const float* in, const float* weights, float* out,
                   int n, cudaStream_t stream) {
    if ((reinterpret_cast<uintptr_t>(in) | reinterpret_cast<uintptr_t>(weights) |
         reinterpret_cast<uintptr_t>(out)) % 16)
        return cudaErrorMisalignedAddress;
    const int per_block = THREADS * points;
    kernel<<<(n + per_block - 1) / per_block, THREADS, 0, stream>>>(
        reinterpret_cast<const float4*>(in), weights, reinterpret_cast<float4*>(out), n);
    return cudaGetLastError();
}

extern "C" cudaError_t global(const float* in, const float* weights, float* out, int n,
                              cudaStream_t stream) {
    return launch(mlp_global, 1, in, weights, out, n, stream);
}

extern "C" cudaError_t shared(const float* in, const float* weights, float* out, int n,
                              cudaStream_t stream) {
    return launch(mlp_shared<1>, 1, in, weights, out, n, stream);
}

extern "C" cudaError_t shared_2(const float* in, const float* weights, float* out, int n,
                                cudaStream_t stream) {
    return launch(mlp_shared<2>, 2, in, weights, out, n, stream);
}

extern "C" cudaError_t constant_2(const float* in, const float* weights, float* out, int n,
                                  cudaStream_t stream) {
    void* copies;
    if (cudaError_t error = cudaGetSymbolAddress(&copies, constants)) return error;
    if (cudaError_t error = cudaMemcpyAsync(copies, weights, sizeof(constants),
                                            cudaMemcpyDeviceToDevice, stream))
        return error;
    return launch(mlp_constant, 2, in, weights, out, n, stream);
}
