/* The scans of one element type. ELEMENT is the type in memory, SUM the accumulator of sums and
 * similar operations, STATE that of h = a*h + b. UP converts an element to an accumulator, DOWN
 * rounds an accumulator to an element. With INTEGER there is no STATE. scan_template.h includes
 * this file and names the functions after TYPE_NAME.
 *
 * Every function processes elements in scan order: element t of a strip is at `first + t * step` of
 * the array, in either direction. */
#ifdef INTEGER
#define IS_NAN(value) 0
#else
#define IS_NAN(value) isnan(value)
#endif

ALWAYS SUM NAME(neutral)(int op)
{
#ifdef INTEGER
    return op == STORM_SCAN_MUL ? 1 : op == STORM_SCAN_MAX ? INT64_MIN
                                  : op == STORM_SCAN_MIN   ? INT64_MAX
                                                           : 0;
#else
    return op == STORM_SCAN_MUL                                     ? 1
           : op == STORM_SCAN_MAX || op == STORM_SCAN_LOGADDEXP ? -(SUM)INFINITY
           : op == STORM_SCAN_MIN                                   ? (SUM)INFINITY
                                                                    : 0;
#endif
}

ALWAYS SUM NAME(step)(int op, SUM sum, SUM value, SUM *lost)
{
    switch (op) {
    case STORM_SCAN_MUL:
#ifdef INTEGER
        return (SUM)((uint64_t)sum * (uint64_t)value);
#else
        return sum * value;
#endif
    case STORM_SCAN_MAX:
        return value > sum || IS_NAN(value) ? value : sum;
    case STORM_SCAN_MIN:
        return value < sum || IS_NAN(value) ? value : sum;
#ifdef INTEGER
    default:
        (void)lost;
        return (SUM)((uint64_t)sum + (uint64_t)value); /* wraps, as torch's does */
#else
    case STORM_SCAN_LOGADDEXP: {
        SUM larger = sum > value ? sum : value;
        SUM apart = sum > value ? value - sum : sum - value;
        return sum == value ? sum + (SUM)0.69314718055994530942
                            : larger + (SUM)log1p(exp(apart));
    }
    case STORM_SCAN_COMPENSATED: {
        SUM total = sum + value;
        int sum_larger = (sum < 0 ? -sum : sum) >= (value < 0 ? -value : value);
        SUM large = sum_larger ? sum : value, small = sum_larger ? value : sum;
        SUM error = *lost + ((large - total) + small);
        *lost = error - error == 0 ? error : 0; /* an infinite sum has no error */
        return total;
    }
    default:
        (void)lost;
        return sum + value;
#endif
    }
}

/* Returns the address of a strip's element 0 in an array; sets the distance to the next element. */
ALWAYS ELEMENT *NAME(place)(const struct storm_scan_array *array, const struct scan_job *job,
                            struct scan_strip strip, int64_t row, int64_t *step)
{
    int64_t last = job->options->reverse ? (job->shape->length - 1) * array->length : 0;
    *step = job->options->reverse ? -array->length : array->length;
    return (ELEMENT *)array->data + (strip.outer + row) * array->outer +
           strip.inner * array->inner + last;
}

ALWAYS void NAME(fold_columns)(const struct scan_job *job, struct scan_strip strip, int op)
{
    int64_t x_step, y_step;
    const ELEMENT *x = NAME(place)(job->x, job, strip, 0, &x_step);
    ELEMENT *y = NAME(place)(job->y, job, strip, 0, &y_step);
    SUM sums[STRIP_CHANNELS], lost[STRIP_CHANNELS];
    ELEMENT row[STRIP_CHANNELS];
    for (int c = 0; c < strip.count; c++) {
        sums[c] = NAME(neutral)(op);
        lost[c] = 0;
    }
    for (int64_t t = 0; t < job->shape->length; t++, x += x_step, y += y_step) {
        if (job->options->exclusive)
            for (int c = 0; c < strip.count; c++)
                row[c] = DOWN(op == STORM_SCAN_COMPENSATED ? sums[c] + lost[c] : sums[c]);
        for (int c = 0; c < strip.count; c++)
            sums[c] = NAME(step)(op, sums[c], UP(x[c]), &lost[c]);
        if (!job->options->exclusive)
            for (int c = 0; c < strip.count; c++)
                row[c] = DOWN(op == STORM_SCAN_COMPENSATED ? sums[c] + lost[c] : sums[c]);
        put_row(y, row, (size_t)strip.count * sizeof *row, job->stream);
    }
    finish_rows(job->stream);
}

