/* What block 0 counts in the sample: how often each symbol occurs, and a few facts about all of it.
 *
 * Every warp leaves its facts in words of its own and any warp adds them up again, which takes
 * fewer steps than adding in shared memory and nothing to clear before.
 */
#pragma once
#include <ancf_sample.cuh>

constexpr u32 kBins = 1u << (8 * kWidth - kMantissa);  /* joint symbols: sign and exponent */
constexpr u32 kExponents = kBins / 2;

/* The joint symbol of an element; the exponent alone is its low bits. */
DEVICE u32 joint_symbol(Value x) { return static_cast<u32>(x >> kMantissa); }

/* Numbers of a warp's part of the sample, or of all of it. */
struct Facts {
  u32 fills, any_of_pair, second_of_pair;  /* as FORMAT.md's Z, a and c */
  u32 zeros, any_magnitude, second_magnitude;  /* the same of magnitudes and 0 */
  u32 differ;                              /* whether an element is unlike the first */
  Value low_bits;                          /* or of all elements */
  Value least, most;                       /* in the type's order, from 0 up; integers alone */
};

struct Counts {
  u32 histogram[kBins];
  Facts of_warp[kChooseWarps];
};

DEVICE Value or_of_lanes(Value value) {
  if constexpr (kWidth <= 4) {
    return bits_of_lanes(value);
  } else {
    for (u32 step = 16; step; step /= 2) value |= shuffle_xor(value, step);
    return value;
  }
}
DEVICE Value greatest_of_lanes(Value value) {
  if constexpr (kWidth <= 4) {
    return most_of_lanes(value);
  } else {
    for (u32 step = 16; step; step /= 2) {
      Value other = shuffle_xor(value, step);
      value = other > value ? other : value;
    }
    return value;
  }
}
DEVICE Value least_of_lanes(Value value) { return kAllBits - greatest_of_lanes(kAllBits - value); }

/* Signed numbers in an order of unsigned ones. */
DEVICE Value ordered(Value x, bool is_signed) {
  return is_signed ? x ^ (kAllBits / 2 + 1) : x;
}

DEVICE void clear_histogram(Counts &counts) {
  constexpr u32 kRounds = (kBins + kChooseThreads - 1) / kChooseThreads;
#pragma unroll
  for (u32 round = 0; round < kRounds; round++) {
    u32 bin = thread_in_block() + round * kChooseThreads;
    if (bin < kBins) counts.histogram[bin] = 0;
  }
}

/* A part is whole but for the last of a small tensor: a branch an element would cost more than the
 * counting. */
DEVICE void count_symbols(Counts &counts, const Part &part) {
  if (part.own == kOwn) {
#pragma unroll
    for (u32 i = 0; i < kOwn; i++) fetch_add(&counts.histogram[joint_symbol(part.x[i])], 1u);
  } else {
#pragma unroll
    for (u32 i = 0; i < kOwn; i++) {
      if (i < part.own) fetch_add(&counts.histogram[joint_symbol(part.x[i])], 1u);
    }
  }
}

/* This thread's numbers; `fill` is what a bitmap would leave out. */
DEVICE Facts facts_of(const Part &part, Value fill, Value first) {
  constexpr u32 kEven = 0x5555;
  static_assert(kOwn == 16, "a bit an element, in 16 bits");
  Facts facts = {};
  Value unlike = 0;
  u32 kept = 0, big = 0;  /* bit i: element i is not the fill, not 0 of either sign */
#pragma unroll
  for (u32 i = 0; i < kOwn; i++) {
    kept |= part.x[i] != fill ? 1u << i : 0;
    big |= (part.x[i] & kAllBits / 2) != 0 ? 1u << i : 0;
    unlike |= part.x[i] ^ first;
    facts.low_bits |= part.x[i];
  }
  u32 pairs = kEven & ((1u << part.own / 2 * 2) - 1);  /* the first bit of each pair that is whole */
  facts.differ = unlike != 0;
  facts.fills = part.own - ones(kept & ((1u << part.own) - 1));
  facts.any_of_pair = ones((kept | kept >> 1) & pairs);
  facts.second_of_pair = ones(kept >> 1 & pairs);
  facts.zeros = part.own - ones(big & ((1u << part.own) - 1));
  facts.any_magnitude = ones((big | big >> 1) & pairs);
  facts.second_magnitude = ones(big >> 1 & pairs);
  return facts;
}

/* Least and most of this thread's numbers. */
DEVICE void add_bounds(Facts &facts, const Part &part, bool is_signed) {
  facts.least = kAllBits;
#pragma unroll
  for (u32 i = 0; i < kOwn; i++) {
    Value place = ordered(part.x[i], is_signed);
    facts.least = place < facts.least ? place : facts.least;
    facts.most = place > facts.most ? place : facts.most;
  }
}

/* The same of all lanes' numbers, for every lane; bounds only where they matter. */
DEVICE Facts over_lanes(const Facts &mine, bool with_bounds) {
  Facts all;
  all.fills = sum_of_lanes(mine.fills);
  all.any_of_pair = sum_of_lanes(mine.any_of_pair);
  all.second_of_pair = sum_of_lanes(mine.second_of_pair);
  all.zeros = sum_of_lanes(mine.zeros);
  all.any_magnitude = sum_of_lanes(mine.any_magnitude);
  all.second_magnitude = sum_of_lanes(mine.second_magnitude);
  all.differ = any_lane(mine.differ != 0);
  all.low_bits = or_of_lanes(mine.low_bits);
  all.least = with_bounds ? least_of_lanes(mine.least) : 0;
  all.most = with_bounds ? greatest_of_lanes(mine.most) : 0;
  return all;
}
