/* The choice of mode and parameters from a sample, without the host (FORMAT.md, sections 9 to 11).
 *
 * Block 0 samples and decides; the other blocks clear what the encode kernel counts in. What
 * stays true: only integers are compared and every order is fixed, so the plan equals the one
 * that the NumPy reference finds.
 */
#include <ancf_format.cuh>

constexpr u32 kThreads = 1024;
constexpr u32 kPairs = kSampleMax / 2 / kThreads;   /* pairs of sampled elements of a thread */
constexpr u32 kBins = 1u << (8 * kWidth - kMantissa);  /* joint symbols */
constexpr u32 kCopies = kBins > 512 ? 2 : 8;        /* of the histogram: fewer lanes on one word */
constexpr u32 kRanked = 22;                         /* most entries of a window dictionary */

using Element = u64;

/* What the host asks for. */
struct Request {
  u64 nbytes;
  u32 dtype, mode;
  bool dense, checksum, is_float, is_signed;
};
constexpr u32 kAuto = 255;

enum Choice : u32 { kJointAll, kExponentAll, kJointRest, kExponentRest, kChoices };

struct Shared {
  u32 histogram[kCopies * kBins];
  u32 ranked[kChoices][kRanked];  /* count - 1 << 16 | ~symbol, descending; 0: none */
  u32 covered[kChoices][kRanked + 1];  /* elements that the first so many symbols cover */
  u64 low_bits, least, most;      /* of all elements: or, minimum, maximum */
  u32 fills, pairs_any, pairs_second, differ;
  u32 place[2];                   /* of the first element unlike the ones before */
  u32 counts[3];
  u64 distinct[3];
};
constexpr u32 kChooseSharedBytes = sizeof(Shared);

DEVICE Element read_at(const u8 *src, u64 index) {
  const u8 *address = src + index * kWidth;
  Element value = 0;
  if (reinterpret_cast<u64>(address) % kWidth == 0) {
    if (kWidth == 8) return *reinterpret_cast<const u64 *>(address);
    if (kWidth == 4) return *reinterpret_cast<const u32 *>(address);
    if (kWidth == 2) return *reinterpret_cast<const u16 *>(address);
    return *address;
  }
  for (u32 i = 0; i < kWidth; i++) value |= static_cast<Element>(address[i]) << (8 * i);
  return value;
}

/* Where the sample's element number `i` stands in a tensor of n. */
DEVICE u64 sample_place(u32 i, u64 n) {
  if (n <= kSampleMax) return i;
  u64 last = n / kSampleRun - 1;
  return i / kSampleRun * last / (kSampleRuns - 1) * kSampleRun + i % kSampleRun;
}

/* This thread's sampled elements, in pairs; `count` of the sample's elements exist. */
struct Sampled {
  Element x[2 * kPairs];
  u32 count;
  /* The sample of a tensor of n elements; neighbours in a pair are neighbours in the tensor. */
  DEVICE static Sampled of(const u8 *src, u64 n) {
    Sampled made;
    made.count = n < kSampleMax ? static_cast<u32>(n) : kSampleMax;
#pragma unroll
    for (u32 pair = 0; pair < kPairs; pair++) {
      u64 place = sample_place(index(2 * pair), n);
      for (u32 i = 2 * pair; i < 2 * pair + 2; i++) made.x[i] = made.has(i) ? read_at(src, place + i % 2) : 0;
    }
    return made;
  }
  DEVICE static u32 index(u32 i) { return 2 * (thread_in_block() + i / 2 * kThreads) + i % 2; }
  DEVICE bool has(u32 i) const { return index(i) < count; }
};

DEVICE u64 ordered(Element x, bool is_signed) {
  u64 sign = 1ull << (8 * kWidth - 1);
  return is_signed ? (x ^ sign) & (sign | (sign - 1)) : x;
}

/* The joint symbol of the top bits; the exponent alone is its low bits. */
DEVICE u32 joint_symbol(Element x) { return static_cast<u32>(x >> kMantissa); }

DEVICE u32 warp_sum(u32 value) {
  for (u32 step = 16; step; step /= 2) value += shuffle_xor(value, step);
  return value;
}

DEVICE void count_symbols(Shared &shared, const Sampled &sampled) {
  u32 copy = thread_in_block() % kCopies;
#pragma unroll
  for (u32 i = 0; i < 2 * kPairs; i++) {
    if (sampled.has(i)) fetch_add(&shared.histogram[joint_symbol(sampled.x[i]) * kCopies + copy], 1u);
  }
}

