/* Code that the encoders of pipelines fast and whole share, where a team of warps encodes a tile: a
 * launch's arguments, and the transfer of records to the payload. Records are buffered in shared
 * memory until the sizes of all earlier units are known. Nothing is written past the limit.
 */
#pragma once
#include <ancf_look_back.cuh>
#include <ancf_packed.cuh>

constexpr u32 kGatherBytes = kTile;

/* A team's shared memory in bytes: a tile's elements, its bit planes, the records' buffer. */
constexpr u32 kAheadBytes = kTile * kWidth;
constexpr u32 kBufferBytes = kWidth == 1 ? 10240 : kWidth == 2 ? 15872 : kWidth == 4 ? 26112 : 49152;
constexpr u32 kArenaBytes = kAheadBytes + kGatherBytes + kBufferBytes;
constexpr u32 kSymbolTableBytes = (1u << (8 * kWidth - kMantissa)) * 4;
constexpr u32 kTableBytes = kSymbolTableBytes > 2304 ? kSymbolTableBytes : 2304;  /* or a TopTable */
constexpr u32 kSharedBytes = kTeams * (sizeof(TeamShared) + kArenaBytes) + (kTableBytes + 15) / 16 * 16;
static_assert(kArenaBytes % 16 == 0, "16-byte aligned arenas");

/* One launch's arguments, and this thread's state. */
struct Encoding {
  const Plan &plan;
  u64 raw_nbytes;     /* this and more are cached from the plan for each tile */
  u8 *blocks;
  u32 block_size, whole_tiles, last_elements;
  bool checks;
  const u8 *src;
  u8 *dst;
  Work *work;
  u64 *prefixes;
  u32 unit_tiles;
  Team team;
  TeamShared *shared;
  u8 *arena;
  bool fetches;  /* ahead() holds prefetched tiles, else data of the mode */
  u32 turn;
  u64 check;

  DEVICE u8 *ahead() const { return arena; }
  DEVICE u8 *gathered() const { return arena + kAheadBytes; }
  /* One byte per element of a tile, at the buffer's end, for modes that fetch ahead. */
  DEVICE u8 *tops() const { return arena + kArenaBytes - kTile; }
  DEVICE u8 *buffer() const { return arena + kAheadBytes + kGatherBytes; }
  DEVICE u64 limit() const { return kHeaderBytes + plan.raw_nbytes; }
  DEVICE u32 units() const { return (plan.tiles + unit_tiles - 1) / unit_tiles; }

  /* Draws the next unit's number, the same for the whole team. */
  DEVICE u32 take_unit() {
    if (team.thread == 0) shared->unit = fetch_add(&work->next_unit, 1u);
    team.meet();
    return shared->unit;
  }

  DEVICE bool is_whole(u32 tile) const { return tile < whole_tiles && aligned(src); }

  /* Starts to copy this thread's part of a tile to ahead(), if the mode does not use ahead(). */
  DEVICE void fetch_ahead(u32 tile) {
    if (!fetches || !is_whole(tile)) return;
    u64 at = static_cast<u64>(tile) * kTile * kWidth + team.warp * kCheckChunkBytes + team.lane * 16;
    u8 *to = ahead() + team.warp * kCheckChunkBytes + team.lane * 16;
#pragma unroll
    for (u32 row = 0; row < kRows; row++) copy_behind(to + 512 * row, src + at + 512 * row);
  }

  /* Loads this thread's part of a tile passed to fetch_ahead before; adds it to the checksum. */
  DEVICE void load(uint4 (&rows)[kRows], u32 tile) {
    u64 at = static_cast<u64>(tile) * kTile * kWidth + team.warp * kCheckChunkBytes;
    if (fetches && is_whole(tile)) {
      copies_arrived();
      const uint4 *from = reinterpret_cast<const uint4 *>(ahead() + team.warp * kCheckChunkBytes) + team.lane;
#pragma unroll
      for (u32 row = 0; row < kRows; row++) rows[row] = from[row * kWarpThreads];
    } else {
      load_chunk(rows, src, at, raw_nbytes, team.lane);
    }
    if (checks && at < raw_nbytes) check += column_check(rows, at, team.lane);
  }
  DEVICE u32 tile_elements(u32 tile) const { return tile < whole_tiles ? kTile : last_elements; }
  DEVICE u8 *block(u32 tile) const { return blocks + static_cast<u64>(tile) * block_size; }
};

/* Finds the start of unit `unit` of length `size` and, if it is complete, publishes its end; all in
 * units of 8 bytes. The team synchronises. */
DEVICE_CALL u64 locate_unit(u64 *prefixes, u32 unit, u64 size, bool complete, TeamShared *shared, Team team) {
  if (team.warp == 0) {
    u64 found;
    look_back<true>(prefixes, unit, team.lane, found);
    if (team.lane == 0) {
      shared->base = found;
      if (complete) store_shared_word(prefixes + unit, kWholeSum | (found + size));
    }
  }
  team.meet();
  return shared->base;
}

DEVICE_CALL void copy_words(u64 *to, const u64 *from, u32 count, u32 thread) {
  for (u32 i = thread; i < count; i += kTeamThreads) to[i] = from[i];
}

/* Contiguous records of one unit in the team's buffer. */
struct Batch {
  u32 unit, side;      /* side: which of the team's two sets of offsets the unit uses */
  u32 start, bytes;    /* in the buffer */
  u32 shipped;         /* bytes of the unit already in the payload */
};

/* A team's records before they are in the payload. A complete unit, whose size is published, waits
 * while the team works on its next unit: after that its place is mostly known. */
