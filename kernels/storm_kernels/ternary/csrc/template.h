/* All kernels of one instruction set, based on a few primitives that each instruction set defines.
 *
 * The including file defines TABLE, TABLE_NAME, VECTOR_BYTES and BATCH (the number of x that one
 * decoded row of w is multiplied with at a time), and these:
 *
 *   bits                 VECTOR_BYTES bytes of a plane
 *   load_bits, load_part the latter reads `count` bytes, fewer than VECTOR_BYTES, then fills zeros
 *   bits_wrong           wrong | (bit1 & ~bit0)
 *   any_bits
 *   split_codes          codes w + 1 of 8 * VECTOR_BYTES values in two-bit fields: field k of byte j
 *                        is column 8 j + 2 k in `even`, 8 j + 2 k + 1 in `odd`
 *   sums, zero_sums, add_products, lanes_of_sums
 *                        int32 sums; lane l has the columns [32 l, 32 l + 32) of a block
 *   total_of_sums        the sum of all lanes; for SEGMENT_BLOCKS blocks it fits 32 bits
 *   counts, zero_counts, count_products, total_of_counts
 *   floats, zero_floats, add_signed, total_of_floats
 *                        32 float32 sums, one for each column modulo 32
 *   signs_of_i8, signs_of_f32, values_i8, values_f32
 *                        64 values and two words of planes
 *   bytes_from           the mask of those of 64 bytes that are >= a limit
 */
#include "kernels.h"

#define BLOCK_COLUMNS (8 * VECTOR_BYTES)

/* Blocks after which int32 sums are added to 64-bit sums: a lane of add_products may gain 2^18 per
 * block, and the sum of all lanes over so many blocks of at most 512 columns is below 2^30. */
#define SEGMENT_BLOCKS 4096

#define ALWAYS_INLINE static inline __attribute__((always_inline))

/* -- Planes from values and back ------------------------------------------------------------------ */

ALWAYS_INLINE void store_word(uint8_t *bytes, uint64_t word, uint64_t columns)
{
    memcpy(bytes, &word, columns < 64 ? (columns + 7) / 8 : 8);
}

static uint64_t encode_i8(const int8_t *values, uint64_t columns, uint8_t *bit0, uint8_t *bit1)
{
    for (uint64_t at = 0; at < columns; at += 64) {
        uint64_t left = columns - at, word0, word1, refused;
        if (left >= 64) {
            refused = signs_of_i8(values + at, &word0, &word1);
        } else {
            int8_t last[64] = {0};
            memcpy(last, values + at, left);
            refused = signs_of_i8(last, &word0, &word1);
        }
        if (refused)
            return at + (uint64_t)__builtin_ctzll(refused);
        store_word(bit0 + at / 8, word0, left);
        store_word(bit1 + at / 8, word1, left);
    }
    return NONE_REFUSED;
}

static uint64_t encode_f32(const float *values, uint64_t columns, float threshold, uint8_t *bit0,
                           uint8_t *bit1)
{
    for (uint64_t at = 0; at < columns; at += 64) {
        uint64_t left = columns - at, word0, word1, refused;
        if (left >= 64) {
            refused = signs_of_f32(values + at, threshold, &word0, &word1);
        } else {
            float last[64] = {0};
            memcpy(last, values + at, left * sizeof *last);
            refused = signs_of_f32(last, threshold, &word0, &word1);
        }
        if (refused)
            return at + (uint64_t)__builtin_ctzll(refused);
        store_word(bit0 + at / 8, word0, left);
        store_word(bit1 + at / 8, word1, left);
    }
    return NONE_REFUSED;
}

/* Returns the invalid pairs of a word; ignores bits after the row's last column. */
ALWAYS_INLINE uint64_t wrong_in(uint64_t word0, uint64_t word1, uint64_t left)
{
    uint64_t wrong = word1 & ~word0;
    return left < 64 ? wrong & ((UINT64_C(1) << left) - 1) : wrong;
}

