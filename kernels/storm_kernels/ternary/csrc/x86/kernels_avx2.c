/* The kernels with AVX2: 32 bytes of a plane, 256 values, at a time. */
#include <immintrin.h>

#include "../primitives_portable.h"

#define TABLE ternary_avx2
#define TABLE_NAME "avx2"
#define VECTOR_BYTES 32
#define BATCH 2

typedef __m256i bits;
typedef __m256i sums;

typedef struct {
    __m256i product, negative; /* 64-bit counts */
} counts;

typedef struct {
    __m256 part[4];
} floats;

static inline bits load_bits(const uint8_t *bytes)
{
    return _mm256_loadu_si256((const __m256i *)bytes);
}

static inline bits load_part(const uint8_t *bytes, uint64_t count)
{
    uint8_t part[VECTOR_BYTES] = {0};
    memcpy(part, bytes, count);
    return load_bits(part);
}

static inline bits bits_wrong(bits wrong, bits bit0, bits bit1)
{
    return _mm256_or_si256(wrong, _mm256_andnot_si256(bit0, bit1));
}

static inline int any_bits(bits some) { return !_mm256_testz_si256(some, some); }

/* 16-bit shifts move bits over from the neighbouring byte; the masks drop them. */
static inline void split_codes(bits bit0, bits bit1, bits *even, bits *odd)
{
    const bits low = _mm256_set1_epi8(0x55), high = _mm256_set1_epi8((char)0xaa);
    bits plus = _mm256_xor_si256(bit0, bit1);
    *even = _mm256_or_si256(_mm256_andnot_si256(bit0, low),
                            _mm256_and_si256(_mm256_slli_epi16(plus, 1), high));
    *odd = _mm256_or_si256(_mm256_andnot_si256(_mm256_srli_epi16(bit0, 1), low),
                           _mm256_and_si256(plus, high));
}

static inline sums zero_sums(void) { return _mm256_setzero_si256(); }

/* Multiplies one field of both codes by two parts of x, in 16 bits. */
static inline __m256i field_products(bits even, bits odd, uint8_t field, const __m256i *x)
{
    const bits mask = _mm256_set1_epi8((char)field);
    return _mm256_add_epi16(_mm256_maddubs_epi16(_mm256_and_si256(even, mask), x[0]),
                            _mm256_maddubs_epi16(_mm256_and_si256(odd, mask), x[1]));
}

/* Fields are multiplied without a shift in their byte if four products then fit 16 bits: 4 * 32 *
 * 128 do. The last field's 4 * 128 * 128 do not, so it is shifted. */
static inline void add_products(sums *all, bits even, bits odd, const int8_t *x)
{
    const __m256i *part = (const __m256i *)x;
    __m256i first = field_products(even, odd, 0x03, part);
    __m256i second = field_products(even, odd, 0x0c, part + 2);
    __m256i third = field_products(even, odd, 0x30, part + 4);
    __m256i last = field_products(_mm256_srli_epi16(even, 6), _mm256_srli_epi16(odd, 6), 3,
                                  part + 6);
    __m256i narrow = _mm256_add_epi16(
        _mm256_add_epi16(first, last),
        _mm256_add_epi16(_mm256_srai_epi16(second, 2), _mm256_srai_epi16(third, 4)));
    *all = _mm256_add_epi32(*all, _mm256_madd_epi16(narrow, _mm256_set1_epi16(1)));
}

static inline void lanes_of_sums(const sums *all, int32_t *lanes)
{
    _mm256_storeu_si256((__m256i *)lanes, *all);
}

static inline int64_t total_of_sums(const sums *all)
{
    __m128i four =
        _mm_add_epi32(_mm256_castsi256_si128(*all), _mm256_extracti128_si256(*all, 1));
    __m128i two = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
    return _mm_cvtsi128_si32(two) + _mm_extract_epi32(two, 1);
}

static inline counts zero_counts(void)
{
    return (counts){_mm256_setzero_si256(), _mm256_setzero_si256()};
}

/* Counts the set bits of each 64-bit lane, by a table of four-bit numbers. (Mula, Kurz, Lemire:
 * "Faster population counts using AVX2 instructions", 2018.) */
static inline __m256i count_bits(bits some)
{
    const __m256i table = _mm256_setr_epi8(0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4, 0, 1, 1,
                                           2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4);
    const __m256i low = _mm256_set1_epi8(15);
    __m256i lower = _mm256_shuffle_epi8(table, _mm256_and_si256(some, low));
    __m256i upper =
        _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(some, 4), low));
    return _mm256_sad_epu8(_mm256_add_epi8(lower, upper), _mm256_setzero_si256());
}

static inline void count_products(counts *found, bits a0, bits a1, bits b0, bits b1)
{
    bits product = _mm256_and_si256(a0, b0);
    bits negative = _mm256_and_si256(product, _mm256_xor_si256(a1, b1));
    found->product = _mm256_add_epi64(found->product, count_bits(product));
    found->negative = _mm256_add_epi64(found->negative, count_bits(negative));
}

