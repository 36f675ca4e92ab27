/* The modes without symbols: ternary, values, integer, boolean and constant.
 *
 * Included by width_template.h only, which defines T, FN and BITS. */

/* -- Codes of whole values: ternary, values ------------------------------------------------------ */

static uint8_t *FN(put_whole)(const struct coder *c, const ANY *x, unsigned m, unsigned p,
                              uint8_t *planes, uint8_t *rest)
{
    uint16_t code[SCRATCH];
    for (unsigned i = 0; i < m; i++) {
        code[i] = find_value(c->index, x[i]);
        store_u64(rest, x[i]); /* kept only if the next line advances past it */
        rest += code[i] == c->index->missing ? sizeof(T) : 0;
    }
    memset(code + m, 0, (p - m) * sizeof *code);
    put_planes_u16(code, c->k1, p, planes);
    return rest;
}

static int FN(take_whole)(const struct coder *c, const uint8_t *planes, unsigned m, unsigned p,
                          struct reader *rest, ANY *out)
{
    uint16_t code[SCRATCH] = {0};
    T table[512] = {0};
    const unsigned missing = (1u << c->k1) - 1;
    for (unsigned i = 0; i < c->dict_count; i++)
        table[i] = (T)c->dictionary[i];
    take_planes_u16(planes, c->k1, p, m, code);
    for (unsigned i = 0; i < m; i++) {
        out[i] = table[code[i]];
        if (code[i] == missing) {
            const uint8_t *escape = take(rest, sizeof(T));
            if (escape == NULL)
                return -1;
            memcpy(&out[i], escape, sizeof(T));
        }
    }
    return 0;
}

/* -- Mode integer -------------------------------------------------------------------------------- */

#define INTEGER_HEAD_BYTES 16 /* u64 base, u8 width, 7 zeros */

static uint8_t *FN(put_integers)(const struct coder *c, const ANY *restrict x, unsigned count,
                                 uint8_t *record)
{
    const T flip = c->is_signed ? (T)((T)1 << (BITS - 1)) : 0;
    T v[SCRATCH], least = (T)~(T)0, most = 0;
    unsigned p = (unsigned)ancf_up(count, 32), padded = 64 * groups_of(count);
    for (unsigned i = 0; i < count; i++) {
        T ordered = (T)(x[i] ^ flip);
        least = ordered < least ? ordered : least;
        most = ordered > most ? ordered : most;
    }
    const T base = (T)(least ^ flip), span = (T)(most - least);
    const unsigned width = span == 0 ? 0 : 64 - (unsigned)__builtin_clzll(span);
    for (unsigned i = 0; i < count; i++)
        v[i] = (T)(x[i] - base);
    memset(v + count, 0, (padded - count) * sizeof *v);
    store_u64(record, base);
    store_u64(record + 8, width);
    return FN(put_planes)(v, width, p, record + INTEGER_HEAD_BYTES);
}

static int FN(take_integers)(struct reader *record, unsigned count, ANY *restrict out)
{
    T v[SCRATCH] = {0};
    unsigned p = (unsigned)ancf_up(count, 32);
    const uint8_t *head = take(record, INTEGER_HEAD_BYTES);
    if (head == NULL)
        return -1;
    const T base = (T)load_u64(head);
    const unsigned width = head[8];
    const uint8_t *planes = width > BITS ? NULL : take(record, (size_t)p / 8 * width);
    if (planes == NULL)
        return -1;
    FN(take_planes)(planes, width, p, count, v);
    for (unsigned i = 0; i < count; i++)
        out[i] = (T)(v[i] + base);
    return 0;
}

#undef INTEGER_HEAD_BYTES

/* -- Modes boolean and constant: no records, the caller positions the bytes -------------------- */

static int FN(pack_booleans)(const void *elements, unsigned count, uint8_t *plane)
{
    const ANY *x = elements;
    uint8_t flags[ANCF_TILE];
    uint64_t words[1][WORDS];
    T seen = 0;
    for (unsigned i = 0; i < count; i++) {
        seen |= x[i];
        flags[i] = (uint8_t)x[i];
    }
    if (seen > 1)
        return -1;
    unsigned p = (unsigned)ancf_up(count, 128);
    memset(flags + count, 0, p - count);
    planes_of_bytes(flags, groups_of(p), 1, words);
    memcpy(plane, words, p / 8);
    return 0;
}

static void FN(unpack_booleans)(const uint8_t *plane, unsigned count, void *elements)
{
    ANY *out = elements;
    uint8_t flags[ANCF_TILE];
    uint64_t words[1][WORDS];
    load_plane(plane, (unsigned)ancf_up(count, 128), words[0]);
    bytes_of_planes((const uint64_t(*)[WORDS])words, groups_of(count), 1, flags);
    for (unsigned i = 0; i < count; i++)
        out[i] = flags[i];
}

static int FN(all_equal)(const void *elements, unsigned count, uint64_t fill)
{
    const ANY *x = elements;
    T different = 0;
    for (unsigned i = 0; i < count; i++)
        different |= (T)(x[i] ^ (T)fill);
    return different == 0;
}

static void FN(spread)(uint64_t fill, unsigned count, void *elements)
{
    ANY *out = elements;
    for (unsigned i = 0; i < count; i++)
        out[i] = (T)fill;
}