static uint64_t decode_i8(const uint8_t *bit0, const uint8_t *bit1, uint64_t columns,
                          int8_t *values)
{
    for (uint64_t at = 0; at < columns; at += 64) {
        uint64_t left = columns - at, bytes = left < 64 ? (left + 7) / 8 : 8;
        uint64_t word0 = load_word(bit0 + at / 8, bytes), word1 = load_word(bit1 + at / 8, bytes);
        uint64_t wrong = wrong_in(word0, word1, left);
        if (wrong)
            return at + (uint64_t)__builtin_ctzll(wrong);
        if (left >= 64) {
            values_i8(word0, word1, values + at);
        } else {
            int8_t last[64];
            values_i8(word0, word1, last);
            memcpy(values + at, last, left);
        }
    }
    return NONE_REFUSED;
}

static uint64_t decode_f32(const uint8_t *bit0, const uint8_t *bit1, uint64_t columns,
                           float *values)
{
    for (uint64_t at = 0; at < columns; at += 64) {
        uint64_t left = columns - at, bytes = left < 64 ? (left + 7) / 8 : 8;
        uint64_t word0 = load_word(bit0 + at / 8, bytes), word1 = load_word(bit1 + at / 8, bytes);
        uint64_t wrong = wrong_in(word0, word1, left);
        if (wrong)
            return at + (uint64_t)__builtin_ctzll(wrong);
        if (left >= 64) {
            values_f32(word0, word1, values + at);
        } else {
            float last[64];
            values_f32(word0, word1, last);
            memcpy(values + at, last, left * sizeof *last);
        }
    }
    return NONE_REFUSED;
}

/* -- Products ------------------------------------------------------------------------------------- */

static int dot(const uint8_t *a0, const uint8_t *a1, const uint8_t *b0, const uint8_t *b1,
               uint64_t nbytes, int64_t *sum)
{
    counts found = zero_counts();
    bits wrong = load_part(a0, 0);
    uint64_t at = 0;
    for (; at + VECTOR_BYTES <= nbytes; at += VECTOR_BYTES) {
        bits x0 = load_bits(a0 + at), x1 = load_bits(a1 + at);
        bits y0 = load_bits(b0 + at), y1 = load_bits(b1 + at);
        wrong = bits_wrong(bits_wrong(wrong, x0, x1), y0, y1);
        count_products(&found, x0, x1, y0, y1);
    }
    if (at < nbytes) {
        bits x0 = load_part(a0 + at, nbytes - at), x1 = load_part(a1 + at, nbytes - at);
        bits y0 = load_part(b0 + at, nbytes - at), y1 = load_part(b1 + at, nbytes - at);
        wrong = bits_wrong(bits_wrong(wrong, x0, x1), y0, y1);
        count_products(&found, x0, x1, y0, y1);
    }
    *sum = total_of_counts(&found);
    return any_bits(wrong) ? -1 : 0;
}

/* Adds the products of one block of w to the sums of `count` x. */
ALWAYS_INLINE bits add_block(sums *all, unsigned count, bits p0, bits p1, const int8_t *x,
                             uint64_t x_stride, bits wrong)
{
    bits even, odd;
    split_codes(p0, p1, &even, &odd);
    for (unsigned i = 0; i < count; i++)
        add_products(&all[i], even, odd, x + i * x_stride);
    return bits_wrong(wrong, p0, p1);
}

/* Multiplies one row of w with x number b to b + count - 1; count is a constant after inlining. */
ALWAYS_INLINE int row_of_i8(const struct product *product, uint64_t row, uint64_t b,
                            unsigned count)
{
    const struct storm_ternary_product *asked = product->asked;
    const uint8_t *bit0 = asked->bit0 + row * asked->pitch;
    const uint8_t *bit1 = asked->bit1 + row * asked->pitch;
    const int8_t *x = (const int8_t *)product->x + b * product->x_stride;
    const uint64_t whole = product->row_bytes / VECTOR_BYTES;
    const uint64_t rest = product->row_bytes % VECTOR_BYTES;
    bits wrong = load_part(bit0, 0);
    int64_t totals[BATCH] = {0};
    for (uint64_t begin = 0; begin < whole || begin == 0; begin += SEGMENT_BLOCKS) {
        uint64_t end = whole - begin < SEGMENT_BLOCKS ? whole : begin + SEGMENT_BLOCKS;
        sums all[BATCH];
        for (unsigned i = 0; i < count; i++)
            all[i] = zero_sums();
        for (uint64_t at = begin; at < end; at++)
            wrong = add_block(all, count, load_bits(bit0 + at * VECTOR_BYTES),
                              load_bits(bit1 + at * VECTOR_BYTES), x + at * BLOCK_COLUMNS,
                              product->x_stride, wrong);
        if (end == whole && rest)
            wrong = add_block(all, count, load_part(bit0 + whole * VECTOR_BYTES, rest),
                              load_part(bit1 + whole * VECTOR_BYTES, rest),
                              x + whole * BLOCK_COLUMNS, product->x_stride, wrong);
        for (unsigned i = 0; i < count; i++)
            totals[i] += total_of_sums(&all[i]);
    }
    for (unsigned i = 0; i < count; i++)
        put_total(asked, row, b + i, totals[i] - product->totals[b + i]);
    return any_bits(wrong) ? -1 : 0;
}

