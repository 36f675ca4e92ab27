/* Encodes a tensor: chooses a plan, codes tile ranges on one or more threads, falls back to raw.
 *
 * A blob never exceeds 256 + nbytes: otherwise the tensor is stored raw, by rules that do not
 * depend on how the work was split (FORMAT.md, section 9). */
#include <stdlib.h>
#include <string.h>

#include "ancf.h"
#include "checksum.h"
#include "choose.h"
#include "parallel.h"
#include "values.h"

/* The minimum number of tiles for which starting a thread pays. */
#define MIN_TILES 64

struct encoding {
    const struct kernels *kernels;
    const struct storm_ancf_options *options;
    const uint8_t *src;
    uint8_t *dst;
    uint64_t limit;
    struct plan plan;
    struct coder coder;
    struct value_index index; /* set if the plan has a dictionary of whole values */
    uint8_t code_of_symbol[MAX_SYMBOLS]; /* set if it has one of symbols */
};

/* A range of tiles, coded by one thread. The first range's records are written to their final
 * place; the other ranges write to their own buffers, since the final places are only known
 * later. */
struct range {
    const struct encoding *job;
    uint64_t first, last; /* tiles */
    uint8_t *records;
    uint64_t room, used;  /* bytes of records */
    uint64_t base;        /* bytes of records of earlier ranges */
    uint64_t sum;         /* sum of checksum columns */
    int overflowed;
};

static uint64_t tile_elements(const struct ancf_header *header, uint64_t tile)
{
    uint64_t left = element_count(header) - tile * ANCF_TILE;
    return left < ANCF_TILE ? left : ANCF_TILE;
}

static void put_directory(const struct encoding *job, uint64_t entry, uint64_t offset)
{
    uint32_t units = (uint32_t)(offset / 8);
    memcpy(job->dst + directory_offset(&job->plan.header) + 4 * entry, &units, sizeof units);
}

static void encode_one(struct range *range, uint64_t tile)
{
    const struct encoding *job = range->job;
    const struct ancf_header *header = &job->plan.header;
    uint8_t spill[MAX_RECORD_BYTES + RECORD_SLACK]; /* used if the output may be too short */
    unsigned log2 = element_log2(header);
    const uint8_t *elements = job->src + (tile * ANCF_TILE << log2);
    uint8_t *fixed = job->dst + header->fixed_offset + tile * block_bytes(header, ANCF_TILE);
    size_t bound = record_bound(&job->coder) + RECORD_SLACK;
    uint8_t *record = range->room - range->used >= bound ? range->records + range->used : spill;
    size_t bytes = job->kernels->encode_tile[log2](
        &job->coder, elements, (unsigned)tile_elements(header, tile), fixed, record);
    if (bytes > range->room - range->used) {
        range->overflowed = 1;
        return;
    }
    if (record == spill)
        memcpy(range->records + range->used, spill, bytes);
    range->used += bytes;
    put_directory(job, tile + 1, range->used);
}

static void encode_range(void *item)
{
    struct range *range = item;
    const struct encoding *job = range->job;
    unsigned log2 = element_log2(&job->plan.header);
    uint64_t tile_chunks = ((uint64_t)ANCF_TILE << log2) / ANCF_CHUNK_BYTES;
    for (uint64_t tile = range->first; tile < range->last && !range->overflowed; tile++) {
        if (job->options->checksum)
            range->sum += sum_columns(job->kernels, job->src + (tile * ANCF_TILE << log2),
                                      tile_elements(&job->plan.header, tile) << log2,
                                      tile * tile_chunks);
        encode_one(range, tile);
    }
}

/* The second step of all ranges but the first: copies records to their final place. */
static void place_range(void *item)
{
    struct range *range = item;
    const struct encoding *job = range->job;
    const uint8_t *directory = job->dst + directory_offset(&job->plan.header);
    if (range->first == 0)
        return;
    memcpy(job->dst + job->plan.header.payload_offset + range->base, range->records, range->used);
    for (uint64_t tile = range->first; tile < range->last; tile++) {
        uint32_t units;
        memcpy(&units, directory + 4 * (tile + 1), sizeof units);
        put_directory(job, tile + 1, (uint64_t)units * 8 + range->base);
    }
}

