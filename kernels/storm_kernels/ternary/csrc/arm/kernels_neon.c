/* The kernels with NEON, for every 64-bit ARM processor. */
#include "neon.h"

#define TABLE ternary_neon
#define TABLE_NAME "neon"

static inline void add_products(sums *all, bits even, bits odd, const int8_t *x)
{
    for (unsigned i = 0; i < 8; i++) {
        int8x16_t codes = field_of(i % 2 ? odd : even, i / 2), part = vld1q_s8(x + 16 * i);
        int16x8_t low = vmull_s8(vget_low_s8(codes), vget_low_s8(part));
        int16x8_t high = vmull_high_s8(codes, part);
        /* Adds neighbouring pairs, then pairs of these sums: four bytes per lane. */
        *all = vpadalq_s16(*all, vpaddq_s16(low, high));
    }
}

#include "../template.h"
