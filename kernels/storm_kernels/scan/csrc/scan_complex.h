/* h = a*h + b and its gradient for complex numbers (pairs of floats), with the plain product
 * formula. So an infinity times a number may be NaN, as on the GPU. Strides count pairs. */

struct pair {
    float re, im;
};

ALWAYS struct pair pair_fma(struct pair a, struct pair h, struct pair b)
{
    return (struct pair){a.re * h.re - a.im * h.im + b.re, a.re * h.im + a.im * h.re + b.im};
}

ALWAYS struct pair pair_conjugate(struct pair a) { return (struct pair){a.re, -a.im}; }

ALWAYS struct pair *pair_at(const struct storm_scan_array *array, const struct scan_job *job,
                            int64_t outer, int64_t inner, int64_t t)
{
    int64_t place = job->options->reverse ? job->shape->length - 1 - t : t;
    return (struct pair *)array->data + outer * array->outer + inner * array->inner +
           place * array->length;
}

ALWAYS struct pair pair_first(const struct scan_job *job, int64_t outer, int64_t inner)
{
    const struct storm_scan_array *initial = job->initial;
    if (!initial || !initial->data)
        return (struct pair){0, 0};
    return ((const struct pair *)initial->data)[outer * initial->outer + inner * initial->inner];
}

ALWAYS int64_t pair_outer(const struct scan_job *job, struct scan_strip strip, int i)
{
    return job->shape->inner == 1 ? strip.outer + i : strip.outer;
}

ALWAYS int64_t pair_inner(const struct scan_job *job, struct scan_strip strip, int i)
{
    return job->shape->inner == 1 ? 0 : strip.inner + i;
}

static void linear_c64(const struct scan_job *job, struct scan_strip strip)
{
    struct pair states[STRIP_CHANNELS];
    for (int i = 0; i < strip.count; i++)
        states[i] = pair_first(job, pair_outer(job, strip, i), pair_inner(job, strip, i));
    for (int64_t t = 0; t < job->shape->length; t++)
        for (int i = 0; i < strip.count; i++) {
            int64_t outer = pair_outer(job, strip, i), inner = pair_inner(job, strip, i);
            states[i] = pair_fma(*pair_at(job->factors, job, outer, inner, t), states[i],
                                 *pair_at(job->x, job, outer, inner, t));
            *pair_at(job->y, job, outer, inner, t) = states[i];
        }
}

static void gradient_c64(const struct scan_job *job, struct scan_strip strip)
{
    static const struct pair zero = {0, 0};
    struct pair sums[STRIP_CHANNELS];
    int64_t length = job->shape->length;
    for (int64_t t = length - 1; t >= 0; t--)
        for (int i = 0; i < strip.count; i++) {
            int64_t outer = pair_outer(job, strip, i), inner = pair_inner(job, strip, i);
            struct pair grad = *pair_at(job->x, job, outer, inner, t);
            sums[i] = t == length - 1
                          ? grad
                          : pair_fma(pair_conjugate(
                                         *pair_at(job->factors, job, outer, inner, t + 1)),
                                     sums[i], grad);
            struct pair entered = t ? *pair_at(job->states, job, outer, inner, t - 1)
                                    : pair_first(job, outer, inner);
            *pair_at(job->y, job, outer, inner, t) = sums[i];
            *pair_at(job->da, job, outer, inner, t) =
                pair_fma(pair_conjugate(entered), sums[i], zero);
        }
}
