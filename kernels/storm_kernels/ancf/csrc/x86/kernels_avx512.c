/* The tile coder with AVX-512 (BW, DQ, VL, VBMI, VBMI2): 64 bytes at a time, bit planes as mask
 * registers.
 *
 * Compaction compresses in registers and stores whole vectors: compressing stores are many times
 * slower on some processors. */
#include <immintrin.h>

#include "../primitives_portable.h"

/* From this size on, copies bypass the caches: they are not read again soon. */
#define STREAM_BYTES (4u << 20)

/* Returns the bytes 0, 2, 4 to 126. */
static inline __m512i avx512_twice_lane(void)
{
    uint8_t lanes[64];
    for (unsigned i = 0; i < 64; i++)
        lanes[i] = (uint8_t)(2 * i);
    return _mm512_loadu_si512(lanes);
}

static inline void avx512_planes_of_bytes(const uint8_t *bytes, unsigned groups, unsigned bits,
                                          uint64_t planes[][WORDS])
{
    for (unsigned g = 0; g < groups; g++) {
        __m512i values = _mm512_loadu_si512(bytes + 64 * g);
        for (unsigned b = 0; b < bits; b++)
            planes[b][g] = _mm512_test_epi8_mask(values, _mm512_set1_epi8((char)(1 << b)));
    }
}

static inline void avx512_bytes_of_planes(const uint64_t planes[][WORDS], unsigned groups,
                                          unsigned bits, uint8_t *bytes)
{
    for (unsigned g = 0; g < groups; g++) {
        __m512i values = _mm512_setzero_si512();
        for (unsigned b = 0; b < bits; b++)
            values = _mm512_mask_add_epi8(values, planes[b][g], values,
                                          _mm512_set1_epi8((char)(1 << b)));
        _mm512_storeu_si512(bytes + 64 * g, values);
    }
}

/* Rotates m elements of 16 bits left by one and splits them into high and low bytes, which are 0
 * from index m on: p low bytes, and as many high bytes rounded up to whole vectors. It needs one
 * pass and no array of rotated elements. */
static inline void avx512_split_rotated(const void *elements, unsigned m, unsigned p, uint8_t *high,
                                        uint8_t *low)
{
    const uint8_t *x = elements;
    const __m512i odd = _mm512_add_epi8(avx512_twice_lane(), _mm512_set1_epi8(1));
    const __m512i even = avx512_twice_lane();
    for (unsigned i = 0; i < p; i += 64) {
        uint64_t there = i < m ? ~UINT64_C(0) >> (m - i < 64 ? 64 - (m - i) : 0) : 0;
        uint64_t wanted = ~UINT64_C(0) >> (p - i < 64 ? 64 - (p - i) : 0);
        __m512i first = _mm512_maskz_loadu_epi16((__mmask32)there, x + 2 * (size_t)i);
        __m512i second = _mm512_maskz_loadu_epi16((__mmask32)(there >> 32), x + 2 * (size_t)i + 64);
        first = _mm512_shldi_epi16(first, first, 1);
        second = _mm512_shldi_epi16(second, second, 1);
        _mm512_storeu_si512(high + i, _mm512_permutex2var_epi8(first, odd, second));
        _mm512_mask_storeu_epi8(low + i, wanted, _mm512_permutex2var_epi8(first, even, second));
    }
}

/* Looks up in a table of 256 bytes by two lookups in 128 bytes; the symbol's top bit selects. */
static inline void avx512_planes_of_symbols(const struct coder *c, unsigned half,
                                            const uint8_t *symbols, unsigned groups,
                                            uint64_t planes[][WORDS])
{
    const uint8_t *table = c->code_of_symbol + 256 * half;
    const __m512i t0 = _mm512_loadu_si512(table), t1 = _mm512_loadu_si512(table + 64);
    const __m512i t2 = _mm512_loadu_si512(table + 128), t3 = _mm512_loadu_si512(table + 192);
    const unsigned bits = code_bits(c);
    for (unsigned g = 0; g < groups; g++) {
        __m512i values = _mm512_loadu_si512(symbols + 64 * g);
        __m512i codes = _mm512_mask_blend_epi8(_mm512_movepi8_mask(values),
                                               _mm512_permutex2var_epi8(t0, values, t1),
                                               _mm512_permutex2var_epi8(t2, values, t3));
        for (unsigned b = 0; b < bits; b++)
            planes[b][g] = _mm512_test_epi8_mask(codes, _mm512_set1_epi8((char)(1 << b)));
    }
}

