/* One call's work, and the table of functions that an instruction set fills to do it.
 *
 * A strip is what one thread scans from end to end: up to STRIP_CHANNELS channels that lie side by
 * side, or up to STRIP_ROWS sequences whose elements do. */
#ifndef STORM_SCAN_JOB_H
#define STORM_SCAN_JOB_H

#include "scan.h"

/* States of a strip stay in the first cache: 512 of 8 bytes, twice where sums are compensated. */
#define STRIP_CHANNELS 512

/* One sequence's additions wait for each other; four keep the adder busy. */
#define STRIP_ROWS 4

/* Elements of a row that are made before they are written out: a kilobyte or two. */
#define CHUNK 256

/* From here on results go to memory without being read first, as large copies do. */
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

/* Where one strip begins: an outer index, an inner one, and how many sequences it has. */
struct scan_strip {
    int64_t outer, inner;
    int count;
};

struct scan_kernels {
    /* Indexed by enum storm_scan_dtype; NULL where the kind has no such type. */
    void (*fold[6])(const struct scan_job *job, struct scan_strip strip);
    void (*linear[6])(const struct scan_job *job, struct scan_strip strip);
    void (*gradient[6])(const struct scan_job *job, struct scan_strip strip);
};

extern const struct scan_kernels scan_kernels_portable;
extern const struct scan_kernels scan_kernels_avx2;
extern const struct scan_kernels scan_kernels_avx512;

#endif
