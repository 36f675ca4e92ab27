/* The tail of a record: second codes as bit streams, then escapes (FORMAT.md, section 5).
 *
 * A warp collects them in a small part of shared memory while it processes its tile. If they do not
 * fit, the tile is hardly compressed; then it is processed again once the record's place is known.
 * The record's size is correct in both cases, since counting continues.
 */
#pragma once
#include <ancf_encode_warp.cuh>
#include <ancf_entries.cuh>

constexpr u32 kMissRoom = kTile / 2;  /* maximum second codes in shared memory */
constexpr u32 kStreamWords = kMissRoom / 32;
constexpr u32 kMostSecond = 4;        /* bits of a second code */
constexpr u32 kEscapeRoomBytes = 320;
constexpr u32 kTailRoom = kMostSecond * kStreamWords * 4 + kEscapeRoomBytes;
static_assert(kTailRoom % 16 == 0, "16-byte aligned parts");

/* Sets bits in global memory at bit number `place` from `base`, where it is 0; other lanes may set
 * bits of the same word. */
DEVICE void or_bits(u8 *base, u32 place, u32 bits) {
  u64 address = reinterpret_cast<u64>(base) + place / 8;
  fetch_or(reinterpret_cast<u32 *>(address & ~3ull), bits << (8 * (address & 3) + place % 8));
}

template <class C>
struct Tail {
  static constexpr u32 kEscapeRoom = kEscapeRoomBytes / C::kEscapeBytes;
  static_assert(C::kSecond <= kMostSecond, "a stream a bit");

  u32 *streams;  /* kStreamWords each, then the escapes */
  u32 missed, escaped;

  DEVICE u8 *escapes() const { return reinterpret_cast<u8 *>(streams + kMostSecond * kStreamWords); }

  /* Resets the tail for a new tile. */
  DEVICE void open(u32 lane) {
    missed = escaped = 0;
    for (u32 i = 4 * lane; i < C::kSecond * kStreamWords; i += 4 * kWarpThreads) {
      *reinterpret_cast<uint4 *>(streams + i) = make_uint4(0, 0, 0, 0);
    }
    warp_barrier();
  }

  /* Counts a run's missed elements and keeps its escapes; returns the number missed before it. */
  DEVICE u32 add_escapes(const Run &run, const RunPlanes<C> &planes) {
    LaneRank sum = LaneRank::of(ones(planes.missed) | ones(planes.escaped) << 16);
    u32 before = missed + (sum.before & 0xffff);
    missed += sum.total & 0xffff;
    if (sum.total >> 16 == 0) return before;
    u32 place = escaped + (sum.before >> 16);
    for (u32 left = planes.escaped; left != 0 && place < kEscapeRoom; left &= left - 1, place++) {
      Element x = run.element(lowest_bit(left));
      put_escape(place, C::kDrop ? x : C::symbol(x));
    }
    escaped += sum.total >> 16;
    return before;
  }
  DEVICE void put_escape(u32 place, u64 value) {
    if (C::kEscapeBytes == 1) escapes()[place] = static_cast<u8>(value);
    if (C::kEscapeBytes == 2) reinterpret_cast<u16 *>(escapes())[place] = static_cast<u16>(value);
    if (C::kEscapeBytes == 4) reinterpret_cast<u32 *>(escapes())[place] = static_cast<u32>(value);
    if (C::kEscapeBytes == 8) reinterpret_cast<u64 *>(escapes())[place] = value;
  }

  /* Keeps the second codes of a run whose first missed element is number `before`. */
  DEVICE void add_seconds(const RunPlanes<C> &planes, u32 before) {
    if constexpr (C::kSecond != 0) {
      if (missed > kMissRoom) return;
      BitGather gather = BitGather::of(planes.missed);
#pragma unroll
      for (u32 bit = 0; bit < C::kSecond; bit++) {
        append_bits(streams + bit * kStreamWords, before, gather.in_word(planes.second[bit]));
      }
    }
  }