/* Writes `count` results of a row, from element t on; `made` has them in the order of memory. */
ALWAYS void NAME(put_chunk)(const struct scan_job *job, ELEMENT *y, int64_t y_step, int64_t t,
                            const ELEMENT *made, int count)
{
    if (y_step == 1)
        put_row(y + t, made, (size_t)count * sizeof *made, job->stream);
    else if (y_step == -1)
        put_row(y - t - (count - 1), made, (size_t)count * sizeof *made, job->stream);
    else
        for (int i = 0; i < count; i++)
            y[(t + i) * y_step] = made[i];
}

ALWAYS void NAME(fold_rows)(const struct scan_job *job, struct scan_strip strip, int op, int rows)
{
    int64_t x_step, y_step;
    const ELEMENT *x[STRIP_ROWS];
    ELEMENT *y[STRIP_ROWS], made[STRIP_ROWS][CHUNK];
    SUM sums[STRIP_ROWS], lost[STRIP_ROWS];
    for (int r = 0; r < rows; r++) {
        x[r] = NAME(place)(job->x, job, strip, r, &x_step);
        y[r] = NAME(place)(job->y, job, strip, r, &y_step);
        sums[r] = NAME(neutral)(op);
        lost[r] = 0;
    }
    int exclusive = job->options->exclusive, backwards = y_step == -1;
    for (int64_t t = 0; t < job->shape->length; t += CHUNK) {
        int64_t left = job->shape->length - t;
        int count = left < CHUNK ? (int)left : CHUNK;
        for (int i = 0; i < count; i++)
            for (int r = 0; r < rows; r++) {
                SUM before = op == STORM_SCAN_COMPENSATED ? sums[r] + lost[r] : sums[r];
                sums[r] = NAME(step)(op, sums[r], UP(x[r][(t + i) * x_step]), &lost[r]);
                SUM after = op == STORM_SCAN_COMPENSATED ? sums[r] + lost[r] : sums[r];
                made[r][backwards ? count - 1 - i : i] = DOWN(exclusive ? before : after);
            }
        for (int r = 0; r < rows; r++)
            NAME(put_chunk)(job, y[r], y_step, t, made[r], count);
    }
    finish_rows(job->stream);
}

ALWAYS void NAME(fold_op)(const struct scan_job *job, struct scan_strip strip, int op)
{
    if (job->shape->inner != 1) {
        NAME(fold_columns)(job, strip, op);
        return;
    }
    if (strip.count == STRIP_ROWS) {
        NAME(fold_rows)(job, strip, op, STRIP_ROWS);
        return;
    }
    for (int r = 0; r < strip.count; r++)
        NAME(fold_rows)(job, (struct scan_strip){strip.outer + r, strip.inner, 1}, op, 1);
}

static void NAME(fold)(const struct scan_job *job, struct scan_strip strip)
{
    switch (job->options->op) {
    case STORM_SCAN_MUL:
        NAME(fold_op)(job, strip, STORM_SCAN_MUL);
        break;
    case STORM_SCAN_MAX:
        NAME(fold_op)(job, strip, STORM_SCAN_MAX);
        break;
    case STORM_SCAN_MIN:
        NAME(fold_op)(job, strip, STORM_SCAN_MIN);
        break;
#ifndef INTEGER
    case STORM_SCAN_LOGADDEXP:
        NAME(fold_op)(job, strip, STORM_SCAN_LOGADDEXP);
        break;
    case STORM_SCAN_COMPENSATED:
        NAME(fold_op)(job, strip, STORM_SCAN_COMPENSATED);
        break;
#endif
    default:
        NAME(fold_op)(job, strip, STORM_SCAN_ADD);
    }
}

