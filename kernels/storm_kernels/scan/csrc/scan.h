/* The library's exported scan functions: they work on plain host memory and keep no state.
 *
 * Arrays are (outer, length, inner), each with its own strides. Results are computed in sequence
 * order, and no a*h + b is contracted. So they depend on neither threads nor instruction sets. */
#ifndef STORM_SCAN_H
#define STORM_SCAN_H

#include <stdint.h>

#include "native.h"

enum storm_scan_dtype {
    STORM_SCAN_F64 = 0,
    STORM_SCAN_F32 = 1,
    STORM_SCAN_BF16 = 2,
    STORM_SCAN_F16 = 3,
    STORM_SCAN_I64 = 4, /* only fold */
    STORM_SCAN_C64 = 5  /* only linear and gradient: two floats, the real part first */
};

enum storm_scan_op {
    STORM_SCAN_ADD = 0,
    STORM_SCAN_MUL = 1,
    STORM_SCAN_MAX = 2, /* a NaN element makes the result NaN, here and below */
    STORM_SCAN_MIN = 3,
    STORM_SCAN_LOGADDEXP = 4,
    STORM_SCAN_COMPENSATED = 5 /* Neumaier's sum */
};

struct storm_scan_shape {
    int64_t outer, length, inner;
};

/* Strides in elements, of any sign. If the shape's inner > 1, the inner stride must be 1. */
struct storm_scan_array {
    void *data; /* NULL: no array (only for initial) */
    int64_t outer, length, inner;
};

struct storm_scan_options {
    int32_t dtype;     /* enum storm_scan_dtype */
    int32_t op;        /* enum storm_scan_op */
    int32_t reverse;   /* 1: from the end */
    int32_t exclusive; /* 1: each result excludes its own element */
    int32_t threads;   /* the maximum number, >= 1; small work uses fewer */
    int32_t isa;       /* enum storm_isa */
};

/* All return a storm_status. Outputs must not overlap anything else. */

STORM_API int storm_scan_fold(const struct storm_scan_shape *shape,
                              const struct storm_scan_options *options,
                              const struct storm_scan_array *x, const struct storm_scan_array *y);

/* h[t] = a[t] h[t-1] + b[t], h[-1] being initial or zero. */
STORM_API int storm_scan_linear(const struct storm_scan_shape *shape,
                                const struct storm_scan_options *options,
                                const struct storm_scan_array *a, const struct storm_scan_array *b,
                                const struct storm_scan_array *initial,
                                const struct storm_scan_array *h);

/* Computes the gradients of a and b from the gradient g of h; `reverse` is that of h's scan. */
STORM_API int storm_scan_gradient(const struct storm_scan_shape *shape,
                                  const struct storm_scan_options *options,
                                  const struct storm_scan_array *g,
                                  const struct storm_scan_array *a,
                                  const struct storm_scan_array *h,
                                  const struct storm_scan_array *initial,
                                  const struct storm_scan_array *da,
                                  const struct storm_scan_array *db);

#endif
