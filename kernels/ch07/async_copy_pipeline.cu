// A dynamic range compressor for `count` signals of `samples` floats, stored one after the other.
//
// The envelope follows the level |x| quickly upwards and slowly downwards:
//
//   envelope += (level > envelope ? 1 - ATTACK : 1 - RELEASE) * (level - envelope)
//   y = x * max(envelope, 1)^SLOPE
//
// Each step needs the envelope of the step before, and because of the comparison it is not linear.
// So one thread computes a whole signal. The samples of a signal are neighbors in memory, but the
// lanes of a warp compute 32 signals. So a block copies tiles of 128 signals x 32 samples to shared
// memory, with coalesced accesses of whole cache lines. Each thread then walks along its row of the
// tile, and the block writes the tile back, coalesced again. The rungs differ in how a tile gets
// there.
//
//   synchronous   Load a tile into registers, store it to shared memory, compute, write it back.
//                 Nothing is in flight while the block computes.
//   two_stages    cp.async copies to shared memory without registers, so a thread need not wait for
//                 its loads to store them. With two tiles in shared memory, the next one is in
//                 flight while the block computes and writes the current one: 16 KiB per SM.
//   four_stages   Four tiles in shared memory, three of them in flight: 48 KiB per SM.
//   registers     For comparison, the overlap of two_stages without cp.async: the next tile waits
//                 in registers, eight float4 per thread, until its place in shared memory is free.

#include <cstdint>
#include <cuda_runtime.h>

constexpr int SIGNALS = 128;            // per block, one thread each
constexpr int SAMPLES = 32;             // per tile: 128 bytes of each signal, a cache line
constexpr int VECTORS = SAMPLES / 4;    // of 16 bytes, per row of a tile
constexpr int PITCH = VECTORS + 1;      // odd, so that threads walk along 8 rows without conflicts
constexpr int TILE = SIGNALS * PITCH;   // vectors
constexpr int ROWS = SIGNALS / VECTORS; // rows that a block copies with one access per thread
constexpr int COPIES = SIGNALS / ROWS;  // accesses per thread and tile

// Powers of two in the denominator, so that 1 - ATTACK and 1 - RELEASE are exact.
constexpr float ATTACK = 0.875f, RELEASE = 255.0f / 256;
constexpr float SLOPE = -0.75f;  // 4:1 above a level of 1

// What a thread copies of each tile: the vector in `column` of every ROWS-th row.
struct Copies {
    const int row = threadIdx.x / VECTORS, column = threadIdx.x % VECTORS;
    const int vectors;  // per signal
    int begin[COPIES];  // the first vector of each copied row in device memory

    __device__ Copies(int count, int samples) : vectors(samples / 4) {
        // Rows beyond the last signal repeat it: they compute and write the same values once more.
        const int first = blockIdx.x * SIGNALS + row;
        for (int k = 0; k < COPIES; ++k)
            begin[k] = min(first + k * ROWS, count - 1) * vectors + column;
    }
    __device__ int tiles() const { return (vectors + VECTORS - 1) / VECTORS; }
    __device__ bool inside(int tile) const { return tile * VECTORS + column < vectors; }
    __device__ int global(int k, int tile) const { return begin[k] + tile * VECTORS; }
    __device__ int shared(int k) const { return (row + k * ROWS) * PITCH + column; }
};

__device__ void load(float4 (&values)[COPIES], const float4* in, const Copies& copies, int tile) {
    if (!copies.inside(tile)) return;
#pragma unroll
    for (int k = 0; k < COPIES; ++k) values[k] = in[copies.global(k, tile)];
}

__device__ void store_shared(const float4 (&values)[COPIES], float4* stage, const Copies& copies) {
#pragma unroll
    for (int k = 0; k < COPIES; ++k) stage[copies.shared(k)] = values[k];
}

// Start to copy a tile and commit the copies as a group, which is empty beyond the last tile.
__device__ void start_copy(float4* stage, const float4* in, const Copies& copies, int tile) {
    if (copies.inside(tile)) {
#pragma unroll
        for (int k = 0; k < COPIES; ++k)
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(static_cast<uint32_t>(
                             __cvta_generic_to_shared(stage + copies.shared(k)))),
                         "l"(in + copies.global(k, tile))
                         : "memory");
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Wait until only the last PENDING groups that this thread committed may still be in flight.
template <int PENDING>
__device__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

__device__ void write_back(float4* out, const float4* stage, const Copies& copies, int tile) {
    if (!copies.inside(tile)) return;
#pragma unroll
    for (int k = 0; k < COPIES; ++k) out[copies.global(k, tile)] = stage[copies.shared(k)];
}

__device__ float compress(float x, float& envelope) {
    const float level = fabsf(x);
    // The larger one is that of ATTACK if the level exceeds the envelope, else that of RELEASE.
    envelope = fmaxf(fmaf(ATTACK, envelope, (1 - ATTACK) * level),
                     fmaf(RELEASE, envelope, (1 - RELEASE) * level));
    return x * exp2f(SLOPE * log2f(fmaxf(envelope, 1.0f)));
}

// Replace a thread's row of a tile by the result, also where a partial tile has no samples.
__device__ void compress_row(float4* stage, float& envelope) {
    float4* row = stage + threadIdx.x * PITCH;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        float4 v = row[i];
        v.x = compress(v.x, envelope);
        v.y = compress(v.y, envelope);
        v.z = compress(v.z, envelope);
        v.w = compress(v.w, envelope);
        row[i] = v;
    }
}

