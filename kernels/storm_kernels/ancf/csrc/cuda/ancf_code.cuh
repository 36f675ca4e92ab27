/* Splits elements into symbols and residues, and writes their planes (FORMAT.md, sections 4 and 5).
 *
 * `Code` has the parameters of a coding as compile-time constants, so every piece of a residue is a
 * few constant shifts. A function here accesses only the plane bytes of the calling lane's
 * elements.
 */
#pragma once
#include <ancf_tile.cuh>

template <u32 kDropBits, u32 kRotateBits, u32 kFirstBits, u32 kSecondBits>
struct Code {
  static constexpr u32 kDrop = kDropBits, kRotate = kRotateBits;
  static constexpr u32 kFirst = kFirstBits, kSecond = kSecondBits;
  static constexpr u32 kBits = 8 * kWidth - kDrop;
  static constexpr u32 kResidue = kMantissa - kDrop + kRotate;
  static constexpr u32 kSymbol = kBits - kResidue;
  static constexpr u32 kSymbols = 1u << kSymbol;
  static constexpr u32 kEscapeBits = kDrop ? 8 * kWidth : kSymbol;
  static constexpr u32 kEscapeBytes =
      kEscapeBits <= 8 ? 1 : kEscapeBits <= 16 ? 2 : kEscapeBits <= 32 ? 4 : 8;
  static constexpr u32 kFirstSlots = (1u << kFirst) - 1;
  static constexpr u32 kSecondSlots = kSecond ? (1u << kSecond) - 1 : 0;
  static constexpr u32 kPlaneBits = kResidue + kFirst;

  static constexpr u64 kMask = kBits == 64 ? ~0ull : (1ull << kBits % 64) - 1;
  static constexpr u64 kDropMask = (1ull << kDrop) - 1;

  DEVICE static u64 turned(Element x) {
    u64 kept = x >> kDrop;
    return kRotate ? (kept << 1 | kept >> (kBits - 1)) & kMask : kept;
  }
  DEVICE static u64 turned_back(u64 v) {
    u64 kept = kRotate ? (v >> 1 | v << (kBits - 1)) & kMask : v;
    return kept << kDrop;
  }
  DEVICE static u32 symbol(Element x) {
    if (!kRotate) return static_cast<u32>(x >> (kDrop + kResidue));
    return static_cast<u32>(x >> (kDrop + kResidue - 1)) & (kSymbols - 1);
  }
  /* Returns the bits of an element with this symbol and residue 0. */
  DEVICE static Element place(u64 symbol) { return turned_back(symbol << kResidue & kMask); }
  DEVICE static bool is_exact(Element x) { return (x & kDropMask) == 0; }
};

/* Returns element number `index` of an array in shared memory. */
DEVICE Element read_staged(const u8 *stage, u32 index) {
  if (kWidth == 8) return reinterpret_cast<const u64 *>(stage)[index];
  if (kWidth == 4) return reinterpret_cast<const u32 *>(stage)[index];
  if (kWidth == 2) return reinterpret_cast<const u16 *>(stage)[index];
  return stage[index];
}

DEVICE void write_staged(u8 *stage, u32 index, Element value) {
  if (kWidth == 8) reinterpret_cast<u64 *>(stage)[index] = value;
  else if (kWidth == 4) reinterpret_cast<u32 *>(stage)[index] = static_cast<u32>(value);
  else if (kWidth == 2) reinterpret_cast<u16 *>(stage)[index] = static_cast<u16>(value);
  else stage[index] = static_cast<u8>(value);
}

/* The lookup table for symbols in the encoder of pipeline fast, in shared memory. The entry of a
 * symbol has bit p of its code in bit 0 of byte p. So the entries of eight elements, shifted by
 * 0..7 and added, are their code planes. */
template <class C>
struct SymbolTable {
  u32 entry[C::kSymbols];
};

DEVICE u32 spread_code(u32 code) {
  return (code & 1) | (code & 2) << 7 | (code & 4) << 14;
}

