/* Decodes a blob that may be damaged: it checks all values before use.
 *
 * The header must equal the one recomputed from its own parameters, the directory must partition
 * the payload, and every tile checks its record's length before it reads (FORMAT.md, section 12).
 * So no access is outside the blob or the output, whatever the bytes are. */
#include <string.h>

#include "ancf.h"
#include "blob.h"
#include "checksum.h"
#include "parallel.h"

#define MIN_TILES 64

struct decoding {
    const struct kernels *kernels;
    const uint8_t *blob;
    uint8_t *dst;
    int threads;
    struct plan plan;
    struct coder coder;
};

struct range {
    const struct decoding *job;
    uint64_t first, last; /* tiles */
    uint64_t sum;         /* checksum columns of the output */
    int corrupt;
};

static uint64_t tile_elements(const struct ancf_header *header, uint64_t tile)
{
    uint64_t left = element_count(header) - tile * ANCF_TILE;
    return left < ANCF_TILE ? left : ANCF_TILE;
}

static uint64_t record_offset(const struct decoding *job, uint64_t tile)
{
    uint32_t units;
    memcpy(&units, job->blob + directory_offset(&job->plan.header) + 4 * tile, sizeof units);
    return (uint64_t)units * 8;
}

/* Decodes a tile of a mode without records. */
static void decode_flat(const struct decoding *job, uint64_t tile, uint8_t *out)
{
    const struct ancf_header *header = &job->plan.header;
    unsigned log2 = element_log2(header), count = (unsigned)tile_elements(header, tile);
    uint8_t plane[ANCF_TILE / 8] = {0};
    if (header->mode == ANCF_CONSTANT) {
        job->kernels->spread[log2](header->fill, count, out);
        return;
    }
    memcpy(plane, job->blob + header->fixed_offset + tile * sizeof plane, (count + 7) / 8);
    job->kernels->unpack_booleans[log2](plane, count, out);
}

static int decode_tiled(const struct decoding *job, uint64_t tile, uint8_t *out)
{
    const struct ancf_header *header = &job->plan.header;
    uint64_t start = record_offset(job, tile), end = record_offset(job, tile + 1);
    if (start > end || end > header->payload_bytes)
        return -1;
    return job->kernels->decode_tile[element_log2(header)](
        &job->coder,
        job->blob + header->fixed_offset + tile * block_bytes(header, ANCF_TILE),
        job->blob + header->payload_offset + start, end - start,
        (unsigned)tile_elements(header, tile), out);
}

static void decode_range(void *item)
{
    struct range *range = item;
    const struct decoding *job = range->job;
    const struct ancf_header *header = &job->plan.header;
    uint64_t tile_bytes = (uint64_t)ANCF_TILE << element_log2(header);
    for (uint64_t tile = range->first; tile < range->last; tile++) {
        uint8_t *out = job->dst + tile * tile_bytes;
        if (!has_tiles(header)) {
            decode_flat(job, tile, out);
        } else if (decode_tiled(job, tile, out) != 0) {
            range->corrupt = 1;
            return;
        }
        if (header->flags & ANCF_FLAG_CHECKSUM)
            range->sum += sum_columns(job->kernels, out,
                                      tile_elements(header, tile) << element_log2(header),
                                      tile * tile_bytes / ANCF_CHUNK_BYTES);
    }
}

static int decode_tiles(const struct decoding *job, uint64_t *sum)
{
    const struct ancf_header *header = &job->plan.header;
    struct range ranges[MAX_THREADS];
    uint64_t tiles = ancf_up(element_count(header), ANCF_TILE) / ANCF_TILE;
    unsigned count = worthwhile_threads(job->threads, tiles, MIN_TILES);
    if (has_tiles(header) &&
        (record_offset(job, 0) != 0 || record_offset(job, tiles) != header->payload_bytes))
        return STORM_CORRUPT;
    for (unsigned i = 0; i < count; i++)
        ranges[i] = (struct range){job, tiles * i / count, tiles * (i + 1) / count, 0, 0};
    run_parallel(decode_range, ranges, sizeof *ranges, count);
    for (unsigned i = 0; i < count; i++) {
        if (ranges[i].corrupt)
            return STORM_CORRUPT;
        *sum += ranges[i].sum;
    }
    return STORM_OK;
}

static int decode_body(struct decoding *job, uint64_t *sum)
{
    const struct ancf_header *header = &job->plan.header;
    if (header->mode == ANCF_RAW) {
        *sum = copy_parallel(job->kernels, job->dst, job->blob + ANCF_HEADER_BYTES,
                             header->raw_nbytes, header->flags & ANCF_FLAG_CHECKSUM,
                             job->threads);
        return STORM_OK;
    }
    if (has_dictionary_apart(header))
        memcpy(job->plan.dictionary, job->blob + ANCF_HEADER_BYTES,
               header->dict_count * sizeof *job->plan.dictionary);
    make_coder(&job->plan, &job->coder);
    return decode_tiles(job, sum);
}

int storm_ancf_decode(const void *blob, uint64_t blob_bytes, void *dst, uint64_t dst_bytes,
                      const struct storm_ancf_options *options)
{
    struct decoding job = {.kernels = kernels_for(options->isa), .blob = blob, .dst = dst,
                           .threads = options->threads};
    const struct ancf_header *header = &job.plan.header;
    uint64_t sum = 0;
    if (job.kernels == NULL)
        return STORM_UNSUPPORTED;
    if (load_header(blob, blob_bytes, &job.plan.header) != STORM_OK)
        return STORM_CORRUPT;
    if (header->raw_nbytes != dst_bytes)
        return STORM_CORRUPT;
    int status = decode_body(&job, &sum);
    if (status == STORM_OK && (header->flags & ANCF_FLAG_CHECKSUM) &&
        finish_checksum(sum, header->raw_nbytes) != header->checksum)
        return STORM_CORRUPT;
    return status;
}
