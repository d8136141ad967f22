// Inclusive prefix sum of n ints: how many times must the data pass through memory?
//
//   three_kernels  Scan tiles of 4096 on their own and note their sums; scan the sums; add to each
//                  tile the sum of all before it. The data are read twice and written twice.
//   look_back      One kernel, one read and one write. A tile publishes its own sum as soon as it
//                  has it (PARTIAL), and then looks back: it adds up the sums of the tiles before
//                  it, 32 at a time, until it meets one that already knows its whole prefix
//                  (COMPLETE); then it publishes its own. Hardly ever does it look back far,
//                  because all tiles do so at the same time.
//
// Two points make look_back safe. Tiles are numbered in the order in which blocks begin (a ticket),
// so whatever a tile waits for is running or done. And state and sum are one 64-bit word, so that
// a reader sees both or neither, and no fence is needed.
//
// Inside a tile each warp scans 512 neighbours: a lane holds 4 of each of 4 rows of 128.

#include <cstdint>
#include <cuda_runtime.h>

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int VECTORS = 4;                    // of 4 ints, for each lane
constexpr int TILE = THREADS * VECTORS * 4;

enum : uint32_t { EMPTY, PARTIAL, COMPLETE };

__device__ int warp_scan(int value) {  // inclusive
    for (int apart = 1; apart < 32; apart *= 2) {
        const int left = __shfl_up_sync(~0u, value, apart);
        if (threadIdx.x % 32 >= apart) value += left;
    }
    return value;
}

struct Tile {
    int4 held[VECTORS];

    // Where vector i of this lane begins, within the tile.
    static __device__ int at(int i) {
        return ((threadIdx.x / 32 * VECTORS + i) * 32 + threadIdx.x % 32) * 4;
    }

    __device__ void load(const int* in, size_t start, size_t n) {
        for (int i = 0; i < VECTORS; ++i) {
            const size_t from = start + at(i);
            if (from + 4 <= n) {
                held[i] = __ldcs(reinterpret_cast<const int4*>(in + from));
            } else {
                held[i].x = from + 0 < n ? in[from + 0] : 0;
                held[i].y = from + 1 < n ? in[from + 1] : 0;
                held[i].z = from + 2 < n ? in[from + 2] : 0;
                held[i].w = 0;
            }
        }
    }

    // Turn values into inclusive sums within the tile, and return the sum of all.
    __device__ int scan() {
        __shared__ int sums[WARPS];
        const int warp = threadIdx.x / 32;
        int before = 0;  // the sum of the rows before this one
        for (int i = 0; i < VECTORS; ++i) {
            int4& v = held[i];
            v.y += v.x, v.z += v.y, v.w += v.z;
            const int upto = warp_scan(v.w);
            add(i, before + upto - v.w);
            before += __shfl_sync(~0u, upto, 31);
        }
        if (threadIdx.x % 32 == 0) sums[warp] = before;
        __syncthreads();
        int left = 0, all = 0;
        for (int w = 0; w < WARPS; ++w) {
            left += w < warp ? sums[w] : 0;
            all += sums[w];
        }
        for (int i = 0; i < VECTORS; ++i) add(i, left);
        return all;
    }

    __device__ void add(int i, int value) {
        held[i].x += value, held[i].y += value, held[i].z += value, held[i].w += value;
    }

    __device__ void store(int* out, size_t start, size_t n) const {
        for (int i = 0; i < VECTORS; ++i) {
            const size_t to = start + at(i);
            if (to + 4 <= n) {
                __stcs(reinterpret_cast<int4*>(out + to), held[i]);
            } else {
                if (to + 0 < n) out[to + 0] = held[i].x;
                if (to + 1 < n) out[to + 1] = held[i].y;
                if (to + 2 < n) out[to + 2] = held[i].z;
            }
        }
    }
};

__global__ void __launch_bounds__(THREADS)
scan_tiles(const int* in, int* out, int* sums, size_t n) {
    const size_t start = size_t(blockIdx.x) * TILE;
    Tile tile;
    tile.load(in, start, n);
    const int all = tile.scan();
    tile.store(out, start, n);
    if (threadIdx.x == 0) sums[blockIdx.x] = all;
}

