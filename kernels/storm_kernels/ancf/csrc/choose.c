/* See choose.h. */
#include "choose.h"

#include <stdlib.h>
#include <string.h>

#include "ancf.h"

#define MAX_RANKED 22 /* 7 + 15 entries: the largest dictionary of symbols */

/* Loads `count` neighbouring elements from index `first` on, widened to 64 bits. */
#define LOAD_ELEMENTS(type)                                                                       \
    for (uint64_t i = 0; i < count; i++) {                                                        \
        type element;                                                                             \
        memcpy(&element, elements + (first + i) * sizeof element, sizeof element);                \
        out[i] = element;                                                                         \
    }

static void load_elements(const uint8_t *elements, unsigned bits, uint64_t first, uint64_t count,
                          uint64_t *out)
{
    switch (bits) {
    case 8:
        LOAD_ELEMENTS(uint8_t)
        break;
    case 16:
        LOAD_ELEMENTS(uint16_t)
        break;
    case 32:
        LOAD_ELEMENTS(uint32_t)
        break;
    default:
        LOAD_ELEMENTS(uint64_t)
    }
}

void take_sample(struct sample *sample, int dtype, const uint8_t *elements, uint64_t n)
{
    const struct ancf_dtype_info *info = dtype_info(dtype);
    sample->bits = info->bits;
    sample->mantissa = info->mantissa;
    sample->is_signed = info->is_signed;
    sample->is_float = info->is_float;
    sample->dtype = dtype;
    sample->count = n < ANCF_SAMPLE ? (uint32_t)n : ANCF_SAMPLE;
    if (n <= ANCF_SAMPLE) {
        load_elements(elements, info->bits, 0, n, sample->elements);
        return;
    }
    uint64_t last = n / ANCF_SAMPLE_RUN - 1;
    for (uint64_t run = 0; run < ANCF_SAMPLE_RUNS; run++)
        load_elements(elements, info->bits, run * last / (ANCF_SAMPLE_RUNS - 1) * ANCF_SAMPLE_RUN,
                      ANCF_SAMPLE_RUN, sample->elements + run * ANCF_SAMPLE_RUN);
}

/* -- Cost of coding symbols ------------------------------------------------------------------- */

/* Counts of joint symbols (sign and exponent): element >> M, independent of dropped bits. */
struct histogram {
    uint32_t count[MAX_SYMBOLS];
    unsigned bits;  /* bits of a joint symbol */
    uint32_t total;
};

static void count_symbols(const struct sample *s, struct histogram *out)
{
    memset(out, 0, sizeof *out);
    out->bits = s->bits - s->mantissa;
    out->total = s->count;
    for (uint32_t i = 0; i < s->count; i++)
        out->count[s->elements[i] >> s->mantissa]++;
}

/* Removes the elements equal to fill, of which there are `fills`, from the counts. */
static void leave_out(const struct sample *s, uint64_t fill, uint32_t fills, struct histogram *h)
{
    h->count[(fill >> s->mantissa) & (MAX_SYMBOLS - 1)] -= fills;
    h->total -= fills;
}

/* Adds the counts of negative symbols to those of positive ones. */
static void fold_signs(struct histogram *h)
{
    unsigned half = 1u << (h->bits - 1);
    for (unsigned symbol = 0; symbol < half; symbol++) {
        h->count[symbol] += h->count[symbol + half];
        h->count[symbol + half] = 0;
    }
}

struct coding {
    uint64_t cost; /* bits for the whole sample */
    unsigned rotate, drop, residue_bits, k1, k2, ranked;
    uint16_t dictionary[MAX_RANKED];
};

/* Ranks the most frequent symbols that occur: count descending, symbol ascending. Returns their
 * number, at most `limit`. */
static unsigned rank_symbols(const struct histogram *h, int joint, unsigned limit,
                             uint16_t *symbols, uint32_t *counts)
{
    unsigned ranked = 0, half = 1u << (h->bits - 1);
    for (unsigned symbol = 0; symbol < (joint ? 2 * half : half); symbol++) {
        uint32_t count = h->count[symbol] + (joint ? 0 : h->count[symbol + half]);
        if (count == 0 || (ranked == limit && count <= counts[ranked - 1]))
            continue;
        unsigned at = ranked < limit ? ranked++ : limit - 1;
        for (; at > 0 && counts[at - 1] < count; at--) {
            counts[at] = counts[at - 1];
            symbols[at] = symbols[at - 1];
        }
        counts[at] = count;
        symbols[at] = (uint16_t)symbol;
    }
    return ranked;
}