  DEVICE u32 plane_bytes() const { return C::kSecond ? (missed + 7) / 8 : 0; }
  DEVICE u32 bytes() const { return plane_bytes() * C::kSecond + escaped * C::kEscapeBytes; }
  DEVICE bool is_kept() const { return (C::kSecond == 0 || missed <= kMissRoom) && escaped <= kEscapeRoom; }

  /* Writes the kept codes and escapes to `to`, and zeros up to the end of the record. */
  DEVICE void write(u8 *to, u32 padding, u32 lane) const {
    for (u32 bit = 0; bit < C::kSecond; bit++, to += plane_bytes()) {
      copy_bytes(to, reinterpret_cast<const u8 *>(streams + bit * kStreamWords), plane_bytes(), lane);
    }
    u32 count = escaped * C::kEscapeBytes;
    copy_bytes(to, escapes(), count, lane);
    if (lane < padding) to[count + lane] = 0;
  }

  /* Writes the whole tail to `to` from the tile's elements, when it did not fit. With a bitmap only
   * elements other than the fill count; `without_signs` ignores their signs. */
  template <bool kHasBitmap>
  DEVICE void write_again(const WarpEncoding &job, u32 tile, u8 *to, u32 padding, const CodeTable<C> &table,
                          bool without_signs = false) const;
};

/* Writes a tail by a second pass over a tile in the tensor, one element per lane. */
template <class C, bool kHasBitmap>
struct TailAgain {
  const u8 *from;
  u32 count;
  u64 fill;
  Element mask;            /* the bits of elements that are coded */
  u8 *to;
  u32 bytes, plane_bytes;  /* of the padded tail; of a plane of second codes */
  const CodeTable<C> *table;
  u32 lane;

  DEVICE_CALL void write() const {
    for (u32 i = lane; i < bytes / 4; i += kWarpThreads) reinterpret_cast<u32 *>(to)[i] = 0;
    warp_barrier();
    u32 missed = 0, escaped = 0, below = low_bits(lane);
    for (u32 first = 0; first < count; first += kWarpThreads) {
      u32 i = first + lane;
      Element x = i < count ? read_element(from + static_cast<u64>(i) * kWidth) & mask : 0;
      bool coded = i < count && !(kHasBitmap && x == fill);
      u32 code = code_of(x), second = code >> C::kFirst;
      bool misses = coded && (code & C::kFirstSlots) == C::kFirstSlots, escapes = misses && second == C::kSecondSlots;
      u32 missing = lanes_where(misses), escaping = lanes_where(escapes);
      if (misses) put_second(missed + ones(missing & below), second);
      if (escapes) put_escape(escaped + ones(escaping & below), C::kDrop ? x : C::symbol(x));
      missed += ones(missing);
      escaped += ones(escaping);
    }
  }

  /* Returns both codes, the second above the first. */
  DEVICE u32 code_of(Element x) const {
    if (!C::is_exact(x)) return low_bits(C::kFirst + C::kSecond);
    return table->field(CodeTable<C>::index(x), 0, C::kFirst + C::kSecond);
  }
  DEVICE void put_second(u32 place, u32 second) const {
    for (u32 bit = 0; bit < C::kSecond; bit++) or_bits(to + plane_bytes * bit, place, second >> bit & 1);
  }
  DEVICE void put_escape(u32 place, u64 value) const {
    u8 *at = to + plane_bytes * C::kSecond + C::kEscapeBytes * place;
    for (u32 byte = 0; byte < C::kEscapeBytes; byte++) or_bits(at + byte, 0, value >> (8 * byte) & 0xff);
  }
};

template <class C>
template <bool kHasBitmap>
DEVICE void Tail<C>::write_again(const WarpEncoding &job, u32 tile, u8 *to, u32 padding, const CodeTable<C> &table,
                                 bool without_signs) const {
  const u8 *from = job.src + static_cast<u64>(tile) * kTile * kWidth;
  const Element mask = without_signs ? ~0ull >> (65 - 8 * kWidth) : ~0ull;
  TailAgain<C, kHasBitmap> again = {from, job.tile_elements(tile), job.plan.fill, mask, to, bytes() + padding,
                                    plane_bytes(), &table, job.lane};
  again.write();
}
