/* Code that the encoders of pipelines dense and bitmap share, where one warp encodes a tile: a
 * launch's arguments, tickets, copies of tiles to shared memory, and the places of records. Nothing
 * is written past the limit.
 */
#pragma once
#include <ancf_lanes.cuh>
#include <ancf_look_back.cuh>

/* The place of a tile's record in the blob. */
struct Place {
  u8 *record;
  bool fits;  /* else it would exceed the limit and is not written */
};

/* One launch's arguments, and this warp's state. */
struct WarpEncoding {
  const Plan &plan;
  u64 raw_nbytes;     /* this and more are cached from the plan for each tile */
  u8 *blocks;
  u32 block_size, tiles;
  const u8 *src;
  u8 *dst;
  Work *work;
  u64 *prefixes;
  u8 *room;           /* the warp's shared memory */
  u32 lane;
  bool checks;
  u64 check;

  /* Draws a ticket for a tile; only lane 0 has it, so the warp does not wait for it yet. */
  DEVICE u32 draw() const { return lane == 0 ? fetch_add(&work->next_unit, 1u) : 0; }

  DEVICE u32 tile_elements(u32 tile) const {
    u64 left = plan.elements - static_cast<u64>(tile) * kTile;
    return left < kTile ? static_cast<u32>(left) : kTile;
  }
  DEVICE u8 *block(u32 tile) const { return blocks + static_cast<u64>(tile) * block_size; }

  /* Starts to copy `bytes` original bytes from `at` on to `stage`; past the end they are 0. */
  DEVICE void fetch(u8 *stage, u64 at, u32 bytes) const {
    if (!aligned(src) || at + bytes > raw_nbytes) return fetch_any(stage, at, bytes);
    const u8 *from = src + at + lane * 16;
    u32 own = swizzled(lane * 16);
#pragma unroll 8
    for (u32 row = 0; row < bytes; row += kRowBytes) copy_behind(stage + in_row(own, row), from + row);
  }
  DEVICE void fetch_any(u8 *stage, u64 at, u32 bytes) const {
    for (u32 offset = lane * 16; offset < bytes; offset += kRowBytes) {
      *reinterpret_cast<uint4 *>(stage + swizzled(offset)) = load_piece(src, at + offset, raw_nbytes);
    }
  }
  /* The same, but only into the L2 cache. */
  DEVICE void prefetch(u64 at, u32 bytes) const {
    constexpr u32 kLine = 128;
    if (at + bytes > raw_nbytes) return;
    for (u32 offset = lane * kLine; offset < bytes; offset += kWarpThreads * kLine) prefetch_line(src + at + offset);
  }

  /* Adds the bytes that this lane fetched to the checksum; `bytes` is a multiple of a chunk. */
  DEVICE void add_to_check(const u8 *stage, u64 at, u32 bytes) {
    if (!checks) return;
    u32 own = swizzled(lane * 16);
#pragma unroll 2
    for (u32 chunk = 0; chunk < bytes; chunk += kCheckChunkBytes) {
      if (at + chunk >= raw_nbytes) return;
      uint4 rows[kRows];
#pragma unroll
      for (u32 row = 0; row < kRows; row++) {
        rows[row] = *reinterpret_cast<const uint4 *>(stage + in_row(own, chunk + row * kRowBytes));
      }
      check += column_check(rows, at + chunk, lane);
    }
  }

  /* Publishes the length of the record of `tile`; `bytes` is a multiple of the unit. */
  DEVICE void announce(u32 tile, u32 bytes) const {
    if (lane == 0) store_shared_word(prefixes + tile, kPartSum | bytes / kRecordUnit);
  }

  /* Finds the record's place and writes the directory's entry. If the place is not known yet, waits
   * for it with `kWaits`, else returns false. */
  template <bool kWaits>
  DEVICE bool find_place(u32 tile, u32 bytes, Place &place) const {
    u64 start;
    if (!look_back<kWaits>(prefixes, tile, lane, start)) return false;
    u64 end = start + bytes / kRecordUnit;
    u32 *directory = reinterpret_cast<u32 *>(dst + plan.directory_offset);
    if (lane == 0) {
      store_shared_word(prefixes + tile, kWholeSum | end);
      directory[tile] = static_cast<u32>(start);
    }
    if (tile + 1 == tiles) finish_directory(directory, end);
    u64 at = plan.payload_offset + start * kRecordUnit;
    place = {dst + at, at + bytes <= kHeaderBytes + raw_nbytes};
    return true;
  }

  /* Writes the directory's last entry and its padding. */
  DEVICE void finish_directory(u32 *directory, u64 end) const {
    u32 entries = static_cast<u32>(round_up(4ull * (tiles + 1), kDirectoryAlign) / 4);
    for (u32 i = tiles + lane; i < entries; i += kWarpThreads) directory[i] = i == tiles ? static_cast<u32>(end) : 0;
  }
};

/* Returns the padded length of a record. */
DEVICE u32 padded_record(u32 bytes) { return (bytes + kRecordUnit - 1) / kRecordUnit * kRecordUnit; }
