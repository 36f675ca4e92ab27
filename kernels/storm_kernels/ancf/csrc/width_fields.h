/* Compaction, and fields of k bits as planes (FORMAT.md, section 5), for one element width.
 *
 * Included by width_template.h only, which defines T, FN and BITS. */

/* -- Compaction ------------------------------------------------------------------------------- */

/* Packs the elements that mask selects into out, which has space for SCRATCH elements. */
static inline unsigned FN(portable_compress)(const ANY *restrict x, const uint64_t *mask,
                                             unsigned count, T *restrict out)
{
    T *end = out;
    for (unsigned first = 0; first < count; first += 64) {
        uint64_t word = mask[first / 64];
        unsigned last = first + 64 < count ? first + 64 : count;
        for (unsigned i = first; i < last; i++, word >>= 1) {
            *end = x[i]; /* kept only if the next line advances past it */
            end += word & 1;
        }
    }
    return (unsigned)(end - out);
}

/* The inverse, with `fill` where mask's bit is 0; SCRATCH elements of `kept` must be readable. */
static inline void FN(portable_expand)(const T *restrict kept, const uint64_t *mask,
                                       unsigned count, T fill, ANY *restrict out)
{
    for (unsigned first = 0; first < count; first += 64) {
        uint64_t word = mask[first / 64];
        unsigned last = first + 64 < count ? first + 64 : count;
        for (unsigned i = first; i < last; i++, word >>= 1) {
            const T chosen = (T)(0 - (word & 1)); /* a branch would often be mispredicted */
            out[i] = (T)((*kept & chosen) | (fill & (T)~chosen));
            kept += word & 1;
        }
    }
}

/* Like portable_expand with fill 0, and sets the sign of each element whose bit in `signs` is 1. */
static inline void FN(portable_expand_signed)(const T *restrict kept, const uint64_t *mask,
                                              const uint64_t *signs, unsigned count,
                                              void *restrict out)
{
    ANY *x = out;
    uint64_t planes[1][WORDS];
    uint8_t flags[ANCF_TILE];
    FN(expand)(kept, mask, count, 0, out);
    memcpy(planes, signs, groups_of(count) * sizeof *signs);
    bytes_of_planes((const uint64_t(*)[WORDS])planes, groups_of(count), 1, flags);
    for (unsigned i = 0; i < count; i++)
        x[i] |= (T)((T)flags[i] << (BITS - 1));
}

/* -- planes(values, k, p) of FORMAT.md, section 5 ----------------------------------------------- */

/* Writes the low k bits of v[0, p); v must be readable up to the next multiple of 64. */
static INLINE uint8_t *FN(put_planes)(const T *restrict v, unsigned k, unsigned p, uint8_t *restrict dst)
{
    unsigned b = 0;
#if BITS >= 32
    for (; k - b >= 32; b += 32, dst += 4 * p)
        for (unsigned i = 0; i < p; i++)
            ((any_u32 *)dst)[i] = (uint32_t)(v[i] >> b);
#endif
#if BITS >= 16
    for (; k - b >= 16; b += 16, dst += 2 * p)
        for (unsigned i = 0; i < p; i++)
            ((any_u16 *)dst)[i] = (uint16_t)(v[i] >> b);
#endif
    for (; k - b >= 8; b += 8, dst += p)
        for (unsigned i = 0; i < p; i++)
            dst[i] = (uint8_t)(v[i] >> b);
    if (k > b) {
        uint8_t rest[ANCF_TILE];
        uint64_t planes[8][WORDS];
        for (unsigned i = 0; i < 64 * groups_of(p); i++)
            rest[i] = (uint8_t)(v[i] >> b);
        planes_of_bytes(rest, groups_of(p), k - b, planes);
        for (unsigned plane = 0; plane < k - b; plane++, dst += p / 8)
            memcpy(dst, planes[plane], p / 8);
    }
    return dst;
}

/* Reads k bits from src into the low bits of v[0, m), which must be 0. */
static INLINE void FN(take_planes)(const uint8_t *restrict src, unsigned k, unsigned p, unsigned m,
                            T *restrict v)
{
    unsigned b = 0;
#if BITS >= 32
    for (; k - b >= 32; b += 32, src += 4 * p)
        for (unsigned i = 0; i < m; i++)
            v[i] |= (T)((T)((const any_u32 *)src)[i] << b);
#endif
#if BITS >= 16
    for (; k - b >= 16; b += 16, src += 2 * p)
        for (unsigned i = 0; i < m; i++)
            v[i] |= (T)((T)((const any_u16 *)src)[i] << b);
#endif
    for (; k - b >= 8; b += 8, src += p)
        for (unsigned i = 0; i < m; i++)
            v[i] |= (T)((T)src[i] << b);
    if (k > b) {
        uint8_t rest[ANCF_TILE];
        uint64_t planes[8][WORDS];
        for (unsigned plane = 0; plane < k - b; plane++, src += p / 8)
            load_plane(src, p, planes[plane]);
        bytes_of_planes((const uint64_t(*)[WORDS])planes, groups_of(m), k - b, rest);
        for (unsigned i = 0; i < m; i++)
            v[i] |= (T)((T)rest[i] << b);
    }
}
