/* The tile coder with AVX2 and BMI2: 32 bytes at a time, streams of bits by pext and pdep. */
#include <immintrin.h>

#include "../primitives_portable.h"

/* From this size on, copies bypass the caches: they are not read again soon. */
#define STREAM_BYTES (4u << 20)


static inline void avx2_planes_of_bytes(const uint8_t *bytes, unsigned groups, unsigned bits,
                                        uint64_t planes[][WORDS])
{
    for (unsigned g = 0; g < groups; g++) {
        __m256i low = _mm256_loadu_si256((const __m256i *)(bytes + 64 * g));
        __m256i high = _mm256_loadu_si256((const __m256i *)(bytes + 64 * g + 32));
        for (unsigned b = 0; b < bits; b++) { /* bit b of each byte to its top, for movemask */
            __m128i up = _mm_cvtsi32_si128(7 - (int)b);
            uint32_t first = (uint32_t)_mm256_movemask_epi8(_mm256_sll_epi16(low, up));
            uint32_t second = (uint32_t)_mm256_movemask_epi8(_mm256_sll_epi16(high, up));
            planes[b][g] = first | (uint64_t)second << 32;
        }
    }
}

/* Returns 32 bytes; byte i is all ones if bit i of the word is set, else 0. */
static inline __m256i avx2_mask_of_bits(uint32_t word)
{
    const __m256i owner = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202,
                                             0x0303030303030303);
    const __m256i bit = _mm256_set1_epi64x((long long)0x8040201008040201);
    __m256i copies = _mm256_shuffle_epi8(_mm256_set1_epi32((int)word), owner);
    return _mm256_cmpeq_epi8(_mm256_and_si256(copies, bit), bit);
}

static inline __m256i avx2_codes_of_planes(const uint64_t planes[][WORDS], unsigned half,
                                           unsigned bits)
{
    __m256i codes = _mm256_setzero_si256();
    for (unsigned b = 0; b < bits; b++) {
        uint32_t word = (uint32_t)(planes[b][half / 2] >> (32 * (half % 2)));
        __m256i value = _mm256_set1_epi8((char)(1 << b));
        codes = _mm256_or_si256(codes, _mm256_and_si256(avx2_mask_of_bits(word), value));
    }
    return codes;
}

static inline void avx2_bytes_of_planes(const uint64_t planes[][WORDS], unsigned groups,
                                        unsigned bits, uint8_t *bytes)
{
    for (unsigned half = 0; half < 2 * groups; half++)
        _mm256_storeu_si256((__m256i *)(bytes + 32 * half),
                            avx2_codes_of_planes(planes, half, bits));
}

/* Up to 10 entries are compared one by one; a table is faster for more. */
#define COMPARED_ENTRIES 10

static inline void avx2_planes_of_symbols(const struct coder *c, unsigned half,
                                          const uint8_t *symbols, unsigned groups,
                                          uint64_t planes[][WORDS])
{
    uint8_t codes[ANCF_TILE];
    __m256i entry[COMPARED_ENTRIES], code[COMPARED_ENTRIES];
    const unsigned bits = code_bits(c);
    unsigned entries = 0;
    if (c->dict_count > COMPARED_ENTRIES) {
        for (unsigned i = 0; i < 64 * groups; i++)
            codes[i] = c->code_of_symbol[256 * half + symbols[i]];
        avx2_planes_of_bytes(codes, groups, bits, planes);
        return;
    }
    for (unsigned i = 0; i < c->dict_count; i++) {
        entry[entries] = _mm256_set1_epi8((char)c->window[i]);
        code[entries] = _mm256_set1_epi8((char)code_of_entry(c, i));
        entries += c->window[i] >> 8 == half;
    }
    for (unsigned part = 0; part < 2 * groups; part++) {
        __m256i values = _mm256_loadu_si256((const __m256i *)(symbols + 32 * part));
        __m256i found = _mm256_set1_epi8((char)((1 << bits) - 1));
        for (unsigned i = 0; i < entries; i++)
            found = _mm256_blendv_epi8(found, code[i], _mm256_cmpeq_epi8(values, entry[i]));
        _mm256_storeu_si256((__m256i *)(codes + 32 * part), found);
    }
    avx2_planes_of_bytes(codes, groups, bits, planes);
}

