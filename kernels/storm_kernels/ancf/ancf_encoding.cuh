/* What the tile encoders share: a launch's arguments, and records on their way to the payload.
 *
 * Records gather in shared memory until the sizes of all earlier units are known, which the units
 * tell each other through one word each (decoupled look-back, Merrill and Garland 2016). What
 * stays true: a unit waits only for units with lower tickets, which running teams hold; and
 * nothing is written past the limit.
 */
#pragma once
#include <ancf_packed.cuh>

constexpr u64 kPartSum = 1ull << 62;   /* the word holds this unit's size */
constexpr u64 kWholeSum = 2ull << 62;  /* the word holds the size of all units up to this one */
constexpr u64 kSumMask = kPartSum - 1;
constexpr u32 kListBytes = kTile;

/* Bytes of shared memory a team has: compacted elements, a byte list, the records' buffer. */
constexpr u32 kCompactBytes = kTile * kWidth;
constexpr u32 kBufferBytes = kWidth == 1 ? 10240 : kWidth == 2 ? 15872 : kWidth == 4 ? 26112 : 49152;
constexpr u32 kArenaBytes = kCompactBytes + kListBytes + kBufferBytes;
constexpr u32 kSymbolTableBytes = (1u << (8 * kWidth - kMantissa)) * 5;
constexpr u32 kTableBytes = kSymbolTableBytes > 2304 ? kSymbolTableBytes : 2304;  /* or a TopTable */
constexpr u32 kSharedBytes = kTeams * (sizeof(TeamShared) + kArenaBytes) + (kTableBytes + 15) / 16 * 16;
static_assert(kArenaBytes % 16 == 0, "16-byte aligned arenas");

/* One launch's arguments, and this thread's place in it. */
struct Encoding {
  const Plan &plan;
  const u8 *src;
  u8 *dst;
  Work *work;
  u64 *prefixes;
  u32 unit_tiles;
  Team team;
  TeamShared *shared;
  u8 *arena;
  u32 turn;
  u64 check;

  DEVICE u8 *compact() const { return arena; }
  DEVICE u8 *list() const { return arena + kCompactBytes; }
  DEVICE u8 *buffer() const { return arena + kCompactBytes + kListBytes; }
  DEVICE u64 limit() const { return kHeaderBytes + plan.raw_nbytes; }
  DEVICE u32 units() const { return (plan.tiles + unit_tiles - 1) / unit_tiles; }

  /* The next unit's number, the same for the whole team. */
  DEVICE u32 take_unit() {
    if (team.thread == 0) shared->unit = fetch_add(&work->next_unit, 1u);
    team.meet();
    return shared->unit;
  }

  /* Loads this warp's chunk of the tile and adds it to the checksum. */
  DEVICE void load(uint4 (&rows)[kRows], u32 tile) {
    u64 at = static_cast<u64>(tile) * kTile * kWidth + team.warp * kCheckChunkBytes;
    load_chunk(rows, src, at, plan.raw_nbytes, team.lane);
    if ((plan.flags & kFlagChecksum) && at < plan.raw_nbytes) check += column_check(rows, at, team.lane);
  }
  DEVICE u32 tile_elements(u32 tile) const {
    u64 rest = plan.elements - static_cast<u64>(tile) * kTile;
    return rest < kTile ? static_cast<u32>(rest) : kTile;
  }
  DEVICE u8 *block(u32 tile) const {
    return dst + plan.fixed_offset + tile * block_bytes(plan, kTile);
  }
};

/* The records' bytes before unit `unit`, in units of 8; a whole warp calls it. */
DEVICE u64 look_back(const u64 *prefixes, u32 unit, u32 lane) {
  u64 sum = 0;
  for (u32 end = unit; end != 0; end -= end < 32 ? end : 32) {
    u64 word;
    u32 whole, blank;
    for (;;) {
      word = lane < end ? load_shared_word(prefixes + (end - 1 - lane)) : kWholeSum;
      whole = lanes_where((word & kWholeSum) != 0);
      blank = lanes_where((word & ~kSumMask) == 0);
      if (blank == 0 || (whole != 0 && lowest_bit(whole) < lowest_bit(blank))) break;
      pause();
    }
    u32 last = whole ? lowest_bit(whole) : 31;
    u64 part = lane <= last ? word & kSumMask : 0;
    for (u32 step = 16; step; step /= 2) part += shuffle_xor(part, step);
    sum += part;
    if (whole) return sum;
  }
  return sum;
}

