/* The encoder of sparse tiles: a bitmap, and the elements that differ from the fill.
 *
 * A warp holds a whole tile in shared memory and works in place: it packs the kept elements, then
 * replaces each run of 32 of them by its planes. This overwrites no data that a lane has yet to
 * read: kept elements never move up, and planes take no more bits than their elements.
 */
#pragma once
#include <ancf_tail.cuh>

constexpr u32 kTileBytes = kTile * kWidth;
constexpr u32 kPairWords = kTile / 2 / 32;  /* words with one bit for each pair of a tile */
constexpr u32 kSparseRoom = kTileBytes + 2 * kPairWords * 4 + kTailRoom;

/* The elements of a run that differ from the fill: even ones in the low half, odd ones in the
 * high. */
struct KeptMask {
  u32 halves;

  DEVICE bool has(u32 i) const { return halves >> (i / 2 + 16 * (i % 2)) & 1; }

  DEVICE static KeptMask of(const Octet (&octets)[kOctets], u64 fill, u32 exists) {
    u32 found = 0;
    if constexpr (kWidth == 2) {
      u32 both = static_cast<u32>(fill) * 0x00010001;
#pragma unroll
      for (u32 word = 0; word < 16; word++) found |= nonzero_halves(octets[word / 4].words[word % 4] ^ both) << word;
    } else {
      Element value = narrowed(fill);
#pragma unroll
      for (u32 i = 0; i < kRunElements; i++) {
        found |= (octets[i / 8].at(i % 8) != value ? 1u : 0u) << (i / 2 + 16 * (i % 2));
      }
    }
    if (exists != ~0u) found &= split(exists);
    return {found};
  }
  /* Converts bits in element order to halves. */
  DEVICE static u32 split(u32 bits) {
    u32 halves = 0;
    for (u32 i = 0; i < kRunElements; i++) halves |= (bits >> i & 1) << (i / 2 + 16 * (i % 2));
    return halves;
  }
  DEVICE u32 in_order() const { return interleaved(halves); }
  DEVICE u32 even() const { return halves & 0xffff; }
  DEVICE u32 odd() const { return halves >> 16; }
  DEVICE u32 either() const { return (halves | halves >> 16) & 0xffff; }
};

/* Returns the signs of a run's elements, in order. */
DEVICE u32 signs_of(const Octet (&octets)[kOctets]) {
  u32 signs = 0;
  if constexpr (kWidth == 2) {
#pragma unroll
    for (u32 word = 0; word < 16; word++) signs |= (octets[word / 4].words[word % 4] >> 15 & 0x00010001) << word;
    return interleaved(signs);
  } else {
#pragma unroll
    for (u32 i = 0; i < kRunElements; i++) signs |= static_cast<u32>(octets[i / 8].at(i % 8) >> (8 * kWidth - 1)) << i;
    return signs;
  }
}

DEVICE void remove_signs(Octet (&octets)[kOctets]) {
  constexpr u32 kMask = kWidth == 1 ? 0x7f7f7f7f : kWidth == 2 ? 0x7fff7fff : 0x7fffffff;
#pragma unroll
  for (u32 i = 0; i < kOctets; i++) {
#pragma unroll
    for (u32 word = kWidth == 8 ? 1 : 0; word < 2 * kWidth; word += kWidth == 8 ? 2 : 1) octets[i].words[word] &= kMask;
  }
}

/* A tile's counts so far: kept elements, pairs with a kept element, pairs whose second is kept. */
struct SparseCounts {
  u32 kept, either, odd;
};

template <class C>
struct SparseEncoder {
  using Table = CodeTable<C>;
  using Whole = WholeParts<C>;
  WarpEncoding &job;
  const Table &table;
  Tail<C> tail;
  u32 *pairs;     /* planes B and C */
  u64 fill;
  bool has_pairs, has_signs;

