// Products with several x on tensor cores: int8 exactly, bfloat16 with sums in float32.
//
// A warp processes 16 rows of w (times kTiles) with 8 * kEights x. In a matrix instruction thread t
// of four holds the same columns of w and of x, so the order of columns within a row is free:
// thread t takes the 16 bytes of planes number t of a span of 512 columns in memory order. The
// kernels with "order" in their names reorder x once for the instructions' registers, padded with
// zeros to the number of x of a block's warps. kRowWarps of a block's warps have adjacent rows and
// read the same x from the L1 cache (otherwise reading x from L2 would limit the speed). kSplits of
// them share rows and take spans in turn, and their sums are added through shared memory.
#pragma once

#include "ternary_planes.cuh"

constexpr u32 kSpan = 512;  // columns
constexpr u32 kOrderThreads = 256;

// Layout of the reordered x: [span][eight x][word q of 4][part][lane] of 16 bytes. Lane 4 g + t has
// columns 128 t + 32 q and on of x number g. int8: 2 parts; part p has the transposed words from 4
// p on. `sums` receives the sum of every x over each span, (span, x): the eight warps of a block
// process two of (span, eight x), four warps each.
extern "C" __global__ void __launch_bounds__(kOrderThreads)
    ternary_order_i8(const u8* x, u64 x_pitch, u64 columns, u64 batch, u64 eights, uint4* ordered,
                     int* sums)
{
    __shared__ int meeting[kOrderThreads / kWarp][8];
    order_begins();
    const u64 place = static_cast<u64>(blockIdx.x) * kOrderThreads + threadIdx.x;
    const u32 lane = place % kWarp, q = place / kWarp % 4, warp = threadIdx.x / kWarp;
    const u64 eight = place / (4 * kWarp) % eights, span = place / (4 * kWarp) / eights;
    const u64 b = 8 * eight + lane / 4, first = span * kSpan + 128 * (lane % 4) + 32 * q;
    const bool there = span * kSpan < columns;
    u32 loaded[8] = {}, turned[8];
    if (there && b < batch)
        load_x(x + b * x_pitch, first, columns, loaded);
    transpose_x(loaded, turned);
    if (there) {
        uint4* to = ordered + (place / kWarp) * 2 * kWarp + lane;
        to[0] = make_uint4(turned[0], turned[1], turned[2], turned[3]);
        to[kWarp] = make_uint4(turned[4], turned[5], turned[6], turned[7]);
    }
    int sum = 0;
#pragma unroll
    for (u32 i = 0; i < 8; i++)
        sum = __dp4a(static_cast<int>(loaded[i]), 0x01010101, sum);
    sum += __shfl_xor_sync(kAll, sum, 1);
    sum += __shfl_xor_sync(kAll, sum, 2);
    if (lane % 4 == 0)
        meeting[warp][lane / 4] = sum;
    __syncthreads();
    if (there && q == 0 && lane < 8)
        sums[(span * eights + eight) * 8 + lane] = meeting[warp][lane] + meeting[warp + 1][lane] +
                                                   meeting[warp + 2][lane] + meeting[warp + 3][lane];
}

// bfloat16: 4 parts, with words that hold columns i and 16 + i.
extern "C" __global__ void __launch_bounds__(kOrderThreads)
    ternary_order_bf16(const unsigned short* x, u64 x_stride, u64 columns, u64 batch, u64 eights,
                       uint4* ordered)
{
    order_begins();
    const u64 place = static_cast<u64>(blockIdx.x) * kOrderThreads + threadIdx.x;
    const u32 lane = place % kWarp, q = place / kWarp % 4;
    const u64 eight = place / (4 * kWarp) % eights, span = place / (4 * kWarp) / eights;
    if (span * kSpan >= columns)
        return;
    const u64 b = 8 * eight + lane / 4, first = span * kSpan + 128 * (lane % 4) + 32 * q;
    u32 words[16];
#pragma unroll
    for (u32 i = 0; i < 16; i++) {
        const u64 low = first + i, high = first + 16 + i;
        const u32 one = b < batch && low < columns ? x[b * x_stride + low] : 0;
        const u32 two = b < batch && high < columns ? x[b * x_stride + high] : 0;
        words[i] = one | two << 16;
    }
    uint4* to = ordered + (place / kWarp) * 4 * kWarp + lane;
#pragma unroll
    for (u32 p = 0; p < 4; p++)
        to[p * kWarp] = make_uint4(words[4 * p], words[4 * p + 1], words[4 * p + 2], words[4 * p + 3]);
}

