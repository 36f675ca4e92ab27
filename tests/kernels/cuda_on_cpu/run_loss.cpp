/* The loss' kernels as CPU functions for the tests, by kind of element and order. Return 0, or 1 at
 * a dead end.
 */
#include "../../../kernels/storm_kernels/loss/csrc/cuda/loss.cu"

#define RUN(kind, type)                                                                               \
  extern "C" int forward_##kind(int order, const type::Word *logits, const i64 *classes,              \
                                float *picked, float *largest, float *log_total, i64 rows, i64 count, \
                                u32 shift) {                                                          \
    auto kernel = order == 0   ? loss_forward_strided_##kind                                          \
                  : order == 1 ? loss_forward_vectors_##kind                                          \
                               : loss_forward_shifted_##kind;                                         \
    return !emulation::launch(rows, kForwardThreads, kForwardThreads / kWarp * sizeof(float), [&] {   \
      kernel(logits, classes, picked, largest, log_total, count, shift);                              \
    });                                                                                               \
  }                                                                                                   \
  extern "C" int backward_##kind(const type::Word *logits, const i64 *classes, const float *gradient, \
                                 const float *largest, const float *log_total, type::Word *out,       \
                                 i64 rows, i64 count) {                                               \
    return !emulation::launch(rows, kBackwardThreads, 0, [&] {                                        \
      loss_backward_##kind(logits, classes, gradient, largest, log_total, out, count);                \
    });                                                                                               \
  }

RUN(bf16, Bfloat16)
RUN(f16, Half)
RUN(f32, Float)