/* Computes the cost of the ranked symbols with codes of k1 and k2 bits; sets out->k1, k2 and
 * cost. */
static void price(const struct sample *s, const uint32_t *counts, uint32_t total, unsigned k1,
                  unsigned k2, struct coding *out)
{
    uint32_t level1 = 0, known = 0;
    unsigned slots = (1u << k1) - 1, all = slots + (1u << k2) - 1;
    for (unsigned i = 0; i < out->ranked && i < all; i++) {
        known += counts[i];
        level1 += i < slots ? counts[i] : 0;
    }
    unsigned symbol_bits = out->drop ? s->bits : s->bits - out->residue_bits;
    unsigned escape_bits = symbol_bits <= 8 ? 8 : symbol_bits <= 16 ? 16 : s->bits;
    out->k1 = k1;
    out->k2 = k2;
    out->cost = (uint64_t)total * (out->residue_bits + k1) + (uint64_t)(total - level1) * k2 +
                (uint64_t)(total - known) * escape_bits;
}

/* Returns the cheapest coding of exponents, or of joint symbols. */
static struct coding cheapest(const struct sample *s, const struct histogram *h, int joint,
                              unsigned drop, int dense)
{
    uint32_t counts[MAX_RANKED];
    struct coding narrow = {.rotate = !joint, .drop = drop,
                            .residue_bits = s->mantissa - drop + (unsigned)!joint};
    narrow.ranked = rank_symbols(h, joint, MAX_RANKED, narrow.dictionary, counts);
    struct coding wide = narrow;
    if (!dense) {
        price(s, counts, h->total, 3, 0, &narrow);
        return narrow;
    }
    price(s, counts, h->total, 2, 3, &narrow);
    price(s, counts, h->total, 3, 4, &wide);
    return wide.cost < narrow.cost ? wide : narrow;
}

/* Returns the coding of joint symbols if it saves more than a 33rd, else that of exponents. */
static struct coding best_coding(const struct sample *s, const struct histogram *h, unsigned drop,
                                 int dense)
{
    dense = dense || drop;
    struct coding exponent = cheapest(s, h, 0, drop, dense);
    struct coding joint = cheapest(s, h, 1, drop, dense);
    return joint.cost * 33 < exponent.cost * 32 ? joint : exponent;
}

/* -- Other properties of the sample ------------------------------------------------------------ */

static unsigned droppable_bits(const struct sample *s)
{
    uint64_t low = 0;
    if (!s->is_float || s->bits < 32)
        return 0;
    for (uint32_t i = 0; i < s->count; i++)
        low |= s->elements[i];
    if (s->bits == 64)
        return low & ((UINT64_C(1) << 29) - 1) ? 0 : 29;
    return !(low & 0xFFFF) ? 16 : !(low & 0x1FFF) ? 13 : 0;
}

static int holds_one_value(const struct sample *s)
{
    for (uint32_t i = 1; i < s->count; i++)
        if (s->elements[i] != s->elements[0])
            return 0;
    return 1;
}

static int holds_three_values(const struct sample *s)
{
    uint64_t seen[3];
    unsigned known = 0;
    for (uint32_t i = 0; i < s->count; i++) {
        unsigned at = 0;
        while (at < known && seen[at] != s->elements[i])
            at++;
        if (at == 3)
            return 0;
        if (at == known)
            seen[known++] = s->elements[i];
    }
    return 1;
}

/* Returns the bit length of max - min, by the dtype's order (signed or unsigned). */
static unsigned integer_width(const struct sample *s)
{
    uint64_t flip = s->is_signed ? UINT64_C(1) << (s->bits - 1) : 0;
    uint64_t least = ~UINT64_C(0), most = 0;
    for (uint32_t i = 0; i < s->count; i++) {
        uint64_t x = s->elements[i] ^ flip;
        least = x < least ? x : least;
        most = x > most ? x : most;
    }
    return most == least ? 0 : 64 - (unsigned)__builtin_clzll(most - least);
}

/* Counts the elements that equal `fill` in the bits of `mask`. */
static uint32_t count_equal(const struct sample *s, uint64_t fill, uint64_t mask)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < s->count; i++)
        count += (s->elements[i] & mask) == fill;
    return count;
}

