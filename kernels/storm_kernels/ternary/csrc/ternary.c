/* The exported calls: they check arguments, reorder x for the kernels, and distribute rows to
 * threads. */
#include "ternary.h"

#include <stdlib.h>

#include "kernels.h"
#include "native.h"
#include "parallel.h"

/* The number of x as planes from which decoding them pays: a row of w is then read once for several
 * x. */
#define DECODED_PLANES 4

/* The minimum products for which starting a thread pays: some hundred microseconds. */
#define THREAD_PRODUCTS (UINT64_C(1) << 24)

/* Floats that are widened from bfloat16 at a time. */
#define WIDE_VALUES 1024

static inline uint64_t up(uint64_t value, uint64_t step) { return (value + step - 1) / step * step; }

static void widen(const uint16_t *narrow, uint64_t count, float *wide)
{
    for (uint64_t i = 0; i < count; i++) {
        uint32_t word = (uint32_t)narrow[i] << 16;
        memcpy(wide + i, &word, sizeof word);
    }
}

/* -- Planes --------------------------------------------------------------------------------------- */

static uint64_t encode_bf16(const struct ternary_kernels *kernels, const uint16_t *values,
                            uint64_t columns, float threshold, uint8_t *bit0, uint8_t *bit1)
{
    float wide[WIDE_VALUES];
    for (uint64_t at = 0; at < columns; at += WIDE_VALUES) {
        uint64_t count = columns - at < WIDE_VALUES ? columns - at : WIDE_VALUES;
        widen(values + at, count, wide);
        uint64_t refused =
            kernels->encode_f32(wide, count, threshold, bit0 + at / 8, bit1 + at / 8);
        if (refused != NONE_REFUSED)
            return at + refused;
    }
    return NONE_REFUSED;
}

static uint64_t encode_row(const struct ternary_kernels *kernels, const void *values, int kind,
                           uint64_t first, uint64_t columns, float threshold, uint8_t *bit0,
                           uint8_t *bit1)
{
    if (kind == STORM_TERNARY_INT8 && threshold < 0)
        return kernels->encode_i8((const int8_t *)values + first, columns, bit0, bit1);
    if (kind == STORM_TERNARY_FLOAT32)
        return kernels->encode_f32((const float *)values + first, columns, threshold, bit0, bit1);
    return encode_bf16(kernels, (const uint16_t *)values + first, columns, threshold, bit0, bit1);
}

int storm_ternary_encode(const void *values, int kind, uint64_t rows, uint64_t columns,
                         float threshold, uint8_t *bit0, uint8_t *bit1, uint64_t pitch, int variant,
                         uint64_t *refused)
{
    const struct ternary_kernels *kernels = ternary_kernels_for(variant);
    const uint64_t row_bytes = (columns + 7) / 8;
    if (!kernels)
        return STORM_UNSUPPORTED;
    if (pitch < row_bytes || threshold != threshold || kind < STORM_TERNARY_INT8 ||
        kind > STORM_TERNARY_BFLOAT16 || (kind == STORM_TERNARY_INT8 && threshold >= 0))
        return STORM_BAD_ARGUMENT;
    for (uint64_t row = 0; row < rows; row++) {
        uint8_t *row0 = bit0 + row * pitch, *row1 = bit1 + row * pitch;
        uint64_t found =
            encode_row(kernels, values, kind, row * columns, columns, threshold, row0, row1);
        if (found != NONE_REFUSED) {
            *refused = row * columns + found;
            return STORM_CORRUPT;
        }
        memset(row0 + row_bytes, 0, pitch - row_bytes);
        memset(row1 + row_bytes, 0, pitch - row_bytes);
    }
    return STORM_OK;
}

int storm_ternary_decode(const uint8_t *bit0, const uint8_t *bit1, uint64_t pitch, uint64_t rows,
                         uint64_t columns, void *values, int kind, int variant, uint64_t *refused)
{
    const struct ternary_kernels *kernels = ternary_kernels_for(variant);
    if (!kernels)
        return STORM_UNSUPPORTED;
    if (kind != STORM_TERNARY_INT8 && kind != STORM_TERNARY_FLOAT32)
        return STORM_BAD_ARGUMENT;
    for (uint64_t row = 0; row < rows; row++) {
        const uint8_t *row0 = bit0 + row * pitch, *row1 = bit1 + row * pitch;
        uint64_t found =
            kind == STORM_TERNARY_INT8
                ? kernels->decode_i8(row0, row1, columns, (int8_t *)values + row * columns)
                : kernels->decode_f32(row0, row1, columns, (float *)values + row * columns);
        if (found != NONE_REFUSED) {
            *refused = row * columns + found;
            return STORM_CORRUPT;
        }
    }
    return STORM_OK;
}

