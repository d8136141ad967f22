// A fused mixture-of-experts router: the 4 largest of 128 logits per token, and their softmax.
//
// 8 lanes share a row (a token), so a warp routes 4 rows; each lane keeps 16 logits in registers.
//
//   1. Values only: each lane sorts its logits in fours and merges them to its 4 largest. Three
//      butterfly steps merge those of the 8 lanes. A compare-exchange of values alone is 2
//      instructions (max and min); indices would make it 5, and double the shuffles.
//   2. Weights: the softmax denominator over all experts cancels when the weights are scaled to a
//      sum of 1, so 4 exponentials per row are enough.
//   3. Experts: a lane that holds one of the 4 values knows its rank by comparing it with them.
//
// Where logits are equal, the rank is not unique. Then one lane walks through the row again and
// takes the lower index first.

#include <cmath>
#include <cstdint>
#include <cuda_runtime.h>

constexpr int EXPERTS = 128, TOP = 4;
constexpr int LANES = 8;                 // per row
constexpr int HELD = EXPERTS / LANES;    // logits per lane
constexpr int THREADS = 256;
constexpr unsigned ALL = ~0u;            // every lane of the warp takes part

__device__ void exchange(float& larger, float& smaller) {
    const float value = larger;
    larger = fmaxf(value, smaller);
    smaller = fminf(value, smaller);
}

__device__ void sort_4(float (&v)[TOP]) {
    exchange(v[0], v[1]), exchange(v[2], v[3]);
    exchange(v[0], v[2]), exchange(v[1], v[3]);
    exchange(v[1], v[2]);
}

// Merge two descending lists and keep the 4 largest, in descending order. The element-wise maximum
// of one list and the other reversed holds them (a bitonic sequence); two steps sort it.
__device__ void merge_4(float (&top)[TOP], const float (&other)[TOP]) {
    for (int i = 0; i < TOP; ++i) top[i] = fmaxf(top[i], other[TOP - 1 - i]);
    exchange(top[0], top[2]), exchange(top[1], top[3]);
    exchange(top[0], top[1]), exchange(top[2], top[3]);
}

// The experts of a row one after the other; of equal logits, the lower index comes first.
__device__ void select_one_by_one(const float* row, int64_t* chosen) {
    for (int rank = 0; rank < TOP; ++rank) {
        int best = -1;
        for (int expert = 0; expert < EXPERTS; ++expert) {
            bool is_free = true;
            for (int earlier = 0; earlier < rank; ++earlier) is_free &= chosen[earlier] != expert;
            if (is_free && (best < 0 || row[expert] > row[best])) best = expert;
        }
        chosen[rank] = best;
    }
}

__global__ void __launch_bounds__(THREADS)
route_rows(const float* logits, float* weights, int64_t* experts, int rows) {
    const int lane = threadIdx.x % LANES;
    const int row = blockIdx.x * (THREADS / LANES) + threadIdx.x / LANES;
    // lanes of a last, incomplete warp work on the last row, because shuffles need all lanes
    const float* start = logits + size_t(min(row, rows - 1)) * EXPERTS;

    float values[HELD];  // the logits of experts 32 j + 4 lane + 0 ... 3, for j = 0 ... 3
    for (int j = 0; j < HELD / 4; ++j) {
        const float4 v = reinterpret_cast<const float4*>(start)[j * LANES + lane];
        values[4 * j] = v.x, values[4 * j + 1] = v.y;
        values[4 * j + 2] = v.z, values[4 * j + 3] = v.w;
    }
    float top[TOP] = {values[0], values[1], values[2], values[3]};
    sort_4(top);
    for (int j = 1; j < HELD / 4; ++j) {
        float four[TOP] = {values[4 * j], values[4 * j + 1], values[4 * j + 2], values[4 * j + 3]};
        sort_4(four);
        merge_4(top, four);
    }
    for (int step = 1; step < LANES; step *= 2) {
        float other[TOP];
        for (int i = 0; i < TOP; ++i) other[i] = __shfl_xor_sync(ALL, top[i], step);
        merge_4(top, other);
    }

    unsigned selected = 0;  // bit s: values[s] is at least the 4th largest of the row
    for (int slot = 0; slot < HELD; ++slot) selected |= unsigned(values[slot] >= top[3]) << slot;
    int count = __popc(selected);
    for (int step = 1; step < LANES; step *= 2) count += __shfl_xor_sync(ALL, count, step);
    if (row >= rows) return;

    float exponentials[TOP], denominator = 0;
    for (int i = 0; i < TOP; ++i) denominator += exponentials[i] = __expf(top[i] - top[0]);
    for (int i = 0; i < TOP; ++i)  // unrolled: an index at run time would need local memory
        if (lane == i) weights[size_t(row) * TOP + i] = __fdividef(exponentials[i], denominator);

    int64_t* chosen = experts + size_t(row) * TOP;
    const bool is_unique = count == TOP && top[0] > top[1] && top[1] > top[2] && top[2] > top[3];
    if (!is_unique) {
        if (lane == 0) select_one_by_one(start, chosen);
        return;
    }
    while (selected) {
        const int slot = __ffs(selected) - 1;
        selected &= selected - 1;
        const int expert = slot / 4 * 4 * LANES + 4 * lane + slot % 4;
        const float value = start[expert];  // from the L1 cache: registers have no index
        chosen[(value < top[0]) + (value < top[1]) + (value < top[2])] = expert;
    }
}

// logits: rows x 128; weights and experts: rows x 4, the largest weight first.
extern "C" cudaError_t route(const float* logits, float* weights, int64_t* experts, int rows,
                             cudaStream_t stream) {
    const int rows_per_block = THREADS / LANES;
    route_rows<<<(rows + rows_per_block - 1) / rows_per_block, THREADS, 0, stream>>>(
        logits, weights, experts, rows);
    return cudaGetLastError();
}
