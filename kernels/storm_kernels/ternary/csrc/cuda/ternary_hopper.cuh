// Products with many x on Hopper's tensor cores, which read x from shared memory.
//
// A warpgroup processes 64 rows of w with all x of its block; one instruction multiplies 64 rows
// with up to 128 x. w is decoded from planes into the registers that the instruction reads. x is in
// shared memory, and all warpgroups of the block read it. The blocks of a cluster share rows and
// take spans of columns in turn; their sums are added through shared memory, in the order of ranks.
// (PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions"; DESIGN.md, "Hopper".)
//
// Thread t of four has the 16 bytes of planes number t of a span of 512 columns in memory order, as
// in ternary_matmul.cuh. The order of columns within an instruction is free if x has the same
// order. A chunk is word q of those 16 bytes: 128 columns, 32 of each of the four threads.
//
// Layout of the reordered x: [tile of kEights][span][chunk q][step][eight][h][x of 8][thread t] of
// one word, which multiplies register h of thread t. So a chunk is contiguous and copied unchanged,
// and [h][x of 8][t] are two of the instruction's matrices of 8 rows of 16 bytes.
//
// Single instructions are in ternary_hopper_instructions.cuh, which is included before this file.
// The tests use another file, which computes on the host what PTX specifies.
#pragma once

#include "ternary_planes.cuh"

constexpr u32 kHopperSpan = 512;   // columns
constexpr u32 kHopperOrderThreads = 128;
constexpr u32 kGroupThreads = 128;  // per warpgroup
constexpr u32 kGroupRows = 64;
constexpr u32 kMaxStages = 8;   // chunks of x in shared memory
constexpr u32 kBarrierBytes = 128;  // at the start of shared memory: two barriers per stage
constexpr u32 kMeetingPad = 4;  // avoids bank conflicts between threads of a warp

// Spreads the two-bit codes of 32 columns to fields of four bits: field j of codes[r] is column
// 4 j + r. Bit 0 of a code is from bit0, bit 1 from bit1.
__device__ __forceinline__ void spread_codes(u32 bit0, u32 bit1, u32 (&codes)[4])
{
    constexpr u32 low = 0x55555555u, fields = 0x33333333u;
    const u32 even = (bit0 & low) | (bit1 << 1 & ~low), odd = (bit0 >> 1 & low) | (bit1 & ~low);
    codes[0] = even & fields;
    codes[1] = odd & fields;
    codes[2] = even >> 2 & fields;
    codes[3] = odd >> 2 & fields;
}

// int8: there are 4 steps of 32 columns. In step r, register h has columns 16 h + r, + 4, + 8 and
// + 12, in ascending bytes.
struct HopperInt8 {
    typedef int Sum;
    static constexpr u32 kSteps = 4;

    static __device__ __forceinline__ void expand(const u32 (&codes)[4], u32 step, u32& h0, u32& h1)
    {
        constexpr u32 values = 0xff000100u;  // of codes 3, 2, 1, 0
        h0 = look_up(values, codes[step]);
        h1 = look_up(values, codes[step] >> 16);
    }

    // Returns a word of x from 32 bytes in 8 loaded words.
    static constexpr u32 kLoads = 1;
    static __device__ __forceinline__ u32 word(const u32 (&loaded)[8], u32 step, u32 h)
    {
        const u32 both = 0x0040 + 0x0011 * step;  // byte `step` of two words
        return __byte_perm(__byte_perm(loaded[4 * h], loaded[4 * h + 1], both),
                           __byte_perm(loaded[4 * h + 2], loaded[4 * h + 3], both), 0x5410);
    }

    static __device__ __forceinline__ int doubled(int sum) { return sum; }
};

// bfloat16: there are 8 steps of 32 columns. In step 2 r + half, the lower half of register h has
// column 16 half + 4 h + r, the upper half the column 8 higher. Values are w / 2, whose lower bytes
// are 0; sums are doubled at the end, which is exact.
struct HopperBfloat16 {
    typedef float Sum;
    static constexpr u32 kSteps = 8;

