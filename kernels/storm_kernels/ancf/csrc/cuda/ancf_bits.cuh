/* Small work on words of bits and on lanes, for encoders and decoders by warps.
 * Nothing here touches memory.
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

/* Brings the bits that a mask names together at the low end of each field of kField bits, in order,
 * or back: by moves of 1, 2, 4, ... bits, which the mask is turned into once (H. S. Warren, Hacker's
 * Delight, 7-4 and 7-5). A bit moves by so many as zeros of the mask lie below it. */
template <u32 kField>
struct BitMoves {
  static_assert(kField == 8 || kField == 32, "bytes or words");
  static constexpr u32 kLevels = kField == 32 ? 5 : 3;
  u32 moves[kLevels];

  DEVICE static u32 up(u32 bits, u32 step) {
    return kField == 32 ? bits << step : bits << step & 0x01010101 * (0xff << step & 0xff);
  }
  DEVICE static BitMoves of(u32 mask) {
    BitMoves made;
    u32 rest = mask, zeros = up(~mask, 1);
#pragma unroll
    for (u32 level = 0; level < kLevels; level++) {
      u32 odd = zeros;
#pragma unroll
      for (u32 step = 1; step < kField; step *= 2) odd ^= up(odd, step);
      u32 move = odd & rest;
      made.moves[level] = move;
      rest = (rest ^ move) | move >> (1u << level);
      zeros &= ~odd;
    }
    return made;
  }

  /* `bits` has none but those that the mask names. */
  DEVICE u32 together(u32 bits) const {
#pragma unroll
    for (u32 level = 0; level < kLevels; level++) {
      u32 moving = bits & moves[level];
      bits = (bits & ~moves[level]) | moving >> (1u << level);
    }
    return bits;
  }
  /* The inverse; bits that the mask does not name may be anything. */
  DEVICE u32 apart(u32 bits) const {
#pragma unroll
    for (u32 level = kLevels; level-- > 0;) bits = choose_bits(moves[level], bits << (1u << level), bits);
    return bits;
  }
};
