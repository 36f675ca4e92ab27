/* Decodes whole tiles of one-level codes by spans: one warp per span, one team of warps per tile.
 *
 * A team synchronises once per tile, to exchange the numbers of escapes before each warp and the
 * next tile. Teams draw tiles dynamically. So the tiles in progress are close together, which suits
 * the memory, and all blocks end at about the same time.
 */
#pragma once
#include <ancf_decode_window.cuh>

constexpr u32 kTileSpans = kTile / kSpan;
constexpr u32 kSpanTeams = kFastWarps / kTileSpans;  /* per block */
constexpr u32 kRecordAhead = 8 * kWarpThreads;       /* bytes of a record that are prefetched */
static_assert(kFastWarps % kTileSpans == 0 && kSpanTeams < 16, "a barrier a team, and one of the block");

/* The data that the warps of a tile exchange. */
struct Told {
  u32 missed[kTileSpans];  /* misses in each span */
  u32 tile;                /* the team's tile after the next */
};

/* The warps of one tile. They exchange data in two alternating buffers: while the slowest warp
 * still reads one, the others may write the other. */
struct SpanTeam {
  u32 id, span, lane;
  Told *told;

  DEVICE static SpanTeam here(Told *of_block) {
    u32 warp = thread_in_block() / kWarpThreads, id = warp / kTileSpans;
    return {id, warp % kTileSpans, thread_in_block() % kWarpThreads, of_block + 2 * id};
  }
  DEVICE u32 first_tile() const { return block_index() * kSpanTeams + id; }
  DEVICE bool leads() const { return span == 0 && lane == 0; }
  /* Draws a new tile, after the `given` ones. Only the leading thread has its number, so no other
   * thread waits for it yet. If the blocks divide evenly, several counters share the tiles. */
  DEVICE u32 draw(const Launch &launch, u32 given) const {
    if (!leads()) return 0;
    u32 counters = block_count() % kTileCounters == 0 ? kTileCounters : 1, counter = block_index() % counters;
    return given + take_number(&launch.work->tiles[counter].taken) * counters + counter;
  }

  /* Shares this warp's misses with the team, and the leading thread's tile after the next. */
  DEVICE const Told &tell(u32 turn, u32 missed, u32 tile) const {
    Told &all = told[turn];
    if (lane == 0) all.missed[span] = missed;
    if (leads()) all.tile = tile;
    barrier(1 + id, kTileSpans * kWarpThreads);
    return all;
  }
  DEVICE u32 missed_before(const Told &all) const {
    u32 sum = 0;
#pragma unroll
    for (u32 i = 0; i + 1 < kTileSpans; i++) sum += i < span ? all.missed[i] : 0;
    return sum;
  }
};

/* The position of a span of a whole tile. */
struct SpanPlace {
  u32 tile, first;  /* its first element in the tile */
  ConstPlaneSet planes;

  DEVICE static SpanPlace of(const Launch &launch, u32 tile, u32 span) {
    return {tile, span * kSpan, {launch.block(tile), kTile}};
  }
};

