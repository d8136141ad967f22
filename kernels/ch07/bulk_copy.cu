// Copies n floats with one warp per SM: which instructions keep enough bytes in flight?
//
// Every rung has one block of 32 threads per SM. Bandwidth is bytes in flight over latency, and
// saturating device memory takes tens of kilobytes in flight per SM.
//
//   loads   Each lane issues eight 16-byte loads, then stores them: 4 KiB in flight per SM. More
//           would take more registers: four per lane for each load.
//   async   cp.async writes to shared memory and needs no registers. A ring of 32 stages has room
//           for 128 KiB in flight. But each lane still issues one instruction per 16 bytes, then
//           loads these bytes from shared memory and stores them.
//   bulk    cp.async.bulk copies 16 KiB with one instruction of one thread: the tensor memory
//           accelerator (TMA) moves the bytes into shared memory and counts them on an mbarrier. A
//           second bulk copy writes them back to device memory. Eight stages make the same 128 KiB.
//
// cuda_memcpy calls cudaMemcpyAsync, which uses all SMs.

#include <cstdint>
#include <cuda_runtime.h>

constexpr int LANES = 32;
constexpr size_t VECTOR = 16;  // bytes that one lane copies with one instruction

__device__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// The last n % 4 floats, which are no whole vector.
__device__ void copy_remainder(const float* in, float* out, size_t n) {
    const size_t i = n / 4 * 4 + threadIdx.x;
    if (blockIdx.x == 0 && i < n) out[i] = in[i];
}

constexpr int LOADS = 8;

__global__ void __launch_bounds__(LANES) copy_loads(const float* in, float* out, size_t n) {
    const auto* from = reinterpret_cast<const float4*>(in);
    auto* to = reinterpret_cast<float4*>(out);
    const size_t vectors = n / 4, chunk = LANES * LOADS, step = gridDim.x * chunk;
    size_t begin = blockIdx.x * chunk;
    for (; begin + chunk <= vectors; begin += step) {
        float4 v[LOADS];
#pragma unroll
        for (int k = 0; k < LOADS; ++k) v[k] = from[begin + k * LANES + threadIdx.x];
#pragma unroll
        for (int k = 0; k < LOADS; ++k) to[begin + k * LANES + threadIdx.x] = v[k];
    }
    for (size_t i = begin + threadIdx.x; i < vectors && i < begin + chunk; i += LANES)
        to[i] = from[i];
    copy_remainder(in, out, n);
}

constexpr int ASYNC_STAGES = 32;
constexpr int ASYNC_VECTORS = 8;  // per lane and stage: 4 KiB per stage
constexpr size_t ASYNC_STAGE = LANES * ASYNC_VECTORS;  // vectors

// Starts the copies of one stage and commits them as a group, empty beyond the end.
__device__ void start_stage(float4* stage, const float4* from, size_t begin, size_t vectors) {
#pragma unroll
    for (int k = 0; k < ASYNC_VECTORS; ++k) {
        const size_t i = begin + k * LANES + threadIdx.x;
        if (i < vectors)
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                             shared_address(stage + k * LANES + threadIdx.x)),
                         "l"(from + i)
                         : "memory");
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
}

__global__ void __launch_bounds__(LANES) copy_async(const float* in, float* out, size_t n) {
    extern __shared__ float4 ring[];
    const auto* from = reinterpret_cast<const float4*>(in);
    auto* to = reinterpret_cast<float4*>(out);
    const size_t vectors = n / 4, step = gridDim.x * ASYNC_STAGE;
    const size_t first = blockIdx.x * ASYNC_STAGE;
    for (int s = 0; s < ASYNC_STAGES - 1; ++s)
        start_stage(ring + s * ASYNC_STAGE, from, first + s * step, vectors);
    int stage = 0;
    for (size_t begin = first; begin < vectors; begin += step) {
        // each lane reads only what it has copied itself, so no barrier is needed
        asm volatile("cp.async.wait_group %0;" ::"n"(ASYNC_STAGES - 2) : "memory");
        float4 v[ASYNC_VECTORS];
#pragma unroll
        for (int k = 0; k < ASYNC_VECTORS; ++k)
            v[k] = ring[stage * ASYNC_STAGE + k * LANES + threadIdx.x];
        const int free_stage = (stage + ASYNC_STAGES - 1) % ASYNC_STAGES;  // read one turn ago
        start_stage(ring + free_stage * ASYNC_STAGE, from, begin + (ASYNC_STAGES - 1) * step,
                    vectors);
#pragma unroll
        for (int k = 0; k < ASYNC_VECTORS; ++k) {
            const size_t i = begin + k * LANES + threadIdx.x;
            if (i < vectors) to[i] = v[k];
        }
        stage = (stage + 1) % ASYNC_STAGES;
    }
    copy_remainder(in, out, n);
}