  DEVICE static SparseEncoder make(WarpEncoding &job, const Table &table) {
    u32 *pairs = reinterpret_cast<u32 *>(job.room + kTileBytes);
    Tail<C> tail = {pairs + 2 * kPairWords, 0, 0};
    u32 bitmap = job.plan.bitmap;
    return {job, table, tail, pairs, job.plan.fill, ::has_pairs(bitmap), C::kRotate == 0 && keeps_signs_apart(bitmap)};
  }

  DEVICE void encode_all() {
    u32 tile = shuffle(job.draw(), 0);
    while (tile < job.tiles) {
      u64 at = static_cast<u64>(tile) * kTileBytes;
      u32 drawn = job.draw();
      job.fetch(job.room, at, kTileBytes);
      open();
      copies_arrived();
      job.add_to_check(job.room, at, kTileBytes);
      warp_barrier();
      u32 next = shuffle(drawn, 0);
      if (next < job.tiles) job.prefetch(static_cast<u64>(next) * kTileBytes, kTileBytes);
      encode_tile(tile);
      tile = next;
    }
  }

  DEVICE void open() {
    tail.open(job.lane);
    for (u32 i = job.lane; i < 2 * kPairWords; i += kWarpThreads) pairs[i] = 0;
  }

  DEVICE void encode_tile(u32 tile) {
    SparseCounts counts = keep(tile);
    u32 runs = (counts.kept + kRunElements - 1) / kRunElements;
    code(counts.kept, runs);
    u32 head = has_pairs ? ((counts.either + 31) / 32 + (counts.odd + 31) / 32) * 4 : 0;
    u32 front = head + runs * 4 * (C::kResidue + C::kFirst), bytes = front + tail.bytes();
    u32 padded = padded_record(bytes);
    job.announce(tile, padded);
    Place place;
    job.template find_place<true>(tile, padded, place);
    if (place.fits) {
      if (has_pairs) write_pairs(place.record, counts);
      write_planes({place.record + head, runs * kRunElements}, runs);
      if (tail.is_kept()) tail.write(place.record + front, padded - bytes, job.lane);
      else tail.template write_again<true>(job, tile, place.record + front, padded - bytes, table, has_signs);
    }
    warp_barrier();
  }

  /* Writes the bitmap's plane A, keeps its other planes, and packs the kept elements. */
  DEVICE SparseCounts keep(u32 tile) {
    SparseCounts counts = {0, 0, 0};
    u32 count = job.tile_elements(tile);
#pragma unroll 1
    for (u32 batch = 0; batch * kBatchElements < count; batch++) {
      u32 first = batch * kBatchElements + job.lane * kRunElements;
      Run run = Run::staged(job.room, first / kRunElements);
      Octet octets[kOctets];
#pragma unroll
      for (u32 i = 0; i < kOctets; i++) octets[i] = run.octet(i);
      if (C::kRotate == 0 && has_signs) {
        write_signs(job.block(tile) + bitmap_bytes(has_pairs, count), first, count, octets);
        remove_signs(octets);
      }
      KeptMask mask = KeptMask::of(octets, fill, existing(first, count));
      write_plane(job.block(tile), first, count, mask);
      LaneRank sum = LaneRank::of(ones(mask.halves) | ones(mask.either()) << 11 | ones(mask.odd()) << 21);
      if (has_pairs) add_pairs(mask, counts.either + (sum.before >> 11 & 0x3ff), counts.odd + (sum.before >> 21));
      warp_barrier();  /* all have read their elements */
      move(octets, mask, counts.kept + (sum.before & 0x7ff));
      counts.kept += sum.total & 0x7ff;
      counts.either += sum.total >> 11 & 0x3ff;
      counts.odd += sum.total >> 21;
    }
    u32 pad = counts.kept + job.lane;
    if (pad < (counts.kept + kRunElements - 1) / kRunElements * kRunElements) write_staged(job.room, pad, 0);
    warp_barrier();
    return counts;
  }

