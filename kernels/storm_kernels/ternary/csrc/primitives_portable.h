/* The primitives of template.h in plain C, for instruction sets without faster versions. */
#ifndef STORM_TERNARY_PRIMITIVES_H
#define STORM_TERNARY_PRIMITIVES_H

#include "kernels.h"

static inline uint64_t portable_signs_of_i8(const int8_t *values, uint64_t *word0, uint64_t *word1)
{
    uint64_t found0 = 0, found1 = 0, refused = 0;
    for (unsigned i = 0; i < 64; i++) {
        found0 |= (uint64_t)(values[i] != 0) << i;
        found1 |= (uint64_t)(values[i] < 0) << i;
        refused |= (uint64_t)(values[i] < -1 || values[i] > 1) << i;
    }
    *word0 = found0;
    *word1 = found1;
    return refused;
}

/* With a negative threshold only -1, 0 and 1 are valid. */
static inline uint64_t portable_signs_of_f32(const float *values, float threshold, uint64_t *word0,
                                             uint64_t *word1)
{
    uint64_t found0 = 0, found1 = 0, refused = 0;
    const int exact = threshold < 0.0f;
    const float limit = exact ? 0.0f : threshold;
    for (unsigned i = 0; i < 64; i++) {
        float value = values[i], size = value < 0.0f ? -value : value;
        uint64_t set = size > limit;
        found0 |= set << i;
        found1 |= (uint64_t)(set & (value < 0.0f)) << i;
        refused |= (uint64_t)(value != value || (exact && set && size != 1.0f)) << i;
    }
    *word0 = found0;
    *word1 = found1;
    return refused;
}

static inline void portable_values_i8(uint64_t word0, uint64_t word1, int8_t *values)
{
    for (unsigned i = 0; i < 64; i++)
        values[i] = (int8_t)((int)(word0 >> i & 1) - 2 * (int)(word1 >> i & 1));
}

static inline void portable_values_f32(uint64_t word0, uint64_t word1, float *values)
{
    for (unsigned i = 0; i < 64; i++)
        values[i] = (float)((int)(word0 >> i & 1) - 2 * (int)(word1 >> i & 1));
}

static inline uint64_t portable_bytes_from(const uint8_t *bytes, uint8_t least)
{
    uint64_t found = 0;
    for (unsigned i = 0; i < 64; i++)
        found |= (uint64_t)(bytes[i] >= least) << i;
    return found;
}

/* Reduces 32 sums to one by halves: sum i adds sum i + 16, then i + 8, i + 4, i + 2 and i + 1. */
static inline float tree_total(float *sums)
{
    for (unsigned half = 16; half; half /= 2)
        for (unsigned i = 0; i < half; i++)
            sums[i] += sums[i + half];
    return sums[0];
}

#endif
