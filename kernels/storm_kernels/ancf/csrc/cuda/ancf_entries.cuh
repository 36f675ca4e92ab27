/* Looks up codes in a table in shared memory, and computes the planes of a run from the entries.
 *
 * Bit 0 of byte p of an element's entry is its bit of plane p. The planes are first codes, second
 * codes and, if they fit the index, the residue's bits besides its whole bytes. So the entries of
 * eight elements, shifted by 0..7 and added, are one byte of each plane. An element with a first
 * code has a second code of 0; an escape has all ones in both codes.
 */
#pragma once
#include <ancf_lanes.cuh>

template <class C>
struct CodeTable {
  static constexpr u32 kWhole = C::kResidue / 8 * 8;  /* bits of the residue in whole bytes */
  static constexpr u32 kLeft = C::kResidue - kWhole;  /* the other bits of the residue */
  static constexpr bool kHoldsLeft = kLeft != 0 && C::kBits - kWhole <= 8;
  static constexpr u32 kFrom = kHoldsLeft ? kWhole : C::kResidue;  /* first bit of the index */
  static constexpr u32 kIndexBits = C::kBits - kFrom;
  static constexpr u32 kIndexes = 1u << kIndexBits;
  static constexpr u32 kCodePlanes = C::kFirst + C::kSecond;
  static constexpr u32 kPlanes = kCodePlanes + (kHoldsLeft ? kLeft : 0);
  static constexpr u32 kWords = kPlanes <= 4 ? 1 : kPlanes <= 8 ? 2 : 4;
  static_assert(kPlanes <= 16, "entries of at most four words");

  u32 entries[kIndexes * kWords];

  /* Returns the table index of an element: its symbol, and residue bits if the table has them. */
  DEVICE static u32 index(Element x) {
    constexpr u32 kTurned = C::kRotate && kFrom ? 1 : 0;  /* else the sign is still on top */
    return static_cast<u32>(x >> (C::kDrop + kFrom - kTurned)) & (kIndexes - 1);
  }
  /* Returns the bits of the rotated element from kFrom on. */
  DEVICE static u32 top(u32 index) {
    if (!C::kRotate || kFrom) return index;
    return (index << 1 | index >> (kIndexBits - 1)) & (kIndexes - 1);
  }

  /* Adds the entry of element number `i` to the sums of eight elements. */
  DEVICE void add(u32 (&sums)[kWords], u32 index, u32 i) const {
    const u32 *entry = entries + index * kWords;
    if constexpr (kWords == 1) {
      sums[0] += entry[0] << i;
    } else if constexpr (kWords == 2) {
      uint2 both = *reinterpret_cast<const uint2 *>(entry);
      sums[0] += both.x << i;
      sums[1] += both.y << i;
    } else {
      uint4 all = *reinterpret_cast<const uint4 *>(entry);
      sums[0] += all.x << i;
      sums[1] += all.y << i;
      sums[2] += all.z << i;
      sums[3] += all.w << i;
    }
  }
  /* Returns bits [from, from + count) of an element's planes. */
  DEVICE u32 field(u32 index, u32 from, u32 count) const {
    u32 value = 0;
    for (u32 i = 0; i < count; i++) {
      u32 plane = from + i;
      value |= (entries[index * kWords + plane / 4] >> (8 * (plane % 4)) & 1) << i;
    }
    return value;
  }