constexpr int BULK_STAGES = 8;
constexpr size_t BULK_STAGE = 16384;  // bytes

__device__ void mbarrier_init(uint64_t* barrier) {
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
}

__device__ void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
    asm volatile(
        "{ .reg .pred done;\n"
        "wait: mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
        "@!done bra wait; }" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
}

__device__ void bulk_load(void* stage, const void* from, uint32_t bytes, uint64_t* barrier) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
                 "r"(bytes)
                 : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(shared_address(stage)),
        "l"(from), "r"(bytes), "r"(shared_address(barrier))
        : "memory");
}

__device__ void bulk_store(void* to, const void* stage, uint32_t bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
                 "r"(shared_address(stage)), "r"(bytes)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

__global__ void __launch_bounds__(LANES) copy_bulk(const float* in, float* out, size_t n) {
    extern __shared__ __align__(128) char stages[];
    __shared__ uint64_t full[BULK_STAGES];
    copy_remainder(in, out, n);
    if (threadIdx.x > 0) return;  // one thread issues all copies

    const auto* from = reinterpret_cast<const char*>(in);
    auto* to = reinterpret_cast<char*>(out);
    const size_t bytes = n / 4 * VECTOR, step = gridDim.x * BULK_STAGE;
    const size_t first = blockIdx.x * BULK_STAGE;
    const auto size = [&](size_t begin) {
        return static_cast<uint32_t>(bytes - begin < BULK_STAGE ? bytes - begin : BULK_STAGE);
    };
    for (int s = 0; s < BULK_STAGES; ++s) mbarrier_init(&full[s]);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");  // visible to the TMA
    for (int s = 0; s < BULK_STAGES - 1; ++s) {
        const size_t begin = first + s * step;
        if (begin < bytes) bulk_load(stages + s * BULK_STAGE, from + begin, size(begin), &full[s]);
    }
    int stage = 0;
    uint32_t parity = 0;
    for (size_t begin = first; begin < bytes; begin += step) {
        mbarrier_wait(&full[stage], parity);
        bulk_store(to + begin, stages + stage * BULK_STAGE, size(begin));
        // the store before this one has read its stage: load the next bytes into it
        asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
        const size_t next = begin + (BULK_STAGES - 1) * step;
        const int free_stage = (stage + BULK_STAGES - 1) % BULK_STAGES;
        if (next < bytes)
            bulk_load(stages + free_stage * BULK_STAGE, from + next, size(next), &full[free_stage]);
        stage = (stage + 1) % BULK_STAGES;
        if (stage == 0) parity ^= 1;
    }
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

template <typename Kernel>
cudaError_t launch(Kernel kernel, size_t shared, const float* in, float* out, int n,
                   cudaStream_t stream) {
    if ((reinterpret_cast<uintptr_t>(in) | reinterpret_cast<uintptr_t>(out)) % 16)
        return cudaErrorMisalignedAddress;
    int device, sms;
    const auto sm_count = cudaDevAttrMultiProcessorCount;
    const auto limit = cudaFuncAttributeMaxDynamicSharedMemorySize;
    if (cudaError_t error = cudaGetDevice(&device)) return error;
    if (cudaError_t error = cudaDeviceGetAttribute(&sms, sm_count, device)) return error;
    if (cudaError_t error = cudaFuncSetAttribute(kernel, limit, int(shared))) return error;
    kernel<<<sms, LANES, shared, stream>>>(in, out, n);
    return cudaGetLastError();
}

extern "C" cudaError_t loads(const float* in, float* out, int n, cudaStream_t stream) {
    return launch(copy_loads, 0, in, out, n, stream);
}

extern "C" cudaError_t async(const float* in, float* out, int n, cudaStream_t stream) {
    return launch(copy_async, ASYNC_STAGES * ASYNC_STAGE * VECTOR, in, out, n, stream);
}

extern "C" cudaError_t bulk(const float* in, float* out, int n, cudaStream_t stream) {
    return launch(copy_bulk, BULK_STAGES * BULK_STAGE, in, out, n, stream);
}

extern "C" cudaError_t cuda_memcpy(const float* in, float* out, int n, cudaStream_t stream) {
    return cudaMemcpyAsync(out, in, size_t(n) * sizeof(float), cudaMemcpyDeviceToDevice, stream);
}