static inline void avx512_symbols_of_planes(const uint64_t planes[][WORDS], unsigned groups,
                                            unsigned bits, const uint8_t table[CODE_TABLE],
                                            uint8_t *symbols)
{
    const __m512i entries =
        _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)table));
    for (unsigned g = 0; g < groups; g++) {
        __m512i codes = _mm512_setzero_si512();
        for (unsigned b = 0; b < bits; b++)
            codes = _mm512_mask_add_epi8(codes, planes[b][g], codes,
                                         _mm512_set1_epi8((char)(1 << b)));
        _mm512_storeu_si512(symbols + 64 * g, _mm512_permutexvar_epi8(codes, entries));
    }
}

static inline uint8_t *avx512_put_bytes(const uint8_t *bytes, const uint64_t *mask,
                                        unsigned groups, uint8_t *dst)
{
    for (unsigned g = 0; g < groups; g++) {
        __m512i values = _mm512_loadu_si512(bytes + 64 * g);
        _mm512_storeu_si512(dst, _mm512_maskz_compress_epi8(mask[g], values));
        dst += _mm_popcnt_u64(mask[g]);
    }
    return dst;
}

static inline void avx512_take_bytes(const uint8_t *from, const uint64_t *mask, unsigned groups,
                                     uint8_t *bytes)
{
    for (unsigned g = 0; g < groups; g++) {
        __m512i values = _mm512_loadu_si512(bytes + 64 * g);
        _mm512_storeu_si512(bytes + 64 * g, _mm512_mask_expand_epi8(values, mask[g],
                                                                    _mm512_loadu_si512(from)));
        from += _mm_popcnt_u64(mask[g]);
    }
}

/* Extraction and deposition are one instruction each, so the mover is only the mask. */
typedef uint64_t avx512_mover;

static inline avx512_mover avx512_make_mover(uint64_t mask) { return mask; }

static inline uint64_t avx512_extract_bits(uint64_t x, const avx512_mover *mask)
{
    return _pext_u64(x, *mask);
}

static inline uint64_t avx512_deposit_bits(uint64_t x, const avx512_mover *mask)
{
    return _pdep_u64(x, *mask);
}

/* -- Compaction ---------------------------------------------------------------------------------- */

/* Returns `lanes` bits of mask from element `first` on; lanes divides 64. */
static inline uint64_t avx512_bits(const uint64_t *mask, unsigned first, unsigned lanes)
{
    return mask[first / 64] >> (first % 64) & (~UINT64_C(0) >> (64 - lanes));
}

/* Returns the mask of the lanes from element `first` on that are below `count`. */
static inline uint64_t avx512_lanes(unsigned first, unsigned count, unsigned lanes)
{
    unsigned left = count - first;
    return ~UINT64_C(0) >> (64 - (left < lanes ? left : lanes));
}

