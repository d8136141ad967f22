// One CUDA graph, run for many rows: only the addresses of its input and its output change.
//
// The graph is a chain of 16 small kernels, Euler steps of angle' = -sin(angle). The first reads a
// row, the last writes its result, and those between work on an array of fixed address.
//
//   recapture       Captures and instantiates a graph per row, launches it and destroys it.
//   static_buffers  Changes nothing in the graph. Copies the row to the address that the graph
//                   reads, and the result from the address that it writes.
//   set_parameters  Sets the parameters of the two kernels that refer to the row: no copies.
//
// The alternative is `exec_update`: it captures a graph per row, and updates the instantiated graph
// with the parameters of all its nodes. It need not know which of them refer to the row.

#include <cuda_runtime.h>

constexpr int N = 4096;  // elements per row
constexpr int STEPS = 16;
constexpr int THREADS = 256;
constexpr float TIME_STEP = 0.01f;

__device__ float state[N];
__device__ float static_input[N];
__device__ float static_output[N];

__global__ void step(const float* from, float* to) {
    const int i = blockIdx.x * THREADS + threadIdx.x;
    to[i] = from[i] - TIME_STEP * sinf(from[i]);
}

template <typename T>
float* address_of(const T& array) {
    void* address = nullptr;
    cudaGetSymbolAddress(&address, array);
    return static_cast<float*>(address);
}

float* state_address() {
    static float* const address = address_of(state);
    return address;
}

const float* input_of(int k, const float* in) { return k == 0 ? in : state_address(); }
float* output_of(int k, float* out) { return k == STEPS - 1 ? out : state_address(); }

// The caller's stream may be the default stream, which cannot be captured.
cudaStream_t capture_stream() {
    static const cudaStream_t stream = [] {
        cudaFuncAttributes attributes;
        cudaFuncGetAttributes(&attributes, step);  // loads the kernel, which a capture forbids
        cudaStream_t created;
        cudaStreamCreateWithFlags(&created, cudaStreamNonBlocking);
        return created;
    }();
    return stream;
}

cudaGraph_t captured(const float* in, float* out) {
    cudaGraph_t graph = nullptr;
    const cudaStream_t stream = capture_stream();
    state_address();
    cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
    for (int k = 0; k < STEPS; ++k)
        step<<<N / THREADS, THREADS, 0, stream>>>(input_of(k, in), output_of(k, out));
    cudaStreamEndCapture(stream, &graph);
    return graph;
}

cudaGraphExec_t instantiated(cudaGraph_t graph) {
    cudaGraphExec_t exec;
    cudaGraphInstantiate(&exec, graph, 0);
    return exec;
}

// A graph that was built node by node: the handles of its nodes are known.
struct Chain {
    cudaGraph_t graph;
    cudaGraphNode_t nodes[STEPS];
    cudaGraphExec_t exec;

    Chain() {
        cudaGraphCreate(&graph, 0);
        for (int k = 0; k < STEPS; ++k) {
            Arguments arguments(k, address_of(static_input), address_of(static_output));
            cudaGraphAddKernelNode(&nodes[k], graph, k ? &nodes[k - 1] : nullptr, k ? 1 : 0,
                                   &arguments.node);
        }
        exec = instantiated(graph);
    }

    // The parameters of one node; they point to the two arguments of its kernel.
    struct Arguments {
        const float* from;
        float* to;
        void* pointers[2] = {&from, &to};
        cudaKernelNodeParams node = {};

        Arguments(int k, const float* in, float* out)
            : from(input_of(k, in)), to(output_of(k, out)) {
            node.func = reinterpret_cast<void*>(step);
            node.gridDim = dim3(N / THREADS);
            node.blockDim = dim3(THREADS);
            node.kernelParams = pointers;
        }
    };

    void set(int k, const float* in, float* out) const {
        Arguments arguments(k, in, out);
        cudaGraphExecKernelNodeSetParams(exec, nodes[k], &arguments.node);
    }
};

extern "C" cudaError_t recapture(const float* in, float* out, int rows, cudaStream_t stream) {
    for (int row = 0; row < rows; ++row) {
        const cudaGraph_t graph = captured(in + row * N, out + row * N);
        const cudaGraphExec_t exec = instantiated(graph);
        cudaGraphLaunch(exec, stream);
        cudaGraphExecDestroy(exec);  // a graph that still runs is destroyed when it has ended
        cudaGraphDestroy(graph);
    }
    return cudaGetLastError();
}

extern "C" cudaError_t static_buffers(const float* in, float* out, int rows, cudaStream_t stream) {
    static const Chain chain;
    static float *const from = address_of(static_input), *const to = address_of(static_output);
    constexpr size_t BYTES = N * sizeof(float);
    for (int row = 0; row < rows; ++row) {
        cudaMemcpyAsync(from, in + row * N, BYTES, cudaMemcpyDeviceToDevice, stream);
        cudaGraphLaunch(chain.exec, stream);
        cudaMemcpyAsync(out + row * N, to, BYTES, cudaMemcpyDeviceToDevice, stream);
    }
    return cudaGetLastError();
}

// A change applies to later launches only, so the graph may still run for the row before.
extern "C" cudaError_t set_parameters(const float* in, float* out, int rows, cudaStream_t stream) {
    static const Chain chain;
    for (int row = 0; row < rows; ++row) {
        chain.set(0, in + row * N, out + row * N);
        chain.set(STEPS - 1, in + row * N, out + row * N);
        cudaGraphLaunch(chain.exec, stream);
    }
    return cudaGetLastError();
}

extern "C" cudaError_t exec_update(const float* in, float* out, int rows, cudaStream_t stream) {
    static const cudaGraphExec_t exec = [=] {
        const cudaGraph_t graph = captured(in, out);
        const cudaGraphExec_t created = instantiated(graph);
        cudaGraphDestroy(graph);
        return created;
    }();
    for (int row = 0; row < rows; ++row) {
        const cudaGraph_t graph = captured(in + row * N, out + row * N);
        cudaGraphExecUpdateResultInfo result;
        const cudaError_t error = cudaGraphExecUpdate(exec, graph, &result);
        cudaGraphDestroy(graph);
        if (error) return error;
        cudaGraphLaunch(exec, stream);
    }
    return cudaGetLastError();
}
