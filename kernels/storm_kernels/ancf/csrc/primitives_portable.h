/* The primitives of tile_template.h in plain C, on eight bytes at a time in a 64-bit register.
 *
 * An instruction set with faster versions defines the same names in its own file. */
#ifndef STORM_PRIMITIVES_PORTABLE_H
#define STORM_PRIMITIVES_PORTABLE_H

#include <string.h>

#include "coder.h"

#define INLINE inline __attribute__((always_inline))

static inline uint64_t load_u64(const void *from)
{
    uint64_t word;
    memcpy(&word, from, sizeof word);
    return word;
}

static inline void store_u64(void *to, uint64_t word) { memcpy(to, &word, sizeof word); }

#define EACH_BYTE UINT64_C(0x0101010101010101)

/* Bits 0, 8, 16, ... of x as one byte: 2^(56-7i) moves bit 8i to bit 56+i, without carries. */
static inline uint64_t gather_bits(uint64_t x)
{
    return ((x & EACH_BYTE) * UINT64_C(0x0102040810204080)) >> 56;
}

/* The inverse: byte i of the result is bit i of the byte x. */
static inline uint64_t scatter_bits(uint64_t x)
{
    uint64_t one_bit_a_byte = (x * EACH_BYTE) & UINT64_C(0x8040201008040201);
    return ((one_bit_a_byte + UINT64_C(0x7F7F7F7F7F7F7F7F)) >> 7) & EACH_BYTE;
}

/* Sets planes[b][g] to bit b of each of the 64 bytes of group g. */
static inline void portable_planes_of_bytes(const uint8_t *bytes, unsigned groups, unsigned bits,
                                            uint64_t planes[][WORDS])
{
    for (unsigned g = 0; g < groups; g++) {
        uint64_t word[8] = {0};
        for (unsigned j = 0; j < 8; j++) {
            uint64_t eight = load_u64(bytes + 64 * g + 8 * j);
            for (unsigned b = 0; b < bits; b++)
                word[b] |= gather_bits(eight >> b) << (8 * j);
        }
        for (unsigned b = 0; b < bits; b++)
            planes[b][g] = word[b];
    }
}

/* The inverse: sets bytes whose bits from `bits` on are 0. */
static inline void portable_bytes_of_planes(const uint64_t planes[][WORDS], unsigned groups,
                                            unsigned bits, uint8_t *bytes)
{
    for (unsigned g = 0; g < groups; g++)
        for (unsigned j = 0; j < 8; j++) {
            uint64_t eight = 0;
            for (unsigned b = 0; b < bits; b++)
                eight |= scatter_bits((planes[b][g] >> (8 * j)) & 0xFF) << b;
            store_u64(bytes + 64 * g + 8 * j, eight);
        }
}

/* Sets planes to the codes of symbols 256 * half + symbols[i]. */
static inline void portable_planes_of_symbols(const struct coder *c, unsigned half,
                                              const uint8_t *symbols, unsigned groups,
                                              uint64_t planes[][WORDS])
{
    uint8_t codes[ANCF_TILE];
    for (unsigned i = 0; i < 64 * groups; i++)
        codes[i] = c->code_of_symbol[256 * half + symbols[i]];
    portable_planes_of_bytes(codes, groups, code_bits(c), planes);
}

/* The inverse; table maps codes of up to 5 bits to symbols. */
static inline void portable_symbols_of_planes(const uint64_t planes[][WORDS], unsigned groups,
                                              unsigned bits, const uint8_t table[CODE_TABLE],
                                              uint8_t *symbols)
{
    portable_bytes_of_planes(planes, groups, bits, symbols);
    for (unsigned i = 0; i < 64 * groups; i++)
        symbols[i] = table[symbols[i]];
}

/* Appends the bytes that mask selects to dst, which has 64 spare bytes; returns the end.
 *
 * Most words select few bytes, but the number is random. So the first four are written without a
 * condition, to avoid branch mispredictions. */
static inline uint8_t *portable_put_bytes(const uint8_t *bytes, const uint64_t *mask,
                                          unsigned groups, uint8_t *dst)
{
    for (unsigned g = 0; g < groups; g++) {
        uint64_t word = mask[g];
        uint8_t *end = dst + __builtin_popcountll(word);
        do {
            for (unsigned step = 0; step < 4; step++, word &= word - 1)
                *dst++ = bytes[word ? 64 * g + (unsigned)__builtin_ctzll(word) : 0];
        } while (word != 0);
        dst = end;
    }
    return dst;
}

/* The inverse: `from` has 64 spare readable bytes. `bytes` has one more element after the last
 * group, which receives garbage. */
static inline void portable_take_bytes(const uint8_t *from, const uint64_t *mask, unsigned groups,
                                       uint8_t *bytes)
{
    for (unsigned g = 0; g < groups; g++) {
        uint64_t word = mask[g];
        const uint8_t *end = from + __builtin_popcountll(word);
        do {
            for (unsigned step = 0; step < 4; step++, word &= word - 1)
                bytes[word ? 64 * g + (unsigned)__builtin_ctzll(word) : 64 * groups] = *from++;
        } while (word != 0);
        from = end;
    }
}

