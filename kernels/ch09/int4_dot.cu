// Matrix-vector product y = W x (GEMV) with int4 weights, fp16 x and fp32 accumulation.
//
// A weight is (nibble - 8) * scale, with one fp16 scale per group of 128 columns. A word holds
// eight weights of a row: columns 0, 2, 4 and 6 in its low half and 1, 3, 5 and 7 in its high half,
// so that neighbours are 16 bits apart. Each warp computes four rows: a lane loads 32 weights of
// each row (16 bytes), and once for all rows the 32 values of x that belong to them.
//
// At the read rate, about 35 weights per clock arrive at an SM of an H200, and 25 of an H100. It
// issues 4 warp instructions per clock (128 lanes), of which at most half are integer or logic
// instructions. So on an H200 a weight can take 3.7 instructions, 1.8 of them integer ones, before
// instructions bind instead of bytes. Rungs differ only in how they make fp32 weights of a word:
//
//   convert    Plain C: shift (SHF), mask (LOP3), convert (I2FP) and subtract 8. Three of the four
//              are integer instructions.
//   bit_trick  The fp16 number with the bits 0x6400 is 1024, and the last of its bits counts one. A
//              nibble in its low bits makes it 1024 + nibble, so no conversion is needed: mask and
//              set bits in both halves of the word, subtract 1032 from both (HADD2), and widen each
//              to fp32. A nibble in the next four bits counts 16 times as much; one HFMA2 scales it
//              and subtracts. nvcc makes two LOP3 of (word & mask) | 0x64006400 if both constants
//              are immediates, because the instruction has room for one.
//   lop3       LOP3 computes any function of three operands. Inline PTX gets one instruction, with
//              the second constant in a register.
//   lop3_c     One LOP3 without PTX: the second constant is in __constant__ memory, where the
//              compiler cannot see its value.

#include <cstdint>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

constexpr int WARPS = 4;     // per block
constexpr int THREADS = 32 * WARPS;
constexpr int BLOCKS = 4;    // per SM at least: leaves registers to load ahead of the arithmetic
constexpr int ROWS = 4;      // per warp
constexpr int GROUP = 128;   // columns per scale
constexpr int COLUMNS = 32;  // per lane, row and iteration: 16 bytes of weights

constexpr uint32_t LOW_NIBBLES = 0x000f000f, HIGH_NIBBLES = 0x00f000f0;
constexpr uint32_t FP16_1024 = 0x64006400;  // in both halves
__constant__ uint32_t HIDDEN_FP16_1024 = FP16_1024;

struct Convert {
    static __device__ void unpack(uint32_t word, float (&w)[8]) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int shift = 4 * (i / 2) + 16 * (i % 2);
            w[i] = float(word >> shift & 15) - 8;
        }
    }
};

// Insert::insert masks two nibbles and sets the bits of 1024 in both halves.
template <typename Insert>
struct InFp16 {
    static __device__ void unpack(uint32_t word, float (&w)[8]) {
#pragma unroll
        for (int byte = 0; byte < 2; ++byte, word >>= 8) {
            const uint32_t ones = Insert::insert(word, LOW_NIBBLES);       // 1024 + nibble
            const uint32_t sixteens = Insert::insert(word, HIGH_NIBBLES);  // 1024 + 16 * nibble
            const __half2 even = __hsub2(as_half2(ones), __float2half2_rn(1024 + 8));
            const __half2 odd = __hfma2(as_half2(sixteens), __float2half2_rn(1.0f / 16),
                                        __float2half2_rn(-1024.0f / 16 - 8));
            w[4 * byte] = __low2float(even), w[4 * byte + 1] = __high2float(even);
            w[4 * byte + 2] = __low2float(odd), w[4 * byte + 3] = __high2float(odd);
        }
    }
    static __device__ __half2 as_half2(uint32_t bits) {
        return *reinterpret_cast<const __half2*>(&bits);
    }
};

struct InC {
    static __device__ uint32_t insert(uint32_t word, uint32_t mask) {
        return (word & mask) | FP16_1024;
    }
};

struct InPtx {
    static __device__ uint32_t insert(uint32_t word, uint32_t mask) {
        constexpr int AND_OR = (0xf0 & 0xcc) | 0xaa;  // the table of (a & b) | c
        uint32_t result;
        asm("lop3.b32 %0, %1, %2, %3, %4;"
            : "=r"(result)
            : "r"(word), "r"(mask), "r"(FP16_1024), "n"(AND_OR));
        return result;
    }
};

