// Counts how often each of the 256 byte values occurs in n bytes.
//
// Every byte adds 1 to a counter, and threads that add to the same counter must not lose an
// addition: atomicAdd. Its cost depends on where the counters are and on who shares them.
//
//   global    One set of 256 counters in device memory, shared by all threads. All additions of the
//             GPU meet at the few slices of the L2 cache that hold this 1 KiB.
//   shared    Each block counts in its own shared memory (privatization), and adds its 256 counts
//             to those in device memory once, at the end. A thread has only one byte in flight.
//   vector    16 bytes per load: 16 times the bytes in flight, and the same additions.
//   per_lane  Shared memory has 32 banks, and the counters of a warp's 32 bytes lie in random ones:
//             the fullest bank decides how long an addition takes. Here each lane has its own copy
//             of the counters, all in its own bank: 32 copies, 32 KiB per block, and almost no
//             conflicts.
//
// For an atomicAdd of 1 to shared memory whose result is not used, nvcc emits ATOMS.POPC.INC.32, in
// all rungs but the first.
//
// Copies per warp instead of per lane would leave the conflicts between the lanes of a warp.
//
// cub_histogram calls DeviceHistogram::HistogramEven of CUB, the library of parallel primitives.

#include <cstdint>
#include <cub/device/device_histogram.cuh>
#include <cuda_runtime.h>

constexpr int THREADS = 512;
constexpr int BINS = 256;
constexpr int LANES = 32;  // lanes per warp = banks of shared memory

__global__ void __launch_bounds__(THREADS)
    histogram_global(const uint8_t* in, int* bins, size_t n) {
    const size_t threads = size_t(gridDim.x) * THREADS;
    for (size_t i = size_t(blockIdx.x) * THREADS + threadIdx.x; i < n; i += threads)
        atomicAdd(&bins[in[i]], 1);
}

__global__ void __launch_bounds__(THREADS)
    histogram_shared(const uint8_t* in, int* bins, size_t n) {
    __shared__ int counts[BINS];
    for (int i = threadIdx.x; i < BINS; i += THREADS) counts[i] = 0;
    __syncthreads();
    const size_t threads = size_t(gridDim.x) * THREADS;
    for (size_t i = size_t(blockIdx.x) * THREADS + threadIdx.x; i < n; i += threads)
        atomicAdd(&counts[in[i]], 1);
    __syncthreads();
    for (int i = threadIdx.x; i < BINS; i += THREADS) atomicAdd(&bins[i], counts[i]);
}

// Where the counter of a value is, for the calling thread.
struct PerBlock {
    static constexpr int COPIES = 1;
    static __device__ int index(unsigned value) { return value; }
};
struct PerLane {
    static constexpr int COPIES = LANES;
    static __device__ int index(unsigned value) { return value * LANES + threadIdx.x % LANES; }
};

template <typename Counters>
__device__ void count_word(int* counts, unsigned word) {
#pragma unroll
    for (int shift = 0; shift < 32; shift += 8)
        atomicAdd(&counts[Counters::index(word >> shift & 255)], 1);
}

template <typename Counters>
__global__ void __launch_bounds__(THREADS)
    histogram_vectors(const uint8_t* in, int* bins, size_t n) {
    constexpr int COPIES = Counters::COPIES;
    __shared__ int counts[BINS * COPIES];
    for (int i = threadIdx.x; i < BINS * COPIES; i += THREADS) counts[i] = 0;
    __syncthreads();
    const size_t threads = size_t(gridDim.x) * THREADS;
    const size_t first = size_t(blockIdx.x) * THREADS + threadIdx.x;
    for (size_t i = first; i < n / 16; i += threads) {
        const uint4 bytes = reinterpret_cast<const uint4*>(in)[i];
        count_word<Counters>(counts, bytes.x);
        count_word<Counters>(counts, bytes.y);
        count_word<Counters>(counts, bytes.z);
        count_word<Counters>(counts, bytes.w);
    }
    if (first < n % 16)  // the remainder after the last whole vector
        atomicAdd(&counts[Counters::index(in[n / 16 * 16 + first])], 1);
    __syncthreads();
    for (int i = threadIdx.x; i < BINS; i += THREADS) {
        int sum = 0;  // each lane starts at another copy: 32 lanes read 32 banks
        for (int c = 0; c < COPIES; ++c) sum += counts[i * COPIES + (c + i) % COPIES];
        atomicAdd(&bins[i], sum);
    }
}

// Set the counters to 0 and launch as many blocks as the SMs hold at once.
cudaError_t launch(void (*kernel)(const uint8_t*, int*, size_t), const uint8_t* in, int* bins,
                   size_t n, cudaStream_t stream) {
    int device, sms, blocks_per_sm;
    const auto count = cudaDevAttrMultiProcessorCount;
    if (cudaError_t error = cudaGetDevice(&device)) return error;
    if (cudaError_t error = cudaDeviceGetAttribute(&sms, count, device)) return error;
    if (cudaError_t error =
            cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks_per_sm, kernel, THREADS, 0))
        return error;
    if (cudaError_t error = cudaMemsetAsync(bins, 0, BINS * sizeof(int), stream)) return error;
    kernel<<<sms * blocks_per_sm, THREADS, 0, stream>>>(in, bins, n);
    return cudaGetLastError();
}

extern "C" cudaError_t global(const uint8_t* in, int* bins, int n, cudaStream_t stream) {
    return launch(histogram_global, in, bins, n, stream);
}

extern "C" cudaError_t shared(const uint8_t* in, int* bins, int n, cudaStream_t stream) {
    return launch(histogram_shared, in, bins, n, stream);
}

extern "C" cudaError_t vector(const uint8_t* in, int* bins, int n, cudaStream_t stream) {
    if (reinterpret_cast<uintptr_t>(in) % 16) return cudaErrorMisalignedAddress;
    return launch(histogram_vectors<PerBlock>, in, bins, n, stream);
}

extern "C" cudaError_t per_lane(const uint8_t* in, int* bins, int n, cudaStream_t stream) {
    if (reinterpret_cast<uintptr_t>(in) % 16) return cudaErrorMisalignedAddress;
    return launch(histogram_vectors<PerLane>, in, bins, n, stream);
}

__device__ unsigned char workspace[4 << 20];  // for CUB: a set of counters per block

extern "C" cudaError_t cub_histogram(const uint8_t* in, int* bins, int n, cudaStream_t stream) {
    void* buffer;
    size_t needed = 0;
    const int levels = BINS + 1, low = 0, high = BINS;
    if (cudaError_t error = cudaGetSymbolAddress(&buffer, workspace)) return error;
    if (cudaError_t error = cub::DeviceHistogram::HistogramEven(nullptr, needed, in, bins, levels,
                                                                low, high, n, stream))
        return error;
    if (needed > sizeof(workspace)) return cudaErrorMemoryAllocation;
    return cub::DeviceHistogram::HistogramEven(buffer, needed, in, bins, levels, low, high, n,
                                               stream);
}
