/* The modes that code symbols: window, truncated and sparse (FORMAT.md, sections 4 to 6).
 *
 * Section 4 splits an element into symbol and residue after a rotation: `v` below is always the
 * rotated element, so residue and symbol are its low and high bits. Included by width_template.h
 * only, which defines T, FN and BITS. */

/* -- Shapes ------------------------------------------------------------------------------------- */

/* How an element splits. The loops over elements are compiled for each common shape of 16 bits,
 * since compilers use 16-bit lanes only for shifts by constants. */
#if BITS == 16
#define WITH_SHAPE(c, call)                                                                       \
    if ((c)->rotate && (c)->residue_bits == 8) { /* bfloat16, exponent */                         \
        const struct shape shape = {1, 0, 8, 8};                                                  \
        call;                                                                                     \
    } else if ((c)->signs_apart && (c)->residue_bits == 7) { /* bfloat16 without sign */          \
        const struct shape shape = {0, 0, 7, 8};                                                  \
        call;                                                                                     \
    } else if (!(c)->rotate && (c)->residue_bits == 7) { /* bfloat16, joint */                    \
        const struct shape shape = {0, 0, 7, 9};                                                  \
        call;                                                                                     \
    } else if ((c)->rotate) { /* float16, exponent */                                             \
        const struct shape shape = {1, 0, 11, 5};                                                 \
        call;                                                                                     \
    } else { /* float16, joint or without sign */                                                 \
        const struct shape shape = {0, 0, 10, 6};                                                 \
        call;                                                                                     \
    }
#else
#define WITH_SHAPE(c, call)                                                                       \
    {                                                                                             \
        const struct shape shape = {(c)->rotate, BITS >= 32 ? (c)->drop : 0, (c)->residue_bits,   \
                                    (c)->symbol_bits};                                            \
        call;                                                                                     \
    }
#endif

/* -- Encoding: window, truncated, sparse -------------------------------------------------------- */

/* Sets v[0, m) to the elements without dropped bits, rotated if the shape says so; v[m, p) to 0. */
static INLINE void FN(rotate)(const struct shape shape, const ANY *restrict x, unsigned m,
                              unsigned p, T *restrict v)
{
    const unsigned drop = shape.drop, sign = BITS - 1 - drop;
    const T mask = (T)((T)~(T)0 >> drop);
    if (shape.rotate)
        for (unsigned i = 0; i < m; i++) {
            T u = (T)(x[i] >> drop);
            v[i] = (T)(((T)(u << 1) & mask) | (T)(u >> sign));
        }
    else
        for (unsigned i = 0; i < m; i++)
            v[i] = (T)(x[i] >> drop);
    memset(v + m, 0, (p - m) * sizeof *v);
}

/* Marks elements whose dropped bits are not all 0 as escapes, which are stored whole. */
static void FN(escape_undroppable)(const struct coder *c, const ANY *restrict x, unsigned m,
                                   struct codes *codes)
{
    const T low = (T)(((T)1 << c->drop) - 1);
    uint8_t flags[SCRATCH];
    uint64_t undroppable[1][WORDS];
    for (unsigned i = 0; i < m; i++)
        flags[i] = (x[i] & low) != 0;
    memset(flags + m, 0, 64);
    planes_of_bytes(flags, groups_of(m), 1, undroppable);
    for (unsigned g = 0; g < groups_of(m); g++)
        for (unsigned b = 0; b < code_bits(c); b++)
            codes->planes[b][g] |= undroppable[0][g];
}

/* Writes escapes: wide symbols, or whole elements if bits are dropped; see portable_put_bytes. */
static uint8_t *FN(put_escapes)(const struct coder *c, const ANY *x, const T *v,
                                const uint64_t *escapes, unsigned groups, uint8_t *dst)
{
    const unsigned bytes = c->escape_bytes;
    for (unsigned g = 0; g < groups; g++) {
        uint64_t mask = escapes[g];
        uint8_t *end = dst + bytes * (unsigned)__builtin_popcountll(mask);
        do {
            for (unsigned step = 0; step < 4; step++, mask &= mask - 1, dst += bytes) {
                unsigned i = mask ? 64 * g + (unsigned)__builtin_ctzll(mask) : 0;
                store_u64(dst, c->drop ? x[i] : v[i] >> c->residue_bits);
            }
        } while (mask != 0);
        dst = end;
    }
    return dst;
}

