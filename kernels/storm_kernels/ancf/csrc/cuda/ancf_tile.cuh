/* How threads share a tile: teams, chunks of 2 KiB, ranks of flagged elements, the checksum.
 *
 * A block of 512 threads contains several teams. A team processes one tile at a time, and each of
 * its warps one chunk of 2 KiB of original bytes, the checksum's unit. A lane holds four pieces of
 * 16 bytes, one of each 512-byte row. Elements are ordered by row, then lane, then position in the
 * piece, so ranks computed here are ranks in the tensor.
 */
#pragma once
#include <ancf_format.cuh>

constexpr u32 kBlockThreads = 512;
constexpr u32 kTeamWarps = 2 * kWidth;
constexpr u32 kTeamThreads = kTeamWarps * kWarpThreads;
constexpr u32 kTeams = kBlockThreads / kTeamThreads;
constexpr u32 kRows = 4;
constexpr u32 kPiece = 16 / kWidth;               /* elements of a lane in a row */
constexpr u32 kRowElements = kPiece * kWarpThreads;
constexpr u32 kChunkElements = kRows * kRowElements;

struct Team {
  u32 id, thread, warp, lane;
  DEVICE static Team here() {
    u32 thread = thread_in_block();
    u32 inside = thread % kTeamThreads;
    return {thread / kTeamThreads, inside, inside / kWarpThreads, inside % kWarpThreads};
  }
  DEVICE void meet() const { barrier(1 + id, kTeamThreads); }
  /* Returns the index in the tile of the first element of this lane's piece in `row`. */
  DEVICE u32 first(u32 row) const {
    return warp * kChunkElements + row * kRowElements + lane * kPiece;
  }
};

using Element = u64;  /* wide enough for all types; the compiler narrows it */

constexpr u32 kIntegerHeadBytes = 16;  /* base and width of a tile of mode integer */

/* Returns the low bits that fit an element. */
DEVICE Element narrowed(u64 value) { return kWidth == 8 ? value : value & ((1ull << 8 * kWidth % 64) - 1); }

/* Returns element i of a piece; i is a constant after unrolling. */
DEVICE Element element(const uint4 &piece, u32 i) {
  u32 words[4] = {piece.x, piece.y, piece.z, piece.w};
  if (kWidth == 8) return words[2 * i] | static_cast<u64>(words[2 * i + 1]) << 32;
  if (kWidth == 4) return words[i];
  if (kWidth == 2) return words[i / 2] >> (16 * (i % 2)) & 0xffff;
  return words[i / 4] >> (8 * (i % 4)) & 0xff;
}

DEVICE void put_element(u32 (&words)[4], u32 i, Element value) {
  u32 low = static_cast<u32>(value);
  if (kWidth == 8) {
    words[2 * i] = low;
    words[2 * i + 1] = static_cast<u32>(value >> 32);
  } else if (kWidth == 4) {
    words[i] = low;
  } else if (kWidth == 2) {
    words[i / 2] |= low << (16 * (i % 2));
  } else {
    words[i / 4] |= low << (8 * (i % 4));
  }
}

