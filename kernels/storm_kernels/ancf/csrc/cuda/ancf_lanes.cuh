/* How encoders distribute a tile over the lanes of one warp: in batches of 1,024 elements, each
 * lane has 32 consecutive elements, its run. A run is one word of every bit plane, so a lane
 * computes planes word by word without other lanes. Elements are ordered by batch, then lane, then
 * position in the run, so ranks computed here are ranks in the tensor.
 */
#pragma once
#include <ancf_bits.cuh>
#include <ancf_code.cuh>

constexpr u32 kRunElements = 32;
constexpr u32 kRunBytes = kRunElements * kWidth;
constexpr u32 kBatchElements = kRunElements * kWarpThreads;
constexpr u32 kBatchBytes = kBatchElements * kWidth;
constexpr u32 kOctets = kRunElements / 8;
constexpr u32 kRowBytes = 16 * kWarpThreads;  /* bytes that a warp copies at once */

/* The offset of byte `offset` of staged elements in shared memory: pieces of 16 bytes are permuted
 * inside a run, so that lanes that read their runs have no bank conflicts. */
constexpr u32 kSwizzleShift = kWidth == 8 ? 4 : 3;
constexpr u32 kSwizzleMask = (kWidth == 1 ? 1 : kWidth == 2 ? 3 : 7) * 16;
DEVICE u32 swizzled(u32 offset) { return offset ^ (offset >> kSwizzleShift & kSwizzleMask); }
/* The same for an already swizzled offset in a row, for the row that begins at `row`. */
DEVICE u32 in_row(u32 own, u32 row) { return (own ^ (row >> kSwizzleShift & kSwizzleMask)) + row; }

/* Eight elements. */
struct Octet {
  u32 words[2 * kWidth];

  DEVICE Element at(u32 i) const {
    if (kWidth == 8) return words[2 * i % (2 * kWidth)] | static_cast<u64>(words[(2 * i + 1) % (2 * kWidth)]) << 32;
    return words[i * kWidth / 4] >> (8 * (i * kWidth % 4)) & (kWidth == 4 ? ~0u : (1u << 8 * kWidth % 32) - 1);
  }
};

/* A lane's 32 elements, or as many bytes of planes, in shared memory: byte b is at `own ^ b`. */
struct Run {
  u8 *memory;
  u32 own;

  /* A run of fetched elements. */
  DEVICE static Run staged(u8 *memory, u32 number) { return {memory, swizzled(number * kRunBytes)}; }
  /* A run in the layout of the tensor. */
  DEVICE static Run plain(u8 *memory, u32 number) { return {memory, number * kRunBytes}; }
  /* A run of words: lanes that access the same word have few bank conflicts; pairs are adjacent. */
  DEVICE static Run scattered(u8 *memory, u32 number) {
    constexpr u32 kTogether = kWidth < 4 ? 4 / kWidth : 1;  /* runs that fill all banks */
    return {memory, number * kRunBytes ^ number / kTogether * 8 % kRunBytes};
  }
  DEVICE u8 *at(u32 byte) const { return memory + (own ^ byte); }
  DEVICE Element element(u32 i) const { return read_staged(at(i * kWidth), 0); }

  DEVICE Octet octet(u32 number) const {
    Octet made;
    if constexpr (kWidth == 1) {
      uint2 both = *reinterpret_cast<const uint2 *>(at(8 * number));
      made.words[0] = both.x;
      made.words[1] = both.y;
    } else {
#pragma unroll
      for (u32 i = 0; i < kWidth / 2; i++) {
        uint4 piece = *reinterpret_cast<const uint4 *>(at(8 * kWidth * number + 16 * i));
        made.words[4 * i] = piece.x;
        made.words[4 * i + 1] = piece.y;
        made.words[4 * i + 2] = piece.z;
        made.words[4 * i + 3] = piece.w;
      }
    }
    return made;
  }
  DEVICE u32 &word(u32 number) const { return *reinterpret_cast<u32 *>(at(4 * number)); }
};

/* Returns the flags of a run's elements that exist; `first` is its first element of `count`. */
DEVICE u32 existing(u32 first, u32 count) { return first >= count ? 0 : low_bits(count - first); }

/* Moves byte i of word j to byte j of word i. */
DEVICE void transpose_bytes(u32 (&words)[4]) {
  u32 low = pick_bytes(words[0], words[1], 0x5140), high = pick_bytes(words[0], words[1], 0x7362);
  u32 low2 = pick_bytes(words[2], words[3], 0x5140), high2 = pick_bytes(words[2], words[3], 0x7362);
  words[0] = pick_bytes(low, low2, 0x5410);
  words[1] = pick_bytes(low, low2, 0x7632);
  words[2] = pick_bytes(high, high2, 0x5410);
  words[3] = pick_bytes(high, high2, 0x7632);
}

/* Exchanges bit j of each byte of word i with bit i of the same byte of word j. */
DEVICE void transpose_bits(u32 (&words)[8]) {
  constexpr u32 kMasks[3] = {0x55555555, 0x33333333, 0x0f0f0f0f};
#pragma unroll
  for (u32 level = 0; level < 3; level++) {
    u32 step = 1u << level, mask = kMasks[level];
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
      if (i & step) continue;
      u32 low = words[i], high = words[i + step];
      words[i] = choose_bits(mask, low, high << step);
      words[i + step] = choose_bits(mask, low >> step, high);
    }
  }
}

/* Returns the bits of the low half at even positions, those of the high half at odd positions. */
DEVICE u32 interleaved(u32 halves) { return to_even_bits(halves & 0xffff) | to_even_bits(halves >> 16) << 1; }

/* Packs the bits that a mask selects, in order: within four bytes at a time, which are then
 * joined. */
struct BitGather {
  BitMoves<8> moves;
  u32 mask;

  DEVICE static BitGather of(u32 mask) { return {BitMoves<8>::of(mask), mask}; }

  /* Packs the selected bits of each byte of `word` to its low end; `word` has no other bits. */
  DEVICE u32 in_bytes(u32 word) const { return moves.together(word); }
  /* Packs the selected bits of the whole word to its low end. */
  DEVICE u32 in_word(u32 word) const {
    word = in_bytes(word);
    return (word & 0xff) | (word >> 8 & 0xff) << ones(mask & 0xff) |
           (word >> 16 & 0xff) << ones(mask & 0xffff) | word >> 24 << ones(mask & 0xffffff);
  }
};

/* Writes `bits` at bit number `place` of a stream in shared memory that is 0 from there on. */
DEVICE void append_bits(u32 *stream, u32 place, u32 bits) {
  if (bits == 0) return;
  u32 shift = place % 32, rest = bits >> 1 >> (31 - shift);
  fetch_or(stream + place / 32, bits << shift);
  if (rest != 0) fetch_or(stream + place / 32 + 1, rest);
}

/* Copies shared words to memory that is only aligned to words; by one warp. */
DEVICE void copy_words(u8 *to, const u32 *from, u32 count, u32 lane) {
  for (u32 i = lane; i < count; i += kWarpThreads) reinterpret_cast<u32 *>(to)[i] = from[i];
}
DEVICE void copy_bytes(u8 *to, const u8 *from, u32 count, u32 lane) {
  for (u32 i = lane; i < count; i += kWarpThreads) to[i] = from[i];
}