int storm_ternary_dot(const uint8_t *a0, const uint8_t *a1, const uint8_t *b0, const uint8_t *b1,
                      uint64_t nbytes, int variant, int64_t *sum)
{
    const struct ternary_kernels *kernels = ternary_kernels_for(variant);
    if (!kernels)
        return STORM_UNSUPPORTED;
    return kernels->dot(a0, a1, b0, b1, nbytes, sum) ? STORM_CORRUPT : STORM_OK;
}

/* -- Five values per byte ---------------------------------------------------------------------- */

uint64_t storm_ternary_packed_bytes(uint64_t count)
{
    return count / PACKED_VALUES * PACKED_BLOCK +
           (count % PACKED_VALUES + PACKED_DIGITS - 1) / PACKED_DIGITS;
}

static inline int bit_of(const uint8_t *plane, uint64_t place)
{
    return plane[place / 8] >> place % 8 & 1;
}

/* Packs the last block: digit i of byte j is value i * bytes + j; after the last value digits
 * are 1. */
static int pack_rest(const uint8_t *bit0, const uint8_t *bit1, uint64_t first, uint64_t count,
                     uint8_t *packed)
{
    const uint64_t bytes = (count + PACKED_DIGITS - 1) / PACKED_DIGITS;
    for (uint64_t j = 0; j < bytes; j++) {
        unsigned digits = 0;
        for (uint64_t i = 0; i < PACKED_DIGITS; i++) {
            uint64_t place = i * bytes + j;
            int one = place < count ? bit_of(bit0, first + place) : 0;
            int negative = place < count ? bit_of(bit1, first + place) : 0;
            if (negative && !one)
                return -1;
            digits = 3 * digits + (unsigned)(1 + one - 2 * negative);
        }
        packed[j] = byte_of_digits(digits);
    }
    return 0;
}

static int unpack_rest(const uint8_t *packed, uint64_t first, uint64_t count, uint8_t *bit0,
                       uint8_t *bit1)
{
    const uint64_t bytes = (count + PACKED_DIGITS - 1) / PACKED_DIGITS;
    memset(bit0 + first / 8, 0, (count + 7) / 8);
    memset(bit1 + first / 8, 0, (count + 7) / 8);
    for (uint64_t j = 0; j < bytes; j++) {
        uint8_t rest = packed[j];
        for (uint64_t i = 0; i < PACKED_DIGITS; i++, rest = (uint8_t)(3 * rest)) {
            uint64_t place = i * bytes + j;
            unsigned one = rest < DIGIT_ONE || rest >= DIGIT_TWO, negative = rest < DIGIT_ONE;
            if (place >= count) {
                if (one)
                    return -1;
                continue;
            }
            bit0[(first + place) / 8] |= (uint8_t)(one << place % 8);
            bit1[(first + place) / 8] |= (uint8_t)(negative << place % 8);
        }
        if (rest >= REST_END)
            return -1;
    }
    return 0;
}

int storm_ternary_pack(const uint8_t *bit0, const uint8_t *bit1, uint64_t count, uint8_t *packed,
                       int variant)
{
    const struct ternary_kernels *kernels = ternary_kernels_for(variant);
    const uint64_t blocks = count / PACKED_VALUES;
    if (!kernels)
        return STORM_UNSUPPORTED;
    if (kernels->pack_blocks(bit0, bit1, blocks, packed))
        return STORM_CORRUPT;
    return pack_rest(bit0, bit1, blocks * PACKED_VALUES, count % PACKED_VALUES,
                     packed + blocks * PACKED_BLOCK)
               ? STORM_CORRUPT
               : STORM_OK;
}

int storm_ternary_unpack(const uint8_t *packed, uint64_t count, uint8_t *bit0, uint8_t *bit1,
                         int variant)
{
    const struct ternary_kernels *kernels = ternary_kernels_for(variant);
    const uint64_t blocks = count / PACKED_VALUES;
    if (!kernels)
        return STORM_UNSUPPORTED;
    if (kernels->unpack_blocks(packed, blocks, bit0, bit1))
        return STORM_CORRUPT;
    return unpack_rest(packed + blocks * PACKED_BLOCK, blocks * PACKED_VALUES,
                       count % PACKED_VALUES, bit0, bit1)
               ? STORM_CORRUPT
               : STORM_OK;
}

/* -- Products ------------------------------------------------------------------------------------- */

/* x in the layout for the kernels, in memory that this call allocates. */
struct prepared {
    struct product product;
    void *x;
    int32_t *lane_sums;
    int64_t *totals;
};

