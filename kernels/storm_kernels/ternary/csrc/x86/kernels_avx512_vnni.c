/* The kernels with AVX-512 and its dot product of bytes (VNNI) and population count (VPOPCNTDQ). */
#include "avx512.h"

#define TABLE ternary_avx512_vnni
#define TABLE_NAME "avx512_vnni"

/* A code is multiplied without a shift in its byte, so part k holds 4^k times its sums. The largest
 * gain, 128 * 128 eight times per block, allows 2^14 blocks in 32 bits. */
typedef struct {
    __m512i part[4];
} sums;

static inline sums zero_sums(void)
{
    sums all;
    for (unsigned i = 0; i < 4; i++)
        all.part[i] = _mm512_setzero_si512();
    return all;
}

static inline void add_products(sums *all, bits even, bits odd, const int8_t *x)
{
    for (unsigned i = 0; i < 4; i++) {
        const bits field = _mm512_set1_epi8((char)(3 << 2 * i));
        all->part[i] = _mm512_dpbusd_epi32(all->part[i], _mm512_and_si512(even, field),
                                           _mm512_loadu_si512(x + 2 * i * VECTOR_BYTES));
        all->part[i] = _mm512_dpbusd_epi32(all->part[i], _mm512_and_si512(odd, field),
                                           _mm512_loadu_si512(x + (2 * i + 1) * VECTOR_BYTES));
    }
}

static inline __m512i joined(const sums *all)
{
    __m512i low = _mm512_add_epi32(all->part[0], _mm512_srai_epi32(all->part[1], 2));
    __m512i high = _mm512_add_epi32(_mm512_srai_epi32(all->part[2], 4),
                                    _mm512_srai_epi32(all->part[3], 6));
    return _mm512_add_epi32(low, high);
}

static inline void lanes_of_sums(const sums *all, int32_t *lanes)
{
    _mm512_storeu_si512(lanes, joined(all));
}

static inline int64_t total_of_sums(const sums *all) { return total_of_lanes(joined(all)); }

static inline __m512i count_bits(bits some) { return _mm512_popcnt_epi64(some); }

#include "../template.h"
