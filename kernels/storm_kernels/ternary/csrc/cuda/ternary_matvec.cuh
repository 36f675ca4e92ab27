// Products with one x: int8 by dp4a, planes by population counts. Reading the planes limits the
// speed.
#pragma once

#include "ternary_planes.cuh"

constexpr u32 kMatvecThreads = 256;
constexpr u32 kMatvecLanes = 8;
constexpr u32 kTileUnits = 256;  // units of 64 columns: x of a tile takes 16 KiB of shared memory

// The transposed x of a tile. Part p of a unit is its words 4 p to 4 p + 3, so that neighbouring
// threads, with neighbouring units, read neighbouring 16 bytes.
struct TileOfX {
    uint4 part[4][kTileUnits];
    int sum;  // of all x of the tile
};

__device__ __forceinline__ void load_tile(TileOfX& tile, const u8* x, u64 first, u64 columns)
{
    __syncthreads();
    if (threadIdx.x == 0)
        tile.sum = 0;
    __syncthreads();
    int sum = 0;
    const u64 left = columns - first;
    const u32 words = left < 64 * kTileUnits ? (left + 63) / 64 * 2 : 2 * kTileUnits;
    for (u32 word = threadIdx.x; word < words; word += kMatvecThreads) {
        u32 loaded[8], turned[8];
        load_x(x, first + 32 * word, columns, loaded);
        transpose_x(loaded, turned);
#pragma unroll
        for (u32 i = 0; i < 8; i++)
            sum = __dp4a(static_cast<int>(loaded[i]), 0x01010101, sum);
        const u32 unit = word / 2, part = 2 * (word % 2);
        tile.part[part][unit] = make_uint4(turned[0], turned[1], turned[2], turned[3]);
        tile.part[part + 1][unit] = make_uint4(turned[4], turned[5], turned[6], turned[7]);
    }
    sum = __reduce_add_sync(kAll, sum);
    if (threadIdx.x % kWarp == 0)
        atomicAdd(&tile.sum, sum);
    __syncthreads();
}

// Codes are multiplied without a shift in their byte, so sum k is 4^k times the real sum.
__device__ __forceinline__ void add_word(int (&sums)[4], u32 bit0, u32 bit1, uint4 low, uint4 high)
{
    u32 even, odd;
    split_codes(bit0, bit1, even, odd);
    sums[0] = dot4(odd & 0x03030303u, low.y, dot4(even & 0x03030303u, low.x, sums[0]));
    sums[1] = dot4(odd & 0x0c0c0c0cu, low.w, dot4(even & 0x0c0c0c0cu, low.z, sums[1]));
    sums[2] = dot4(odd & 0x30303030u, high.y, dot4(even & 0x30303030u, high.x, sums[2]));
    sums[3] = dot4(odd & 0xc0c0c0c0u, high.w, dot4(even & 0xc0c0c0c0u, high.z, sums[3]));
}

// The units of a thread that are loaded together before the first is used.
template <u32 kLanes, u32 kUnroll>
struct Units {
    uint2 p[kUnroll], s[kUnroll];

    __device__ __forceinline__ void load(const uint2* row0, const uint2* row1, u32 at, u32 count)
    {
#pragma unroll
        for (u32 i = 0; i < kUnroll; i++) {
            const u32 unit = at + i * kLanes;
            p[i] = unit < count ? __ldcs(row0 + unit) : make_uint2(0, 0);
            s[i] = unit < count ? __ldcs(row1 + unit) : make_uint2(0, 0);
        }
    }

    __device__ __forceinline__ void multiply(const TileOfX& tile, u32 at, u32 count,
                                             int (&sums)[4]) const
    {
#pragma unroll
        for (u32 i = 0; i < kUnroll; i++) {
            const u32 unit = at + i * kLanes;
            if (unit >= count)
                break;
            add_word(sums, p[i].x, s[i].x, tile.part[0][unit], tile.part[1][unit]);
            add_word(sums, p[i].y, s[i].y, tile.part[2][unit], tile.part[3][unit]);
        }
    }
};

