/* Encodes and decodes one tile, for every element width; included once per instruction set.
 *
 * The includer defines TABLE (the name of its `struct kernels`), TABLE_NAME, and the primitives
 *   planes_of_bytes, bytes_of_planes, planes_of_symbols, symbols_of_planes, put_bytes, take_bytes,
 *   mover, make_mover, extract_bits, deposit_bits, kernel_checksum, kernel_copy_checksum, and
 *   compress_, expand_ and expand_signed_ for u8, u16, u32 and u64, and optionally split_rotated,
 * as its own functions or those of primitives_portable.h. The loops below are plain C that the
 * compiler vectorises under the includer's flags. Everything is static, so the linker cannot
 * confuse two instruction sets in one library. */

#include "coder.h"
#include "primitives_portable.h"
#include "values.h"

/* Writes a level-2 or bitmap stream: appends bits to words. */
struct bit_writer {
    uint64_t *words; /* space for all bits plus one word, set up to the current word */
    unsigned at;     /* bits written */
};

/* Appends the low count <= 64 bits of x; the other bits of x must be 0. */
static inline void append_bits(struct bit_writer *out, uint64_t x, unsigned count)
{
    unsigned word = out->at / 64, shift = out->at % 64;
    out->words[word] |= x << shift;
    out->words[word + 1] = shift ? x >> (64 - shift) : 0;
    out->at += count;
}

/* Returns 64 bits from bit `at` on; one word beyond the last bit must be readable. */
static inline uint64_t bits_at(const uint64_t *words, unsigned at)
{
    unsigned word = at / 64, shift = at % 64;
    return shift ? words[word] >> shift | words[word + 1] << (64 - shift) : words[word];
}

static inline unsigned groups_of(unsigned count) { return (count + 63) / 64; }

/* Returns the mask of the bits in word number `word` of a plane that belong to the first `count`
 * values. */
static inline uint64_t valid_bits(unsigned word, unsigned count)
{
    unsigned left = count > 64 * word ? count - 64 * word : 0;
    return left >= 64 ? ~UINT64_C(0) : (UINT64_C(1) << left) - 1;
}

static inline unsigned count_ones(const uint64_t *words, unsigned groups)
{
    unsigned total = 0;
    for (unsigned g = 0; g < groups; g++)
        total += (unsigned)__builtin_popcountll(words[g]);
    return total;
}

/* Loads one plane of p values (a multiple of 8) to words; the last word is zero padded. */
static inline void load_plane(const uint8_t *from, unsigned p, uint64_t *words)
{
    if (p % 64)
        words[p / 64] = 0;
    memcpy(words, from, p / 8);
}

/* -- Codes: planes of level 1, streams of level 2, masks of escapes --------------------------- */

struct codes {
    uint64_t planes[MAX_CODE_BITS][WORDS];
    uint64_t escapes[WORDS];                    /* values that are escapes */
};

static inline void find_escapes(const struct coder *c, struct codes *codes, unsigned groups)
{
    unsigned bits = code_bits(c);
    for (unsigned g = 0; g < groups; g++) {
        uint64_t all = codes->planes[0][g];
        for (unsigned b = 1; b < bits; b++)
            all &= codes->planes[b][g];
        codes->escapes[g] = all;
    }
}

static uint8_t *put_level1(const struct coder *c, const struct codes *codes, unsigned p,
                           uint8_t *dst)
{
    for (unsigned b = 0; b < c->k1; b++, dst += p / 8) {
        uint64_t words[WORDS];
        for (unsigned g = 0; g < groups_of(p); g++)
            words[g] = codes->planes[b][g] | (c->k2 ? codes->planes[c->k2][g] : 0);
        memcpy(dst, words, p / 8);
    }
    return dst;
}

