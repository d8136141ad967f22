// out = (frame - dark) * gain for a sequence of camera frames: flat-field correction.
//
// `maps` holds the dark value and the gain of each pixel, 8 bytes per pixel. Every frame needs them
// again, while the frames (2 bytes per pixel) and the results (4) pass through once. One kernel per
// frame, as the frames arrive; only the treatment of the L2 cache differs:
//
//   no_policy  All lines are equal, and the oldest are evicted first. Between two uses of a line of
//              the maps, the other lines and a frame with its result pass through the L2.
//   hints      Frames are read and results are written as evict-first lines (ld.global.cs and
//              st.global.cs): they make room for each other before a line of the maps goes.
//   window     An access-policy window over the maps makes their lines persisting: they may take
//              the part of the L2 that is set aside, and nothing else evicts them from it. The last
//              frame's launch makes the lines normal again, because persisting lines would stay
//              and keep later kernels out.

#include <algorithm>
#include <cuda_runtime.h>

constexpr int THREADS = 256;
constexpr int PIXELS_PER_THREAD = 4;

template <bool HINTS>
__global__ void correct(const short4* frame, const float4* dark, const float4* gain, float4* out,
                        int vectors) {
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= vectors) return;
    const short4 raw = HINTS ? __ldcs(frame + i) : frame[i];
    const float4 d = dark[i], g = gain[i];
    const float4 result = {(raw.x - d.x) * g.x, (raw.y - d.y) * g.y, (raw.z - d.z) * g.z,
                           (raw.w - d.w) * g.w};
    if (HINTS)
        __stcs(out + i, result);
    else
        out[i] = result;
}

// The bytes of the L2 cache that are set aside for persisting lines: as many as the GPU allows.
// Other accesses use them as well, as long as no persisting lines do.
size_t set_aside() {
    static const size_t bytes = [] {
        int device, most = 0;
        cudaGetDevice(&device);
        cudaDeviceGetAttribute(&most, cudaDevAttrMaxPersistingL2CacheSize, device);
        cudaDeviceSetLimit(cudaLimitPersistingL2CacheSize, most);
        return size_t(most);
    }();
    return bytes;
}

cudaLaunchAttribute window_over(const float* maps, size_t bytes, cudaAccessProperty property) {
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeAccessPolicyWindow;
    cudaAccessPolicyWindow& window = attribute.val.accessPolicyWindow;
    window.base_ptr = const_cast<float*>(maps);
    window.num_bytes = bytes;
    window.hitRatio = std::min(1.0, double(set_aside()) / bytes);  // more would evict each other
    window.hitProp = property;
    window.missProp = cudaAccessPropertyStreaming;
    return attribute;
}

template <bool HINTS, bool WINDOW>
cudaError_t correct_all(const short* frames, const float* maps, float* out, int pixels, int count,
                        cudaStream_t stream) {
    if (pixels % PIXELS_PER_THREAD) return cudaErrorInvalidValue;
    const int vectors = pixels / PIXELS_PER_THREAD;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((vectors + THREADS - 1) / THREADS);
    config.blockDim = dim3(THREADS);
    config.stream = stream;
    for (int k = 0; k < count; ++k) {
        cudaLaunchAttribute attribute;
        if (WINDOW) {
            const auto property =
                k == count - 1 ? cudaAccessPropertyNormal : cudaAccessPropertyPersisting;
            attribute = window_over(maps, size_t(pixels) * 2 * sizeof(float), property);
            config.attrs = &attribute;
            config.numAttrs = 1;
        }
        const size_t first = size_t(k) * pixels;
        const cudaError_t error = cudaLaunchKernelEx(
            &config, correct<HINTS>, reinterpret_cast<const short4*>(frames + first),
            reinterpret_cast<const float4*>(maps), reinterpret_cast<const float4*>(maps + pixels),
            reinterpret_cast<float4*>(out + first), vectors);
        if (error) return error;
    }
    return cudaSuccess;
}

extern "C" cudaError_t no_policy(const short* frames, const float* maps, float* out, int pixels,
                                 int count, cudaStream_t stream) {
    return correct_all<false, false>(frames, maps, out, pixels, count, stream);
}

extern "C" cudaError_t hints(const short* frames, const float* maps, float* out, int pixels,
                             int count, cudaStream_t stream) {
    return correct_all<true, false>(frames, maps, out, pixels, count, stream);
}

extern "C" cudaError_t window(const short* frames, const float* maps, float* out, int pixels,
                              int count, cudaStream_t stream) {
    return correct_all<false, true>(frames, maps, out, pixels, count, stream);
}
