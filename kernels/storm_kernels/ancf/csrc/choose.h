/* Chooses the plan for a tensor: a pure function of its size, its dtype and a small sample.
 *
 * It uses only integer arithmetic and fixed orders, so every backend chooses alike (FORMAT.md,
 * sections 9 to 11). */
#ifndef STORM_CHOOSE_H
#define STORM_CHOOSE_H

#include "blob.h"

struct ranked_value {
    uint64_t value;
    uint32_t count;
};

/* The sample of a tensor, and scratch to sort it: 512 KiB, so allocate it on the heap. */
struct sample {
    unsigned bits;
    unsigned mantissa;
    int is_signed;
    int is_float;
    int dtype;
    uint32_t count;
    uint64_t elements[ANCF_SAMPLE];
    uint64_t sorted[ANCF_SAMPLE];            /* scratch of choose_plan */
    struct ranked_value ranks[ANCF_SAMPLE];  /* scratch of choose_plan */
};

/* Takes the sample of n >= 1 elements of the dtype at any address. */
void take_sample(struct sample *sample, int dtype, const uint8_t *elements, uint64_t n);

/* Sets mode, code parameters, dictionary and fill of the plan, and nothing else. mode is an enum
 * ancf_mode or ANCF_AUTO. fill is the value that mode sparse omits, instead of zero. */
void choose_plan(struct sample *sample, int mode, int dense, int policy, uint64_t fill,
                 struct plan *plan);

#endif
