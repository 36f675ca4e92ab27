/* Decodes tiles with a bitmap, one warp per tile (FORMAT.md, sections 5 and 6).
 *
 * First it reads the bitmap and counts the kept elements before each of its words. Then it decodes
 * kept elements, one group at a time, into a ring buffer, from which every chunk of the tile reads
 * its elements by rank. A group enters the ring only when no chunk needs the overwritten elements.
 */
#pragma once
#include <ancf_decode_window.cuh>

constexpr u32 kTileWords = kTile / 32;
/* Elements of the ring: a power of two with space for a chunk's elements and a group. */
constexpr u32 kRing = kWidth == 1 ? 4096 : 2048;
static_assert(kRing >= kChunkElements + kGroup, "ring");

/* A warp's part of shared memory. */
struct alignas(16) SparseMemory {
  u8 ring[kRing * kWidth], tops[kTopsBytes];
  u32 bitmap[kTileWords];
  u16 ranks[kTileWords];  /* kept elements before each word */
};

/* A lane's four words of a bitmap: elements from 128 * lane on, or half as many pairs. */
struct BitmapWords {
  u32 words[4];
  DEVICE u32 count() const { return ones(words[0]) + ones(words[1]) + ones(words[2]) + ones(words[3]); }
};

/* Returns bits of `plane`, from bit `rank` on, at the positions of the ones of `flags`. */
DEVICE u32 pick_bits(const u32 *plane, u32 flags, u32 rank) {
  return Spreader::to(flags).spread(read_bits(plane, rank, ones(flags)));
}

/* Reads one plane of bits for the pairs in `flags`, 64 pairs per lane. */
DEVICE uint2 read_for_pairs(const Decoding &job, Reader &record, const uint2 &flags) {
  u32 low = ones(flags.x);
  LaneRank rank = LaneRank::of(low + ones(flags.y));
  const u32 *plane = reinterpret_cast<const u32 *>(record.take((rank.total + 31) / 32 * 4));
  if (!record.ok) return make_uint2(0, 0);
  return make_uint2(pick_bits(plane, flags.x, rank.before), pick_bits(plane, flags.y, rank.before + low));
}

DEVICE BitmapWords read_pairs(const Decoding &job, const u8 *block, Reader &record, u32 count) {
  uint2 either = make_uint2(0, 0);
  if (128 * job.lane < round_up(count, 256)) either = load_cached(reinterpret_cast<const uint2 *>(block) + job.lane);
  uint2 second = read_for_pairs(job, record, either);
  uint2 both = read_for_pairs(job, record, second);
  u32 first[2] = {either.x & (~second.x | both.x), either.y & (~second.y | both.y)};
  u32 last[2] = {second.x, second.y};
  BitmapWords bitmap;
#pragma unroll
  for (u32 i = 0; i < 4; i++) {
    u32 shift = 16 * (i % 2);
    bitmap.words[i] = to_even_bits(first[i / 2] >> shift & 0xffff) | to_even_bits(last[i / 2] >> shift & 0xffff) << 1;
  }
  return bitmap;
}

DEVICE BitmapWords read_bitmap(const Decoding &job, const u8 *block, Reader &record, u32 count) {
  BitmapWords bitmap = {};
  u32 place = 128 * job.lane;
  if (job.launch.has_pairs) {
    bitmap = read_pairs(job, block, record, count);
  } else if (place < count) {
    uint4 words = load_cached(reinterpret_cast<const uint4 *>(block) + job.lane);
    bitmap = {{words.x, words.y, words.z, words.w}};
  }
#pragma unroll
  for (u32 i = 0; i < 4; i++) bitmap.words[i] &= place + 32 * i < count ? low_bits(count - place - 32 * i) : 0;
  return bitmap;
}

/* Writes a tile's bitmap and ranks to shared memory; returns the number of kept elements. */
DEVICE u32 place_bitmap(const BitmapWords &bitmap, SparseMemory &memory, u32 lane) {
  LaneRank rank = LaneRank::of(bitmap.count());
  u32 before = rank.before;
#pragma unroll
  for (u32 i = 0; i < 4; i++) {
    memory.bitmap[4 * lane + i] = bitmap.words[i];
    memory.ranks[4 * lane + i] = static_cast<u16>(before);
    before += ones(bitmap.words[i]);
  }
  warp_barrier();
  return rank.total;
}

/* Decodes the group of kept elements from `first` on into the ring; returns false if escapes are
 * missing. */
