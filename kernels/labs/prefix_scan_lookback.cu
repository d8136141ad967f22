// Inclusive prefix sum of n ints, with three passes of the data through memory or with two.
//
//   three_kernels  Reduce-then-scan: sum each tile; scan the sums; then scan each tile, starting
//                  from the sum of all previous tiles. Two reads and one write.
//   look_back      Single pass with decoupled look-back: one read, one write. A tile first
//                  publishes its sum (AGGREGATE). Then it looks back: it adds the sums of its
//                  predecessors, WINDOWS x 32 at a time, until it reaches one that has published
//                  its inclusive prefix (PREFIX); then it publishes its own prefix.
//
// On fast memory, ticket and look-back take a good part of the time: about forty tiles start per
// microsecond, and each reads the states of others from the L2 cache. So tiles are large, and
// several windows are read at once.
//
// Two points make look_back safe. Tiles are numbered in the order in which blocks start (a ticket),
// so a tile waits only for tiles that are running or done. State and sum share one 64-bit word, so
// a reader sees both or neither, and no fence is needed.
//
// Within a tile, each warp scans neighbors: a lane holds 4 ints of each of VECTORS rows of 128.

#include <cstdint>
#include <cuda_runtime.h>

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int VECTORS = 8;                   // int4 per lane
constexpr int TILE = THREADS * VECTORS * 4;  // ints per block
constexpr int WINDOWS = 4;                   // of 32 tiles each, whose states are read at once

enum : uint32_t { INVALID, AGGREGATE, PREFIX };

__device__ int warp_inclusive_scan(int value) {
    for (int distance = 1; distance < 32; distance *= 2) {
        const int left = __shfl_up_sync(~0u, value, distance);
        if (threadIdx.x % 32 >= distance) value += left;
    }
    return value;
}

struct Tile {
    int4 values[VECTORS];

    // Offset within the tile of this lane's vector i.
    static __device__ int offset(int i) {
        return ((threadIdx.x / 32 * VECTORS + i) * 32 + threadIdx.x % 32) * 4;
    }

    __device__ void load(const int* in, size_t start, size_t n) {
        for (int i = 0; i < VECTORS; ++i) {
            const size_t from = start + offset(i);
            if (from + 4 <= n) {
                values[i] = __ldcs(reinterpret_cast<const int4*>(in + from));
            } else {
                values[i].x = from + 0 < n ? in[from + 0] : 0;
                values[i].y = from + 1 < n ? in[from + 1] : 0;
                values[i].z = from + 2 < n ? in[from + 2] : 0;
                values[i].w = 0;
            }
        }
    }

    // Inclusive scan of the tile, in place; returns the sum of the tile.
    __device__ int scan() {
        __shared__ int warp_sums[WARPS];
        const int warp = threadIdx.x / 32;
        int previous_rows = 0;  // sum of the warp's rows before row i
        for (int i = 0; i < VECTORS; ++i) {
            int4& v = values[i];
            v.y += v.x, v.z += v.y, v.w += v.z;
            const int inclusive = warp_inclusive_scan(v.w);
            add(i, previous_rows + inclusive - v.w);
            previous_rows += __shfl_sync(~0u, inclusive, 31);
        }
        if (threadIdx.x % 32 == 0) warp_sums[warp] = previous_rows;
        __syncthreads();
        int previous_warps = 0, tile_sum = 0;
        for (int w = 0; w < WARPS; ++w) {
            previous_warps += w < warp ? warp_sums[w] : 0;
            tile_sum += warp_sums[w];
        }
        for (int i = 0; i < VECTORS; ++i) add(i, previous_warps);
        return tile_sum;
    }

    __device__ void add(int i, int value) {
        values[i].x += value, values[i].y += value, values[i].z += value, values[i].w += value;
    }

    __device__ void store(int* out, size_t start, size_t n) const {
        for (int i = 0; i < VECTORS; ++i) {
            const size_t to = start + offset(i);
            if (to + 4 <= n) {
                __stcs(reinterpret_cast<int4*>(out + to), values[i]);
            } else {
                if (to + 0 < n) out[to + 0] = values[i].x;
                if (to + 1 < n) out[to + 1] = values[i].y;
                if (to + 2 < n) out[to + 2] = values[i].z;
            }
        }
    }
};

__global__ void __launch_bounds__(THREADS) sum_tiles(const int* in, int* sums, size_t n) {
    __shared__ int warp_sums[WARPS];
    Tile tile;
    tile.load(in, size_t(blockIdx.x) * TILE, n);
    int sum = 0;
    for (const int4& v : tile.values) sum += v.x + v.y + v.z + v.w;
    sum = __reduce_add_sync(~0u, sum);
    if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < WARPS; ++w) sum += warp_sums[w];
        sums[blockIdx.x] = sum;
    }
}