#define DEFINE_COMPACTION(BITS, SET)                                                              \
    static inline unsigned avx512_compress_u##BITS(const void *x, const uint64_t *mask,           \
                                                   unsigned count, uint##BITS##_t *out)           \
    {                                                                                             \
        const unsigned lanes = 512 / BITS;                                                        \
        const uint8_t *from = x;                                                                  \
        unsigned kept = 0;                                                                        \
        for (unsigned i = 0; i < count; i += lanes) {                                             \
            uint64_t bits = avx512_bits(mask, i, lanes), live = avx512_lanes(i, count, lanes);    \
            __m512i values = _mm512_maskz_loadu_epi##BITS((__mmask##SET)live,                     \
                                                          from + BITS / 8 * (size_t)i);           \
            _mm512_storeu_si512(out + kept,                                                       \
                                _mm512_maskz_compress_epi##BITS((__mmask##SET)bits, values));     \
            kept += (unsigned)_mm_popcnt_u64(bits);                                               \
        }                                                                                         \
        return kept;                                                                              \
    }                                                                                             \
                                                                                                  \
    /* `signs` is a plane of signs to set, or NULL. */                                            \
    static INLINE void avx512_expand_all_u##BITS(const uint##BITS##_t *kept,                      \
                                                 const uint64_t *mask, const uint64_t *signs,     \
                                                 unsigned count, uint##BITS##_t fill, void *out)  \
    {                                                                                             \
        const unsigned lanes = 512 / BITS;                                                        \
        const __m512i fills = avx512_fill_u##BITS(fill);                                          \
        const __m512i sign = avx512_fill_u##BITS((uint##BITS##_t)(UINT64_C(1) << (BITS - 1)));    \
        uint8_t *to = out;                                                                        \
        for (unsigned i = 0; i < count; i += lanes) {                                             \
            uint64_t bits = avx512_bits(mask, i, lanes), live = avx512_lanes(i, count, lanes);    \
            __m512i values = _mm512_mask_expand_epi##BITS(fills, (__mmask##SET)bits,              \
                                                          _mm512_loadu_si512(kept));              \
            if (signs != NULL) {                                                                  \
                __mmask##SET negative = (__mmask##SET)avx512_bits(signs, i, lanes);               \
                values = _mm512_or_si512(values, _mm512_maskz_mov_epi##BITS(negative, sign));     \
            }                                                                                     \
            _mm512_mask_storeu_epi##BITS(to + BITS / 8 * (size_t)i, (__mmask##SET)live, values);  \
            kept += _mm_popcnt_u64(bits);                                                         \
        }                                                                                         \
    }                                                                                             \
                                                                                                  \
    static inline void avx512_expand_u##BITS(const uint##BITS##_t *kept, const uint64_t *mask,    \
                                             unsigned count, uint##BITS##_t fill, void *out)      \
    {                                                                                             \
        avx512_expand_all_u##BITS(kept, mask, NULL, count, fill, out);                            \
    }                                                                                             \
                                                                                                  \
    static inline void avx512_expand_signed_u##BITS(const uint##BITS##_t *kept,                   \
                                                    const uint64_t *mask, const uint64_t *signs,  \
                                                    unsigned count, void *out)                    \
    {                                                                                             \
        avx512_expand_all_u##BITS(kept, mask, signs, count, 0, out);                              \
    }

static inline __m512i avx512_fill_u8(uint8_t fill) { return _mm512_set1_epi8((char)fill); }
static inline __m512i avx512_fill_u16(uint16_t fill) { return _mm512_set1_epi16((short)fill); }
static inline __m512i avx512_fill_u32(uint32_t fill) { return _mm512_set1_epi32((int)fill); }
static inline __m512i avx512_fill_u64(uint64_t fill)
{
    return _mm512_set1_epi64((long long)fill);
}

DEFINE_COMPACTION(8, 64)
DEFINE_COMPACTION(16, 32)
DEFINE_COMPACTION(32, 16)
DEFINE_COMPACTION(64, 8)

/* -- Checksum ------------------------------------------------------------------------------------ */

#define UNROLLED _Pragma("GCC unroll 8")

/* Adds one row of a chunk to its columns' sums, in memory order. Vector i holds columns 4i to 4i +
 * 3; its lanes sum words 0, 1 and words 2, 3 of each column. */
static inline __attribute__((always_inline)) void avx512_add_row(const uint8_t *at, uint8_t *copy,
                                                                 int stream, unsigned row,
                                                                 __m512i sums[8])
{
    const uint64_t *k = checksum_keys + 4 * row;
    __m512i even = _mm512_broadcast_i32x4(_mm_set_epi64x((long long)k[2], (long long)k[0]));
    __m512i odd = _mm512_broadcast_i32x4(_mm_set_epi64x((long long)k[3], (long long)k[1]));
    UNROLLED
    for (unsigned i = 0; i < 8; i++) {
        __m512i words = _mm512_loadu_si512(at + 64 * i);
        if (copy != NULL && stream)
            _mm512_stream_si512((__m512i *)(copy + 64 * i), words);
        else if (copy != NULL)
            _mm512_storeu_si512(copy + 64 * i, words);
        __m512i products = _mm512_add_epi64(
            _mm512_mul_epu32(words, even), _mm512_mul_epu32(_mm512_srli_epi64(words, 32), odd));
        sums[i] = row == 0 ? products : _mm512_add_epi64(sums[i], products);
    }
}