/* Multiplies one row with one x and a scale for each group: first computes the sums of all lanes,
 * then adds the groups in ascending order. */
static int grouped_row_of_i8(const struct product *product, uint64_t row, uint64_t b,
                             int32_t *lanes)
{
    const struct storm_ternary_product *asked = product->asked;
    const uint8_t *bit0 = asked->bit0 + row * asked->pitch;
    const uint8_t *bit1 = asked->bit1 + row * asked->pitch;
    const int8_t *x = (const int8_t *)product->x + b * product->x_stride;
    const int32_t *lane_sums = product->lane_sums + b * product->lane_stride;
    const float *scale = asked->scale + row * product->groups;
    const uint64_t group_lanes = product->group_columns / LANE_COLUMNS;
    const uint64_t all_lanes = (asked->columns + LANE_COLUMNS - 1) / LANE_COLUMNS;
    bits wrong = load_part(bit0, 0);
    for (uint64_t at = 0; at < product->row_bytes; at += VECTOR_BYTES) {
        uint64_t left = product->row_bytes - at;
        sums one = zero_sums();
        wrong = add_block(&one, 1,
                          left >= VECTOR_BYTES ? load_bits(bit0 + at) : load_part(bit0 + at, left),
                          left >= VECTOR_BYTES ? load_bits(bit1 + at) : load_part(bit1 + at, left),
                          x + 8 * at, 0, wrong);
        lanes_of_sums(&one, lanes + 8 * at / LANE_COLUMNS);
    }
    float total = 0.0f;
    for (uint64_t g = 0, lane = 0; g < product->groups; g++) {
        int64_t sum = 0;
        for (uint64_t i = 0; i < group_lanes && lane < all_lanes; i++, lane++)
            sum += lanes[lane] - lane_sums[lane];
        total += scale[g] * (float)sum;
    }
    ((float *)asked->out)[b * asked->rows + row] = total;
    return any_bits(wrong) ? -1 : 0;
}

static int multiply_i8(const struct product *product, uint64_t first, uint64_t end, int32_t *lanes)
{
    const uint64_t batch = product->asked->batch;
    int outcome = 0;
    for (uint64_t row = first; row < end; row++) {
        uint64_t b = 0;
        if (product->groups > 1) {
            for (; b < batch; b++)
                outcome |= grouped_row_of_i8(product, row, b, lanes);
            continue;
        }
        for (; b + BATCH <= batch; b += BATCH)
            outcome |= row_of_i8(product, row, b, BATCH);
        for (; b < batch; b++)
            outcome |= row_of_i8(product, row, b, 1);
    }
    return outcome;
}

/* Rows that share each load of x; their independent additions overlap. */
#define FLOAT_ROWS 4

