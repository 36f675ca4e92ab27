/* What the tile decoders share: a launch's arguments, and records read with every size checked.
 *
 * What stays true: nothing read from a blob is used as a place or a size before it was compared
 * with what the blob and the output have.
 */
#pragma once
#include <ancf_packed.cuh>

/* Shared memory of a team: elements being put together or those of the misses, then two blocks
 * and two starts of records that are fetched ahead. */
constexpr u32 kStageBytes = kTile * kWidth;
constexpr u32 kMostPlaneBits = kWidth == 1 ? 7 : kWidth == 2 ? 14 : kWidth == 4 ? 27 : 1;
constexpr u32 kBlockAhead = kTile / 8 * kMostPlaneBits;
constexpr u32 kRecordAhead = 1024;
constexpr u32 kDecodeArenaBytes = kStageBytes + 2 * (kBlockAhead + kRecordAhead);
constexpr u32 kWindowPlaced = 24;   /* first codes, then second codes from 8 on */
constexpr u32 kPlacedEntries = 512;
constexpr u32 kDecodeSharedBytes =
    kTeams * (sizeof(TeamShared) + kDecodeArenaBytes) + kPlacedEntries * sizeof(u64) + sizeof(TopPlaces);

/* One launch's arguments, and this thread's place in it. */
struct Decoding {
  const Plan &plan;
  u64 raw_nbytes;     /* and what else of the plan each tile needs */
  const u8 *blocks, *payload;
  const u32 *directory;
  u32 payload_units, block_size, tiles, whole_tiles, last_elements;
  bool checks;
  const u8 *blob;
  u8 *dst;
  Work *work;
  Team team;
  TeamShared *shared;
  u8 *stage;          /* also the elements of misses, at another time */
  const u64 *placed;  /* dictionary entries as bits of an element; level 2 starts at 8 */
  TopPlaces *places;
  u32 turn;
  u64 check;

  DEVICE u32 tile_elements(u32 tile) const { return tile < whole_tiles ? kTile : last_elements; }
  DEVICE const u8 *block(u32 tile) const { return blocks + static_cast<u64>(tile) * block_size; }
  DEVICE u8 *block_ahead(u32 side) const { return stage + kStageBytes + side * kBlockAhead; }
  DEVICE u8 *record_ahead(u32 side) const {
    return stage + kStageBytes + 2 * kBlockAhead + side * kRecordAhead;
  }
  DEVICE void refuse() const { fetch_or(&work->status, 1u); }

  /* Adds the chunk to the checksum and stores it. */
  DEVICE void store(const uint4 (&rows)[kRows], u64 at) {
    if (at >= raw_nbytes) return;
    if (checks) check += column_check(rows, at, team.lane);
    store_chunk(rows, dst, at, raw_nbytes, team.lane);
  }
};

/* A record, and how much of it has been used. `ok` turns false for good when it is too short;
 * it is the same in all threads of a team. */
struct Reader {
  const u8 *at;
  u32 left;
  bool ok;
  DEVICE const u8 *take(u32 bytes) {
    const u8 *from = at;
    ok = ok && bytes <= left;
    if (!ok) return nullptr;
    at += bytes;
    left -= bytes;
    return from;
  }
};

/* Where a record starts and ends, in units of 8 bytes, as the directory says. */
struct Extent {
  u32 start, end;

  DEVICE static Extent of(const Decoding &job, u32 tile) {
    if (tile >= job.tiles) return {0, 0};
    return {job.directory[tile], job.directory[tile + 1]};
  }
  DEVICE bool fits(const Decoding &job) const { return start <= end && end <= job.payload_units; }

  /* The record; not ok where the directory is damaged. No valid record is as long as 2^31 bytes;
   * a longer claim is cut, which changes nothing. */
  DEVICE Reader record(const Decoding &job) const {
    if (!fits(job)) return {job.blob, 0, false};
    u32 units = end - start < 0x0fffffff ? end - start : 0x0fffffff;
    return {job.payload + static_cast<u64>(start) * kRecordUnit, units * kRecordUnit, true};
  }
};

/* Directory entries of the tiles that a team decodes, some turns ahead; a turn is a whole tile. */
struct ExtentsAhead {
  DEVICE static void fetch(const Decoding &job, u32 tile, u32 turn) {
    if (job.team.thread >= 2 || tile >= job.whole_tiles) return;
    u32 *to = job.shared->extents[turn % kExtentsAhead] + job.team.thread;
    copy_behind4(to, job.directory + tile + job.team.thread);
  }
  DEVICE static Extent get(const Decoding &job, u32 turn) {
    const u32 *from = job.shared->extents[turn % kExtentsAhead];
    return {from[0], from[1]};
  }
};

/* Every tile of the blob, spread over the teams of the launch. */
template <class Decode>
DEVICE void decode_each(const Decoding &job, Decode decode) {
  u32 step = block_count() * kTeams;
  for (u32 tile = block_index() * kTeams + job.team.id; tile < job.tiles; tile += step) decode(tile);
}

/* Ranks of flagged bits of all rows in the team. */
DEVICE Ranks rank_bits(Decoding &job, const u32 (&flags)[kRows]) {
  u32 counts[kRows];
  for (u32 row = 0; row < kRows; row++) counts[row] = ones(flags[row]);
  Ranks ranks[1] = {Ranks::in_warp(counts, job.team.lane)};
  rank_in_team(ranks, job.team, *job.shared, job.turn);
  return ranks[0];
}
