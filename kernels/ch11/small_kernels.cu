// Sixteen small simulations that know nothing of each other: running them side by side.
//
// Each lets 2048 pendulums swing down for a number of steps, 8 blocks of 256 threads. A step needs
// the one before, so that a simulation takes its time however large the GPU is, and 8 blocks leave
// all but 8 of its multiprocessors idle.
//
//   one_stream  16 kernels one after the other: a stream keeps their order, needed or not.
//   streams     A stream for each. Events tie them to the caller's stream: all wait for what it did
//               before (fork), and it waits for all of them (join). Launches come first and the
//               joins' events last: streams share a few hardware queues, and an event in one of
//               them holds up whatever is queued behind it. When the caller captures a graph, fork
//               and join become its edges, and the kernels 16 branches.
//   one_grid    Where the kernels are the same, a second dimension of one grid does it all: no
//               streams, no events, one launch.

#include <cuda_runtime.h>

constexpr int TASKS = 16;
constexpr int BLOCKS = 8;  // of a task
constexpr int THREADS = 256;
constexpr int PENDULUMS = BLOCKS * THREADS;
constexpr float STEP = 5e-4f;

__global__ void swing(const float* in, float* out, int steps) {
    const int i = (blockIdx.y * BLOCKS + blockIdx.x) * THREADS + threadIdx.x;
    float angle = in[i];
#pragma unroll 1
    for (int k = 0; k < steps; ++k) angle -= STEP * sinf(angle);
    out[i] = angle;
}

void launch(int task, const float* in, float* out, int steps, cudaStream_t stream) {
    const int first = task * PENDULUMS;
    swing<<<BLOCKS, THREADS, 0, stream>>>(in + first, out + first, steps);
}

// Streams and events that stay: to create them costs more than to use them.
struct Lanes {
    cudaStream_t lane[TASKS];
    cudaEvent_t fork, join[TASKS];

    Lanes() {
        cudaEventCreateWithFlags(&fork, cudaEventDisableTiming);
        for (int task = 0; task < TASKS; ++task) {
            cudaStreamCreateWithFlags(&lane[task], cudaStreamNonBlocking);
            cudaEventCreateWithFlags(&join[task], cudaEventDisableTiming);
        }
    }
};

extern "C" cudaError_t one_stream(const float* in, float* out, int steps, cudaStream_t stream) {
    for (int task = 0; task < TASKS; ++task) launch(task, in, out, steps, stream);
    return cudaGetLastError();
}

extern "C" cudaError_t streams(const float* in, float* out, int steps, cudaStream_t stream) {
    static const Lanes lanes;
    cudaEventRecord(lanes.fork, stream);
    for (int task = 0; task < TASKS; ++task) {
        cudaStreamWaitEvent(lanes.lane[task], lanes.fork);
        launch(task, in, out, steps, lanes.lane[task]);
    }
    for (int task = 0; task < TASKS; ++task) cudaEventRecord(lanes.join[task], lanes.lane[task]);
    for (int task = 0; task < TASKS; ++task) cudaStreamWaitEvent(stream, lanes.join[task]);
    return cudaGetLastError();
}

extern "C" cudaError_t one_grid(const float* in, float* out, int steps, cudaStream_t stream) {
    swing<<<dim3(BLOCKS, TASKS), THREADS, 0, stream>>>(in, out, steps);
    return cudaGetLastError();
}
