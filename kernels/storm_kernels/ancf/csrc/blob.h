/* A blob's header: its geometry, writing it, and trusting one that came from elsewhere.
 *
 * Sizes and offsets are pure functions of mode, dtype, size and code parameters; a decoder only
 * goes on with a header that equals the one recomputed from those. */
#ifndef STORM_BLOB_H
#define STORM_BLOB_H

#include "coder.h"

#define ANCF_MAX_DICTIONARY 512

/* The parameters of a blob: the header's fields, and the entries that do not fit into it. */
struct plan {
    struct ancf_header header;
    uint64_t dictionary[ANCF_MAX_DICTIONARY];
};

/* NULL for an unknown dtype. */
const struct ancf_dtype_info *dtype_info(int dtype);

/* Elements of a tile-wise mode; 1 << the element's log2 size. */
unsigned element_log2(const struct ancf_header *header);
uint64_t element_count(const struct ancf_header *header);

/* Whether the mode's tiles have a directory and records. */
int has_tiles(const struct ancf_header *header);
int has_dictionary_apart(const struct ancf_header *header);

/* Where the directory starts, and a tile's fixed block bytes (F of FORMAT.md, section 5). */
uint64_t directory_offset(const struct ancf_header *header);
uint64_t block_bytes(const struct ancf_header *header, uint64_t count);

/* Sets escape_bytes, tiles, fixed_offset, payload_offset and total_bytes from the rest. */
void lay_out(struct ancf_header *header);

/* Writes the header's check, then all 256 bytes to dst. */
void store_header(struct ancf_header *header, uint8_t *dst);

/* Reads and checks the header of a blob; STORM_OK or STORM_CORRUPT. */
int load_header(const uint8_t *blob, uint64_t blob_bytes, struct ancf_header *header);

/* The coder of a plan; it refers to the plan's dictionary. */
void make_coder(const struct plan *plan, struct coder *coder);

#endif
