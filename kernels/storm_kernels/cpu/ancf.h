/* What the library exports: the ANCF codec on plain host memory, and which instructions it may use.
 *
 * Every function takes caller-given memory and keeps no state between calls, so any number of
 * threads may call at once. The blobs are those of FORMAT.md, byte for byte, whatever the
 * instruction set and the number of threads. */
#ifndef STORM_ANCF_H
#define STORM_ANCF_H

#include <stdint.h>

#define STORM_API __attribute__((visibility("default")))

/* Raised whenever a signature or the options' layout below changes; the loader compares it. */
#define STORM_ABI_VERSION 2

enum storm_status {
    STORM_OK = 0,
    STORM_CORRUPT = -1,      /* the blob contradicts itself, its size or its checksum */
    STORM_TOO_SMALL = -2,    /* the output buffer is smaller than needed */
    STORM_BAD_ARGUMENT = -3, /* an option, a dtype or a size that has no meaning */
    STORM_NO_MEMORY = -4,    /* a scratch buffer of a threaded call could not be had */
    STORM_UNSUPPORTED = -5   /* this processor or this build lacks the instruction set */
};

/* Instruction sets, worst to best within an architecture. */
enum storm_isa {
    STORM_ISA_BEST = -1,
    STORM_ISA_PORTABLE = 0,
    STORM_ISA_AVX2 = 1,
    STORM_ISA_AVX512 = 2,
    STORM_ISA_NEON = 3,
    STORM_ISA_COUNT = 4
};

struct storm_ancf_options {
    int32_t mode;     /* FORMAT.md's number, or -1 to choose from the sample */
    int32_t dense;    /* 1: two nested code widths, 0: one */
    int32_t checksum; /* 1: keep a checksum of the original bytes */
    int32_t policy;   /* of mode values: 0 conservative, 1 adaptive, 2 aggressive */
    int32_t threads;  /* at most this many, never more than the work is worth; >= 1 */
    int32_t isa;      /* enum storm_isa */
};

STORM_API int storm_abi_version(void);

/* 1 when this build and this processor can run `isa`, else 0. */
STORM_API int storm_isa_available(int isa);

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
