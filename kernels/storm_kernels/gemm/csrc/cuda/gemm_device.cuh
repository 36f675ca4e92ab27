// The machine operations that the per-element code uses, each under one name. The tests run that
// code on a CPU: they put another file of this name in the include path.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE __device__ __forceinline__

constexpr u32 kWarp = 32;
constexpr u32 kAllLanes = 0xffffffffu;

DEVICE u32 thread_in_block() { return threadIdx.x; }
DEVICE u32 threads_in_block() { return blockDim.x; }
DEVICE u32 block_index() { return blockIdx.x; }
DEVICE u32 blocks() { return gridDim.x; }
DEVICE void meet_block() { __syncthreads(); }
DEVICE void meet_warp() { __syncwarp(); }
DEVICE u32 from_lane_across(u32 value, u32 mask) { return __shfl_xor_sync(kAllLanes, value, mask); }
DEVICE u32 from_lanes_below(u32 value, u32 by) { return __shfl_up_sync(kAllLanes, value, by); }
DEVICE u32 from_lane(u32 value, u32 lane) { return __shfl_sync(kAllLanes, value, lane); }

// The block's dynamic shared memory, aligned to at least 16 bytes.
DEVICE u8 *shared_memory()
{
    extern __shared__ __align__(1024) u8 storm_gemm_shared[];
    return storm_gemm_shared;
}

DEVICE u32 count_ones(u32 word) { return __popc(word); }
DEVICE u32 lowest_one(u32 word) { return __ffs(word) - 1; }
DEVICE void add_to(u32 *place, u32 value) { atomicAdd(place, value); }

// Selects four bytes of a (numbers 0 to 3) and b (4 to 7); each four bits of `selector` name one
// byte, the lowest bits the lowest byte.
DEVICE u32 bytes_of(u32 a, u32 b, u32 selector) { return __byte_perm(a, b, selector); }

// Returns `sum` plus the four products of corresponding bytes.
DEVICE u32 dot_bytes(u32 a, u32 b, u32 sum) { return __dp4a(a, b, sum); }

// Returns min(a + b, limit) for each unsigned 16-bit half.
DEVICE u32 sums_at_most(u32 a, u32 b, u32 limit)
{
    u32 least;
    asm("{\n.reg .b32 sum;\n"
        "add.u16x2 sum, %1, %2;\n"
        "min.u16x2 %0, sum, %3;\n}"
        : "=r"(least)
        : "r"(a), "r"(b), "r"(limit));
    return least;
}

// Stores four matrices of 8 rows of 16 bytes. Lane 8 m + i gives the address of row i of matrix m;
// lane 4 i + j holds columns 2 j and 2 j + 1 of row i of each matrix.
DEVICE void store_matrices(u8 *row, u32 a, u32 b, u32 c, u32 d)
{
    const u32 address = static_cast<u32>(__cvta_generic_to_shared(row));
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}

// Results below 2^-126 are flushed to zero, which changes no activation after rounding.
DEVICE float exponential(float x)
{
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * 1.4426950408889634f));
    return power;
}

DEVICE float quotient(float a, float b)
{
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(b));
    return a * inverse;
}

DEVICE float hyperbolic_tangent(float x) { return tanhf(x); }
DEVICE float error_function(float x) { return erff(x); }
DEVICE float float_of_bits(u32 bits) { return __uint_as_float(bits); }

DEVICE u32 pack_bfloat16(float low, float high)
{
    u32 word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

DEVICE u32 pack_half(float low, float high)
{
    u32 word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

DEVICE float float_of_half(u32 bits)
{
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<u16>(bits)));
    return value;
}
