/* Decodes groups of 1024 coded elements, each by one warp that waits for no other warp (FORMAT.md,
 * sections 4 and 5).
 *
 * The top of an element is its bits above the whole bytes of its residue: the left-over residue
 * bits and the symbol, one to three bytes. First a lane computes the tops of 32 neighbouring
 * elements from one word of every bit plane and writes them to shared memory. Then the warp
 * processes pieces of 16 bytes row by row: it joins tops and whole bytes to elements in the order
 * of the tensor.
 *
 * kFull: all elements of a tile without a bitmap exist, so no plane ends early.
 *
 * A group reads only planes within `padded` elements, second codes within the planes whose size was
 * checked against the tile's misses, and escapes that fit the record.
 */
#pragma once
#include <ancf_decode_bits.cuh>
#include <ancf_decoding.cuh>
#include <ancf_packed.cuh>

constexpr u32 kGroup = 1024;                     /* elements: one word of a plane per lane */
constexpr u32 kMostTopBytes = kWidth == 1 ? 1 : kWidth == 8 ? 3 : 2;

template <class C>
struct Top {
  static constexpr u32 kWhole = C::kResidue / 8 * 8;  /* bits stored as whole bytes */
  static constexpr u32 kLeft = C::kResidue - kWhole;  /* bits of the residue in the top */
  static constexpr u32 kBytes = (C::kBits - kWhole + 7) / 8;
  static constexpr bool kByWords = kWidth <= 4 && (C::kBits == 8 || C::kBits == 16 || C::kBits == 32);
  static_assert(kBytes <= kMostTopBytes, "shared memory");
};

/* The dictionary as tops, with one table per byte of the top; codes without an entry give 0. */
struct TopPlaces {
  uint2 first[kMostTopBytes];
  uint4 second[kMostTopBytes];
};

/* Fills both tables; all threads of the block call it and synchronise. */
template <class C>
DEVICE void fill_places(TopPlaces &places, const Plan &plan) {
  u32 code = thread_in_block() % 32, byte = thread_in_block() / 32;
  if (byte < Top<C>::kBytes && code < 24) {
    bool first = code < 8;
    u32 place = first ? code : code - 8, index = first ? code : C::kFirstSlots + place;
    bool used = place < (first ? C::kFirstSlots : C::kSecondSlots) && index < plan.dict_count;
    u64 top = used ? static_cast<u64>(plan.window[index]) << Top<C>::kLeft : 0;
    u8 *to = first ? reinterpret_cast<u8 *>(&places.first[byte]) : reinterpret_cast<u8 *>(&places.second[byte]);
    to[place] = static_cast<u8>(top >> (8 * byte));
  }
  barrier(0, threads_in_block());
}

/* A lane's words of the bit planes. */
template <class C>
struct PlaneWords {
  u32 codes[C::kFirst], left[Top<C>::kLeft ? Top<C>::kLeft : 1];

  DEVICE static const u32 *word(const ConstPlaneSet &planes, u32 bit, u32 place) {
    return reinterpret_cast<const u32 *>(planes.plane(bit) + place / 8);
  }
  template <bool kFull>
  DEVICE static PlaneWords load(const ConstPlaneSet &planes, u32 place) {
    PlaneWords words = {};
    if (!kFull && place >= planes.padded) return words;
#pragma unroll
    for (u32 bit = 0; bit < C::kFirst; bit++) words.codes[bit] = load_cached(word(planes, C::kResidue + bit, place));
#pragma unroll
    for (u32 bit = 0; bit < Top<C>::kLeft; bit++) words.left[bit] = load_cached(word(planes, Top<C>::kWhole + bit, place));
    return words;
  }
  /* Returns the flags of elements from `place` on, below `count`, whose first code is all ones. */
  template <bool kFull>
  DEVICE u32 missed(u32 place, u32 count) const {
    u32 all = codes[0];
#pragma unroll
    for (u32 bit = 1; bit < C::kFirst; bit++) all &= codes[bit];
    if (kFull) return all;
    return place < count ? all & low_bits(count - place) : 0;
  }
};

/* The part of a tile's record after the planes, and how much of it was read. */
template <class C>
struct MissReader {
  const u32 *second;         /* planes of second codes */
  u32 plane_bits, missed;    /* bits of one plane; codes read */
  const u8 *escapes;
  u32 room, escaped;         /* escapes that fit the record; escapes read */

