/* Codes whose symbol, with the residue's left-over bits below it, fits one byte. A lane's piece of
 * elements then splits and joins by whole words, several elements per instruction. This holds for
 * all common float types (bfloat16 and float32 exponents, float16, float8, bf16 stored in fp32).
 * The bytes equal those of ancf_code.cuh's general functions.
 */
#pragma once
#include <ancf_code.cuh>

constexpr u32 kTops = 256;               /* values of a top byte */
constexpr u32 kPieceWords = kPiece / 4;  /* words with one byte for each of a lane's elements */

/* Returns the byte of element i from packed bytes. */
template <u32 kWords>
DEVICE u32 packed_byte(const u32 (&words)[kWords], u32 i) {
  return i % 4 == 3 ? words[i / 4] >> 24 : words[i / 4] >> (8 * (i % 4)) & 0xff;
}

template <class C>
struct Packed {
  static constexpr u32 kWhole = C::kResidue / 8 * 8;   /* bits stored as whole bytes */
  static constexpr u32 kLeft = C::kResidue - kWhole;   /* bits of the residue in the top byte */
  static constexpr bool kFits =
      kWidth <= 4 && C::kBits - kWhole <= 8 && (C::kBits == 8 || C::kBits == 16 || C::kBits == 32);
  static constexpr u32 kBytesLow = kPiece * kWhole / 8; /* of a lane's piece */

  /* A piece in parts: bits [0, 8) or [0, 16) of each element, bits [16, 24), top bytes. */
  u32 low[2], middle, tops[kPieceWords ? kPieceWords : 1];

  /* Rotates elements of kBits bits inside words left by one; turned_back is the inverse. */
  DEVICE static u32 turned(u32 word) {
    if (!C::kRotate) return word;
    if (C::kBits == 32) return word << 1 | word >> 31;
    constexpr u32 kLowest = C::kBits == 16 ? 0x00010001 : 0x01010101;
    return (word << 1 & ~kLowest) | (word >> (C::kBits - 1) & kLowest);
  }
  DEVICE static u32 turned_back(u32 word) {
    if (!C::kRotate) return word;
    if (C::kBits == 32) return word >> 1 | word << 31;
    constexpr u32 kHighest = C::kBits == 16 ? 0x80008000 : 0x80808080;
    return (word >> 1 & ~kHighest) | (word << (C::kBits - 1) & kHighest);
  }

  DEVICE static Packed split(const uint4 &piece) {
    Packed made = {};
    u32 words[4] = {piece.x, piece.y, piece.z, piece.w};
    if (C::kDrop == 16) {
      words[0] = pick_bytes(words[0], words[1], 0x7632);
      words[1] = pick_bytes(words[2], words[3], 0x7632);
    }
    for (u32 i = 0; i < 4; i++) words[i] = turned(words[i]);
    if constexpr (C::kBits == 8) {
      for (u32 i = 0; i < kPieceWords; i++) made.tops[i] = words[i];
    } else if constexpr (C::kBits == 16) {
      for (u32 i = 0; i < kPieceWords; i++) {
        made.low[i] = pick_bytes(words[2 * i], words[2 * i + 1], 0x6420);
        made.tops[i] = pick_bytes(words[2 * i], words[2 * i + 1], 0x7531);
      }
    } else {
      made.low[0] = pick_bytes(words[0], words[1], 0x5410);
      made.low[1] = pick_bytes(words[2], words[3], 0x5410);
      u32 first = pick_bytes(words[0], words[1], 0x7362), second = pick_bytes(words[2], words[3], 0x7362);
      made.middle = pick_bytes(first, second, 0x5410);
      made.tops[0] = pick_bytes(first, second, 0x7632);
    }
    return made;
  }

  DEVICE uint4 joined() const {
    u32 words[4] = {0, 0, 0, 0};
    if constexpr (C::kBits == 8) {
      for (u32 i = 0; i < kPieceWords; i++) words[i] = turned_back(tops[i]);
    } else if constexpr (C::kBits == 16) {
      for (u32 i = 0; i < kPieceWords; i++) {
        words[2 * i] = turned_back(pick_bytes(low[i], tops[i], 0x5140));
        words[2 * i + 1] = turned_back(pick_bytes(low[i], tops[i], 0x7362));
      }
    } else {
      u32 first = pick_bytes(middle, tops[0], 0x5140), second = pick_bytes(middle, tops[0], 0x7362);
      words[0] = turned_back(pick_bytes(low[0], first, 0x5410));
      words[1] = turned_back(pick_bytes(low[0], first, 0x7632));
      words[2] = turned_back(pick_bytes(low[1], second, 0x5410));
      words[3] = turned_back(pick_bytes(low[1], second, 0x7632));
    }
    if (C::kDrop != 16) return make_uint4(words[0], words[1], words[2], words[3]);
    return make_uint4(words[0] << 16, words[0] & 0xffff0000, words[1] << 16, words[1] & 0xffff0000);
  }
};

