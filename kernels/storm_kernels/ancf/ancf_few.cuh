/* The distinct values of a sample that has no more than three, for mode ternary.
 *
 * Rarely called: a sample with four symbols has four values. All threads of the block meet here.
 */
#pragma once
#include <ancf_decide.cuh>

struct FewWork {
  FewValues found;
  u32 place[2];  /* of the first element unlike the values so far; two, in turn */
};

/* Puts the place of the first sampled element that is none of the values found to `earliest`. */
DEVICE void find_unlike(const FewValues &few, const Part &part, u32 found, u32 *earliest) {
  u32 place = kSampleMax;
#pragma unroll
  for (u32 i = 0; i < kOwn; i++) {
    bool known = !part.has(i);
    for (u32 j = 0; j < found; j++) known |= part.x[i] == few.values[j];
    if (!known && place == kSampleMax) place = part.start + i;
  }
  if (place != kSampleMax) fetch_min(earliest, place);
}

DEVICE void count_values(FewValues &few, const Part &part, u32 found) {
  for (u32 j = 0; j < found; j++) {
    u32 count = 0;
#pragma unroll
    for (u32 i = 0; i < kOwn; i++) count += part.has(i) && part.x[i] == few.values[j];
    count = sum_of_lanes(count);
    if (thread_in_block() % kWarpThreads == 0) fetch_add(&few.counts[j], count);
  }
}

/* Fills in `work.found`; the whole block calls it, and it is complete when it returns. */
DEVICE void find_few(FewWork &work, const Part &part, const u8 *src, u64 n, Value first) {
  FewValues &few = work.found;
  bool leads = thread_in_block() == 0;
  u32 found = 1, place = 0;
  if (leads) {
    few.values[0] = first;
    for (u32 j = 0; j < kFewValues; j++) few.counts[j] = 0;
  }
  for (;; found++) {
    u32 &earliest = work.place[found % 2];  /* the other one may still be read */
    if (leads) earliest = kSampleMax;
    barrier(0, kChooseThreads);
    find_unlike(few, part, found, &earliest);
    barrier(0, kChooseThreads);
    place = earliest;
    if (place == kSampleMax || found == kFewValues) break;
    if (leads) few.values[found] = read_at(src, sample_place(place, n));
  }
  count_values(few, part, found);
  if (leads) few.found = place == kSampleMax ? found : kFewValues + 1;
  barrier(0, kChooseThreads);
}
