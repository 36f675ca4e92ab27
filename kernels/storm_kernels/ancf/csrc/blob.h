/* A blob's header: computes its geometry, writes it, and checks one that came from elsewhere.
 *
 * Sizes and offsets are pure functions of mode, dtype, size and code parameters. A decoder accepts
 * only a header that equals the one recomputed from these parameters. */
#ifndef STORM_BLOB_H
#define STORM_BLOB_H

#include "coder.h"

#define ANCF_MAX_DICTIONARY 512

/* The parameters of a blob: the header's fields, and the dictionary entries that do not fit it. */
struct plan {
    struct ancf_header header;
    uint64_t dictionary[ANCF_MAX_DICTIONARY];
};

/* Returns NULL for an unknown dtype. */
const struct ancf_dtype_info *dtype_info(int dtype);

/* The log2 of an element's bytes, and the number of elements. */
unsigned element_log2(const struct ancf_header *header);
uint64_t element_count(const struct ancf_header *header);

/* Whether blobs of the mode have a directory and records; a dictionary after the header. */
int has_tiles(const struct ancf_header *header);
int has_dictionary_apart(const struct ancf_header *header);

/* The directory's offset, and the bytes of a tile's fixed block (F of FORMAT.md, section 5). */
uint64_t directory_offset(const struct ancf_header *header);
uint64_t block_bytes(const struct ancf_header *header, uint64_t count);

/* Sets escape_bytes, tiles, fixed_offset, payload_offset and total_bytes from the other fields. */
void lay_out(struct ancf_header *header);

/* Sets the header's check, then writes all 256 bytes to dst. */
void store_header(struct ancf_header *header, uint8_t *dst);

/* Reads and checks the header of a blob; returns STORM_OK or STORM_CORRUPT. */
int load_header(const uint8_t *blob, uint64_t blob_bytes, struct ancf_header *header);

/* Makes the coder of a plan; it points to the plan's dictionary. */
void make_coder(const struct plan *plan, struct coder *coder);

#endif