/* pshufb looks up by four bits of a code below 32; the fifth bit selects one of two tables. */
static inline void avx2_symbols_of_planes(const uint64_t planes[][WORDS], unsigned groups,
                                          unsigned bits, const uint8_t table[CODE_TABLE],
                                          uint8_t *symbols)
{
    __m256i first = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table));
    __m256i second = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(table + 16)));
    for (unsigned half = 0; half < 2 * groups; half++) {
        __m256i codes = avx2_codes_of_planes(planes, half, bits);
        __m256i fifth_bit_on_top = _mm256_slli_epi16(codes, 3);
        __m256i found = _mm256_blendv_epi8(_mm256_shuffle_epi8(first, codes),
                                           _mm256_shuffle_epi8(second, codes), fifth_bit_on_top);
        _mm256_storeu_si256((__m256i *)(symbols + 32 * half), found);
    }
}

/* Extraction and deposition are one instruction each, so the mover is only the mask. */
typedef uint64_t avx2_mover;

static inline avx2_mover avx2_make_mover(uint64_t mask) { return mask; }

static inline uint64_t avx2_extract_bits(uint64_t x, const avx2_mover *mask)
{
    return _pext_u64(x, *mask);
}

static inline uint64_t avx2_deposit_bits(uint64_t x, const avx2_mover *mask)
{
    return _pdep_u64(x, *mask);
}

/* -- Compaction of eight elements at a time ------------------------------------------------------ */

#define EIGHT_INDICES UINT64_C(0x0706050403020100)

/* Expands each of the 8 bits to a byte of 0 or 0xFF. */
static inline uint64_t avx2_bytes_of_bits(uint64_t bits)
{
    return _pdep_u64(bits, EACH_BYTE) * 0xFF;
}

static inline uint64_t avx2_eight_bits(const uint64_t *mask, unsigned first)
{
    return mask[first / 64] >> (first % 64) & 0xFF;
}

/* Returns the pshufb control that moves 16-bit elements by `indices` (one byte each). */
static inline __m128i avx2_control_u16(uint64_t indices)
{
    __m128i element = _mm_cvtepu8_epi16(_mm_cvtsi64_si128((long long)indices));
    __m128i low_byte = _mm_slli_epi16(element, 1);
    return _mm_add_epi16(_mm_or_si128(low_byte, _mm_slli_epi16(low_byte, 8)),
                         _mm_set1_epi16(0x0100));
}

static inline unsigned avx2_compress_u16(const void *x, const uint64_t *mask, unsigned count,
                                         uint16_t *out)
{
    const uint8_t *from = x;
    unsigned kept = 0, i = 0;
    for (; i + 8 <= count; i += 8) {
        uint64_t bits = avx2_eight_bits(mask, i);
        uint64_t indices = _pext_u64(EIGHT_INDICES, avx2_bytes_of_bits(bits));
        __m128i eight = _mm_loadu_si128((const __m128i *)(from + 2 * i));
        _mm_storeu_si128((__m128i *)(out + kept),
                         _mm_shuffle_epi8(eight, avx2_control_u16(indices)));
        kept += (unsigned)_mm_popcnt_u64(bits);
    }
    for (; i < count; i++) {
        memcpy(out + kept, from + 2 * i, 2);
        kept += mask[i / 64] >> (i % 64) & 1;
    }
    return kept;
}

static inline unsigned avx2_compress_u32(const void *x, const uint64_t *mask, unsigned count,
                                         uint32_t *out)
{
    const uint8_t *from = x;
    unsigned kept = 0, i = 0;
    for (; i + 8 <= count; i += 8) {
        uint64_t bits = avx2_eight_bits(mask, i);
        uint64_t indices = _pext_u64(EIGHT_INDICES, avx2_bytes_of_bits(bits));
        __m256i eight = _mm256_loadu_si256((const __m256i *)(from + 4 * i));
        __m256i order = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)indices));
        _mm256_storeu_si256((__m256i *)(out + kept), _mm256_permutevar8x32_epi32(eight, order));
        kept += (unsigned)_mm_popcnt_u64(bits);
    }
    for (; i < count; i++) {
        memcpy(out + kept, from + 4 * i, 4);
        kept += mask[i / 64] >> (i % 64) & 1;
    }
    return kept;
}

