/* Finds the distinct values of a sample that has no more than three, for mode ternary.
 *
 * It is rarely called: a sample with four symbols has at least four values. All threads of the
 * block synchronise here.
 */
#pragma once
#include <ancf_decide.cuh>

struct FewWork {
  FewValues found;
  u32 place[2];  /* of the first element unlike all values so far; used in turn */
};

/* Sets `earliest` to the place of the first sampled element that is none of the found values. */
DEVICE void find_unlike(const FewValues &few, const Part &part, u32 found, u32 *earliest) {
  Value a = few.values[0], b = few.values[found > 1 ? 1 : 0], c = few.values[found > 2 ? 2 : 0];
  u32 unlike = 0;  /* one bit per element; missing elements equal the first */
#pragma unroll
  for (u32 i = 0; i < kOwn; i++) unlike |= part.x[i] != a && part.x[i] != b && part.x[i] != c ? 1u << i : 0;
  if (unlike) fetch_min(earliest, part.start + lowest_bit(unlike));
}

DEVICE void count_values(FewValues &few, const Part &part, u32 found) {
#pragma unroll 1
  for (u32 j = 0; j < found; j++) {
    Value value = few.values[j];
    u32 count = j == 0 ? part.own - kOwn : 0;  /* missing elements equal the first */
#pragma unroll
    for (u32 i = 0; i < kOwn; i++) count += part.x[i] == value;
    count = sum_of_lanes(count);
    if (thread_in_block() % kWarpThreads == 0) fetch_add(&few.counts[j], count);
  }
}

/* Fills `work.found`; the whole block calls it. The result is complete on return. */
DEVICE void find_few(FewWork &work, const u8 *src, u64 n) {
  FewValues &few = work.found;
  Value first = read_at(src, 0);
  Part part = Part::of(src, n, first);  /* loaded again: rare, and saves registers */
  bool leads = thread_in_block() == 0;
  u32 found = 1, place = 0;
  if (leads) {
    few.values[0] = first;
    for (u32 j = 0; j < kFewValues; j++) few.counts[j] = 0;
  }
#pragma unroll 1
  for (;; found++) {
    u32 &earliest = work.place[found % 2];  /* the other may still be read */
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
