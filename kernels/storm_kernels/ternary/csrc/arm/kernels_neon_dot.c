/* The kernels with NEON and its dot product of bytes (ARMv8.2, optional there). */
#include "neon.h"

#define TABLE ternary_neon_dot
#define TABLE_NAME "neon_dot"

static inline void add_products(sums *all, bits even, bits odd, const int8_t *x)
{
    for (unsigned i = 0; i < 8; i++)
        *all = vdotq_s32(*all, field_of(i % 2 ? odd : even, i / 2), vld1q_s8(x + 16 * i));
}

#include "../template.h"