  DEVICE void write_plane(u8 *plane, u32 first, u32 count, const KeptMask &mask) const {
    if (has_pairs) {
      if (first < round_up(count, 256)) *reinterpret_cast<u16 *>(plane + first / 16) = static_cast<u16>(mask.either());
    } else {
      if (first < round_up(count, 128)) *reinterpret_cast<u32 *>(plane + first / 8) = mask.in_order();
    }
  }

  DEVICE void write_signs(u8 *plane, u32 first, u32 count, const Octet (&octets)[kOctets]) const {
    if (first < round_up(count, 128)) *reinterpret_cast<u32 *>(plane + first / 8) = signs_of(octets);
  }

  /* Adds a run's bits of planes B and C. */
  DEVICE void add_pairs(const KeptMask &mask, u32 either, u32 odd) const {
    u32 named = mask.either() | mask.odd() << 16;
    u32 bits = (mask.odd() | mask.even() << 16) & named;
    u32 packed = BitGather::of(named).in_bytes(bits);
    append_bits(pairs, either, (packed & 0xff) | (packed >> 8 & 0xff) << ones(named & 0xff));
    append_bits(pairs + kPairWords, odd, (packed >> 16 & 0xff) | packed >> 24 << ones(named >> 16 & 0xff));
  }

  DEVICE void move(const Octet (&octets)[kOctets], const KeptMask &mask, u32 rank) const {
    u8 *to = job.room + rank * kWidth;
#pragma unroll
    for (u32 i = 0; i < kRunElements; i++) {
      if (!mask.has(i)) continue;
      write_staged(to, 0, octets[i / 8].at(i % 8));
      to += kWidth;
    }
  }

  /* Codes the kept elements; each run is replaced by its planes, except those of second codes. */
  DEVICE void code(u32 kept, u32 runs) {
#pragma unroll 1
    for (u32 begin = 0; begin < runs; begin += kWarpThreads) {
      u32 number = begin + job.lane;
      Run run = Run::plain(job.room, number < runs ? number : runs - 1);
      RunPlanes<C> made = RunPlanes<C>::of(run, existing(number * kRunElements, kept), table);
      u32 before = tail.add_escapes(run, made);
      warp_barrier();
      if (number < runs) replace(run, Run::scattered(job.room, number), made);
      tail.add_seconds(made, before);
    }
    warp_barrier();
  }

  /* Writes a run's planes over its elements. */
  DEVICE static void replace(const Run &from, const Run &to, const RunPlanes<C> &made) {
    if constexpr (Whole::kWhole != 0) Whole::template replace<kOctets>(from, to);
#pragma unroll
    for (u32 i = 0; i < Table::kLeft; i++) to.word(Whole::kWhole + i) = made.left[i];
#pragma unroll
    for (u32 i = 0; i < C::kFirst; i++) to.word(C::kResidue + i) = made.first[i];
  }

  DEVICE void write_pairs(u8 *record, const SparseCounts &counts) const {
    u32 words = (counts.either + 31) / 32;
    copy_words(record, pairs, words, job.lane);
    copy_words(record + 4 * words, pairs + kPairWords, (counts.odd + 31) / 32, job.lane);
  }

  /* Writes residues and first codes. */
  DEVICE void write_planes(const PlaneSet &planes, u32 runs) const {
#pragma unroll 1
    for (u32 begin = 0; begin < runs; begin += kWarpThreads) {
      u32 left = runs - begin;
      if constexpr (Whole::kWhole != 0) {
        Whole::template store<false>(planes, begin * kRunElements, left, job.room + begin * kRunBytes, job.lane);
      }
      if (job.lane >= left) continue;
      Run run = Run::scattered(job.room, begin + job.lane);
      u8 *to = planes.plane(Whole::kWhole) + 4 * (begin + job.lane);
#pragma unroll
      for (u32 i = 0; i < Table::kLeft + C::kFirst; i++, to += planes.padded / 8) {
        *reinterpret_cast<u32 *>(to) = run.word(Whole::kWhole + i);
      }
    }
  }
};