/* The encoder's lookup table for top bytes. `entry` is as in SymbolTable; `left` has the residue's
 * bits of the top byte, bit p in bit 0 of byte p. */
template <class C>
struct TopTable {
  u32 entry[kTops];
  u32 left[Packed<C>::kLeft ? kTops : 1];
};

template <class C>
DEVICE void fill_table(TopTable<C> &table, const Plan &plan) {
  constexpr u32 kLeft = Packed<C>::kLeft;
  for (u32 top = thread_in_block(); top < kTops; top += threads_in_block()) {
    table.entry[top] = spread_code(first_code<C>(plan, top >> kLeft));
    if (kLeft) table.left[top] = spread_code(top & ((1u << kLeft) - 1)) | (kLeft == 4 ? (top & 8) << 21 : 0);
  }
}

/* The destination of a lane's bits: element `first` of the bit planes after the residue's whole
 * bytes. Planes of a full tile are first gathered in shared memory, to be stored by whole words. */
struct BitPlanes {
  u8 *base;
  u32 padded, first;
  bool wanted;

  template <u32 kFrom>
  DEVICE static BitPlanes of(const PlaneSet &planes, u32 first) {
    return {planes.plane(kFrom), planes.padded, first, first < planes.padded};
  }
  DEVICE void write(u32 plane, u32 value, u32 lane) const {
    write_lane_bits<kPiece>(base + padded / 8 * plane, first, value, wanted, lane);
  }
};

constexpr u32 kChunkPlane = kChunkElements / 8;  /* bytes of one bit plane of a chunk */

/* Stores the chunk's bit planes from `gathered` to their places; by one warp. */
template <class C>
DEVICE void store_planes(const PlaneSet &planes, const u8 *gathered, u32 warp, u32 lane) {
  constexpr u32 kPlanes = Packed<C>::kLeft + C::kFirst, kWords = kChunkPlane / 4;
  warp_barrier();
#pragma unroll
  for (u32 i = 0; i < (kPlanes * kWords + 31) / 32; i++) {
    u32 word = i * 32 + lane, plane = word / kWords;
    if (kPlanes * kWords % 32 != 0 && word >= kPlanes * kWords) break;
    u8 *to = planes.plane(Packed<C>::kWhole + plane) + warp * kChunkPlane;
    reinterpret_cast<u32 *>(to)[word % kWords] = reinterpret_cast<const u32 *>(gathered)[word];
  }
}

/* Writes residues and codes of a lane's piece, and its top bytes to `tops`, which escapes need.
 * Returns the flags of its escapes. */
template <class C, bool kFull>
DEVICE u32 write_packed(const PlaneSet &planes, const BitPlanes &bits, u32 first, const uint4 &piece, u32 valid,
                        const TopTable<C> &table, u8 *tops, u32 lane) {
  using P = Packed<C>;
  P parts = P::split(piece);
  bool wanted = kFull || first < planes.padded;
  if (wanted) {
    if constexpr (P::kWhole == 8) store_piece_words<P::kBytesLow, true>(planes.base + first, parts.low[0], parts.low[1]);
    if constexpr (P::kWhole == 24) {
      store_piece_words<8, true>(planes.base + 2 * first, parts.low[0], parts.low[1]);
      store_piece_words<4, true>(planes.plane(16) + first, parts.middle, 0);
    }
  }
  u32 sums[2] = {0, 0}, left[2] = {0, 0};
#pragma unroll
  for (u32 i = 0; i < kPiece; i++) {
    u32 top = packed_byte(parts.tops, i);
    sums[i / 8] += table.entry[top] << (i % 8);
    if (P::kLeft) left[i / 8] += table.left[top] << (i % 8);
  }
  if (!kFull && valid < kPiece) {
    u32 keep = (1u << valid) - 1;
    sums[0] &= (keep & 0xff) * 0x01010101u;
    sums[1] &= (keep >> 8) * 0x01010101u;
  }
#pragma unroll
  for (u32 bit = 0; bit < P::kLeft; bit++) {
    u32 value = (left[0] >> (8 * bit) & 0xff) | (left[1] >> (8 * bit) & 0xff) << 8;
    bits.write(bit, value, lane);
  }
  u32 escaped = 0xffff;
#pragma unroll
  for (u32 bit = 0; bit < C::kFirst; bit++) {
    u32 value = (sums[0] >> (8 * bit) & 0xff) | (sums[1] >> (8 * bit) & 0xff) << 8;
    escaped &= value;
    bits.write(P::kLeft + bit, value, lane);
  }
  for (u32 i = 0; i < kPieceWords; i++) reinterpret_cast<u32 *>(tops + first)[i] = parts.tops[i];
  return escaped;
}
