// Iterate x -> a * x + (1 - a) on eight values per thread: instruction-level parallelism (ILP).
//
// The result of an FMA is available after 4 clocks, and a warp scheduler can issue one FMA per
// clock. This grid has one warp per scheduler (128 threads per SM), so the independent FMAs that
// fill the other three issue slots must come from the same thread:
//
//   chains_1  One value at a time: each FMA waits for the one before, and 3 of 4 slots are empty.
//   chains_2  Two values at a time: two independent dependency chains.
//   chains_4  Four chains: just enough to hide the latency.
//   chains_8  Eight chains: the loop instructions and the loads of the next values come half as
//             often.
//
// All rungs apply the same FMAs to each value in the same order, so their results are
// bit-identical. Each result is stored once, after thousands of FMAs.

#include <cuda_runtime.h>

constexpr int THREADS = 128;
constexpr int VALUES = 8;  // values per thread

struct Chains1 {
    static constexpr int CHAINS = 1;
};
struct Chains2 {
    static constexpr int CHAINS = 2;
};
struct Chains4 {
    static constexpr int CHAINS = 4;
};
struct Chains8 {
    static constexpr int CHAINS = 8;
};

template <typename Rung>
__global__ void __launch_bounds__(THREADS)
    iterate(const float* in, float* out, float a, float b, int steps) {
    constexpr int CHAINS = Rung::CHAINS;
    const int first = blockIdx.x * (THREADS * VALUES) + threadIdx.x;
#pragma unroll 1  // keeps the compiler from interleaving chains itself
    for (int value = 0; value < VALUES; value += CHAINS) {
        float x[CHAINS];
        for (int k = 0; k < CHAINS; ++k) x[k] = in[first + (value + k) * THREADS];
#pragma unroll 16
        for (int step = 0; step < steps; ++step)
            for (int k = 0; k < CHAINS; ++k) x[k] = fmaf(a, x[k], b);
        for (int k = 0; k < CHAINS; ++k) out[first + (value + k) * THREADS] = x[k];
    }
}

template <typename Rung>
cudaError_t launch(const float* in, float* out, float a, int steps, int n,
                   cudaStream_t stream) {
    if (n % (THREADS * VALUES)) return cudaErrorInvalidValue;
    iterate<Rung><<<n / (THREADS * VALUES), THREADS, 0, stream>>>(in, out, a, 1 - a, steps);
    return cudaGetLastError();
}

extern "C" cudaError_t chains_1(const float* in, float* out, float a, int steps, int n,
                                cudaStream_t stream) {
    return launch<Chains1>(in, out, a, steps, n, stream);
}

extern "C" cudaError_t chains_2(const float* in, float* out, float a, int steps, int n,
                                cudaStream_t stream) {
    return launch<Chains2>(in, out, a, steps, n, stream);
}

extern "C" cudaError_t chains_4(const float* in, float* out, float a, int steps, int n,
                                cudaStream_t stream) {
    return launch<Chains4>(in, out, a, steps, n, stream);
}

extern "C" cudaError_t chains_8(const float* in, float* out, float a, int steps, int n,
                                cudaStream_t stream) {
    return launch<Chains8>(in, out, a, steps, n, stream);
}
