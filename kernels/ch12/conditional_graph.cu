// Iterate until convergence, with the decision about the next step on the host or on the GPU.
//
// x solves x + sin(x) / 2 = b per element with small damped steps from 0, until the largest
// residual is at most `tolerance`: hundreds of steps of less than 2 microseconds each, whose number
// depends on the data. One kernel performs one step. Its last block to finish reduces the blocks' results to a
// flag (whether another step is needed) and publishes it:
//
//   host_poll    (baseline, poll_every_8) To device memory. The host copies the flag back and waits
//                after every `burst` steps, then launches more. With a burst of 1, each step pays
//                for a launch, a copy and a host wake-up. In a longer burst, steps are guarded:
//                they return at once if an earlier one has converged.
//   mapped_flag  To mapped pinned host memory, which saves the copy. The host still waits for each
//                step.
//   build_graph  (while_node, while_8_steps) To the condition of a WHILE node in a CUDA graph,
//                whose body is a burst of steps. The GPU decides, and the host launches one graph.
//                Each pass through the body costs a few microseconds besides its kernels, which a
//                burst of guarded steps divides.
//   late_poll    (library arm) To device memory. A graph of a burst of guarded steps ends with a
//                copy of the flag to the host (`build_burst`). The host launches a burst before it
//                reads the flag of the one before, so the GPU does not wait for the host. One burst
//                too many runs, whose steps return at once.

#include <cstdint>
#include <cuda_runtime.h>

constexpr int THREADS = 256;
constexpr int ITEMS_PER_THREAD = 4;  // few blocks: each adds an atomic to the end of a step
constexpr unsigned UNCONVERGED = 1 << 16;

enum FlagTarget { DEVICE_FLAG, HOST_FLAG, CONDITION };

struct State {
    unsigned blocks;  // finished blocks + UNCONVERGED * unconverged blocks; 0 between steps
    int another_step;
};

template <FlagTarget TARGET, bool GUARDED>
__global__ void step(const float* b, float* x, int n, float tolerance, State* state,
                     volatile int* host_flag, cudaGraphConditionalHandle condition) {
    const int begin = blockIdx.x * THREADS * ITEMS_PER_THREAD + threadIdx.x;
    const int another_step = GUARDED ? *(volatile int*)&state->another_step : 1;
    float value[ITEMS_PER_THREAD], target[ITEMS_PER_THREAD];
    for (int k = 0; k < ITEMS_PER_THREAD; ++k) {  // in flight together with the load of the guard
        const int i = begin + k * THREADS;
        value[k] = i < n ? x[i] : 0;
        target[k] = i < n ? b[i] : 0;
    }
    if (!another_step) return;
    bool unconverged = false;
    for (int k = 0; k < ITEMS_PER_THREAD; ++k) {
        const float residual = value[k] + 0.5f * sinf(value[k]) - target[k];
        if (begin + k * THREADS < n) x[begin + k * THREADS] = value[k] - 0.01f * residual;
        unconverged |= fabsf(residual) > tolerance;
    }
    unconverged = __syncthreads_or(unconverged);
    if (threadIdx.x != 0) return;
    const unsigned mine = 1 + (unconverged ? UNCONVERGED : 0);
    const unsigned total = atomicAdd(&state->blocks, mine) + mine;
    if (total % UNCONVERGED != gridDim.x) return;
    state->blocks = 0;
    const bool more = total >= UNCONVERGED;
    if (TARGET == HOST_FLAG)
        *host_flag = more;
    else
        state->another_step = more;
    if (TARGET == CONDITION) cudaGraphSetConditional(condition, more);
}

int blocks_of(int n) {
    const int tile = THREADS * ITEMS_PER_THREAD;
    return (n + tile - 1) / tile;  // less than UNCONVERGED
}

// Set x to 0, and the state so that a step is needed.
cudaError_t reset(float* x, int n, State* state, cudaStream_t stream) {
    cudaMemsetAsync(x, 0, n * sizeof(float), stream);
    cudaMemsetAsync(&state->blocks, 0, sizeof(int), stream);
    return cudaMemsetAsync(&state->another_step, 1, sizeof(int), stream);  // any value but 0
}

