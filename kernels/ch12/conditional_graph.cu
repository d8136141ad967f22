// Iterate until convergence, with the decision about the next step on the host or on the GPU.
//
// x solves x + sin(x) / 2 = b per element with small damped steps from 0, until the largest
// residual is at most `tolerance`: hundreds of steps of a few microseconds, whose number depends on
// the data. One kernel performs one step. Its last block to finish reduces the blocks' results to a
// flag (whether another step is needed) and publishes it in one of three ways:
//
//   host_poll    To device memory. The host copies the flag back, waits, and launches the next
//                step: each step pays for a launch, a copy and a host wake-up.
//   mapped_flag  To mapped pinned host memory, which saves the copy. The host still waits for each
//                step.
//   while_node   To the condition of a WHILE node in a CUDA graph, whose body is the step. The GPU
//                decides, and the host launches one graph.

#include <cstdint>
#include <cuda_runtime.h>

constexpr int THREADS = 256;

enum FlagTarget { DEVICE_FLAG, HOST_FLAG, CONDITION };

__device__ unsigned blocks_done, blocks_unconverged;  // both are 0 between steps

template <FlagTarget TARGET>
__global__ void step(const float* b, float* x, int n, float tolerance, volatile int* flag,
                     cudaGraphConditionalHandle condition) {
    const int i = blockIdx.x * THREADS + threadIdx.x;
    bool unconverged = false;
    if (i < n) {
        const float value = x[i], residual = value + 0.5f * sinf(value) - b[i];
        x[i] = value - 0.01f * residual;
        unconverged = fabsf(residual) > tolerance;
    }
    unconverged = __syncthreads_or(unconverged);
    if (threadIdx.x != 0) return;
    if (unconverged) atomicAdd(&blocks_unconverged, 1);
    __threadfence();  // the count is visible before this block counts as done
    if (atomicAdd(&blocks_done, 1) != gridDim.x - 1) return;
    const bool another_step = atomicExch(&blocks_unconverged, 0) != 0;
    blocks_done = 0;
    if (TARGET == CONDITION) {
        cudaGraphSetConditional(condition, another_step);
    } else {
        *flag = another_step;
        __threadfence_system();
    }
}

int blocks_of(int n) { return (n + THREADS - 1) / THREADS; }

// `device_flag` is device memory, `host_flag` is pinned host memory: one int each.
extern "C" cudaError_t host_poll(const float* b, float* x, int n, float tolerance, int* device_flag,
                                 volatile int* host_flag, cudaStream_t stream) {
    cudaMemsetAsync(x, 0, n * sizeof(float), stream);
    do {
        step<DEVICE_FLAG><<<blocks_of(n), THREADS, 0, stream>>>(b, x, n, tolerance, device_flag,
                                                                {});
        cudaMemcpyAsync(const_cast<int*>(host_flag), device_flag, sizeof(int),
                        cudaMemcpyDeviceToHost, stream);
        if (cudaError_t error = cudaStreamSynchronize(stream)) return error;
    } while (*host_flag);
    return cudaSuccess;
}

extern "C" cudaError_t mapped_flag(const float* b, float* x, int n, float tolerance,
                                   volatile int* host_flag, cudaStream_t stream) {
    cudaMemsetAsync(x, 0, n * sizeof(float), stream);
    do {
        step<HOST_FLAG><<<blocks_of(n), THREADS, 0, stream>>>(b, x, n, tolerance, host_flag, {});
        if (cudaError_t error = cudaStreamSynchronize(stream)) return error;
    } while (*host_flag);
    return cudaSuccess;
}

// Build and instantiate the graph: x = 0, then a WHILE node whose body is a step. The handle of the
// executable graph is written to *handle, in host memory.
extern "C" cudaError_t build_graph(const float* b, float* x, int n, float tolerance,
                                   int64_t* handle, cudaStream_t) {
    cudaGraph_t graph;
    if (cudaError_t error = cudaGraphCreate(&graph, 0)) return error;
    cudaGraphNode_t zero_node, while_node, step_node;
    cudaMemsetParams memset = {};
    memset.dst = x;
    memset.elementSize = sizeof(float);
    memset.width = n;
    memset.height = 1;
    if (cudaError_t error = cudaGraphAddMemsetNode(&zero_node, graph, nullptr, 0, &memset))
        return error;

    cudaGraphConditionalHandle condition;  // 1 at each graph launch, so that the first step runs
    if (cudaError_t error = cudaGraphConditionalHandleCreate(&condition, graph, 1,
                                                             cudaGraphCondAssignDefault))
        return error;
    cudaGraphNodeParams params = {};
    params.type = cudaGraphNodeTypeConditional;
    params.conditional.handle = condition;
    params.conditional.type = cudaGraphCondTypeWhile;
    params.conditional.size = 1;
    if (cudaError_t error = cudaGraphAddNode(&while_node, graph, &zero_node, nullptr, 1, &params))
        return error;

    volatile int* flag = nullptr;
    void* arguments[] = {&b, &x, &n, &tolerance, &flag, &condition};
    cudaKernelNodeParams kernel = {};
    kernel.func = reinterpret_cast<void*>(step<CONDITION>);
    kernel.gridDim = dim3(blocks_of(n));
    kernel.blockDim = dim3(THREADS);
    kernel.kernelParams = arguments;
    if (cudaError_t error = cudaGraphAddKernelNode(&step_node, params.conditional.phGraph_out[0],
                                                   nullptr, 0, &kernel))
        return error;

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