    static __device__ __forceinline__ void expand(const u32 (&codes)[4], u32 step, u32& h0, u32& h1)
    {
        constexpr u32 upper_bytes = 0xbf003f00u;  // of codes 3, 2, 1, 0
        const u32 four = look_up(upper_bytes, codes[step / 2] >> 16 * (step % 2));
        h0 = look_up(four, 0x2404);
        h1 = four & 0xff00ff00u;
    }

    static constexpr u32 kLoads = 2;
    static __device__ __forceinline__ u32 word(const u32 (&loaded)[16], u32 step, u32 h)
    {
        const u32 column = 16 * (step % 2) + 4 * h + step / 2;
        return __byte_perm(loaded[column / 2], loaded[column / 2 + 4], column % 2 ? 0x7632 : 0x5410);
    }

    static __device__ __forceinline__ float doubled(float sum) { return 2.0f * sum; }
};

// Reorders x. A thread processes 32 columns of an x: chunk q of thread t.
template <class Math>
__device__ __forceinline__ void order(const u8* x, u64 x_pitch, u64 x_bytes, u64 spans, u64 batch,
                                      u64 eights, u32 width, u32* ordered)
{
    order_begins();
    const u64 place = static_cast<u64>(blockIdx.x) * kHopperOrderThreads + threadIdx.x;
    const u32 lane = place % kWarp, q = place / kWarp % 4;
    const u64 eight = place / (4 * kWarp) % eights, span = place / (4 * kWarp) / eights;
    if (span >= spans)
        return;
    const u64 b = 8 * eight + lane / 4;
    const u64 first = (span * kHopperSpan + 128 * (lane % 4) + 32 * q) * Math::kLoads;
    u32 loaded[8 * Math::kLoads] = {};
    if (b < batch)
#pragma unroll
        for (u32 i = 0; i < Math::kLoads; i++) {
            u32 words[8];
            load_x(x + b * x_pitch, first + 32 * i, x_bytes, words);
#pragma unroll
            for (u32 j = 0; j < 8; j++)
                loaded[8 * i + j] = words[j];
        }
    const u64 chunk = (eight / width * spans + span) * 4 + q;
    u32* to = ordered + (chunk * Math::kSteps * width + eight % width) * (2 * kWarp) + lane;
#pragma unroll
    for (u32 step = 0; step < Math::kSteps; step++)
#pragma unroll
        for (u32 h = 0; h < 2; h++)
            to[step * width * (2 * kWarp) + h * kWarp] = Math::word(loaded, step, h);
}

#define ORDER_HOPPER(name, math)                                                                   \
    extern "C" __global__ void __launch_bounds__(kHopperOrderThreads)                              \
        ternary_hopper_order_##name(const u8* x, u64 x_pitch, u64 x_bytes, u64 spans, u64 batch,   \
                                    u64 eights, u32 width, u32* ordered)                           \
    {                                                                                              \
        order<math>(x, x_pitch, x_bytes, spans, batch, eights, width, ordered);                    \
    }
ORDER_HOPPER(i8, HopperInt8)
ORDER_HOPPER(bf16, HopperBfloat16)

__device__ __forceinline__ void put_sum(void* out, int kind, u64 place, int total, float scale, bool)
{
    put_total(out, kind, place, total, scale);
}

__device__ __forceinline__ void put_sum(void* out, int, u64 place, float total, float scale,
                                        bool is_scaled)
{
    static_cast<float*>(out)[place] = is_scaled ? scaled(total, scale) : total;
}

struct HopperArguments {
    const u8 *bit0, *bit1;
    u64 pitch, rows, columns;
    const u8* ordered;  // the reordered x
    u64 batch;
    const float* scale;  // of rows, or null
    void* out;
    int out_kind;
    u32 stages, depth;  // chunks of x, and spans of planes, in shared memory
};

