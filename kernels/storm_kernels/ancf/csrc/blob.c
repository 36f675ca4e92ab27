/* See blob.h. */
#include "blob.h"

#include <string.h>

#include "ancf.h"

static const struct ancf_dtype_info dtypes[ANCF_DTYPES] = {
    [ANCF_BYTES] = {8, 3, 0, 0},
    [ANCF_BFLOAT16] = {16, 7, 0, 1},
    [ANCF_FLOAT16] = {16, 10, 0, 1},
    [ANCF_FLOAT32] = {32, 23, 0, 1},
    [ANCF_FLOAT64] = {64, 52, 0, 1},
    [ANCF_FLOAT8_E4M3FN] = {8, 3, 0, 1},
    [ANCF_FLOAT8_E5M2] = {8, 2, 0, 1},
    [ANCF_BOOL] = {8, 3, 0, 0},
    [ANCF_INT8] = {8, 3, 1, 0},
    [ANCF_UINT8] = {8, 3, 0, 0},
    [ANCF_INT16] = {16, 7, 1, 0},
    [ANCF_UINT16] = {16, 7, 0, 0},
    [ANCF_INT32] = {32, 23, 1, 0},
    [ANCF_UINT32] = {32, 23, 0, 0},
    [ANCF_INT64] = {64, 52, 1, 0},
    [ANCF_UINT64] = {64, 52, 0, 0},
    [ANCF_COMPLEX32] = {16, 10, 0, 1},
    [ANCF_COMPLEX64] = {32, 23, 0, 1},
    [ANCF_COMPLEX128] = {64, 52, 0, 1},
};

const struct ancf_dtype_info *dtype_info(int dtype)
{
    return dtype >= 0 && dtype < ANCF_DTYPES ? &dtypes[dtype] : NULL;
}

unsigned element_log2(const struct ancf_header *header)
{
    return (unsigned)__builtin_ctz(dtypes[header->dtype].bits / 8);
}

uint64_t element_count(const struct ancf_header *header)
{
    return header->raw_nbytes >> element_log2(header);
}

int has_tiles(const struct ancf_header *header)
{
    return header->mode != ANCF_RAW && header->mode != ANCF_CONSTANT &&
           header->mode != ANCF_BOOLEAN;
}

int has_dictionary_apart(const struct ancf_header *header)
{
    return header->mode == ANCF_TERNARY || header->mode == ANCF_VALUES;
}

uint64_t directory_offset(const struct ancf_header *header)
{
    uint64_t dictionary = has_dictionary_apart(header) ? UINT64_C(8) << header->k1 : 0;
    return ANCF_HEADER_BYTES + ancf_up(dictionary, ANCF_ALIGN);
}

uint64_t block_bytes(const struct ancf_header *header, uint64_t count)
{
    uint64_t plane = ancf_up(count, 128) / 8;
    if (header->bitmap)
        return bitmap_bytes(header->bitmap & ~ANCF_SIGNS, count) +
               (header->bitmap & ANCF_SIGNS ? plane : 0);
    return plane * (uint64_t)(header->residue_bits + header->k1);
}

static uint64_t fixed_bytes(const struct ancf_header *header)
{
    uint64_t n = element_count(header);
    switch (header->mode) {
    case ANCF_RAW:
        return header->raw_nbytes;
    case ANCF_CONSTANT:
        return 0;
    case ANCF_BOOLEAN:
        return ancf_up(ancf_up(n, 8) / 8, 16);
    default:
        return n / ANCF_TILE * block_bytes(header, ANCF_TILE) + block_bytes(header, n % ANCF_TILE);
    }
}

static uint8_t escape_bytes(const struct ancf_header *header)
{
    unsigned width = dtypes[header->dtype].bits;
    unsigned bits = header->drop ? width : width - header->residue_bits;
    if (header->k1 == 0)
        return 0;
    return bits <= 8 ? 1 : bits <= 16 ? 2 : bits <= 32 ? 4 : 8;
}

void lay_out(struct ancf_header *header)
{
    header->escape_bytes = escape_bytes(header);
    header->tiles = 0;
    header->fixed_offset = ANCF_HEADER_BYTES;
    if (has_tiles(header)) {
        header->tiles = (uint32_t)(ancf_up(element_count(header), ANCF_TILE) / ANCF_TILE);
        header->fixed_offset = directory_offset(header) +
                               ancf_up(4 * ((uint64_t)header->tiles + 1), ANCF_ALIGN);
    }
    header->payload_offset = header->fixed_offset + fixed_bytes(header);
    header->total_bytes = header->payload_offset + header->payload_bytes;
}

static uint64_t check_of(const struct ancf_header *header)
{
    uint64_t words[ANCF_HEADER_BYTES / 8], h = 0;
    memcpy(words, header, sizeof words);
    for (unsigned i = 0; i < ANCF_HEADER_BYTES / 8 - 1; i++) {
        h = (h ^ words[i]) * ANCF_C2;
        h ^= h >> 29;
    }
    return h;
}

void store_header(struct ancf_header *header, uint8_t *dst)
{
    header->magic = ANCF_MAGIC;
    header->version = ANCF_VERSION;
    header->header_check = check_of(header);
    memcpy(dst, header, ANCF_HEADER_BYTES);
}

/* These functions check that FORMAT.md's section 12 lists the combination of mode and code
 * parameters. */