struct Records {
  Encoding &job;
  u32 capacity;        /* bytes of the buffer that may be used */
  Batch current = {}, waiting = {};
  bool waits = false;  /* a complete unit is in `waiting` */
  bool placed = false; /* the current unit's place is known: it outgrew the buffer */
  u64 base = 0;        /* that place, in units of 8 bytes */

  DEVICE void open(u32 unit) {
    u32 end = waits ? waiting.start + waiting.bytes : 0;
    if (end > capacity / 2) {
      settle();
      end = 0;
    }
    current = {unit, current.side ^ 1, end, 0, 0};
    placed = false;
  }

  /* Reserves memory for a record of `bytes` bytes and stores its offset; returns the memory. */
  DEVICE u8 *reserve(u32 index, u32 bytes) {
    if (current.start + current.bytes + bytes + kRecordUnit > capacity) make_room();
    if (job.team.thread == 0) {
      job.shared->offsets[current.side][index] = (current.shipped + current.bytes) / kRecordUnit;
    }
    return job.buffer() + current.start + current.bytes;
  }

  /* Adds the record of `bytes` bytes in the memory from reserve(). */
  DEVICE void add(u32 bytes) {
    u32 padded = (bytes + kRecordUnit - 1) / kRecordUnit * kRecordUnit;
    u8 *end = job.buffer() + current.start + current.bytes + bytes;
    if (job.team.thread < padded - bytes) end[job.team.thread] = 0;
    current.bytes += padded;
  }

  /* Ends the current unit, which is complete. */
  DEVICE void close() {
    if (waits) settle();
    u64 size = (current.shipped + current.bytes) / kRecordUnit;
    if (job.team.thread == 0) {
      u64 word = placed ? kWholeSum | (base + size) : kPartSum | size;
      store_shared_word(job.prefixes + current.unit, word);
    }
    waiting = current;
    waits = true;
    if (placed) finish(base);
  }

  /* Writes the waiting unit to its place; the team synchronises. */
  DEVICE void settle() { finish(locate(waiting, true)); }

  DEVICE void finish(u64 place) {
    write_directory(waiting, place);
    copy(waiting, place);
    waits = false;
    job.team.meet();
  }

  /* Returns the start of the unit of `batch`; if it is complete, publishes its end. */
  DEVICE u64 locate(const Batch &batch, bool complete) {
    u64 size = (batch.shipped + batch.bytes) / kRecordUnit;
    return locate_unit(job.prefixes, batch.unit, size, complete, job.shared, job.team);
  }

  /* Empties the buffer before the current unit is complete. */
  DEVICE void make_room() {
    if (waits) settle();
    if (!placed) base = locate(current, false);
    else job.team.meet();
    placed = true;
    copy(current, base);
    job.team.meet();
    current = {current.unit, current.side, 0, 0, current.shipped + current.bytes};
  }

  /* Copies a batch to the payload, unless it would exceed the limit. */
  DEVICE void copy(const Batch &batch, u64 place) {
    u64 at = job.plan.payload_offset + place * kRecordUnit + batch.shipped;
    if (at + batch.bytes > job.limit()) return;
    const u64 *from = reinterpret_cast<const u64 *>(job.buffer() + batch.start);
    u64 *to = reinterpret_cast<u64 *>(job.dst + at);
    copy_words(to, from, batch.bytes / 8, job.team.thread);
  }

  /* Writes the unit's directory entries and, after the last tile, the end and the padding. */
  DEVICE void write_directory(const Batch &batch, u64 place) {
    u32 first = batch.unit * job.unit_tiles, thread = job.team.thread;
    u32 left = job.plan.tiles - first, tiles = left < job.unit_tiles ? left : job.unit_tiles;
    u32 *directory = reinterpret_cast<u32 *>(job.dst + job.plan.directory_offset) + first;
    if (thread < tiles) directory[thread] = static_cast<u32>(place) + job.shared->offsets[batch.side][thread];
    if (tiles != left) return;
    u32 entries = static_cast<u32>(round_up(4ull * (job.plan.tiles + 1), kDirectoryAlign) / 4) - first;
    u32 end = static_cast<u32>(place) + (batch.shipped + batch.bytes) / kRecordUnit;
    for (u32 i = tiles + thread; i < entries; i += kTeamThreads) directory[i] = i == tiles ? end : 0;
  }
};

template <u32 kBytes>
DEVICE void write_escape(u8 *at, u64 value) {
#pragma unroll
  for (u32 i = 0; i < kBytes; i++) at[i] = static_cast<u8>(value >> (8 * i));
}

/* Encodes units until none is left; `encode(tile, index, is_last, records)` encodes tile number
 * `index` of the unit. The next ticket is drawn early, so that its first tile can be prefetched. */
template <class Encode>
DEVICE void encode_units(Encoding &job, u32 capacity, Encode encode) {
  Records records{job, capacity};
  u32 unit = job.take_unit();
  job.fetch_ahead(unit * job.unit_tiles);
  while (unit < job.units()) {
    job.team.meet();  /* all threads have read the ticket */
    if (job.team.thread == 0) job.shared->unit = fetch_add(&job.work->next_unit, 1u);
    records.open(unit);
    u32 first = unit * job.unit_tiles;
    u32 tiles = job.plan.tiles - first < job.unit_tiles ? job.plan.tiles - first : job.unit_tiles;
    for (u32 index = 0; index < tiles; index++) encode(first + index, index, index + 1 == tiles, records);
    job.team.meet();
    unit = job.shared->unit;
    records.close();
  }
  if (records.waits) records.settle();
}
