/* Code that all decoders share: a launch's arguments, and readers that check every size.
 *
 * A blob may be damaged. So all decoders compare an offset or size from the blob with the sizes of
 * blob and output before they use it.
 */
#pragma once
#include <ancf_code.cuh>

/* Warps per block. With two blocks (24 warps) per multiprocessor each thread has 80 registers, so
 * none are spilled where it matters. Pipeline fast, whose warps synchronise, is faster with 32
 * warps of 64 registers if elements are short enough. */
constexpr u32 kDecodeWarps = 12, kFastWarps = kWidth <= 2 ? 16 : 12;

/* Stores the existing bytes of a piece at any address; a loop, to save registers. */
DEVICE void store_bytes(u8 *dst, u64 at, u64 nbytes, uint4 piece) {
  u64 end = at + 16 < nbytes ? at + 16 : nbytes;
#pragma unroll 1
  for (; at < end; at++) {
    dst[at] = static_cast<u8>(piece.x);
    piece.x = funnel_right(piece.x, piece.y, 8);
    piece.y = funnel_right(piece.y, piece.z, 8);
    piece.z = funnel_right(piece.z, piece.w, 8);
    piece.w >>= 8;
  }
}

/* The data that all threads of a launch share, in shared memory to save registers. */
struct Launch {
  const u8 *blob, *blocks, *payload;
  const u32 *directory;
  u8 *dst;
  Work *work;
  u64 raw_nbytes, fill;
  u32 payload_units, block_size, tiles, whole_tiles, last_elements;
  bool checks, has_pairs, has_signs, dst_aligned;

  /* All threads of the block call it, and must synchronise before they read. */
  DEVICE void prepare(const Plan &plan, const u8 *from, u8 *to, Work *shared_work) {
    if (thread_in_block() != 0) return;
    blob = from;
    blocks = from + plan.fixed_offset;
    payload = from + plan.payload_offset;
    directory = reinterpret_cast<const u32 *>(from + plan.directory_offset);
    dst = to;
    work = shared_work;
    raw_nbytes = plan.raw_nbytes;
    fill = plan.fill;
    payload_units = static_cast<u32>(plan.payload_bytes / kRecordUnit);
    block_size = block_bytes(plan, kTile);
    tiles = plan.tiles;
    whole_tiles = static_cast<u32>(plan.elements / kTile);
    last_elements = static_cast<u32>(plan.elements % kTile);
    checks = (plan.flags & kFlagChecksum) != 0;
    has_pairs = ::has_pairs(plan.bitmap);
    has_signs = keeps_signs_apart(plan.bitmap);
    dst_aligned = aligned(to);
  }
  DEVICE u32 tile_elements(u32 tile) const { return tile < whole_tiles ? kTile : last_elements; }
  DEVICE const u8 *block(u32 tile) const { return blocks + static_cast<u64>(tile) * block_size; }
};

/* A thread's state in a launch. */
struct Decoding {
  const Launch &launch;
  u32 lane;
  u64 check;  /* its part of the checksum */

  DEVICE void refuse() const { fetch_or(&launch.work->status, 1u); }

  /* Adds the chunk at byte `at` to the checksum and stores it; kFull: the whole chunk exists. */
  template <bool kFull>
  DEVICE void store(const uint4 (&rows)[kRows], u64 at) {
    if (!kFull && at >= launch.raw_nbytes) return;
    if (launch.checks) check += column_check(rows, at, lane);
    if (launch.dst_aligned && (kFull || at + kCheckChunkBytes <= launch.raw_nbytes)) {
      uint4 *pieces = reinterpret_cast<uint4 *>(launch.dst + at) + lane;
#pragma unroll
      for (u32 row = 0; row < kRows; row++) store_once(pieces + row * kWarpThreads, rows[row]);
      return;
    }
#pragma unroll
    for (u32 row = 0; row < kRows; row++) store_bytes(launch.dst, at + row * 512 + lane * 16, launch.raw_nbytes, rows[row]);
  }
};

/* A record, and how much of it has been read. `ok` becomes false for good if the record is too
 * short; it is the same in all threads that share a tile. */
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

/* The start and end of a record by the directory, in units of 8 bytes. */
struct Extent {
  u32 start, end;

  DEVICE static Extent of(const Launch &launch, u32 tile) {
    if (tile >= launch.tiles) return {0, 0};
    return {load_cached(launch.directory + tile), load_cached(launch.directory + tile + 1)};
  }
  DEVICE bool fits(const Launch &launch) const { return start <= end && end <= launch.payload_units; }

  /* Returns the record; not ok if the directory is damaged. No valid record reaches 2^31 bytes; a
   * longer claim is truncated, which has no effect. */
  DEVICE Reader record(const Launch &launch) const {
    if (!fits(launch)) return {launch.blob, 0, false};
    u32 units = end - start < 0x0fffffff ? end - start : 0x0fffffff;
    return {launch.payload + static_cast<u64>(start) * kRecordUnit, units * kRecordUnit, true};
  }

  /* Prefetches the first 4 KiB of the record, one line per lane. */
  DEVICE void prefetch(const Launch &launch, u32 lane) const {
    if (!fits(launch) || lane * 128 >= (end - start) * kRecordUnit) return;
    prefetch_line(launch.payload + static_cast<u64>(start) * kRecordUnit + lane * 128);
  }
};

/* Takes a ticket; returns its number in lane 0, and 0 in the others. */
DEVICE u32 take_ticket(const Decoding &job) { return job.lane == 0 ? take_number(&job.launch.work->next_unit) : 0; }

/* Decodes every tile of the blob; warps draw tiles dynamically. While a warp decodes a tile, it
 * loads the next tile's number and directory entries. `warp` is the index among all `warps`
 * warps. */
template <class Decode>
DEVICE void decode_each(Decoding &job, u32 warp, u32 warps, Decode decode) {
  if (warp >= warps) return;
  u32 tile = warp, next = shuffle(take_ticket(job), 0) + warps;
  Extent extent = Extent::of(job.launch, tile);
  while (tile < job.launch.tiles) {
    Extent ahead = Extent::of(job.launch, next);
    u32 ticket = take_ticket(job);
    decode(tile, extent.record(job.launch));
    ahead.prefetch(job.launch, job.lane);
    tile = next;
    extent = ahead;
    next = shuffle(ticket, 0) + warps;
  }
}
