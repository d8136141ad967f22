// Attention forward: out = softmax(q * k^T / sqrt(128)) * v per head, in bf16, with an online
// softmax. q, k, v and out are heads x length x 128, row-major. All rungs keep the scores on chip.
//
//   cuda_cores   Tiles of 64 queries x 64 keys, fp32 multiply-adds. TMA loads keys and values one
//                tile ahead, as in all rungs.
//   mma_sync     The same loop on the tensor cores, with mma.sync as on Ampere (FlashAttention 2).
//                Four warps of 32 queries, because registers hold no larger tile. Weights stay in
//                registers: the accumulator fragments of the first product have the layout of the
//                left operand of the second.
//   wgmma        A warpgroup (four warps) multiplies 64 queries with 128 keys by descriptors of
//                tiles in shared memory. It waits for each product.
//   specialised  A producer thread loads keys and values, and mbarriers per stage replace the block
//                barrier, so that the two consumer warpgroups no longer run in step.
//   pingpong     Named barriers let the warpgroups take turns at the tensor cores. In its turn, a
//                warpgroup issues the second product of one tile and the first of the next; then it
//                computes the next tile's softmax while the other warpgroup has its turn.
//   overlapped   A turn issues the next tile's first product before this tile's second, and the
//                softmax of the next tile begins while the second product runs. The last two rungs
//                are the schedule of FlashAttention 3.

#include "hopper.cuh"

constexpr int HEAD = 128;  // elements per query, key and value: two tiles of 64 side by side
constexpr int STAGES = 2;  // of keys and values
constexpr float EXP2_SCALE = 0.08838834764831845f * 1.4426950408889634f;  // log2(e) / sqrt(HEAD)

constexpr __host__ __device__ int tile_bytes(int rows) { return rows * HEAD * 2; }

// The address of 16-byte chunk `chunk` (0 to 15) of a row.
template <int ROWS>
__device__ uint32_t chunk_address(uint32_t tile, int row, int chunk) {
    return tile + chunk / 8 * (ROWS * ROW_BYTES) + swizzled_offset(row, chunk % 8);
}

template <int ROWS>
__device__ void load_tile(uint32_t to, const CUtensorMap* map, int row, uint64_t* barrier) {
    tma_load_2d(to, map, 0, row, barrier);
    tma_load_2d(to + ROWS * ROW_BYTES, map, TILE_K, row, barrier);
}

constexpr int HEADS_PER_GROUP = 8;

// Order of the blocks: groups of heads whose keys and values fit in the L2 cache; within a group,
// the last queries first, because with a causal mask they have the most keys.
struct QueryTile {
    int first_row, row;  // of the head in the tensors, and of the tile in the head
};

template <int ROWS>
__device__ QueryTile query_tile(int heads, int length) {
    const int tiles = length / ROWS, group_blocks = HEADS_PER_GROUP * tiles;
    const int group_begin = blockIdx.x / group_blocks * HEADS_PER_GROUP;
    const int group_heads = min(HEADS_PER_GROUP, heads - group_begin);
    const int index = blockIdx.x - group_begin * tiles;
    return {(group_begin + index % group_heads) * length,
            (tiles - 1 - index / group_heads) * ROWS};
}

__device__ float exp2_approximate(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The state of the online softmax for accumulator fragments: a lane holds two rows, and a row lies
// in four lanes. Element i belongs to row i % 4 / 2 of the lane.
struct OnlineSoftmax {
    float running_max[2] = {-INFINITY, -INFINITY}, denominator[2] = {};
    float rescale[2];

    // Replace scores by their exponentials. Earlier results are to be multiplied by `rescale`.
    template <int N>
    __device__ void update(float (&scores)[N]) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float largest = running_max[r];
#pragma unroll
            for (int i = 0; i < N; ++i)
                if (i % 4 / 2 == r) largest = fmaxf(largest, scores[i]);
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
            rescale[r] = exp2_approximate((running_max[r] - largest) * EXP2_SCALE);
            running_max[r] = largest;
            const float offset = largest * EXP2_SCALE;
            float sum = 0;
#pragma unroll
            for (int i = 0; i < N; ++i)
                if (i % 4 / 2 == r)
                    sum += scores[i] = exp2_approximate(fmaf(scores[i], EXP2_SCALE, -offset));
            denominator[r] = denominator[r] * rescale[r] + sum;
        }
    }

    template <int N>
    __device__ void rescale_output(float (&out)[N]) {
#pragma unroll
        for (int i = 0; i < N; ++i) out[i] *= rescale[i % 4 / 2];
    }

    template <int N>
    __device__ void normalise(float (&out)[N]) {
        float factor[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float sum = denominator[r];
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            factor[r] = 1 / sum;
        }
#pragma unroll
        for (int i = 0; i < N; ++i) out[i] *= factor[i % 4 / 2];
    }
};

