// Converts values to planes and back: a thread processes eight values, one byte of each plane.
#pragma once

#include "ternary_planes.cuh"

constexpr u32 kValuesThreads = 256;

__device__ __forceinline__ float as_float(signed char value) { return static_cast<float>(value); }
__device__ __forceinline__ float as_float(float value) { return value; }
__device__ __forceinline__ float as_float(unsigned short value)
{
    return __uint_as_float(static_cast<u32>(value) << 16);
}

// Encodes values. With a negative threshold only -1, 0 and 1 are valid. *refused, which the caller
// has set to all ones, becomes the number of the first invalid value.
template <class T>
__device__ __forceinline__ void encode(const T* values, u64 rows, u64 columns, float threshold,
                                       u8* bit0, u8* bit1, u64 pitch, u64* refused)
{
    const u64 place = static_cast<u64>(blockIdx.x) * kValuesThreads + threadIdx.x;
    const u64 row = place / pitch, byte = place % pitch;
    if (row >= rows)
        return;
    u32 set0 = 0, set1 = 0;
    for (u32 i = 0; i < 8; i++) {
        const u64 column = 8 * byte + i;
        if (column >= columns)
            break;
        const float value = as_float(values[row * columns + column]), size = fabsf(value);
        const bool set = size > fmaxf(threshold, 0.0f);
        if (value != value || (threshold < 0.0f && set && size != 1.0f))
            atomicMin(refused, row * columns + column);
        set0 |= static_cast<u32>(set) << i;
        set1 |= static_cast<u32>(set && value < 0.0f) << i;
    }
    bit0[place] = static_cast<u8>(set0);
    bit1[place] = static_cast<u8>(set1);
}

#define ENCODE(name, type)                                                                         \
    extern "C" __global__ void __launch_bounds__(kValuesThreads)                                   \
        ternary_encode_##name(const type* values, u64 rows, u64 columns, float threshold,          \
                              u8* bit0, u8* bit1, u64 pitch, u64* refused)                         \
    {                                                                                              \
        encode(values, rows, columns, threshold, bit0, bit1, pitch, refused);                      \
    }
ENCODE(i8, signed char)
ENCODE(f32, float)
ENCODE(bf16, unsigned short)

__device__ __forceinline__ int value_at(u32 set0, u32 set1, u32 i)
{
    return static_cast<int>(set0 >> i & 1) - 2 * static_cast<int>(set1 >> i & 1);
}

// Convert four values to four bytes, and two values to bfloat16.
__device__ __forceinline__ u32 bytes_of(u32 set0, u32 set1)
{
    return ((set0 & 15) * 0x00204081u & 0x01010101u) | ((set1 & 15) * 0x00204081u & 0x01010101u) * 255;
}

__device__ __forceinline__ u32 pair_of(u32 set0, u32 set1)
{
    const u32 size = ((set0 & 1) | (set0 & 2) << 15) * 0x3f80u;
    return size | (set1 & 1) << 15 | (set1 & 2) << 30;
}

__device__ __forceinline__ void put_eight(signed char* to, u32 set0, u32 set1)
{
    *reinterpret_cast<uint2*>(to) =
        make_uint2(bytes_of(set0, set1), bytes_of(set0 >> 4, set1 >> 4));
}

__device__ __forceinline__ void put_eight(unsigned short* to, u32 set0, u32 set1)
{
    *reinterpret_cast<uint4*>(to) =
        make_uint4(pair_of(set0, set1), pair_of(set0 >> 2, set1 >> 2), pair_of(set0 >> 4, set1 >> 4),
                   pair_of(set0 >> 6, set1 >> 6));
}

__device__ __forceinline__ void put_eight(float* to, u32 set0, u32 set1)
{
    for (u32 half = 0; half < 2; half++)
        reinterpret_cast<float4*>(to)[half] = make_float4(
            value_at(set0, set1, 4 * half), value_at(set0, set1, 4 * half + 1),
            value_at(set0, set1, 4 * half + 2), value_at(set0, set1, 4 * half + 3));
}

__device__ __forceinline__ void put(signed char* to, int value)
{
    *to = static_cast<signed char>(value);
}
__device__ __forceinline__ void put(float* to, int value) { *to = static_cast<float>(value); }
__device__ __forceinline__ void put(unsigned short* to, int value)
{
    *to = static_cast<unsigned short>(__float_as_uint(static_cast<float>(value)) >> 16);
}

// Decodes values. *refused becomes the number of the first value with an invalid pair, which counts
// as 0.
template <class T>
__device__ __forceinline__ void decode(const u8* bit0, const u8* bit1, u64 pitch, u64 rows,
                                       u64 columns, T* values, u64* refused)
{
    const u64 row_bytes = (columns + 7) / 8;
    const u64 place = static_cast<u64>(blockIdx.x) * kValuesThreads + threadIdx.x;
    const u64 row = place / row_bytes, byte = place % row_bytes, left = columns - 8 * byte;
    if (row >= rows)
        return;
    const u32 used = left < 8 ? (1u << left) - 1 : 0xffu;
    const u32 set0 = bit0[row * pitch + byte] & used, all1 = bit1[row * pitch + byte] & used;
    const u32 set1 = all1 & set0;
    if (set1 != all1)
        atomicMin(refused, row * columns + 8 * byte + (__ffs(all1 & ~set0) - 1));
    T* to = values + row * columns + 8 * byte;
    if (columns % 8 == 0)
        put_eight(to, set0, set1);
    else
        for (u32 i = 0; i < 8 && i < left; i++)
            put(to + i, value_at(set0, set1, i));
}

#define DECODE(name, type)                                                                         \
    extern "C" __global__ void __launch_bounds__(kValuesThreads)                                   \
        ternary_decode_##name(const u8* bit0, const u8* bit1, u64 pitch, u64 rows, u64 columns,    \
                              type* values, u64* refused)                                          \
    {                                                                                              \
        decode(bit0, bit1, pitch, rows, columns, values, refused);                                 \
    }
DECODE(i8, signed char)
DECODE(f32, float)
DECODE(bf16, unsigned short)