struct Int8 {
    typedef int Sum;
    static constexpr u32 kParts = 2;

    // Sets registers 4 part to 4 part + 3 of the eight registers for 32 columns of a row.
    static __device__ __forceinline__ void expand(u32 bit0, u32 bit1, u32 part, u32 (&registers)[4])
    {
        u32 even, odd;
        split_codes(bit0, bit1, even, odd);
#pragma unroll
        for (u32 k = 0; k < 2; k++) {
            registers[2 * k] = even >> (4 * part + 2 * k) & 0x03030303u;
            registers[2 * k + 1] = odd >> (4 * part + 2 * k) & 0x03030303u;
        }
    }

    static __device__ __forceinline__ void multiply(Sum (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3,
                                                    u32 b0, u32 b1)
    {
        asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    }
};

struct Bfloat16 {
    typedef float Sum;
    static constexpr u32 kParts = 4;

    // Sets registers 4 part to 4 part + 3 of the sixteen for 32 columns of a row; 0x3f80 is 1.
    static __device__ __forceinline__ void expand(u32 bit0, u32 bit1, u32 part, u32 (&registers)[4])
    {
#pragma unroll
        for (u32 k = 0; k < 4; k++) {
            const u32 i = 4 * part + k;
            const u32 size = (bit0 >> i & 0x00010001u) * 0x3f80u;
            const u32 sign = bit1 << (15 - i) & 0x80008000u;
            registers[k] = size | sign;
        }
    }

