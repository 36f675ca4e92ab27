/* Detects the variants that this build contains and this processor supports. native/features.c
 * detects the instruction sets; only optional extensions are detected here. */
#include "kernels.h"
#include "native.h"

#if defined(STORM_HAVE_NEON_DOT)
#include <sys/auxv.h>
#define HWCAP_DOT_PRODUCT (1ul << 20) /* HWCAP_ASIMDDP of Linux */
#endif

static const struct ternary_kernels *best(void)
{
    for (int variant = STORM_TERNARY_VARIANTS - 1; variant > STORM_TERNARY_PORTABLE; variant--)
        if (storm_ternary_available(variant))
            return ternary_kernels_for(variant);
    return &ternary_portable;
}

const struct ternary_kernels *ternary_kernels_for(int variant)
{
    switch (variant) {
    case STORM_TERNARY_BEST:
        return best();
    case STORM_TERNARY_PORTABLE:
        return &ternary_portable;
#ifdef STORM_HAVE_AVX2
    case STORM_TERNARY_AVX2:
        return storm_isa_available(STORM_ISA_AVX2) ? &ternary_avx2 : NULL;
#endif
#ifdef STORM_HAVE_AVX512
    case STORM_TERNARY_AVX512:
        return storm_isa_available(STORM_ISA_AVX512) ? &ternary_avx512 : NULL;
#endif
#ifdef STORM_HAVE_AVX512_VNNI
    case STORM_TERNARY_AVX512_VNNI:
        return storm_isa_available(STORM_ISA_AVX512) && __builtin_cpu_supports("avx512vnni") &&
                       __builtin_cpu_supports("avx512vpopcntdq")
                   ? &ternary_avx512_vnni
                   : NULL;
#endif
#ifdef STORM_HAVE_NEON
    case STORM_TERNARY_NEON:
        return storm_isa_available(STORM_ISA_NEON) ? &ternary_neon : NULL;
#endif
#ifdef STORM_HAVE_NEON_DOT
    case STORM_TERNARY_NEON_DOT:
        return getauxval(AT_HWCAP) & HWCAP_DOT_PRODUCT ? &ternary_neon_dot : NULL;
#endif
    default:
        return NULL;
    }
}

int storm_ternary_available(int variant)
{
    return variant >= 0 && variant < STORM_TERNARY_VARIANTS && ternary_kernels_for(variant) != NULL;
}
