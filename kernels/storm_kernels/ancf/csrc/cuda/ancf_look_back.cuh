/* Computes the places of records: units of records publish their sizes in one word each (decoupled
 * look-back, Merrill and Garland 2016). A unit is one record or a few consecutive ones. A unit
 * waits only for units with lower tickets, which running warps hold, so some warp always makes
 * progress.
 */
#pragma once
#include <ancf_code.cuh>

constexpr u64 kPartSum = 1ull << 62;   /* the word holds this unit's size */
constexpr u64 kWholeSum = 2ull << 62;  /* the word holds the size of all units up to this one */
constexpr u64 kSumMask = kPartSum - 1;

/* Finds the bytes of records before unit `unit`, in units of 8; a whole warp calls it. If sizes are
 * still missing, it waits for them with kWaits, else returns false. */
template <bool kWaits>
DEVICE bool look_back(const u64 *prefixes, u32 unit, u32 lane, u64 &found) {
  found = 0;
  for (u32 end = unit; end != 0; end -= end < 32 ? end : 32) {
    u64 word;
    u32 whole, blank;
    for (;;) {
      word = lane < end ? load_shared_word(prefixes + (end - 1 - lane)) : kWholeSum;
      whole = lanes_where((word & kWholeSum) != 0);
      blank = lanes_where((word & ~kSumMask) == 0);
      if (blank == 0 || (whole != 0 && lowest_bit(whole) < lowest_bit(blank))) break;
      if (!kWaits) return false;
      pause();
    }
    u32 last = whole ? lowest_bit(whole) : 31;
    u64 part = lane <= last ? word & kSumMask : 0;
    for (u32 step = 16; step; step /= 2) part += shuffle_xor(part, step);
    found += part;
    if (whole) return true;
  }
  return true;
}
