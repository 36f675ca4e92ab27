/* Computes a plan from the sample's facts (FORMAT.md, section 10), by one warp.
 *
 * It compares only integers and fixes every order, so the plan equals that of choose.py. Nothing
 * here reads the tensor.
 */
#pragma once
#include <ancf_ranks.cuh>

constexpr u32 kAuto = 255;       /* for a mode: chosen here */
constexpr u32 kFewValues = 3;    /* of mode ternary */

/* The host's arguments. */
struct Request {
  u64 nbytes;
  u32 dtype, mode;
  bool dense, checksum, is_float, is_signed;
};

/* The facts about the whole sample. */
struct Summary {
  Facts facts;
  Value fill, first;
  u32 count;  /* elements */
};

/* A sample's distinct values, if there are at most kFewValues. */
struct FewValues {
  u64 values[kFewValues];
  u32 counts[kFewValues];
  u32 found;  /* kFewValues + 1 for more */
};

/* Combines the facts of all warps. Only now is it known whether all elements equal a fill. */
DEVICE Summary summary_of(const Counts &counts, const Request &request, Value first, u32 count, u32 lane) {
  static_assert(kChooseWarps == kWarpThreads, "a lane reads one warp's facts");
  Facts facts = over_lanes(counts.of_warp[lane], !request.is_float);
  bool all_fill = request.mode == kAuto && !facts.differ;
  if (all_fill) {
    facts.fills = count;
    facts.any_of_pair = facts.second_of_pair = 0;
  }
  return {facts, request.mode == kConstant || all_fill ? first : 0, first, count};
}

/* Returns how many low bits can be dropped: no sampled element has them set. */
DEVICE u32 droppable(const Request &request, const Summary &sample) {
  Value low = sample.facts.low_bits;
  if (!request.is_float) return 0;
  if (kWidth == 4) return (low & 0xffff) == 0 ? 16 : (low & 0x1fff) == 0 ? 13 : 0;
  if (kWidth == 8) return (low & 0x1fffffff) == 0 ? 29 : 0;
  return 0;
}

/* Whether a sparse tensor gets a separate plane of signs, because many zeros are negative. The
 * plane costs one bit for each zero; a -0.0 that is coded costs at least its residue. */
DEVICE bool keeps_signs_apart(const Request &request, const Summary &sample) {
  if (!request.is_float || sample.fill != 0) return false;
  u32 negative = sample.facts.zeros - sample.facts.fills;
  return negative * (kMantissa - droppable(request, sample) + 1) > sample.facts.zeros;
}

/* Like droppable, for codes without a bitmap; a forced mode may determine the result. */
DEVICE u32 window_drop(const Request &request, const Summary &sample) {
  if (request.mode == kWindow) return 0;
  u32 drop = droppable(request, sample);
  if (request.mode != kTruncated || drop || !request.is_float) return drop;
  return kWidth == 4 ? 16 : kWidth == 8 ? 29 : 0;
}

/* The decision; all offsets follow from it. */
struct Outcome {
  u32 mode, bitmap, drop;
  u64 fill;
  const Coding *coding;  /* or null */
  const FewValues *few;  /* for mode ternary */
  bool may_be_constant;
};

struct Decision {
  const Request &request;
  const Summary &sample;
  const Coding &window, &rest;
  const FewValues *few;  /* null if they were not counted */
  bool everything;       /* the sample is the whole tensor */
  bool signs_apart;      /* `rest` codes magnitudes */

  DEVICE u32 pair_bits() const {
    u32 any = signs_apart ? sample.facts.any_magnitude : sample.facts.any_of_pair;
    u32 second = signs_apart ? sample.facts.second_magnitude : sample.facts.second_of_pair;
    return sample.count / 2 + any + second;
  }
  DEVICE bool pairs() const { return pair_bits() * 17 < sample.count * 16; }
  DEVICE u32 sparse_bits() const { return (pairs() ? pair_bits() : sample.count) + (signs_apart ? sample.count : 0) + rest.bits; }

  /* Returns the best mode without a bitmap; `bits` is the raw cost, and becomes the mode's cost. */
  DEVICE u32 best_float(u32 &bits) const {
    u32 mode = kRaw;
    if (window.bits * 65 < bits * 64) {
      bits = window.bits;
      mode = droppable(request, sample) ? kTruncated : kWindow;
    }
    if (2 * sample.count >= bits || !few || few->found > kFewValues) return mode;
    bits = 2 * sample.count;
    return kTernary;
  }
  DEVICE u32 best_integer(u32 &bits) const {
    u64 span = sample.facts.most - sample.facts.least;
    u32 high = static_cast<u32>(span >> 32), low = static_cast<u32>(span);
    u32 width = high ? 33 + highest_bit(high) : low ? 1 + highest_bit(low) : 0;
    if (width + 1 >= 8 * kWidth) return kRaw;
    bits = sample.count * width;
    return kInteger;
  }
  DEVICE u32 best_mode() const {
    if (request.dtype == kBoolType) return kBoolean;
    if (!sample.facts.differ) return kConstant;
    u32 bits = sample.count * 8 * kWidth;
    u32 mode = request.is_float ? best_float(bits) : best_integer(bits);
    return sparse_bits() * 9 < bits * 8 ? kSparse : mode;
  }