/* Transposes one block of int8: byte j of part i is column 8 j + i. */
static void transpose_block(const int8_t *x, uint64_t count, unsigned block_columns, int8_t *to)
{
    const unsigned bytes = block_columns / 8;
    int8_t whole[1024] = {0};
    if (count < block_columns) {
        memcpy(whole, x, count);
        x = whole;
    }
    for (unsigned j = 0; j < bytes; j++)
        for (unsigned i = 0; i < 8; i++)
            to[i * bytes + j] = x[8 * j + i];
}

static void sum_lanes(const int8_t *x, uint64_t columns, int32_t *lanes, int64_t *total)
{
    int64_t all = 0;
    for (uint64_t lane = 0; lane * LANE_COLUMNS < columns; lane++) {
        uint64_t begin = lane * LANE_COLUMNS;
        uint64_t end = columns - begin < LANE_COLUMNS ? columns : begin + LANE_COLUMNS;
        int32_t sum = 0;
        for (uint64_t i = begin; i < end; i++)
            sum += x[i];
        lanes[lane] = sum;
        all += sum;
    }
    *total = all;
}

static void prepare_i8(struct prepared *prepared, unsigned block_columns)
{
    const struct storm_ternary_product *asked = prepared->product.asked;
    for (uint64_t b = 0; b < asked->batch; b++) {
        const int8_t *x = (const int8_t *)asked->x + b * asked->x_pitch;
        int8_t *to = (int8_t *)prepared->x + b * prepared->product.x_stride;
        for (uint64_t at = 0; at < asked->columns; at += block_columns) {
            uint64_t left = asked->columns - at;
            transpose_block(x + at, left < block_columns ? left : block_columns, block_columns,
                            to + at);
        }
        sum_lanes(x, asked->columns, prepared->lane_sums + b * prepared->product.lane_stride,
                  prepared->totals + b);
    }
}

static void prepare_floats(struct prepared *prepared)
{
    const struct storm_ternary_product *asked = prepared->product.asked;
    for (uint64_t b = 0; b < asked->batch; b++) {
        const uint8_t *x = (const uint8_t *)asked->x + b * asked->x_pitch;
        float *to = (float *)prepared->x + b * prepared->product.x_stride;
        if (asked->x_kind == STORM_TERNARY_BFLOAT16)
            widen((const uint16_t *)x, asked->columns, to);
        else
            memcpy(to, x, asked->columns * sizeof *to);
        for (uint64_t i = asked->columns; i < prepared->product.x_stride; i++)
            to[i] = 0.0f;
    }
}

/* Converts x from planes to int8, for several x or for groups of scales: the results are the
 * same. */
static int prepare_planes(struct prepared *prepared, const struct ternary_kernels *kernels)
{
    struct storm_ternary_product narrow = *prepared->product.asked;
    int8_t *values = malloc(narrow.batch * narrow.columns + 1);
    uint64_t refused;
    if (!values)
        return STORM_NO_MEMORY;
    int outcome = storm_ternary_decode(narrow.x, narrow.x_bit1, narrow.x_pitch, narrow.batch,
                                       narrow.columns, values, STORM_TERNARY_INT8, narrow.variant,
                                       &refused);
    if (outcome == STORM_OK) {
        const struct storm_ternary_product *asked = prepared->product.asked;
        narrow.x = values;
        narrow.x_pitch = narrow.columns;
        prepared->product.asked = &narrow;
        prepare_i8(prepared, kernels->block_columns);
        prepared->product.asked = asked;
    }
    free(values);
    return outcome;
}

static int prepare(struct prepared *prepared, const struct ternary_kernels *kernels)
{
    const struct storm_ternary_product *asked = prepared->product.asked;
    const int is_float =
        asked->x_kind == STORM_TERNARY_FLOAT32 || asked->x_kind == STORM_TERNARY_BFLOAT16;
    const uint64_t step = is_float ? LANE_COLUMNS : kernels->block_columns;
    const uint64_t stride = up(asked->columns, step);
    prepared->product.x_stride = stride;
    prepared->product.lane_stride = up(stride, LANE_COLUMNS) / LANE_COLUMNS;
    /* One more element, so that an empty product has memory too; 64: whole cache lines. */
    uint64_t nbytes = up((asked->batch * stride + 1) * (is_float ? sizeof(float) : 1), 64);
    prepared->x = aligned_alloc(64, nbytes);
    prepared->lane_sums = malloc((asked->batch * prepared->product.lane_stride + 1) * 4);
    prepared->totals = malloc((asked->batch + 1) * 8);
    if (!prepared->x || !prepared->lane_sums || !prepared->totals)
        return STORM_NO_MEMORY;
    prepared->product.x = prepared->x;
    prepared->product.lane_sums = prepared->lane_sums;
    prepared->product.totals = prepared->totals;
    if (asked->x_kind == STORM_TERNARY_PLANES)
        return prepare_planes(prepared, kernels);
    if (is_float)
        prepare_floats(prepared);
    else
        prepare_i8(prepared, kernels->block_columns);
    return STORM_OK;
}

