// Kernels to hold a clock against: one whose time is known, one that does nothing, one that reads.

#include <cuda_runtime.h>

constexpr int THREADS = 256;
constexpr int VECTORS = 4;

__device__ void wait(long long cycles) {
    const long long from = clock64();
    while (clock64() - from < cycles) {
    }
}

// Waits for so many cycles of the SM's clock, and touches no memory, which a kernel's end would wait
// for.
__global__ void spin_for(long long cycles) { wait(cycles); }

extern "C" cudaError_t spin(long long cycles, cudaStream_t stream) {
    spin_for<<<1, 1, 0, stream>>>(cycles);
    return cudaGetLastError();
}

// The same, told: what it was in nanoseconds the GPU's global timer says, which does not follow the
// SM's clock. told[0] adds them up, told[1] counts the kernels.
__global__ void spin_and_tell(long long cycles, unsigned long long* told) {
    unsigned long long begun, ended;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begun));
    wait(cycles);
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ended));
    atomicAdd(told, ended - begun);
    atomicAdd(told + 1, 1ull);
}

extern "C" cudaError_t told(long long cycles, unsigned long long* told, cudaStream_t stream) {
    spin_and_tell<<<1, 1, 0, stream>>>(cycles, told);
    return cudaGetLastError();
}

__global__ void nothing() {}

extern "C" cudaError_t empty(cudaStream_t stream) {
    nothing<<<1, 32, 0, stream>>>();
    return cudaGetLastError();
}

// Reads each byte once, past the L1.
__global__ void __launch_bounds__(THREADS) read_once(const uint4* in, unsigned* out) {
    const uint4* mine = in + size_t(blockIdx.x) * THREADS * VECTORS + threadIdx.x;
    uint4 held[VECTORS];
#pragma unroll
    for (int k = 0; k < VECTORS; ++k) held[k] = __ldcg(mine + k * THREADS);
    unsigned sum = 0;
#pragma unroll
    for (int k = 0; k < VECTORS; ++k) sum ^= held[k].x ^ held[k].y ^ held[k].z ^ held[k].w;
    if (sum == 0x2545f491) *out = sum;  // hardly ever: without it nothing need be read
}

// A whole number of blocks, 16 KiB each.
extern "C" cudaError_t sweep(const void* in, size_t bytes, unsigned* out, cudaStream_t stream) {
    const unsigned blocks = bytes / (size_t(THREADS) * VECTORS * sizeof(uint4));
    read_once<<<blocks, THREADS, 0, stream>>>(static_cast<const uint4*>(in), out);
    return cudaGetLastError();
}
