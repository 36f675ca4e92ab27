/* The library's exported functions for ternary tensors: two bit planes in host memory, and
 * products.
 *
 * A value w of {-1, 0, 1} is the two's complement number of two bits, w = bit0 - 2 * bit1: bit0 is
 * set if w is not zero, bit1 if w is negative. The pair bit0 = 0, bit1 = 1 is invalid and rejected
 * wherever planes are read. Value c of a row is bit c % 8 of byte c / 8 in both planes; a row's
 * last byte is padded with zeros.
 *
 * Every function works on memory that the caller provides, with any alignment, and keeps no state,
 * so any number of threads may call at once. No function accesses memory outside the given ranges.
 * Results do not depend on the variant or the number of threads; ../DESIGN.md specifies the order
 * of float additions. Status codes are those of ../../native/native.h. */
#ifndef STORM_TERNARY_H
#define STORM_TERNARY_H

#include <stdint.h>

#define STORM_TERNARY_API __attribute__((visibility("default")))

/* The variants; within an architecture the best is last. */
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

/* out[b][r] = sum over c of w[r][c] * x[b][c], scaled if `scale` is given. */
struct storm_ternary_product {
    const uint8_t *bit0;
    const uint8_t *bit1;
    uint64_t pitch; /* bytes from one row of w to the next, in both planes */
    uint64_t rows;
    uint64_t columns;
    uint64_t batch;
    const void *x; /* int8, float32 or bfloat16; bit0 if x is planes */
    const uint8_t *x_bit1;
    uint64_t x_pitch;   /* bytes from one x to the next */
    const float *scale; /* NULL, or one for each row and group */
    uint64_t group;     /* columns that share a scale, a multiple of 32; 0: the whole row */
    void *out;          /* batch * rows results */
    int32_t x_kind;     /* INT8, FLOAT32, BFLOAT16 or PLANES */
    int32_t out_kind;   /* FLOAT32 for floats or with scales; else INT32 or INT64 */
    int32_t threads;    /* the maximum number, >= 1; small work uses fewer */
    int32_t variant;    /* enum storm_ternary_variant */
};

/* Returns 1 if this build and this processor can run `variant`, else 0. */
STORM_TERNARY_API int storm_ternary_available(int variant);

/* Writes planes of rows * columns values (INT8, FLOAT32 or BFLOAT16, contiguous). With a negative
 * `threshold` the values must be -1, 0 or 1. Else w is the sign of values beyond +-threshold and 0
 * for others, and only NaN is rejected. STORM_CORRUPT: *refused is the number of the first invalid
 * value, and the planes are undefined. Bytes of a row after its last one, up to `pitch`, are set to
 * zero. */
STORM_TERNARY_API int storm_ternary_encode(const void *values, int kind, uint64_t rows,
                                           uint64_t columns, float threshold, uint8_t *bit0,
                                           uint8_t *bit1, uint64_t pitch, int variant,
                                           uint64_t *refused);

/* Writes the values of planes, as INT8 or FLOAT32. STORM_CORRUPT: the pair of value number *refused
 * is invalid. */
STORM_TERNARY_API int storm_ternary_decode(const uint8_t *bit0, const uint8_t *bit1,
                                           uint64_t pitch, uint64_t rows, uint64_t columns,
                                           void *values, int kind, int variant,
                                           uint64_t *refused);

/* Sets *sum to the sum over all bits of a * b. STORM_CORRUPT if a pair is invalid. */
STORM_TERNARY_API int storm_ternary_dot(const uint8_t *a0, const uint8_t *a1, const uint8_t *b0,
                                        const uint8_t *b1, uint64_t nbytes, int variant,
                                        int64_t *sum);

/* Computes a product. STORM_CORRUPT if a pair of w or x is invalid; `out` is then undefined. */
STORM_TERNARY_API int storm_ternary_multiply(const struct storm_ternary_product *product);

/* Packs `count` values of one row, five per byte, into storm_ternary_packed_bytes(count) bytes. */
STORM_TERNARY_API uint64_t storm_ternary_packed_bytes(uint64_t count);
STORM_TERNARY_API int storm_ternary_pack(const uint8_t *bit0, const uint8_t *bit1, uint64_t count,
                                         uint8_t *packed, int variant);
/* STORM_CORRUPT: a byte encodes no five values, or a value after the last is not 0. */
STORM_TERNARY_API int storm_ternary_unpack(const uint8_t *packed, uint64_t count, uint8_t *bit0,
                                           uint8_t *bit1, int variant);

#endif