static uint8_t *put_level2(const struct coder *c, const struct codes *codes, unsigned groups,
                           uint8_t *dst)
{
    const uint64_t *nested = codes->planes[c->k2];
    uint64_t words[MAX_CODE_BITS][WORDS + 2];
    struct bit_writer out[MAX_CODE_BITS];
    if (c->k2 == 0)
        return dst;
    for (unsigned b = 0; b < c->k2; b++) {
        out[b] = (struct bit_writer){words[b], 0};
        words[b][0] = 0;
    }
    for (unsigned g = 0; g < groups; g++) {
        const mover together = make_mover(nested[g]);
        unsigned count = (unsigned)__builtin_popcountll(nested[g]);
        for (unsigned b = 0; b < c->k2; b++)
            append_bits(&out[b], extract_bits(codes->planes[b][g], &together), count);
    }
    unsigned bytes = (out[0].at + 7) / 8;
    for (unsigned b = 0; b < c->k2; b++, dst += bytes)
        memcpy(dst, words[b], bytes);
    return dst;
}

/* A decoder's position in a record. */
struct reader {
    const uint8_t *at;
    size_t left;
};

/* Returns the next `bytes` bytes, NULL if the record is shorter. */
static inline const uint8_t *take(struct reader *from, size_t bytes)
{
    if (bytes > from->left)
        return NULL;
    const uint8_t *start = from->at;
    from->at += bytes;
    from->left -= bytes;
    return start;
}

/* Distributes level 2's streams to the positions of their values. */
static int take_level2(const struct coder *c, struct codes *codes, unsigned groups,
                       struct reader *from)
{
    const uint64_t *nested = codes->planes[c->k2];
    unsigned count = count_ones(nested, groups);
    unsigned bytes = (count + 7) / 8;
    const uint8_t *streams = take(from, (size_t)bytes * c->k2);
    if (streams == NULL)
        return -1;
    uint64_t words[MAX_CODE_BITS][WORDS + 2];
    for (unsigned b = 0; b < c->k2; b++) {
        memset(words[b] + bytes / 8, 0, (WORDS + 2 - bytes / 8) * sizeof **words);
        memcpy(words[b], streams + (size_t)bytes * b, bytes);
    }
    unsigned at = 0;
    for (unsigned g = 0; g < groups; g++) {
        const mover apart = make_mover(nested[g]);
        for (unsigned b = 0; b < c->k2; b++) {
            uint64_t level1 = codes->planes[b][g] & ~nested[g];
            codes->planes[b][g] = level1 | deposit_bits(bits_at(words[b], at), &apart);
        }
        at += (unsigned)__builtin_popcountll(nested[g]);
    }
    return 0;
}

/* Reads the code planes of m values at `planes` and level 2 from the record. */
static int take_codes(const struct coder *c, struct codes *codes, const uint8_t *planes,
                      unsigned m, unsigned p, struct reader *from)
{
    unsigned groups = groups_of(m);
    for (unsigned b = 0; b < c->k1; b++)
        load_plane(planes + (size_t)b * (p / 8), p, codes->planes[b]);
    if (c->k2) {
        memset(codes->planes[c->k1], 0, sizeof codes->planes[c->k1]);
        for (unsigned g = 0; g < groups; g++) {
            uint64_t all = codes->planes[0][g] & codes->planes[1][g] & valid_bits(g, m);
            codes->planes[c->k2][g] = c->k1 == 3 ? all & codes->planes[2][g] : all;
        }
        if (take_level2(c, codes, groups, from) != 0)
            return -1;
    }
    find_escapes(c, codes, groups);
    for (unsigned g = 0; g < groups; g++)
        codes->escapes[g] &= valid_bits(g, m);
    return 0;
}

static void fill_symbol_table(const struct coder *c, uint16_t table[CODE_TABLE])
{
    memset(table, 0, CODE_TABLE * sizeof *table);
    for (unsigned i = 0; i < c->dict_count; i++)
        table[code_of_entry(c, i)] = c->window[i];
}

/* Looks up symbols of more than 8 bits: float64, or sign and exponent together. An instruction set
 * that looks up many bytes at once (LOOKS_UP_BYTES) looks up both halves. */
