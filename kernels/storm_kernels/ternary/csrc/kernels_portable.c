/* The kernels in plain C: they run everywhere, and tests compare the other variants with them. */
#include "primitives_portable.h"

#define TABLE ternary_portable
#define TABLE_NAME "portable"
#define VECTOR_BYTES 16
#define BATCH 2

typedef struct {
    uint64_t word[2];
} bits;

typedef struct {
    int32_t lane[4];
} sums;

typedef struct {
    int64_t product, negative;
} counts;

typedef struct {
    float lane[32];
} floats;

static inline bits load_bits(const uint8_t *bytes)
{
    bits loaded;
    memcpy(&loaded, bytes, sizeof loaded);
    return loaded;
}

static inline bits load_part(const uint8_t *bytes, uint64_t count)
{
    bits loaded = {{0, 0}};
    memcpy(&loaded, bytes, count);
    return loaded;
}

static inline bits bits_wrong(bits wrong, bits bit0, bits bit1)
{
    for (unsigned i = 0; i < 2; i++)
        wrong.word[i] |= bit1.word[i] & ~bit0.word[i];
    return wrong;
}

static inline int any_bits(bits some) { return (some.word[0] | some.word[1]) != 0; }

static inline void split_codes(bits bit0, bits bit1, bits *even, bits *odd)
{
    const uint64_t low = UINT64_C(0x5555555555555555);
    for (unsigned i = 0; i < 2; i++) {
        uint64_t zero = ~bit0.word[i], plus = bit0.word[i] ^ bit1.word[i];
        even->word[i] = (zero & low) | (plus << 1 & ~low);
        odd->word[i] = (zero >> 1 & low) | (plus & ~low);
    }
}

static inline sums zero_sums(void) { return (sums){{0}}; }

/* Adds in 16 bits first, which compilers vectorise: eight products of 2 * 128 fit. */
static inline void add_products(sums *all, bits even, bits odd, const int8_t *x)
{
    uint8_t codes[2][VECTOR_BYTES];
    int16_t narrow[VECTOR_BYTES] = {0};
    memcpy(codes[0], &even, VECTOR_BYTES);
    memcpy(codes[1], &odd, VECTOR_BYTES);
    for (unsigned i = 0; i < 8; i++)
        for (unsigned j = 0; j < VECTOR_BYTES; j++)
            narrow[j] = (int16_t)(narrow[j] +
                                  (codes[i % 2][j] >> (i & 6) & 3) * x[VECTOR_BYTES * i + j]);
    for (unsigned j = 0; j < VECTOR_BYTES; j++)
        all->lane[j / 4] += narrow[j];
}

static inline void lanes_of_sums(const sums *all, int32_t *lanes)
{
    memcpy(lanes, all->lane, sizeof all->lane);
}

static inline int64_t total_of_sums(const sums *all)
{
    return (int64_t)all->lane[0] + all->lane[1] + all->lane[2] + all->lane[3];
}

static inline counts zero_counts(void) { return (counts){0, 0}; }

static inline void count_products(counts *found, bits a0, bits a1, bits b0, bits b1)
{
    for (unsigned i = 0; i < 2; i++) {
        uint64_t product = a0.word[i] & b0.word[i];
        found->product += __builtin_popcountll(product);
        found->negative += __builtin_popcountll(product & (a1.word[i] ^ b1.word[i]));
    }
}

static inline int64_t total_of_counts(const counts *found)
{
    return found->product - 2 * found->negative;
}

static inline floats zero_floats(void) { return (floats){{0.0f}}; }

/* A zero of w adds +0, whatever x is; no sum is ever -0, so this changes nothing. */
static inline void add_signed(floats *all, uint32_t word0, uint32_t word1, const float *x)
{
    for (unsigned i = 0; i < 32; i++) {
        uint32_t value;
        float signed_value;
        memcpy(&value, x + i, 4);
        value = (value ^ (word1 >> i & 1) << 31) & (0u - (word0 >> i & 1));
        memcpy(&signed_value, &value, 4);
        all->lane[i] += signed_value;
    }
}

static inline float total_of_floats(floats *all) { return tree_total(all->lane); }

#define signs_of_i8 portable_signs_of_i8
#define signs_of_f32 portable_signs_of_f32
#define values_i8 portable_values_i8
#define values_f32 portable_values_f32
#define bytes_from portable_bytes_from

#include "template.h"