// Mask the keys after the query, for fragments whose first row is `row` and first column `key`.
template <int N>
__device__ void mask_fragments(float (&scores)[N], int row, int key) {
    const int lane = threadIdx.x % 32;
    row += lane / 4;
    key += lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < N; ++i)
        if (key + i / 4 * 8 + i % 2 > row + i % 4 / 2 * 8) scores[i] = -INFINITY;
}

template <int N>
__device__ void pack_fragments(const float (&scores)[N], uint32_t (&packed)[N / 2]) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) packed[i] = pack(scores[2 * i], scores[2 * i + 1]);
}

// --- Rungs without specialised warps: thread 0 loads one step ahead ------------------------------

template <typename Math, bool CAUSAL>
__device__ void attend(const CUtensorMap* q, const CUtensorMap* k, const CUtensorMap* v, bf16* out,
                       int heads, int length) {
    extern __shared__ unsigned char memory[];
    __shared__ uint64_t full[STAGES];
    constexpr int ROWS = Math::ROWS, KEYS = Math::KEYS, KV_BYTES = tile_bytes(KEYS);
    const uint32_t q_tile = swizzle_aligned(memory), stages = q_tile + tile_bytes(ROWS);
    const QueryTile tile = query_tile<ROWS>(heads, length);
    const int steps = (CAUSAL ? tile.row + ROWS : length) / KEYS;
    auto load = [&](int step) {
        const uint32_t stage = stages + step % STAGES * 2 * KV_BYTES;
        uint64_t* barrier = &full[step % STAGES];
        arrive_expect_tx(barrier, 2 * KV_BYTES + (step == 0 ? tile_bytes(ROWS) : 0));
        if (step == 0) load_tile<ROWS>(q_tile, q, tile.first_row + tile.row, barrier);
        load_tile<KEYS>(stage, k, tile.first_row + step * KEYS, barrier);
        load_tile<KEYS>(stage + KV_BYTES, v, tile.first_row + step * KEYS, barrier);
    };
    if (threadIdx.x == 0) {
        for (auto& barrier : full) mbarrier_init(&barrier, 1);
        fence_mbarrier_init();
        for (int step = 0; step < min(STAGES, steps); ++step) load(step);
    }
    __syncthreads();
    Math math(q_tile, stages + STAGES * 2 * KV_BYTES);
    for (int step = 0; step < steps; ++step) {
        wait(&full[step % STAGES], step / STAGES % 2);
        const uint32_t stage = stages + step % STAGES * 2 * KV_BYTES;
        const bool masked = CAUSAL && (step + 1) * KEYS > tile.row;
        math.step(stage, stage + KV_BYTES, masked, tile.row, step * KEYS);
        __syncthreads();
        if (threadIdx.x == 0 && step + STAGES < steps) load(step + STAGES);
    }
    math.epilogue(out + size_t(tile.first_row + tile.row) * HEAD);
}

// 16 x 16 threads compute 4 x 4 scores and 4 x 8 outputs each.
struct FmaMath {
    static constexpr int ROWS = 64, KEYS = 64, THREADS = 256, BLOCKS_PER_SM = 2;
    static constexpr int WEIGHTS_PITCH = KEYS + 4, SCRATCH = ROWS * WEIGHTS_PITCH * 4;
    float acc[4][8] = {}, running_max[4], denominator[4] = {};
    const uint32_t q, weights;
    const int x = threadIdx.x % 16, row = threadIdx.x / 16 * 4;

