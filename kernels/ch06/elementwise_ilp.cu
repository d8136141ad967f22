// A polynomial of each of n floats: how many elements a thread works on at once.
//
// An element is a chain in which everything waits for what came before: load, eight dependent FMAs
// (Horner), store. A thread waits for its chain, and only other chains fill the gaps: those of
// other warps (occupancy), or more elements of the same thread (instruction-level parallelism).
//
//   one    One element a thread, as one writes it first. A full multiprocessor has 2048 loads of 4
//          bytes in flight: 8 KiB, too little for fast memory (rate = bytes in flight / latency).
//   two    Each thread loads all of its elements before the first is needed, then computes, then
//   four   stores. The elements do not depend on each other, so their loads are in flight together,
//   eight  and the FMAs of one fill the four clocks that the next FMA of another must wait.
//
// An element stays 4 bytes wide and the lanes stay on neighbouring floats: nothing is coalesced
// better than in "one". (Wider accesses put as many bytes in flight with fewer instructions:
// ch07/copy.cu.) Loads must come first in the source: no compiler may move a load above a store
// that could write to the same place.

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

// The first nine terms of exp(x): each step needs the one before it.
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

template <typename Thread>
__global__ void evaluate(const float* in, float* out, size_t n) {
    constexpr int ELEMENTS = Thread::ELEMENTS;
    const size_t begin = size_t(blockIdx.x) * (THREADS * ELEMENTS);
    if (begin + THREADS * ELEMENTS > n) {  // what is left over after the last whole chunk
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

template <typename Thread>
cudaError_t launch(const float* in, float* out, size_t n, cudaStream_t stream) {
    const size_t blocks = n / (THREADS * Thread::ELEMENTS) + 1;  // the last one has the rest
    evaluate<Thread><<<blocks, THREADS, 0, stream>>>(in, out, n);
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
