/* The whole product of STORM's GEMM as a CPU function: GEMM_HALF, GEMM_PAIRS, GEMM_ENCODES,
 * GEMM_ACTIVATION, GEMM_BIAS and GEMM_CLUSTER as in gemm.cu. Returns 0, or 1 at a dead end.
 */
#include "../../../kernels/storm_kernels/gemm/csrc/cuda/gemm_hopper.cuh"

#if GEMM_HALF
typedef Half Format;
#else
typedef Bfloat16 Format;
#endif

extern "C" int product(const TensorMap *left, const TensorMap *first, const TensorMap *second,
                       const Job *job, u32 grid, u64 seed) {
  hopper::state = {};
  hopper::cluster = GEMM_CLUSTER;
  emulation::seed = seed;
  return !emulation::launch(grid, kThreads, kSharedBytes, [&] {
    hopper_product<Format, GEMM_PAIRS, GEMM_ENCODES, GEMM_ACTIVATION, GEMM_BIAS, GEMM_CLUSTER>(
        *left, *first, *second, *job);
  });
}
