/* The tile coder with NEON: 16 bytes at a time, bit planes by pairwise additions of weighted bits. */
#include <arm_neon.h>

#include "../primitives_portable.h"

/* The weights of bytes: byte i of each eight has weight 2^i. */
static inline uint8x16_t neon_weights(void)
{
    return vreinterpretq_u8_u64(vdupq_n_u64(UINT64_C(0x8040201008040201)));
}

/* Packs four vectors of weighted bits (each byte is 0 or its weight) into the 64 bits of a
 * plane. */
static inline uint64_t neon_gather(const uint8x16_t weighted[4])
{
    uint8x16_t low = vpaddq_u8(weighted[0], weighted[1]);
    uint8x16_t high = vpaddq_u8(weighted[2], weighted[3]);
    uint8x16_t sums = vpaddq_u8(low, high);
    sums = vpaddq_u8(sums, sums);
    return vgetq_lane_u64(vreinterpretq_u64_u8(sums), 0);
}

static inline void neon_planes_of_bytes(const uint8_t *bytes, unsigned groups, unsigned bits,
                                        uint64_t planes[][WORDS])
{
    const uint8x16_t weights = neon_weights();
    for (unsigned g = 0; g < groups; g++)
        for (unsigned b = 0; b < bits; b++) {
            uint8x16_t weighted[4];
            for (unsigned i = 0; i < 4; i++) {
                uint8x16_t values = vld1q_u8(bytes + 64 * g + 16 * i);
                uint8x16_t set = vtstq_u8(values, vdupq_n_u8((uint8_t)(1u << b)));
                weighted[i] = vandq_u8(set, weights);
            }
            planes[b][g] = neon_gather(weighted);
        }
}

/* Returns the codes of values 16*part to 16*part + 15 of group g. */
static inline uint8x16_t neon_codes_of_planes(const uint64_t planes[][WORDS], unsigned g,
                                              unsigned part, unsigned bits)
{
    const uint8x16_t owner = vcombine_u8(vdup_n_u8((uint8_t)(2 * part)),
                                         vdup_n_u8((uint8_t)(2 * part + 1)));
    uint8x16_t codes = vdupq_n_u8(0);
    for (unsigned b = 0; b < bits; b++) {
        uint8x16_t word = vreinterpretq_u8_u64(vdupq_n_u64(planes[b][g]));
        uint8x16_t set = vtstq_u8(vqtbl1q_u8(word, owner), neon_weights());
        codes = vorrq_u8(codes, vandq_u8(set, vdupq_n_u8((uint8_t)(1u << b))));
    }
    return codes;
}

static inline void neon_bytes_of_planes(const uint64_t planes[][WORDS], unsigned groups,
                                        unsigned bits, uint8_t *bytes)
{
    for (unsigned g = 0; g < groups; g++)
        for (unsigned part = 0; part < 4; part++)
            vst1q_u8(bytes + 64 * g + 16 * part, neon_codes_of_planes(planes, g, part, bits));
}

/* Up to 10 entries are compared one by one; a table is faster for more. */
static inline void neon_planes_of_symbols(const struct coder *c, unsigned half,
                                          const uint8_t *symbols, unsigned groups,
                                          uint64_t planes[][WORDS])
{
    uint8_t codes[ANCF_TILE];
    const unsigned bits = code_bits(c);
    if (c->dict_count > 10) {
        for (unsigned i = 0; i < 64 * groups; i++)
            codes[i] = c->code_of_symbol[256 * half + symbols[i]];
        neon_planes_of_bytes(codes, groups, bits, planes);
        return;
    }
    for (unsigned part = 0; part < 4 * groups; part++) {
        uint8x16_t values = vld1q_u8(symbols + 16 * part);
        uint8x16_t found = vdupq_n_u8((uint8_t)((1u << bits) - 1));
        for (unsigned i = 0; i < c->dict_count; i++)
            if (c->window[i] >> 8 == half)
                found = vbslq_u8(vceqq_u8(values, vdupq_n_u8((uint8_t)c->window[i])),
                                 vdupq_n_u8((uint8_t)code_of_entry(c, i)), found);
        vst1q_u8(codes + 16 * part, found);
    }
    neon_planes_of_bytes(codes, groups, bits, planes);
}