/* Writes the planes of residues; sets v, the codes' planes, and symbols of up to 8 bits. */
static INLINE uint8_t *FN(split)(const struct coder *c, const struct shape shape,
                                 const ANY *restrict x, unsigned m, unsigned p, T *restrict v,
                                 uint8_t *restrict symbols, struct codes *codes, uint8_t *planes)
{
    const unsigned groups = groups_of(p), padded = 64 * groups, r = shape.residue_bits;
#if BITS == 16 && defined(split_rotated)
    if (shape.rotate && r == 8) {
        split_rotated(x, m, p, symbols, planes);
        planes_of_symbols(c, 0, symbols, groups, codes->planes);
        clear_pad_codes(codes, code_bits(c), m, groups);
        return planes + p;
    }
#endif
    FN(rotate)(shape, x, m, padded, v);
    uint8_t code[SCRATCH];
    for (unsigned i = 0; i < padded; i++)
        symbols[i] = (uint8_t)(v[i] >> r);
    if (shape.symbol_bits <= 8) {
        planes_of_symbols(c, 0, symbols, groups, codes->planes);
#ifdef LOOKS_UP_SYMBOLS
    } else if (shape.symbol_bits == 9) {
        for (unsigned i = 0; i < padded; i++)
            code[i] = (uint8_t)(v[i] >> (BITS - shape.drop - 1)); /* the sign */
        planes_of_joint_symbols(c, code, symbols, groups, codes->planes);
#endif
    } else {
        for (unsigned i = 0; i < padded; i++)
            code[i] = c->code_of_symbol[(v[i] >> r) % MAX_SYMBOLS];
        planes_of_bytes(code, groups, code_bits(c), codes->planes);
    }
    if (shape.drop)
        FN(escape_undroppable)(c, x, m, codes);
    clear_pad_codes(codes, code_bits(c), m, groups);
    return FN(put_planes)(v, r, p, planes);
}

/* Encodes m elements, padded to p: planes to `planes`, level 2 and escapes to `rest`. */
static uint8_t *FN(put_window)(const struct coder *c, const ANY *x, unsigned m, unsigned p,
                               uint8_t *planes, uint8_t *rest)
{
    T v[SCRATCH];
    uint8_t symbols[SCRATCH];
    struct codes codes;
    unsigned groups = groups_of(p);
    WITH_SHAPE(c, planes = FN(split)(c, shape, x, m, p, v, symbols, &codes, planes))
    find_escapes(c, &codes, groups);
    put_level1(c, &codes, p, planes);
    rest = put_level2(c, &codes, groups, rest);
    if (c->escape_bytes == 1 && c->drop == 0)
        return put_bytes(symbols, codes.escapes, groups, rest);
    return FN(put_escapes)(c, x, v, codes.escapes, groups, rest);
}

static void FN(mark_others)(const ANY *restrict x, unsigned count, T fill, uint64_t *bitmap)
{
    uint8_t flags[ANCF_TILE];
    for (unsigned i = 0; i < count; i++)
        flags[i] = x[i] != fill;
    memset(flags + count, 0, sizeof flags - count);
    planes_of_bytes(flags, WORDS, 1, (uint64_t(*)[WORDS])bitmap);
}

#define MAGNITUDE ((T)((T)~(T)0 >> 1))

/* Sets the bitmap of elements other than +0 and -0, and the plane of all signs. */
static void FN(mark_magnitudes)(const ANY *restrict x, unsigned count, uint64_t planes[2][WORDS])
{
    uint8_t flags[ANCF_TILE];
    for (unsigned i = 0; i < count; i++)
        flags[i] = (uint8_t)(((x[i] & MAGNITUDE) != 0) | (x[i] >> (BITS - 1) << 1));
    memset(flags + count, 0, sizeof flags - count);
    planes_of_bytes(flags, WORDS, 2, planes);
}