static uint64_t bitmap_cost(const struct sample *s, uint64_t fill, uint64_t mask, unsigned *bitmap)
{
    uint64_t bits = s->count / 2;
    for (uint32_t i = 0; i + 1 < s->count; i += 2) {
        int first = (s->elements[i] & mask) != fill, second = (s->elements[i + 1] & mask) != fill;
        bits += (uint64_t)((first | second) + second);
    }
    *bitmap = bits * 17 < (uint64_t)s->count * 16 ? ANCF_PAIRS : ANCF_PLAIN;
    return *bitmap == ANCF_PAIRS ? bits : s->count;
}

/* -- Dictionaries of whole values --------------------------------------------------------------- */

static int compare_elements(const void *a, const void *b)
{
    uint64_t x, y;
    memcpy(&x, a, sizeof x);
    memcpy(&y, b, sizeof y);
    return (x > y) - (x < y);
}

static int compare_ranks(const void *a, const void *b)
{
    const struct ranked_value *x = a, *y = b;
    if (x->count != y->count)
        return x->count < y->count ? 1 : -1;
    return (x->value > y->value) - (x->value < y->value);
}

/* Returns the number of the most frequent elements, at most `limit`, and sets values to them: count
 * descending, value ascending. */
static uint32_t frequent_values(struct sample *s, uint32_t limit, uint64_t *values)
{
    struct ranked_value *ranks = s->ranks;
    uint64_t *sorted = s->sorted;
    uint32_t distinct = 0;
    memcpy(sorted, s->elements, s->count * sizeof *sorted);
    qsort(sorted, s->count, sizeof *sorted, compare_elements);
    for (uint32_t i = 0; i < s->count; i++) {
        if (i == 0 || sorted[i] != sorted[i - 1])
            ranks[distinct++] = (struct ranked_value){sorted[i], 0};
        ranks[distinct - 1].count++;
    }
    qsort(ranks, distinct, sizeof *ranks, compare_ranks);
    limit = limit < distinct ? limit : distinct;
    for (uint32_t i = 0; i < limit; i++)
        values[i] = ranks[i].value;
    return limit;
}

static unsigned values_code_bits(const struct sample *s, int policy)
{
    uint64_t zeros = 0, count = s->count;
    for (uint32_t i = 0; i < s->count; i++)
        zeros += s->elements[i] == 0;
    if (policy == 2)
        return 9;
    if (policy == 0)
        return zeros * 10 >= count * 9 ? 7 : 8;
    return zeros * 2 >= count ? 7 : zeros * 10 >= count ? 8 : 9;
}

/* -- The choice ---------------------------------------------------------------------------------- */

struct view {
    const struct sample *sample;
    struct histogram all, rest; /* rest: the elements other than fill */
    uint64_t fill;
    uint64_t sparse_mask; /* the bits that the bitmap compares: all, or those below the sign */
    unsigned drop;
    int dense, signs_apart;
};

/* Returns the cost of mode sparse in bits; sets its bitmap with the flag for signs, and the coding
 * of the elements other than fill. */
static uint64_t sparse_cost(const struct view *v, unsigned *bitmap, struct coding *coding)
{
    const struct sample *s = v->sample;
    uint64_t bits = bitmap_cost(s, v->fill, v->sparse_mask, bitmap);
    *coding = v->signs_apart ? cheapest(s, &v->rest, 1, v->drop, 1)
                             : best_coding(s, &v->rest, v->drop, 1);
    if (v->signs_apart)
        *bitmap |= ANCF_SIGNS;
    return bits + (v->signs_apart ? s->count : 0) + coding->cost;
}

static int best_float(const struct view *v, uint64_t *cost)
{
    const struct sample *s = v->sample;
    uint64_t raw = (uint64_t)s->count * s->bits;
    uint64_t window = best_coding(s, &v->all, v->drop, v->dense).cost;
    int mode = ANCF_RAW;
    *cost = raw;
    if (window * 65 < raw * 64) {
        mode = v->drop ? ANCF_TRUNCATED : ANCF_WINDOW;
        *cost = window;
    }
    if (UINT64_C(2) * s->count < *cost && holds_three_values(s)) {
        mode = ANCF_TERNARY;
        *cost = UINT64_C(2) * s->count;
    }
    return mode;
}

static int best_integer(const struct view *v, uint64_t *cost)
{
    unsigned width = integer_width(v->sample), bits = v->sample->bits;
    *cost = (uint64_t)v->sample->count * (width + 1 < bits ? width : bits);
    return width + 1 < bits ? ANCF_INTEGER : ANCF_RAW;
}