    __device__ FmaMath(uint32_t q_tile, uint32_t scratch) : q(q_tile), weights(scratch) {
        for (float& largest : running_max) largest = -INFINITY;
    }
    static __device__ void load_chunk(float (&to)[8], uint32_t address) {
        uint32_t pairs[4];
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(pairs[0]), "=r"(pairs[1]), "=r"(pairs[2]), "=r"(pairs[3])
                     : "r"(address) : "memory");
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            to[2 * i] = __uint_as_float(pairs[i] << 16);
            to[2 * i + 1] = __uint_as_float(pairs[i] & 0xffff0000);
        }
    }
    __device__ void step(uint32_t k, uint32_t v, bool masked, int tile_row, int first_key) {
        float scores[4][4] = {};
#pragma unroll 2
        for (int chunk = 0; chunk < HEAD / 8; ++chunk) {
            float queries[4][8];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                load_chunk(queries[i], chunk_address<ROWS>(q, row + i, chunk));
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                float key[8];
                load_chunk(key, chunk_address<KEYS>(k, x + 16 * j, chunk));
#pragma unroll
                for (int i = 0; i < 4; ++i)
#pragma unroll
                    for (int e = 0; e < 8; ++e)
                        scores[i][j] = fmaf(queries[i][e], key[e], scores[i][j]);
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float largest = running_max[i], sum = 0;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                if (masked && first_key + x + 16 * j > tile_row + row + i)
                    scores[i][j] = -INFINITY;
                largest = fmaxf(largest, scores[i][j]);
            }
#pragma unroll
            for (int distance = 1; distance < 16; distance *= 2)
                largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
            const float rescale = exp2_approximate((running_max[i] - largest) * EXP2_SCALE);
            running_max[i] = largest;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float weight = exp2_approximate((scores[i][j] - largest) * EXP2_SCALE);
                sum += weight;
                // rounded to bf16, as the tensor cores need it: all rungs compute the same
                asm volatile("st.shared.f32 [%0], %1;"
                             :: "r"(weights + ((row + i) * WEIGHTS_PITCH + x + 16 * j) * 4),
                                "f"(__bfloat162float(__float2bfloat16(weight))) : "memory");
            }
            denominator[i] = denominator[i] * rescale + sum;
#pragma unroll
            for (float& element : acc[i]) element *= rescale;
        }
        __syncwarp();  // a row's weights are written and read by the same warp
#pragma unroll 2
        for (int key = 0; key < KEYS; key += 4) {
            float weight[4][4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                             : "=f"(weight[i][0]), "=f"(weight[i][1]), "=f"(weight[i][2]),
                               "=f"(weight[i][3])
                             : "r"(weights + ((row + i) * WEIGHTS_PITCH + key) * 4) : "memory");
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                float value[8];
                load_chunk(value, chunk_address<KEYS>(v, key + j, x));
#pragma unroll
                for (int i = 0; i < 4; ++i)
#pragma unroll
                    for (int e = 0; e < 8; ++e)
                        acc[i][e] = fmaf(weight[i][j], value[e], acc[i][e]);
            }
        }
    }
    __device__ void epilogue(bf16* out) {
        for (int i = 0; i < 4; ++i) {
            float sum = denominator[i];
            for (int distance = 1; distance < 16; distance *= 2)
                sum += __shfl_xor_sync(~0u, sum, distance);
            uint4 packed;
            packed.x = pack(acc[i][0] / sum, acc[i][1] / sum);
            packed.y = pack(acc[i][2] / sum, acc[i][3] / sum);
            packed.z = pack(acc[i][4] / sum, acc[i][5] / sum);
            packed.w = pack(acc[i][6] / sum, acc[i][7] / sum);
            *reinterpret_cast<uint4*>(out + (row + i) * HEAD + x * 8) = packed;
        }
    }
};

// Four warps multiply 32 queries each with all 64 keys of the tile.
struct MmaMath {
    static constexpr int WARPS = 4, WARP_ROWS = 32, M = WARP_ROWS / 16;
    static constexpr int ROWS = WARPS * WARP_ROWS, KEYS = 64, THREADS = WARPS * 32;
    static constexpr int BLOCKS_PER_SM = 2, SCRATCH = 0;
    float acc[M][HEAD / 2] = {};
    OnlineSoftmax softmax[M];
    const uint32_t q;
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * WARP_ROWS;

    __device__ MmaMath(uint32_t q_tile, uint32_t) : q(q_tile) {}

