// Products with x of float32 in the order of summation that all backends share.
//
// A warp processes kFloatRows rows, and a lane the columns equal to it modulo 32, in ascending
// order. The rows' words are loaded to shared memory, from which all lanes read the same word.
#pragma once

#include "ternary_planes.cuh"

constexpr u32 kFloatWarps = 4;
constexpr u32 kFloatRows = 4;
constexpr u32 kFloatWords = 32;  // words of 32 columns that a warp loads at once

// Adds x if the column of w is not zero, negated if it is negative.
__device__ __forceinline__ float add_signed(float sum, u32 bit0, u32 bit1, float x, u32 lane)
{
    const u32 turn = bit1 << (31 - lane) & 0x80000000u;
    const float value = __uint_as_float(__float_as_uint(x) ^ turn);
    return bit0 >> lane & 1 ? __fadd_rn(sum, value) : sum;
}

// Sum i adds sum i + 16, i + 8, i + 4, i + 2 and i + 1; lane 0 then has the total.
__device__ __forceinline__ float tree_total(float sum)
{
#pragma unroll
    for (u32 half = kWarp / 2; half; half /= 2)
        sum = __fadd_rn(sum, __shfl_down_sync(kAll, sum, half));
    return sum;
}

// The words of a warp's rows, 32 columns each, from one load of the warp.
struct Words {
    u32 bit0[kFloatRows][kFloatWords], bit1[kFloatRows][kFloatWords];
};

template <bool kGrouped>
__device__ __forceinline__ void multiply_f32(const u8* bit0, const u8* bit1, u64 pitch, u64 rows,
                                             u64 columns, const float* x, u64 x_stride,
                                             const float* scale, u64 groups, u64 group_words,
                                             float* out)
{
    __shared__ float x_of_tile[32 * kFloatWords];
    __shared__ __align__(16) Words all_words[kFloatWarps];
    const u32 lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    const u64 blocks = (rows + kFloatWarps * kFloatRows - 1) / (kFloatWarps * kFloatRows);
    const u64 b = blockIdx.x / blocks;
    const u64 first = (blockIdx.x % blocks * kFloatWarps + warp) * kFloatRows;
    const u64 words = (columns + 31) / 32;
    Words& mine = all_words[warp];
    x += b * x_stride;
    float sums[kFloatRows] = {}, totals[kFloatRows] = {};
    u32 next0[kFloatRows], next1[kFloatRows];
    const auto fetch = [&](u64 word) {
#pragma unroll
        for (u32 r = 0; r < kFloatRows; r++) {
            const bool there = word < words && first + r < rows;
            const u64 place = (first + r) * pitch + 4 * word;
            next0[r] = there ? *reinterpret_cast<const u32*>(bit0 + place) : 0;
            next1[r] = there ? *reinterpret_cast<const u32*>(bit1 + place) : 0;
        }
    };
    fetch(lane);
    for (u64 begin = 0; begin < words; begin += kFloatWords) {
        __syncthreads();
#pragma unroll
        for (u32 r = 0; r < kFloatRows; r++) {
            mine.bit0[r][lane] = next0[r];
            mine.bit1[r][lane] = next1[r];
        }
        for (u32 i = threadIdx.x; i < 32 * kFloatWords; i += kFloatWarps * kWarp)
            x_of_tile[i] = 32 * begin + i < columns ? x[32 * begin + i] : 0.0f;
        __syncthreads();
        fetch(begin + kFloatWords + lane);
        // Words after the last one are zeros and add nothing.
        for (u32 four = 0; four < kFloatWords; four += 4) {
            float value[4];
            uint4 w0[kFloatRows], w1[kFloatRows];
#pragma unroll
            for (u32 i = 0; i < 4; i++)
                value[i] = x_of_tile[32 * (four + i) + lane];
#pragma unroll
            for (u32 r = 0; r < kFloatRows; r++) {
                w0[r] = *reinterpret_cast<const uint4*>(&mine.bit0[r][four]);
                w1[r] = *reinterpret_cast<const uint4*>(&mine.bit1[r][four]);
            }
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
#pragma unroll
                for (u32 r = 0; r < kFloatRows; r++)
                    sums[r] = add_signed(sums[r], word_of(w0[r], i), word_of(w1[r], i), value[i],
                                         lane);
                const u64 word = begin + four + i + 1;
                if (kGrouped && word <= words && (word % group_words == 0 || word == words))
#pragma unroll
                    for (u32 r = 0; r < kFloatRows; r++) {
                        const float sum = tree_total(sums[r]);
                        const u64 place = (first + r) * groups + (word - 1) / group_words;
                        if (lane == 0 && first + r < rows)
                            totals[r] = __fadd_rn(totals[r], __fmul_rn(sum, scale[place]));
                        sums[r] = 0.0f;
                    }
            }
        }
    }
#pragma unroll
    for (u32 r = 0; r < kFloatRows; r++) {
        if (!kGrouped) {
            totals[r] = tree_total(sums[r]);
            if (scale && first + r < rows)
                totals[r] = scaled(totals[r], scale[first + r]);
        }
        if (lane == 0 && first + r < rows)
            out[b * rows + first + r] = totals[r];
    }
}

#define MULTIPLY_F32(name, grouped)                                                                \
    extern "C" __global__ void __launch_bounds__(kFloatWarps* kWarp) ternary_##name(               \
        const u8* bit0, const u8* bit1, u64 pitch, u64 rows, u64 columns, const float* x,          \
        u64 x_stride, const float* scale, u64 groups, u64 group_words, float* out)                 \
    {                                                                                              \
        multiply_f32<grouped>(bit0, bit1, pitch, rows, columns, x, x_stride, scale, groups,        \
                              group_words, out);                                                   \
    }
MULTIPLY_F32(multiply_f32, false)
MULTIPLY_F32(grouped_f32, true)