__global__ void __launch_bounds__(THREADS) scan_sums(int* sums, int count) {  // one block
    __shared__ int carry;
    if (threadIdx.x == 0) carry = 0;
    for (int start = 0; start < count; start += TILE) {
        Tile tile;
        tile.load(sums, start, count);
        const int all = tile.scan();  // its barrier also makes `carry` visible
        for (int i = 0; i < VECTORS; ++i) tile.add(i, carry);
        tile.store(sums, start, count);
        __syncthreads();
        if (threadIdx.x == 0) carry += all;
    }
}

__global__ void __launch_bounds__(THREADS) add_sums(int* out, const int* sums, size_t n) {
    const size_t start = size_t(blockIdx.x + 1) * TILE;  // the first tile is right already
    Tile tile;
    tile.load(out, start, n);
    for (int i = 0; i < VECTORS; ++i) tile.add(i, sums[blockIdx.x]);
    tile.store(out, start, n);
}

__device__ void publish(uint64_t* word, uint32_t state, int sum) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;"
                 :: "l"(word), "l"(uint64_t(state) << 32 | uint32_t(sum)) : "memory");
}

__device__ uint64_t look(const uint64_t* word) {
    uint64_t seen;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(seen) : "l"(word) : "memory");
    return seen;
}

// The sum of all tiles before `index`, by one warp: lane l looks at tile index - 1 - l.
__device__ int sum_before(const uint64_t* words, int index) {
    const int lane = threadIdx.x % 32;
    int sum = 0;
    for (int nearest = index - 1;; nearest -= 32) {
        const int mine = nearest - lane;
        uint64_t seen = uint64_t(COMPLETE) << 32;  // before the first tile: 0, and complete
        if (mine >= 0)
            while ((seen = look(words + mine)) >> 32 == EMPTY) {}
        __syncwarp();
        const unsigned complete = __ballot_sync(~0u, seen >> 32 == COMPLETE);
        const int last = complete ? __ffs(complete) - 1 : 31;  // beyond it all is contained in it
        sum += __reduce_add_sync(~0u, lane <= last ? int(uint32_t(seen)) : 0);
        if (complete) return sum;
    }
}

// words[0] is the ticket counter, words[1 + t] the state and sum of tile t; all are 0 at first.
__global__ void __launch_bounds__(THREADS)
scan_look_back(const int* in, int* out, uint64_t* words, size_t n) {
    __shared__ int ticket, prefix;
    if (threadIdx.x == 0) ticket = atomicAdd(reinterpret_cast<unsigned*>(words), 1u);
    __syncthreads();
    const int index = ticket;
    const size_t start = size_t(index) * TILE;
    Tile tile;
    tile.load(in, start, n);
    const int all = tile.scan();
    if (threadIdx.x < 32) {
        if (threadIdx.x == 0) publish(words + 1 + index, index ? PARTIAL : COMPLETE, all);
        const int before = index ? sum_before(words + 1, index) : 0;
        if (threadIdx.x == 0) {
            if (index) publish(words + 1 + index, COMPLETE, before + all);
            prefix = before;
        }
    }
    __syncthreads();
    for (int i = 0; i < VECTORS; ++i) tile.add(i, prefix);
    tile.store(out, start, n);
}

int tiles_of(int64_t n) { return int((n + TILE - 1) / TILE); }

// `scratch` has room for n / 4096 + 2 words of 64 bits.
extern "C" cudaError_t three_kernels(const int* in, int* out, int64_t* scratch, int64_t n,
                                     cudaStream_t stream) {
    int* sums = reinterpret_cast<int*>(scratch);
    const int tiles = tiles_of(n);
    scan_tiles<<<tiles, THREADS, 0, stream>>>(in, out, sums, n);
    scan_sums<<<1, THREADS, 0, stream>>>(sums, tiles);
    if (tiles > 1) add_sums<<<tiles - 1, THREADS, 0, stream>>>(out, sums, n);
    return cudaGetLastError();
}

extern "C" cudaError_t look_back(const int* in, int* out, int64_t* scratch, int64_t n,
                                 cudaStream_t stream) {
    const int tiles = tiles_of(n);
    if (cudaError_t error = cudaMemsetAsync(scratch, 0, (tiles + 1) * sizeof(int64_t), stream))
        return error;
    scan_look_back<<<tiles, THREADS, 0, stream>>>(in, out, reinterpret_cast<uint64_t*>(scratch), n);
    return cudaGetLastError();
}
