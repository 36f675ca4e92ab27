/* The sample for the choice (FORMAT.md, section 9, rule 3); each thread has a part.
 *
 * A thread's part is 16 neighbouring elements, at most a few sectors of memory. A thread computes
 * one address and issues one to eight loads; to compute an address per element would cost more time
 * than the loads. Element `i` of the sample is the same as in choose.py.
 */
#pragma once
#include <ancf_format.cuh>

constexpr u32 kChooseThreads = 1024;
constexpr u32 kChooseWarps = kChooseThreads / kWarpThreads;
constexpr u32 kOwn = kSampleMax / kChooseThreads;  /* sampled elements of a thread */
static_assert(kSampleRun % kOwn == 0, "a thread's part lies in one run");
static_assert(kOwn % 16 == 0, "a thread's part is whole 16-byte words");

template <u32 kBytes> struct Holding { using Type = u32; };
template <> struct Holding<8> { using Type = u64; };
using Value = Holding<kWidth>::Type;
constexpr Value kAllBits = static_cast<Value>(~0ull >> (64 - 8 * kWidth));

DEVICE Value read_at(const u8 *src, u64 index) {
  const u8 *address = src + index * kWidth;
  if (reinterpret_cast<u64>(address) % kWidth == 0) {
    if (kWidth == 8) return static_cast<Value>(*reinterpret_cast<const u64 *>(address));
    if (kWidth == 4) return *reinterpret_cast<const u32 *>(address);
    if (kWidth == 2) return *reinterpret_cast<const u16 *>(address);
    return *address;
  }
  Value value = 0;
  for (u32 i = 0; i < kWidth; i++) value |= static_cast<Value>(address[i]) << (8 * i);
  return value;
}

DEVICE u32 sample_size(u64 n) { return n < kSampleMax ? static_cast<u32>(n) : kSampleMax; }

/* Returns the index of the sample's element number `i` in a tensor of n elements. */
DEVICE u64 sample_place(u32 i, u64 n) {
  if (n <= kSampleMax) return i;
  u64 last = n / kSampleRun - 1;
  return i / kSampleRun * last / (kSampleRuns - 1) * kSampleRun + i % kSampleRun;
}

/* Elements [start, start + kOwn) of the sample, of which `own` exist. The tensor's first element,
 * which every sample contains, replaces the others, so facts about a whole part remain true. */
struct Part {
  Value x[kOwn];
  u32 start, own;
  DEVICE static Part of(const u8 *src, u64 n, Value first) {
    Part made;
    u32 count = sample_size(n);
    made.start = thread_in_block() * kOwn;
    made.own = made.start >= count ? 0 : count - made.start < kOwn ? count - made.start : kOwn;
    const u8 *from = src + sample_place(made.start, n) * kWidth;
    if (made.own == kOwn && reinterpret_cast<u64>(from) % 16 == 0) made.load_words(from);
    else made.load_each(from, first);
    return made;
  }

private:
  DEVICE void load_words(const u8 *from) {
    constexpr u32 kWords = kWidth * kOwn / 16, kPerWord = 16 / kWidth;
    uint4 words[kWords];
#pragma unroll
    for (u32 i = 0; i < kWords; i++) words[i] = reinterpret_cast<const uint4 *>(from)[i];
#pragma unroll
    for (u32 i = 0; i < kOwn; i++) x[i] = piece(words[i / kPerWord], i % kPerWord);
  }
  DEVICE void load_each(const u8 *from, Value first) {
#pragma unroll
    for (u32 i = 0; i < kOwn; i++) x[i] = i < own ? read_at(from, i) : first;
  }
  DEVICE static Value piece(const uint4 &word, u32 i) {
    const u32 at = i * kWidth / 4;  /* a constant once the loop is unrolled */
    u32 low = at == 0 ? word.x : at == 1 ? word.y : at == 2 ? word.z : word.w;
    if (kWidth == 8) return static_cast<Value>(low | static_cast<u64>(at == 0 ? word.y : word.w) << 32);
    return low >> (8 * (i * kWidth % 4)) & kAllBits;
  }
};