static int64_t encode_raw(struct encoding *job)
{
    const struct ancf_header *chosen = &job->plan.header;
    struct ancf_header header = {.mode = ANCF_RAW, .dtype = chosen->dtype,
                                 .flags = chosen->flags, .raw_nbytes = chosen->raw_nbytes};
    lay_out(&header);
    uint64_t sum = copy_parallel(job->kernels, job->dst + ANCF_HEADER_BYTES, job->src,
                                 header.raw_nbytes, job->options->checksum, job->options->threads);
    if (job->options->checksum)
        header.checksum = finish_checksum(sum, header.raw_nbytes);
    store_header(&header, job->dst);
    return (int64_t)header.total_bytes;
}

/* Clears dictionary and directory, then writes the dictionary's entries. */
static void clear_front(const struct encoding *job)
{
    const struct ancf_header *header = &job->plan.header;
    memset(job->dst + ANCF_HEADER_BYTES, 0, header->fixed_offset - ANCF_HEADER_BYTES);
    if (has_dictionary_apart(header))
        memcpy(job->dst + ANCF_HEADER_BYTES, job->plan.dictionary,
               header->dict_count * sizeof *job->plan.dictionary);
}

/* Splits the tiles; returns STORM_NO_MEMORY if a buffer cannot be allocated. */
static int make_ranges(const struct encoding *job, struct range *ranges, unsigned count)
{
    const struct ancf_header *header = &job->plan.header;
    uint64_t room = job->limit - header->payload_offset;
    room = room < ANCF_PAYLOAD_END ? room : ANCF_PAYLOAD_END - 8;
    for (unsigned i = 0; i < count; i++) {
        struct range *range = &ranges[i];
        *range = (struct range){.job = job, .first = (uint64_t)header->tiles * i / count,
                                .last = (uint64_t)header->tiles * (i + 1) / count, .room = room};
        range->records = job->dst + header->payload_offset;
        if (i == 0)
            continue;
        uint64_t bound = (range->last - range->first) * record_bound(&job->coder) + RECORD_SLACK;
        range->room = bound < room ? bound : room;
        range->records = malloc(range->room);
        if (range->records == NULL)
            return STORM_NO_MEMORY;
    }
    return STORM_OK;
}

static void free_ranges(struct range *ranges, unsigned count)
{
    for (unsigned i = 1; i < count; i++)
        free(ranges[i].records);
}

/* Sums the ranges; returns 0 if the blob would be larger than raw. */
static int fits(const struct encoding *job, struct range *ranges, unsigned count,
                uint64_t *payload, uint64_t *sum)
{
    *payload = *sum = 0;
    for (unsigned i = 0; i < count; i++) {
        if (ranges[i].overflowed)
            return 0;
        ranges[i].base = *payload;
        *payload += ranges[i].used;
        *sum += ranges[i].sum;
    }
    return *payload < ANCF_PAYLOAD_END &&
           *payload <= job->limit - job->plan.header.payload_offset;
}

static int64_t encode_tiles(struct encoding *job)
{
    struct ancf_header *header = &job->plan.header;
    struct range ranges[MAX_THREADS];
    unsigned count = worthwhile_threads(job->options->threads, header->tiles, MIN_TILES);
    uint64_t payload, sum;
    memset(ranges, 0, count * sizeof *ranges);
    if (make_ranges(job, ranges, count) != STORM_OK) {
        free_ranges(ranges, count);
        return STORM_NO_MEMORY;
    }
    clear_front(job);
    run_parallel(encode_range, ranges, sizeof *ranges, count);
    int small_enough = fits(job, ranges, count, &payload, &sum);
    if (small_enough)
        run_parallel(place_range, ranges, sizeof *ranges, count);
    free_ranges(ranges, count);
    if (!small_enough)
        return encode_raw(job);
    header->payload_bytes = payload;
    header->total_bytes = header->payload_offset + payload;
    if (job->options->checksum)
        header->checksum = finish_checksum(sum, header->raw_nbytes);
    store_header(header, job->dst);
    return (int64_t)header->total_bytes;
}

/* Completes a blob of a mode without tiles: only its header is missing. */
static int64_t finish_flat(struct encoding *job)
{
    struct ancf_header *header = &job->plan.header;
    if (job->options->checksum)
        header->checksum = finish_checksum(
            sum_columns(job->kernels, job->src, header->raw_nbytes, 0), header->raw_nbytes);
    store_header(header, job->dst);
    return (int64_t)header->total_bytes;
}

