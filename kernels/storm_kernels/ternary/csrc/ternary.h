/* What the library exports for ternary tensors: two bit planes in host memory, and products of them.
 *
 * A value w of {-1, 0, 1} is the two's complement number of two bits, w = bit0 - 2 * bit1: bit0 says
 * that it is not zero, bit1 that it is negative. The pair bit0 = 0, bit1 = 1 means nothing and is
 * refused wherever planes are read. Value c of a row is bit c % 8 of byte c / 8 in both planes; a
 * row's last byte is filled with zeros.
 *
 * Every function takes memory that the caller gives, of any alignment, and keeps no state, so any
 * number of threads may call at once. Nothing outside the ranges given is touched. Results do not
 * depend on the variant or on the number of threads; ../DESIGN.md says in which order floats are
 * added. Status codes are those of ../../cpu/ancf.h. */
#ifndef STORM_TERNARY_H
#define STORM_TERNARY_H

#include <stdint.h>

#define STORM_TERNARY_API __attribute__((visibility("default")))

/* What a call may use; within an architecture the best is last. */
enum storm_ternary_variant {
    STORM_TERNARY_BEST = -1,
    STORM_TERNARY_PORTABLE = 0,
    STORM_TERNARY_AVX2 = 1,
    STORM_TERNARY_AVX512 = 2,
    STORM_TERNARY_AVX512_VNNI = 3, /* and VPOPCNTDQ */
    STORM_TERNARY_NEON = 4,
    STORM_TERNARY_NEON_DOT = 5, /* and the dot product instructions */
    STORM_TERNARY_VARIANTS = 6
};

enum storm_ternary_kind {
    STORM_TERNARY_INT8 = 0,
    STORM_TERNARY_FLOAT32 = 1,
    STORM_TERNARY_BFLOAT16 = 2,
    STORM_TERNARY_PLANES = 3,
    STORM_TERNARY_INT32 = 4,
    STORM_TERNARY_INT64 = 5
};

/* out[b][r] = sum over c of w[r][c] * x[b][c], scaled where `scale` is given. */
struct storm_ternary_product {
    const uint8_t *bit0;
    const uint8_t *bit1;
    uint64_t pitch; /* bytes from one row of w to the next, in both planes */
    uint64_t rows;
    uint64_t columns;
    uint64_t batch;
    const void *x; /* int8, float32 or bfloat16; bit0 where x is planes */
    const uint8_t *x_bit1;
    uint64_t x_pitch;   /* bytes from one x to the next */
    const float *scale; /* NULL, or for every row as many as it has groups */
    uint64_t group;     /* columns that share a scale, a multiple of 32; 0: the whole row */
    void *out;          /* batch * rows of them */
    int32_t x_kind;     /* INT8, FLOAT32, BFLOAT16 or PLANES */
    int32_t out_kind;   /* FLOAT32 for floats and with scales; else INT32 or INT64 */
    int32_t threads;    /* at most this many, never more than the work is worth; >= 1 */
    int32_t variant;    /* enum storm_ternary_variant */
};

/* 1 when this build and this processor can run `variant`, else 0. */
STORM_TERNARY_API int storm_ternary_available(int variant);

/* Writes planes of rows * columns values (INT8, FLOAT32 or BFLOAT16, without gaps). With a negative
 * `threshold` the values must be -1, 0 or 1; else w is the sign of those beyond +-threshold, and only
 * NaN is refused. STORM_CORRUPT: *refused is the number of the first value that cannot be had; the
 * planes then hold anything. Bytes of a row after its last one, up to `pitch`, are set to zero. */
STORM_TERNARY_API int storm_ternary_encode(const void *values, int kind, uint64_t rows,
                                           uint64_t columns, float threshold, uint8_t *bit0,
                                           uint8_t *bit1, uint64_t pitch, int variant,
                                           uint64_t *refused);

/* The other way, to INT8 or FLOAT32. STORM_CORRUPT: the pair of value *refused means nothing. */
STORM_TERNARY_API int storm_ternary_decode(const uint8_t *bit0, const uint8_t *bit1,
                                           uint64_t pitch, uint64_t rows, uint64_t columns,
                                           void *values, int kind, int variant,
                                           uint64_t *refused);

/* *sum = sum over all bits of a * b. STORM_CORRUPT where a pair means nothing. */
STORM_TERNARY_API int storm_ternary_dot(const uint8_t *a0, const uint8_t *a1, const uint8_t *b0,
                                        const uint8_t *b1, uint64_t nbytes, int variant,
                                        int64_t *sum);

/* STORM_CORRUPT where a pair of w or x means nothing; `out` then holds anything. */
STORM_TERNARY_API int storm_ternary_multiply(const struct storm_ternary_product *product);

/* Five values a byte: storm_ternary_packed_bytes(count) bytes of `count` values of one row. */
STORM_TERNARY_API uint64_t storm_ternary_packed_bytes(uint64_t count);
STORM_TERNARY_API int storm_ternary_pack(const uint8_t *bit0, const uint8_t *bit1, uint64_t count,
                                         uint8_t *packed, int variant);
/* STORM_CORRUPT: a byte that stands for no five values, or values beyond the last that are not 0. */
STORM_TERNARY_API int storm_ternary_unpack(const uint8_t *packed, uint64_t count, uint8_t *bit0,
                                           uint8_t *bit1, int variant);

#endif