static inline __attribute__((always_inline)) uint64_t
avx512_sum(const uint8_t *data, uint8_t *copy, size_t chunks, uint64_t first_chunk, int stream)
{
    /* The columns of the lanes after unpacking two vectors of four: 0, 4, 1, 5, 2, 6, 3, 7. */
    const __m512i order = _mm512_mullo_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7),
                                             _mm512_set1_epi64((long long)ANCF_C1));
    const __m512i mix = _mm512_set1_epi64((long long)ANCF_C2);
    __m512i total = _mm512_setzero_si512();
    for (size_t chunk = 0; chunk < chunks; chunk++) {
        uint64_t column = (first_chunk + chunk) * ANCF_CHUNK_COLUMNS;
        __m512i sums[8];
        UNROLLED
        for (unsigned row = 0; row < 4; row++) {
            size_t at = chunk * ANCF_CHUNK_BYTES + 512 * row;
            avx512_add_row(data + at, copy ? copy + at : NULL, stream, row, sums);
        }
        UNROLLED
        for (unsigned i = 0; i < 8; i += 2) {
            __m512i eight = _mm512_add_epi64(_mm512_unpacklo_epi64(sums[i], sums[i + 1]),
                                             _mm512_unpackhi_epi64(sums[i], sums[i + 1]));
            __m512i first = _mm512_set1_epi64((long long)((column + 4 * i) * ANCF_C1));
            __m512i h = _mm512_xor_si512(eight, _mm512_add_epi64(first, order));
            h = _mm512_xor_si512(h, _mm512_srli_epi64(h, 32));
            h = _mm512_mullo_epi64(h, mix);
            h = _mm512_xor_si512(h, _mm512_srli_epi64(h, 29));
            total = _mm512_add_epi64(total, h);
        }
    }
    uint64_t lanes[8], sum = 0; /* summed here, because the intrinsic adds signed numbers */
    _mm512_storeu_si512(lanes, total);
    for (unsigned i = 0; i < 8; i++)
        sum += lanes[i];
    return sum;
}

static uint64_t avx512_checksum(const uint8_t *data, size_t chunks, uint64_t first_chunk)
{
    return avx512_sum(data, NULL, chunks, first_chunk, 0);
}

static uint64_t avx512_copy_checksum(uint8_t *dst, const uint8_t *data, size_t chunks,
                                     uint64_t first_chunk)
{
    if ((uintptr_t)dst % 64 != 0 || chunks < STREAM_BYTES / ANCF_CHUNK_BYTES)
        return avx512_sum(data, dst, chunks, first_chunk, 0);
    uint64_t sum = avx512_sum(data, dst, chunks, first_chunk, 1);
    _mm_sfence(); /* orders streaming stores before later stores that publish the copy */
    return sum;
}

#define TABLE kernels_avx512
#define TABLE_NAME "avx512"

#define split_rotated avx512_split_rotated
#define LOOKS_UP_BYTES
#define LOOKS_UP_SYMBOLS
#define planes_of_bytes avx512_planes_of_bytes
#define bytes_of_planes avx512_bytes_of_planes
#define planes_of_symbols avx512_planes_of_symbols
#define symbols_of_planes avx512_symbols_of_planes
#define put_bytes avx512_put_bytes
#define take_bytes avx512_take_bytes
#define mover avx512_mover
#define make_mover avx512_make_mover
#define extract_bits avx512_extract_bits
#define deposit_bits avx512_deposit_bits
#define kernel_checksum avx512_checksum
#define kernel_copy_checksum avx512_copy_checksum
#define compress_u8 avx512_compress_u8
#define compress_u16 avx512_compress_u16
#define compress_u32 avx512_compress_u32
#define compress_u64 avx512_compress_u64
#define expand_u8 avx512_expand_u8
#define expand_u16 avx512_expand_u16
#define expand_u32 avx512_expand_u32
#define expand_u64 avx512_expand_u64
#define expand_signed_u8 avx512_expand_signed_u8
#define expand_signed_u16 avx512_expand_signed_u16
#define expand_signed_u32 avx512_expand_signed_u32
#define expand_signed_u64 avx512_expand_signed_u64

#include "../tile_template.h"