#ifndef INTEGER

/* Sets the states before element 0: initial, or zero. */
ALWAYS void NAME(begin)(const struct scan_job *job, struct scan_strip strip, STATE *states,
                        int columns)
{
    const struct storm_scan_array *initial = job->initial;
    const ELEMENT *from = initial ? initial->data : NULL;
    for (int i = 0; i < strip.count; i++) {
        int64_t offset = 0;
        if (from)
            offset = (strip.outer + (columns ? 0 : i)) * initial->outer +
                     (strip.inner + (columns ? i : 0)) * initial->inner;
        states[i] = from ? UP(from[offset]) : 0;
    }
}

ALWAYS void NAME(linear_columns)(const struct scan_job *job, struct scan_strip strip)
{
    int64_t a_step, b_step, h_step;
    const ELEMENT *a = NAME(place)(job->factors, job, strip, 0, &a_step);
    const ELEMENT *b = NAME(place)(job->x, job, strip, 0, &b_step);
    ELEMENT *h = NAME(place)(job->y, job, strip, 0, &h_step);
    STATE states[STRIP_CHANNELS];
    ELEMENT row[STRIP_CHANNELS];
    NAME(begin)(job, strip, states, 1);
    for (int64_t t = 0; t < job->shape->length; t++, a += a_step, b += b_step, h += h_step) {
        for (int c = 0; c < strip.count; c++) {
            states[c] = UP(a[c]) * states[c] + UP(b[c]);
            row[c] = DOWN(states[c]);
        }
        put_row(h, row, (size_t)strip.count * sizeof *row, job->stream);
    }
    finish_rows(job->stream);
}

ALWAYS void NAME(linear_rows)(const struct scan_job *job, struct scan_strip strip, int rows)
{
    int64_t a_step, b_step, h_step;
    const ELEMENT *a[STRIP_ROWS], *b[STRIP_ROWS];
    ELEMENT *h[STRIP_ROWS], made[STRIP_ROWS][CHUNK];
    STATE states[STRIP_ROWS];
    for (int r = 0; r < rows; r++) {
        a[r] = NAME(place)(job->factors, job, strip, r, &a_step);
        b[r] = NAME(place)(job->x, job, strip, r, &b_step);
        h[r] = NAME(place)(job->y, job, strip, r, &h_step);
    }
    NAME(begin)(job, strip, states, 0);
    for (int64_t t = 0; t < job->shape->length; t += CHUNK) {
        int64_t left = job->shape->length - t;
        int count = left < CHUNK ? (int)left : CHUNK;
        for (int i = 0; i < count; i++)
            for (int r = 0; r < rows; r++) {
                states[r] = UP(a[r][(t + i) * a_step]) * states[r] + UP(b[r][(t + i) * b_step]);
                made[r][h_step == -1 ? count - 1 - i : i] = DOWN(states[r]);
            }
        for (int r = 0; r < rows; r++)
            NAME(put_chunk)(job, h[r], h_step, t, made[r], count);
    }
    finish_rows(job->stream);
}

static void NAME(linear)(const struct scan_job *job, struct scan_strip strip)
{
    if (job->shape->inner != 1) {
        NAME(linear_columns)(job, strip);
        return;
    }
    if (strip.count == STRIP_ROWS) {
        NAME(linear_rows)(job, strip, STRIP_ROWS);
        return;
    }
    for (int r = 0; r < strip.count; r++)
        NAME(linear_rows)(job, (struct scan_strip){strip.outer + r, strip.inner, 1}, 1);
}

