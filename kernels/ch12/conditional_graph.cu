// Iterate until converged: who decides whether there is another step?
//
// x solves x + sin(x) / 2 = b, element by element, by small damped steps from 0, until the largest
// residual is at most `tolerance`: hundreds of steps of about three microseconds, and only the data
// know how many. One kernel makes a step; its last block to finish knows whether any block still
// had a large residual, and tells it, in one of three ways:
//
//   host_poll    It writes a flag to device memory. The host copies it back, waits, and launches
//                the next step: launch, copy and wake-up are paid for each step.
//   mapped_flag  It writes the flag straight to pinned host memory, which saves the copy. The host
//                still waits for each step.
//   while_node   It sets the condition of a WHILE node of a CUDA graph, whose body is the step. The
//                GPU decides and goes on; the host launches one graph.

#include <cstdint>
#include <cuda_runtime.h>

constexpr int THREADS = 256;

enum Tell { DEVICE_FLAG, HOST_FLAG, CONDITION };

__device__ unsigned blocks_done, blocks_unsettled;  // both are 0 between steps

template <Tell TELL>
__global__ void step(const float* b, float* x, int n, float tolerance, volatile int* flag,
                     cudaGraphConditionalHandle condition) {
    const int i = blockIdx.x * THREADS + threadIdx.x;
    bool unsettled = false;
    if (i < n) {
        const float at = x[i], residual = at + 0.5f * sinf(at) - b[i];
        x[i] = at - 0.01f * residual;
        unsettled = fabsf(residual) > tolerance;
    }
    unsettled = __syncthreads_or(unsettled);
    if (threadIdx.x != 0) return;
    if (unsettled) atomicAdd(&blocks_unsettled, 1);
    __threadfence();  // the count is there before this block is known to be done
    if (atomicAdd(&blocks_done, 1) != gridDim.x - 1) return;
    const bool again = atomicExch(&blocks_unsettled, 0) != 0;
    blocks_done = 0;
    if (TELL == CONDITION) {
        cudaGraphSetConditional(condition, again);
    } else {
        *flag = again;
        __threadfence_system();
    }
}

int blocks_of(int n) { return (n + THREADS - 1) / THREADS; }

// `flags` is pinned host memory, `flag` device memory: one int each.
extern "C" cudaError_t host_poll(const float* b, float* x, int n, float tolerance, int* flag,
                                 volatile int* flags, cudaStream_t stream) {
    cudaMemsetAsync(x, 0, n * sizeof(float), stream);
    do {
        step<DEVICE_FLAG><<<blocks_of(n), THREADS, 0, stream>>>(b, x, n, tolerance, flag, {});
        cudaMemcpyAsync(const_cast<int*>(flags), flag, sizeof(int), cudaMemcpyDeviceToHost, stream);
        if (cudaError_t error = cudaStreamSynchronize(stream)) return error;
    } while (*flags);
    return cudaSuccess;
}

extern "C" cudaError_t mapped_flag(const float* b, float* x, int n, float tolerance,
                                   volatile int* flags, cudaStream_t stream) {
    cudaMemsetAsync(x, 0, n * sizeof(float), stream);
    do {
        step<HOST_FLAG><<<blocks_of(n), THREADS, 0, stream>>>(b, x, n, tolerance, flags, {});
        if (cudaError_t error = cudaStreamSynchronize(stream)) return error;
    } while (*flags);
    return cudaSuccess;
}

// Build the graph: x = 0, then WHILE the condition holds, a step. `made` is pinned host memory.
extern "C" cudaError_t make_while(const float* b, float* x, int n, float tolerance, int64_t* made,
                                  cudaStream_t) {
    cudaGraph_t graph;
    if (cudaError_t error = cudaGraphCreate(&graph, 0)) return error;
    cudaGraphNode_t zero, loop, body;
    cudaMemsetParams memset = {};
    memset.dst = x;
    memset.elementSize = sizeof(float);
    memset.width = n;
    memset.height = 1;
    if (cudaError_t error = cudaGraphAddMemsetNode(&zero, graph, nullptr, 0, &memset)) return error;

    cudaGraphConditionalHandle condition;  // 1 at each launch of the graph: the first step runs
    if (cudaError_t error = cudaGraphConditionalHandleCreate(&condition, graph, 1,
                                                             cudaGraphCondAssignDefault))
        return error;
    cudaGraphNodeParams params = {};
    params.type = cudaGraphNodeTypeConditional;
    params.conditional.handle = condition;
    params.conditional.type = cudaGraphCondTypeWhile;
    params.conditional.size = 1;
    if (cudaError_t error = cudaGraphAddNode(&loop, graph, &zero, nullptr, 1, &params))
        return error;

    volatile int* flag = nullptr;
    void* arguments[] = {&b, &x, &n, &tolerance, &flag, &condition};
    cudaKernelNodeParams kernel = {};
    kernel.func = reinterpret_cast<void*>(step<CONDITION>);
    kernel.gridDim = dim3(blocks_of(n));
    kernel.blockDim = dim3(THREADS);
    kernel.kernelParams = arguments;
    if (cudaError_t error = cudaGraphAddKernelNode(&body, params.conditional.phGraph_out[0],
                                                   nullptr, 0, &kernel))
        return error;

    cudaGraphExec_t runnable;
    if (cudaError_t error = cudaGraphInstantiate(&runnable, graph, 0)) return error;
    *made = reinterpret_cast<int64_t>(runnable);
    return cudaGraphDestroy(graph);
}

extern "C" cudaError_t run_graph(int64_t runnable, cudaStream_t stream) {
    return cudaGraphLaunch(reinterpret_cast<cudaGraphExec_t>(runnable), stream);
}

extern "C" cudaError_t free_graph(int64_t runnable, cudaStream_t) {
    return cudaGraphExecDestroy(reinterpret_cast<cudaGraphExec_t>(runnable));
}
