// Evaluates a polynomial of each of n floats, with one, two, four or eight elements per thread.
//
// One element is a dependent chain: load, eight FMAs (Horner's scheme), store. While a thread waits
// for its chain, only other chains can use the SM: those of other warps (occupancy) or of other
// elements of the same thread (instruction-level parallelism, ILP).
//
//   one    One element per thread, the obvious kernel. A fully occupied SM has at most 2048 4-byte
//          loads in flight: 8 KiB, too little for fast memory (bandwidth = bytes in flight /
//          latency).
//   two    Each thread loads all of its elements before it uses the first, then computes, then
//   four   stores. The elements are independent, so their loads are in flight together, and the
//   eight  FMAs of one element fill the latency between those of another; but here memory sets the
//          time (ch08/fma_chains.cu has FMAs alone).
//
// Every access stays 4 bytes wide and neighbouring lanes access neighbouring floats, so coalescing
// is the same in all rungs. (Wider accesses reach as many bytes in flight with fewer instructions:
// ch07/copy.cu.) The source issues all loads before the first store, because the compiler may not
// move a load above a store that could alias it.

#include <cuda_runtime.h>

constexpr int THREADS = 256;

struct One {
    static constexpr int ELEMENTS = 1;
};
struct Two {
    static constexpr int ELEMENTS = 2;
};
struct Four {
    static constexpr int ELEMENTS = 4;
};
struct Eight {
    static constexpr int ELEMENTS = 8;
};

// The first nine terms of exp(x). Each FMA needs the result of the one before it.
__device__ float polynomial(float x) {
    float y = 1.0f / 40320;
    y = fmaf(y, x, 1.0f / 5040);
    y = fmaf(y, x, 1.0f / 720);
    y = fmaf(y, x, 1.0f / 120);
    y = fmaf(y, x, 1.0f / 24);
    y = fmaf(y, x, 1.0f / 6);
    y = fmaf(y, x, 1.0f / 2);
    y = fmaf(y, x, 1.0f);
    return fmaf(y, x, 1.0f);
}

template <typename Rung>
__global__ void evaluate(const float* in, float* out, size_t n) {
    constexpr int ELEMENTS = Rung::ELEMENTS;
    const size_t begin = size_t(blockIdx.x) * (THREADS * ELEMENTS);
    if (begin + THREADS * ELEMENTS > n) {  // the remainder after the last whole chunk
#pragma unroll 1
        for (size_t i = begin + threadIdx.x; i < n; i += THREADS) out[i] = polynomial(in[i]);
        return;
    }
    const float* from = in + begin + threadIdx.x;
    float* to = out + begin + threadIdx.x;
    float x[ELEMENTS];
    for (int k = 0; k < ELEMENTS; ++k) x[k] = from[k * THREADS];
    for (int k = 0; k < ELEMENTS; ++k) x[k] = polynomial(x[k]);
    for (int k = 0; k < ELEMENTS; ++k) to[k * THREADS] = x[k];
}

template <typename Rung>
cudaError_t launch(const float* in, float* out, size_t n, cudaStream_t stream) {
    const size_t blocks = n / (THREADS * Rung::ELEMENTS) + 1;  // the last block takes the remainder
    evaluate<Rung><<<blocks, THREADS, 0, stream>>>(in, out, n);
    return cudaGetLastError();
}

extern "C" cudaError_t one(const float* in, float* out, int n, cudaStream_t stream) {
    return launch<One>(in, out, n, stream);
}

extern "C" cudaError_t two(const float* in, float* out, int n, cudaStream_t stream) {
    return launch<Two>(in, out, n, stream);
}

extern "C" cudaError_t four(const float* in, float* out, int n, cudaStream_t stream) {
    return launch<Four>(in, out, n, stream);
}

extern "C" cudaError_t eight(const float* in, float* out, int n, cudaStream_t stream) {
    return launch<Eight>(in, out, n, stream);
}
