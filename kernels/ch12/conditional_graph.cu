// Iterate until convergence, with the decision about the next step on the host or on the GPU.
//
// x solves x + sin(x) / 2 = b per element with small damped steps from 0, until the largest
// residual is at most `tolerance`: hundreds of steps of a few microseconds, whose number depends on
// the data. One kernel performs one step. Its last block to finish reduces the blocks' results to a
// flag (whether another step is needed) and publishes it.
//
//   host_poll    To device memory. The host copies the flag back and waits after every `burst`
//                steps, then launches more. With a burst of 1, each step pays for a launch, a copy
//                and a host wake-up. In a longer burst, steps are guarded: they return at once if
//                an earlier one has converged.
//   mapped_flag  To mapped pinned host memory, which saves the copy. The host still waits for each
//                step.
//   build_graph  To the condition of a WHILE node in a CUDA graph, whose body is a burst of steps.
//                The GPU decides, and the host launches one graph. Each pass through the body costs
//                a few microseconds besides its kernels, which a burst of guarded steps divides.

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

// `state` is 8 bytes of device memory, `host_flag` is pinned host memory for one int.
extern "C" cudaError_t host_poll(const float* b, float* x, int n, float tolerance, int burst,
                                 int* state, volatile int* host_flag, cudaStream_t stream) {
    auto* const device_state = reinterpret_cast<State*>(state);
    const auto kernel = burst > 1 ? step<DEVICE_FLAG, true> : step<DEVICE_FLAG, false>;
    cudaMemsetAsync(x, 0, n * sizeof(float), stream);
    cudaMemsetAsync(&device_state->blocks, 0, sizeof(int), stream);
    cudaMemsetAsync(&device_state->another_step, 1, sizeof(int), stream);  // any value but 0
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

    volatile int* host_flag = nullptr;
    void* arguments[] = {&b, &x, &n, &tolerance, &device_state, &host_flag, &condition};
    cudaKernelNodeParams kernel = {};
    kernel.func = burst > 1 ? reinterpret_cast<void*>(step<CONDITION, true>)
                            : reinterpret_cast<void*>(step<CONDITION, false>);
    kernel.gridDim = dim3(blocks_of(n));
    kernel.blockDim = dim3(THREADS);
    kernel.kernelParams = arguments;
    previous = nullptr;
    for (int i = 0; i < burst; ++i) {
        cudaGraphNode_t node;
        if (cudaError_t error = cudaGraphAddKernelNode(&node, params.conditional.phGraph_out[0],
                                                       &previous, previous ? 1 : 0, &kernel))
            return error;
        previous = node;
    }

    cudaGraphExec_t executable;
    if (cudaError_t error = cudaGraphInstantiate(&executable, graph, 0)) return error;
    *handle = reinterpret_cast<int64_t>(executable);
    return cudaGraphDestroy(graph);
}

extern "C" cudaError_t launch_graph(int64_t handle, cudaStream_t stream) {
    return cudaGraphLaunch(reinterpret_cast<cudaGraphExec_t>(handle), stream);
}

extern "C" cudaError_t destroy_graph(int64_t handle, cudaStream_t) {
    return cudaGraphExecDestroy(reinterpret_cast<cudaGraphExec_t>(handle));
}
