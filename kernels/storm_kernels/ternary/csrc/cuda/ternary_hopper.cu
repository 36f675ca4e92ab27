// The kernels for Hopper, as one module that is compiled only for sm_90a; cuda.py launches them.
// Each is compiled for as many warpgroups per block as possible without register spills.
#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "warpgroup instructions need sm_90a"
#endif

#include "ternary_hopper_instructions.cuh"

#include "ternary_hopper.cuh"

#define HOPPER_BOTH(eights, groups)                                                                \
    HOPPER(i8, HopperInt8, eights, groups)                                                         \
    HOPPER(bf16, HopperBfloat16, eights, groups)
HOPPER_BOTH(2, 4)
HOPPER_BOTH(3, 4)
HOPPER_BOTH(4, 4)
HOPPER_BOTH(6, 4)
HOPPER_BOTH(8, 4)
HOPPER_BOTH(12, 2)
HOPPER_BOTH(16, 2)
