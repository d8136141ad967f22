// Kernels of known cost: a spin of known length, an empty kernel and a read of known size.

#include <cuda_runtime.h>

constexpr int THREADS = 256;
constexpr int VECTORS = 4;

__device__ void wait(long long cycles) {
    const long long from = clock64();
    while (clock64() - from < cycles) {
    }
}

// Spins for `cycles` of the SM clock. Writes nothing, because a kernel ends only after its writes.
__global__ void spin_for(long long cycles) { wait(cycles); }

extern "C" cudaError_t spin(long long cycles, cudaStream_t stream) {
    spin_for<<<1, 1, 0, stream>>>(cycles);
    return cudaGetLastError();
}

// Spins for `cycles` of the SM clock and measures the time with the GPU's global timer, whose rate is
// fixed. totals[0] accumulates nanoseconds, totals[1] counts kernels.
__global__ void spin_and_measure(long long cycles, unsigned long long* totals) {
    unsigned long long start, end;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    wait(cycles);
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(end));
    atomicAdd(totals, end - start);
    atomicAdd(totals + 1, 1ull);
}

extern "C" cudaError_t timed_spin(long long cycles, unsigned long long* totals,
                                  cudaStream_t stream) {
    spin_and_measure<<<1, 1, 0, stream>>>(cycles, totals);
    return cudaGetLastError();
}

__global__ void nothing() {}

extern "C" cudaError_t empty(cudaStream_t stream) {
    nothing<<<1, 32, 0, stream>>>();
    return cudaGetLastError();
}

// Reads every byte once, bypassing the L1.
__global__ void __launch_bounds__(THREADS) read_once(const uint4* in, unsigned* out) {
    const uint4* vectors = in + size_t(blockIdx.x) * THREADS * VECTORS + threadIdx.x;
    uint4 loaded[VECTORS];
#pragma unroll
    for (int k = 0; k < VECTORS; ++k) loaded[k] = __ldcg(vectors + k * THREADS);
    unsigned sum = 0;
#pragma unroll
    for (int k = 0; k < VECTORS; ++k) sum ^= loaded[k].x ^ loaded[k].y ^ loaded[k].z ^ loaded[k].w;
    if (sum == 0x2545f491) *out = sum;  // almost never true; keeps the loads from being removed
}

// Reads `bytes`, rounded down to whole blocks of 16 KiB.
extern "C" cudaError_t sweep(const void* in, size_t bytes, unsigned* out, cudaStream_t stream) {
    const unsigned blocks = bytes / (size_t(THREADS) * VECTORS * sizeof(uint4));
    read_once<<<blocks, THREADS, 0, stream>>>(static_cast<const uint4*>(in), out);
    return cudaGetLastError();
}
