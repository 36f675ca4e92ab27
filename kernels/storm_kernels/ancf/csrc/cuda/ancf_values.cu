/* Makes the dictionary of whole values for modes ternary and values (FORMAT.md, sections 10 and
 * 11).
 *
 * One block sorts the sample, then sorts its runs of equal values by length. The order is that of
 * choose.py: count descending, value ascending. Only forced modes use this kernel: the sorts take
 * longer than a choice among all modes may.
 */
#include <ancf_sample.cuh>

constexpr u32 kValuesSharedBytes = kSampleMax * (sizeof(Value) + sizeof(u32));
constexpr u32 kNoRun = 0xffffffff;

/* Read by the host: a block's dynamic shared memory in bytes. */
extern "C" __device__ const u32 ancf_values_shared_bytes = kValuesSharedBytes;

/* Sorts ascending, in place; `count` is a power of two. The whole block calls it. */
template <class T>
DEVICE void sort_shared(T *items, u32 count) {
  for (u32 size = 2; size <= count; size *= 2) {
    for (u32 step = size / 2; step; step /= 2) {
      barrier(0, kChooseThreads);
      for (u32 i = thread_in_block(); i < count / 2; i += kChooseThreads) {
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
  barrier(0, kChooseThreads);
}

/* Returns the end of the run of equal items that starts at `start`, among `count` sorted items. */
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

/* Returns the bits of mode values' codes, from the number of zeros in the sample. */
DEVICE u32 values_bits(u32 policy, u32 zeros, u32 count) {
  enum Policy : u32 { kConservative, kAdaptive, kAggressive };
  if (policy == kAggressive) return 9;
  if (policy == kConservative) return zeros * 10 >= count * 9 ? 7 : 8;
  return zeros * 2 >= count ? 7 : zeros * 10 >= count ? 8 : 9;
}

/* Returns the plan with a dictionary of `found` values; a raw plan if the blob would not fit. */
DEVICE Plan plan_with(const Plan &asked, u32 mode, u32 k1, u32 found) {
  Plan made = {};
  made.raw_nbytes = asked.raw_nbytes;
  made.dtype = asked.dtype;
  made.flags = asked.flags;
  made.mode = mode;
  made.k1 = k1;
  made.dict_count = found;
  derive(made);
  if (made.payload_offset <= kHeaderBytes + made.raw_nbytes) return made;
  made.mode = kRaw;
  made.k1 = made.dict_count = 0;
  derive(made);
  return made;
}

/* Runs after ancf_choose if mode ternary or values is forced: finds the most frequent whole values
 * of the sample. One block of kChooseThreads. */
KERNEL(kChooseThreads)
ancf_values(const u8 *__restrict__ src, u8 *scratch, u32 mode, u32 policy) {
  let_next_begin();
  await_launches_before();
  Plan &plan = *reinterpret_cast<Plan *>(scratch);
  u64 n = plan.raw_nbytes / kWidth;
  if (n == 0) return;
  Value *items = reinterpret_cast<Value *>(shared_memory());
  u32 *runs = reinterpret_cast<u32 *>(items + kSampleMax);
  u32 count = sample_size(n);
  for (u32 i = thread_in_block(); i < kSampleMax; i += kChooseThreads) {
    items[i] = i < count ? read_at(src, sample_place(i, n)) : kAllBits;
  }
  sort_shared(items, kSampleMax);
  u32 zeros = items[0] == 0 ? run_end(items, 0, count) : 0;
  u32 k1 = mode == kTernary ? 2 : values_bits(policy, zeros, count);
  for (u32 i = thread_in_block(); i < kSampleMax; i += kChooseThreads) {
    bool starts = i < count && (i == 0 || items[i] != items[i - 1]);
    runs[i] = starts ? (kSampleMax - (run_end(items, i, count) - i)) * kSampleMax + i : kNoRun;
  }
  sort_shared(runs, kSampleMax);
  u32 slots = (1u << k1) - 1;
  for (u32 i = thread_in_block(); i < slots; i += kChooseThreads) {
    if (runs[i] != kNoRun) values_of(scratch)[i] = items[runs[i] % kSampleMax];
  }
  if (thread_in_block() != 0) return;
  u32 found = 0;
  while (found < slots && runs[found] != kNoRun) found++;
  plan = plan_with(plan, mode, k1, found);
}
