/* What the tile decoders share: a launch's arguments, and records read with every size checked.
 *
 * What stays true: nothing read from a blob is used as a place or a size before it was compared
 * with what the blob and the output have.
 */
#pragma once
#include <ancf_packed.cuh>

/* Shared memory of a team: elements being put together, and those of the escapes. */
constexpr u32 kStageBytes = kTile * kWidth;
constexpr u32 kDecodeArenaBytes = 2 * kStageBytes;
constexpr u32 kWindowPlaced = 24;   /* first codes, then second codes from 8 on */
constexpr u32 kPlacedEntries = 512;
constexpr u32 kDecodeSharedBytes =
    kTeams * (sizeof(TeamShared) + kDecodeArenaBytes) + kPlacedEntries * sizeof(u64) + sizeof(TopPlaces);

/* One launch's arguments, and this thread's place in it. */
struct Decoding {
  const Plan &plan;
  const u8 *blob;
  u8 *dst;
  Work *work;
  Team team;
  TeamShared *shared;
  u8 *stage, *misses;
  const u64 *placed;  /* dictionary entries as bits of an element; level 2 starts at 8 */
  TopPlaces *places;
  u32 turn;
  u64 check;

  DEVICE u32 tile_elements(u32 tile) const {
    u64 rest = plan.elements - static_cast<u64>(tile) * kTile;
    return rest < kTile ? static_cast<u32>(rest) : kTile;
  }
  DEVICE void refuse() const { fetch_or(&work->status, 1u); }

  /* Adds the chunk to the checksum and stores it. */
  DEVICE void store(const uint4 (&rows)[kRows], u64 at) {
    if (at >= plan.raw_nbytes) return;
    if (plan.flags & kFlagChecksum) check += column_check(rows, at, team.lane);
    store_chunk(rows, dst, at, plan.raw_nbytes, team.lane);
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

/* The record of `tile`; not ok where the directory is damaged. */
DEVICE Reader record_of(const Decoding &job, u32 tile) {
  const u32 *directory = reinterpret_cast<const u32 *>(job.blob + job.plan.directory_offset);
  u64 start = directory[tile], end = directory[tile + 1];
  bool ok = start <= end && end * kRecordUnit <= job.plan.payload_bytes;
  if (!ok) return {job.blob, 0, false};
  /* No valid record is as long as 2^31 bytes; a longer claim is cut, which changes nothing. */
  u64 bytes = (end - start) * kRecordUnit;
  u32 left = bytes < 0x7fffffff ? static_cast<u32>(bytes) : 0x7fffffff;
  return {job.blob + job.plan.payload_offset + start * kRecordUnit, left, true};
}

/* Asks for what the team needs soon: this tile's record, and the next tile's block and directory
 * entries. Only places inside the blob are named. */
DEVICE void prefetch_tile(const Decoding &job, const Reader &record, u32 next) {
  u32 at = 128 * job.team.thread;
  if (at < record.left) prefetch_line(record.at + at);
  if (next >= job.plan.elements / kTile) return;
  u64 bytes = block_bytes(job.plan, kTile);
  if (at < bytes) prefetch_line(job.blob + job.plan.fixed_offset + next * bytes + at);
  if (job.team.thread == 0) prefetch_line(job.blob + job.plan.directory_offset + 4 * next);
}

/* Every tile of the blob, spread over the teams of the launch. */
template <class Decode>
DEVICE void decode_each(const Decoding &job, Decode decode) {
  u32 step = block_count() * kTeams;
  for (u32 tile = block_index() * kTeams + job.team.id; tile < job.plan.tiles; tile += step) decode(tile);
}

/* Ranks of flagged bits of all rows in the team. */
DEVICE Ranks rank_bits(Decoding &job, const u32 (&flags)[kRows]) {
  u32 counts[kRows];
  for (u32 row = 0; row < kRows; row++) counts[row] = ones(flags[row]);
  Ranks ranks[1] = {Ranks::in_warp(counts, job.team.lane)};
  rank_in_team(ranks, job.team, *job.shared, job.turn);
  return ranks[0];
}
