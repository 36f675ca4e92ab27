/* The work of one call, and the table of functions of each instruction set.
 *
 * A thread scans a strip from end to end: up to STRIP_CHANNELS contiguous channels, or up to
 * STRIP_ROWS sequences with contiguous elements. */
#ifndef STORM_SCAN_JOB_H
#define STORM_SCAN_JOB_H

#include "scan.h"

/* The states of a strip fit the L1 cache: 512 of 8 bytes, twice that for compensated sums. */
#define STRIP_CHANNELS 512

/* The additions of one sequence depend on each other; four sequences keep the adder busy. */
#define STRIP_ROWS 4

/* Elements of a row that are computed before they are written: one or two KiB. */
#define CHUNK 256

/* From this size on, results are written by non-temporal stores, as in large copies. */
#define STREAM_BYTES (4u << 20)

enum scan_kind { SCAN_FOLD, SCAN_LINEAR, SCAN_GRADIENT };

struct scan_job {
    enum scan_kind kind;
    const struct storm_scan_shape *shape;
    const struct storm_scan_options *options;
    const struct storm_scan_array *x;       /* fold's input, linear's b, gradient's g */
    const struct storm_scan_array *factors; /* a */
    const struct storm_scan_array *states;  /* gradient's h */
    const struct storm_scan_array *initial; /* NULL or without data: zero */
    const struct storm_scan_array *y;       /* fold's output, linear's h, gradient's db */
    const struct storm_scan_array *da;
    int stream;
};

/* One strip: its first outer and inner index, and its number of sequences. */
struct scan_strip {
    int64_t outer, inner;
    int count;
};

struct scan_kernels {
    /* Indexed by enum storm_scan_dtype; NULL for types that the function does not support. */
    void (*fold[6])(const struct scan_job *job, struct scan_strip strip);
    void (*linear[6])(const struct scan_job *job, struct scan_strip strip);
    void (*gradient[6])(const struct scan_job *job, struct scan_strip strip);
};

extern const struct scan_kernels scan_kernels_portable;
extern const struct scan_kernels scan_kernels_avx2;
extern const struct scan_kernels scan_kernels_avx512;

#endif