static inline int64_t total_of_counts(const counts *found)
{
    __m256i all = _mm256_sub_epi64(found->product, _mm256_slli_epi64(found->negative, 1));
    __m128i two = _mm_add_epi64(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
    return _mm_cvtsi128_si64(two) + _mm_extract_epi64(two, 1);
}

static inline floats zero_floats(void)
{
    floats all;
    for (unsigned i = 0; i < 4; i++)
        all.part[i] = _mm256_setzero_ps();
    return all;
}

static inline void add_signed(floats *all, uint32_t word0, uint32_t word1, const float *x)
{
    const __m256i weights = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256 minus = _mm256_set1_ps(-0.0f);
    for (unsigned i = 0; i < 4; i++) {
        __m256i set0 = _mm256_and_si256(_mm256_set1_epi32((int)(word0 >> 8 * i)), weights);
        __m256i set1 = _mm256_and_si256(_mm256_set1_epi32((int)(word1 >> 8 * i)), weights);
        __m256 keep = _mm256_castsi256_ps(_mm256_cmpeq_epi32(set0, weights));
        __m256 turn = _mm256_castsi256_ps(_mm256_cmpeq_epi32(set1, weights));
        __m256 value = _mm256_xor_ps(_mm256_loadu_ps(x + 8 * i), _mm256_and_ps(turn, minus));
        all->part[i] = _mm256_add_ps(all->part[i], _mm256_and_ps(value, keep));
    }
}

static inline float total_of_floats(floats *all)
{
    float lane[32];
    for (unsigned i = 0; i < 4; i++)
        _mm256_storeu_ps(lane + 8 * i, all->part[i]);
    return tree_total(lane);
}

static inline uint64_t masks(__m256i low, __m256i high)
{
    return (uint32_t)_mm256_movemask_epi8(low) | (uint64_t)(uint32_t)_mm256_movemask_epi8(high)
                                                     << 32;
}

static inline uint64_t avx2_signs_of_i8(const int8_t *values, uint64_t *word0, uint64_t *word1)
{
    const __m256i zero = _mm256_setzero_si256(), one = _mm256_set1_epi8(1);
    __m256i low = _mm256_loadu_si256((const __m256i *)values);
    __m256i high = _mm256_loadu_si256((const __m256i *)(values + 32));
    *word0 = ~masks(_mm256_cmpeq_epi8(low, zero), _mm256_cmpeq_epi8(high, zero));
    *word1 = masks(low, high);
    /* |-128| is 128 as an unsigned byte, so the maximum is unsigned. */
    __m256i size_low = _mm256_abs_epi8(low), size_high = _mm256_abs_epi8(high);
    return ~masks(_mm256_cmpeq_epi8(_mm256_max_epu8(size_low, one), one),
                  _mm256_cmpeq_epi8(_mm256_max_epu8(size_high, one), one));
}

static inline uint64_t avx2_signs_of_f32(const float *values, float threshold, uint64_t *word0,
                                         uint64_t *word1)
{
    const int exact = threshold < 0.0f;
    const __m256 limit = _mm256_set1_ps(exact ? 0.0f : threshold), minus = _mm256_set1_ps(-0.0f);
    const __m256 one = _mm256_set1_ps(1.0f);
    uint64_t found0 = 0, found1 = 0, refused = 0;
    for (unsigned i = 0; i < 8; i++) {
        __m256 value = _mm256_loadu_ps(values + 8 * i), size = _mm256_andnot_ps(minus, value);
        __m256 set = _mm256_cmp_ps(size, limit, _CMP_GT_OQ);
        __m256 bad = _mm256_cmp_ps(value, value, _CMP_UNORD_Q);
        if (exact)
            bad = _mm256_or_ps(bad, _mm256_and_ps(set, _mm256_cmp_ps(size, one, _CMP_NEQ_UQ)));
        found0 |= (uint64_t)(unsigned)_mm256_movemask_ps(set) << 8 * i;
        found1 |= (uint64_t)(unsigned)_mm256_movemask_ps(_mm256_and_ps(set, value)) << 8 * i;
        refused |= (uint64_t)(unsigned)_mm256_movemask_ps(bad) << 8 * i;
    }
    *word0 = found0;
    *word1 = found1;
    return refused;
}

/* Sets all bits of byte i to bit i of the word. */
static inline __m256i spread(uint32_t word)
{
    const __m256i owner = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2,
                                           2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
    const __m256i weights = _mm256_set1_epi64x((long long)0x8040201008040201);
    __m256i bytes = _mm256_shuffle_epi8(_mm256_set1_epi32((int)word), owner);
    return _mm256_cmpeq_epi8(_mm256_and_si256(bytes, weights), weights);
}

static inline void avx2_values_i8(uint64_t word0, uint64_t word1, int8_t *values)
{
    const __m256i one = _mm256_set1_epi8(1);
    for (unsigned i = 0; i < 2; i++) {
        __m256i value = _mm256_and_si256(spread((uint32_t)(word0 >> 32 * i)), one);
        value = _mm256_or_si256(value, spread((uint32_t)(word1 >> 32 * i)));
        _mm256_storeu_si256((__m256i *)(values + 32 * i), value);
    }
}

static inline void avx2_values_f32(uint64_t word0, uint64_t word1, float *values)
{
    int8_t narrow[64];
    avx2_values_i8(word0, word1, narrow);
    for (unsigned i = 0; i < 64; i += 8) {
        __m128i eight = _mm_loadl_epi64((const __m128i *)(narrow + i));
        _mm256_storeu_ps(values + i, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight)));
    }
}

static inline uint64_t avx2_bytes_from(const uint8_t *bytes, uint8_t least)
{
    const __m256i limit = _mm256_set1_epi8((char)least);
    __m256i low = _mm256_loadu_si256((const __m256i *)bytes);
    __m256i high = _mm256_loadu_si256((const __m256i *)(bytes + 32));
    return masks(_mm256_cmpeq_epi8(_mm256_max_epu8(low, limit), low),
                 _mm256_cmpeq_epi8(_mm256_max_epu8(high, limit), high));
}

#define signs_of_i8 avx2_signs_of_i8
#define signs_of_f32 avx2_signs_of_f32
#define values_i8 avx2_values_i8
#define values_f32 avx2_values_f32
#define bytes_from avx2_bytes_from

#include "../template.h"