// `state` is 8 bytes of device memory, `host_flag` is pinned host memory for one int.
extern "C" cudaError_t host_poll(const float* b, float* x, int n, float tolerance, int burst,
                                 int* state, volatile int* host_flag, cudaStream_t stream) {
    auto* const device_state = reinterpret_cast<State*>(state);
    const auto kernel = burst > 1 ? step<DEVICE_FLAG, true> : step<DEVICE_FLAG, false>;
    if (cudaError_t error = reset(x, n, device_state, stream)) return error;
    do {
        for (int i = 0; i < burst; ++i)
            kernel<<<blocks_of(n), THREADS, 0, stream>>>(b, x, n, tolerance, device_state, nullptr,
                                                         {});
        cudaMemcpyAsync(const_cast<int*>(host_flag), &device_state->another_step, sizeof(int),
                        cudaMemcpyDeviceToHost, stream);
        if (cudaError_t error = cudaStreamSynchronize(stream)) return error;
    } while (*host_flag);
    return cudaSuccess;
}

extern "C" cudaError_t mapped_flag(const float* b, float* x, int n, float tolerance, int* state,
                                   volatile int* host_flag, cudaStream_t stream) {
    auto* const device_state = reinterpret_cast<State*>(state);
    cudaMemsetAsync(x, 0, n * sizeof(float), stream);
    cudaMemsetAsync(&device_state->blocks, 0, sizeof(int), stream);
    do {
        step<HOST_FLAG, false><<<blocks_of(n), THREADS, 0, stream>>>(b, x, n, tolerance,
                                                                     device_state, host_flag, {});
        if (cudaError_t error = cudaStreamSynchronize(stream)) return error;
    } while (*host_flag);
    return cudaSuccess;
}

// Add a chain of `burst` kernels to a graph; `last` receives its last node.
cudaError_t add_steps(cudaGraph_t graph, const cudaKernelNodeParams& kernel, int burst,
                      cudaGraphNode_t* last) {
    for (int i = 0; i < burst; ++i) {
        cudaGraphNode_t node;
        if (cudaError_t error = cudaGraphAddKernelNode(&node, graph, last, i > 0, &kernel))
            return error;
        *last = node;
    }
    return cudaSuccess;
}

cudaKernelNodeParams step_node(void* kernel, int n, void** arguments) {
    cudaKernelNodeParams params = {};
    params.func = kernel;
    params.gridDim = dim3(blocks_of(n));
    params.blockDim = dim3(THREADS);
    params.kernelParams = arguments;
    return params;
}

// Write the handle of an executable of the graph to *handle, in host memory; destroy the graph.
cudaError_t instantiate(cudaGraph_t graph, int64_t* handle) {
    cudaGraphExec_t executable;
    if (cudaError_t error = cudaGraphInstantiate(&executable, graph, 0)) return error;
    *handle = reinterpret_cast<int64_t>(executable);
    return cudaGraphDestroy(graph);
}

// Build and instantiate the graph of a burst of guarded steps and a copy of the flag to pinned host
// memory. The handle is written to *handle, in host memory.
extern "C" cudaError_t build_burst(const float* b, float* x, int n, float tolerance, int burst,
                                   int* state, int* host_flag, int64_t* handle, cudaStream_t) {
    auto* device_state = reinterpret_cast<State*>(state);
    cudaGraph_t graph;
    if (cudaError_t error = cudaGraphCreate(&graph, 0)) return error;
    volatile int* no_flag = nullptr;
    cudaGraphConditionalHandle no_condition = {};
    void* arguments[] = {&b, &x, &n, &tolerance, &device_state, &no_flag, &no_condition};
    const auto kernel = reinterpret_cast<void*>(step<DEVICE_FLAG, true>);
    cudaGraphNode_t last, copy;
    if (cudaError_t error = add_steps(graph, step_node(kernel, n, arguments), burst, &last))
        return error;
    if (cudaError_t error = cudaGraphAddMemcpyNode1D(&copy, graph, &last, 1, host_flag,
                                                     &device_state->another_step, sizeof(int),
                                                     cudaMemcpyDeviceToHost))
        return error;
    return instantiate(graph, handle);
}

