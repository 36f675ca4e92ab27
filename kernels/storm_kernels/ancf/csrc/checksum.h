/* FORMAT.md's checksum of original bytes of any length, for encoding, decoding and copying. */
#ifndef STORM_CHECKSUM_H
#define STORM_CHECKSUM_H

#include "coder.h"

/* Returns the columns' sum of data[0, nbytes), which starts at chunk number first_chunk of all
 * data. Sums of pieces that end at chunk boundaries may be added in any order. */
uint64_t sum_columns(const struct kernels *kernels, const uint8_t *data, uint64_t nbytes,
                     uint64_t first_chunk);

/* Copies nbytes and returns their columns' sum. */
uint64_t copy_sum_columns(const struct kernels *kernels, uint8_t *dst, const uint8_t *data,
                          uint64_t nbytes, uint64_t first_chunk);

/* Returns the checksum of nbytes whose columns' sum is `sum`. */
static inline uint64_t finish_checksum(uint64_t sum, uint64_t nbytes)
{
    return sum + nbytes * ANCF_C3;
}

/* Copies on up to `threads` threads; returns the columns' sum when `wanted`, else 0. */
uint64_t copy_parallel(const struct kernels *kernels, uint8_t *dst, const uint8_t *src,
                       uint64_t nbytes, int wanted, int threads);

#endif