  /* If there is a second level, counts the tile's misses; sets record.ok to false if it is too
   * short. */
  template <bool kFull>
  DEVICE static MissReader open(Reader &record, const ConstPlaneSet &planes, u32 count, u32 lane) {
    MissReader misses = {};
    if constexpr (C::kSecond != 0) {
      u32 bytes = (counted<kFull>(planes, count, lane) + 7) / 8;
      misses.second = reinterpret_cast<const u32 *>(record.take(bytes * C::kSecond));
      misses.plane_bits = 8 * bytes;
    }
    misses.escapes = record.at;
    misses.room = record.left / C::kEscapeBytes;
    return misses;
  }
  template <bool kFull>
  DEVICE static u32 counted(const ConstPlaneSet &planes, u32 count, u32 lane) {
    u32 sum = 0;
#pragma unroll
    for (u32 group = 0; group < kTile / kGroup; group++) {
      u32 place = group * kGroup + 32 * lane, all = ~0u;
      if (!kFull && place >= count) continue;
#pragma unroll
      for (u32 bit = 0; bit < C::kFirst; bit++) all &= load_cached(PlaneWords<C>::word(planes, C::kResidue + bit, place));
      sum += ones(kFull ? all : all & low_bits(count - place));
    }
    return sum_of_lanes(sum);
  }

  /* Reads the second codes of the elements in `flags`; all ones for the others. Returns the flags
   * of those that are escapes. Reads nothing past the planes even if the blob changes meanwhile. */
  DEVICE u32 read_second(u32 flags, u32 (&codes)[4]) {
    LaneRank rank = LaneRank::of(ones(flags));
    Spreader spreader = Spreader::to(flags);
    const u32 at = missed + rank.before, wanted = at + ones(flags) <= plane_bits ? ones(flags) : 0;
    u32 finals = flags;
    codes[3] = 0;
#pragma unroll
    for (u32 bit = 0; bit < C::kSecond; bit++) {
      u32 bits = read_bits(second, plane_bits * bit + at, wanted);
      codes[bit] = spreader.spread(bits) | ~flags;
      finals &= codes[bit];
    }
    missed += rank.total;
    return finals;
  }
};

/* Escapes that replace whole elements of a group: this lane's flags of 32 elements, and the index
 * of the first escape. */
struct Replaced {
  u32 flags, rank;
};

template <u32 kBytes>
DEVICE u64 read_escape(const u8 *at) {
  u64 value = 0;
#pragma unroll
  for (u32 i = 0; i < kBytes; i++) value |= static_cast<u64>(at[i]) << (8 * i);  /* in either memory */
  return value;
}

/* Looks up the bytes of four elements by four nibbles of `codes`, in 8 or 16 entries. */
DEVICE u32 look_up(const uint2 &entries, u32 codes) { return pick_bytes(entries.x, entries.y, codes); }
DEVICE u32 look_up(const uint4 &entries, u32 codes) {
  u32 low = pick_bytes(entries.x, entries.y, codes & 0x7777), high = pick_bytes(entries.z, entries.w, codes & 0x7777);
  u32 signs = pick_bytes_or_signs(0x80808080, 0, codes & 0x8888) << 1;  /* 0x00 or 0xfe, and a neighbour's bit */
  return choose_bits(pick_bytes_or_signs(signs, 0, 0xba98), high, low);
}

/* Adds the left-over residue bits of a lane's elements to the first bytes of their tops. */
template <u32 kLeft>
DEVICE void add_left_bits(const u32 *planes, u32 (&made)[8]) {
  u32 bits[8] = {}, low[4], high[4];
#pragma unroll
  for (u32 bit = 0; bit < kLeft; bit++) bits[bit] = planes[bit];
  make_nibbles(bits[0], bits[1], bits[2], bits[3], low);
  if (kLeft > 4) make_nibbles(bits[4], bits[5], bits[6], bits[7], high);
#pragma unroll
  for (u32 octet = 0; octet < 4; octet++) {
    made[2 * octet] |= low[octet] & 0x0f0f0f0f;
    made[2 * octet + 1] |= low[octet] >> 4 & 0x0f0f0f0f;
    if (kLeft <= 4) continue;
    made[2 * octet] |= high[octet] << 4 & 0xf0f0f0f0;
    made[2 * octet + 1] |= high[octet] & 0xf0f0f0f0;
  }
}