static inline void neon_symbols_of_planes(const uint64_t planes[][WORDS], unsigned groups,
                                          unsigned bits, const uint8_t table[CODE_TABLE],
                                          uint8_t *symbols)
{
    const uint8x16x2_t entries = {{vld1q_u8(table), vld1q_u8(table + 16)}};
    for (unsigned g = 0; g < groups; g++)
        for (unsigned part = 0; part < 4; part++)
            vst1q_u8(symbols + 64 * g + 16 * part,
                     vqtbl2q_u8(entries, neon_codes_of_planes(planes, g, part, bits)));
}

/* -- Checksum ------------------------------------------------------------------------------------ */

#define HALF_COLUMNS (ANCF_CHUNK_COLUMNS / 2)

/* Returns the sum of half a chunk; sums[i] holds the sums of words 0, 2 and 1, 3 of column i. */
static inline uint64_t neon_half_chunk(const uint8_t *data, uint64_t first_column)
{
    uint64x2_t sums[HALF_COLUMNS];
    uint64_t total = 0;
    for (unsigned i = 0; i < HALF_COLUMNS; i++)
        sums[i] = vdupq_n_u64(0);
    for (unsigned row = 0; row < 4; row++) {
        const uint64_t *k = checksum_keys + 4 * row;
        const uint32_t keys[4] = {(uint32_t)k[0], (uint32_t)k[1], (uint32_t)k[2], (uint32_t)k[3]};
        const uint32x4_t four = vld1q_u32(keys);
        for (unsigned i = 0; i < HALF_COLUMNS; i++) {
            uint32x4_t words = vreinterpretq_u32_u8(vld1q_u8(data + 512 * row + 16 * i));
            sums[i] = vmlal_u32(sums[i], vget_low_u32(words), vget_low_u32(four));
            sums[i] = vmlal_high_u32(sums[i], words, four);
        }
    }
    for (unsigned i = 0; i < HALF_COLUMNS; i++)
        total += checksum_mix(vgetq_lane_u64(sums[i], 0) + vgetq_lane_u64(sums[i], 1),
                              first_column + i);
    return total;
}

static uint64_t neon_checksum(const uint8_t *data, size_t chunks, uint64_t first_chunk)
{
    uint64_t total = 0;
    for (size_t half = 0; half < 2 * chunks; half++)
        total += neon_half_chunk(data + half / 2 * ANCF_CHUNK_BYTES + 256 * (half % 2),
                                 (2 * first_chunk + half) * HALF_COLUMNS);
    return total;
}

/* Copies chunk by chunk, so that the copy reads from the L1 cache what the checksum just read. */
static uint64_t neon_copy_checksum(uint8_t *dst, const uint8_t *data, size_t chunks,
                                   uint64_t first_chunk)
{
    uint64_t total = 0;
    for (size_t i = 0; i < chunks; i++) {
        total += neon_checksum(data + i * ANCF_CHUNK_BYTES, 1, first_chunk + i);
        memcpy(dst + i * ANCF_CHUNK_BYTES, data + i * ANCF_CHUNK_BYTES, ANCF_CHUNK_BYTES);
    }
    return total;
}

#define TABLE kernels_neon
#define TABLE_NAME "neon"

#define LOOKS_UP_BYTES
#define planes_of_bytes neon_planes_of_bytes
#define bytes_of_planes neon_bytes_of_planes
#define planes_of_symbols neon_planes_of_symbols
#define symbols_of_planes neon_symbols_of_planes
#define put_bytes portable_put_bytes
#define take_bytes portable_take_bytes
#define mover struct portable_mover
#define make_mover portable_make_mover
#define extract_bits portable_extract_bits
#define deposit_bits portable_deposit_bits
#define kernel_checksum neon_checksum
#define kernel_copy_checksum neon_copy_checksum
#define compress_u8 portable_compress_u8
#define compress_u16 portable_compress_u16
#define compress_u32 portable_compress_u32
#define compress_u64 portable_compress_u64
#define expand_u8 portable_expand_u8
#define expand_u16 portable_expand_u16
#define expand_u32 portable_expand_u32
#define expand_u64 portable_expand_u64
#define expand_signed_u8 portable_expand_signed_u8
#define expand_signed_u16 portable_expand_signed_u16
#define expand_signed_u32 portable_expand_signed_u32
#define expand_signed_u64 portable_expand_signed_u64

#include "../tile_template.h"
