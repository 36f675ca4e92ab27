/* Returns the tile coder's table for an instruction set, if this machine supports it. */
#include "ancf.h"
#include "coder.h"

const struct kernels *kernels_for(int isa)
{
    isa = storm_named_isa(isa);
    if (!storm_isa_available(isa))
        return NULL;
    switch (isa) {
#ifdef STORM_HAVE_AVX2
    case STORM_ISA_AVX2:
        return &kernels_avx2;
#endif
#ifdef STORM_HAVE_AVX512
    case STORM_ISA_AVX512:
        return &kernels_avx512;
#endif
#ifdef STORM_HAVE_NEON
    case STORM_ISA_NEON:
        return &kernels_neon;
#endif
    default:
        return &kernels_portable;
    }
}