// kLanes threads share a row; each processes every kLanes-th unit of 64 columns. The next kUnroll
// units are loaded while others are multiplied, and the first ones while x is loaded. A tile adds
// at most 256 / kLanes * 2^18 to a 32-bit sum.
template <u32 kLanes, u32 kUnroll>
__device__ __forceinline__ void matvec_i8(const u8* bit0, const u8* bit1, u64 pitch, u64 rows,
                                          u64 columns, const u8* x, const float* scale, void* out,
                                          int out_kind)
{
    __shared__ TileOfX tile;
    constexpr u32 kStep = kLanes * kUnroll;
    const u32 lane = threadIdx.x % kLanes;
    const u64 row = (static_cast<u64>(blockIdx.x) * kMatvecThreads + threadIdx.x) / kLanes;
    const u64 mine = row < rows ? row : rows - 1;  // the last block's spare threads read along
    const uint2* row0 = reinterpret_cast<const uint2*>(bit0 + mine * pitch);
    const uint2* row1 = reinterpret_cast<const uint2*>(bit1 + mine * pitch);
    const u64 units = (columns + 63) / 64;
    i64 total = 0;
    for (u64 begin = 0; begin < units; begin += kTileUnits) {
        const u32 count = units - begin < kTileUnits ? units - begin : kTileUnits;
        Units<kLanes, kUnroll> one, two;
        one.load(row0 + begin, row1 + begin, lane, count);
        load_tile(tile, x, 64 * begin, columns);
        int sums[4] = {0, 0, 0, 0};
        for (u32 at = lane; at < count; at += 2 * kStep) {
            two.load(row0 + begin, row1 + begin, at + kStep, count);
            one.multiply(tile, at, count, sums);
            one.load(row0 + begin, row1 + begin, at + 2 * kStep, count);
            two.multiply(tile, at + kStep, count, sums);
        }
        total += sums[0] + (sums[1] >> 2) + (sums[2] >> 4) + (sums[3] >> 6);
        if (lane == 0)
            total -= tile.sum;
    }
#pragma unroll
    for (u32 step = kLanes / 2; step; step /= 2)
        total += __shfl_xor_sync(kAll, total, step);
    if (lane == 0 && row < rows)
        put_total(out, out_kind, row, total, scale ? scale[row] : 1.0f);
}

extern "C" __global__ void __launch_bounds__(kMatvecThreads)
    ternary_matvec_i8(const u8* bit0, const u8* bit1, u64 pitch, u64 rows, u64 columns, const u8* x,
                      const float* scale, void* out, int out_kind)
{
    matvec_i8<kMatvecLanes, 2>(bit0, bit1, pitch, rows, columns, x, scale, out, out_kind);
}

// One scale for `group` columns: one warp per row; each lane processes words of 32 columns. Their
// sums are buffered in shared memory until their group is complete. One thread adds all terms, in
// ascending order.
constexpr u32 kGroupWords = 2048;  // words whose sums are buffered: one span of a row

extern "C" __global__ void __launch_bounds__(kWarp)
    ternary_grouped_i8(const u8* bit0, const u8* bit1, u64 pitch, u64 rows, u64 columns,
                       const u8* x, u64 x_pitch, const float* scale, u64 groups, u64 group_words,
                       float* out)
{
    __shared__ int sums[kGroupWords];
    const u64 row = blockIdx.x % rows, b = blockIdx.x / rows;
    const u32 lane = threadIdx.x;
    const u32* row0 = reinterpret_cast<const u32*>(bit0 + row * pitch);
    const u32* row1 = reinterpret_cast<const u32*>(bit1 + row * pitch);
    const u64 words = (columns + 31) / 32;
    float total = 0.0f;
    i64 open = 0;  // the sum so far of a group that continues in the next span
    for (u64 begin = 0; begin < words; begin += kGroupWords) {
        const u32 count = words - begin < kGroupWords ? words - begin : kGroupWords;
        __syncwarp();
        for (u32 at = lane; at < count; at += kWarp) {
            u32 loaded[8], turned[8];
            load_x(x + b * x_pitch, 32 * (begin + at), columns, loaded);
            transpose_x(loaded, turned);
            int part[4] = {0, 0, 0, 0}, all = 0;
            add_word(part, row0[begin + at], row1[begin + at],
                     make_uint4(turned[0], turned[1], turned[2], turned[3]),
                     make_uint4(turned[4], turned[5], turned[6], turned[7]));
#pragma unroll
            for (u32 i = 0; i < 8; i++)
                all = __dp4a(static_cast<int>(loaded[i]), 0x01010101, all);
            sums[at] = part[0] + (part[1] >> 2) + (part[2] >> 4) + (part[3] >> 6) - all;
        }
        __syncwarp();
        if (lane == 0)
            for (u32 at = 0; at < count; at++) {
                const u64 word = begin + at;
                open += sums[at];
                if ((word + 1) % group_words == 0 || word + 1 == words) {
                    const float one = scale[row * groups + word / group_words];
                    total = __fadd_rn(total, __fmul_rn(one, static_cast<float>(open)));
                    open = 0;
                }
            }
    }
    if (lane == 0)
        out[b * rows + row] = total;
}

