/* The kernels with AVX-512 without its dot product and population count. */
#include "avx512.h"

#define TABLE ternary_avx512
#define TABLE_NAME "avx512"

typedef __m512i sums;

static inline sums zero_sums(void) { return _mm512_setzero_si512(); }

/* Eight sums of two products of 2 * 128 are far below the limit of 16 bits. */
static inline void add_products(sums *all, bits even, bits odd, const int8_t *x)
{
    const bits field = _mm512_set1_epi8(3);
    __m512i narrow =
        _mm512_maddubs_epi16(_mm512_and_si512(even, field), _mm512_loadu_si512(x));
#define ADD(codes, shift, at)                                                                       \
    narrow = _mm512_add_epi16(                                                                      \
        narrow,                                                                                     \
        _mm512_maddubs_epi16(_mm512_and_si512(_mm512_srli_epi16(codes, shift), field),              \
                             _mm512_loadu_si512(x + VECTOR_BYTES * (at))))
    ADD(odd, 0, 1);
    ADD(even, 2, 2);
    ADD(odd, 2, 3);
    ADD(even, 4, 4);
    ADD(odd, 4, 5);
    ADD(even, 6, 6);
    ADD(odd, 6, 7);
#undef ADD
    *all = _mm512_add_epi32(*all, _mm512_madd_epi16(narrow, _mm512_set1_epi16(1)));
}

static inline void lanes_of_sums(const sums *all, int32_t *lanes)
{
    _mm512_storeu_si512(lanes, *all);
}

static inline int64_t total_of_sums(const sums *all) { return total_of_lanes(*all); }

/* Counts the set bits of each 64-bit lane, by a table of four-bit numbers, as in kernels_avx2.c. */
static inline __m512i count_bits(bits some)
{
    const __m512i low = _mm512_set1_epi8(15);
    const __m512i table = _mm512_broadcast_i32x4(
        _mm_setr_epi8(0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4));
    __m512i lower = _mm512_shuffle_epi8(table, _mm512_and_si512(some, low));
    __m512i upper =
        _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(some, 4), low));
    return _mm512_sad_epu8(_mm512_add_epi8(lower, upper), _mm512_setzero_si512());
}

#include "../template.h"