    static __device__ void ldmatrix(uint32_t (&fragment)[4], uint32_t address) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
                     : "r"(address) : "memory");
    }
    static __device__ void ldmatrix_transposed(uint32_t (&fragment)[4], uint32_t address) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
                     : "r"(address) : "memory");
    }
    static __device__ void mma(float* d, const uint32_t* a, const uint32_t* b) {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
                     "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }
    __device__ void step(uint32_t k, uint32_t v, bool masked, int tile_row, int first_key) {
        float scores[M][KEYS / 2] = {};
#pragma unroll 1  // unrolled, it spills: the fragments take 230 of 255 registers
        for (int slice = 0; slice < HEAD / 16; ++slice) {
            uint32_t queries[M][4];
#pragma unroll
            for (int i = 0; i < M; ++i)
                ldmatrix(queries[i], chunk_address<ROWS>(q, row + i * 16 + lane % 16,
                                                         2 * slice + lane / 16));
#pragma unroll
            for (int j = 0; j < KEYS / 16; ++j) {
                uint32_t keys[4];
                ldmatrix(keys, chunk_address<KEYS>(k, j * 16 + lane / 16 * 8 + lane % 8,
                                                   2 * slice + lane / 8 % 2));
#pragma unroll
                for (int i = 0; i < M; ++i) {
                    mma(&scores[i][8 * j], queries[i], keys);
                    mma(&scores[i][8 * j + 4], queries[i], keys + 2);
                }
            }
        }
        uint32_t weights[M][KEYS / 4];
#pragma unroll
        for (int i = 0; i < M; ++i) {
            if (masked) mask_fragments(scores[i], tile_row + row + i * 16, first_key);
            softmax[i].update(scores[i]);
            softmax[i].rescale_output(acc[i]);
            pack_fragments(scores[i], weights[i]);
        }
#pragma unroll
        for (int slice = 0; slice < KEYS / 16; ++slice)
#pragma unroll
            for (int j = 0; j < HEAD / 16; ++j) {
                uint32_t values[4];
                ldmatrix_transposed(values, chunk_address<KEYS>(v, slice * 16 + lane % 16,
                                                                2 * j + lane / 16));
#pragma unroll
                for (int i = 0; i < M; ++i) {
                    mma(&acc[i][8 * j], &weights[i][4 * slice], values);
                    mma(&acc[i][8 * j + 4], &weights[i][4 * slice], values + 2);
                }
            }
    }
    __device__ void epilogue(bf16* out) {
        for (int i = 0; i < M; ++i) {
            softmax[i].normalise(acc[i]);
            store_fragments(acc[i], out, HEAD, row + i * 16, 0);
        }
    }
};

// --- wgmma: 128 queries x 128 keys, 64 queries per warpgroup ------------------------------------
constexpr int ROWS = 128, HALF_BYTES = ROWS * ROW_BYTES, TILE_BYTES = 2 * HALF_BYTES;

__device__ void issue_scores(float (&scores)[64], uint32_t q, uint32_t k) {
#pragma unroll
    for (int slice = 0; slice < HEAD / 16; ++slice) {
        const uint32_t offset = slice / 4 * HALF_BYTES + slice % 4 * 32;
        wgmma(scores, wgmma_descriptor(q + offset), wgmma_descriptor(k + offset), slice);
    }
    wgmma_commit();
}

__device__ void issue_output(float (&acc)[64], const uint32_t (&weights)[32], uint32_t v) {
#pragma unroll
    for (int slice = 0; slice < ROWS / 16; ++slice)
        wgmma_transposed(acc, &weights[4 * slice],
                         transposed_descriptor(v + slice * 16 * ROW_BYTES, HALF_BYTES));
    wgmma_commit();
}

struct WgmmaMath {
    static constexpr int ROWS = ::ROWS, KEYS = ::ROWS, THREADS = 256, BLOCKS_PER_SM = 1;
    static constexpr int SCRATCH = 0;
    float acc[64] = {};
    OnlineSoftmax softmax;
    const uint32_t q;
    const int row;  // of this warp

    __device__ WgmmaMath(uint32_t q_tile, uint32_t, int warp = threadIdx.x / 32)
        : q(q_tile + warp / 4 * 64 * ROW_BYTES), row(warp * 16) {}