struct InConstantMemory {
    static __device__ uint32_t insert(uint32_t word, uint32_t mask) {
        return (word & mask) | HIDDEN_FP16_1024;
    }
};

template <typename Unpack>
__device__ void dot(const int* weights, const __half* scales, const __half* x, float* y,
                    int columns) {
    const int lane = threadIdx.x % 32;
    const int row = (blockIdx.x * WARPS + threadIdx.x / 32) * ROWS;
    const size_t row_vectors = columns / COLUMNS, row_groups = columns / GROUP;
    const auto* vectors = reinterpret_cast<const uint4*>(weights) + row * row_vectors;
    float sums[ROWS] = {};
    for (int i = lane; i < row_vectors; i += 32) {
        const size_t group = row * row_groups + i / (GROUP / COLUMNS);
        uint4 words[ROWS];
        float factors[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            words[r] = vectors[r * row_vectors + i];
            factors[r] = __half2float(scales[group + r * row_groups]);
        }
        float xs[COLUMNS];
#pragma unroll
        for (int k = 0; k < COLUMNS / 8; ++k) {
            const uint4 eight = reinterpret_cast<const uint4*>(x)[i * (COLUMNS / 8) + k];
            const auto* pairs = reinterpret_cast<const __half2*>(&eight);
#pragma unroll
            for (int pair = 0; pair < 4; ++pair) {
                const float2 both = __half22float2(pairs[pair]);
                xs[8 * k + 2 * pair] = both.x, xs[8 * k + 2 * pair + 1] = both.y;
            }
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const uint32_t four[] = {words[r].x, words[r].y, words[r].z, words[r].w};
            float sum = 0;
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                float w[8];
                Unpack::unpack(four[k], w);
#pragma unroll
                for (int j = 0; j < 8; ++j) sum += w[j] * xs[8 * k + j];
            }
            sums[r] += sum * factors[r];
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        for (int offset = 16; offset > 0; offset /= 2)
            sums[r] += __shfl_down_sync(~0u, sums[r], offset);
        if (lane == 0) y[row + r] = sums[r];
    }
}

__global__ void __launch_bounds__(THREADS, BLOCKS)
    dot_convert(const int* weights, const __half* scales, const __half* x, float* y, int columns) {
    dot<Convert>(weights, scales, x, y, columns);
}

__global__ void __launch_bounds__(THREADS, BLOCKS)
    dot_bit_trick(const int* weights, const __half* scales, const __half* x, float* y,
                  int columns) {
    dot<InFp16<InC>>(weights, scales, x, y, columns);
}

__global__ void __launch_bounds__(THREADS, BLOCKS)
    dot_lop3(const int* weights, const __half* scales, const __half* x, float* y, int columns) {
    dot<InFp16<InPtx>>(weights, scales, x, y, columns);
}

__global__ void __launch_bounds__(THREADS, BLOCKS)
    dot_constant(const int* weights, const __half* scales, const __half* x, float* y,
                 int columns) {
    dot<InFp16<InConstantMemory>>(weights, scales, x, y, columns);
}

template <typename Kernel>
cudaError_t launch(Kernel kernel, const int* weights, const __half* scales, const __half* x,
                   float* y, int rows, int columns, cudaStream_t stream) {
    if (rows % (WARPS * ROWS) || columns % GROUP) return cudaErrorInvalidValue;
    if ((reinterpret_cast<uintptr_t>(weights) | reinterpret_cast<uintptr_t>(x)) % 16)
        return cudaErrorMisalignedAddress;
    kernel<<<rows / (WARPS * ROWS), THREADS, 0, stream>>>(weights, scales, x, y, columns);
    return cudaGetLastError();
}

extern "C" cudaError_t convert(const int* weights, const __half* scales, const __half* x, float* y,
                               int rows, int columns, cudaStream_t stream) {
    return launch(dot_convert, weights, scales, x, y, rows, columns, stream);
}

extern "C" cudaError_t bit_trick(const int* weights, const __half* scales, const __half* x,
                                 float* y, int rows, int columns, cudaStream_t stream) {
    return launch(dot_bit_trick, weights, scales, x, y, rows, columns, stream);
}

extern "C" cudaError_t lop3(const int* weights, const __half* scales, const __half* x, float* y,
                            int rows, int columns, cudaStream_t stream) {
    return launch(dot_lop3, weights, scales, x, y, rows, columns, stream);
}

extern "C" cudaError_t lop3_c(const int* weights, const __half* scales, const __half* x, float* y,
                              int rows, int columns, cudaStream_t stream) {
    return launch(dot_constant, weights, scales, x, y, rows, columns, stream);
}