static void FN(remove_signs)(T *x, unsigned count)
{
    for (unsigned i = 0; i < count; i++)
        x[i] &= MAGNITUDE;
}

static uint8_t *FN(put_sparse)(const struct coder *c, const ANY *x, unsigned count,
                               uint8_t *fixed, uint8_t *record)
{
    uint64_t planes[2][WORDS]; /* the bitmap, and the signs if they are separate */
    T kept[SCRATCH];
    if (c->signs_apart)
        FN(mark_magnitudes)(x, count, planes);
    else
        FN(mark_others)(x, count, (T)c->fill, planes[0]);
    unsigned m = FN(compress)(x, planes[0], count, kept), p = (unsigned)ancf_up(m, 32);
    if (c->signs_apart) {
        FN(remove_signs)(kept, m);
        memcpy(fixed + bitmap_bytes(c->bitmap, count), planes[1], ancf_up(count, 128) / 8);
    }
    record = put_bitmap(c, planes[0], count, fixed, record);
    return FN(put_window)(c, kept, m, p, record, record + p / 8 * (c->residue_bits + c->k1));
}

/* -- Decoding: window, truncated, sparse ------------------------------------------------------- */

/* Writes escapes over the values that their codes looked up: wide symbols, or whole elements if
 * bits are dropped. `to` has SCRATCH elements, the last of which is never read. */
#define TAKE_ESCAPES(type, to)                                                                    \
    do {                                                                                          \
        type padded[ANCF_TILE + 4];                                                               \
        size_t total = count_ones(escapes, groups);                                               \
        const uint8_t *from = take(rest, total * sizeof(type));                                   \
        const type *next = padded;                                                                \
        if (from == NULL)                                                                         \
            return -1;                                                                            \
        memcpy(padded, from, total * sizeof(type));                                               \
        memset(padded + total, 0, 4 * sizeof(type));                                              \
        for (unsigned g = 0; g < groups; g++) {                                                   \
            uint64_t mask = escapes[g];                                                           \
            const type *end = next + __builtin_popcountll(mask);                                  \
            do {                                                                                  \
                for (unsigned step = 0; step < 4; step++, mask &= mask - 1) {                     \
                    unsigned at = mask ? 64 * g + (unsigned)__builtin_ctzll(mask) : SCRATCH - 1;  \
                    (to)[at] = (__typeof__(*(to)))*next++;                                        \
                }                                                                                 \
            } while (mask != 0);                                                                  \
            next = end;                                                                           \
        }                                                                                         \
    } while (0)

static int FN(take_wide_escapes)(const uint64_t *escapes, unsigned groups, struct reader *rest,
                                 uint16_t *symbols)
{
    TAKE_ESCAPES(uint16_t, symbols);
    return 0;
}

/* The same for symbols that fit a byte: those of elements without sign. */
static int FN(take_wide_escapes_of_bytes)(const uint64_t *escapes, unsigned groups,
                                          struct reader *rest, uint8_t *symbols)
{
    TAKE_ESCAPES(uint16_t, symbols);
    return 0;
}

static int FN(take_whole_escapes)(const uint64_t *escapes, unsigned groups, struct reader *rest,
                                  T *elements)
{
    TAKE_ESCAPES(T, elements);
    return 0;
}
#undef TAKE_ESCAPES

/* Sets out to the elements from symbols and residues: the inverse of split. v is scratch. If bits
 * are dropped, v receives the elements, for the caller to patch, and out is not written. */
static INLINE void FN(join)(const struct shape shape, const uint8_t *restrict symbols,
                            const uint16_t *restrict wide_symbols, const uint8_t *restrict planes,
                            unsigned m, unsigned p, T *restrict v, ANY *restrict out)
{
    const unsigned drop = shape.drop, sign = BITS - 1 - drop, r = shape.residue_bits;
    const int narrow = shape.symbol_bits <= 8, one_plane = r == 8;
    if (!one_plane) {
        for (unsigned i = 0; i < m; i++)
            v[i] = (T)((T)(narrow ? symbols[i] : wide_symbols[i]) << r);
        FN(take_planes)(planes, r, p, m, v);
    }
    for (unsigned i = 0; i < m; i++) {
        T u = one_plane ? (T)((T)(narrow ? symbols[i] : wide_symbols[i]) << r | planes[i]) : v[i];
        u = shape.rotate ? (T)((T)(u >> 1) | (T)((T)(u & 1) << sign)) : u;
        if (drop)
            v[i] = (T)(u << drop);
        else
            out[i] = u;
    }
}