static void wide_symbols_of_planes(const uint64_t planes[][WORDS], unsigned groups, unsigned bits,
                                   const uint16_t table[CODE_TABLE], uint16_t *symbols)
{
#ifdef LOOKS_UP_BYTES
    uint8_t low[ANCF_TILE], high[ANCF_TILE], low_table[CODE_TABLE], high_table[CODE_TABLE];
    for (unsigned i = 0; i < CODE_TABLE; i++) {
        low_table[i] = (uint8_t)table[i];
        high_table[i] = (uint8_t)(table[i] >> 8);
    }
    symbols_of_planes(planes, groups, bits, low_table, low);
    symbols_of_planes(planes, groups, bits, high_table, high);
    for (unsigned i = 0; i < 64 * groups; i++)
        symbols[i] = (uint16_t)(low[i] | high[i] << 8);
#else
    uint8_t codes[ANCF_TILE];
    bytes_of_planes(planes, groups, bits, codes);
    for (unsigned i = 0; i < 64 * groups; i++)
        symbols[i] = table[codes[i]];
#endif
}

#ifdef LOOKS_UP_SYMBOLS
/* Codes symbols of 9 bits, sign and exponent: looks up the exponents for both signs and selects by
 * the sign. Only for instruction sets where a lookup in 256 bytes takes few instructions. */
static void planes_of_joint_symbols(const struct coder *c, const uint8_t *signs,
                                    const uint8_t *exponents, unsigned groups,
                                    uint64_t planes[][WORDS])
{
    uint64_t negative[MAX_CODE_BITS][WORDS], chosen[1][WORDS];
    planes_of_bytes(signs, groups, 1, chosen);
    planes_of_symbols(c, 0, exponents, groups, planes);
    planes_of_symbols(c, 1, exponents, groups, negative);
    for (unsigned b = 0; b < code_bits(c); b++)
        for (unsigned g = 0; g < groups; g++)
            planes[b][g] = (planes[b][g] & ~chosen[0][g]) | (negative[b][g] & chosen[0][g]);
}
#endif

/* Sets the codes of padding, after the first m values, to 0. */
static void clear_pad_codes(struct codes *codes, unsigned bits, unsigned m, unsigned groups)
{
    for (unsigned g = m / 64; g < groups; g++)
        for (unsigned b = 0; b < bits; b++)
            codes->planes[b][g] &= valid_bits(g, m);
}

/* -- Bitmaps ---------------------------------------------------------------------------------- */

/* Packs the even bits of two words into one; add_even_bits is the inverse. */
static inline uint64_t even_bits(const uint64_t *pair)
{
    return pack_even_bits(pair[0]) | pack_even_bits(pair[1]) << 32;
}

static inline void add_even_bits(uint64_t bits, uint64_t *pair)
{
    pair[0] |= spread_to_even_bits(bits & 0xFFFFFFFF);
    pair[1] |= spread_to_even_bits(bits >> 32);
}

/* Writes to `out` the bits of x whose bit in `select` is set; returns their number. */
static unsigned extract_stream(const uint64_t *x, const uint64_t *select, unsigned groups,
                               uint64_t *out)
{
    struct bit_writer writer = {out, 0};
    out[0] = 0;
    for (unsigned g = 0; g < groups; g++) {
        const mover together = make_mover(select[g]);
        append_bits(&writer, extract_bits(x[g], &together),
                    (unsigned)__builtin_popcountll(select[g]));
    }
    return writer.at;
}

static uint8_t *put_stream(const uint64_t *x, const uint64_t *select, unsigned groups,
                           uint8_t *dst)
{
    uint64_t words[WORDS + 2];
    unsigned bits = extract_stream(x, select, groups, words);
    unsigned bytes = (bits + 31) / 32 * 4;
    memset(dst, 0, bytes);
    memcpy(dst, words, (bits + 7) / 8);
    return dst + bytes;
}

/* Writes a bitmap of `count` values as pairs: plane A to the fixed block, B and C to the record. */
static uint8_t *put_pairs(const uint64_t *bitmap, unsigned count, uint8_t *fixed, uint8_t *record)
{
    unsigned pairs = (unsigned)ancf_up(count, 256) / 2, groups = groups_of(pairs);
    uint64_t first[WORDS / 2], second[WORDS / 2], either[WORDS / 2];
    for (unsigned g = 0; g < groups; g++) {
        uint64_t odd[2] = {bitmap[2 * g] >> 1, bitmap[2 * g + 1] >> 1};
        first[g] = even_bits(bitmap + 2 * g);
        second[g] = even_bits(odd);
        either[g] = first[g] | second[g];
    }
    memcpy(fixed, either, pairs / 8);
    record = put_stream(second, either, groups, record);
    return put_stream(first, second, groups, record);
}