    __device__ void step(uint32_t k, uint32_t v, bool masked, int tile_row, int first_key) {
        float scores[64];
        uint32_t weights[32];
        wgmma_fence();
        issue_scores(scores, q, k);
        wgmma_wait<0>();
        pin(scores);
        if (masked) mask_fragments(scores, tile_row + row, first_key);
        softmax.update(scores);
        softmax.rescale_output(acc);
        pack_fragments(scores, weights);
        wgmma_fence();
        issue_output(acc, weights, v);
        wgmma_wait<0>();
        pin(acc);
    }
    __device__ void epilogue(bf16* out) {
        softmax.normalise(acc);
        store_fragments(acc, out, HEAD, row, 0);
    }
};

#define ATTENTION_PARAMETERS \
    const __grid_constant__ CUtensorMap q, const __grid_constant__ CUtensorMap k, \
    const __grid_constant__ CUtensorMap v, bf16* out, int heads, int length

template <bool CAUSAL>
__global__ void __launch_bounds__(FmaMath::THREADS, FmaMath::BLOCKS_PER_SM)
attention_cuda_cores(ATTENTION_PARAMETERS) {
    attend<FmaMath, CAUSAL>(&q, &k, &v, out, heads, length);
}

template <bool CAUSAL>
__global__ void __launch_bounds__(MmaMath::THREADS, MmaMath::BLOCKS_PER_SM)
attention_mma_sync(ATTENTION_PARAMETERS) {
    attend<MmaMath, CAUSAL>(&q, &k, &v, out, heads, length);
}

template <bool CAUSAL>
__global__ void __launch_bounds__(WgmmaMath::THREADS, WgmmaMath::BLOCKS_PER_SM)
attention_wgmma(ATTENTION_PARAMETERS) {
    attend<WgmmaMath, CAUSAL>(&q, &k, &v, out, heads, length);
}

// --- Warp-specialised rungs: a producer warpgroup and two consumer warpgroups ------------------
constexpr int PRODUCER_AND_CONSUMERS = 384;

struct Barriers {
    uint64_t q_full, k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
};

__device__ void init_barriers(Barriers& barriers) {
    if (threadIdx.x == 0) {
        mbarrier_init(&barriers.q_full, 1);
        for (int stage = 0; stage < STAGES; ++stage) {
            mbarrier_init(&barriers.k_full[stage], 1);
            mbarrier_init(&barriers.v_full[stage], 1);
            mbarrier_init(&barriers.k_empty[stage], 8);  // one arrival per consumer warp
            mbarrier_init(&barriers.v_empty[stage], 8);
        }
        fence_mbarrier_init();
    }
    __syncthreads();
}

__device__ void produce(const CUtensorMap* q, const CUtensorMap* k, const CUtensorMap* v,
                        Barriers& barriers, uint32_t q_tile, QueryTile tile, int steps) {
    arrive_expect_tx(&barriers.q_full, TILE_BYTES);
    load_tile<ROWS>(q_tile, q, tile.first_row + tile.row, &barriers.q_full);
    for (int step = 0; step < steps; ++step) {
        const int stage = step % STAGES, parity = step / STAGES % 2;
        const uint32_t k_tile = q_tile + TILE_BYTES + stage * 2 * TILE_BYTES;
        wait(&barriers.k_empty[stage], parity ^ 1);
        arrive_expect_tx(&barriers.k_full[stage], TILE_BYTES);
        load_tile<ROWS>(k_tile, k, tile.first_row + step * ROWS, &barriers.k_full[stage]);
        wait(&barriers.v_empty[stage], parity ^ 1);
        arrive_expect_tx(&barriers.v_full[stage], TILE_BYTES);
        load_tile<ROWS>(k_tile + TILE_BYTES, v, tile.first_row + step * ROWS,
                        &barriers.v_full[stage]);
    }
}

// Named barriers 1 and 2: the turn of either warpgroup. It begins when the other one passes it on.
__device__ void await_turn(int warpgroup) {
    asm volatile("bar.sync %0, 256;" :: "r"(1 + warpgroup) : "memory");
}
__device__ void pass_turn(int warpgroup) {
    asm volatile("bar.arrive %0, 256;" :: "r"(2 - warpgroup) : "memory");
}