// Created once: creating events costs more than using them.
struct BurstEvents {
    cudaEvent_t finished[2];

    BurstEvents() {
        for (cudaEvent_t& event : finished)
            cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
    }
};

// Launch a graph of `build_burst` until the flag of the burst before is 0. After convergence each
// burst writes 0, so it does not matter if the burst that still runs has overwritten the flag. The
// first flag is read when a burst of this call is finished, and so are all bursts of earlier calls.
extern "C" cudaError_t late_poll(float* x, int n, int* state, volatile int* host_flag,
                                 int64_t handle, cudaStream_t stream) {
    static const BurstEvents events;
    if (cudaError_t error = reset(x, n, reinterpret_cast<State*>(state), stream)) return error;
    for (int burst = 0;; ++burst) {
        const auto executable = reinterpret_cast<cudaGraphExec_t>(handle);
        if (cudaError_t error = cudaGraphLaunch(executable, stream)) return error;
        if (cudaError_t error = cudaEventRecord(events.finished[burst % 2], stream)) return error;
        if (burst == 0) continue;
        if (cudaError_t error = cudaEventSynchronize(events.finished[(burst - 1) % 2]))
            return error;
        if (!*host_flag) return cudaSuccess;
    }
}

// Build and instantiate the graph: initial values, then a WHILE node whose body is a chain of
// `burst` steps. The handle of the executable graph is written to *handle, in host memory.
extern "C" cudaError_t build_graph(const float* b, float* x, int n, float tolerance, int burst,
                                   int* state, int64_t* handle, cudaStream_t) {
    auto* device_state = reinterpret_cast<State*>(state);
    cudaGraph_t graph;
    if (cudaError_t error = cudaGraphCreate(&graph, 0)) return error;
    struct { void* address; unsigned value; size_t count; } const initial[] = {
        {x, 0, size_t(n)}, {&device_state->blocks, 0, 1}, {&device_state->another_step, 1, 1}};
    cudaGraphNode_t previous = nullptr;
    for (const auto& [address, value, count] : initial) {
        cudaMemsetParams memset = {};
        memset.dst = address;
        memset.value = value;
        memset.elementSize = sizeof(float);
        memset.width = count;
        memset.height = 1;
        cudaGraphNode_t node;
        if (cudaError_t error = cudaGraphAddMemsetNode(&node, graph, &previous,
                                                       previous ? 1 : 0, &memset))
            return error;
        previous = node;
    }

    cudaGraphConditionalHandle condition;  // 1 at each graph launch, so that the first step runs
    if (cudaError_t error = cudaGraphConditionalHandleCreate(&condition, graph, 1,
                                                             cudaGraphCondAssignDefault))
        return error;
    cudaGraphNodeParams params = {};
    params.type = cudaGraphNodeTypeConditional;
    params.conditional.handle = condition;
    params.conditional.type = cudaGraphCondTypeWhile;
    params.conditional.size = 1;
    cudaGraphNode_t while_node;
    if (cudaError_t error = cudaGraphAddNode(&while_node, graph, &previous, nullptr, 1, &params))
        return error;

    volatile int* no_flag = nullptr;
    void* arguments[] = {&b, &x, &n, &tolerance, &device_state, &no_flag, &condition};
    const auto kernel = burst > 1 ? reinterpret_cast<void*>(step<CONDITION, true>)
                                  : reinterpret_cast<void*>(step<CONDITION, false>);
    cudaGraph_t body = params.conditional.phGraph_out[0];
    cudaGraphNode_t last;
    if (cudaError_t error = add_steps(body, step_node(kernel, n, arguments), burst, &last))
        return error;
    return instantiate(graph, handle);
}

extern "C" cudaError_t launch_graph(int64_t handle, cudaStream_t stream) {
    return cudaGraphLaunch(reinterpret_cast<cudaGraphExec_t>(handle), stream);
}

extern "C" cudaError_t destroy_graph(int64_t handle, cudaStream_t) {
    return cudaGraphExecDestroy(reinterpret_cast<cudaGraphExec_t>(handle));
}
