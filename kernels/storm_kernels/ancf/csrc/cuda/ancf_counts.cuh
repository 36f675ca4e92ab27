/* Counts the sample in block 0: the frequency of each symbol, and a few facts about all elements.
 *
 * Every warp writes its facts to separate words, and any warp can add them. This takes fewer steps
 * than atomic additions in shared memory, and no memory must be cleared before.
 */
#pragma once
#include <ancf_sample.cuh>

constexpr u32 kBins = 1u << (8 * kWidth - kMantissa);  /* joint symbols: sign and exponent */
constexpr u32 kExponents = kBins / 2;

/* Returns the joint symbol of an element; its low bits are the exponent. */
DEVICE u32 joint_symbol(Value x) { return static_cast<u32>(x >> kMantissa); }

/* Facts about a warp's part of the sample, or about the whole sample. */
struct Facts {
  u32 fills, any_of_pair, second_of_pair;  /* FORMAT.md's Z, a and c */
  u32 zeros, any_magnitude, second_magnitude;  /* the same for magnitudes and 0 */
  u32 differ;                              /* whether an element differs from the first */
  Value low_bits;                          /* bitwise or of all elements */
  Value least, most;                       /* minimum and maximum by `ordered`; only integers */
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

/* Maps values so that unsigned order is the type's order. */
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

/* Counts symbols. Only the last part of a small tensor is incomplete; for whole parts a branch per
 * element would cost more than the counting. */
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

/* Returns the facts of this thread's part; `fill` is the value that a bitmap would omit. */
DEVICE Facts facts_of(const Part &part, Value fill, Value first) {
  constexpr u32 kEven = 0x5555;
  static_assert(kOwn == 16, "a bit an element, in 16 bits");
  Facts facts = {};
  Value unlike = 0;
  u32 kept = 0, big = 0;  /* bit i: element i is not the fill; not +0 or -0 */
#pragma unroll
  for (u32 i = 0; i < kOwn; i++) {
    kept |= part.x[i] != fill ? 1u << i : 0;
    big |= (part.x[i] & kAllBits / 2) != 0 ? 1u << i : 0;
    unlike |= part.x[i] ^ first;
    facts.low_bits |= part.x[i];
  }
  u32 pairs = kEven & ((1u << part.own / 2 * 2) - 1);  /* the first bit of each complete pair */
  facts.differ = unlike != 0;
  facts.fills = part.own - ones(kept & ((1u << part.own) - 1));
  facts.any_of_pair = ones((kept | kept >> 1) & pairs);
  facts.second_of_pair = ones(kept >> 1 & pairs);
  facts.zeros = part.own - ones(big & ((1u << part.own) - 1));
  facts.any_magnitude = ones((big | big >> 1) & pairs);
  facts.second_magnitude = ones(big >> 1 & pairs);
  return facts;
}

/* Adds the minimum and maximum of this thread's elements. */
DEVICE void add_bounds(Facts &facts, const Part &part, bool is_signed) {
  facts.least = kAllBits;
#pragma unroll
  for (u32 i = 0; i < kOwn; i++) {
    Value place = ordered(part.x[i], is_signed);
    facts.least = place < facts.least ? place : facts.least;
    facts.most = place > facts.most ? place : facts.most;
  }
}

/* Combines the facts of all lanes, for every lane; bounds only if `with_bounds`. */
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
