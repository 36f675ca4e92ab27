/* The parameters for coding one tile, and the table of functions that code it.
 *
 * A `struct coder` is derived once per tensor from a checked header and never changes, so any
 * number of threads may share it. Each instruction set has one `struct kernels`; all of them write
 * the same bytes. */
#ifndef STORM_CODER_H
#define STORM_CODER_H

#include "format.h"

#define WORDS (ANCF_TILE / 64) /* 64-bit words of one bit plane of a whole tile */

/* The maximum size of a record: planes and escapes of 64-bit elements, then codes of 9 bits, bitmap
 * streams and level 2, which together take less than 3 bytes per element. */
#define MAX_RECORD_BYTES ((2 * 8 + 3) * ANCF_TILE)

/* Slack behind a record: symbols and words are stored eight bytes at a time. */
#define RECORD_SLACK 64

struct value_index;

struct coder {
    unsigned esize;      /* bytes of an element */
    unsigned rotate;
    unsigned drop;
    unsigned residue_bits;
    unsigned symbol_bits; /* bits that can be set; symbols of up to 8 bits are handled as bytes */
    unsigned k1;
    unsigned k2;
    unsigned escape_bytes;
    unsigned mode;
    unsigned bitmap;     /* without the flag for signs */
    unsigned signs_apart; /* elements are coded without signs; signs have a separate plane */
    unsigned is_signed;
    unsigned dict_count;
    uint64_t fill;
    uint16_t window[ANCF_WINDOW_SLOTS];
    const uint8_t *code_of_symbol;   /* for encoding window codes: MAX_SYMBOLS entries */
    const uint64_t *dictionary;      /* modes ternary and values: dict_count entries, else NULL */
    const struct value_index *index; /* index of the dictionary, for encoding */
};

/* Window codes inside this library. One level: 0..6 are dictionary indices, 7 is the escape. Two
 * levels: bit k2 means "level 2", and the bits below it are code 1 or code 2; all ones is the
 * escape. So a code has code_bits bits, and its planes contain both levels. */
#define MAX_CODE_BITS 5
#define CODE_TABLE (1 << MAX_CODE_BITS)
#define MAX_SYMBOLS 4096 /* float64: sign and 11 exponent bits */

static inline unsigned code_bits(const struct coder *coder)
{
    return coder->k2 ? coder->k2 + 1 : coder->k1;
}

/* The code of dictionary entry number `entry`. */
static inline unsigned code_of_entry(const struct coder *coder, unsigned entry)
{
    unsigned level1 = (1u << coder->k1) - 1;
    return entry < level1 ? entry : entry - level1 + (1u << coder->k2);
}

struct kernels {
    const char *name;

    /* Sum of h over the columns of whole 2048-byte chunks; the first chunk has number
     * first_chunk. */
    uint64_t (*checksum)(const uint8_t *data, size_t chunks, uint64_t first_chunk);
    uint64_t (*copy_checksum)(uint8_t *dst, const uint8_t *data, size_t chunks,
                              uint64_t first_chunk);

    /* Indexed by log2 of the element's bytes. encode writes the fixed block and the record, padded
     * to 8 bytes, and may write RECORD_SLACK bytes more; it returns the record's bytes. decode
     * returns 0, or -1 if the record is invalid. */
    size_t (*encode_tile[4])(const struct coder *coder, const void *elements, unsigned count,
                             uint8_t *fixed, uint8_t *record);
    int (*decode_tile[4])(const struct coder *coder, const uint8_t *fixed, const uint8_t *record,
                          size_t record_bytes, unsigned count, void *elements);

    /* Bit planes of up to one tile of booleans; pack returns -1 if an element is not 0 or 1. */
    int (*pack_booleans[4])(const void *elements, unsigned count, uint8_t *plane);
    void (*unpack_booleans[4])(const uint8_t *plane, unsigned count, void *elements);

    /* Mode constant: all_equal returns 1 if all elements equal fill; spread decodes. */
    int (*all_equal[4])(const void *elements, unsigned count, uint64_t fill);
    void (*spread[4])(uint64_t fill, unsigned count, void *elements);
};

extern const struct kernels kernels_portable;
extern const struct kernels kernels_avx2;
extern const struct kernels kernels_avx512;
extern const struct kernels kernels_neon;

/* Returns the table of an instruction set (enum storm_isa), NULL if this machine cannot run it. */
const struct kernels *kernels_for(int isa);

/* Returns the maximum size of this coder's records, with padding and without slack; at most
 * MAX_RECORD_BYTES. */
size_t record_bound(const struct coder *coder);

#endif
