/* The library's exported ANCF functions, on plain host memory. Blobs follow FORMAT.md byte for
 * byte, whatever the instruction set and the number of threads. */
#ifndef STORM_ANCF_H
#define STORM_ANCF_H

#include <stdint.h>

#include "native.h"

struct storm_ancf_options {
    int32_t mode;     /* the number in FORMAT.md, or -1 to choose from a sample */
    int32_t dense;    /* 1: two nested code widths, 0: one */
    int32_t checksum; /* 1: store a checksum of the original bytes */
    int32_t policy;   /* of mode values: 0 conservative, 1 adaptive, 2 aggressive */
    int32_t threads;  /* the maximum number, >= 1; small work uses fewer */
    int32_t isa;      /* enum storm_isa */
};

/* Writes the blob of src[0, nbytes) to dst; returns its size, or a negative storm_status.
 * dst_bytes must be at least 256 + nbytes. src and dst may have any alignment but must not
 * overlap. */
STORM_API int64_t storm_ancf_encode(const void *src, uint64_t nbytes, int dtype, void *dst,
                                    uint64_t dst_bytes,
                                    const struct storm_ancf_options *options);

/* Writes the original bytes of a blob to dst; dst_bytes must be exactly their number. Uses only the
 * options threads and isa. After STORM_CORRUPT the output is undefined. */
STORM_API int storm_ancf_decode(const void *blob, uint64_t blob_bytes, void *dst,
                                uint64_t dst_bytes, const struct storm_ancf_options *options);

/* Returns FORMAT.md's checksum of data[0, nbytes). */
STORM_API uint64_t storm_ancf_checksum(const void *data, uint64_t nbytes, int isa);

/* Copies nbytes and returns their checksum, in one pass over memory. */
STORM_API uint64_t storm_ancf_copy_checksum(void *dst, const void *src, uint64_t nbytes, int isa);

#endif
