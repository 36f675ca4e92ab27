/* See checksum.h. */
#include "checksum.h"

#include <string.h>

#include "ancf.h"
#include "parallel.h"

static uint64_t sum_tail(const struct kernels *kernels, const uint8_t *data, size_t nbytes,
                         uint64_t chunk)
{
    uint8_t padded[ANCF_CHUNK_BYTES] = {0};
    if (nbytes == 0)
        return 0;
    memcpy(padded, data, nbytes);
    return kernels->checksum(padded, 1, chunk);
}

uint64_t sum_columns(const struct kernels *kernels, const uint8_t *data, uint64_t nbytes,
                     uint64_t first_chunk)
{
    uint64_t chunks = nbytes / ANCF_CHUNK_BYTES, whole = chunks * ANCF_CHUNK_BYTES;
    return kernels->checksum(data, chunks, first_chunk) +
           sum_tail(kernels, data + whole, nbytes - whole, first_chunk + chunks);
}

uint64_t copy_sum_columns(const struct kernels *kernels, uint8_t *dst, const uint8_t *data,
                          uint64_t nbytes, uint64_t first_chunk)
{
    uint64_t chunks = nbytes / ANCF_CHUNK_BYTES, whole = chunks * ANCF_CHUNK_BYTES;
    uint64_t sum = kernels->copy_checksum(dst, data, chunks, first_chunk);
    sum += sum_tail(kernels, data + whole, nbytes - whole, first_chunk + chunks);
    memcpy(dst + whole, data + whole, nbytes - whole);
    return sum;
}

struct copy_job {
    const struct kernels *kernels;
    uint8_t *dst;
    const uint8_t *src;
    uint64_t nbytes, first_chunk, sum;
    int wanted;
};

static void copy_piece(void *item)
{
    struct copy_job *job = item;
    job->sum = 0;
    if (job->wanted)
        job->sum = copy_sum_columns(job->kernels, job->dst, job->src, job->nbytes,
                                    job->first_chunk);
    else
        memcpy(job->dst, job->src, job->nbytes);
}

uint64_t copy_parallel(const struct kernels *kernels, uint8_t *dst, const uint8_t *src,
                       uint64_t nbytes, int wanted, int threads)
{
    struct copy_job jobs[MAX_THREADS];
    uint64_t chunks = ancf_up(nbytes, ANCF_CHUNK_BYTES) / ANCF_CHUNK_BYTES, sum = 0;
    unsigned count = worthwhile_threads(threads, nbytes, 1 << 20);
    for (unsigned i = 0; i < count; i++) {
        uint64_t first = chunks * i / count, start = first * ANCF_CHUNK_BYTES;
        uint64_t end = i + 1 < count ? chunks * (i + 1) / count * ANCF_CHUNK_BYTES : nbytes;
        jobs[i] = (struct copy_job){kernels, dst + start, src + start, end - start, first, 0,
                                    wanted};
    }
    run_parallel(copy_piece, jobs, sizeof *jobs, count);
    for (unsigned i = 0; i < count; i++)
        sum += jobs[i].sum;
    return sum;
}

uint64_t storm_ancf_checksum(const void *data, uint64_t nbytes, int isa)
{
    const struct kernels *kernels = kernels_for(isa);
    if (kernels == NULL)
        kernels = &kernels_portable;
    return finish_checksum(sum_columns(kernels, data, nbytes, 0), nbytes);
}

uint64_t storm_ancf_copy_checksum(void *dst, const void *src, uint64_t nbytes, int isa)
{
    const struct kernels *kernels = kernels_for(isa);
    if (kernels == NULL)
        kernels = &kernels_portable;
    return finish_checksum(copy_sum_columns(kernels, dst, src, nbytes, 0), nbytes);
}