  /* Fills the table; all threads of the block call it before any uses the table. */
  DEVICE void fill(const Plan &plan) {
    for (u32 at = thread_in_block(); at < kIndexes; at += threads_in_block()) {
      u32 symbol = top(at) >> (C::kResidue - kFrom), code = 0;
      while (code < plan.dict_count && plan.window[code] != symbol) code++;
      bool found = code < plan.dict_count, first = found && code < C::kFirstSlots;
      u32 second = first ? 0 : found ? code - C::kFirstSlots : C::kSecondSlots;
      u32 bits = (first ? code : C::kFirstSlots) | second << C::kFirst;
      if (kHoldsLeft) bits |= (top(at) & low_bits(kLeft)) << kCodePlanes;
      for (u32 word = 0; word < kWords; word++) entries[at * kWords + word] = spread_nibble(bits >> (4 * word));
    }
  }
  /* Moves bit i of a nibble to bit 0 of byte i. */
  DEVICE static u32 spread_nibble(u32 bits) {
    return (bits & 1) | (bits & 2) << 7 | (bits & 4) << 14 | (bits & 8) << 21;
  }
};

/* Returns the bytes of eight elements that contain the residue's bits besides its whole bytes. */
template <class C>
DEVICE void left_bytes(const Octet &octet, u32 &low, u32 &high) {
  constexpr u32 kWhole = CodeTable<C>::kWhole;
  if constexpr (kWidth == 2 && !C::kRotate) {
    constexpr u32 kPick = kWhole == 0 ? 0x6420 : 0x7531;
    low = pick_bytes(octet.words[0], octet.words[1], kPick);
    high = pick_bytes(octet.words[2], octet.words[3], kPick);
  } else if constexpr (kWidth == 4 && !C::kRotate && C::kDrop % 8 == 0) {
    constexpr u32 kByte = (C::kDrop + kWhole) / 8, kPick = kByte | (4 + kByte) << 4;
    low = pick_bytes(pick_bytes(octet.words[0], octet.words[1], kPick), pick_bytes(octet.words[2], octet.words[3], kPick), 0x5410);
    high = pick_bytes(pick_bytes(octet.words[4], octet.words[5], kPick), pick_bytes(octet.words[6], octet.words[7], kPick), 0x5410);
  } else {
    u64 turned[8];
#pragma unroll
    for (u32 i = 0; i < 8; i++) turned[i] = C::turned(octet.at(i));
    pack_fields<kWhole, 8>(turned, 8, low, high);
  }
}

/* One word of each bit plane of a run, and the flags of elements without a first code, or any. */
template <class C>
struct RunPlanes {
  using Table = CodeTable<C>;
  u32 left[Table::kLeft ? Table::kLeft : 1], first[C::kFirst], second[C::kSecond ? C::kSecond : 1];
  u32 missed, escaped;

  /* `exists`: flags of the run's elements that are not padding. */
  DEVICE static RunPlanes of(const Run &run, u32 exists, const Table &table) {
    RunPlanes made;
    u32 sums[kOctets][Table::kWords] = {}, bytes[2][kOctets], inexact = 0;
#pragma unroll
    for (u32 number = 0; number < kOctets; number++) {
      Octet octet = run.octet(number);
#pragma unroll
      for (u32 i = 0; i < 8; i++) {
        Element x = octet.at(i);
        table.add(sums[number], Table::index(x), i);
        if (C::kDrop) inexact |= static_cast<u32>(x & C::kDropMask);
      }
      if constexpr (Table::kLeft != 0 && !Table::kHoldsLeft) left_bytes<C>(octet, bytes[0][number], bytes[1][number]);
    }
    made.take(sums, exists);
    if constexpr (Table::kLeft != 0 && !Table::kHoldsLeft) made.take_left(bytes);
    if (C::kDrop && inexact) made.take_inexact(run, exists);
    made.find_flags(exists);
    return made;
  }