    static __device__ __forceinline__ void multiply(Sum (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3,
                                                    u32 b0, u32 b1)
    {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    }
};

// Loads 16 bytes of a row at offset `at`, zeros past its end; rows are a multiple of 8 bytes.
__device__ __forceinline__ uint4 load_plane(const u8* row, u64 at, u64 pitch)
{
    if (at + 16 <= pitch) {
        if (pitch % 16 == 0)
            return *reinterpret_cast<const uint4*>(row + at);
        const uint2 low = *reinterpret_cast<const uint2*>(row + at);
        const uint2 high = *reinterpret_cast<const uint2*>(row + at + 8);
        return make_uint4(low.x, low.y, high.x, high.y);
    }
    if (at + 8 <= pitch) {
        const uint2 low = *reinterpret_cast<const uint2*>(row + at);
        return make_uint4(low.x, low.y, 0, 0);
    }
    return make_uint4(0, 0, 0, 0);
}

template <class Math, u32 kTiles, u32 kEights, u32 kRowWarps, u32 kSplits>
__device__ __forceinline__ void matmul(const u8* bit0, const u8* bit1, u64 pitch, u64 rows,
                                       u64 columns, const uint4* ordered, u64 eights, u64 batch,
                                       const int* sums_of_x, const float* scale, void* out,
                                       int out_kind)
{
    constexpr u32 kRows = 16 * kTiles * kRowWarps, kThreads = kRowWarps * kSplits * kWarp;
    constexpr u32 kSteps = 4 * Math::kParts;  // per span
    __shared__ typename Math::Sum meeting[kSplits][8][kRows + 4];
    __shared__ int x_total[8 * kEights];
    const u32 lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, g = lane / 4, t = lane % 4;
    const u32 row_warp = warp % kRowWarps, split = warp / kRowWarps;
    const u64 row_blocks = (rows + kRows - 1) / kRows;
    const u64 first = blockIdx.x % row_blocks * kRows, first_eight = blockIdx.x / row_blocks * kEights;
    const u64 spans = (columns + kSpan - 1) / kSpan;
    typename Math::Sum sums[kTiles][kEights][4] = {};
    uint4 next0[2 * kTiles], next1[2 * kTiles];
    const auto fetch = [&](u64 span) {
#pragma unroll
        for (u32 i = 0; i < 2 * kTiles; i++) {
            const u64 row = first + 16 * (kTiles * row_warp + i / 2) + 8 * (i % 2) + g;
            const u64 mine = row < rows ? row : rows - 1;
            const u64 at = span * (kSpan / 8) + 16 * t;
            next0[i] = load_plane(bit0 + mine * pitch, at, pitch);
            next1[i] = load_plane(bit1 + mine * pitch, at, pitch);
        }
    };
    fetch(split);
    await_previous();  // the previous kernel reorders x
    for (u64 span = split; span < spans; span += kSplits) {
        uint4 p[2 * kTiles], s[2 * kTiles];
#pragma unroll
        for (u32 i = 0; i < 2 * kTiles; i++)
            p[i] = next0[i], s[i] = next1[i];
        fetch(span + kSplits);
        const uint4* x = ordered + (span * eights + first_eight) * (kSteps * kWarp) + lane;
        // x of the next step is loaded while one step is multiplied: a load takes as long as all
        // products of a step.
        uint4 now[kEights], later[kEights];
#pragma unroll
        for (u32 n = 0; n < kEights; n++)
            now[n] = x[n * kSteps * kWarp];
#pragma unroll
        for (u32 step = 0; step < kSteps; step++) {
            if (step + 1 < kSteps)
#pragma unroll
                for (u32 n = 0; n < kEights; n++)
                    later[n] = x[(n * kSteps + step + 1) * kWarp];
            u32 a[2 * kTiles][4];
#pragma unroll
            for (u32 i = 0; i < 2 * kTiles; i++)
                Math::expand(word_of(p[i], step / Math::kParts), word_of(s[i], step / Math::kParts),
                             step % Math::kParts, a[i]);
#pragma unroll
            for (u32 n = 0; n < kEights; n++)
#pragma unroll
                for (u32 m = 0; m < kTiles; m++) {
                    Math::multiply(sums[m][n], a[2 * m][0], a[2 * m + 1][0], a[2 * m][1],
                                   a[2 * m + 1][1], now[n].x, now[n].y);
                    Math::multiply(sums[m][n], a[2 * m][2], a[2 * m + 1][2], a[2 * m][3],
                                   a[2 * m + 1][3], now[n].z, now[n].w);
                }
#pragma unroll
            for (u32 n = 0; n < kEights; n++)
                now[n] = later[n];
        }
    }
    if (sums_of_x)
        for (u32 i = threadIdx.x; i < 8 * kEights; i += kThreads) {
            x_total[i] = 0;
            for (u64 span = 0; span < spans; span++)
                x_total[i] += sums_of_x[(span * eights + first_eight) * 8 + i];
        }
#pragma unroll
    for (u32 n = 0; n < kEights; n++) {
        __syncthreads();
#pragma unroll
        for (u32 m = 0; m < kTiles; m++)
#pragma unroll
            for (u32 i = 0; i < 4; i++)
                meeting[split][2 * t + i % 2][16 * (kTiles * row_warp + m) + 8 * (i / 2) + g] =
                    sums[m][n][i];
        __syncthreads();
        for (u32 i = threadIdx.x; i < kRows * 8; i += kThreads) {
            const u64 row = first + i % kRows, b = 8 * (first_eight + n) + i / kRows;
            if (row >= rows || b >= batch)
                continue;
            typename Math::Sum total = 0;
#pragma unroll
            for (u32 w = 0; w < kSplits; w++)
                total += meeting[w][i / kRows][i % kRows];
            if (sums_of_x)
                put_total(out, out_kind, b * rows + row,
                          static_cast<i64>(total) - x_total[8 * n + i / kRows],
                          scale ? scale[row] : 1.0f);
            else
                static_cast<float*>(out)[b * rows + row] =
                    scale ? scaled(static_cast<float>(total), scale[row])
                          : static_cast<float>(total);
        }
    }
}

#define MATMUL(name, math, tiles, eights, row_warps, splits)                                       \
    extern "C" __global__ void __launch_bounds__(row_warps* splits* kWarp)                         \
        ternary_matmul_##name##_##tiles##_##eights##_##row_warps##_##splits(                       \
            const u8* bit0, const u8* bit1, u64 pitch, u64 rows, u64 columns,                      \
            const uint4* ordered, u64 eight_count, u64 batch, const int* sums_of_x,                \
            const float* scale, void* out, int out_kind)                                           \
    {                                                                                              \
        matmul<math, tiles, eights, row_warps, splits>(bit0, bit1, pitch, rows, columns, ordered,  \
                                                       eight_count, batch, sums_of_x, scale, out,  \
                                                       out_kind);                                  \
    }
MATMUL(i8, Int8, 1, 1, 1, 8)
MATMUL(i8, Int8, 1, 2, 1, 8)
MATMUL(i8, Int8, 2, 4, 2, 4)
MATMUL(bf16, Bfloat16, 1, 1, 1, 8)
MATMUL(bf16, Bfloat16, 1, 2, 1, 8)
MATMUL(bf16, Bfloat16, 1, 4, 2, 4)
