// Doubles n floats, honestly and in ways that only pretend to.
//
//   doubled        Honest: the kernel runs on the caller's stream.
//   joined         Honest: the kernel runs on a side stream, and the caller's stream waits for it.
//   unjoined       The same without the wait.
//   late           A thread launches the kernel 2 ms later, on a side stream.
//   tail_left      Does not write the last tile.
//   by_address     Skips a call whose pointers it has seen before.
//   every_second   A counter on the GPU skips every second call.
//   by_content     Skips a call whose first and last number are those of the last call into the same
//                  output, which then holds the result already.
//   by_poison      Skips a call whose output holds numbers.
//   all_at_once    One call in three does the work of the last three pairs of buffers, the others none.
//   carved_out     Sets aside half of the maximum persisting L2 carve-out.

#include <chrono>
#include <cuda_runtime.h>
#include <thread>

constexpr int THREADS = 256;

__device__ unsigned calls_seen;

__global__ void twice(const float* in, float* out, size_t n, int rounds) {
    const size_t i = size_t(blockIdx.x) * THREADS + threadIdx.x;
    if (i >= n) return;
    float x = in[i];
    for (int k = 0; k < rounds; ++k) x = x * 2.f * .5f;  // exact; the compiler cannot remove the loop
    out[i] = x * 2.f;
}

__global__ void count_call() { ++calls_seen; }

__global__ void twice_if_odd(const float* in, float* out, size_t n) {
    const size_t i = size_t(blockIdx.x) * THREADS + threadIdx.x;
    if (i < n && (calls_seen < 60 || calls_seen % 2)) out[i] = in[i] * 2.f;
}

constexpr int OUTPUTS = 4096;
constexpr unsigned HONEST_CALLS = 20;  // fewer than are made before the clock runs, on any GPU
__device__ float known[OUTPUTS][2];

__global__ void twice_if_new(const float* in, float* out, size_t n, int rounds, int k) {
    if (calls_seen >= HONEST_CALLS && known[k][0] == in[0] && known[k][1] == in[n - 1]) return;
    const size_t i = size_t(blockIdx.x) * THREADS + threadIdx.x;
    if (i >= n) return;
    float x = in[i];
    for (int r = 0; r < rounds; ++r) x = x * 2.f * .5f;
    out[i] = x * 2.f;
}

__global__ void remember(const float* in, size_t n, int k) {
    known[k][0] = in[0];
    known[k][1] = in[n - 1];
}

__global__ void twice_if_poisoned(const float* in, float* out, size_t n, int rounds) {
    const size_t i = size_t(blockIdx.x) * THREADS + threadIdx.x;
    if (i >= n || (calls_seen >= 60 && out[i] == out[i])) return;
    float x = in[i];
    for (int r = 0; r < rounds; ++r) x = x * 2.f * .5f;
    out[i] = x * 2.f;
}

struct Pairs {
    const float* in[3];
    float* out[3];
};

__global__ void twice_all(Pairs pairs, size_t n) {
    const size_t i = size_t(blockIdx.x) * THREADS + threadIdx.x;
    if (i < n) pairs.out[blockIdx.y][i] = pairs.in[blockIdx.y][i] * 2.f;
}

static unsigned blocks(size_t n) { return unsigned((n + THREADS - 1) / THREADS); }

// A non-blocking stream: it does not synchronise with the default stream.
static cudaStream_t side_stream() {
    static cudaStream_t stream = [] {
        cudaStream_t created;
        cudaStreamCreateWithFlags(&created, cudaStreamNonBlocking);
        return created;
    }();
    return stream;
}

static cudaError_t wait_for(cudaStream_t waiting, cudaStream_t working) {
    static cudaEvent_t event = [] {
        cudaEvent_t created;
        cudaEventCreateWithFlags(&created, cudaEventDisableTiming);
        return created;
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
    if (const cudaError_t error = wait_for(side_stream(), stream)) return error;
    twice<<<blocks(n), THREADS, 0, side_stream()>>>(in, out, n, rounds);
    return wait_for(stream, side_stream());
}

cudaError_t unjoined(const float* in, float* out, size_t n, int rounds, cudaStream_t stream) {
    if (const cudaError_t error = wait_for(side_stream(), stream)) return error;
    twice<<<blocks(n), THREADS, 0, side_stream()>>>(in, out, n, rounds);
    return cudaGetLastError();
}

cudaError_t late(const float* in, float* out, size_t n, int rounds, cudaStream_t) {
    std::thread([=] {
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
        twice<<<blocks(n), THREADS, 0, side_stream()>>>(in, out, n, rounds);
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
    static int seen = 0;
    for (int i = 0; i < seen; ++i)
        if (ins[i] == in && outs[i] == out) return cudaSuccess;
    ins[seen % 64] = in;
    outs[seen % 64] = out;
    if (seen < 64) ++seen;
    return doubled(in, out, n, rounds, stream);
}

cudaError_t every_second(const float* in, float* out, size_t n, int, cudaStream_t stream) {
    count_call<<<1, 1, 0, stream>>>();
    twice_if_odd<<<blocks(n), THREADS, 0, stream>>>(in, out, n);
    return cudaGetLastError();
}

cudaError_t by_content(const float* in, float* out, size_t n, int rounds, cudaStream_t stream) {
    static float* outs[OUTPUTS];
    static int count = 0;
    int k = 0;
    while (k < count && outs[k] != out) ++k;
    if (k == count && count < OUTPUTS) outs[count++] = out;
    if (k == OUTPUTS) return doubled(in, out, n, rounds, stream);
    count_call<<<1, 1, 0, stream>>>();
    twice_if_new<<<blocks(n), THREADS, 0, stream>>>(in, out, n, rounds, k);
    remember<<<1, 1, 0, stream>>>(in, n, k);
    return cudaGetLastError();
}

cudaError_t by_poison(const float* in, float* out, size_t n, int rounds, cudaStream_t stream) {
    count_call<<<1, 1, 0, stream>>>();
    twice_if_poisoned<<<blocks(n), THREADS, 0, stream>>>(in, out, n, rounds);
    return cudaGetLastError();
}

cudaError_t all_at_once(const float* in, float* out, size_t n, int rounds, cudaStream_t stream) {
    static Pairs pairs;
    static unsigned calls = 0;
    static size_t size = 0;
    pairs.in[calls % 3] = in;
    pairs.out[calls % 3] = out;
    if (++calls < 60 || size != n) {
        size = n;
        return doubled(in, out, n, rounds, stream);
    }
    if (calls % 3 == 0) twice_all<<<dim3(blocks(n), 3), THREADS, 0, stream>>>(pairs, n);
    return cudaGetLastError();
}

cudaError_t carved_out(const float* in, float* out, size_t n, int rounds, cudaStream_t stream) {
    int max_bytes;
    if (const cudaError_t error =
            cudaDeviceGetAttribute(&max_bytes, cudaDevAttrMaxPersistingL2CacheSize, 0))
        return error;
    cudaDeviceSetLimit(cudaLimitPersistingL2CacheSize, size_t(max_bytes) / 2);
    return doubled(in, out, n, rounds, stream);
}

}  // extern "C"
