// Planes from values and back: a thread has eight values, one byte of each plane.
#pragma once

#include "ternary_planes.cuh"

constexpr u32 kValuesThreads = 256;

__device__ __forceinline__ float as_float(signed char value) { return static_cast<float>(value); }
__device__ __forceinline__ float as_float(float value) { return value; }
__device__ __forceinline__ float as_float(unsigned short value)
{
    return __uint_as_float(static_cast<u32>(value) << 16);
}

// With a negative threshold only -1, 0 and 1 are taken. *refused, which the caller has set to all
// ones, becomes the number of the first value that is not.
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

__device__ __forceinline__ void put(signed char* to, int value)
{
    *to = static_cast<signed char>(value);
}
__device__ __forceinline__ void put(float* to, int value) { *to = static_cast<float>(value); }
__device__ __forceinline__ void put(unsigned short* to, int value)
{
    *to = static_cast<unsigned short>(__float_as_uint(static_cast<float>(value)) >> 16);
}

// *refused becomes the number of the first value whose pair of bits stands for none; it counts as 0.
template <class T>
__device__ __forceinline__ void decode(const u8* bit0, const u8* bit1, u64 pitch, u64 rows,
                                       u64 columns, T* values, u64* refused)
{
    const u64 row_bytes = (columns + 7) / 8;
    const u64 place = static_cast<u64>(blockIdx.x) * kValuesThreads + threadIdx.x;
    const u64 row = place / row_bytes, byte = place % row_bytes;
    if (row >= rows)
        return;
    const u32 set0 = bit0[row * pitch + byte], set1 = bit1[row * pitch + byte];
    for (u32 i = 0; i < 8; i++) {
        const u64 column = 8 * byte + i;
        if (column >= columns)
            break;
        const int one = set0 >> i & 1, negative = set1 >> i & 1;
        if (negative > one)
            atomicMin(refused, row * columns + column);
        put(values + row * columns + column, one - 2 * (negative & one));
    }
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
