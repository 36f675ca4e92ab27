/* Declarations that all parts of the library share: the export attribute, error codes and
 * instruction sets.
 *
 * One library contains ANCF, scans and ternary products. Every function works on memory that the
 * caller provides and keeps no state between calls, so any number of threads may call. */
#ifndef STORM_NATIVE_H
#define STORM_NATIVE_H

#define STORM_API __attribute__((visibility("default")))

/* Raised whenever a signature or a struct of an exported function changes; the loader checks it. */
#define STORM_ABI_VERSION 2

enum storm_status {
    STORM_OK = 0,
    STORM_CORRUPT = -1,      /* the blob contradicts itself, its size or its checksum */
    STORM_TOO_SMALL = -2,    /* the output buffer is smaller than needed */
    STORM_BAD_ARGUMENT = -3, /* an option, a dtype or a size that is not valid */
    STORM_NO_MEMORY = -4,    /* a scratch buffer of a threaded call could not be allocated */
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

STORM_API int storm_abi_version(void);

/* 1 when this build and this processor can run `isa`, else 0. */
STORM_API int storm_isa_available(int isa);

/* Returns the best available set for STORM_ISA_BEST; returns any other `isa` unchanged. */
int storm_named_isa(int isa);

#endif
