/* Chooses mode and parameters from a sample, without the host (FORMAT.md, sections 9 to 11).
 *
 * Block 0 samples and decides; the other blocks clear the counters of the encode kernel. In block 0
 * all threads count, four warps rank symbols and compute the costs of the four ways to code, and
 * one warp decides. The plan equals that of the NumPy reference.
 */
#include <ancf_few.cuh>

struct ChooseShared {
  Counts counts;
  Ranking rankings[kChoices];
  FewWork few;
};
constexpr u32 kChooseSharedBytes = sizeof(ChooseShared);

/* Read by the host: a block's dynamic shared memory in bytes. */
extern "C" __device__ const u32 ancf_choose_shared_bytes = kChooseSharedBytes;

/* Returns the mode if it needs no sample, else kAuto. */
DEVICE u32 mode_without_sample(const Request &request, u64 n) {
  if (n == 0 || has_dictionary_apart(request.mode)) return kRaw;  /* ancf_values has dictionaries */
  if (request.mode == kAuto) return request.dtype == kBoolType ? kBoolean : kAuto;
  return request.mode == kRaw || request.mode == kBoolean || request.mode == kInteger ? request.mode : kAuto;
}

/* Counts everything in the sample; the whole block calls it. The counts are complete on return. */
DEVICE void count_sample(Counts &counts, const Request &request, const Part &part, Value first) {
  clear_histogram(counts);
  barrier(0, kChooseThreads);
  count_symbols(counts, part);
  Facts facts = facts_of(part, request.mode == kConstant ? first : 0, first);
  if (!request.is_float) add_bounds(facts, part, request.is_signed);
  facts = over_lanes(facts, !request.is_float);
  if (thread_in_block() % kWarpThreads == 0) counts.of_warp[thread_in_block() / kWarpThreads] = facts;
  barrier(0, kChooseThreads);
}

/* Ranks the symbols of one kind and computes the cost of coding them; by one warp. */
DEVICE void rank(ChooseShared &shared, const Request &request, const Summary &sample, u32 choice, u32 lane) {
  Ranking &ranking = shared.rankings[choice];
  bool rest = is_rest(choice), exponent = is_exponent(choice);
  bool signs_apart = choice == kExponentRest && keeps_signs_apart(request, sample);
  u32 left_out = !rest ? 0 : signs_apart ? sample.facts.zeros : sample.facts.fills;
  u32 fill_symbol = joint_symbol(sample.fill) & (exponent ? kExponents - 1 : kBins - 1);
  u32 occurring = collect_keys(shared.counts, ranking.keys, exponent, fill_symbol, left_out, lane);
  u32 key = rank_keys(ranking.keys, occurring, ranking.ranked, lane);
  u32 drop = rest ? droppable(request, sample) : window_drop(request, sample);
  bool dense = rest || drop || request.dense;
  u32 rotate = exponent && !signs_apart;  /* magnitudes have no sign to rotate */
  Coding coding = cheapest_coding(choice, rotate, key, sample.count - left_out, drop, dense, lane);
  if (lane != 0) return;
  ranking.occurring = occurring;
  ranking.coding = coding;
}

/* Chooses from the sample. The whole block calls it; only the first warp gets the outcome. */
DEVICE Outcome choose(ChooseShared &shared, const Request &request, const u8 *src, u64 n) {
  Value first = read_at(src, 0);
  Part part = Part::of(src, n, first);
  count_sample(shared.counts, request, part, first);
  u32 warp = thread_in_block() / kWarpThreads, lane = thread_in_block() % kWarpThreads;
  const Ranking *rankings = shared.rankings;
  Summary sample = {};
  if (warp < kChoices) {
    sample = summary_of(shared.counts, request, first, sample_size(n), lane);
    rank(shared, request, sample, warp, lane);
  }
  barrier(0, kChooseThreads);
  bool may_be_few = request.mode == kAuto && request.is_float && rankings[kJointAll].occurring <= kFewValues;
  if (may_be_few) find_few(shared.few, src, n);
  if (warp != 0) return {};
  const Coding &window = better_coding(rankings[kJointAll].coding, rankings[kExponentAll].coding);
  bool signs_apart = keeps_signs_apart(request, sample);
  const Coding &exponent_rest = rankings[kExponentRest].coding;
  const Coding &rest = signs_apart ? exponent_rest : better_coding(rankings[kJointRest].coding, exponent_rest);
  const FewValues *few = may_be_few ? &shared.few.found : nullptr;
  return Decision{request, sample, window, rest, few, n <= kSampleMax, signs_apart}.outcome();
}

/* Chooses the plan of `src` and clears the work area. Blocks of kChooseThreads, at least two: the
 * first chooses, the others clear `words` words after the plan's dictionary. */
KERNEL(kChooseThreads)
ancf_choose(const u8 *__restrict__ src, u64 nbytes, u8 *scratch, u32 words, u32 dtype, u32 mode, u32 dense,
            u32 checksum) {
  let_next_begin();
  if (block_index() != 0) {
    u32 *area = reinterpret_cast<u32 *>(work_of(scratch));
    u32 step = (block_count() - 1) * kChooseThreads;
    for (u32 i = (block_index() - 1) * kChooseThreads + thread_in_block(); i < words; i += step) area[i] = 0;
    return;
  }
  ChooseShared &shared = *reinterpret_cast<ChooseShared *>(shared_memory());
  Traits traits = traits_of(dtype);
  Request request = {nbytes, dtype, mode, dense != 0, checksum != 0, traits.is_float, traits.is_signed};
  u64 n = nbytes / kWidth;
  Outcome outcome = {mode_without_sample(request, n)};
  if (outcome.mode == kAuto) outcome = choose(shared, request, src, n);
  if (thread_in_block() >= kWarpThreads) return;
  const u32 *ranked = outcome.coding ? shared.rankings[outcome.coding->choice].ranked : nullptr;
  write_plan(request, outcome, ranked, scratch, thread_in_block());
}