// x as planes: sixteen threads per row, one unit of 64 columns at a time.
constexpr u32 kPlaneLanes = 16;
constexpr u32 kPlaneUnroll = 4;

extern "C" __global__ void __launch_bounds__(kMatvecThreads)
    ternary_matvec_planes(const u8* bit0, const u8* bit1, u64 pitch, u64 rows, u64 columns,
                          const u8* x0, const u8* x1, const float* scale, void* out, int out_kind)
{
    const u32 lane = threadIdx.x % kPlaneLanes;
    const u64 row = (static_cast<u64>(blockIdx.x) * kMatvecThreads + threadIdx.x) / kPlaneLanes;
    const u64 mine = row < rows ? row : rows - 1;
    const u64* row0 = reinterpret_cast<const u64*>(bit0 + mine * pitch);
    const u64* row1 = reinterpret_cast<const u64*>(bit1 + mine * pitch);
    i64 total = 0;
    const u64 units = (columns + 63) / 64;
    for (u64 at = lane; at < units; at += kPlaneLanes * kPlaneUnroll) {
        u64 w0[kPlaneUnroll], w1[kPlaneUnroll], some0[kPlaneUnroll], some1[kPlaneUnroll];
#pragma unroll
        for (u32 i = 0; i < kPlaneUnroll; i++) {
            const u64 unit = at + i * kPlaneLanes;
            const bool there = unit < units;
            w0[i] = there ? __ldcs(row0 + unit) : 0;
            w1[i] = there ? __ldcs(row1 + unit) : 0;
            some0[i] = there ? __ldg(reinterpret_cast<const u64*>(x0) + unit) : 0;
            some1[i] = there ? __ldg(reinterpret_cast<const u64*>(x1) + unit) : 0;
        }
#pragma unroll
        for (u32 i = 0; i < kPlaneUnroll; i++) {
            const u64 product = w0[i] & some0[i], negative = product & (w1[i] ^ some1[i]);
            total += __popcll(product) - 2 * __popcll(negative);
        }
    }
#pragma unroll
    for (u32 step = kPlaneLanes / 2; step; step /= 2)
        total += __shfl_xor_sync(kAll, total, step);
    if (lane == 0 && row < rows)
        put_total(out, out_kind, row, total, scale ? scale[row] : 1.0f);
}

// Adds the sum over `words` words of 64 bits to *sum, which the caller has set to 0.
extern "C" __global__ void __launch_bounds__(256)
    ternary_dot(const u64* a0, const u64* a1, const u64* b0, const u64* b1, u64 words, u64* sum)
{
    const u64 step = static_cast<u64>(gridDim.x) * 256;
    i64 total = 0;
    for (u64 at = static_cast<u64>(blockIdx.x) * 256 + threadIdx.x; at < words; at += step) {
        const u64 product = a0[at] & b0[at], negative = product & (a1[at] ^ b1[at]);
        total += __popcll(product) - 2 * __popcll(negative);
    }
#pragma unroll
    for (u32 half = kWarp / 2; half; half /= 2)
        total += __shfl_xor_sync(kAll, total, half);
    if (threadIdx.x % kWarp == 0)
        atomicAdd(sum, static_cast<u64>(total));
}