/* Least and most, which matter for integers alone. */
DEVICE void count_bounds(Shared &shared, const Sampled &sampled, bool is_signed) {
  u64 least = ~0ull, most = 0;
#pragma unroll
  for (u32 i = 0; i < 2 * kPairs; i++) {
    if (!sampled.has(i)) continue;
    u64 place = ordered(sampled.x[i], is_signed);
    least = place < least ? place : least;
    most = place > most ? place : most;
  }
  for (u32 step = 16; step; step /= 2) {
    u64 other = shuffle_xor(least, step);
    least = other < least ? other : least;
    other = shuffle_xor(most, step);
    most = other > most ? other : most;
  }
  if (thread_in_block() % kWarpThreads) return;
  fetch_min(&shared.least, least);
  fetch_max(&shared.most, most);
}

/* Zeros, pairs, and bits that are set anywhere. */
DEVICE void count_rest(Shared &shared, const Sampled &sampled, u64 fill, Element first) {
  u32 fills = 0, any_of_pair = 0, second = 0, differ = 0;
  u64 low_bits = 0;
#pragma unroll
  for (u32 i = 0; i < 2 * kPairs; i++) {
    if (!sampled.has(i)) continue;
    Element x = sampled.x[i];
    fills += x == fill;
    differ |= x != first;
    low_bits |= x;
    if (i % 2 == 0) continue;
    any_of_pair += sampled.x[i - 1] != fill || x != fill;
    second += x != fill;
  }
  fills = warp_sum(fills);
  any_of_pair = warp_sum(any_of_pair);
  second = warp_sum(second);
  differ = any_lane(differ != 0);
  for (u32 step = 16; step; step /= 2) low_bits |= shuffle_xor(low_bits, step);
  if (thread_in_block() % kWarpThreads) return;
  fetch_add(&shared.fills, fills);
  fetch_add(&shared.pairs_any, any_of_pair);
  fetch_add(&shared.pairs_second, second);
  fetch_or(&shared.differ, differ);
  fetch_or(&shared.low_bits, low_bits);
}

/* Finds up to three distinct values of the sample, in order of appearance, and their counts;
 * returns how many there are, 4 for more. The whole block calls it. */
DEVICE u32 count_distinct(Shared &shared, const Sampled &sampled, const u8 *src, u64 n, Element first) {
  u32 found = 1;
  if (thread_in_block() == 0) shared.distinct[0] = first;
  for (; found <= 3; found++) {
    u32 &earliest = shared.place[found % 2];  /* the other one may still be read */
    if (thread_in_block() == 0) earliest = kSampleMax;
    barrier(0, kThreads);
    u32 place = kSampleMax;
#pragma unroll
    for (u32 i = 0; i < 2 * kPairs; i++) {
      bool known = false;
      for (u32 j = 0; j < found; j++) known |= sampled.x[i] == shared.distinct[j];
      if (sampled.has(i) && !known && Sampled::index(i) < place) place = Sampled::index(i);
    }
    if (any_lane(place != kSampleMax) && place != kSampleMax) fetch_min(&earliest, place);
    barrier(0, kThreads);
    u32 next = earliest;
    if (next == kSampleMax || found == 3) {
      found += next != kSampleMax;
      break;
    }
    if (thread_in_block() == 0) shared.distinct[found] = read_at(src, sample_place(next, n));
  }
  barrier(0, kThreads);
  for (u32 j = 0; j < found && j < 3; j++) {
    u32 count = 0;
#pragma unroll
    for (u32 i = 0; i < 2 * kPairs; i++) count += sampled.has(i) && sampled.x[i] == shared.distinct[j];
    count = warp_sum(count);
    if (thread_in_block() % kWarpThreads == 0) fetch_add(&shared.counts[j], count);
  }
  barrier(0, kThreads);
  return found;
}

/* Leaves the histogram's sums in its first kBins words. */
DEVICE void add_copies(Shared &shared) {
  constexpr u32 kPerThread = (kBins + kThreads - 1) / kThreads;
  u32 sums[kPerThread];
#pragma unroll
  for (u32 i = 0; i < kPerThread; i++) {
    u32 symbol = thread_in_block() + i * kThreads;
    sums[i] = 0;
    for (u32 copy = 0; symbol < kBins && copy < kCopies; copy++) sums[i] += shared.histogram[symbol * kCopies + copy];
  }
  barrier(0, kThreads);
#pragma unroll
  for (u32 i = 0; i < kPerThread; i++) {
    u32 symbol = thread_in_block() + i * kThreads;
    if (symbol < kBins) shared.histogram[symbol] = sums[i];
  }
}

