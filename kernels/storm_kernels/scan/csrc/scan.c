/* A scan: checks the arguments, divides the work into strips, and distributes them to threads. */
#include "scan.h"

#include <stddef.h>

#include "parallel.h"
#include "scan_job.h"

/* The minimum bytes for which starting a thread pays. */
#define MIN_BYTES (256u << 10)

struct range {
    const struct scan_job *job;
    void (*run)(const struct scan_job *job, struct scan_strip strip);
    int64_t begin, end;
};

static const struct scan_kernels *scan_kernels_for(int isa)
{
    isa = storm_named_isa(isa);
    if (!storm_isa_available(isa))
        return NULL;
    switch (isa) {
#ifdef STORM_HAVE_AVX2
    case STORM_ISA_AVX2:
        return &scan_kernels_avx2;
#endif
#ifdef STORM_HAVE_AVX512
    case STORM_ISA_AVX512:
        return &scan_kernels_avx512;
#endif
    default: /* on 64-bit ARM the compiler vectorises portable code too */
        return &scan_kernels_portable;
    }
}

static int64_t strips_across(const struct storm_scan_shape *shape)
{
    return (shape->inner + STRIP_CHANNELS - 1) / STRIP_CHANNELS;
}

static int64_t strips_of(const struct storm_scan_shape *shape)
{
    if (shape->inner == 1)
        return (shape->outer + STRIP_ROWS - 1) / STRIP_ROWS;
    return shape->outer * strips_across(shape);
}

static struct scan_strip strip_at(const struct storm_scan_shape *shape, int64_t number)
{
    struct scan_strip strip;
    int64_t left;
    if (shape->inner == 1) {
        strip.outer = number * STRIP_ROWS;
        strip.inner = 0;
        left = shape->outer - strip.outer;
        strip.count = left < STRIP_ROWS ? (int)left : STRIP_ROWS;
        return strip;
    }
    strip.outer = number / strips_across(shape);
    strip.inner = number % strips_across(shape) * STRIP_CHANNELS;
    left = shape->inner - strip.inner;
    strip.count = left < STRIP_CHANNELS ? (int)left : STRIP_CHANNELS;
    return strip;
}

static void run_range(void *item)
{
    struct range *range = item;
    for (int64_t i = range->begin; i < range->end; i++)
        range->run(range->job, strip_at(range->job->shape, i));
}

static int is_strided(const struct storm_scan_shape *shape, const struct storm_scan_array *array)
{
    return !array || !array->data || shape->inner == 1 || array->inner == 1;
}

static int run(struct scan_job *job)
{
    static const uint8_t element_bytes[] = {8, 4, 2, 2, 8, 8};
    const struct storm_scan_shape *shape = job->shape;
    const struct storm_scan_options *options = job->options;
    if (shape->outer < 0 || shape->length < 0 || shape->inner < 0 || options->dtype < 0 ||
        options->dtype > STORM_SCAN_C64 || options->op < 0 ||
        options->op > STORM_SCAN_COMPENSATED || options->threads < 1)
        return STORM_BAD_ARGUMENT;
    if (!is_strided(shape, job->x) || !is_strided(shape, job->factors) ||
        !is_strided(shape, job->states) || !is_strided(shape, job->initial) ||
        !is_strided(shape, job->y) || !is_strided(shape, job->da))
        return STORM_BAD_ARGUMENT;
    const struct scan_kernels *kernels = scan_kernels_for(options->isa);
    if (!kernels)
        return STORM_UNSUPPORTED;
    void (*work)(const struct scan_job *, struct scan_strip) =
        job->kind == SCAN_FOLD     ? kernels->fold[options->dtype]
        : job->kind == SCAN_LINEAR ? kernels->linear[options->dtype]
                                   : kernels->gradient[options->dtype];
    if (!work)
        return STORM_BAD_ARGUMENT;
    if (!shape->outer || !shape->length || !shape->inner)
        return STORM_OK;
    uint64_t bytes = (uint64_t)shape->outer * (uint64_t)shape->length * (uint64_t)shape->inner *
                     element_bytes[options->dtype];
    job->stream = bytes >= STREAM_BYTES;
    int64_t strips = strips_of(shape);
    int64_t count = worthwhile_threads(options->threads, bytes, MIN_BYTES);
    if (count > strips)
        count = strips;
    struct range ranges[MAX_THREADS];
    for (int64_t i = 0; i < count; i++)
        ranges[i] = (struct range){job, work, strips * i / count, strips * (i + 1) / count};
    run_parallel(run_range, ranges, sizeof *ranges, (unsigned)count);
    return STORM_OK;
}

int storm_scan_fold(const struct storm_scan_shape *shape, const struct storm_scan_options *options,
                    const struct storm_scan_array *x, const struct storm_scan_array *y)
{
    struct scan_job job = {.kind = SCAN_FOLD, .shape = shape, .options = options, .x = x, .y = y};
    return run(&job);
}

int storm_scan_linear(const struct storm_scan_shape *shape,
                      const struct storm_scan_options *options, const struct storm_scan_array *a,
                      const struct storm_scan_array *b, const struct storm_scan_array *initial,
                      const struct storm_scan_array *h)
{
    struct scan_job job = {.kind = SCAN_LINEAR,
                           .shape = shape,
                           .options = options,
                           .x = b,
                           .factors = a,
                           .initial = initial,
                           .y = h};
    return run(&job);
}

int storm_scan_gradient(const struct storm_scan_shape *shape,
                        const struct storm_scan_options *options, const struct storm_scan_array *g,
                        const struct storm_scan_array *a, const struct storm_scan_array *h,
                        const struct storm_scan_array *initial, const struct storm_scan_array *da,
                        const struct storm_scan_array *db)
{
    struct scan_job job = {.kind = SCAN_GRADIENT,
                           .shape = shape,
                           .options = options,
                           .x = g,
                           .factors = a,
                           .states = h,
                           .initial = initial,
                           .y = db,
                           .da = da};
    return run(&job);
}