// Asynchronous copies of the planes that a thread multiplies, `depth` spans ahead, to shared memory
// that no other thread uses: registers for so many spans would be too many.
struct PlanesAhead {
    const HopperArguments& from;
    u64 row;      // the first of the thread's two rows
    u32 place;    // the thread's first place in shared memory
    u32 step;     // bytes from one of the thread's places to the next; four places are a slot

    __device__ __forceinline__ void begin(u32 span, u32 slot) const
    {
        const u64 at = static_cast<u64>(span) * (kHopperSpan / 8) + 16 * (threadIdx.x % 4);
        // Rows are multiples of 8 bytes.
        const u32 used = at >= from.pitch ? 0 : from.pitch - at < 16 ? 8 : 16;
        const u32 to = place + 4 * step * slot;
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            const u64 mine = row + 8 * i < from.rows ? row + 8 * i : from.rows - 1;
            const u64 offset = mine * from.pitch + (used ? at : 0);
            copy(to + 2 * i * step, from.bit0 + offset, used);
            copy(to + (2 * i + 1) * step, from.bit1 + offset, used);
        }
    }

    __device__ __forceinline__ void copy(u32 to, const u8* plane, u32 used) const
    {
        if (from.pitch % 16 == 0) {
            copy_16(to, plane, used);
        } else {
            copy_8(to, plane, used ? 8 : 0);
            copy_8(to + 8, plane + (used == 16 ? 8 : 0), used == 16 ? 8 : 0);
        }
    }

    // Waits until the oldest of `depth` spans has arrived.
    __device__ __forceinline__ void await_oldest() const
    {
        switch (from.depth) {
        case 1: return await_copies<0>();
        case 2: return await_copies<1>();
        case 3: return await_copies<2>();
        case 4: return await_copies<3>();
        default: return await_copies<4>();
        }
    }

    // Decodes word q of the first row to codes, or with `below` that of the row 8 rows below.
    __device__ __forceinline__ void take(u32 slot, u32 q, u32 below, u32 (&codes)[4]) const
    {
        const u32 at = place + (4 * slot + 2 * below) * step + 4 * q;
        spread_codes(load_shared(at), load_shared(at + step), codes);
    }
};

// Starts copies of chunks of x; waits for a free stage before each.
template <u32 kChunkBytes>
__device__ __forceinline__ void send_x(const u8* tile, u64 spans, u32 stages, u32 first_stage,
                                       u32 full, u32 empty)
{
    u32 stage = 0, parity = 1;  // a new barrier counts as one whose phase with parity 1 is complete
    for (u32 span = cluster_rank(); span < spans; span += cluster_size())
        for (u32 q = 0; q < 4; q++) {
            await(empty + 8 * stage, parity);
            arrive_and_expect(full + 8 * stage, kChunkBytes);
            copy_bulk(first_stage + stage * kChunkBytes, tile + (static_cast<u64>(span) * 4 + q) * kChunkBytes,
                      kChunkBytes, full + 8 * stage);
            if (++stage == stages)
                stage = 0, parity ^= 1;
        }
}