/* Looks up the symbols and replaces those that are escapes. */
static int FN(take_symbols)(const struct coder *c, const struct codes *codes, unsigned groups,
                            struct reader *rest, uint8_t *symbols, uint16_t *wide_symbols)
{
    const uint64_t(*planes)[WORDS] = (const uint64_t(*)[WORDS])codes->planes;
    uint16_t table[CODE_TABLE];
    uint8_t low_bytes[CODE_TABLE];
    fill_symbol_table(c, table);
    if (c->symbol_bits > 8) {
        wide_symbols_of_planes(planes, groups, code_bits(c), table, wide_symbols);
        return c->drop ? 0 : FN(take_wide_escapes)(codes->escapes, groups, rest, wide_symbols);
    }
    for (unsigned i = 0; i < CODE_TABLE; i++)
        low_bytes[i] = (uint8_t)table[i];
    symbols_of_planes(planes, groups, code_bits(c), low_bytes, symbols);
    if (c->drop)
        return 0;
    if (c->escape_bytes == 2)
        return FN(take_wide_escapes_of_bytes)(codes->escapes, groups, rest, symbols);
    uint8_t padded[ANCF_TILE + 64];
    unsigned total = count_ones(codes->escapes, groups);
    const uint8_t *from = take(rest, total);
    if (from == NULL)
        return -1;
    memcpy(padded, from, total);
    memset(padded + total, 0, 64);
    take_bytes(padded, codes->escapes, groups, symbols);
    return 0;
}

/* The inverse of put_window; `rest` is the record from level 2 on. */
static int FN(take_window)(const struct coder *c, const uint8_t *planes, unsigned m, unsigned p,
                           struct reader *rest, ANY *out)
{
    T v[SCRATCH];
    uint8_t symbols[SCRATCH];
    uint16_t wide_symbols[SCRATCH];
    struct codes codes;
    unsigned groups = groups_of(m);
    if (take_codes(c, &codes, planes + p / 8 * c->residue_bits, m, p, rest) != 0 ||
        FN(take_symbols)(c, &codes, groups, rest, symbols, wide_symbols) != 0)
        return -1;
    WITH_SHAPE(c, FN(join)(shape, symbols, wide_symbols, planes, m, p, v, out))
    if (c->drop == 0)
        return 0;
    if (FN(take_whole_escapes)(codes.escapes, groups, rest, v) != 0)
        return -1;
    memcpy(out, v, m * sizeof *v);
    return 0;
}

static int FN(take_sparse)(const struct coder *c, const uint8_t *fixed, struct reader *record,
                           unsigned count, ANY *out)
{
    uint64_t bitmap[WORDS] = {0}, signs[WORDS];
    T kept[SCRATCH];
    if (take_bitmap(c, fixed, record, count, bitmap) != 0)
        return -1;
    unsigned m = count_ones(bitmap, groups_of(count)), p = (unsigned)ancf_up(m, 32);
    const uint8_t *planes = take(record, p / 8 * (size_t)(c->residue_bits + c->k1));
    if (planes == NULL || FN(take_window)(c, planes, m, p, record, kept) != 0)
        return -1;
    memset(kept + m, 0, 64 * sizeof *kept);
    if (c->signs_apart) {
        memcpy(signs, fixed + bitmap_bytes(c->bitmap, count), ancf_up(count, 128) / 8);
        FN(expand_signed)(kept, bitmap, signs, count, out);
    } else {
        FN(expand)(kept, bitmap, count, (T)c->fill, out);
    }
    return 0;
}

#undef WITH_SHAPE
#undef MAGNITUDE
