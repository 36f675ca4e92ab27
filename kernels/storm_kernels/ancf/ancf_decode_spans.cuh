/* Decodes whole tiles of codes of one level by spans, a warp a span.
 *
 * A span's escapes are found by counting the misses of the tile's spans before it, which costs
 * less than what it brings: the warps of a launch read and write side by side, as memory likes it,
 * and tails are short. What stays true: as in ancf_decoding.cuh.
 */
#pragma once
#include <ancf_decode_window.cuh>

constexpr u32 kTileSpans = kTile / kSpan;
constexpr u32 kRecordAhead = 8 * kWarpThreads;  /* bytes of a record that are fetched before they are needed */

/* Where a span of a whole tile is. */
struct SpanPlace {
  u32 tile, first;  /* its first element in the tile */
  ConstPlaneSet planes;

  DEVICE static SpanPlace of(const Launch &launch, u32 span) {
    return {span / kTileSpans, span % kTileSpans * kSpan, {launch.block(span / kTileSpans), kTile}};
  }
};

/* What a warp asks for before it needs it: a span's planes, and the start of its tile's record. */
template <class C>
struct SpanAhead {
  PlaneWords<C> words;
  WholeBytes<C> whole[kRows];  /* of the first chunk */
  Reader record;
  uint2 start;                 /* 8 bytes a lane */

  DEVICE void ask_all(const Launch &launch, const SpanPlace &place, u32 lane) {
    ask_record(Extent::of(launch, place.tile), launch, lane);
    ask_words(place, lane);
    ask_rows(place.planes, place.first, lane);
  }
  DEVICE void ask_words(const SpanPlace &place, u32 lane) {
    words = PlaneWords<C>::template load<true>(place.planes, place.first + 32 * lane);
  }
  DEVICE void ask_rows(const ConstPlaneSet &planes, u32 first, u32 lane) {
    load_rows<C, true>(planes, first, lane, whole);
  }
  DEVICE void ask_record(const Extent &extent, const Launch &launch, u32 lane) {
    record = extent.record(launch);
    start = make_uint2(0, 0);
    if (8 * lane < record.left) start = load_cached(reinterpret_cast<const uint2 *>(record.at) + lane);
  }
};

/* How many misses the tile's groups before the span have. */
template <class C>
DEVICE u32 missed_before(const SpanPlace &place, u32 lane) {
  u32 sum = 0;
#pragma unroll
  for (u32 first = 0; first + kSpan < kTile; first += kGroup) {
    if (first >= place.first) continue;
    sum += ones(PlaneWords<C>::template load<true>(place.planes, first + 32 * lane).template missed<true>(0, kTile));
  }
  return sum_of_lanes(sum);
}

/* The span's escapes; those of a short record are in shared memory, at `ahead`. */
template <class C>
DEVICE MissReader<C> find_escapes(const SpanAhead<C> &next, const SpanPlace &place, u8 *ahead, u32 lane) {
  reinterpret_cast<uint2 *>(ahead)[lane] = next.start;
  MissReader<C> misses = {};
  misses.escapes = next.record.left <= kRecordAhead ? ahead : next.record.at;
  misses.room = next.record.left / C::kEscapeBytes;
  misses.escaped = missed_before<C>(place, lane);
  warp_barrier();
  return misses;
}

/* Makes the tops of a span and asks for the words of the one after; false where escapes are missing. */
template <class C>
DEVICE bool make_tops(SpanAhead<C> &next, const SpanPlace &place, const SpanPlace &later, bool goes_on,
                      const TopPlaces &places, MissReader<C> &misses, u8 *tops, u32 lane) {
  bool ok = next.record.ok && misses.escaped <= misses.room;
#pragma unroll
  for (u32 at = 0; at < kSpan; at += kGroup) {
    Replaced none;  /* a code of one level drops no bits */
    ok = ok && decode_tops<C, kSpan, true>(next.words, 0, kTile, places, misses, tops + at + 32 * lane, none);
    if (at + kGroup < kSpan) next.words = PlaneWords<C>::template load<true>(place.planes, place.first + at + kGroup + 32 * lane);
    else if (goes_on) next.ask_words(later, lane);
  }
  return ok;
}

/* Stores a span, chunk by chunk, and asks for the rows of the one after. */
template <class C>
DEVICE void store_span(Decoding &job, SpanAhead<C> &next, const SpanPlace &place, const SpanPlace &later, bool goes_on,
                       const u8 *tops, bool ok) {
  const u32 lane = job.lane;
#pragma unroll 1
  for (u32 at = 0; at < kSpan; at += kChunkElements) {
    uint4 rows[kRows];
    join_rows<C>(next.whole, tops, at, Replaced{}, nullptr, lane, rows);
    if (at + kChunkElements < kSpan) next.ask_rows(place.planes, place.first + at + kChunkElements, lane);
    else if (goes_on) next.ask_rows(later.planes, later.first, lane);
    if (ok) job.store<true>(rows, (static_cast<u64>(place.tile) * kTile + place.first + at) * kWidth);
  }
  if (!ok) job.refuse();
}

/* Every `warps`th span, from number `warp` on. */
template <class C>
DEVICE void decode_spans(Decoding &job, const TopPlaces &places, u8 *tops, u8 *ahead, u32 warp, u32 warps) {
  const Launch &launch = job.launch;
  const u32 lane = job.lane, spans = launch.whole_tiles * kTileSpans;
  if (warp >= spans) return;
  SpanAhead<C> next;
  SpanPlace place = SpanPlace::of(launch, warp);
  next.ask_all(launch, place, lane);
  Extent extent = Extent::of(launch, (warp + warps) / kTileSpans);
#pragma unroll 1
  for (u32 span = warp; span < spans; span += warps) {
    const SpanPlace later = SpanPlace::of(launch, span + warps);
    const bool goes_on = span + warps < spans;
    MissReader<C> misses = find_escapes(next, place, ahead, lane);
    bool ok = make_tops(next, place, later, goes_on, places, misses, tops, lane);
    warp_barrier();
    next.ask_record(extent, launch, lane);
    extent = Extent::of(launch, (span + 2 * warps) / kTileSpans);
    store_span(job, next, place, later, goes_on, tops, ok);
    place = later;
    warp_barrier();
  }
}

/* The last tile, where it is not whole; by one warp. */
template <class C>
DEVICE void decode_rest(Decoding &job, const TopPlaces &places, u8 *tops) {
  const u32 tile = job.launch.whole_tiles;
  if (!job.launch.last_elements) return;
  decode_window_tile<C, false>(job, places, tops, tile, Extent::of(job.launch, tile).record(job.launch));
}

/* Runs the decoder of a code. */
struct DecodeWindow {
  Decoding &job;
  const Plan &plan;
  TopPlaces &places;
  u8 *tops, *ahead;
  u32 first_tile, first_span;  /* of this warp, by the order that suits each */
  template <class C>
  DEVICE void run() const {
    fill_places<C>(places, plan);
    const u32 warps = block_count() * kDecodeWarps;
    if constexpr (C::kSecond == 0) {
      decode_spans<C>(job, places, tops, ahead, first_span, warps);
      if (first_span + 1 == warps) decode_rest<C>(job, places, tops);
    } else {
      decode_each(job, first_tile, warps, [&](u32 tile, const Reader &record) {
        if (tile < job.launch.whole_tiles) decode_window_tile<C, true>(job, places, tops, tile, record);
        else decode_window_tile<C, false>(job, places, tops, tile, record);
      });
    }
  }
};
