/* Small work on words of bits and on lanes, for encoders and decoders by warps. What stays true:
 * nothing here touches memory.
 */
#pragma once
#include <ancf_device.cuh>

/* How many flagged elements the lanes before this one hold, and all lanes. */
struct LaneRank {
  u32 before, total;

  DEVICE static LaneRank of(u32 own) {
    u32 sum = own;
#pragma unroll
    for (u32 step = 1; step < kWarpThreads; step *= 2) sum = add_from_below(sum, step);
    return {sum - own, shuffle(sum, kWarpThreads - 1)};
  }
};

/* The lowest `count` bits set. */
DEVICE u32 low_bits(u32 count) { return count >= 32 ? ~0u : (1u << count) - 1; }

/* Bits picked by `mask` from `one`, the others from `other`. */
DEVICE u32 choose_bits(u32 mask, u32 one, u32 other) { return (one & mask) | (other & ~mask); }

/* Bit i of the lower 16 to bit 2i. */
DEVICE u32 to_even_bits(u32 bits) {
  bits = (bits | bits << 8) & 0x00ff00ff;
  bits = (bits | bits << 4) & 0x0f0f0f0f;
  bits = (bits | bits << 2) & 0x33333333;
  return (bits | bits << 1) & 0x55555555;
}