static int drop_is_known(const struct ancf_header *h, unsigned width)
{
    int truncated = (width == 32 && (h->drop == 16 || h->drop == 13)) ||
                    (width == 64 && h->drop == 29);
    if (h->mode == ANCF_TRUNCATED)
        return truncated;
    return h->drop == 0 || (h->mode == ANCF_SPARSE && truncated);
}

static int window_is_known(const struct ancf_header *h)
{
    const struct ancf_dtype_info *dtype = &dtypes[h->dtype];
    int fast = h->k1 == 3 && h->k2 == 0;
    int dense = (h->k1 == 2 && h->k2 == 3) || (h->k1 == 3 && h->k2 == 4);
    int kind = h->bitmap & ~ANCF_SIGNS, has_bitmap = kind == ANCF_PLAIN || kind == ANCF_PAIRS;
    if (!(dense || (fast && h->mode == ANCF_WINDOW)))
        return 0;
    if (h->mode == ANCF_SPARSE ? !has_bitmap : h->bitmap != ANCF_NO_BITMAP)
        return 0;
    if ((h->bitmap & ANCF_SIGNS) && (h->rotate || h->fill))
        return 0;
    return drop_is_known(h, dtype->bits) && h->rotate <= 1 &&
           h->residue_bits == dtype->mantissa - h->drop + h->rotate;
}

static int codes_are_known(const struct ancf_header *h)
{
    if (h->mode == ANCF_WINDOW || h->mode == ANCF_SPARSE || h->mode == ANCF_TRUNCATED)
        return window_is_known(h);
    if (h->bitmap || h->rotate || h->drop || h->residue_bits || h->k2)
        return 0;
    if (h->mode == ANCF_TERNARY)
        return h->k1 == 2;
    return h->mode == ANCF_VALUES ? h->k1 >= 7 && h->k1 <= 9 : h->k1 == 0;
}

static int dictionary_fits(const struct ancf_header *h)
{
    unsigned level1 = (1u << h->k1) - 1, level2 = (1u << h->k2) - 1;
    if (h->dict_count > level1 + level2)
        return 0;
    for (unsigned i = has_dictionary_apart(h) ? 0 : h->dict_count; i < ANCF_WINDOW_SLOTS; i++)
        if (h->window[i] != 0)
            return 0;
    return 1;
}

static int is_possible(const struct ancf_header *h)
{
    if (h->magic != ANCF_MAGIC || h->version != ANCF_VERSION || h->header_check != check_of(h))
        return 0;
    if (h->mode >= ANCF_MODES || h->dtype >= ANCF_DTYPES || (h->flags & ~ANCF_FLAG_CHECKSUM))
        return 0;
    if (!codes_are_known(h) || !dictionary_fits(h) || (h->checksum && !h->flags))
        return 0;
    unsigned width = dtypes[h->dtype].bits;
    if (h->fill && h->mode != ANCF_SPARSE && h->mode != ANCF_CONSTANT)
        return 0;
    return h->raw_nbytes % (width / 8) == 0 && (width == 64 || h->fill >> width == 0);
}

int load_header(const uint8_t *blob, uint64_t blob_bytes, struct ancf_header *header)
{
    struct ancf_header expected;
    if (blob_bytes < ANCF_HEADER_BYTES)
        return STORM_CORRUPT;
    memcpy(header, blob, sizeof *header);
    if (!is_possible(header) || header->total_bytes != blob_bytes)
        return STORM_CORRUPT;
    expected = *header;
    lay_out(&expected);
    memset(expected.zero, 0, sizeof expected.zero);
    if (has_tiles(header) ? header->payload_bytes >= ANCF_PAYLOAD_END : header->payload_bytes != 0)
        return STORM_CORRUPT;
    return memcmp(&expected, header, sizeof expected) == 0 ? STORM_OK : STORM_CORRUPT;
}

void make_coder(const struct plan *plan, struct coder *coder)
{
    const struct ancf_header *h = &plan->header;
    *coder = (struct coder){
        .esize = dtypes[h->dtype].bits / 8,
        .rotate = h->rotate,
        .drop = h->drop,
        .residue_bits = h->residue_bits,
        .symbol_bits = (unsigned)dtypes[h->dtype].bits - h->drop - h->residue_bits -
                       ((h->bitmap & ANCF_SIGNS) != 0),
        .k1 = h->k1,
        .k2 = h->k2,
        .escape_bytes = h->escape_bytes,
        .mode = h->mode,
        .bitmap = h->bitmap & ~(unsigned)ANCF_SIGNS,
        .signs_apart = (h->bitmap & ANCF_SIGNS) != 0,
        .is_signed = dtypes[h->dtype].is_signed,
        .dict_count = h->dict_count,
        .fill = h->fill,
        .dictionary = has_dictionary_apart(h) ? plan->dictionary : NULL,
    };
    memcpy(coder->window, h->window, sizeof coder->window);
}

/* The sum of bitmap streams, planes, level 2, one escape per element, and mode integer's 16
 * bytes. */
size_t record_bound(const struct coder *coder)
{
    size_t bitmaps = ANCF_TILE / 8 + 8, level2 = ANCF_TILE / 8 * (size_t)coder->k2;
    size_t planes = (size_t)ANCF_TILE * coder->esize + ANCF_TILE / 8 * (size_t)coder->k1;
    return 16 + bitmaps + planes + level2 + (size_t)ANCF_TILE * coder->escape_bytes + 8;
}