// ptxas moves arithmetic below a wait that does not depend on it. This instruction never executes,
// but it stays above the wait and needs the sums of all exponentials.
__device__ void compute_before_wait(const OnlineSoftmax& softmax, uint64_t* barrier) {
    asm volatile("{\n.reg .pred never;\nsetp.lt.f32 never, %1, 0f00000000;\n"
                 "@never mbarrier.arrive.shared::cta.b64 _, [%0];\n}"
                 :: "r"(shared_address(barrier)),
                    "f"(softmax.denominator[0] + softmax.denominator[1]) : "memory");
}

enum Schedule { IN_ORDER, IN_TURNS, OVERLAPPED };

template <Schedule SCHEDULE, bool CAUSAL>
__device__ void attend_specialised(const CUtensorMap* q, const CUtensorMap* k, const CUtensorMap* v,
                                   bf16* out, int heads, int length) {
    extern __shared__ unsigned char memory[];
    __shared__ Barriers barriers;
    const uint32_t q_tile = swizzle_aligned(memory);
    const QueryTile tile = query_tile<ROWS>(heads, length);
    const int steps = (CAUSAL ? tile.row + ROWS : length) / ROWS;
    init_barriers(barriers);
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x == 0) produce(q, k, v, barriers, q_tile, tile, steps);
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    const int warpgroup = threadIdx.x / 128 - 1;
    WgmmaMath math(q_tile, 0, threadIdx.x / 32 - 4);
    float scores[64];
    uint32_t weights[32];
    auto k_tile = [&](int step) { return q_tile + TILE_BYTES + step % STAGES * 2 * TILE_BYTES; };
    auto wait_for = [&](uint64_t* full, int step) {
        wait(&full[step % STAGES], step / STAGES % 2);
    };
    auto release = [&](uint64_t* empty, int step) {
        if (threadIdx.x % 32 == 0) arrive(&empty[step % STAGES]);
    };
    auto multiply_queries = [&](int step) {
        wgmma_fence();
        issue_scores(scores, math.q, k_tile(step));
    };
    auto multiply_values = [&](int step) {
        wait_for(barriers.v_full, step);
        wgmma_fence();
        issue_output(math.acc, weights, k_tile(step) + TILE_BYTES);
    };
    auto update_softmax = [&](int step) {
        if (CAUSAL && step == steps - 1)
            mask_fragments(scores, tile.row + math.row, step * ROWS);
        math.softmax.update(scores);
    };
    auto rescale_and_pack = [&] {
        math.softmax.rescale_output(math.acc);
        pack_fragments(scores, weights);
    };
    wait(&barriers.q_full, 0);
    if (SCHEDULE == IN_ORDER) {
        for (int step = 0; step < steps; ++step) {
            wait_for(barriers.k_full, step);
            multiply_queries(step);
            wgmma_wait<0>();
            pin(scores);
            release(barriers.k_empty, step);
            update_softmax(step);
            rescale_and_pack();
            multiply_values(step);
            wgmma_wait<0>();
            pin(math.acc);
            release(barriers.v_empty, step);
        }
    } else {
        if (warpgroup == 1) pass_turn(1);  // the first turn is warpgroup 0's
        wait_for(barriers.k_full, 0);
        multiply_queries(0);
        wgmma_wait<0>();
        pin(scores);
        release(barriers.k_empty, 0);
        update_softmax(0);
        rescale_and_pack();
        for (int step = 1; step < steps; ++step) {
            wait_for(barriers.k_full, step);
            await_turn(warpgroup);
            if (SCHEDULE == OVERLAPPED) {
                multiply_queries(step);
                multiply_values(step - 1);
                pass_turn(warpgroup);
                wgmma_wait<1>();
                pin(scores);
                release(barriers.k_empty, step);
                update_softmax(step);
                compute_before_wait(math.softmax, &barriers.q_full);
                wgmma_wait<0>();
                pin(math.acc);
                release(barriers.v_empty, step - 1);
            } else {
                multiply_values(step - 1);
                multiply_queries(step);
                pass_turn(warpgroup);
                wgmma_wait<0>();
                pin(math.acc);
                pin(scores);
                release(barriers.v_empty, step - 1);
                release(barriers.k_empty, step);
                update_softmax(step);
            }
            rescale_and_pack();
        }
        multiply_values(steps - 1);
        wgmma_wait<0>();
        pin(math.acc);
    }
    math.epilogue(out + size_t(tile.first_row + tile.row) * HEAD);
}

