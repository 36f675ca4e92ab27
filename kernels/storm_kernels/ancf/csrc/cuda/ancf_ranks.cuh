/* Ranks the most frequent symbols of the sample and computes the cost of coding with them; one warp
 * per ranking.
 *
 * Keys are distinct and have the dictionary's order (count descending, symbol ascending). So the
 * largest key below the last one found is the next entry, whatever their order in memory.
 */
#pragma once
#include <ancf_counts.cuh>

constexpr u32 kRanked = 22;  /* maximum entries of a window dictionary: 7 + 15 */
static_assert(kRanked <= kWarpThreads, "a lane keeps one entry");
static_assert(kSampleMax <= 1 << 16 && kBins <= 1 << 16, "a key is two halves of a word");

/* Symbols with or without the sign, of all elements or of those other than the fill. */
enum Choice : u32 { kJointAll, kExponentAll, kJointRest, kExponentRest, kChoices };
DEVICE bool is_exponent(u32 choice) { return choice % 2 != 0; }
DEVICE bool is_rest(u32 choice) { return choice >= kJointRest; }

/* The parameters of a coding, and its cost over the sample in bits. */
struct Coding {
  u32 bits, choice, rotate, residue_bits, k1, k2;
};

struct Ranking {
  u32 keys[kBins];     /* keys of the symbols that occur, unordered */
  u32 occurring;       /* their number */
  u32 ranked[kRanked]; /* the keys of the first entries; 0: none */
  Coding coding;
};

DEVICE u32 key_of(u32 symbol, u32 count) { return (count - 1) << 16 | (0xffff - symbol); }
DEVICE u32 symbol_of(u32 key) { return 0xffff - (key & 0xffff); }
DEVICE u32 count_of(u32 key) { return key ? (key >> 16) + 1 : 0; }

DEVICE u32 slots_of(u32 bits) { return bits ? (1u << bits) - 1 : 0; }

/* Writes the keys of the symbols that occur; returns their number. Subtracts `left_out` from the
 * count of `symbol_left_out`. */
DEVICE u32 collect_keys(const Counts &counts, u32 *keys, bool exponent, u32 symbol_left_out, u32 left_out, u32 lane) {
  u32 bins = exponent ? kExponents : kBins, found = 0;
#pragma unroll 4
  for (u32 base = 0; base < bins; base += kWarpThreads) {
    u32 symbol = base + lane, count = 0;
    if (symbol < bins) count = counts.histogram[symbol] + (exponent ? counts.histogram[symbol + kExponents] : 0);
    if (symbol == symbol_left_out) count -= left_out;
    u32 occurs = lanes_where(count != 0);
    if (count) keys[found + ones(occurs & ((1u << lane) - 1))] = key_of(symbol, count);
    found += ones(occurs);
  }
  warp_barrier();
  return found;
}

/* Removes keys that cannot be among the first kRanked, and packs the others to the front; returns
 * their number. At least kRanked keys are not below the kRanked-th of the 32 lanes' greatest
 * keys. */
DEVICE u32 keep_largest(u32 *keys, u32 occurring, u32 lane) {
  u32 greatest = 0, rank = 0, kept = 0;
#pragma unroll 4
  for (u32 at = lane; at < occurring; at += kWarpThreads) greatest = keys[at] > greatest ? keys[at] : greatest;
  for (u32 other = 0; other < kWarpThreads; other++) rank += shuffle(greatest, other) > greatest;
  u32 least = most_of_lanes(rank == kRanked - 1 ? greatest : 0);
#pragma unroll 4
  for (u32 base = 0; base < occurring; base += kWarpThreads) {
    u32 key = base + lane < occurring ? keys[base + lane] : 0;
    u32 keeps = lanes_where(key >= least && key);
    if (key >= least && key) keys[kept + ones(keeps & ((1u << lane) - 1))] = key;
    kept += ones(keeps);
  }
  warp_barrier();
  return kept;
}

/* Ranks up to 2 * kWarpThreads keys: counts the keys above each. */
DEVICE void count_above(const u32 *keys, u32 count, u32 *ranked, u32 lane) {
  u32 own = lane < count ? keys[lane] : 0;
  u32 other = lane + kWarpThreads < count ? keys[lane + kWarpThreads] : 0;
  u32 rank = 0, other_rank = 0;
#pragma unroll 8
  for (u32 at = 0; at < count; at++) {
    rank += keys[at] > own;
    other_rank += keys[at] > other;
  }
  if (own && rank < kRanked) ranked[rank] = own;
  if (other && other_rank < kRanked) ranked[other_rank] = other;
}

/* Ranks any number of keys, one after the other. */
DEVICE void search_each(const u32 *keys, u32 count, u32 *ranked, u32 lane) {
  u32 last = ~0u;
#pragma unroll 1
  for (u32 rank = 0; rank < kRanked; rank++) {
    u32 best = 0;
#pragma unroll 1
    for (u32 at = lane; at < count; at += kWarpThreads) {
      u32 key = keys[at];
      best = key < last && key > best ? key : best;
    }
    last = most_of_lanes(best);
    if (lane == 0) ranked[rank] = last;
  }
}

/* Writes the first kRanked of the `occurring` keys in descending order to `ranked`, 0 where there
 * is none; returns entry `lane`. Most tensors have few symbols; of many, keep_largest leaves
 * few. */
DEVICE u32 rank_keys(u32 *keys, u32 occurring, u32 *ranked, u32 lane) {
  constexpr u32 kFew = 2 * kWarpThreads;
  if (lane < kRanked) ranked[lane] = 0;
  warp_barrier();
  u32 count = occurring > kFew ? keep_largest(keys, occurring, lane) : occurring;
  if (count <= kFew) count_above(keys, count, ranked, lane);
  else search_each(keys, count, ranked, lane);
  warp_barrier();
  return lane < kRanked ? ranked[lane] : 0;
}

/* Returns the number of elements that the first `slots` entries cover. */
DEVICE u32 covered(u32 key, u32 slots, u32 lane) { return sum_of_lanes(lane < slots ? count_of(key) : 0); }

/* Returns the coding with codes of k1 bits and, for elements these miss, k2 bits, with its cost
 * over `count` elements; `rotate` is as in the plan. */
DEVICE Coding coding_of(u32 choice, u32 rotate, u32 key, u32 count, u32 drop, u32 k1, u32 k2, u32 lane) {
  u32 residue_bits = kMantissa - drop + rotate;
  u32 escape_bits = drop ? 8 * kWidth : 8 * kWidth - residue_bits <= 8 ? 8 : 16;
  u32 missed = count - covered(key, slots_of(k1), lane);
  u32 escaped = count - covered(key, slots_of(k1) + slots_of(k2), lane);
  u32 bits = count * (residue_bits + k1) + missed * k2 + escaped * escape_bits;
  return {bits, choice, rotate, residue_bits, k1, k2};
}

/* Returns the coding with the cheapest code widths (FORMAT.md, section 10). */
DEVICE Coding cheapest_coding(u32 choice, u32 rotate, u32 key, u32 count, u32 drop, bool dense, u32 lane) {
  if (!dense) return coding_of(choice, rotate, key, count, drop, 3, 0, lane);
  Coding narrow = coding_of(choice, rotate, key, count, drop, 2, 3, lane);
  Coding wide = coding_of(choice, rotate, key, count, drop, 3, 4, lane);
  return wide.bits < narrow.bits ? wide : narrow;
}

DEVICE const Coding &better_coding(const Coding &joint, const Coding &exponent) {
  return joint.bits * 33 < exponent.bits * 32 ? joint : exponent;
}