/* Returns one byte of the symbols of four elements, by the nibbles of their first and second
 * codes. */
template <class C>
DEVICE u32 symbol_bytes(const TopPlaces &places, u32 byte, u32 first, u32 second) {
  u32 bytes = look_up(places.first[byte], first);
  if (C::kSecond == 3) bytes |= look_up(make_uint2(places.second[byte].x, places.second[byte].y), second);
  if (C::kSecond == 4) bytes |= look_up(places.second[byte], second);
  return bytes;
}

/* Writes the tops of a lane's 32 elements to `tops`, a plane of kSpan bytes for each byte of a
 * top. */
template <class C, u32 kSpan>
DEVICE void write_tops(const PlaneWords<C> &words, const u32 (&second)[4], const TopPlaces &places, u8 *tops) {
  u32 firsts[4], seconds[4] = {};
  make_nibbles(words.codes[0], words.codes[1], C::kFirst > 2 ? words.codes[C::kFirst - 1] : 0, 0, firsts);
  if constexpr (C::kSecond != 0) make_nibbles(second[0], second[1], second[2], second[3], seconds);
#pragma unroll
  for (u32 byte = 0; byte < Top<C>::kBytes; byte++) {
    u32 made[8];
#pragma unroll
    for (u32 octet = 0; octet < 4; octet++) {
      u32 one = symbol_bytes<C>(places, byte, firsts[octet], seconds[octet]);
      u32 other = symbol_bytes<C>(places, byte, firsts[octet] >> 16, seconds[octet] >> 16);
      made[2 * octet] = pick_bytes(one, other, 0x6420);
      made[2 * octet + 1] = pick_bytes(one, other, 0x7531);
    }
    if constexpr (Top<C>::kLeft != 0) {
      if (byte == 0) add_left_bits<Top<C>::kLeft>(words.left, made);
    }
    uint4 *to = reinterpret_cast<uint4 *>(tops + byte * kSpan);
    to[0] = make_uint4(made[0], made[1], made[2], made[3]);
    to[1] = make_uint4(made[4], made[5], made[6], made[7]);
  }
}

/* Adds the symbols of the escapes from `at` on to the tops of the elements in `flags`. */
template <class C, u32 kSpan>
DEVICE void patch_tops(u32 flags, const u8 *at, u8 *tops) {
  for (; flags; flags &= flags - 1, at += C::kEscapeBytes) {
    u64 top = read_escape<C::kEscapeBytes>(at) << Top<C>::kLeft;
    u8 *to = tops + lowest_bit(flags);
#pragma unroll
    for (u32 byte = 0; byte < Top<C>::kBytes; byte++) {
      u8 bits = static_cast<u8>(top >> (8 * byte));
      to[byte * kSpan] = byte == 0 && Top<C>::kLeft ? to[0] | bits : bits;
    }
  }
}

/* Decodes the tops of a lane's elements from `place` on; returns false if escapes are missing. */
template <class C, u32 kSpan, bool kFull>
DEVICE bool decode_tops(const PlaneWords<C> &words, u32 place, u32 count, const TopPlaces &places, MissReader<C> &misses,
                        u8 *tops, Replaced &replaced) {
  u32 finals = words.template missed<kFull>(place, count), second[4];
  if constexpr (C::kSecond != 0) finals = misses.read_second(finals, second);
  write_tops<C, kSpan>(words, second, places, tops);
  replaced = {0, 0};
  if (!any_lane(finals != 0)) return true;
  LaneRank rank = LaneRank::of(ones(finals));
  if (rank.total > misses.room - misses.escaped) return false;
  rank.before += misses.escaped;
  misses.escaped += rank.total;
  if constexpr (C::kDrop != 0) replaced = {finals, rank.before};
  else patch_tops<C, kSpan>(finals, misses.escapes + rank.before * C::kEscapeBytes, tops);
  return true;
}

/* Loads kBytes bytes as words; 8 bytes at once only if kAligned. */
template <u32 kBytes, bool kAligned>
DEVICE uint2 load_bytes(const u8 *at) {
  if constexpr (kBytes == 0) return make_uint2(0, 0);
  if constexpr (kBytes == 2) return make_uint2(load_once(reinterpret_cast<const u16 *>(at)), 0);
  const u32 *words = reinterpret_cast<const u32 *>(at);
  if constexpr (kBytes == 4) return make_uint2(load_once(words), 0);
  if constexpr (kAligned) return load_once(reinterpret_cast<const uint2 *>(at));
  return make_uint2(load_once(words), load_once(words + 1));
}