  /* Converts the sums of a run's octets to planes; padding has codes of 0. */
  DEVICE void take(const u32 (&sums)[kOctets][Table::kWords], u32 exists) {
    u32 planes[4 * Table::kWords];
#pragma unroll
    for (u32 word = 0; word < Table::kWords; word++) {
      u32 four[4] = {sums[0][word], sums[1][word], sums[2][word], sums[3][word]};
      transpose_bytes(four);
      for (u32 i = 0; i < 4; i++) planes[4 * word + i] = four[i];
    }
#pragma unroll
    for (u32 i = 0; i < Table::kPlanes; i++) {
      if (i < C::kFirst) first[i] = planes[i] & exists;
      else if (i < Table::kCodePlanes) second[i - C::kFirst] = planes[i] & exists;
      else left[i - Table::kCodePlanes] = planes[i];
    }
  }
  DEVICE void take_left(u32 (&bytes)[2][kOctets]) {
    u32 words[8];
    transpose_bytes(bytes[0]);
    transpose_bytes(bytes[1]);
    for (u32 i = 0; i < 8; i++) words[i] = bytes[i / 4][i % 4];
    transpose_bits(words);
    for (u32 i = 0; i < Table::kLeft; i++) left[i] = words[i];
  }
  /* Marks elements whose dropped bits are not 0 as escapes. */
  DEVICE void take_inexact(const Run &run, u32 exists) {
    u32 inexact = 0;
#pragma unroll 1
    for (u32 i = 0; i < kRunElements; i++) inexact |= (C::is_exact(run.element(i)) ? 0u : 1u) << i;
    for (u32 i = 0; i < C::kFirst; i++) first[i] |= inexact & exists;
    for (u32 i = 0; i < C::kSecond; i++) second[i] |= inexact & exists;
  }
  DEVICE void find_flags(u32 exists) {
    missed = exists;
    for (u32 i = 0; i < C::kFirst; i++) missed &= first[i];
    escaped = missed;
    for (u32 i = 0; i < C::kSecond; i++) escaped &= second[i];
  }
};

/* The whole bytes of a run's residues, which replace its elements in memory: kWhole / 4 words per
 * octet, in parts of 32, 16 and 8 bits. */
template <class C>
struct WholeParts {
  static constexpr u32 kWhole = CodeTable<C>::kWhole;
  static constexpr u32 kWords = kWhole / 32 * 32, kHalves = kWhole / 16 * 16;
  static constexpr u32 kOctetWords = kWhole / 4;

  /* Converts the elements at `from` to whole bytes at `to`, the same memory. kAtOnce: octets that
   * are read before any is written; all of them if `from` and `to` have different layouts. */
  template <u32 kAtOnce>
  DEVICE static void replace(const Run &from, const Run &to) {
#pragma unroll
    for (u32 begin = 0; begin < kOctets; begin += kAtOnce) {
      Octet octets[kAtOnce];
#pragma unroll
      for (u32 i = 0; i < kAtOnce; i++) octets[i] = from.octet(begin + i);
#pragma unroll
      for (u32 i = 0; i < kAtOnce; i++) put(to, begin + i, octets[i]);
    }
  }
  DEVICE static void put(const Run &run, u32 number, const Octet &octet) {
    u32 words[kOctetWords ? kOctetWords : 1];
    split(octet, words);
#pragma unroll
    for (u32 i = 0; i < kOctetWords; i += 2) {
      *reinterpret_cast<uint2 *>(run.at(4 * (kOctetWords * number + i))) = make_uint2(words[i], words[i + 1]);
    }
  }

  template <u32 kSize>
  DEVICE static void split(const Octet &octet, u32 (&words)[kSize]) {
    if constexpr (kWidth == 2 && kWhole == 8) {
      split_halves(octet.words[0], octet.words[1], words[0]);
      split_halves(octet.words[2], octet.words[3], words[1]);
    } else if constexpr (kWidth == 4 && C::kDrop == 16 && kWhole == 8) {
      for (u32 i = 0; i < 2; i++) {
        u32 low = pick_bytes(octet.words[4 * i], octet.words[4 * i + 1], 0x7632);
        u32 high = pick_bytes(octet.words[4 * i + 2], octet.words[4 * i + 3], 0x7632);
        split_halves(low, high, words[i]);
      }
    } else if constexpr (kWidth == 4 && C::kDrop == 0) {
      u32 turned[8];
      for (u32 i = 0; i < 8; i++) turned[i] = C::kRotate ? octet.words[i] << 1 | octet.words[i] >> 31 : octet.words[i];
      for (u32 i = 0; i < 4; i++) words[i] = pick_bytes(turned[2 * i], turned[2 * i + 1], 0x5410);
      if constexpr (kWhole == 24) {
        for (u32 i = 0; i < 2; i++) {
          u32 low = pick_bytes(turned[4 * i], turned[4 * i + 1], 0x0062);
          words[4 + i] = pick_bytes(low, pick_bytes(turned[4 * i + 2], turned[4 * i + 3], 0x0062), 0x5410);
        }
      }
    } else {
      split_any(octet, words);
    }
  }

