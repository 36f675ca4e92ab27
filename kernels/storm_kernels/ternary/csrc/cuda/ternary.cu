// All kernels of ternary tensors, as one module; cuda.py launches them.
#include "ternary_floats.cuh"
#include "ternary_matmul.cuh"
#include "ternary_matvec.cuh"
#include "ternary_values.cuh"