static int64_t encode_booleans(struct encoding *job)
{
    struct ancf_header *header = &job->plan.header;
    uint64_t n = element_count(header);
    unsigned log2 = element_log2(header);
    uint8_t plane[ANCF_TILE / 8];
    for (uint64_t first = 0; first < n; first += ANCF_TILE) {
        unsigned count = (unsigned)tile_elements(header, first / ANCF_TILE);
        if (job->kernels->pack_booleans[log2](job->src + (first << log2), count, plane) != 0)
            return encode_raw(job);
        memcpy(job->dst + header->fixed_offset + first / 8, plane, ancf_up(count, 128) / 8);
    }
    return finish_flat(job);
}

static int is_constant(const struct encoding *job)
{
    const struct ancf_header *header = &job->plan.header;
    unsigned log2 = element_log2(header);
    for (uint64_t first = 0; first < element_count(header); first += ANCF_TILE)
        if (!job->kernels->all_equal[log2](job->src + (first << log2),
                                           (unsigned)tile_elements(header, first / ANCF_TILE),
                                           header->fill))
            return 0;
    return 1;
}

static void plan_encoding(struct encoding *job, struct sample *sample)
{
    const struct storm_ancf_options *options = job->options;
    struct ancf_header *header = &job->plan.header;
    take_sample(sample, header->dtype, job->src, element_count(header));
    choose_plan(sample, options->mode, options->dense, options->policy, 0, &job->plan);
    if (header->mode == ANCF_CONSTANT && !is_constant(job))
        choose_plan(sample, ANCF_SPARSE, 1, options->policy, header->fill, &job->plan);
    lay_out(header);
}

static void prepare_lookup(struct encoding *job)
{
    const struct ancf_header *header = &job->plan.header;
    struct coder *coder = &job->coder;
    if (has_dictionary_apart(header)) {
        index_values(job->plan.dictionary, header->dict_count, (uint16_t)((1u << header->k1) - 1),
                     &job->index);
        coder->index = &job->index;
        return;
    }
    memset(job->code_of_symbol, (1 << code_bits(coder)) - 1, sizeof job->code_of_symbol);
    for (unsigned i = 0; i < header->dict_count; i++)
        job->code_of_symbol[header->window[i]] = (uint8_t)code_of_entry(coder, i);
    coder->code_of_symbol = job->code_of_symbol;
}

static int64_t encode_planned(struct encoding *job)
{
    const struct ancf_header *header = &job->plan.header;
    if (header->mode == ANCF_RAW || header->payload_offset > job->limit)
        return encode_raw(job);
    if (header->mode == ANCF_CONSTANT)
        return finish_flat(job);
    if (header->mode == ANCF_BOOLEAN)
        return encode_booleans(job);
    make_coder(&job->plan, &job->coder);
    prepare_lookup(job);
    return encode_tiles(job);
}

static int is_acceptable(uint64_t nbytes, int dtype, const struct storm_ancf_options *options)
{
    const struct ancf_dtype_info *info = dtype_info(dtype);
    return info != NULL && nbytes % (info->bits / 8) == 0 && nbytes < UINT64_C(1) << 44 &&
           options->mode >= ANCF_AUTO && options->mode < ANCF_MODES && options->policy >= 0 &&
           options->policy <= 2;
}

int64_t storm_ancf_encode(const void *src, uint64_t nbytes, int dtype, void *dst,
                          uint64_t dst_bytes, const struct storm_ancf_options *options)
{
    struct encoding job = {.kernels = kernels_for(options->isa), .options = options, .src = src,
                           .dst = dst, .limit = ANCF_HEADER_BYTES + nbytes};
    if (!is_acceptable(nbytes, dtype, options))
        return STORM_BAD_ARGUMENT;
    if (job.kernels == NULL)
        return STORM_UNSUPPORTED;
    if (dst_bytes < job.limit)
        return STORM_TOO_SMALL;
    job.plan.header.dtype = (uint8_t)dtype;
    job.plan.header.flags = options->checksum ? ANCF_FLAG_CHECKSUM : 0;
    job.plan.header.raw_nbytes = nbytes;
    if (nbytes == 0 || options->mode == ANCF_RAW)
        return encode_raw(&job);
    struct sample *sample = malloc(sizeof *sample);
    if (sample == NULL)
        return STORM_NO_MEMORY;
    plan_encoding(&job, sample);
    free(sample);
    return encode_planned(&job);
}
