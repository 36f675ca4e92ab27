/* What coding one tile needs to know, and the table of functions that do it.
 *
 * A `struct coder` is derived once per tensor from a checked header and never changes, so any
 * number of threads may share it. Each instruction set fills one `struct kernels`; which one is
 * used never shows in the bytes. */
#ifndef STORM_CODER_H
#define STORM_CODER_H

#include "format.h"

#define WORDS (ANCF_TILE / 64) /* 64-bit words of one bit plane of a whole tile */

/* No record is longer: planes and escapes of 64-bit elements, then codes of 9 bits, bitmap streams
 * and level 2, which together stay below 3 bytes an element. */
#define MAX_RECORD_BYTES ((2 * 8 + 3) * ANCF_TILE)

/* Slack behind a record: symbols and words are stored eight bytes at a time. */
#define RECORD_SLACK 64

struct value_index;

struct coder {
    unsigned esize;      /* bytes of an element */
    unsigned rotate;
    unsigned drop;
    unsigned residue_bits;
    unsigned symbol_bits; /* that can be set; up to 8 where symbols are handled as bytes */
    unsigned k1;
    unsigned k2;
    unsigned escape_bytes;
    unsigned mode;
    unsigned bitmap;     /* without the flag for signs */
    unsigned signs_apart; /* elements are coded without their signs, which have a plane */
    unsigned is_signed;
    unsigned dict_count;
    uint64_t fill;
    uint16_t window[ANCF_WINDOW_SLOTS];
    const uint8_t *code_of_symbol;   /* encoder of window codes: MAX_SYMBOLS of them */
    const uint64_t *dictionary;      /* modes ternary and values: dict_count entries, else NULL */
    const struct value_index *index; /* the same for the encoder */
};

/* Window codes inside this library. One level: 0..6 name the dictionary, 7 is the escape.
 * Two levels: bit k2 says "level 2", the bits below it are code 1 or code 2; all ones is the
 * escape. So a code has code_bits bits, and its planes are those of both levels. */
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

    /* Sum of h over the columns of whole 2048-byte chunks; the first has number first_chunk. */
    uint64_t (*checksum)(const uint8_t *data, size_t chunks, uint64_t first_chunk);
    uint64_t (*copy_checksum)(uint8_t *dst, const uint8_t *data, size_t chunks,
                              uint64_t first_chunk);

    /* Indexed by log2 of the element's bytes. encode writes the fixed block and the record, padded
     * to 8 bytes, and may write RECORD_SLACK bytes more; it returns the record's bytes. decode
     * returns 0, or -1 when the record contradicts itself. */
    size_t (*encode_tile[4])(const struct coder *coder, const void *elements, unsigned count,
                             uint8_t *fixed, uint8_t *record);
    int (*decode_tile[4])(const struct coder *coder, const uint8_t *fixed, const uint8_t *record,
                          size_t record_bytes, unsigned count, void *elements);

    /* Bit planes of up to a tile of booleans; pack returns -1 at an element other than 0 and 1. */
    int (*pack_booleans[4])(const void *elements, unsigned count, uint8_t *plane);
    void (*unpack_booleans[4])(const uint8_t *plane, unsigned count, void *elements);

    /* Mode constant: 1 when all elements equal fill; and its decoder. */
    int (*all_equal[4])(const void *elements, unsigned count, uint64_t fill);
    void (*spread[4])(uint64_t fill, unsigned count, void *elements);
};

extern const struct kernels kernels_portable;
extern const struct kernels kernels_avx2;
extern const struct kernels kernels_avx512;
extern const struct kernels kernels_neon;

/* The table of an instruction set (enum storm_isa), NULL when this machine cannot run it. */
const struct kernels *kernels_for(int isa);

/* Bytes that no record of this coder exceeds, padding included and slack not; at most
 * MAX_RECORD_BYTES. */
size_t record_bound(const struct coder *coder);

#endif