/* A unit's records: gathered in the team's buffer, then placed. Bytes but for `base`, in units. */
struct Records {
  Encoding &job;
  u32 unit;
  u32 gathered = 0;  /* bytes in the buffer */
  u32 shipped = 0;   /* bytes already in the payload */
  bool placed = false;
  u64 base = 0;

  DEVICE u8 *end() const { return job.buffer() + gathered; }

  /* Notes where the record of the unit's tile number `index` starts. */
  DEVICE void begin(u32 index, u32 most) {
    if (gathered + most > kBufferBytes) ship();
    if (job.team.thread == 0) job.shared->offsets[index] = (shipped + gathered) / kRecordUnit;
  }

  /* Takes a record of `bytes` bytes written at end(). */
  DEVICE void add(u32 bytes) {
    u32 padded = (bytes + kRecordUnit - 1) / kRecordUnit * kRecordUnit;
    if (job.team.thread < padded - bytes) end()[bytes + job.team.thread] = 0;
    gathered += padded;
  }

  /* Learns the unit's place; tells the others its size when that is final. */
  DEVICE void place(bool final) {
    u64 size = (shipped + gathered) / kRecordUnit;
    u64 *word = job.prefixes + unit;
    if (job.team.warp == 0) {
      bool tell = job.team.lane == 0 && final;
      if (!placed) {
        if (tell) store_shared_word(word, kPartSum | size);
        u64 found = look_back(job.prefixes, unit, job.team.lane);
        if (job.team.lane == 0) job.shared->base = found;
        if (tell) store_shared_word(word, kWholeSum | (found + size));
      } else if (tell) {
        store_shared_word(word, kWholeSum | (base + size));
      }
    }
    job.team.meet();
    base = job.shared->base;
    placed = true;
  }

  /* Copies the buffer to the payload; bytes that would pass the limit are left out. */
  DEVICE void copy() {
    u64 at = job.plan.payload_offset + base * kRecordUnit + shipped;
    if (at + gathered <= job.limit()) {
      const u64 *from = reinterpret_cast<const u64 *>(job.buffer());
      u64 *to = reinterpret_cast<u64 *>(job.dst + at);
      for (u32 i = job.team.thread; i < gathered / 8; i += kTeamThreads) to[i] = from[i];
    }
    shipped += gathered;
    gathered = 0;
  }

  /* Empties the buffer before the unit is complete. */
  DEVICE void ship() {
    place(false);
    copy();
    job.team.meet();
  }

  /* Places the whole unit and writes its directory entries. */
  DEVICE void settle(u32 first_tile, u32 tiles) {
    place(true);
    u32 *directory = reinterpret_cast<u32 *>(job.dst + job.plan.directory_offset) + first_tile;
    if (job.team.thread < tiles) {
      directory[job.team.thread] = static_cast<u32>(base) + job.shared->offsets[job.team.thread];
    }
    copy();
    u32 done = first_tile + tiles;
    if (done != job.plan.tiles) return;
    u32 entries = static_cast<u32>(round_up(4ull * (job.plan.tiles + 1), kDirectoryAlign) / 4);
    for (u32 i = done + job.team.thread; i < entries; i += kTeamThreads) {
      u32 value = i == done ? static_cast<u32>(base) + shipped / kRecordUnit : 0;
      directory[i - first_tile] = value;
    }
  }
};

template <u32 kBytes>
DEVICE void write_escape(u8 *at, u64 value) {
#pragma unroll
  for (u32 i = 0; i < kBytes; i++) at[i] = static_cast<u8>(value >> (8 * i));
}

/* Takes units until none is left; `encode(tile, index, records)` does the unit's tile `index`. */
template <class Encode>
DEVICE void encode_units(Encoding &job, Encode encode) {
  for (;;) {
    Records records{job, job.take_unit()};
    if (records.unit >= job.units()) return;
    u32 first = records.unit * job.unit_tiles;
    u32 tiles = job.plan.tiles - first < job.unit_tiles ? job.plan.tiles - first : job.unit_tiles;
    for (u32 index = 0; index < tiles; index++) encode(first + index, index, records);
    records.settle(first, tiles);
  }
}