  /* Returns the low bytes of four rotated elements of 16 bits. */
  DEVICE static void split_halves(u32 low, u32 high, u32 &bytes) {
    bytes = pick_bytes(low, high, 0x6420);
    if (!C::kRotate) return;
    u32 signs = pick_bytes(low, high, 0x7531) >> 7;
    bytes = (bytes << 1 & 0xfefefefe) | (signs & 0x01010101);
  }

  template <u32 kSize>
  DEVICE static void split_any(const Octet &octet, u32 (&words)[kSize]) {
    u64 turned[8];
#pragma unroll
    for (u32 i = 0; i < 8; i++) turned[i] = C::turned(octet.at(i));
    if constexpr (kWords != 0) {
      for (u32 i = 0; i < 8; i++) words[i] = static_cast<u32>(turned[i]);
    }
    if constexpr (kHalves != kWords) {
      constexpr u32 kAt = kWords / 4;
      pack_fields<kWords, 16>(turned, 4, words[kAt], words[kAt + 1]);
      pack_fields<kWords, 16>(turned + 4, 4, words[kAt + 2], words[kAt + 3]);
    }
    if constexpr (kWhole != kHalves) pack_fields<kHalves, 8>(turned, 8, words[kHalves / 4], words[kHalves / 4 + 1]);
  }

  /* Copies the parts of runs [0, runs) at `stage` to their planes from element `first` on. For a
   * fixed block (else a record) runs are staged and planes are aligned to eight bytes. */
  template <bool kInBlock>
  DEVICE static void store(const PlaneSet &planes, u32 first, u32 runs, u8 *stage, u32 lane) {
    if constexpr (kWords != 0) store_part<0, 32, kInBlock>(planes, first, runs, stage, lane);
    if constexpr (kHalves != kWords) store_part<kWords, 16, kInBlock>(planes, first, runs, stage, lane);
    if constexpr (kWhole != kHalves) store_part<kHalves, 8, kInBlock>(planes, first, runs, stage, lane);
  }

  template <u32 kAt, u32 kSize, bool kInBlock>
  DEVICE static void store_part(const PlaneSet &planes, u32 first, u32 runs, u8 *stage, u32 lane) {
    constexpr u32 kOfRun = kSize / 2, kOfOctet = kSize / 8;  /* pairs of words */
    u8 *to = planes.plane(kAt) + first * (kSize / 8);
#pragma unroll
    for (u32 step = 0; step < kOfRun; step++) {
      u32 pair = step * kWarpThreads + lane, run = pair / kOfRun, inside = pair % kOfRun;
      if (run >= runs) break;
      u32 word = inside / kOfOctet * kOctetWords + kAt / 4 + inside % kOfOctet * 2;
      Run from = kInBlock ? Run::staged(stage, run) : Run::scattered(stage, run);
      uint2 both = *reinterpret_cast<const uint2 *>(from.at(4 * word));
      if (kInBlock) {
        store_once(reinterpret_cast<uint2 *>(to) + pair, both);
      } else {
        reinterpret_cast<u32 *>(to)[2 * pair] = both.x;
        reinterpret_cast<u32 *>(to)[2 * pair + 1] = both.y;
      }
    }
  }
};