/* How often `symbol` of the given kind occurs; the rest leaves the fills out. */
DEVICE u32 occurrences(const Shared &shared, u32 choice, u32 symbol, u64 fill) {
  bool exponent = choice == kExponentAll || choice == kExponentRest;
  u32 count = shared.histogram[symbol];
  if (exponent) count += shared.histogram[symbol + kBins / 2];
  u32 fill_symbol = joint_symbol(fill) & (exponent ? kBins / 2 - 1 : kBins - 1);
  bool rest = choice == kJointRest || choice == kExponentRest;
  return rest && symbol == fill_symbol ? count - shared.fills : count;
}

/* The most frequent symbols of one kind, by one warp. */
DEVICE void rank_symbols(Shared &shared, u32 choice, u64 fill, u32 lane) {
  u32 bins = choice == kExponentAll || choice == kExponentRest ? kBins / 2 : kBins;
  constexpr u32 kPerLane = (kBins + 31) / 32;
  u32 keys[kPerLane];  /* count << 16 | ~symbol: larger is earlier */
#pragma unroll
  for (u32 i = 0; i < kPerLane; i++) {
    u32 symbol = lane + 32 * i;
    u32 count = symbol < bins ? occurrences(shared, choice, symbol, fill) : 0;
    keys[i] = count ? (count - 1) << 16 | (0xffff - symbol) : 0;
  }
  u32 covered = 0;
  for (u32 rank = 0; rank < kRanked; rank++) {
    u32 best = 0;
#pragma unroll
    for (u32 i = 0; i < kPerLane; i++) best = keys[i] > best ? keys[i] : best;
    best = most_of_lanes(best);
#pragma unroll
    for (u32 i = 0; i < kPerLane; i++) keys[i] = keys[i] == best ? 0 : keys[i];
    if (lane == 0) {
      shared.ranked[choice][rank] = best;
      shared.covered[choice][rank] = covered;
    }
    covered += best ? (best >> 16) + 1 : 0;
  }
  if (lane == 0) shared.covered[choice][kRanked] = covered;
}

/* One way to code: its cost over the sample in bits, and its parameters. */
struct Coding {
  u64 bits;
  u32 choice, rotate, residue_bits, k1, k2;
};

DEVICE u32 slots_of(u32 bits) { return bits ? (1u << bits) - 1 : 0; }

/* Codes of k1 and, for what these miss, k2 bits. */
DEVICE Coding coding(const Shared &shared, u32 choice, u32 count, u32 drop, u32 k1, u32 k2) {
  Coding made;
  made.choice = choice;
  made.rotate = choice == kExponentAll || choice == kExponentRest;
  made.residue_bits = kMantissa - drop + made.rotate;
  made.k1 = k1;
  made.k2 = k2;
  u32 escape_bits = drop ? 8 * kWidth : 8 * kWidth - made.residue_bits <= 8 ? 8 : 16;
  const u32 *covered = shared.covered[choice];
  u64 missed = count - covered[slots_of(k1)], escaped = count - covered[slots_of(k1) + slots_of(k2)];
  made.bits = static_cast<u64>(count) * (made.residue_bits + k1) + missed * k2 + escaped * escape_bits;
  return made;
}

DEVICE Coding cheapest_codes(const Shared &shared, u32 choice, u32 count, u32 drop, bool dense) {
  if (!dense) return coding(shared, choice, count, drop, 3, 0);
  Coding narrow = coding(shared, choice, count, drop, 2, 3);
  Coding wide = coding(shared, choice, count, drop, 3, 4);
  return wide.bits < narrow.bits ? wide : narrow;
}

DEVICE Coding better(const Shared &shared, u32 joint, u32 exponent, u32 count, u32 drop, bool dense) {
  Coding a = cheapest_codes(shared, joint, count, drop, dense);
  Coding b = cheapest_codes(shared, exponent, count, drop, dense);
  return a.bits * 33 < b.bits * 32 ? a : b;
}

