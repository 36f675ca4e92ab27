/* Operations on the bits of 32 elements, for the decoders of coded tiles: each lane has one word of
 * a bit plane. They convert planes to nibbles and bytes, and move bits that exist only for some
 * elements to these elements, without a loop over elements. `read_bits` reads only words that
 * contain wanted bits, so it never reads outside its plane.
 */
#pragma once
#include <ancf_bits.cuh>

/* Returns 32 bits from bit number `bit` of `words` on; only the first `wanted` are meaningful. */
DEVICE u32 read_bits(const u32 *words, u32 bit, u32 wanted) {
  const u32 *at = words + bit / 32;
  u32 low = wanted ? load_cached(at) : 0;
  u32 high = bit % 32 + wanted > 32 ? load_cached(at + 1) : 0;
  return funnel_right(low, high, bit % 32);
}

/* Converts four planes of 32 elements to one nibble per element: word w holds elements 8w to 8w + 7
 * in the order 0 4 1 5 2 6 3 7. It exchanges single bits between words, then halves and bytes. */
DEVICE void make_nibbles(u32 p0, u32 p1, u32 p2, u32 p3, u32 (&nibbles)[4]) {
  u32 even01 = choose_bits(0x55555555, p0, p1 << 1), odd01 = choose_bits(0x55555555, p0 >> 1, p1);
  u32 even23 = choose_bits(0x55555555, p2, p3 << 1), odd23 = choose_bits(0x55555555, p2 >> 1, p3);
  u32 first = choose_bits(0x33333333, even01, even23 << 2), third = choose_bits(0x33333333, even01 >> 2, even23);
  u32 second = choose_bits(0x33333333, odd01, odd23 << 2), fourth = choose_bits(0x33333333, odd01 >> 2, odd23);
  u32 low13 = pick_bytes(first, third, 0x5410), high13 = pick_bytes(first, third, 0x7632);
  u32 low24 = pick_bytes(second, fourth, 0x5410), high24 = pick_bytes(second, fourth, 0x7632);
  nibbles[0] = pick_bytes(low13, low24, 0x6240);
  nibbles[1] = pick_bytes(low13, low24, 0x7351);
  nibbles[2] = pick_bytes(high13, high24, 0x6240);
  nibbles[3] = pick_bytes(high13, high24, 0x7351);
}

/* Moves adjacent bits to the positions of a mask's ones, in order. */
struct Spreader {
  u32 mask;
  BitMoves<32> moves;

  DEVICE static Spreader to(u32 mask) { return {mask, BitMoves<32>::of(mask)}; }
  DEVICE u32 spread(u32 bits) const { return moves.apart(bits) & mask; }
};
