/* The primitives that both NEON variants share: they process 16 bytes of a plane, 128 values. */
#include <arm_neon.h>

#include "../primitives_portable.h"

#define VECTOR_BYTES 16
#define BATCH 4

typedef uint8x16_t bits;
typedef int32x4_t sums;

typedef struct {
    uint64x2_t product, negative;
} counts;

typedef struct {
    float32x4_t part[8];
} floats;

static inline bits load_bits(const uint8_t *bytes) { return vld1q_u8(bytes); }

static inline bits load_part(const uint8_t *bytes, uint64_t count)
{
    uint8_t part[VECTOR_BYTES] = {0};
    memcpy(part, bytes, count);
    return vld1q_u8(part);
}

static inline bits bits_wrong(bits wrong, bits bit0, bits bit1)
{
    return vorrq_u8(wrong, vbicq_u8(bit1, bit0));
}

static inline int any_bits(bits some) { return vmaxvq_u8(some) != 0; }

static inline void split_codes(bits bit0, bits bit1, bits *even, bits *odd)
{
    const bits low = vdupq_n_u8(0x55);
    bits plus = veorq_u8(bit0, bit1), zero = vmvnq_u8(bit0);
    *even = vbslq_u8(low, zero, vshlq_n_u8(plus, 1));
    *odd = vbslq_u8(low, vshrq_n_u8(zero, 1), plus);
}

static inline sums zero_sums(void) { return vdupq_n_s32(0); }

/* Returns field k of each byte of codes, 0 to 2. */
static inline int8x16_t field_of(bits codes, unsigned k)
{
    bits shifted = vshlq_u8(codes, vdupq_n_s8((int8_t)(-2 * (int)k)));
    return vreinterpretq_s8_u8(vandq_u8(shifted, vdupq_n_u8(3)));
}

static inline void lanes_of_sums(const sums *all, int32_t *lanes) { vst1q_s32(lanes, *all); }

static inline int64_t total_of_sums(const sums *all) { return vaddlvq_s32(*all); }

static inline counts zero_counts(void) { return (counts){vdupq_n_u64(0), vdupq_n_u64(0)}; }

static inline uint64x2_t add_bits(uint64x2_t count, bits some)
{
    return vpadalq_u32(count, vpaddlq_u16(vpaddlq_u8(vcntq_u8(some))));
}

static inline void count_products(counts *found, bits a0, bits a1, bits b0, bits b1)
{
    bits product = vandq_u8(a0, b0);
    found->product = add_bits(found->product, product);
    found->negative = add_bits(found->negative, vandq_u8(product, veorq_u8(a1, b1)));
}

static inline int64_t total_of_counts(const counts *found)
{
    return (int64_t)vaddvq_u64(found->product) - 2 * (int64_t)vaddvq_u64(found->negative);
}

static inline floats zero_floats(void)
{
    floats all;
    for (unsigned i = 0; i < 8; i++)
        all.part[i] = vdupq_n_f32(0.0f);
    return all;
}

static inline void add_signed(floats *all, uint32_t word0, uint32_t word1, const float *x)
{
    const uint32_t weight[4] = {1, 2, 4, 8};
    const uint32x4_t weights = vld1q_u32(weight), minus = vdupq_n_u32(0x80000000u);
    for (unsigned i = 0; i < 8; i++) {
        uint32x4_t keep = vtstq_u32(vdupq_n_u32(word0 >> 4 * i), weights);
        uint32x4_t turn = vtstq_u32(vdupq_n_u32(word1 >> 4 * i), weights);
        uint32x4_t value = vreinterpretq_u32_f32(vld1q_f32(x + 4 * i));
        value = vandq_u32(veorq_u32(value, vandq_u32(turn, minus)), keep);
        all->part[i] = vaddq_f32(all->part[i], vreinterpretq_f32_u32(value));
    }
}

static inline float total_of_floats(floats *all)
{
    float lane[32];
    for (unsigned i = 0; i < 8; i++)
        vst1q_f32(lane + 4 * i, all->part[i]);
    return tree_total(lane);
}

/* Returns the top bits of 64 bytes: bit i is that of byte i. */
static inline uint64_t gather(const bits set[4])
{
    const bits weights = vreinterpretq_u8_u64(vdupq_n_u64(UINT64_C(0x8040201008040201)));
    bits low = vpaddq_u8(vandq_u8(set[0], weights), vandq_u8(set[1], weights));
    bits high = vpaddq_u8(vandq_u8(set[2], weights), vandq_u8(set[3], weights));
    bits all = vpaddq_u8(low, high);
    return vgetq_lane_u64(vreinterpretq_u64_u8(vpaddq_u8(all, all)), 0);
}

static inline uint64_t neon_signs_of_i8(const int8_t *values, uint64_t *word0, uint64_t *word1)
{
    bits set[4], negative[4], bad[4];
    for (unsigned i = 0; i < 4; i++) {
        int8x16_t value = vld1q_s8(values + 16 * i);
        set[i] = vtstq_s8(value, value);
        negative[i] = vcltzq_s8(value);
        bad[i] = vcgtq_u8(vreinterpretq_u8_s8(vabsq_s8(value)), vdupq_n_u8(1));
    }
    *word0 = gather(set);
    *word1 = gather(negative);
    return gather(bad);
}

static inline void neon_values_i8(uint64_t word0, uint64_t word1, int8_t *values)
{
    const bits weights = vreinterpretq_u8_u64(vdupq_n_u64(UINT64_C(0x8040201008040201)));
    for (unsigned i = 0; i < 4; i++) {
        const bits owner =
            vcombine_u8(vdup_n_u8((uint8_t)(2 * i)), vdup_n_u8((uint8_t)(2 * i + 1)));
        bits one = vqtbl1q_u8(vreinterpretq_u8_u64(vdupq_n_u64(word0)), owner);
        bits negative = vqtbl1q_u8(vreinterpretq_u8_u64(vdupq_n_u64(word1)), owner);
        one = vandq_u8(vtstq_u8(one, weights), vdupq_n_u8(1));
        vst1q_s8(values + 16 * i,
                 vreinterpretq_s8_u8(vorrq_u8(one, vtstq_u8(negative, weights))));
    }
}

static inline uint64_t neon_bytes_from(const uint8_t *bytes, uint8_t least)
{
    bits found[4];
    for (unsigned i = 0; i < 4; i++)
        found[i] = vcgeq_u8(vld1q_u8(bytes + 16 * i), vdupq_n_u8(least));
    return gather(found);
}

#define signs_of_i8 neon_signs_of_i8
#define signs_of_f32 portable_signs_of_f32
#define values_i8 neon_values_i8
#define values_f32 portable_values_f32
#define bytes_from neon_bytes_from
