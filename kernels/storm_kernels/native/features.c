/* Detects the instruction sets that this build contains and this processor supports.
 *
 * The compiler's detection also checks that the operating system saves the wide registers, so
 * kernels that this file reports as available never fault. */
#include "native.h"

#if defined(STORM_HAVE_AVX2) || defined(STORM_HAVE_AVX512)
static int processor_has(int isa)
{
    __builtin_cpu_init();
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") &&
               __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("lzcnt") &&
               __builtin_cpu_supports("popcnt");
    if (isa == STORM_ISA_AVX2)
        return avx2;
    return avx2 && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vbmi") &&
           __builtin_cpu_supports("avx512vbmi2");
}
#endif

int storm_isa_available(int isa)
{
    switch (isa) {
    case STORM_ISA_PORTABLE:
        return 1;
#ifdef STORM_HAVE_AVX2
    case STORM_ISA_AVX2:
        return processor_has(isa);
#endif
#ifdef STORM_HAVE_AVX512
    case STORM_ISA_AVX512:
        return processor_has(isa);
#endif
#ifdef STORM_HAVE_NEON
    case STORM_ISA_NEON:
        return 1; /* part of every 64-bit ARM processor */
#endif
    default:
        return 0;
    }
}

int storm_named_isa(int isa)
{
    static const int order[] = {STORM_ISA_AVX512, STORM_ISA_AVX2, STORM_ISA_NEON};
    if (isa != STORM_ISA_BEST)
        return isa;
    for (unsigned i = 0; i < sizeof order / sizeof *order; i++)
        if (storm_isa_available(order[i]))
            return order[i];
    return STORM_ISA_PORTABLE;
}

int storm_abi_version(void) { return STORM_ABI_VERSION; }