/* Multiplies `count` rows with one x; count is a constant after inlining. */
ALWAYS_INLINE int rows_of_f32(const struct product *product, uint64_t row, uint64_t b,
                              unsigned count)
{
    const struct storm_ternary_product *asked = product->asked;
    const float *x = (const float *)product->x + b * product->x_stride;
    float *out = (float *)asked->out + b * asked->rows + row;
    float totals[FLOAT_ROWS] = {0.0f};
    uint32_t wrong = 0;
    for (uint64_t g = 0; g < product->groups; g++) {
        uint64_t begin = g * product->group_columns / 8, end = begin + product->group_columns / 8;
        if (g + 1 == product->groups)
            end = product->row_bytes;
        floats all[FLOAT_ROWS];
        for (unsigned i = 0; i < count; i++)
            all[i] = zero_floats();
        for (uint64_t at = begin; at < end; at += 4) {
            uint64_t bytes = end - at < 4 ? end - at : 4;
            for (unsigned i = 0; i < count; i++) {
                uint32_t word0 = 0, word1 = 0;
                const uint8_t *bit0 = asked->bit0 + (row + i) * asked->pitch + at;
                const uint8_t *bit1 = asked->bit1 + (row + i) * asked->pitch + at;
                if (bytes == 4) {
                    memcpy(&word0, bit0, 4);
                    memcpy(&word1, bit1, 4);
                } else {
                    memcpy(&word0, bit0, bytes);
                    memcpy(&word1, bit1, bytes);
                }
                wrong |= word1 & ~word0;
                add_signed(&all[i], word0, word1, x + 8 * at);
            }
        }
        for (unsigned i = 0; i < count; i++) {
            float sum = total_of_floats(&all[i]);
            if (asked->scale)
                sum = sum * asked->scale[(row + i) * product->groups + g];
            totals[i] += sum;
        }
    }
    for (unsigned i = 0; i < count; i++)
        out[i] = totals[i];
    return wrong ? -1 : 0;
}

static int multiply_f32(const struct product *product, uint64_t first, uint64_t end,
                        int32_t *lanes)
{
    int outcome = 0;
    (void)lanes;
    for (uint64_t b = 0; b < product->asked->batch; b++) {
        uint64_t row = first;
        for (; row + FLOAT_ROWS <= end; row += FLOAT_ROWS)
            outcome |= rows_of_f32(product, row, b, FLOAT_ROWS);
        for (; row < end; row++)
            outcome |= rows_of_f32(product, row, b, 1);
    }
    return outcome;
}

/* -- Five values per byte ---------------------------------------------------------------------- */

static int pack_blocks(const uint8_t *bit0, const uint8_t *bit1, uint64_t blocks, uint8_t *packed)
{
    uint64_t wrong = 0;
    for (uint64_t block = 0; block < blocks; block++) {
        uint8_t digits[PACKED_BLOCK] = {0};
        int8_t values[PACKED_BLOCK];
        for (unsigned i = 0; i < PACKED_DIGITS; i++) {
            uint64_t at = 8 * (PACKED_DIGITS * block + i);
            uint64_t word0 = load_word(bit0 + at, 8), word1 = load_word(bit1 + at, 8);
            wrong |= word1 & ~word0;
            values_i8(word0, word1, values);
            for (unsigned j = 0; j < PACKED_BLOCK; j++)
                digits[j] = (uint8_t)(3 * digits[j] + values[j] + 1);
        }
        for (unsigned j = 0; j < PACKED_BLOCK; j++)
            packed[PACKED_BLOCK * block + j] = byte_of_digits(digits[j]);
    }
    return wrong ? -1 : 0;
}

static int unpack_blocks(const uint8_t *packed, uint64_t blocks, uint8_t *bit0, uint8_t *bit1)
{
    uint64_t wrong = 0;
    for (uint64_t block = 0; block < blocks; block++) {
        uint8_t rest[PACKED_BLOCK];
        memcpy(rest, packed + PACKED_BLOCK * block, sizeof rest);
        for (unsigned i = 0; i < PACKED_DIGITS; i++) {
            uint64_t one = bytes_from(rest, DIGIT_ONE), two = bytes_from(rest, DIGIT_TWO);
            uint64_t word0 = ~one | two, word1 = ~one, at = 8 * (PACKED_DIGITS * block + i);
            memcpy(bit0 + at, &word0, 8);
            memcpy(bit1 + at, &word1, 8);
            for (unsigned j = 0; j < PACKED_BLOCK; j++)
                rest[j] = (uint8_t)(3 * rest[j]);
        }
        wrong |= bytes_from(rest, REST_END);
    }
    return wrong ? -1 : 0;
}

const struct ternary_kernels TABLE = {
    .name = TABLE_NAME,
    .block_columns = BLOCK_COLUMNS,
    .encode_i8 = encode_i8,
    .encode_f32 = encode_f32,
    .decode_i8 = decode_i8,
    .decode_f32 = decode_f32,
    .dot = dot,
    .multiply_i8 = multiply_i8,
    .multiply_f32 = multiply_f32,
    .pack_blocks = pack_blocks,
    .unpack_blocks = unpack_blocks,
};