// Multiplies all spans of this block. Two groups of kAtOnce products are in flight at any time:
// while the tensor cores process one, the threads decode the registers of the next.
template <class Math, u32 kEights>
__device__ __forceinline__ void multiply_spans(typename Math::Sum (&sums)[kEights][4],
                                               const PlanesAhead& planes, u32 spans, u32 stages,
                                               u32 first_stage, u32 full, u32 empty)
{
    constexpr u32 kStepBytes = 2 * kMatrixBytes * kEights, kChunkBytes = Math::kSteps * kStepBytes;
    constexpr u32 kAtOnce = 2, kGroups = Math::kSteps / kAtOnce;
    static_assert(kGroups % 2 == 0, "registers are used in turn");
    u32 stage = 0, parity = 0, slot = 0, previous = 0;
    u32 a[2][kAtOnce][4];
    for (u32 span = cluster_rank(); span < spans; span += cluster_size()) {
        planes.await_oldest();
#pragma unroll
        for (u32 q = 0; q < 4; q++) {
            u32 upper[4], lower[4];  // codes of the two rows
            planes.take(slot, q, 0, upper);
            planes.take(slot, q, 1, lower);
            const u64 x = described(first_stage + stage * kChunkBytes);
#pragma unroll
            for (u32 group = 0; group < kGroups; group++) {
                u32(&now)[kAtOnce][4] = a[group % 2];
#pragma unroll
                for (u32 i = 0; i < kAtOnce; i++) {
                    Math::expand(upper, group * kAtOnce + i, now[i][0], now[i][2]);
                    Math::expand(lower, group * kAtOnce + i, now[i][1], now[i][3]);
                }
                if (group == 0)
                    await(full + 8 * stage, parity);
                begin_products();
#pragma unroll
                for (u32 i = 0; i < kAtOnce; i++)
                    Multiply<kEights>::add(sums, now[i],
                                           x + (group * kAtOnce + i) * (kStepBytes / 16));
                end_group_of_products();
                await_products<1>();
                // The previous chunk has been read.
                if (group == 0 && previous && threadIdx.x % kWarp == 0)
                    arrive(previous);
            }
            previous = empty + 8 * stage;
            if (++stage == stages)
                stage = 0, parity ^= 1;
        }
        if (span + planes.from.depth * cluster_size() < spans)
            planes.begin(span + planes.from.depth * cluster_size(), slot);
        end_group_of_copies();
        if (++slot == planes.from.depth)
            slot = 0;
    }
    await_products<0>();
}

// Adds the sums in the shared memory of a cluster's blocks and writes results. Each block has a
// share of x. A thread processes one row of the share, with kAtOnce of its x in flight at a time:
// to load a word of another block takes as long as to multiply several chunks.
template <class Math, u32 kEights>
struct Outcome {
    typedef typename Math::Sum Sum;
    const HopperArguments& to;
    u64 first_row, tile;
    u32 meeting, pitch, block_rows;  // address of the sums, words from one x to the next

    template <u32 kRanks>
    __device__ __forceinline__ void put() const
    {
        constexpr u32 kShare = 8 * kEights / kRanks, kTurn = kGroupThreads / kGroupRows;
        constexpr u32 kAtOnce = kRanks <= 2 ? 8 : 4;
        const u32 column = threadIdx.x % block_rows, first = cluster_rank() * kShare;
        const u64 row = first_row + column;
        if (row >= to.rows)
            return;
        const float scale = to.scale ? to.scale[row] : 1.0f;
        for (u32 begin = threadIdx.x / block_rows; begin < kShare; begin += kTurn * kAtOnce) {
            Sum parts[kAtOnce][kRanks];
#pragma unroll
            for (u32 i = 0; i < kAtOnce; i++) {
                const u32 n = begin + kTurn * i;
                const u32 at = meeting + 4 * ((first + (n < kShare ? n : begin)) * pitch + column);
#pragma unroll
                for (u32 r = 0; r < kRanks; r++)
                    from_bits(parts[i][r], kRanks == 1 ? load_shared(at) : load_of_rank(at, r));
            }
#pragma unroll
            for (u32 i = 0; i < kAtOnce; i++) {
                const u32 n = begin + kTurn * i;
                const u64 b = 8 * kEights * tile + first + n;
                if (n >= kShare || b >= to.batch)
                    return;
                Sum total = 0;
#pragma unroll
                for (u32 r = 0; r < kRanks; r++)
                    total += parts[i][r];
                put_sum(to.out, to.out_kind, b * to.rows + row, Math::doubled(total), scale,
                        to.scale != nullptr);
            }
        }
    }
};