/* Processes elements from the last: db[t] = g[t] + a[t+1] db[t+1], da[t] = db[t] h[t-1]. */
ALWAYS void NAME(gradient_columns)(const struct scan_job *job, struct scan_strip strip)
{
    int64_t g_step, a_step, h_step, da_step, db_step, length = job->shape->length;
    const ELEMENT *g = NAME(place)(job->x, job, strip, 0, &g_step);
    const ELEMENT *a = NAME(place)(job->factors, job, strip, 0, &a_step);
    const ELEMENT *h = NAME(place)(job->states, job, strip, 0, &h_step);
    ELEMENT *da = NAME(place)(job->da, job, strip, 0, &da_step);
    ELEMENT *db = NAME(place)(job->y, job, strip, 0, &db_step);
    STATE first[STRIP_CHANNELS], sums[STRIP_CHANNELS];
    ELEMENT term[STRIP_CHANNELS], scaled[STRIP_CHANNELS];
    NAME(begin)(job, strip, first, 1);
    for (int64_t t = length - 1; t >= 0; t--) {
        const ELEMENT *grad = g + t * g_step;
        if (t == length - 1) {
            for (int c = 0; c < strip.count; c++)
                sums[c] = UP(grad[c]);
        } else {
            const ELEMENT *factor = a + (t + 1) * a_step;
            for (int c = 0; c < strip.count; c++)
                sums[c] = UP(factor[c]) * sums[c] + UP(grad[c]);
        }
        if (t) {
            const ELEMENT *entered = h + (t - 1) * h_step;
            for (int c = 0; c < strip.count; c++)
                scaled[c] = DOWN(sums[c] * UP(entered[c]));
        } else {
            for (int c = 0; c < strip.count; c++)
                scaled[c] = DOWN(sums[c] * first[c]);
        }
        for (int c = 0; c < strip.count; c++)
            term[c] = DOWN(sums[c]);
        put_row(db + t * db_step, term, (size_t)strip.count * sizeof *term, job->stream);
        put_row(da + t * da_step, scaled, (size_t)strip.count * sizeof *scaled, job->stream);
    }
    finish_rows(job->stream);
}

ALWAYS void NAME(gradient_rows)(const struct scan_job *job, struct scan_strip strip, int rows)
{
    int64_t g_step, a_step, h_step, da_step, db_step, length = job->shape->length;
    const ELEMENT *g[STRIP_ROWS], *a[STRIP_ROWS], *h[STRIP_ROWS];
    ELEMENT *da[STRIP_ROWS], *db[STRIP_ROWS];
    STATE first[STRIP_ROWS], sums[STRIP_ROWS];
    for (int r = 0; r < rows; r++) {
        g[r] = NAME(place)(job->x, job, strip, r, &g_step);
        a[r] = NAME(place)(job->factors, job, strip, r, &a_step);
        h[r] = NAME(place)(job->states, job, strip, r, &h_step);
        da[r] = NAME(place)(job->da, job, strip, r, &da_step);
        db[r] = NAME(place)(job->y, job, strip, r, &db_step);
        sums[r] = UP(g[r][(length - 1) * g_step]);
    }
    NAME(begin)(job, strip, first, 0);
    for (int64_t t = length - 1; t >= 0; t--)
        for (int r = 0; r < rows; r++) {
            if (t < length - 1)
                sums[r] = UP(a[r][(t + 1) * a_step]) * sums[r] + UP(g[r][t * g_step]);
            STATE entered = t ? UP(h[r][(t - 1) * h_step]) : first[r];
            db[r][t * db_step] = DOWN(sums[r]);
            da[r][t * da_step] = DOWN(sums[r] * entered);
        }
}

static void NAME(gradient)(const struct scan_job *job, struct scan_strip strip)
{
    if (job->shape->inner != 1) {
        NAME(gradient_columns)(job, strip);
        return;
    }
    if (strip.count == STRIP_ROWS) {
        NAME(gradient_rows)(job, strip, STRIP_ROWS);
        return;
    }
    for (int r = 0; r < strip.count; r++)
        NAME(gradient_rows)(job, (struct scan_strip){strip.outer + r, strip.inner, 1}, 1);
}

#endif

#undef IS_NAN
#undef TYPE_NAME
#undef ELEMENT
#undef SUM
#undef STATE
#undef UP
#undef DOWN
