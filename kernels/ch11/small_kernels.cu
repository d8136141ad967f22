// Sixteen small independent simulations, run one after the other or at the same time.
//
// Each simulates 2048 pendulums for a number of time steps with 8 blocks of 256 threads. A step
// depends on the one before, so the steps cannot run in parallel, and 8 blocks occupy only 8 SMs.
//
//   one_stream  16 kernels in one stream, which runs them in order.
//   streams     One stream per simulation. Events fork them from the caller's stream (each waits
//               for the caller's earlier work) and join them (the caller's stream waits for all).
//               All launches come before the join events: streams share a few hardware queues (8 by
//               default, CUDA_DEVICE_MAX_CONNECTIONS), and a waiting event blocks the work queued
//               behind it. Captured as a CUDA graph, fork and join become edges, and the kernels
//               become 16 branches.
//   one_grid    The kernels are identical, so the y dimension of one grid replaces the streams: one
//               launch, no events.

#include <cuda_runtime.h>

constexpr int TASKS = 16;
constexpr int BLOCKS = 8;  // per simulation
constexpr int THREADS = 256;
constexpr int PENDULUMS = BLOCKS * THREADS;
constexpr float TIME_STEP = 5e-4f;

__global__ void swing(const float* in, float* out, int steps) {
    const int i = (blockIdx.y * BLOCKS + blockIdx.x) * THREADS + threadIdx.x;
    float angle = in[i];
#pragma unroll 1
    for (int k = 0; k < steps; ++k) angle -= TIME_STEP * sinf(angle);
    out[i] = angle;
}

void launch(int task, const float* in, float* out, int steps, cudaStream_t stream) {
    const int first = task * PENDULUMS;
    swing<<<BLOCKS, THREADS, 0, stream>>>(in + first, out + first, steps);
}

// Streams and events are created once: creating them costs more than using them.
struct TaskStreams {
    cudaStream_t stream[TASKS];
    cudaEvent_t fork, join[TASKS];

    TaskStreams() {
        cudaEventCreateWithFlags(&fork, cudaEventDisableTiming);
        for (int task = 0; task < TASKS; ++task) {
            cudaStreamCreateWithFlags(&stream[task], cudaStreamNonBlocking);
            cudaEventCreateWithFlags(&join[task], cudaEventDisableTiming);
        }
    }
};

extern "C" cudaError_t one_stream(const float* in, float* out, int steps, cudaStream_t stream) {
    for (int task = 0; task < TASKS; ++task) launch(task, in, out, steps, stream);
    return cudaGetLastError();
}

extern "C" cudaError_t streams(const float* in, float* out, int steps, cudaStream_t stream) {
    static const TaskStreams tasks;
    cudaEventRecord(tasks.fork, stream);
    for (int task = 0; task < TASKS; ++task) {
        cudaStreamWaitEvent(tasks.stream[task], tasks.fork);
        launch(task, in, out, steps, tasks.stream[task]);
    }
    for (int task = 0; task < TASKS; ++task) cudaEventRecord(tasks.join[task], tasks.stream[task]);
    for (int task = 0; task < TASKS; ++task) cudaStreamWaitEvent(stream, tasks.join[task]);
    return cudaGetLastError();
}

extern "C" cudaError_t one_grid(const float* in, float* out, int steps, cudaStream_t stream) {
    swing<<<dim3(BLOCKS, TASKS), THREADS, 0, stream>>>(in, out, steps);
    return cudaGetLastError();
}