__global__ void __launch_bounds__(SIGNALS)
    compress_synchronous(const float4* in, float4* out, int count, int samples) {
    extern __shared__ float4 stage[];
    const Copies copies(count, samples);
    float envelope = 0;
    float4 values[COPIES] = {};
    for (int tile = 0; tile < copies.tiles(); ++tile) {
        load(values, in, copies, tile);
        __syncthreads();  // the tile before has been written back
        store_shared(values, stage, copies);
        __syncthreads();  // this tile is complete
        compress_row(stage, envelope);
        __syncthreads();  // its results are complete
        write_back(out, stage, copies, tile);
    }
}

__global__ void __launch_bounds__(SIGNALS)
    compress_registers(const float4* in, float4* out, int count, int samples) {
    extern __shared__ float4 stage[];
    const Copies copies(count, samples);
    float envelope = 0;
    float4 values[COPIES] = {};
    load(values, in, copies, 0);
    for (int tile = 0; tile < copies.tiles(); ++tile) {
        __syncthreads();  // the tile before has been written back
        store_shared(values, stage, copies);
        load(values, in, copies, tile + 1);  // the compiler moves no loads across a barrier
        __syncthreads();                     // this tile is complete
        compress_row(stage, envelope);
        __syncthreads();  // its results are complete
        write_back(out, stage, copies, tile);
    }
}

template <int STAGES>
__global__ void __launch_bounds__(SIGNALS)
    compress_async(const float4* in, float4* out, int count, int samples) {
    extern __shared__ float4 stages[];
    const Copies copies(count, samples);
    float envelope = 0;
#pragma unroll
    for (int tile = 0; tile < STAGES - 1; ++tile)
        start_copy(stages + tile * TILE, in, copies, tile);
    for (int tile = 0; tile < copies.tiles(); ++tile) {
        float4* stage = stages + tile % STAGES * TILE;
        wait_for_copies<STAGES - 2>();  // this thread's part of this tile has arrived
        __syncthreads();  // this tile is complete, and the tile before has been written back
        const int next = tile + STAGES - 1;  // takes the stage of the tile before
        start_copy(stages + next % STAGES * TILE, in, copies, next);
        compress_row(stage, envelope);
        __syncthreads();  // its results are complete
        write_back(out, stage, copies, tile);
    }
}

template <typename Kernel>
cudaError_t launch(Kernel kernel, int stages, const float* in, float* out, int count, int samples,
                   cudaStream_t stream) {
    if ((reinterpret_cast<uintptr_t>(in) | reinterpret_cast<uintptr_t>(out)) % 16)
        return cudaErrorMisalignedAddress;
    if (samples % 4 || count < 1 || int64_t(count) * samples / 4 > INT32_MAX)
        return cudaErrorInvalidValue;
    const int shared = stages * TILE * int(sizeof(float4));
    const auto limit = cudaFuncAttributeMaxDynamicSharedMemorySize;
    if (cudaError_t error = cudaFuncSetAttribute(kernel, limit, shared)) return error;
    kernel<<<(count + SIGNALS - 1) / SIGNALS, SIGNALS, shared, stream>>>(
        reinterpret_cast<const float4*>(in), reinterpret_cast<float4*>(out), count, samples);
    return cudaGetLastError();
}

extern "C" cudaError_t synchronous(const float* in, float* out, int count, int samples,
                                   cudaStream_t stream) {
    return launch(compress_synchronous, 1, in, out, count, samples, stream);
}

extern "C" cudaError_t registers(const float* in, float* out, int count, int samples,
                                 cudaStream_t stream) {
    return launch(compress_registers, 1, in, out, count, samples, stream);
}

extern "C" cudaError_t two_stages(const float* in, float* out, int count, int samples,
                                  cudaStream_t stream) {
    return launch(compress_async<2>, 2, in, out, count, samples, stream);
}

extern "C" cudaError_t four_stages(const float* in, float* out, int count, int samples,
                                   cudaStream_t stream) {
    return launch(compress_async<4>, 4, in, out, count, samples, stream);
}
