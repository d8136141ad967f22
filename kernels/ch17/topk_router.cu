// A fused mixture-of-experts router: the 4 largest of 128 logits per token, and their softmax.
//
// 8 lanes share a row (a token), so a warp routes 4 rows; each lane loads 16 logits. The memory is
// the limit only if a row takes few instructions, so no list of candidates with their indices goes
// through shuffles:
//
//   1. Threshold: the 4th largest of the 16 maxima of eight logits is at most the 4th largest
//      logit, because at least 4 logits reach it. Sorting maxima needs values only: a
//      compare-exchange is 2 instructions, and three butterfly steps merge those of the 8 lanes.
//   2. Candidates: logits that reach the threshold go to shared memory with their experts. For
//      logits in random order there are 4.4 on average. A lane reads the candidate groups of four
//      again, from the L1 cache, because registers have no index.
//   3. Rank: each lane compares one candidate with the others. The denominator of the softmax over
//      all experts cancels when the weights are scaled to a sum of 1, so it is not computed.
//
// Rows with more than 8 candidates, such as those with many equal logits, are sorted by one lane.
// The order of equal logits is arbitrary.

#include <cmath>
#include <cstdint>
#include <cuda_runtime.h>

constexpr int EXPERTS = 128, TOP = 4;
constexpr int LANES = 8;                    // per row, and the most candidates
constexpr int QUADS = EXPERTS / LANES / 4;  // groups of four logits per lane
constexpr int THREADS = 256, ROWS = THREADS / LANES;
constexpr unsigned ALL = ~0u;               // every lane of the warp takes part

__device__ void exchange(float& larger, float& smaller) {
    const float value = larger;
    larger = fmaxf(value, smaller);
    smaller = fminf(value, smaller);
}

__device__ void sort_bitonic(float (&v)[TOP]) {
    exchange(v[0], v[2]), exchange(v[1], v[3]);
    exchange(v[0], v[1]), exchange(v[2], v[3]);
}

// Merge with the descending list of another lane and keep the 4 largest. The element-wise maximum
// of one list and the other reversed holds them; it is a bitonic sequence.
__device__ void merge_with_lane(float (&top)[TOP], int distance) {
    float other[TOP];
    for (int i = 0; i < TOP; ++i) other[i] = __shfl_xor_sync(ALL, top[i], distance);
    for (int i = 0; i < TOP; ++i) top[i] = fmaxf(top[i], other[TOP - 1 - i]);
    sort_bitonic(top);
}

// The experts of a row one after the other.
__device__ void select_one_by_one(const float* row, float* weights, int64_t* chosen) {
    float exponentials[TOP], denominator = 0, largest = 0;
    for (int rank = 0; rank < TOP; ++rank) {
        int best = -1;
        for (int expert = 0; expert < EXPERTS; ++expert) {
            bool is_free = true;
            for (int earlier = 0; earlier < rank; ++earlier) is_free &= chosen[earlier] != expert;
            if (is_free && (best < 0 || row[expert] > row[best])) best = expert;
        }
        chosen[rank] = best;
        if (rank == 0) largest = row[best];
        denominator += exponentials[rank] = __expf(row[best] - largest);
    }
    for (int i = 0; i < TOP; ++i) weights[i] = __fdividef(exponentials[i], denominator);
}

__global__ void __launch_bounds__(THREADS)
route_rows(const float* logits, float* weights, int64_t* experts, int rows) {
    __shared__ float candidates[ROWS][LANES];
    __shared__ int candidate_experts[ROWS][LANES];
    __shared__ int counts[ROWS];
    const int lane = threadIdx.x % LANES, slot = threadIdx.x / LANES;
    const int row = blockIdx.x * ROWS + slot;
    // lanes of a last, incomplete warp work on the last row, because shuffles need all lanes
    const float* start = logits + size_t(min(row, rows - 1)) * EXPERTS;
    const float4* quads = reinterpret_cast<const float4*>(start);

    float4 values[QUADS];  // the logits of experts 32 j + 4 lane + 0 ... 3, for j = 0 ... 3
    for (int j = 0; j < QUADS; ++j) values[j] = quads[j * LANES + lane];
    candidates[slot][lane] = -INFINITY;
    if (lane == 0) counts[slot] = 0;

    float maxima[QUADS];
    for (int j = 0; j < QUADS; ++j)
        maxima[j] = fmaxf(fmaxf(values[j].x, values[j].y), fmaxf(values[j].z, values[j].w));
    float first = fmaxf(maxima[0], maxima[1]), second = fmaxf(maxima[2], maxima[3]);
    exchange(first, second);
    float top[TOP] = {first, second};  // and the two of the other lane in reverse: bitonic
    top[2] = __shfl_xor_sync(ALL, second, 1), top[3] = __shfl_xor_sync(ALL, first, 1);
    sort_bitonic(top);
    merge_with_lane(top, 2);
    merge_with_lane(top, 4);
    const float threshold = top[TOP - 1];

    unsigned pending = 0;  // bit j: a logit of group j reaches the threshold
    for (int j = 0; j < QUADS; ++j) pending |= unsigned(maxima[j] >= threshold) << j;
    __syncwarp();  // counts and candidates are initialized
    while (pending) {
        const int quad = (__ffs(pending) - 1) * LANES + lane;
        pending &= pending - 1;
        const float4 v = quads[quad];
        const float four[4] = {v.x, v.y, v.z, v.w};
        for (int i = 0; i < 4; ++i) {
            if (four[i] < threshold) continue;
            const int at = atomicAdd(&counts[slot], 1);
            if (at >= LANES) continue;
            candidates[slot][at] = four[i], candidate_experts[slot][at] = 4 * quad + i;
        }
    }
    __syncwarp();
    if (row >= rows) return;
    weights += size_t(row) * TOP, experts += size_t(row) * TOP;
    if (counts[slot] > LANES) {
        if (lane == 0) select_one_by_one(start, weights, experts);
        return;
    }

    const float candidate = candidates[slot][lane];
    int rank = 0;
    for (int i = 0; i < LANES; ++i) {
        const float other = candidates[slot][i];
        rank += other > candidate || (other == candidate && i < lane);
    }
    const float exponential = rank < TOP ? __expf(candidate - top[0]) : 0;
    float denominator = exponential;
    const unsigned lanes_of_row = 0xffu << (threadIdx.x % 32 / LANES * LANES);
    for (int distance = 1; distance < LANES; distance *= 2)
        denominator += __shfl_xor_sync(lanes_of_row, denominator, distance);
    if (rank < TOP) {
        weights[rank] = __fdividef(exponential, denominator);
        experts[rank] = candidate_experts[slot][lane];
    }
}

// logits: rows x 128; weights and experts: rows x 4, the largest weight first.
extern "C" cudaError_t route(const float* logits, float* weights, int64_t* experts, int rows,
                             cudaStream_t stream) {
    route_rows<<<(rows + ROWS - 1) / ROWS, THREADS, 0, stream>>>(logits, weights, experts, rows);
    return cudaGetLastError();
}