DEVICE void apply(Plan &plan, const Shared &shared, const Coding &coding, u32 drop) {
  plan.rotate = coding.rotate;
  plan.drop = drop;
  plan.residue_bits = coding.residue_bits;
  plan.k1 = coding.k1;
  plan.k2 = coding.k2;
  u32 slots = slots_of(coding.k1) + slots_of(coding.k2);
  for (u32 i = 0; i < slots; i++) {
    u32 key = shared.ranked[coding.choice][i];
    if (!key) break;
    plan.window[i] = 0xffff - (key & 0xffff);
    plan.dict_count = i + 1;
  }
}

/* Low bits that no sampled element has set, among those a truncated float may lack. */
DEVICE u32 droppable(u64 low_bits, bool is_float) {
  if (!is_float) return 0;
  if (kWidth == 4) return (low_bits & 0xffff) == 0 ? 16 : (low_bits & 0x1fff) == 0 ? 13 : 0;
  if (kWidth == 8) return (low_bits & 0x1fffffff) == 0 ? 29 : 0;
  return 0;
}

/* What block 0's first thread decides with. */
struct Decision {
  const Shared &shared;
  const Request &request;
  u32 count;     /* sampled elements */
  u32 distinct;  /* 1..4, 4 for more */
  bool everything;  /* the sample is the whole tensor */
  Element first;

  DEVICE u32 drop() const { return droppable(shared.low_bits, request.is_float); }
  DEVICE Coding window(bool dense, u32 dropped) const {
    return better(shared, kJointAll, kExponentAll, count, dropped, dense || dropped);
  }
  DEVICE Coding rest() const {
    return better(shared, kJointRest, kExponentRest, count - shared.fills, drop(), true);
  }
  DEVICE u64 pair_bits() const { return count / 2 + shared.pairs_any + shared.pairs_second; }
  DEVICE bool pairs() const { return pair_bits() * 17 < static_cast<u64>(count) * 16; }
  DEVICE u64 sparse_bits() const { return (pairs() ? pair_bits() : count) + rest().bits; }
  DEVICE u64 raw_bits() const { return static_cast<u64>(count) * 8 * kWidth; }

  DEVICE u32 best_mode() const {
    if (request.dtype == kBoolType) return kBoolean;
    if (!shared.differ) return kConstant;
    u64 bits = raw_bits();
    u32 mode = kRaw;
    if (request.is_float) {
      u64 window_bits = window(request.dense, drop()).bits;
      if (window_bits * 65 < raw_bits() * 64) {
        bits = window_bits;
        mode = drop() ? kTruncated : kWindow;
      }
      if (2ull * count < bits && distinct <= 3) {
        bits = 2ull * count;
        mode = kTernary;
      }
    } else {
      u64 span = shared.most - shared.least;
      u32 width = span >> 32 ? 33 + highest_bit(static_cast<u32>(span >> 32))
                  : span     ? 1 + highest_bit(static_cast<u32>(span)) : 0;
      if (width + 1 < 8 * kWidth) {
        bits = static_cast<u64>(count) * width;
        mode = kInteger;
      }
    }
    return sparse_bits() * 9 < bits * 8 ? kSparse : mode;
  }

  DEVICE void sparse(Plan &plan, u64 fill) const {
    plan.mode = kSparse;
    plan.fill = fill;
    plan.bitmap = pairs() ? kBitmapPairs : kBitmapPlain;
    apply(plan, shared, rest(), drop());
  }
  DEVICE void forced_truncated(Plan &plan) const {
    u32 dropped = drop();
    if (!dropped && request.is_float) dropped = kWidth == 4 ? 16 : kWidth == 8 ? 29 : 0;
    plan.mode = dropped ? kTruncated : kWindow;
    apply(plan, shared, window(request.dense, dropped), dropped);
  }
  DEVICE void ternary(Plan &plan, u64 *values) const {
    plan.mode = kTernary;
    plan.k1 = 2;
    plan.dict_count = distinct;
    for (u32 i = 0; i < distinct; i++) {
      u32 rank = 0;
      for (u32 j = 0; j < distinct; j++) {
        rank += shared.counts[j] > shared.counts[i] ||
                (shared.counts[j] == shared.counts[i] && shared.distinct[j] < shared.distinct[i]);
      }
      values[rank] = shared.distinct[i];
    }
  }

