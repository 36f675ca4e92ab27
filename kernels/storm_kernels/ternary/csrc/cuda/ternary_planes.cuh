// Code that all kernels share: words of 32 columns, their two-bit codes, and writing of results.
//
// The invalid pair bit0 = 0, bit1 = 1 counts as 0 here: products on the device do not check planes.
// Rows are a multiple of 8 bytes long and begin at multiples of 8; cuda.py ensures that.
#pragma once

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr u32 kWarp = 32;
constexpr u32 kAll = 0xffffffffu;

// Kinds of results, with the numbers of `Kind` in planes.py.
constexpr int kFloat32 = 1;
constexpr int kInt32 = 4;

// Sets codes w + 1 of 32 values: field k of byte j is column 8 j + 2 k in `even`, 8 j + 2 k + 1 in
// `odd`.
__device__ __forceinline__ void split_codes(u32 bit0, u32 bit1, u32& even, u32& odd)
{
    constexpr u32 low = 0x55555555u;
    const u32 plus = bit0 & ~bit1;
    even = (~bit0 & low) | (plus << 1 & ~low);
    odd = (~bit0 >> 1 & low) | (plus & ~low);
}

// Adds four products of unsigned bytes with signed bytes.
__device__ __forceinline__ int dot4(u32 codes, u32 x, int sum)
{
    int result;
    asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(result) : "r"(codes), "r"(x), "r"(sum));
    return result;
}

// Returns word number `i` of four; `i` is a constant after inlining.
__device__ __forceinline__ u32 word_of(uint4 four, u32 i)
{
    return i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w;
}

// Transposes 32 bytes of x so that word i holds columns i, 8 + i, 16 + i and 24 + i.
__device__ __forceinline__ void transpose_x(const u32 (&x)[8], u32 (&turned)[8])
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const u32 a = x[half], b = x[2 + half], c = x[4 + half], d = x[6 + half];
        const u32 low_ab = __byte_perm(a, b, 0x5140), low_cd = __byte_perm(c, d, 0x5140);
        const u32 high_ab = __byte_perm(a, b, 0x7362), high_cd = __byte_perm(c, d, 0x7362);
        turned[4 * half + 0] = __byte_perm(low_ab, low_cd, 0x5410);
        turned[4 * half + 1] = __byte_perm(low_ab, low_cd, 0x7632);
        turned[4 * half + 2] = __byte_perm(high_ab, high_cd, 0x5410);
        turned[4 * half + 3] = __byte_perm(high_ab, high_cd, 0x7632);
    }
}

// Loads columns [first, first + 32) of x, zeros after the last; `first` is a multiple of 32.
__device__ __forceinline__ void load_x(const u8* x, u64 first, u64 columns, u32 (&words)[8])
{
    if (first + 32 <= columns && reinterpret_cast<u64>(x + first) % 16 == 0) {
        const uint4 low = *reinterpret_cast<const uint4*>(x + first);
        const uint4 high = *reinterpret_cast<const uint4*>(x + first + 16);
        words[0] = low.x, words[1] = low.y, words[2] = low.z, words[3] = low.w;
        words[4] = high.x, words[5] = high.y, words[6] = high.z, words[7] = high.w;
        return;
    }
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
        words[i] = 0;
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            const u64 column = first + 4 * i + j;
            if (column < columns)
                words[i] |= static_cast<u32>(x[column]) << 8 * j;
        }
    }
}

// Programmatic dependent launch: let_next_begin lets the next kernel on the stream begin, and
// await_previous waits for the previous kernel's end. Both do nothing on older devices.
__device__ __forceinline__ void let_next_begin()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

__device__ __forceinline__ void await_previous()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The start of a kernel that reorders x. It may itself have begun early, and earlier kernels may
// have written x or w. The next kernel reads w at once, so it may begin only after they have ended.
__device__ __forceinline__ void order_begins()
{
    await_previous();
    let_next_begin();
}

// Returns a scaled result, which is a sum of one term: 0 + term, which is +0 if the term is -0.
__device__ __forceinline__ float scaled(float sum, float scale)
{
    return __fadd_rn(0.0f, __fmul_rn(sum, scale));
}

// Writes one result; `scale` is the row's, for float results.
__device__ __forceinline__ void put_total(void* out, int kind, u64 place, i64 total, float scale)
{
    if (kind == kInt32)
        static_cast<int*>(out)[place] = static_cast<int>(total);
    else if (kind == kFloat32)
        static_cast<float*>(out)[place] = scaled(static_cast<float>(total), scale);
    else
        static_cast<i64*>(out)[place] = total;
}