/* The data that a warp loads ahead: a span's planes, and the start of its tile's record. */
template <class C>
struct SpanAhead {
  PlaneWords<C> words;
  WholeBytes<C> whole[kRows];  /* of the first chunk */
  Reader record;
  uint2 start;                 /* 8 bytes per lane */

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

/* Returns the number of misses of a span, whose first words are already loaded. */
template <class C>
DEVICE u32 missed_in(const PlaneWords<C> &words, const SpanPlace &place, u32 lane) {
  u32 sum = ones(words.template missed<true>(0, kTile));
#pragma unroll
  for (u32 at = kGroup; at < kSpan; at += kGroup) {
    sum += ones(PlaneWords<C>::template load<true>(place.planes, place.first + at + 32 * lane).template missed<true>(0, kTile));
  }
  return sum_of_lanes(sum);
}

/* Returns a reader of the span's escapes; the record's first `missed_before` escapes belong to
 * other spans. The escapes of a short record are copied to shared memory, at `ahead`. */
template <class C>
DEVICE MissReader<C> find_escapes(const SpanAhead<C> &next, u32 missed_before, u8 *ahead, u32 lane) {
  reinterpret_cast<uint2 *>(ahead)[lane] = next.start;
  MissReader<C> misses = {};
  misses.escapes = next.record.left <= kRecordAhead ? ahead : next.record.at;
  misses.room = next.record.left / C::kEscapeBytes;
  misses.escaped = missed_before;
  warp_barrier();
  return misses;
}

/* Computes the tops of a span and loads the words of the next; returns false if escapes are
 * missing. */
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

/* Stores a span, chunk by chunk, and loads the rows of the next span. */
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

/* Decodes this warp's spans of the team's tiles until no tile is left. */
template <class C>
DEVICE void decode_spans(Decoding &job, const TopPlaces &places, const SpanTeam &team, u8 *tops, u8 *ahead) {
  const Launch &launch = job.launch;
  const u32 lane = job.lane, tiles = launch.whole_tiles, teams = block_count() * kSpanTeams;
  u32 tile = team.first_tile(), next_tile = tile + teams;
  if (tile >= tiles) return;
  u32 drawn = team.draw(launch, 2 * teams);
  SpanAhead<C> next;
  next.ask_all(launch, SpanPlace::of(launch, tile, team.span), lane);
  Extent extent = Extent::of(launch, next_tile);
#pragma unroll 1
  for (u32 turn = 0; tile < tiles; turn ^= 1) {
    const SpanPlace place = SpanPlace::of(launch, tile, team.span), later = SpanPlace::of(launch, next_tile, team.span);
    const bool goes_on = next_tile < tiles;
    const Told &told = team.tell(turn, missed_in(next.words, place, lane), drawn);
    const u32 last_tile = told.tile;
    drawn = team.draw(launch, 2 * teams);
    MissReader<C> misses = find_escapes(next, team.missed_before(told), ahead, lane);
    bool ok = make_tops(next, place, later, goes_on, places, misses, tops, lane);
    warp_barrier();
    next.ask_record(extent, launch, lane);
    extent = Extent::of(launch, last_tile);
    store_span(job, next, place, later, goes_on, tops, ok);
    tile = next_tile;
    next_tile = last_tile;
    warp_barrier();
  }
}

/* Decodes the last tile if it is incomplete; by one warp. */
template <class C>
DEVICE void decode_rest(Decoding &job, const TopPlaces &places, u8 *tops) {
  const u32 tile = job.launch.whole_tiles;
  if (!job.launch.last_elements) return;
  decode_window_tile<C, false>(job, places, tops, tile, Extent::of(job.launch, tile).record(job.launch));
}

/* The calling warp's shared memory. */
constexpr u32 kFastBytes = kFastWarps * (kTopsBytes + kRecordAhead) + 2 * kSpanTeams * sizeof(Told);
struct FastMemory {
  u8 *tops, *ahead;
  Told *told;  /* of the block's teams */

  DEVICE static FastMemory at(u8 *memory) {
    u32 warp = thread_in_block() / kWarpThreads;
    u8 *ahead = memory + kFastWarps * kTopsBytes, *told = ahead + kFastWarps * kRecordAhead;
    return {memory + warp * kTopsBytes, ahead + warp * kRecordAhead, reinterpret_cast<Told *>(told)};
  }
};

/* Runs the decoder of a one-level code. */
struct DecodeFast {
  Decoding &job;
  const Plan &plan;
  TopPlaces &places;
  FastMemory memory;
  bool last;  /* whether this is the last of all warps */
  template <class C>
  DEVICE void run() const {
    fill_places<C>(places, plan);
    if (last) decode_rest<C>(job, places, memory.tops);  /* other warps take its tiles meanwhile */
    decode_spans<C>(job, places, SpanTeam::here(memory.told), memory.tops, memory.ahead);
  }
};