  DEVICE Outcome sparse(bool may_be_constant) const {
    u32 bitmap = (pairs() ? kBitmapPairs : kBitmapPlain) | (signs_apart ? kBitmapSigns : 0);
    return {kSparse, bitmap, droppable(request, sample), sample.fill, &rest, nullptr, may_be_constant};
  }
  DEVICE Outcome outcome() const {
    u32 mode = request.mode == kAuto ? best_mode() : request.mode;
    bool same = !sample.facts.differ, constant = mode == kConstant && same && everything;
    if (mode == kSparse || (mode == kConstant && !constant)) return sparse(mode == kConstant && same);
    if (constant || mode == kTernary || mode == kBoolean || mode == kInteger || mode == kRaw) {
      return {mode, 0, 0, constant ? sample.first : 0, nullptr, few, false};
    }
    u32 drop = window_drop(request, sample);
    return {drop ? kTruncated : kWindow, 0, drop, 0, &window, nullptr, false};
  }
};

/* Writes mode ternary's values in the order of the dictionary. */
DEVICE void write_few(const FewValues &few, u64 *values) {
  for (u32 i = 0; i < few.found; i++) {
    u32 rank = 0;
    for (u32 j = 0; j < few.found; j++) {
      rank += few.counts[j] > few.counts[i] || (few.counts[j] == few.counts[i] && few.values[j] < few.values[i]);
    }
    values[rank] = few.values[i];
  }
}

/* Turns a plan with an empty window into that of a raw blob, with the offsets of one. */
DEVICE void become_raw(Plan &plan) {
  plan.mode = kRaw;
  plan.bitmap = plan.rotate = plan.drop = plan.residue_bits = plan.k1 = plan.k2 = plan.escape_bytes = 0;
  plan.fill = plan.dict_count = plan.may_be_constant = plan.tiles = 0;
  plan.directory_offset = kHeaderBytes;
  plan.fixed_offset = kHeaderBytes;
  plan.payload_offset = kHeaderBytes + plan.raw_nbytes;
}

/* Returns a plan for `outcome` with an empty window; a raw plan if the rest of the blob would not
 * fit. */
DEVICE Plan plan_for(const Request &request, const Outcome &outcome, u32 dict_count) {
  Plan plan = {};
  plan.raw_nbytes = request.nbytes;
  plan.dtype = request.dtype;
  plan.flags = request.checksum ? kFlagChecksum : 0;
  plan.mode = outcome.mode;
  plan.bitmap = outcome.bitmap;
  plan.drop = outcome.drop;
  plan.fill = outcome.fill;
  plan.may_be_constant = outcome.may_be_constant;
  plan.dict_count = dict_count;
  if (outcome.mode == kTernary) plan.k1 = 2;
  if (outcome.coding) {
    plan.rotate = outcome.coding->rotate;
    plan.residue_bits = outcome.coding->residue_bits;
    plan.k1 = outcome.coding->k1;
    plan.k2 = outcome.coding->k2;
  }
  derive(plan, kWidth, kMantissa);
  if (plan.payload_offset > kHeaderBytes + plan.raw_nbytes) become_raw(plan);
  return plan;
}

/* Writes the plan of `outcome` and its dictionary, by one warp. */
DEVICE void write_plan(const Request &request, const Outcome &outcome, const u32 *ranked, u8 *scratch, u32 lane) {
  u32 slots = outcome.coding ? slots_of(outcome.coding->k1) + slots_of(outcome.coding->k2) : 0;
  u32 key = lane < slots ? ranked[lane] : 0;
  u32 dict_count = ones(lanes_where(key != 0));
  bool ternary = outcome.mode == kTernary;
  Plan plan = plan_for(request, outcome, ternary ? outcome.few->found : dict_count);
  Plan &written = *reinterpret_cast<Plan *>(scratch);
  if (lane == 0) {
    written = plan;
    if (ternary) write_few(*outcome.few, values_of(scratch));
  }
  warp_barrier();
  if (key && plan.k1) written.window[lane] = symbol_of(key);
}