/* The inverse of put_stream. */
static int take_stream(struct reader *from, const uint64_t *select, unsigned groups,
                       uint64_t *out)
{
    uint64_t words[WORDS + 2] = {0};
    unsigned count = count_ones(select, groups), at = 0;
    const uint8_t *stream = take(from, (count + 31) / 32 * 4);
    if (stream == NULL)
        return -1;
    memcpy(words, stream, (count + 7) / 8);
    for (unsigned g = 0; g < groups; g++) {
        const mover apart = make_mover(select[g]);
        out[g] = deposit_bits(bits_at(words, at), &apart);
        at += (unsigned)__builtin_popcountll(select[g]);
    }
    return 0;
}

static int take_pairs(const uint8_t *fixed, struct reader *from, unsigned count, uint64_t *bitmap)
{
    unsigned pairs = (unsigned)ancf_up(count, 256) / 2, groups = groups_of(pairs);
    uint64_t either[WORDS / 2], second[WORDS / 2], both[WORDS / 2];
    memcpy(either, fixed, pairs / 8);
    for (unsigned g = 0; g < groups; g++)
        either[g] &= valid_bits(g, (count + 1) / 2);
    if (take_stream(from, either, groups, second) != 0 ||
        take_stream(from, second, groups, both) != 0)
        return -1;
    for (unsigned g = 0; g < groups; g++) {
        uint64_t odd[2] = {0, 0};
        bitmap[2 * g] = bitmap[2 * g + 1] = 0;
        add_even_bits((either[g] & ~second[g]) | both[g], bitmap + 2 * g);
        add_even_bits(second[g], odd);
        bitmap[2 * g] |= odd[0] << 1;
        bitmap[2 * g + 1] |= odd[1] << 1;
    }
    return 0;
}

static uint8_t *put_bitmap(const struct coder *c, uint64_t *bitmap, unsigned count, uint8_t *fixed,
                           uint8_t *record)
{
    if (c->bitmap == ANCF_PAIRS)
        return put_pairs(bitmap, count, fixed, record);
    memcpy(fixed, bitmap, ancf_up(count, 128) / 8);
    return record;
}

/* Ignores bits past the tile, so that the elements of a bitmap always fit the output. */
static int take_bitmap(const struct coder *c, const uint8_t *fixed, struct reader *from,
                       unsigned count, uint64_t *bitmap)
{
    if (c->bitmap == ANCF_PAIRS) {
        if (take_pairs(fixed, from, count, bitmap) != 0)
            return -1;
    } else {
        memcpy(bitmap, fixed, ancf_up(count, 128) / 8);
    }
    for (unsigned g = 0; g < groups_of(count); g++)
        bitmap[g] &= valid_bits(g, count);
    return 0;
}

/* How an element splits into symbol and residue: the coder's values, as compile-time constants
 * where that makes faster loops. */
struct shape {
    unsigned rotate, drop, residue_bits, symbol_bits;
};

/* -- Everything that depends on the element's width ------------------------------------------- */

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)

#define BITS 16 /* first: dictionary codes of every width are 16-bit values */
#include "width_template.h"
#undef BITS
#define BITS 8
#include "width_template.h"
#undef BITS
#define BITS 32
#include "width_template.h"
#undef BITS
#define BITS 64
#include "width_template.h"
#undef BITS

#define EACH_WIDTH(name) {name##_u8, name##_u16, name##_u32, name##_u64}

const struct kernels TABLE = {
    .name = TABLE_NAME,
    .checksum = kernel_checksum,
    .copy_checksum = kernel_copy_checksum,
    .encode_tile = EACH_WIDTH(encode_tile),
    .decode_tile = EACH_WIDTH(decode_tile),
    .pack_booleans = EACH_WIDTH(pack_booleans),
    .unpack_booleans = EACH_WIDTH(unpack_booleans),
    .all_equal = EACH_WIDTH(all_equal),
    .spread = EACH_WIDTH(spread),
};