/* Returns the piece with the elements from number `valid` on set to 0. */
DEVICE uint4 first_elements(const uint4 &piece, u32 valid) {
  u32 words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
  for (u32 word = 0; word < 4; word++) {
    u32 bytes = valid * kWidth > 4 * word ? valid * kWidth - 4 * word : 0;
    if (bytes < 4) words[word] &= (1u << 8 * bytes) - 1;
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

/* Reads one element at any address. */
DEVICE Element read_element(const u8 *address) {
  Element value = 0;
  if (reinterpret_cast<u64>(address) % kWidth == 0) {
    if (kWidth == 8) return *reinterpret_cast<const u64 *>(address);
    if (kWidth == 4) return *reinterpret_cast<const u32 *>(address);
    if (kWidth == 2) return *reinterpret_cast<const u16 *>(address);
  }
  for (u32 i = 0; i < kWidth; i++) value |= static_cast<Element>(address[i]) << (8 * i);
  return value;
}

DEVICE bool aligned(const void *address) { return reinterpret_cast<u64>(address) % 16 == 0; }

/* Loads 16 bytes at `at`; bytes from `nbytes` on read as 0. */
DEVICE uint4 load_piece(const u8 *src, u64 at, u64 nbytes) {
  u32 words[4] = {0, 0, 0, 0};
  u32 count = at >= nbytes ? 0 : nbytes - at < 16 ? static_cast<u32>(nbytes - at) : 16;
#pragma unroll
  for (u32 i = 0; i < 16; i++) {
    if (i < count) words[i / 4] |= static_cast<u32>(src[at + i]) << (8 * (i % 4));
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

DEVICE void store_piece(u8 *dst, u64 at, u64 nbytes, uint4 piece) {
  u32 words[4] = {piece.x, piece.y, piece.z, piece.w};
  u32 count = at >= nbytes ? 0 : nbytes - at < 16 ? static_cast<u32>(nbytes - at) : 16;
#pragma unroll
  for (u32 i = 0; i < 16; i++) {
    if (i < count) dst[at + i] = static_cast<u8>(words[i / 4] >> (8 * (i % 4)));
  }
}

/* Loads this lane's pieces of the chunk at byte `at`, at any alignment; past `nbytes` they are
 * 0. */
DEVICE void load_chunk(uint4 (&rows)[kRows], const u8 *src, u64 at, u64 nbytes, u32 lane) {
  if (aligned(src) && at + kCheckChunkBytes <= nbytes) {
    const uint4 *pieces = reinterpret_cast<const uint4 *>(src + at) + lane;
#pragma unroll
    for (u32 row = 0; row < kRows; row++) rows[row] = load_once(pieces + row * kWarpThreads);
    return;
  }
#pragma unroll
  for (u32 row = 0; row < kRows; row++) {
    rows[row] = load_piece(src, at + row * 512 + lane * 16, nbytes);
  }
}

DEVICE void store_chunk(const uint4 (&rows)[kRows], u8 *dst, u64 at, u64 nbytes, u32 lane) {
  if (aligned(dst) && at + kCheckChunkBytes <= nbytes) {
    uint4 *pieces = reinterpret_cast<uint4 *>(dst + at) + lane;
#pragma unroll
    for (u32 row = 0; row < kRows; row++) store_once(pieces + row * kWarpThreads, rows[row]);
    return;
  }
#pragma unroll
  for (u32 row = 0; row < kRows; row++) {
    store_piece(dst, at + row * 512 + lane * 16, nbytes, rows[row]);
  }
}

/* Calls `visit(rows, at, lane)` for each chunk of `src`, distributed over the warps of a launch
 * with blocks of kBlockThreads. */
template <class Visit>
DEVICE void visit_chunks(const u8 *src, u64 nbytes, Visit visit) {
  u64 stride = static_cast<u64>(block_count()) * kBlockThreads / kWarpThreads * kCheckChunkBytes;
  u64 warp = static_cast<u64>(block_index()) * (kBlockThreads / kWarpThreads) + thread_in_block() / kWarpThreads;
  u32 lane = thread_in_block() % kWarpThreads;
  for (u64 at = warp * kCheckChunkBytes; at < nbytes; at += stride) {
    uint4 rows[kRows];
    load_chunk(rows, src, at, nbytes, lane);
    visit(rows, at, lane);
  }
}

DEVICE u64 multiply_wide(u32 a, u32 b) { return static_cast<u64>(a) * b; }

/* Returns the mixed sum of this lane's column of the chunk at byte `at` (FORMAT.md, section 8). */
DEVICE u64 column_check(const uint4 (&rows)[kRows], u64 at, u32 lane) {
  u64 sum = 0;
#pragma unroll
  for (u32 row = 0; row < kRows; row++) {
    sum += multiply_wide(rows[row].x, kCheckKeys[4 * row]);
    sum += multiply_wide(rows[row].y, kCheckKeys[4 * row + 1]);
    sum += multiply_wide(rows[row].z, kCheckKeys[4 * row + 2]);
    sum += multiply_wide(rows[row].w, kCheckKeys[4 * row + 3]);
  }
  u64 mixed = sum ^ (at / 64 + lane) * kCheckIndex;
  mixed ^= mixed >> 32;
  mixed *= kCheckMix;
  return mixed ^ mixed >> 29;
}

/* Returns the sum over all lanes. */
DEVICE u64 over_lanes(u64 sum) {
  for (u32 step = 16; step; step /= 2) sum += shuffle_xor(sum, step);
  return sum;
}

/* Ranks of flagged elements: that of this lane's first one in each row, and the total number. */
struct Ranks {
  u32 start[kRows];
  u32 total;

  /* Computes ranks inside the warp's chunk from this lane's number of flagged elements per row. */
  DEVICE static Ranks in_warp(const u32 (&count)[kRows], u32 lane) {
    return kPiece <= 8 ? in_bytes(count, lane) : in_halves(count, lane);
  }

  /* For at most 8 per row: the count before a lane in its row is below 256 and fits a byte. */
  DEVICE static Ranks in_bytes(const u32 (&count)[kRows], u32 lane) {
    u32 own = count[0] | count[1] << 8 | count[2] << 16 | count[3] << 24;
    u32 before = shuffle_up(own, 1);
    if (lane == 0) before = 0;
#pragma unroll
    for (u32 step = 1; step < kWarpThreads; step *= 2) {
      u32 add = shuffle_up(before, step);
      if (lane >= step) before += add;
    }
    u32 last_before = shuffle(before, 31), last = shuffle(own, 31);
    Ranks ranks;
    ranks.total = 0;
#pragma unroll
    for (u32 row = 0; row < kRows; row++) {
      ranks.start[row] = ranks.total + (before >> (8 * row) & 0xff);
      ranks.total += (last_before >> (8 * row) & 0xff) + (last >> (8 * row) & 0xff);
    }
    return ranks;
  }

  DEVICE static Ranks in_halves(const u32 (&count)[kRows], u32 lane) {
    Ranks ranks;
    u32 low = count[0] | count[1] << 16, high = count[2] | count[3] << 16;
    u32 low_sum = low, high_sum = high;
#pragma unroll
    for (u32 step = 1; step < kWarpThreads; step *= 2) {
      u32 low_add = shuffle_up(low_sum, step), high_add = shuffle_up(high_sum, step);
      if (lane >= step) {
        low_sum += low_add;
        high_sum += high_add;
      }
    }
    u32 low_all = shuffle(low_sum, 31), high_all = shuffle(high_sum, 31);
    low_sum -= low;
    high_sum -= high;
    u32 before = 0;
    ranks.start[0] = low_sum & 0xffff;
    before = low_all & 0xffff;
    ranks.start[1] = before + (low_sum >> 16);
    before += low_all >> 16;
    ranks.start[2] = before + (high_sum & 0xffff);
    before += high_all & 0xffff;
    ranks.start[3] = before + (high_sum >> 16);
    ranks.total = before + (high_all >> 16);
    return ranks;
  }

  DEVICE void shift(u32 by) {
    for (u32 row = 0; row < kRows; row++) start[row] += by;
  }
};

constexpr u32 kMaxUnitTiles = 4;  /* tiles that a team encodes before their place must be known */

/* Shared words of one team. `totals` has two halves, used in turn, so one synchronisation per scan
 * is enough: the half written now was last read before the previous synchronisation. */
struct alignas(16) TeamShared {
  u64 base;                                /* start of the unit that is being placed */
  u32 offsets[2][kMaxUnitTiles];           /* of records in their unit, by the unit's side */
  u32 unit;                                /* the ticket drawn last */
  u16 totals[2][kTeamWarps];
};

/* Converts ranks inside each warp to ranks inside the team's tile; the team synchronises once. */
DEVICE void rank_in_team(Ranks &ranks, const Team &team, TeamShared &shared, u32 &turn) {
  turn ^= 1;
  if (team.lane == 0) shared.totals[turn][team.warp] = static_cast<u16>(ranks.total);
  team.meet();
  u32 before = 0, all = 0;
#pragma unroll
  for (u32 warp = 0; warp < kTeamWarps; warp++) {
    u32 total = shared.totals[turn][warp];
    before += warp < team.warp ? total : 0;
    all += total;
  }
  ranks.shift(before);
  ranks.total = all;
}

/* Transposes eight bytes as an 8 x 8 bit matrix: bit j of byte i moves to bit i of byte j. */
DEVICE void transpose_bits(u32 &low, u32 &high) {
  u32 swap;
  swap = (low ^ low >> 7) & 0x00AA00AA;
  low ^= swap ^ swap << 7;
  swap = (high ^ high >> 7) & 0x00AA00AA;
  high ^= swap ^ swap << 7;
  swap = (low ^ low >> 14) & 0x0000CCCC;
  low ^= swap ^ swap << 14;
  swap = (high ^ high >> 14) & 0x0000CCCC;
  high ^= swap ^ swap << 14;
  swap = (low >> 4 ^ high) & 0x0F0F0F0F;
  high ^= swap;
  low ^= swap << 4;
}

/* Writes kBits bits of each lane (a power of two up to 16) as contiguous bits of `plane`. `place`
 * is this lane's bit offset; lanes are consecutive. All 32 lanes call it. */
template <u32 kBits>
DEVICE void write_lane_bits(u8 *plane, u32 place, u32 value, bool wanted, u32 lane) {
  if (kBits == 16) {
    if (wanted) *reinterpret_cast<u16 *>(plane + place / 8) = static_cast<u16>(value);
    return;
  }
  constexpr u32 kLanes = kBits < 8 ? 8 / kBits : 1;  /* lanes that share a byte */
  value <<= kBits * (lane % kLanes);
#pragma unroll
  for (u32 step = 1; step < kLanes; step *= 2) value |= shuffle_xor(value, step);
  if (wanted && place % 8 == 0) plane[place / 8] = static_cast<u8>(value);
}