/* Returns the first code of a symbol, all ones if it has none. */
template <class C>
DEVICE u32 first_code(const Plan &plan, u32 symbol) {
  u32 index = 0;
  while (index < plan.dict_count && plan.window[index] != symbol) index++;
  return index < plan.dict_count && index < C::kFirstSlots ? index : C::kFirstSlots;
}

template <class C>
DEVICE void fill_table(SymbolTable<C> &table, const Plan &plan) {
  for (u32 s = thread_in_block(); s < C::kSymbols; s += threads_in_block()) {
    table.entry[s] = spread_code(first_code<C>(plan, s));
  }
}

/* A set of planes: they start at `base` and have `padded` elements. */
struct PlaneSet {
  u8 *base;
  u32 padded;
  DEVICE u8 *plane(u32 bit) const { return base + padded / 8 * bit; }
};

struct ConstPlaneSet {
  const u8 *base;
  u32 padded;
  DEVICE const u8 *plane(u32 bit) const { return base + padded / 8 * bit; }
};

/* Reads kBits bits (a power of two up to 16) at bit number `place` of `plane`. */
template <u32 kBits>
DEVICE u32 read_lane_bits(const u8 *plane, u32 place) {
  if (kBits == 16) return *reinterpret_cast<const u16 *>(plane + place / 8);
  return plane[place / 8] >> (place % 8) & ((1u << kBits) - 1);
}

/* Stores one or two words of a lane's piece, two at once if kAligned. */
template <u32 kBytes, bool kAligned>
DEVICE void store_piece_words(u8 *at, u32 low, u32 high) {
  if (kBytes == 8 && kAligned) {
    store_once(reinterpret_cast<uint2 *>(at), make_uint2(low, high));
    return;
  }
  reinterpret_cast<u32 *>(at)[0] = low;
  if (kBytes == 8) reinterpret_cast<u32 *>(at)[1] = high;
}

/* Stores kBytes bytes of words; records are only 4-byte aligned. */
template <u32 kBytes>
DEVICE void store_words(u8 *at, u32 low, u32 high) {
  if (kBytes == 8) {
    reinterpret_cast<u32 *>(at)[0] = low;
    reinterpret_cast<u32 *>(at)[1] = high;
  } else if (kBytes == 4) {
    *reinterpret_cast<u32 *>(at) = low;
  } else {
    *reinterpret_cast<u16 *>(at) = static_cast<u16>(low);
  }
}

/* Packs bits [kAt, kAt + kSize) of up to eight values into at most eight bytes. */
template <u32 kAt, u32 kSize>
DEVICE void pack_fields(const u64 *values, u32 count, u32 &low, u32 &high) {
  low = high = 0;
#pragma unroll
  for (u32 i = 0; i < 8; i++) {
    if (i >= count) continue;
    u32 field = static_cast<u32>(values[i] >> kAt);
    if (kSize < 32) field &= (1u << kSize % 32) - 1;
    if (i * kSize < 32) low |= field << (i * kSize % 32);
    else high |= field << (i * kSize % 32);
  }
}

/* Writes one whole-byte piece of a residue, bits [kAt, kAt + kSize). */
template <u32 kAt, u32 kSize>
DEVICE void write_piece(const PlaneSet &planes, u32 first, const u64 *values, bool wanted) {
  constexpr u32 kBytes = kPiece * kSize / 8;
  u32 low, high;
  pack_fields<kAt, kSize>(values, kPiece, low, high);
  if (wanted) store_words<kBytes>(planes.plane(kAt) + first * (kSize / 8), low, high);
}