static int best_mode(const struct view *v)
{
    uint64_t cost;
    unsigned bitmap;
    struct coding coding;
    if (v->sample->dtype == ANCF_BOOL)
        return ANCF_BOOLEAN;
    if (holds_one_value(v->sample))
        return ANCF_CONSTANT;
    int mode = v->sample->is_float ? best_float(v, &cost) : best_integer(v, &cost);
    return sparse_cost(v, &bitmap, &coding) * 9 < cost * 8 ? ANCF_SPARSE : mode;
}

static void set_coding(struct ancf_header *h, const struct coding *coding)
{
    h->rotate = (uint8_t)coding->rotate;
    h->drop = (uint8_t)coding->drop;
    h->residue_bits = (uint8_t)coding->residue_bits;
    h->k1 = (uint8_t)coding->k1;
    h->k2 = (uint8_t)coding->k2;
    unsigned slots = (1u << coding->k1) - 1 + (1u << coding->k2) - 1;
    h->dict_count = coding->ranked < slots ? coding->ranked : slots;
    memcpy(h->window, coding->dictionary, h->dict_count * sizeof *h->window);
}

static unsigned forced_drop(const struct view *v, int mode)
{
    if (mode == ANCF_WINDOW || !v->sample->is_float || v->sample->bits < 32)
        return 0;
    return v->drop ? v->drop : v->sample->bits == 32 ? 16 : 29;
}

static void plan_window(const struct view *v, int mode, struct ancf_header *h)
{
    unsigned drop = forced_drop(v, mode);
    struct coding coding = best_coding(v->sample, &v->all, drop, v->dense);
    h->mode = drop ? ANCF_TRUNCATED : ANCF_WINDOW;
    set_coding(h, &coding);
}

static void plan_sparse(const struct view *v, struct ancf_header *h)
{
    unsigned bitmap;
    struct coding coding;
    sparse_cost(v, &bitmap, &coding);
    h->mode = ANCF_SPARSE;
    h->bitmap = (uint8_t)bitmap;
    h->fill = v->fill;
    set_coding(h, &coding);
}

static void plan_values(struct sample *s, int mode, int policy, struct plan *plan)
{
    unsigned k1 = mode == ANCF_TERNARY ? 2 : values_code_bits(s, policy);
    plan->header.k1 = (uint8_t)k1;
    plan->header.dict_count = frequent_values(s, (1u << k1) - 1, plan->dictionary);
}

/* Determines what mode sparse codes. It codes the elements other than fill. If so many zeros are
 * -0.0 that one bit for each zero costs less than their residues, it codes magnitudes other than
 * 0. */
static void look_at_rest(struct view *v)
{
    const struct sample *s = v->sample;
    uint64_t all = ~UINT64_C(0), below_sign = (UINT64_C(1) << (s->bits - 1)) - 1;
    uint32_t fills = count_equal(s, v->fill, all);
    uint32_t zeros = v->fill || !s->is_float ? fills : count_equal(s, 0, below_sign);
    v->signs_apart = (uint64_t)(zeros - fills) * (s->mantissa - v->drop + 1) > zeros;
    v->sparse_mask = v->signs_apart ? below_sign : all;
    v->rest = v->all;
    if (v->signs_apart)
        fold_signs(&v->rest);
    leave_out(s, v->fill, v->signs_apart ? zeros : fills, &v->rest);
}

void choose_plan(struct sample *sample, int mode, int dense, int policy, uint64_t fill,
                 struct plan *plan)
{
    struct view v = {.sample = sample, .fill = fill, .dense = dense};
    struct ancf_header *h = &plan->header;
    count_symbols(sample, &v.all);
    v.drop = droppable_bits(sample);
    look_at_rest(&v);
    if (mode == ANCF_AUTO)
        mode = best_mode(&v);
    h->mode = (uint8_t)mode;
    if (mode == ANCF_WINDOW || mode == ANCF_TRUNCATED)
        plan_window(&v, mode, h);
    else if (mode == ANCF_SPARSE)
        plan_sparse(&v, h);
    else if (mode == ANCF_CONSTANT)
        h->fill = sample->elements[0];
    else if (mode == ANCF_TERNARY || mode == ANCF_VALUES)
        plan_values(sample, mode, policy, plan);
}
