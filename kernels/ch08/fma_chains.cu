// Eight values a thread, each of them iterated x -> a * x + (1 - a), a few at a time.
//
// An FMA takes 4 clocks until its result can be used, and a scheduler can issue one each clock.
// With a single warp on each scheduler (128 threads on a multiprocessor, as this grid has) the
// other three must come from the same thread:
//
//   chains_1  One value after the other: each FMA waits for the last. 3 of 4 issue slots are empty.
//   chains_2  Two values side by side: their FMAs do not depend on each other.
//   chains_4  Four: just enough to come near a full pipe.
//   chains_8  Eight: nearer. The loop's own instructions, and the wait for the next values from
//             memory, come half as often.
//
// All rungs do the same FMAs on the same values, in the same order for each value, so their results
// are equal to the last bit. The results go to memory once in thousands of FMAs.

#include <cuda_runtime.h>

constexpr int THREADS = 128;
constexpr int VALUES = 8;  // a thread

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

template <typename Way>
__global__ void __launch_bounds__(THREADS)
    iterate(const float* in, float* out, float a, float b, int steps) {
    constexpr int CHAINS = Way::CHAINS;
    const int first = blockIdx.x * (THREADS * VALUES) + threadIdx.x;
#pragma unroll 1  // the compiler must not put chains side by side itself
    for (int done = 0; done < VALUES; done += CHAINS) {
        float x[CHAINS];
        for (int k = 0; k < CHAINS; ++k) x[k] = in[first + (done + k) * THREADS];
#pragma unroll 16
        for (int step = 0; step < steps; ++step)
            for (int k = 0; k < CHAINS; ++k) x[k] = fmaf(a, x[k], b);
        for (int k = 0; k < CHAINS; ++k) out[first + (done + k) * THREADS] = x[k];
    }
}

template <typename Way>
cudaError_t launch(const float* in, float* out, float a, int steps, int n,
                   cudaStream_t stream) {
    if (n % (THREADS * VALUES)) return cudaErrorInvalidValue;
    iterate<Way><<<n / (THREADS * VALUES), THREADS, 0, stream>>>(in, out, a, 1 - a, steps);
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
