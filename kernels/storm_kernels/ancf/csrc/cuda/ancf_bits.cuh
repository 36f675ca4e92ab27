/* Operations on words of bits and on lanes, for encoders and decoders that work by warps.
 * Nothing here accesses memory.
 */
#pragma once
#include <ancf_device.cuh>

/* The number of flagged elements in the lanes before this one, and in all lanes. */
struct LaneRank {
  u32 before, total;

  DEVICE static LaneRank of(u32 own) {
    u32 sum = own;
#pragma unroll
    for (u32 step = 1; step < kWarpThreads; step *= 2) sum = add_from_below(sum, step);
    return {sum - own, shuffle(sum, kWarpThreads - 1)};
  }
};

/* Returns a word whose lowest `count` bits are set. */
DEVICE u32 low_bits(u32 count) { return count >= 32 ? ~0u : (1u << count) - 1; }

/* Selects the bits in `mask` from `one`, the others from `other`. */
DEVICE u32 choose_bits(u32 mask, u32 one, u32 other) { return (one & mask) | (other & ~mask); }

/* Moves bit i of the lower 16 bits to bit 2i. */
DEVICE u32 to_even_bits(u32 bits) {
  bits = (bits | bits << 8) & 0x00ff00ff;
  bits = (bits | bits << 4) & 0x0f0f0f0f;
  bits = (bits | bits << 2) & 0x33333333;
  return (bits | bits << 1) & 0x55555555;
}

/* Packs the bits that a mask selects, in order, to the low end of each field of kField bits, or
 * unpacks them: by moves of 1, 2, 4, ... bits, which `of` computes from the mask (H. S. Warren,
 * Hacker's Delight, 7-4 and 7-5). A bit moves by the number of the mask's zeros below it. */
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

  /* Packs; `bits` has no bits outside the mask. */
  DEVICE u32 together(u32 bits) const {
#pragma unroll
    for (u32 level = 0; level < kLevels; level++) {
      u32 moving = bits & moves[level];
      bits = (bits & ~moves[level]) | moving >> (1u << level);
    }
    return bits;
  }
  /* The inverse; result bits outside the mask are arbitrary. */
  DEVICE u32 apart(u32 bits) const {
#pragma unroll
    for (u32 level = kLevels; level-- > 0;) bits = choose_bits(moves[level], bits << (1u << level), bits);
    return bits;
  }
};
