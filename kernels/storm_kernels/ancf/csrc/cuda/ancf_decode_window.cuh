/* Decodes tiles of window and truncated blobs, one warp per tile (FORMAT.md, sections 4 and 5). */
#pragma once
#include <ancf_decode_group.cuh>

/* Elements whose tops are computed before any element is stored: whole groups and whole chunks. */
constexpr u32 kSpan = kGroup > kChunkElements ? kGroup : kChunkElements;
constexpr u32 kTopsBytes = kMostTopBytes * kSpan;

/* Loads the whole bytes of a lane's pieces of the chunk that starts at element `first`. */
template <class C, bool kFull>
DEVICE void load_rows(const ConstPlaneSet &planes, u32 first, u32 lane, WholeBytes<C> (&rows)[kRows]) {
#pragma unroll
  for (u32 row = 0; row < kRows; row++) {
    rows[row] = WholeBytes<C>::template load<kFull, true>(planes, first + row * kRowElements + lane * kPiece);
  }
}

/* Sets elements from `from` on to 0 in the rows of the chunk that starts at element `first`. */
DEVICE void end_rows(uint4 (&rows)[kRows], u32 first, u32 from, u32 lane) {
#pragma unroll
  for (u32 row = 0; row < kRows; row++) {
    u32 place = first + row * kRowElements + lane * kPiece;
    rows[row] = first_elements(rows[row], place >= from ? 0 : from - place < kPiece ? from - place : kPiece);
  }
}

/* Joins a lane's pieces of a chunk that starts at element `at` of the span whose tops are
 * `tops`. */
template <class C>
DEVICE void join_rows(const WholeBytes<C> (&whole)[kRows], const u8 *tops, u32 at, const Replaced &replaced,
                      const u8 *escapes, u32 lane, uint4 (&rows)[kRows]) {
#pragma unroll
  for (u32 row = 0; row < kRows; row++) {
    u32 place = at + row * kRowElements + lane * kPiece;
    rows[row] = join_piece<C, kSpan>(whole[row], tops + place);
    if constexpr (C::kDrop != 0) {
      if (any_lane(replaced.flags != 0)) replace_elements<C>(replaced, escapes, place, rows[row]);
    }
  }
}

template <class C, bool kFull>
DEVICE void decode_window_tile(Decoding &job, const TopPlaces &places, u8 *tops, u32 tile, Reader record) {
  const u32 lane = job.lane, count = kFull ? kTile : job.launch.last_elements;
  ConstPlaneSet planes = {job.launch.block(tile), kFull ? kTile : static_cast<u32>(round_up(count, 128))};
  MissReader<C> misses = MissReader<C>::template open<kFull>(record, planes, count, lane);
  if (!record.ok) return job.refuse();
  PlaneWords<C> words = PlaneWords<C>::template load<kFull>(planes, 32 * lane);
  WholeBytes<C> whole[kRows];
  load_rows<C, kFull>(planes, 0, lane, whole);
#pragma unroll 1
  for (u32 first = 0; first < count; first += kSpan) {
    Replaced replaced;
    bool ok = true;
#pragma unroll
    for (u32 at = 0; at < kSpan; at += kGroup) {
      u32 place = first + at + 32 * lane, next = first + at + kGroup;
      ok = ok && decode_tops<C, kSpan, kFull>(words, place, count, places, misses, tops + at + 32 * lane, replaced);
      if (next < kTile) words = PlaneWords<C>::template load<kFull>(planes, place + kGroup);  /* long before its use */
    }
    if (!ok) return job.refuse();
    warp_barrier();
#pragma unroll 1
    for (u32 at = 0; at < kSpan; at += kChunkElements) {
      uint4 rows[kRows];
      u32 next = first + at + kChunkElements;
      join_rows<C>(whole, tops, at, replaced, misses.escapes, lane, rows);
      if (next < kTile) load_rows<C, kFull>(planes, next, lane, whole);
      if (!kFull && next > count) end_rows(rows, first + at, count, lane);
      job.store<kFull>(rows, (static_cast<u64>(tile) * kTile + first + at) * kWidth);
    }
    warp_barrier();
  }
}

/* Runs the decoder of a two-level code. */
struct DecodeDense {
  Decoding &job;
  const Plan &plan;
  TopPlaces &places;
  u8 *tops;
  u32 warp, warps;
  template <class C>
  DEVICE void run() const {
    fill_places<C>(places, plan);
    decode_each(job, warp, warps, [&](u32 tile, const Reader &record) {
      if (tile < job.launch.whole_tiles) decode_window_tile<C, true>(job, places, tops, tile, record);
      else decode_window_tile<C, false>(job, places, tops, tile, record);
    });
  }
};
