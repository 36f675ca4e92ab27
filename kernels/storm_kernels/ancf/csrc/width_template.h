/* The part of tile_template.h that depends on the element's width; included with BITS = 8 to 64. */

#define T JOIN(JOIN(uint, BITS), _t)
#define FN(name) JOIN(name##_u, BITS)
#define ANY FN(any)
#define SCRATCH (ANCF_TILE + 64) /* compress and expand work in whole vectors */

/* Elements in memory: at any address, and aliasing any type of the caller. */
typedef T ANY __attribute__((aligned(1), may_alias));

#include "width_fields.h"
#include "width_window.h"
#include "width_values.h"

static size_t FN(encode_tile)(const struct coder *c, const void *elements, unsigned count,
                              uint8_t *fixed, uint8_t *record)
{
    unsigned p = (unsigned)ancf_up(count, 128);
    uint8_t *end;
    if (c->mode == ANCF_INTEGER)
        end = FN(put_integers)(c, elements, count, record);
    else if (c->bitmap)
        end = FN(put_sparse)(c, elements, count, fixed, record);
    else if (c->index)
        end = FN(put_whole)(c, elements, count, p, fixed, record);
    else
        end = FN(put_window)(c, elements, count, p, fixed, record);
    store_u64(end, 0);
    return ancf_up((uint64_t)(end - record), 8);
}

static int FN(decode_tile)(const struct coder *c, const uint8_t *fixed, const uint8_t *record,
                           size_t record_bytes, unsigned count, void *elements)
{
    struct reader from = {record, record_bytes};
    unsigned p = (unsigned)ancf_up(count, 128);
    if (c->mode == ANCF_INTEGER)
        return FN(take_integers)(&from, count, elements);
    if (c->bitmap)
        return FN(take_sparse)(c, fixed, &from, count, elements);
    if (c->dictionary)
        return FN(take_whole)(c, fixed, count, p, &from, elements);
    return FN(take_window)(c, fixed, count, p, &from, elements);
}

#undef T
#undef FN
#undef ANY
#undef SCRATCH