  DEVICE void decide(Plan &plan, u64 *values) const {
    u32 mode = request.mode == kAuto ? best_mode() : request.mode;
    if (mode == kConstant && (shared.differ || !everything)) {
      plan.may_be_constant = !shared.differ;
      sparse(plan, first);
    } else if (mode == kSparse) {
      sparse(plan, 0);
    } else if (mode == kWindow || (mode == kTruncated && request.mode == kAuto)) {
      u32 dropped = mode == kTruncated ? drop() : 0;
      plan.mode = mode;
      apply(plan, shared, window(request.dense, dropped), dropped);
    } else if (mode == kTruncated) {
      forced_truncated(plan);
    } else if (mode == kTernary && request.mode == kAuto) {
      ternary(plan, values);
    } else {
      plan.mode = mode;
      plan.fill = mode == kConstant ? first : 0;
    }
  }
};

DEVICE void make_plan(const Decision *decision, const Request &request, u8 *scratch) {
  Plan plan = {};
  plan.raw_nbytes = request.nbytes;
  plan.dtype = request.dtype;
  plan.flags = request.checksum ? kFlagChecksum : 0;
  if (decision) decision->decide(plan, values_of(scratch));
  derive(plan);
  if (plan.payload_offset > kHeaderBytes + plan.raw_nbytes) {
    plan = {};
    plan.raw_nbytes = request.nbytes;
    plan.dtype = request.dtype;
    plan.flags = request.checksum ? kFlagChecksum : 0;
    derive(plan);
  }
  *reinterpret_cast<Plan *>(scratch) = plan;
}

/* The fill of a plan that has one: what mode constant would keep, else 0. */
DEVICE u64 fill_of(const Request &request, const Shared &shared, Element first) {
  return request.mode == kConstant || (request.mode == kAuto && !shared.differ) ? first : 0;
}

DEVICE void clear(u32 *words, u32 count) {
  for (u32 i = thread_in_block(); i < count; i += kThreads) words[i] = 0;
}

/* For the host: the dynamic shared memory of a block. */
extern "C" __device__ const u32 ancf_choose_shared_bytes = kChooseSharedBytes;

/* Chooses the plan of `src` and clears the work area. Blocks of kThreads: the first chooses, the
 * others clear `words` words after the plan's dictionary; at least two blocks. */
KERNEL(kThreads)
ancf_choose(const u8 *__restrict__ src, u64 nbytes, u8 *scratch, u32 words, u32 dtype, u32 mode, u32 dense,
            u32 checksum) {
  if (block_index() != 0) {
    u32 *area = reinterpret_cast<u32 *>(work_of(scratch));
    u32 step = (block_count() - 1) * kThreads;
    for (u32 i = (block_index() - 1) * kThreads + thread_in_block(); i < words; i += step) area[i] = 0;
    return;
  }
  Traits traits = traits_of(dtype);
  Request request = {nbytes, dtype, mode, dense != 0, checksum != 0, traits.is_float, traits.is_signed};
  u64 n = nbytes / kWidth;
  if (n == 0 || request.mode == kRaw || request.mode == kTernary || request.mode == kValues) {
    if (thread_in_block() == 0) make_plan(nullptr, request, scratch);
    return;
  }
  Shared &shared = *reinterpret_cast<Shared *>(shared_memory());
  clear(reinterpret_cast<u32 *>(&shared), sizeof(Shared) / 4);
  Sampled sampled = Sampled::of(src, n);
  Element first = read_at(src, 0);
  barrier(0, kThreads);
  if (thread_in_block() == 0) shared.least = ~0ull;
  barrier(0, kThreads);
  count_symbols(shared, sampled);
  bool constant = request.mode == kConstant;
  count_rest(shared, sampled, constant ? first : 0, first);
  if (!request.is_float) count_bounds(shared, sampled, request.is_signed);
  barrier(0, kThreads);
  add_copies(shared);
  barrier(0, kThreads);
  u64 fill = fill_of(request, shared, first);
  if (fill != 0 && !shared.differ) {  /* all equal: every count of the rest is 0 */
    barrier(0, kThreads);
    if (thread_in_block() == 0) {
      shared.fills = sampled.count;
      shared.pairs_any = shared.pairs_second = 0;
    }
    barrier(0, kThreads);
  }
  u32 warp = thread_in_block() / kWarpThreads;
  if (warp < kChoices) rank_symbols(shared, warp, fill, thread_in_block() % kWarpThreads);
  barrier(0, kThreads);
  bool may_be_few = shared.ranked[kJointAll][3] == 0;  /* else there are four symbols, so four values */
  bool wants_distinct = request.mode == kAuto && request.is_float && may_be_few;
  u32 distinct = wants_distinct ? count_distinct(shared, sampled, src, n, first) : 4;
  barrier(0, kThreads);
  if (thread_in_block() != 0) return;
  Decision decision{shared, request, sampled.count, distinct, n <= kSampleMax, first};
  make_plan(&decision, request, scratch);
}