/* The whole bytes of a lane's piece of elements: the first piece of their residues, of 32, 16 or
 * 8 bits each, and the second piece, of 16 or 8 bits, if there is one. */
template <class C>
struct WholeBytes {
  static constexpr u32 kWhole = Top<C>::kWhole;
  static constexpr u32 kFirstBits = kWhole >= 32 ? 32 : kWhole >= 16 ? 16 : kWhole;
  static constexpr u32 kSecondBits = kWhole - kFirstBits;
  uint2 first, second;

  template <bool kFull, bool kAligned>
  DEVICE static WholeBytes load(const ConstPlaneSet &planes, u32 place) {
    WholeBytes whole = {};
    if (!kFull && place >= planes.padded) return whole;
    whole.first = load_bytes<kPiece * kFirstBits / 8, kAligned>(planes.base + place * (kFirstBits / 8));
    whole.second = load_bytes<kPiece * kSecondBits / 8, kAligned>(planes.plane(kFirstBits) + place * (kSecondBits / 8));
    return whole;
  }
  DEVICE u64 element(u32 i) const {
    constexpr u32 kFirstMask = kFirstBits == 32 ? ~0u : (1u << kFirstBits % 32) - 1;
    constexpr u32 kSecondMask = (1u << kSecondBits) - 1;
    if (kWhole == 0) return 0;
    u32 words[2] = {first.x, first.y};
    u64 value = words[i * kFirstBits / 32] >> (i * kFirstBits % 32) & kFirstMask;
    return value | static_cast<u64>(second.x >> (i * kSecondBits % 32) & kSecondMask) << kFirstBits % 64;
  }
};

/* Returns a lane's piece of elements from its whole bytes and its tops at `tops`. */
template <class C, u32 kSpan>
DEVICE uint4 join_piece(const WholeBytes<C> &whole, const u8 *tops) {
  constexpr u32 kBytes = Top<C>::kBytes;
  if constexpr (Top<C>::kByWords) {
    u32 parts[2][4] = {};  /* bytes of tops */
#pragma unroll
    for (u32 byte = 0; byte < kBytes; byte++) {
#pragma unroll
      for (u32 word = 0; word < kPieceWords; word++) parts[byte][word] = reinterpret_cast<const u32 *>(tops + byte * kSpan)[word];
    }
    Packed<C> packed = {};
    packed.low[0] = C::kBits == 16 && kBytes == 2 ? parts[0][0] : whole.first.x;
    packed.low[1] = C::kBits == 16 && kBytes == 2 ? parts[0][1] : whole.first.y;
    packed.middle = kBytes == 2 ? parts[0][0] : whole.second.x;
#pragma unroll
    for (u32 word = 0; word < kPieceWords; word++) packed.tops[word] = parts[kBytes - 1][word];
    return packed.joined();
  } else {
    u32 words[4] = {0, 0, 0, 0};
#pragma unroll
    for (u32 i = 0; i < kPiece; i++) {
      u64 value = whole.element(i);
#pragma unroll
      for (u32 byte = 0; byte < kBytes; byte++) value |= static_cast<u64>(tops[byte * kSpan + i]) << (Top<C>::kWhole + 8 * byte);
      put_element(words, i, narrowed(C::turned_back(value)));
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  }
}

/* Replaces escaped elements in a piece that starts at element `place` of its group; all lanes
 * call. */
template <class C>
DEVICE void replace_elements(const Replaced &replaced, const u8 *escapes, u32 place, uint4 &piece) {
  u32 flags = shuffle(replaced.flags, place / 32), rank = shuffle(replaced.rank, place / 32);
  rank += ones(flags & low_bits(place % 32));
  flags >>= place % 32;
  u32 words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
  for (u32 i = 0; i < kPiece; i++) {
    if (flags >> i & 1) {
      u64 value = read_escape<kWidth>(escapes + kWidth * rank++);
      words[i * kWidth / 4] = static_cast<u32>(value);
      if (kWidth == 8) words[2 * i + 1] = static_cast<u32>(value >> 32);
    }
  }
  piece = make_uint4(words[0], words[1], words[2], words[3]);
}
