"""LayerNorm and SiLU in one CUDA kernel, compiled by NVRTC for the row width at hand."""

from functools import cache

import cupy

THREADS = 256
"""Threads per block."""

EPSILON = 1e-5
"""Added to the variance under the square root."""

SOURCE = r"""
constexpr int WARPS = THREADS / 32, VECTORS = WIDTH / 4 / THREADS;

__device__ float block_sum(float value) {
    __shared__ float warp_sums[WARPS];
    for (int mask = 16; mask > 0; mask /= 2) value += __shfl_xor_sync(~0u, value, mask);
    __syncthreads();  // all threads have read the previous sum
    if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = value;
    __syncthreads();
    value = 0;
    for (int warp = 0; warp < WARPS; ++warp) value += warp_sums[warp];
    return value;
}

__device__ float normalized_silu(float x, float rstd, float scale, float shift) {
    const float y = x * rstd * scale + shift;
    return __fdividef(y, 1 + expf(-y));
}

// One block per row. WIDTH is a constant, so the loops unroll and the row stays in registers.
extern "C" __global__ void layernorm_silu(const float4* __restrict__ x,
                                          const float4* __restrict__ scale,
                                          const float4* __restrict__ shift,
                                          float4* __restrict__ out) {
    const long long start = (long long)blockIdx.x * (WIDTH / 4) + threadIdx.x;
    float4 row[VECTORS];
    float sum = 0;
    for (int i = 0; i < VECTORS; ++i) {
        row[i] = x[start + i * THREADS];
        sum += row[i].x + row[i].y + row[i].z + row[i].w;
    }
    const float mean = block_sum(sum) / WIDTH;
    sum = 0;
    for (int i = 0; i < VECTORS; ++i) {
        float4& v = row[i];
        v.x -= mean, v.y -= mean, v.z -= mean, v.w -= mean;
        sum += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    }
    const float rstd = rsqrtf(block_sum(sum) / WIDTH + EPSILON);
    for (int i = 0; i < VECTORS; ++i) {
        const float4 v = row[i];
        const float4 a = scale[threadIdx.x + i * THREADS], b = shift[threadIdx.x + i * THREADS];
        out[start + i * THREADS] =
            make_float4(normalized_silu(v.x, rstd, a.x, b.x), normalized_silu(v.y, rstd, a.y, b.y),
                        normalized_silu(v.z, rstd, a.z, b.z), normalized_silu(v.w, rstd, a.w, b.w));
    }
}
"""


@cache
def _compiled(width):
    if width % (4 * THREADS):
        raise ValueError(f"rows of {width} floats: the width must be a multiple of {4 * THREADS}")
    constants = {"WIDTH": width, "THREADS": THREADS, "EPSILON": f"{EPSILON}f"}
    options = tuple(f"-D{name}={value}" for name, value in constants.items())
    return cupy.RawKernel(SOURCE, "layernorm_silu", options)


def layernorm_silu(x, scale, shift):
    out = cupy.empty_like(x)
    _compiled(x.shape[1])((x.shape[0],), (THREADS,), (x, scale, shift, out))
    return out
