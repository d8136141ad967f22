// Four simulations on four streams, coupled after each round.
//
// A round runs one `swing` kernel per simulation, concurrently, and then one `couple` kernel, which
// reads the results of all four and overwrites them. So it must wait for all of them, and the next
// round must wait for it. The first simulation and `couple` run on the caller's stream.
//
//   host_sync  The host waits for the device after the simulations, and again after `couple`.
//   events     The streams wait for each other's events. The host only launches.

#include <cuda_runtime.h>

constexpr int TASKS = 4;
constexpr int PENDULUMS = 8192;  // per simulation
constexpr int THREADS = 256;
constexpr int BLOCKS = PENDULUMS / THREADS;
constexpr float TIME_STEP = 0.0005f;

__global__ void swing(float* angles, int steps) {
    const int i = blockIdx.x * THREADS + threadIdx.x;
    float angle = angles[i];
#pragma unroll 1
    for (int k = 0; k < steps; ++k) angle -= TIME_STEP * sinf(angle);
    angles[i] = angle;
}

// Move each pendulum towards the mean of its four copies.
__global__ void couple(float* angles) {
    const int i = blockIdx.x * THREADS + threadIdx.x;
    float mean = 0;
    for (int task = 0; task < TASKS; ++task) mean += angles[task * PENDULUMS + i] / TASKS;
    for (int task = 0; task < TASKS; ++task) {
        float& angle = angles[task * PENDULUMS + i];
        angle = 0.9f * angle + 0.1f * mean;
    }
}

// Created once: creating streams and events costs more than using them.
struct TaskStreams {
    cudaStream_t stream[TASKS];
    cudaEvent_t coupled, finished[TASKS];

    TaskStreams() {
        cudaEventCreateWithFlags(&coupled, cudaEventDisableTiming);
        for (int task = 1; task < TASKS; ++task) {
            cudaStreamCreateWithFlags(&stream[task], cudaStreamNonBlocking);
            cudaEventCreateWithFlags(&finished[task], cudaEventDisableTiming);
        }
    }
};

cudaError_t simulate(bool on_host, const float* in, float* out, int rounds, int steps,
                     cudaStream_t stream) {
    static const TaskStreams tasks;
    cudaMemcpyAsync(out, in, TASKS * PENDULUMS * sizeof(float), cudaMemcpyDeviceToDevice, stream);
    for (int round = 0; round < rounds; ++round) {
        if (on_host) cudaDeviceSynchronize();  // the copy, or `couple`, is complete
        else cudaEventRecord(tasks.coupled, stream);
        for (int task = 1; task < TASKS; ++task) {
            if (!on_host) cudaStreamWaitEvent(tasks.stream[task], tasks.coupled);
            swing<<<BLOCKS, THREADS, 0, tasks.stream[task]>>>(out + task * PENDULUMS, steps);
            if (!on_host) cudaEventRecord(tasks.finished[task], tasks.stream[task]);
        }
        swing<<<BLOCKS, THREADS, 0, stream>>>(out, steps);
        if (on_host) cudaDeviceSynchronize();
        else for (int task = 1; task < TASKS; ++task)
            cudaStreamWaitEvent(stream, tasks.finished[task]);
        couple<<<BLOCKS, THREADS, 0, stream>>>(out);
    }
    return cudaGetLastError();
}

extern "C" cudaError_t host_sync(const float* in, float* out, int rounds, int steps,
                                 cudaStream_t stream) {
    return simulate(true, in, out, rounds, steps, stream);
}

extern "C" cudaError_t events(const float* in, float* out, int rounds, int steps,
                              cudaStream_t stream) {
    return simulate(false, in, out, rounds, steps, stream);
}