static inline void avx2_expand_u16(const uint16_t *kept, const uint64_t *mask, unsigned count,
                                   uint16_t fill, void *out)
{
    const __m128i fills = _mm_set1_epi16((short)fill);
    uint8_t *to = out;
    unsigned i = 0;
    for (; i + 8 <= count; i += 8) {
        uint64_t bits = avx2_eight_bits(mask, i), bytes = avx2_bytes_of_bits(bits);
        __m128i control = avx2_control_u16(_pdep_u64(EIGHT_INDICES, bytes));
        __m128i placed = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)kept), control);
        __m128i chosen = _mm_cvtepi8_epi16(_mm_cvtsi64_si128((long long)bytes));
        _mm_storeu_si128((__m128i *)(to + 2 * i), _mm_blendv_epi8(fills, placed, chosen));
        kept += _mm_popcnt_u64(bits);
    }
    for (; i < count; i++) {
        unsigned bit = mask[i / 64] >> (i % 64) & 1;
        memcpy(to + 2 * i, bit ? kept : &fill, 2);
        kept += bit;
    }
}

static inline void avx2_expand_u32(const uint32_t *kept, const uint64_t *mask, unsigned count,
                                   uint32_t fill, void *out)
{
    const __m256i fills = _mm256_set1_epi32((int)fill);
    uint8_t *to = out;
    unsigned i = 0;
    for (; i + 8 <= count; i += 8) {
        uint64_t bits = avx2_eight_bits(mask, i), bytes = avx2_bytes_of_bits(bits);
        uint64_t indices = _pdep_u64(EIGHT_INDICES, bytes);
        __m256i order = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)indices));
        __m256i eight = _mm256_loadu_si256((const __m256i *)kept);
        __m256i placed = _mm256_permutevar8x32_epi32(eight, order);
        __m256i chosen = _mm256_cvtepi8_epi32(_mm_cvtsi64_si128((long long)bytes));
        _mm256_storeu_si256((__m256i *)(to + 4 * i), _mm256_blendv_epi8(fills, placed, chosen));
        kept += _mm_popcnt_u64(bits);
    }
    for (; i < count; i++) {
        unsigned bit = mask[i / 64] >> (i % 64) & 1;
        memcpy(to + 4 * i, bit ? kept : &fill, 4);
        kept += bit;
    }
}

/* -- Checksum ------------------------------------------------------------------------------------ */

/* Returns the low 64 bits of the products, from three 32-bit products each. */
static inline __m256i avx2_multiply(__m256i a, uint64_t constant)
{
    __m256i b = _mm256_set1_epi64x((long long)constant);
    __m256i crossed = _mm256_add_epi64(_mm256_mul_epu32(_mm256_srli_epi64(a, 32), b),
                                       _mm256_mul_epu32(a, _mm256_srli_epi64(b, 32)));
    return _mm256_add_epi64(_mm256_mul_epu32(a, b), _mm256_slli_epi64(crossed, 32));
}

#define UNROLLED _Pragma("GCC unroll 8")

/* Adds half a row of a chunk to its columns' sums, in memory order. Vector i holds columns 2i and
 * 2i + 1 of the half; its lanes sum words 0, 1 and words 2, 3 of each column. */
static inline __attribute__((always_inline)) void avx2_add_row(const uint8_t *at, uint8_t *copy,
                                                               int stream, unsigned row,
                                                               __m256i sums[8])
{
    const long long *k = (const long long *)checksum_keys + 4 * row;
    __m256i even = _mm256_setr_epi64x(k[0], k[2], k[0], k[2]);
    __m256i odd = _mm256_setr_epi64x(k[1], k[3], k[1], k[3]);
    UNROLLED
    for (unsigned i = 0; i < 8; i++) {
        __m256i words = _mm256_loadu_si256((const __m256i *)(at + 32 * i));
        if (copy != NULL && stream)
            _mm256_stream_si256((__m256i *)(copy + 32 * i), words);
        else if (copy != NULL)
            _mm256_storeu_si256((__m256i *)(copy + 32 * i), words);
        __m256i products = _mm256_add_epi64(
            _mm256_mul_epu32(words, even), _mm256_mul_epu32(_mm256_srli_epi64(words, 32), odd));
        sums[i] = row == 0 ? products : _mm256_add_epi64(sums[i], products);
    }
}