/* The moves that pack the bits selected by a mask, in steps of 1, 2, 4, ... 32 positions: the
 * parallel suffix method of Hacker's Delight, section 7-4. Computed once for all planes of a
 * word. */
struct portable_mover {
    uint64_t mask;
    uint64_t moves[6];
};

static inline struct portable_mover portable_make_mover(uint64_t mask)
{
    struct portable_mover mover = {.mask = mask};
    uint64_t unset_below = ~mask << 1; /* 0 bits to the right are counted, in parity */
    for (unsigned step = 0; step < 6; step++) {
        uint64_t parity = unset_below ^ (unset_below << 1);
        parity ^= parity << 2;
        parity ^= parity << 4;
        parity ^= parity << 8;
        parity ^= parity << 16;
        parity ^= parity << 32;
        mover.moves[step] = parity & mask;
        mask = (mask ^ mover.moves[step]) | (mover.moves[step] >> (1u << step));
        unset_below &= ~parity;
    }
    return mover;
}

static inline uint64_t portable_extract_bits(uint64_t x, const struct portable_mover *mover)
{
    x &= mover->mask;
    for (unsigned step = 0; step < 6; step++) {
        uint64_t moving = x & mover->moves[step];
        x = (x ^ moving) | (moving >> (1u << step));
    }
    return x;
}

static inline uint64_t portable_deposit_bits(uint64_t x, const struct portable_mover *mover)
{
    for (unsigned step = 6; step-- > 0;) {
        uint64_t moved = x << (1u << step);
        x = (x & ~mover->moves[step]) | (moved & mover->moves[step]);
    }
    return x & mover->mask;
}

/* Packs the 32 even bits of x, in steps of 1, 2, 4, 8 and 16 bits; spread_to_even_bits unpacks. */
static inline uint64_t pack_even_bits(uint64_t x)
{
    x &= UINT64_C(0x5555555555555555);
    x = (x | x >> 1) & UINT64_C(0x3333333333333333);
    x = (x | x >> 2) & UINT64_C(0x0F0F0F0F0F0F0F0F);
    x = (x | x >> 4) & UINT64_C(0x00FF00FF00FF00FF);
    x = (x | x >> 8) & UINT64_C(0x0000FFFF0000FFFF);
    return (x | x >> 16) & UINT64_C(0x00000000FFFFFFFF);
}

static inline uint64_t spread_to_even_bits(uint64_t x)
{
    x = (x | x << 16) & UINT64_C(0x0000FFFF0000FFFF);
    x = (x | x << 8) & UINT64_C(0x00FF00FF00FF00FF);
    x = (x | x << 4) & UINT64_C(0x0F0F0F0F0F0F0F0F);
    x = (x | x << 2) & UINT64_C(0x3333333333333333);
    return (x | x << 1) & UINT64_C(0x5555555555555555);
}

static const uint64_t checksum_keys[16] = ANCF_K;

static inline uint64_t checksum_mix(uint64_t sum, uint64_t column)
{
    uint64_t h = sum ^ (column * ANCF_C1);
    h ^= h >> 32;
    h *= ANCF_C2;
    return h ^ (h >> 29);
}

static inline uint64_t portable_chunk_checksum(const uint8_t *chunk, uint64_t number)
{
    uint64_t total = 0;
    for (unsigned column = 0; column < ANCF_CHUNK_COLUMNS; column++) {
        uint64_t sum = 0;
        for (unsigned row = 0; row < 4; row++) {
            uint32_t word[4];
            memcpy(word, chunk + 512 * row + 16 * column, sizeof word);
            for (unsigned q = 0; q < 4; q++)
                sum += word[q] * checksum_keys[4 * row + q];
        }
        total += checksum_mix(sum, number * ANCF_CHUNK_COLUMNS + column);
    }
    return total;
}

static inline uint64_t portable_checksum(const uint8_t *data, size_t chunks, uint64_t first_chunk)
{
    uint64_t total = 0;
    for (size_t i = 0; i < chunks; i++)
        total += portable_chunk_checksum(data + i * ANCF_CHUNK_BYTES, first_chunk + i);
    return total;
}

/* Copies chunk by chunk, so that the second read of a chunk hits the L1 cache. */
static inline uint64_t portable_copy_checksum(uint8_t *dst, const uint8_t *data, size_t chunks,
                                              uint64_t first_chunk)
{
    uint64_t total = 0;
    for (size_t i = 0; i < chunks; i++) {
        total += portable_chunk_checksum(data + i * ANCF_CHUNK_BYTES, first_chunk + i);
        memcpy(dst + i * ANCF_CHUNK_BYTES, data + i * ANCF_CHUNK_BYTES, ANCF_CHUNK_BYTES);
    }
    return total;
}

#endif