/* Writes the residues of a lane's piece of elements: whole bytes, then planes of the other bits. */
template <class C>
DEVICE void write_residues(const PlaneSet &planes, u32 first, const u64 (&turned)[kPiece],
                           bool wanted, u32 lane) {
  constexpr u32 kWords = C::kResidue / 32 * 32;
  constexpr u32 kHalves = C::kResidue / 16 * 16;
  constexpr u32 kBytes = C::kResidue / 8 * 8;
  static_assert(kWords <= 32, "at most one u32 piece");
  if constexpr (kWords != 0) write_piece<0, 32>(planes, first, turned, wanted);
  if constexpr (kHalves != kWords) write_piece<kWords, 16>(planes, first, turned, wanted);
  if constexpr (kBytes != kHalves) write_piece<kHalves, 8>(planes, first, turned, wanted);
  constexpr u32 kLeft = C::kResidue - kBytes;
  if constexpr (kLeft != 0) {
    u32 low[2], high[2];
#pragma unroll
    for (u32 octet = 0; octet < (kPiece + 7) / 8; octet++) {
      pack_fields<kBytes, 8>(turned + 8 * octet, kPiece < 8 ? kPiece : 8, low[octet], high[octet]);
      transpose_bits(low[octet], high[octet]);
    }
#pragma unroll
    for (u32 bit = 0; bit < kLeft; bit++) {
      u32 value = (bit < 4 ? low[0] : high[0]) >> (8 * (bit % 4)) & 0xff;
      if (kPiece > 8) value |= ((bit < 4 ? low[1] : high[1]) >> (8 * (bit % 4)) & 0xff) << 8;
      write_lane_bits<kPiece>(planes.plane(kBytes + bit), first, value, wanted, lane);
    }
  }
}

/* Writes the codes of a piece; returns the flags of its escapes. */
template <class C>
DEVICE u32 write_codes(const PlaneSet &planes, u32 first, const uint4 &piece, u32 valid,
                       const SymbolTable<C> &table, u32 lane) {
  u32 sums[2] = {0, 0};
#pragma unroll
  for (u32 i = 0; i < kPiece; i++) sums[i / 8] += table.entry[C::symbol(element(piece, i))] << (i % 8);
  u32 keep = valid >= kPiece ? 0xffff : (1u << valid) - 1;
  sums[0] &= (keep & 0xff) * 0x01010101u;
  sums[1] &= (keep >> 8) * 0x01010101u;
  u32 escaped = 0xffff;
#pragma unroll
  for (u32 bit = 0; bit < C::kFirst; bit++) {
    u32 value = (sums[0] >> (8 * bit) & 0xff) | (sums[1] >> (8 * bit) & 0xff) << 8;
    escaped &= value;
    write_lane_bits<kPiece>(planes.plane(C::kResidue + bit), first, value, first < planes.padded, lane);
  }
  return escaped;
}

template <Pipeline kPipeline, u32 kDrop, u32 kRotate, class Action>
DEVICE void with_code_bits(const Plan &plan, const Action &action) {
  if constexpr (kPipeline == kFast) {
    if constexpr (kDrop == 0) action.template run<Code<0, kRotate, 3, 0>>();
  } else {
    if (plan.k1 == 2) action.template run<Code<kDrop, kRotate, 2, 3>>();
    else action.template run<Code<kDrop, kRotate, 3, 4>>();
  }
}

template <Pipeline kPipeline, u32 kDrop, class Action>
DEVICE void with_code_drop(const Plan &plan, const Action &action) {
  if (plan.rotate) with_code_bits<kPipeline, kDrop, 1>(plan, action);
  else with_code_bits<kPipeline, kDrop, 0>(plan, action);
}

/* Runs `action` with the Code for the plan of a window, truncated or sparse blob. */
template <Pipeline kPipeline, class Action>
DEVICE void with_code(const Plan &plan, const Action &action) {
  if (plan.drop == 0) return with_code_drop<kPipeline, 0>(plan, action);
  if constexpr (kWidth == 4) {
    if (plan.drop == 16) with_code_drop<kPipeline, 16>(plan, action);
    else with_code_drop<kPipeline, 13>(plan, action);
  }
  if constexpr (kWidth == 8) with_code_drop<kPipeline, 29>(plan, action);
}
