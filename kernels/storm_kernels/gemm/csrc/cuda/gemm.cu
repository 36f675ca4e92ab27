// The kernels of one module. The compile command defines its variant: GEMM_HALF, GEMM_PAIRS,
// GEMM_ENCODES, GEMM_ACTIVATION, GEMM_BIAS and GEMM_CLUSTER are the parameters of `hopper_product`.
#include "gemm_backward.cuh"
#include "gemm_hopper.cuh"

#if GEMM_HALF
typedef Half Format;
#else
typedef Bfloat16 Format;
#endif

extern "C" __global__ void __cluster_dims__(GEMM_CLUSTER, 1, 1) __launch_bounds__(kThreads, 1)
    gemm_product(const __grid_constant__ TensorMap left, const __grid_constant__ TensorMap first,
                 const __grid_constant__ TensorMap second, const __grid_constant__ Job job)
{
    hopper_product<Format, GEMM_PAIRS, GEMM_ENCODES, GEMM_ACTIVATION, GEMM_BIAS, GEMM_CLUSTER>(
        left, first, second, job);
}

extern "C" __global__ void __launch_bounds__(kRecordThreads)
    gemm_records(const __grid_constant__ Records records)
{
    write_records(records);
}

extern "C" __global__ void __launch_bounds__(kBackwardThreads)
    gemm_backward(const __grid_constant__ Backward job)
{
    gated_backward<Format, GEMM_ACTIVATION>(job);
}