__global__ void __launch_bounds__(THREADS) scan_sums(int* sums, int count) {  // by one block
    __shared__ int carry;
    if (threadIdx.x == 0) carry = 0;
    for (int start = 0; start < count; start += TILE) {
        Tile tile;
        tile.load(sums, start, count);
        const int tile_sum = tile.scan();  // its barrier also makes `carry` visible
        for (int i = 0; i < VECTORS; ++i) tile.add(i, carry);
        tile.store(sums, start, count);
        __syncthreads();
        if (threadIdx.x == 0) carry += tile_sum;
    }
}

__global__ void __launch_bounds__(THREADS)
scan_tiles(const int* in, int* out, const int* sums, size_t n) {
    const size_t start = size_t(blockIdx.x) * TILE;
    Tile tile;
    tile.load(in, start, n);
    tile.scan();
    const int prefix = blockIdx.x ? sums[blockIdx.x - 1] : 0;
    for (int i = 0; i < VECTORS; ++i) tile.add(i, prefix);
    tile.store(out, start, n);
}

__device__ void publish(uint64_t* tile_state, uint32_t state, int sum) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;"
                 :: "l"(tile_state), "l"(uint64_t(state) << 32 | uint32_t(sum)) : "memory");
}

__device__ uint64_t load_relaxed(const uint64_t* tile_state) {
    uint64_t word;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(tile_state) : "memory");
    return word;
}

// Sum of all tiles before `index`, by one warp: lane l reads the states of tiles index - 1 - l,
// index - 33 - l and so on.
__device__ int exclusive_prefix(const uint64_t* tile_states, int index) {
    const int lane = threadIdx.x % 32;
    int sum = 0;
    for (int nearest = index - 1 - lane;; nearest -= 32 * WINDOWS) {
        uint64_t words[WINDOWS];
        for (int w = 0; w < WINDOWS; ++w) {
            const int predecessor = nearest - 32 * w;
            // before the first tile: a prefix of 0
            words[w] = predecessor < 0 ? uint64_t(PREFIX) << 32
                                       : load_relaxed(tile_states + predecessor);
        }
        for (int w = 0; w < WINDOWS; ++w) {
            while (words[w] >> 32 == INVALID)
                words[w] = load_relaxed(tile_states + nearest - 32 * w);
            __syncwarp();
            const unsigned prefix_lanes = __ballot_sync(~0u, words[w] >> 32 == PREFIX);
            // the nearest prefix already contains the tiles before it
            const int last_lane = prefix_lanes ? __ffs(prefix_lanes) - 1 : 31;
            sum += __reduce_add_sync(~0u, lane <= last_lane ? int(uint32_t(words[w])) : 0);
            if (prefix_lanes) return sum;
        }
    }
}

// scratch[0] is the ticket counter, scratch[1 + t] the state and sum of tile t; all start at 0.
__global__ void __launch_bounds__(THREADS)
scan_look_back(const int* in, int* out, uint64_t* scratch, size_t n) {
    __shared__ int ticket, prefix;
    if (threadIdx.x == 0) ticket = atomicAdd(reinterpret_cast<unsigned*>(scratch), 1u);
    __syncthreads();
    const int index = ticket;
    const size_t start = size_t(index) * TILE;
    Tile tile;
    tile.load(in, start, n);
    const int tile_sum = tile.scan();
    if (threadIdx.x < 32) {
        if (threadIdx.x == 0) publish(scratch + 1 + index, index ? AGGREGATE : PREFIX, tile_sum);
        const int exclusive = index ? exclusive_prefix(scratch + 1, index) : 0;
        if (threadIdx.x == 0) {
            if (index) publish(scratch + 1 + index, PREFIX, exclusive + tile_sum);
            prefix = exclusive;
        }
    }
    __syncthreads();
    for (int i = 0; i < VECTORS; ++i) tile.add(i, prefix);
    tile.store(out, start, n);
}

int tile_count(int64_t n) { return int((n + TILE - 1) / TILE); }

// `scratch` has room for n / TILE + 2 words of 64 bits.
extern "C" cudaError_t three_kernels(const int* in, int* out, int64_t* scratch, int64_t n,
                                     cudaStream_t stream) {
    int* sums = reinterpret_cast<int*>(scratch);
    const int tiles = tile_count(n);
    sum_tiles<<<tiles, THREADS, 0, stream>>>(in, sums, n);
    scan_sums<<<1, THREADS, 0, stream>>>(sums, tiles);
    scan_tiles<<<tiles, THREADS, 0, stream>>>(in, out, sums, n);
    return cudaGetLastError();
}

extern "C" cudaError_t look_back(const int* in, int* out, int64_t* scratch, int64_t n,
                                 cudaStream_t stream) {
    const int tiles = tile_count(n);
    if (cudaError_t error = cudaMemsetAsync(scratch, 0, (tiles + 1) * sizeof(int64_t), stream))
        return error;
    scan_look_back<<<tiles, THREADS, 0, stream>>>(in, out, reinterpret_cast<uint64_t*>(scratch), n);
    return cudaGetLastError();
}