/* Ascending, in place; `count` is a power of two. The whole block calls it. */
template <class T>
DEVICE void sort_shared(T *items, u32 count) {
  for (u32 size = 2; size <= count; size *= 2) {
    for (u32 step = size / 2; step; step /= 2) {
      barrier(0, kThreads);
      for (u32 i = thread_in_block(); i < count / 2; i += kThreads) {
        u32 low = 2 * i - (i & (step - 1)), high = low + step;
        bool rising = (low & size) == 0;
        T a = items[low], b = items[high];
        if ((a > b) == rising) {
          items[low] = b;
          items[high] = a;
        }
      }
    }
  }
  barrier(0, kThreads);
}

/* Where the run of equal items that starts at `start` ends, in `count` sorted ones. */
template <class T>
DEVICE u32 run_end(const T *items, u32 start, u32 count) {
  u32 low = start, high = count;
  while (low < high) {
    u32 middle = (low + high) / 2;
    if (items[middle] > items[start]) high = middle;
    else low = middle + 1;
  }
  return low;
}

/* Bits of mode values' codes, from how many of the sample's elements are 0. */
DEVICE u32 values_bits(u32 policy, u64 zeros, u64 count) {
  enum Policy : u32 { kConservative, kAdaptive, kAggressive };
  if (policy == kAggressive) return 9;
  if (policy == kConservative) return zeros * 10 >= count * 9 ? 7 : 8;
  return zeros * 2 >= count ? 7 : zeros * 10 >= count ? 8 : 9;
}

template <u32 kBytes> struct Stored { using Type = u32; };
template <> struct Stored<8> { using Type = u64; };
constexpr u32 kValuesSharedBytes = kSampleMax * (sizeof(Stored<kWidth>::Type) + sizeof(u32));
constexpr u32 kNoRun = 0xffffffff;

/* For the host: the dynamic shared memory of a block. */
extern "C" __device__ const u32 ancf_choose_values_shared_bytes = kValuesSharedBytes;

/* After ancf_choose, where mode ternary or values was asked for: the most frequent whole values
 * of the sample. One block. */
KERNEL(kThreads)
ancf_choose_values(const u8 *__restrict__ src, u8 *scratch, u32 mode, u32 policy) {
  using Value = Stored<kWidth>::Type;
  Plan &plan = *reinterpret_cast<Plan *>(scratch);
  u64 n = plan.raw_nbytes / kWidth;
  if (n == 0) return;
  Value *items = reinterpret_cast<Value *>(shared_memory());
  u32 *runs = reinterpret_cast<u32 *>(items + kSampleMax);
  u32 count = n < kSampleMax ? static_cast<u32>(n) : kSampleMax;
  for (u32 i = thread_in_block(); i < kSampleMax; i += kThreads) {
    items[i] = i < count ? static_cast<Value>(read_at(src, sample_place(i, n))) : static_cast<Value>(~0ull);
  }
  sort_shared(items, kSampleMax);
  u32 zeros = items[0] == 0 ? run_end(items, 0, count) : 0;
  u32 k1 = mode == kTernary ? 2 : values_bits(policy, zeros, count);
  for (u32 i = thread_in_block(); i < kSampleMax; i += kThreads) {
    bool starts = i < count && (i == 0 || items[i] != items[i - 1]);
    runs[i] = starts ? (kSampleMax - (run_end(items, i, count) - i)) * kSampleMax + i : kNoRun;
  }
  sort_shared(runs, kSampleMax);
  u32 slots = slots_of(k1);
  for (u32 i = thread_in_block(); i < slots; i += kThreads) {
    if (runs[i] != kNoRun) values_of(scratch)[i] = items[runs[i] % kSampleMax];
  }
  if (thread_in_block() != 0) return;
  u32 found = 0;
  while (found < slots && runs[found] != kNoRun) found++;
  Plan made = {};
  made.raw_nbytes = plan.raw_nbytes;
  made.dtype = plan.dtype;
  made.flags = plan.flags;
  made.mode = mode;
  made.k1 = k1;
  made.dict_count = found;
  derive(made);
  if (made.payload_offset > kHeaderBytes + made.raw_nbytes) {
    made.mode = kRaw;
    made.k1 = made.dict_count = 0;
    derive(made);
  }
  plan = made;
}