/* Multiplies rows with x as planes, without decoding or preparing x. */
static int multiply_planes(const struct ternary_kernels *kernels,
                           const struct storm_ternary_product *asked, uint64_t first, uint64_t end)
{
    const uint64_t bytes = (asked->columns + 7) / 8;
    int outcome = 0;
    for (uint64_t row = first; row < end; row++)
        for (uint64_t b = 0; b < asked->batch; b++) {
            int64_t total;
            outcome |= kernels->dot(asked->bit0 + row * asked->pitch,
                                    asked->bit1 + row * asked->pitch,
                                    (const uint8_t *)asked->x + b * asked->x_pitch,
                                    asked->x_bit1 + b * asked->x_pitch, bytes, &total);
            put_total(asked, row, b, total);
        }
    return outcome;
}

static int stays_planes(const struct product *product)
{
    return product->asked->x_kind == STORM_TERNARY_PLANES && product->groups == 1 &&
           product->asked->batch < DECODED_PLANES;
}

struct share {
    const struct ternary_kernels *kernels;
    const struct product *product;
    uint64_t first, end;
    int outcome;
};

static void multiply_share(void *item)
{
    struct share *share = item;
    const struct storm_ternary_product *asked = share->product->asked;
    int32_t *lanes = NULL;
    if (stays_planes(share->product)) {
        share->outcome = multiply_planes(share->kernels, asked, share->first, share->end);
        return;
    }
    if (share->product->groups > 1) {
        lanes = malloc((share->product->lane_stride + 1) * sizeof *lanes);
        if (!lanes) {
            share->outcome = STORM_NO_MEMORY;
            return;
        }
    }
    const int is_float =
        asked->x_kind == STORM_TERNARY_FLOAT32 || asked->x_kind == STORM_TERNARY_BFLOAT16;
    share->outcome = (is_float ? share->kernels->multiply_f32 : share->kernels->multiply_i8)(
        share->product, share->first, share->end, lanes);
    free(lanes);
}

static int multiply_rows(const struct ternary_kernels *kernels, const struct product *product)
{
    const struct storm_ternary_product *asked = product->asked;
    struct share shares[MAX_THREADS];
    uint64_t products = asked->rows * asked->columns * asked->batch;
    unsigned count = worthwhile_threads(asked->threads, products, THREAD_PRODUCTS);
    for (unsigned i = 0; i < count; i++)
        shares[i] = (struct share){kernels, product, asked->rows * i / count,
                                   asked->rows * (i + 1) / count, 0};
    run_parallel(multiply_share, shares, sizeof *shares, count);
    int outcome = STORM_OK;
    for (unsigned i = 0; i < count; i++)
        if (shares[i].outcome && outcome != STORM_NO_MEMORY)
            outcome = shares[i].outcome;
    return outcome;
}

static int fits(const struct storm_ternary_product *asked)
{
    const int is_float =
        asked->x_kind == STORM_TERNARY_FLOAT32 || asked->x_kind == STORM_TERNARY_BFLOAT16;
    const int is_integer = asked->x_kind == STORM_TERNARY_INT8 || asked->x_kind == STORM_TERNARY_PLANES;
    const int to_integer =
        asked->out_kind == STORM_TERNARY_INT32 || asked->out_kind == STORM_TERNARY_INT64;
    return (is_float || is_integer) && asked->pitch >= (asked->columns + 7) / 8 &&
           asked->threads >= 1 && asked->group % LANE_COLUMNS == 0 &&
           (asked->group == 0 || asked->scale) &&
           (is_float || asked->scale ? asked->out_kind == STORM_TERNARY_FLOAT32 : to_integer);
}

int storm_ternary_multiply(const struct storm_ternary_product *asked)
{
    const struct ternary_kernels *kernels = ternary_kernels_for(asked->variant);
    if (!kernels)
        return STORM_UNSUPPORTED;
    if (!fits(asked))
        return STORM_BAD_ARGUMENT;
    const uint64_t group = asked->group && asked->group < asked->columns ? asked->group : 0;
    struct prepared prepared = {
        .product = {.asked = asked,
                    .row_bytes = (asked->columns + 7) / 8,
                    .groups = group ? (asked->columns + group - 1) / group : 1,
                    .group_columns = group ? group : up(asked->columns, LANE_COLUMNS)}};
    int outcome = STORM_OK;
    if (!stays_planes(&prepared.product))
        outcome = prepare(&prepared, kernels);
    if (outcome == STORM_OK)
        outcome = multiply_rows(kernels, &prepared.product);
    free(prepared.x);
    free(prepared.lane_sums);
    free(prepared.totals);
    return outcome;
}
