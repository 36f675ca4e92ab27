/* The primitives that all AVX-512 variants share: they process 64 bytes of a plane, 512 values. */
#include <immintrin.h>

#include "../primitives_portable.h"

#define VECTOR_BYTES 64
#define BATCH 4

typedef __m512i bits;

typedef struct {
    __m512i product, negative; /* 64-bit counts */
} counts;

typedef struct {
    __m512 low, high;
} floats;

static inline bits load_bits(const uint8_t *bytes) { return _mm512_loadu_si512(bytes); }

static inline bits load_part(const uint8_t *bytes, uint64_t count)
{
    return _mm512_maskz_loadu_epi8((UINT64_C(1) << count) - 1, bytes);
}

/* Truth tables of three operands a, b, c: bit 4 a + 2 b + c of the number is the result. */
#define TABLE_OR_AND_NOT 0xf2 /* a | (c & ~b) */
#define TABLE_NOT_A_OR_B 0x4e /* c ? ~a : b */

static inline bits bits_wrong(bits wrong, bits bit0, bits bit1)
{
    return _mm512_ternarylogic_epi64(wrong, bit0, bit1, TABLE_OR_AND_NOT);
}

static inline int any_bits(bits some) { return _mm512_test_epi64_mask(some, some) != 0; }

/* Shifts move bits over from the neighbouring byte; the mask drops them. */
static inline void split_codes(bits bit0, bits bit1, bits *even, bits *odd)
{
    const bits low = _mm512_set1_epi8(0x55);
    bits plus = _mm512_xor_si512(bit0, bit1);
    *even = _mm512_ternarylogic_epi64(bit0, _mm512_slli_epi64(plus, 1), low, TABLE_NOT_A_OR_B);
    *odd = _mm512_ternarylogic_epi64(_mm512_srli_epi64(bit0, 1), plus, low, TABLE_NOT_A_OR_B);
}

static inline int64_t total_of_lanes(__m512i lanes) { return _mm512_reduce_add_epi32(lanes); }

static inline counts zero_counts(void)
{
    return (counts){_mm512_setzero_si512(), _mm512_setzero_si512()};
}

static inline __m512i count_bits(bits some);

static inline void count_products(counts *found, bits a0, bits a1, bits b0, bits b1)
{
    bits product = _mm512_and_si512(a0, b0);
    bits negative = _mm512_and_si512(product, _mm512_xor_si512(a1, b1));
    found->product = _mm512_add_epi64(found->product, count_bits(product));
    found->negative = _mm512_add_epi64(found->negative, count_bits(negative));
}

static inline int64_t total_of_counts(const counts *found)
{
    return _mm512_reduce_add_epi64(
        _mm512_sub_epi64(found->product, _mm512_slli_epi64(found->negative, 1)));
}

static inline floats zero_floats(void)
{
    return (floats){_mm512_setzero_ps(), _mm512_setzero_ps()};
}

static inline void add_signed(floats *all, uint32_t word0, uint32_t word1, const float *x)
{
    const __m512 minus = _mm512_set1_ps(-0.0f);
    __m512 low = _mm512_loadu_ps(x), high = _mm512_loadu_ps(x + 16);
    low = _mm512_mask_xor_ps(low, (__mmask16)word1, low, minus);
    high = _mm512_mask_xor_ps(high, (__mmask16)(word1 >> 16), high, minus);
    all->low = _mm512_mask_add_ps(all->low, (__mmask16)word0, all->low, low);
    all->high = _mm512_mask_add_ps(all->high, (__mmask16)(word0 >> 16), all->high, high);
}

static inline float total_of_floats(floats *all)
{
    float lane[32];
    _mm512_storeu_ps(lane, all->low);
    _mm512_storeu_ps(lane + 16, all->high);
    return tree_total(lane);
}

static inline uint64_t avx512_signs_of_i8(const int8_t *values, uint64_t *word0, uint64_t *word1)
{
    __m512i value = _mm512_loadu_si512(values);
    *word0 = _mm512_test_epi8_mask(value, value);
    *word1 = _mm512_movepi8_mask(value);
    return _mm512_cmpgt_epu8_mask(_mm512_abs_epi8(value), _mm512_set1_epi8(1));
}

static inline uint64_t avx512_signs_of_f32(const float *values, float threshold, uint64_t *word0,
                                           uint64_t *word1)
{
    const int exact = threshold < 0.0f;
    const __m512 limit = _mm512_set1_ps(exact ? 0.0f : threshold), one = _mm512_set1_ps(1.0f);
    uint64_t found0 = 0, found1 = 0, refused = 0;
    for (unsigned i = 0; i < 4; i++) {
        __m512 value = _mm512_loadu_ps(values + 16 * i), size = _mm512_abs_ps(value);
        __mmask16 set = _mm512_cmp_ps_mask(size, limit, _CMP_GT_OQ);
        __mmask16 bad = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
        if (exact)
            bad |= _mm512_mask_cmp_ps_mask(set, size, one, _CMP_NEQ_UQ);
        found0 |= (uint64_t)set << 16 * i;
        found1 |= (uint64_t)(set & _mm512_movepi32_mask(_mm512_castps_si512(value))) << 16 * i;
        refused |= (uint64_t)bad << 16 * i;
    }
    *word0 = found0;
    *word1 = found1;
    return refused;
}

static inline void avx512_values_i8(uint64_t word0, uint64_t word1, int8_t *values)
{
    __m512i value = _mm512_maskz_set1_epi8(word0, 1);
    _mm512_storeu_si512(values, _mm512_or_si512(value, _mm512_movm_epi8(word1)));
}

static inline void avx512_values_f32(uint64_t word0, uint64_t word1, float *values)
{
    const __m512 one = _mm512_set1_ps(1.0f), minus = _mm512_set1_ps(-1.0f);
    for (unsigned i = 0; i < 4; i++) {
        __m512 value = _mm512_maskz_mov_ps((__mmask16)(word0 >> 16 * i), one);
        value = _mm512_mask_mov_ps(value, (__mmask16)(word1 >> 16 * i), minus);
        _mm512_storeu_ps(values + 16 * i, value);
    }
}

static inline uint64_t avx512_bytes_from(const uint8_t *bytes, uint8_t least)
{
    return _mm512_cmpge_epu8_mask(_mm512_loadu_si512(bytes), _mm512_set1_epi8((char)least));
}

#define signs_of_i8 avx512_signs_of_i8
#define signs_of_f32 avx512_signs_of_f32
#define values_i8 avx512_values_i8
#define values_f32 avx512_values_f32
#define bytes_from avx512_bytes_from
