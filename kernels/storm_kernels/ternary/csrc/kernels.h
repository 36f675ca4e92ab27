/* The table of functions of each instruction set, and their arguments. */
#ifndef STORM_TERNARY_KERNELS_H
#define STORM_TERNARY_KERNELS_H

#include <stddef.h>
#include <string.h>

#include "ternary.h"

#define NONE_REFUSED UINT64_MAX

/* Columns that share one 32-bit lane of sums; a group's columns are a multiple of this. */
#define LANE_COLUMNS 32

/* Bytes and values of a whole packed block: digit i of byte j is value 64 * i + j. */
#define PACKED_BLOCK 64
#define PACKED_DIGITS 5
#define PACKED_VALUES (PACKED_BLOCK * PACKED_DIGITS)

/* A call, with x in the layout for the kernels. `block_columns` depends on the instruction set. */
struct product {
    const struct storm_ternary_product *asked;
    uint64_t row_bytes; /* bytes of w's rows that are read: ceil(columns / 8) */
    uint64_t groups;    /* groups per row, 1 without groups */
    uint64_t group_columns;
    /* int8: blocks of block_columns each, in which byte j + i * block_columns / 8 is column
     * 8 * j + i, padded by zeros to a whole block. float32: columns, padded by zeros to a multiple
     * of 32. */
    const void *x;
    uint64_t x_stride; /* elements */
    /* Only int8: the sums of x over each LANE_COLUMNS columns, and over all columns. */
    const int32_t *lane_sums;
    uint64_t lane_stride;
    const int64_t *totals;
};

struct ternary_kernels {
    const char *name;
    unsigned block_columns;

    /* Return the first invalid column, or NONE_REFUSED. */
    uint64_t (*encode_i8)(const int8_t *values, uint64_t columns, uint8_t *bit0, uint8_t *bit1);
    uint64_t (*encode_f32)(const float *values, uint64_t columns, float threshold, uint8_t *bit0,
                           uint8_t *bit1);
    uint64_t (*decode_i8)(const uint8_t *bit0, const uint8_t *bit1, uint64_t columns,
                          int8_t *values);
    uint64_t (*decode_f32)(const uint8_t *bit0, const uint8_t *bit1, uint64_t columns,
                           float *values);

    /* Return 0, or -1 if a pair of bits is invalid. */
    int (*dot)(const uint8_t *a0, const uint8_t *a1, const uint8_t *b0, const uint8_t *b1,
               uint64_t nbytes, int64_t *sum);
    /* Compute rows [first, end) of a product; `lanes` is scratch for one sum per LANE_COLUMNS
     * columns of a row of whole blocks. */
    int (*multiply_i8)(const struct product *product, uint64_t first, uint64_t end,
                       int32_t *lanes);
    int (*multiply_f32)(const struct product *product, uint64_t first, uint64_t end,
                        int32_t *lanes);

    /* Pack or unpack whole blocks of five values per byte. */
    int (*pack_blocks)(const uint8_t *bit0, const uint8_t *bit1, uint64_t blocks, uint8_t *packed);
    int (*unpack_blocks)(const uint8_t *packed, uint64_t blocks, uint8_t *bit0, uint8_t *bit1);
};

extern const struct ternary_kernels ternary_portable;
extern const struct ternary_kernels ternary_avx2;
extern const struct ternary_kernels ternary_avx512;
extern const struct ternary_kernels ternary_avx512_vnni;
extern const struct ternary_kernels ternary_neon;
extern const struct ternary_kernels ternary_neon_dot;

/* Returns the table of a variant, NULL if this machine cannot run it. */
const struct ternary_kernels *ternary_kernels_for(int variant);

/* A byte of five digits 0..2, the first the most significant: v = sum of digit * 3^(4 - i), stored
 * as ceil(256 v / 243). To decode it as a fixed-point fraction of 256, multiply by 3 repeatedly:
 * the carry out of eight bits is the next digit. So a digit is >= 1 from 86 on (3 * 86 >= 256) and
 * 2 from 171 on. After five digits the rest is 243 * byte mod 256, which is below 243 only for
 * valid bytes. */
#define DIGIT_ONE 86
#define DIGIT_TWO 171
#define REST_END 243
static inline uint8_t byte_of_digits(unsigned v)
{
    return (uint8_t)((256 * v + 242) / 243);
}

static inline uint64_t load_word(const uint8_t *bytes, uint64_t count)
{
    uint64_t word = 0;
    memcpy(&word, bytes, count < 8 ? count : 8);
    return word;
}

/* Writes a row's result in the requested kind. A scaled result is a sum of one term: 0 + term,
 * which is +0 if the term is -0. */
static inline void put_total(const struct storm_ternary_product *asked, uint64_t row, uint64_t b,
                             int64_t total)
{
    uint64_t place = b * asked->rows + row;
    if (asked->out_kind == STORM_TERNARY_INT32)
        ((int32_t *)asked->out)[place] = (int32_t)total;
    else if (asked->out_kind == STORM_TERNARY_INT64)
        ((int64_t *)asked->out)[place] = total;
    else
        ((float *)asked->out)[place] = 0.0f + (float)total * asked->scale[row];
}

#endif