static inline __attribute__((always_inline)) uint64_t
avx2_sum(const uint8_t *data, uint8_t *copy, size_t chunks, uint64_t first_chunk, int stream)
{
    /* The columns of the lanes after unpacking: 0, 2, 1, 3 of four. */
    const __m256i order = _mm256_setr_epi64x(0, (long long)(2 * ANCF_C1), (long long)ANCF_C1,
                                             (long long)(3 * ANCF_C1));
    __m256i total = _mm256_setzero_si256();
    for (size_t half = 0; half < 2 * chunks; half++) {
        uint64_t column = (2 * first_chunk + half) * (ANCF_CHUNK_COLUMNS / 2);
        __m256i sums[8];
        UNROLLED
        for (unsigned row = 0; row < 4; row++) {
            size_t at = half / 2 * ANCF_CHUNK_BYTES + 512 * row + 256 * (half % 2);
            avx2_add_row(data + at, copy ? copy + at : NULL, stream, row, sums);
        }
        UNROLLED
        for (unsigned i = 0; i < 8; i += 2) {
            __m256i four = _mm256_add_epi64(_mm256_unpacklo_epi64(sums[i], sums[i + 1]),
                                            _mm256_unpackhi_epi64(sums[i], sums[i + 1]));
            __m256i first = _mm256_set1_epi64x((long long)((column + 2 * i) * ANCF_C1));
            __m256i h = _mm256_xor_si256(four, _mm256_add_epi64(first, order));
            h = _mm256_xor_si256(h, _mm256_srli_epi64(h, 32));
            h = avx2_multiply(h, ANCF_C2);
            h = _mm256_xor_si256(h, _mm256_srli_epi64(h, 29));
            total = _mm256_add_epi64(total, h);
        }
    }
    uint64_t lanes[4];
    _mm256_storeu_si256((__m256i *)lanes, total);
    return lanes[0] + lanes[1] + lanes[2] + lanes[3];
}

static uint64_t avx2_checksum(const uint8_t *data, size_t chunks, uint64_t first_chunk)
{
    return avx2_sum(data, NULL, chunks, first_chunk, 0);
}

static uint64_t avx2_copy_checksum(uint8_t *dst, const uint8_t *data, size_t chunks,
                                   uint64_t first_chunk)
{
    if ((uintptr_t)dst % 32 != 0 || chunks < STREAM_BYTES / ANCF_CHUNK_BYTES)
        return avx2_sum(data, dst, chunks, first_chunk, 0);
    uint64_t sum = avx2_sum(data, dst, chunks, first_chunk, 1);
    _mm_sfence(); /* orders streaming stores before later stores that publish the copy */
    return sum;
}

#define TABLE kernels_avx2
#define TABLE_NAME "avx2"

#define LOOKS_UP_BYTES
#define LOOKS_UP_SYMBOLS
#define planes_of_bytes avx2_planes_of_bytes
#define bytes_of_planes avx2_bytes_of_planes
#define planes_of_symbols avx2_planes_of_symbols
#define symbols_of_planes avx2_symbols_of_planes
#define put_bytes portable_put_bytes
#define take_bytes portable_take_bytes
#define mover avx2_mover
#define make_mover avx2_make_mover
#define extract_bits avx2_extract_bits
#define deposit_bits avx2_deposit_bits
#define kernel_checksum avx2_checksum
#define kernel_copy_checksum avx2_copy_checksum
#define compress_u8 portable_compress_u8
#define compress_u16 avx2_compress_u16
#define compress_u32 avx2_compress_u32
#define compress_u64 portable_compress_u64
#define expand_u8 portable_expand_u8
#define expand_u16 avx2_expand_u16
#define expand_u32 avx2_expand_u32
#define expand_u64 portable_expand_u64
#define expand_signed_u8 portable_expand_signed_u8
#define expand_signed_u16 portable_expand_signed_u16
#define expand_signed_u32 portable_expand_signed_u32
#define expand_signed_u64 portable_expand_signed_u64

#include "../tile_template.h"
