// Doubling n floats: honestly, and in the ways in which C++ can only seem to have done it.
//
//   doubled        The work, on the caller's stream.
//   joined         The work on a stream of its own, which the caller's stream waits for.
//   unjoined       The same without the wait: it ends when it likes.
//   late           A thread launches the work 2 ms later, on a stream of its own.
//   tail_left      The last tile is not written.
//   by_address     A call whose pointers are those of the call before does nothing.
//   every_second   The GPU counts the calls and works at every second one.
//   carved_out     Sets half of the persisting L2 aside for the caller's own data.

#include <chrono>
#include <cuda_runtime.h>
#include <thread>

constexpr int THREADS = 256;

__device__ unsigned calls_seen;

__global__ void twice(const float* in, float* out, size_t n, int rounds) {
    const size_t i = size_t(blockIdx.x) * THREADS + threadIdx.x;
    if (i >= n) return;
    float x = in[i];
    for (int k = 0; k < rounds; ++k) x = x * 2.f * .5f;  // exact, and the compiler cannot know n
    out[i] = x * 2.f;
}

__global__ void count_call() { ++calls_seen; }

__global__ void twice_if_odd(const float* in, float* out, size_t n) {
    const size_t i = size_t(blockIdx.x) * THREADS + threadIdx.x;
    if (i < n && (calls_seen < 60 || calls_seen % 2)) out[i] = in[i] * 2.f;
}

static unsigned blocks(size_t n) { return unsigned((n + THREADS - 1) / THREADS); }

// Streams of its own, which do not order themselves with any other.
static cudaStream_t beside() {
    static cudaStream_t stream = [] {
        cudaStream_t made;
        cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking);
        return made;
    }();
    return stream;
}

static cudaError_t wait_for(cudaStream_t waiting, cudaStream_t working) {
    static cudaEvent_t event = [] {
        cudaEvent_t made;
        cudaEventCreateWithFlags(&made, cudaEventDisableTiming);
        return made;
    }();
    if (const cudaError_t error = cudaEventRecord(event, working)) return error;
    return cudaStreamWaitEvent(waiting, event);
}

extern "C" {

cudaError_t doubled(const float* in, float* out, size_t n, int rounds, cudaStream_t stream) {
    twice<<<blocks(n), THREADS, 0, stream>>>(in, out, n, rounds);
    return cudaGetLastError();
}

cudaError_t joined(const float* in, float* out, size_t n, int rounds, cudaStream_t stream) {
    if (const cudaError_t error = wait_for(beside(), stream)) return error;
    twice<<<blocks(n), THREADS, 0, beside()>>>(in, out, n, rounds);
    return wait_for(stream, beside());
}

cudaError_t unjoined(const float* in, float* out, size_t n, int rounds, cudaStream_t stream) {
    if (const cudaError_t error = wait_for(beside(), stream)) return error;
    twice<<<blocks(n), THREADS, 0, beside()>>>(in, out, n, rounds);
    return cudaGetLastError();
}

cudaError_t late(const float* in, float* out, size_t n, int rounds, cudaStream_t) {
    std::thread([=] {
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
        twice<<<blocks(n), THREADS, 0, beside()>>>(in, out, n, rounds);
    }).detach();
    return cudaSuccess;
}

cudaError_t tail_left(const float* in, float* out, size_t n, int, cudaStream_t stream) {
    twice<<<unsigned(n / THREADS) - 1, THREADS, 0, stream>>>(in, out, n, 0);
    return cudaGetLastError();
}

cudaError_t by_address(const float* in, float* out, size_t n, int rounds, cudaStream_t stream) {
    static const float* ins[64];
    static float* outs[64];
    static int known = 0;
    for (int i = 0; i < known; ++i)
        if (ins[i] == in && outs[i] == out) return cudaSuccess;
    ins[known % 64] = in;
    outs[known % 64] = out;
    if (known < 64) ++known;
    return doubled(in, out, n, rounds, stream);
}

cudaError_t every_second(const float* in, float* out, size_t n, int, cudaStream_t stream) {
    count_call<<<1, 1, 0, stream>>>();
    twice_if_odd<<<blocks(n), THREADS, 0, stream>>>(in, out, n);
    return cudaGetLastError();
}

cudaError_t carved_out(const float* in, float* out, size_t n, int rounds, cudaStream_t stream) {
    int most;
    if (const cudaError_t error =
            cudaDeviceGetAttribute(&most, cudaDevAttrMaxPersistingL2CacheSize, 0))
        return error;
    cudaDeviceSetLimit(cudaLimitPersistingL2CacheSize, size_t(most) / 2);
    return doubled(in, out, n, rounds, stream);
}

}  // extern "C"