template <bool CAUSAL>
__global__ void __launch_bounds__(PRODUCER_AND_CONSUMERS, 1)
attention_specialised(ATTENTION_PARAMETERS) {
    attend_specialised<IN_ORDER, CAUSAL>(&q, &k, &v, out, heads, length);
}

template <bool CAUSAL>
__global__ void __launch_bounds__(PRODUCER_AND_CONSUMERS, 1)
attention_pingpong(ATTENTION_PARAMETERS) {
    attend_specialised<IN_TURNS, CAUSAL>(&q, &k, &v, out, heads, length);
}

template <bool CAUSAL>
__global__ void __launch_bounds__(PRODUCER_AND_CONSUMERS, 1)
attention_overlapped(ATTENTION_PARAMETERS) {
    attend_specialised<OVERLAPPED, CAUSAL>(&q, &k, &v, out, heads, length);
}

template <typename Kernel>
cudaError_t launch(Kernel kernel, const bf16* q, const bf16* k, const bf16* v, bf16* out, int heads,
                   int length, cudaStream_t stream, int threads = PRODUCER_AND_CONSUMERS,
                   int rows = ROWS, int keys = ROWS, int scratch = 0) {
    if (length % rows || length % keys) return cudaErrorInvalidValue;  // whole tiles
    CUtensorMap maps[3];
    const int total = heads * length;
    if (cudaError_t error = make_tensor_map(&maps[0], q, total, HEAD, rows)) return error;
    if (cudaError_t error = make_tensor_map(&maps[1], k, total, HEAD, keys)) return error;
    if (cudaError_t error = make_tensor_map(&maps[2], v, total, HEAD, keys)) return error;
    const int shared = tile_bytes(rows) + STAGES * 2 * tile_bytes(keys) + scratch + SWIZZLE_ALIGN;
    if (cudaError_t error = cudaFuncSetAttribute(
            kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared))
        return error;
    kernel<<<total / rows, threads, shared, stream>>>(maps[0], maps[1], maps[2], out, heads,
                                                      length);
    return cudaGetLastError();
}

extern "C" cudaError_t cuda_cores(const bf16* q, const bf16* k, const bf16* v, bf16* out, int heads,
                                  int length, int causal, cudaStream_t stream) {
    return launch(causal ? attention_cuda_cores<true> : attention_cuda_cores<false>, q, k, v, out,
                  heads, length, stream, FmaMath::THREADS, FmaMath::ROWS, FmaMath::KEYS,
                  FmaMath::SCRATCH);
}

extern "C" cudaError_t mma_sync(const bf16* q, const bf16* k, const bf16* v, bf16* out, int heads,
                                int length, int causal, cudaStream_t stream) {
    return launch(causal ? attention_mma_sync<true> : attention_mma_sync<false>, q, k, v, out,
                  heads, length, stream, MmaMath::THREADS, MmaMath::ROWS, MmaMath::KEYS);
}

extern "C" cudaError_t wgmma(const bf16* q, const bf16* k, const bf16* v, bf16* out, int heads,
                             int length, int causal, cudaStream_t stream) {
    return launch(causal ? attention_wgmma<true> : attention_wgmma<false>, q, k, v, out, heads,
                  length, stream, WgmmaMath::THREADS);
}

extern "C" cudaError_t specialised(const bf16* q, const bf16* k, const bf16* v, bf16* out,
                                   int heads, int length, int causal, cudaStream_t stream) {
    return launch(causal ? attention_specialised<true> : attention_specialised<false>, q, k, v, out,
                  heads, length, stream);
}

extern "C" cudaError_t pingpong(const bf16* q, const bf16* k, const bf16* v, bf16* out, int heads,
                                int length, int causal, cudaStream_t stream) {
    return launch(causal ? attention_pingpong<true> : attention_pingpong<false>, q, k, v, out,
                  heads, length, stream);
}

extern "C" cudaError_t overlapped(const bf16* q, const bf16* k, const bf16* v, bf16* out, int heads,
                                  int length, int causal, cudaStream_t stream) {
    return launch(causal ? attention_overlapped<true> : attention_overlapped<false>, q, k, v, out,
                  heads, length, stream);
}