template <class C>
DEVICE bool fill_ring(const ConstPlaneSet &planes, u32 first, u32 count, const TopPlaces &places, MissReader<C> &misses,
                      SparseMemory &memory, u32 lane) {
  u32 place = first + 32 * lane;
  Replaced replaced;
  PlaneWords<C> words = PlaneWords<C>::template load<false>(planes, place);
  if (!decode_tops<C, kSpan, false>(words, place, count, places, misses, memory.tops + 32 * lane, replaced)) return false;
  warp_barrier();
  uint4 *to = reinterpret_cast<uint4 *>(memory.ring + first % kRing * kWidth) + lane;
  constexpr u32 kGroupRows = kGroup / kRowElements;
#pragma unroll(kGroupRows < 4 ? kGroupRows : 4)
  for (u32 row = 0; row < kGroupRows; row++) {
    u32 inside = row * kRowElements + lane * kPiece;
    uint4 piece = join_piece<C, kSpan>(WholeBytes<C>::template load<false, false>(planes, first + inside), memory.tops + inside);
    if constexpr (C::kDrop != 0) {
      if (any_lane(replaced.flags != 0)) replace_elements<C>(replaced, misses.escapes, inside, piece);
    }
    to[row * kWarpThreads] = piece;
  }
  warp_barrier();
  return true;
}

/* Returns a lane's piece of the tile from element `place` on: kept elements from the ring, else
 * fill. */
DEVICE uint4 take_piece(const SparseMemory &memory, u32 place, Element fill) {
  u32 word = memory.bitmap[place / 32], shift = place % 32;
  u32 rank = memory.ranks[place / 32] + ones(word & low_bits(shift)), words[4] = {0, 0, 0, 0};
  word >>= shift;
#pragma unroll
  for (u32 i = 0; i < kPiece; i++) {
    Element x = fill;
    if (word >> i & 1) x = read_staged(memory.ring, rank++ % kRing);
    put_element(words, i, x);
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

/* Sets the signs of a piece's elements; bit i of `signs` is that of element i. */
DEVICE void add_signs(uint4 &piece, u32 signs) {
  u32 words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
  for (u32 i = 0; i < kPiece; i++) {
    u32 bit = (i + 1) * kWidth * 8 - 1;  /* the sign's; a constant once the loop is unrolled */
    words[bit / 32] |= (signs >> i & 1) << bit % 32;
  }
  piece = make_uint4(words[0], words[1], words[2], words[3]);
}

/* The same for the rows of a chunk from element `first` on; reads the tile's plane of signs. */
DEVICE void add_signs(uint4 (&rows)[kRows], const u8 *plane, u32 first, u32 count, u32 lane) {
#pragma unroll
  for (u32 row = 0; row < kRows; row++) {
    u32 place = first + row * kRowElements + lane * kPiece;
    if (place < count) add_signs(rows[row], read_lane_bits<kPiece>(plane, place));
  }
}

template <class C>
DEVICE void decode_sparse_tile(Decoding &job, const TopPlaces &places, SparseMemory &memory, u32 tile, Reader record) {
  const u32 lane = job.lane, count = job.launch.tile_elements(tile);
  BitmapWords bitmap = read_bitmap(job, job.launch.block(tile), record, count);
  if (!record.ok) return job.refuse();
  const u32 kept = place_bitmap(bitmap, memory, lane), padded = (kept + 31) / 32 * 32;
  ConstPlaneSet planes = {record.take(padded / 8 * C::kPlaneBits), padded};
  if (!record.ok) return job.refuse();
  MissReader<C> misses = MissReader<C>::template open<false>(record, planes, kept, lane);
  if (!record.ok) return job.refuse();
  u32 decoded = 0;
  for (u32 first = 0; first < count; first += kChunkElements) {
    u32 end = first + kChunkElements, needed = end < kTile ? memory.ranks[end / 32] : kept;
    for (; decoded < needed; decoded += kGroup) {
      if (!fill_ring<C>(planes, decoded, kept, places, misses, memory, lane)) return job.refuse();
    }
    uint4 rows[kRows];
#pragma unroll
    for (u32 row = 0; row < kRows; row++) rows[row] = take_piece(memory, first + row * kRowElements + lane * kPiece, job.launch.fill);
    if (C::kRotate == 0 && job.launch.has_signs) {
      const u8 *signs = job.launch.block(tile) + bitmap_bytes(job.launch.has_pairs, count);
      add_signs(rows, signs, first, count, lane);
    }
    if (end > count) end_rows(rows, first, count, lane);
    job.store<false>(rows, (static_cast<u64>(tile) * kTile + first) * kWidth);
  }
  warp_barrier();  /* the next tile's bitmap overwrites this one */
}

/* Runs the decoder of a code on the warps of the block that have memory. */
struct DecodeSparse {
  Decoding &job;
  const Plan &plan;
  TopPlaces &places;
  SparseMemory *memory;
  u32 warp, warps;
  template <class C>
  DEVICE void run() const {
    fill_places<C>(places, plan);
    decode_each(job, warp, warps, [&](u32 tile, const Reader &record) {
      decode_sparse_tile<C>(job, places, *memory, tile, record);
    });
  }
};