// Shared memory: barriers; `stages` chunks of x; planes, 64 bytes per thread and span. At the end
// the sums of kEights * 8 x by the block's rows, and a few words more, replace x and planes.
template <class Math, u32 kEights>
__device__ __forceinline__ void hopper_matmul(const HopperArguments& to)
{
    typedef typename Math::Sum Sum;
    constexpr u32 kChunkBytes = Math::kSteps * 2 * kMatrixBytes * kEights;
    u8* const memory = shared_memory();
    const u32 groups = blockDim.x / kGroupThreads, threads = groups * kGroupThreads;
    const u32 block_rows = groups * kGroupRows, tid = threadIdx.x;
    const u32 ranks = cluster_size(), rank = cluster_rank();
    const u32 full = shared_address(memory), empty = full + 8 * kMaxStages;
    const u32 first_stage = full + kBarrierBytes;
    const u64 row_blocks = (to.rows + block_rows - 1) / block_rows, cluster = blockIdx.x / ranks;
    const u64 first_row = cluster % row_blocks * block_rows, tile = cluster / row_blocks;
    const u32 spans = (to.columns + kHopperSpan - 1) / kHopperSpan;
    if (tid == 0) {
        for (u32 i = 0; i < to.stages; i++) {
            init_barrier(full + 8 * i, 1);
            init_barrier(empty + 8 * i, threads / kWarp);
        }
        publish_barriers();
    }
    __syncthreads();
    Sum sums[kEights][4] = {};
    const u32 row = tid / kWarp * 16 + tid % kWarp / 4;  // and row + 8
    if (tid >= threads) {
        if (tid == threads) {
            await_previous();  // the previous kernel reorders x
            send_x<kChunkBytes>(to.ordered + tile * spans * 4 * kChunkBytes, spans, to.stages,
                                first_stage, full, empty);
        }
        __syncwarp();
    } else {
        const PlanesAhead planes = {to, first_row + row, first_stage + to.stages * kChunkBytes + 16 * tid,
                                    16 * threads};
        for (u32 i = 0; i < to.depth; i++) {
            if (rank + i * ranks < spans)
                planes.begin(rank + i * ranks, i);
            end_group_of_copies();
        }
        multiply_spans<Math, kEights>(sums, planes, spans, to.stages, first_stage, full, empty);
        await_copies<0>();
    }
    __syncthreads();  // no thread reads x or planes any more
    Sum* meeting = reinterpret_cast<Sum*>(memory + kBarrierBytes);
    const u32 pitch = block_rows + kMeetingPad;
    if (tid < threads)
#pragma unroll
        for (u32 n = 0; n < kEights; n++)
#pragma unroll
            for (u32 i = 0; i < 4; i++)
                meeting[(8 * n + tid % 4 * 2 + i % 2) * pitch + row + i / 2 * 8] = sums[n][i];
    meet_cluster();
    const Outcome<Math, kEights> outcome = {to, first_row, tile, first_stage, pitch, block_rows};
    if (tid < threads)
        switch (ranks) {
        case 1: outcome.template put<1>(); break;
        case 2: outcome.template put<2>(); break;
        case 4: outcome.template put<4>(); break;
        default: outcome.template put<8>(); break;
        }
    meet_cluster();  // until then other blocks read this block's sums
}

#define HOPPER(name, math, eights, groups)                                                               \
    extern "C" __global__ void __launch_bounds__(groups* kGroupThreads + kWarp, 1)              \
        ternary_hopper_##name##_##eights(const u8* bit0, const u8* bit1, u64 pitch, u64 rows,      \
                                         u64 columns, const u8* ordered, u64 batch,                \
                                         const float* scale, void* out, int out_kind, u32 stages,  \
                                         u32 depth)                                                \
    {                                                                                              \
        hopper_matmul<math, eights>({bit0, bit1, pitch, rows, columns, ordered, batch, scale, out, \
                                     out_kind, stages, depth});                                    \
    }
