/* What the library exports of ANCF, on plain host memory. The blobs are those of FORMAT.md, byte for
 * byte, whatever the instruction set and the number of threads. */
#ifndef STORM_ANCF_H
#define STORM_ANCF_H

#include <stdint.h>

#include "native.h"

struct storm_ancf_options {
    int32_t mode;     /* FORMAT.md's number, or -1 to choose from the sample */
    int32_t dense;    /* 1: two nested code widths, 0: one */
    int32_t checksum; /* 1: keep a checksum of the original bytes */
    int32_t policy;   /* of mode values: 0 conservative, 1 adaptive, 2 aggressive */
    int32_t threads;  /* at most this many, never more than the work is worth; >= 1 */
    int32_t isa;      /* enum storm_isa */
};

/* Writes the blob of src[0, nbytes) to dst; returns its size, or a negative storm_status.
 * dst_bytes must be at least 256 + nbytes; src and dst may have any alignment, not overlap. */
STORM_API int64_t storm_ancf_encode(const void *src, uint64_t nbytes, int dtype, void *dst,
                                    uint64_t dst_bytes,
                                    const struct storm_ancf_options *options);

/* Writes the original bytes of a blob to dst[0, dst_bytes), which must be exactly their number.
 * Of options only threads and isa count. On STORM_CORRUPT the output holds no meaning. */
STORM_API int storm_ancf_decode(const void *blob, uint64_t blob_bytes, void *dst,
                                uint64_t dst_bytes, const struct storm_ancf_options *options);

/* FORMAT.md's checksum of data[0, nbytes). */
STORM_API uint64_t storm_ancf_checksum(const void *data, uint64_t nbytes, int isa);

/* Copies and returns the checksum of what was copied, in one pass over memory. */
STORM_API uint64_t storm_ancf_copy_checksum(void *dst, const void *src, uint64_t nbytes, int isa);

#endif
