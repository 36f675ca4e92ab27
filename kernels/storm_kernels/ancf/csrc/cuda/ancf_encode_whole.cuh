/* The encoders of pipeline whole: modes integer, ternary and values (FORMAT.md, sections 4 and 7),
 * and the modes without tiles. Widths are known only at run time, and speed matters less than in
 * the modes for floats. All lanes of a team take part in every synchronisation.
 */
#pragma once
#include <ancf_encoding.cuh>

/* Writes planes(values, bits, padded), the pieces of section 5, for a lane's elements from `first`
 * on. */
DEVICE void write_planes(const PlaneSet &planes, u32 first, const u64 (&values)[kPiece], u32 bits, u32 lane) {
  u32 at = 0;
  bool wanted = first < planes.padded;
  while (bits - at >= 8) {
    u32 bytes = bits - at >= 32 ? 4 : bits - at >= 16 ? 2 : 1;
    u8 *to = planes.plane(at) + first * bytes;
#pragma unroll
    for (u32 i = 0; i < kPiece; i++, to += bytes) {
      u32 field = static_cast<u32>(values[i] >> at);
      if (!wanted) continue;
      if (bytes == 4) *reinterpret_cast<u32 *>(to) = field;
      else if (bytes == 2) *reinterpret_cast<u16 *>(to) = static_cast<u16>(field);
      else *to = static_cast<u8>(field);
    }
    at += 8 * bytes;
  }
  for (; at < bits; at++) {
    u32 plane = 0;
#pragma unroll
    for (u32 i = 0; i < kPiece; i++) plane |= static_cast<u32>(values[i] >> at & 1) << i;
    write_lane_bits<kPiece>(planes.plane(at), first, plane, wanted, lane);
  }
}

/* Minimum and maximum of the team's elements, in the order of the type. */
struct Bounds {
  u64 least = ~0ull, most = 0;

  DEVICE void include(u64 place) {
    least = place < least ? place : least;
    most = place > most ? place : most;
  }
  DEVICE void gather(const Encoding &job) {
    for (u32 step = 16; step; step /= 2) {
      u64 low = shuffle_xor(least, step), high = shuffle_xor(most, step);
      least = low < least ? low : least;
      most = high > most ? high : most;
    }
    u64 *shared = reinterpret_cast<u64 *>(job.ahead());
    if (job.team.lane == 0) {
      shared[2 * job.team.warp] = least;
      shared[2 * job.team.warp + 1] = most;
    }
    job.team.meet();
    for (u32 warp = 0; warp < kTeamWarps; warp++) {
      least = shared[2 * warp] < least ? shared[2 * warp] : least;
      most = shared[2 * warp + 1] > most ? shared[2 * warp + 1] : most;
    }
    job.team.meet();
  }
};

DEVICE u32 bit_length(u64 value) {
  u32 high = static_cast<u32>(value >> 32), low = static_cast<u32>(value);
  return high ? 33 + highest_bit(high) : low ? 1 + highest_bit(low) : 0;
}

DEVICE void encode_integer_tile(Encoding &job, u32 tile, u32 index, Records &records) {
  const Team &team = job.team;
  constexpr u64 kSign = 1ull << (8 * kWidth - 1), kAll = kSign | (kSign - 1);
  u64 flip = traits_of(job.plan.dtype).is_signed ? kSign : 0;  /* makes signed order unsigned */
  u32 count = job.tile_elements(tile);
  uint4 rows[kRows];
  job.load(rows, tile);
  Bounds bounds;
  for (u32 row = 0; row < kRows; row++) {
    for (u32 i = 0; i < kPiece; i++) {
      if (team.first(row) + i < count) bounds.include(element(rows[row], i) ^ flip);
    }
  }
  bounds.gather(job);
  u32 width = bit_length(bounds.most - bounds.least);
  u64 base = bounds.least ^ flip;
  PlaneSet planes = {nullptr, (count + 31) / 32 * 32};
  u32 bytes = kIntegerHeadBytes + planes.padded / 8 * width;
  u8 *record = records.reserve(index, bytes);
  planes.base = record + kIntegerHeadBytes;
  if (team.thread < 2) reinterpret_cast<u64 *>(record)[team.thread] = team.thread ? width : base;
  for (u32 row = 0; row < kRows; row++) {
    u64 values[kPiece];
#pragma unroll
    for (u32 i = 0; i < kPiece; i++) {
      values[i] = team.first(row) + i < count ? (element(rows[row], i) - base) & kAll : 0;
    }
    write_planes(planes, team.first(row), values, width, team.lane);
  }
  records.add(bytes);
}

DEVICE void encode_integers(Encoding &job) {
  encode_units(job, kBufferBytes, [&](u32 tile, u32 index, bool, Records &records) {
    encode_integer_tile(job, tile, index, records);
  });
}

/* The dictionary in ascending order, in the team's part of shared memory. */
struct SortedValues {
  u64 *value;
  u16 *code;
  u32 count, bits;

  DEVICE static SortedValues make(const Encoding &job, const u64 *values) {
    constexpr u32 kMost = kWidth == 1 ? 256 : 512;
    u64 *sorted = reinterpret_cast<u64 *>(job.ahead());
    SortedValues made = {sorted, reinterpret_cast<u16 *>(sorted + kMost), job.plan.dict_count, job.plan.k1};
    for (u32 i = job.team.thread; i < made.count; i += kTeamThreads) {
      u32 rank = 0;
      for (u32 j = 0; j < made.count; j++) rank += values[j] < values[i];
      made.value[rank] = values[i];
      made.code[rank] = static_cast<u16>(i);
    }
    job.team.meet();
    return made;
  }

  /* Returns the code of x, all ones if it has none. */
  DEVICE u32 find(Element x) const {
    u32 low = 0, high = count;
    while (low < high) {
      u32 middle = (low + high) / 2;
      if (value[middle] < x) low = middle + 1;
      else high = middle;
    }
    return low < count && value[low] == x ? code[low] : (1u << bits) - 1;
  }
};

DEVICE void encode_values_tile(Encoding &job, u32 tile, u32 index, Records &records, const SortedValues &sorted) {
  const Team &team = job.team;
  u32 count = job.tile_elements(tile), none = (1u << sorted.bits) - 1;
  uint4 rows[kRows];
  job.load(rows, tile);
  PlaneSet planes = {job.block(tile), static_cast<u32>(round_up(count, 128))};
  u32 escaped[kRows], counts[kRows];
#pragma unroll
  for (u32 row = 0; row < kRows; row++) {
    u64 codes[kPiece];
    escaped[row] = 0;
#pragma unroll
    for (u32 i = 0; i < kPiece; i++) {
      bool valid = team.first(row) + i < count;
      codes[i] = valid ? sorted.find(element(rows[row], i)) : 0;
      escaped[row] |= (valid && codes[i] == none ? 1u : 0u) << i;
    }
    write_planes(planes, team.first(row), codes, sorted.bits, team.lane);
    counts[row] = ones(escaped[row]);
  }
  Ranks ranks = Ranks::in_warp(counts, team.lane);
  rank_in_team(ranks, team, *job.shared, job.turn);
  u8 *record = records.reserve(index, ranks.total * kWidth);
#pragma unroll
  for (u32 row = 0; row < kRows; row++) {
    u32 rank = ranks.start[row];
#pragma unroll
    for (u32 i = 0; i < kPiece; i++) {
      if (escaped[row] >> i & 1) write_staged(record, rank++, element(rows[row], i));
    }
  }
  records.add(ranks.total * kWidth);
}

DEVICE void encode_values(Encoding &job, const u64 *values) {
  SortedValues sorted = SortedValues::make(job, values);
  encode_units(job, kBufferBytes, [&](u32 tile, u32 index, bool, Records &records) {
    encode_values_tile(job, tile, index, records, sorted);
  });
}

/* Returns the bits of a piece of boolean elements; sets `refused` if an element is not 0 or 1. */
DEVICE u32 boolean_bits(const uint4 &piece, bool &refused) {
  u32 bits = 0;
#pragma unroll
  for (u32 i = 0; i < kPiece; i++) {
    Element x = element(piece, i);
    refused |= x > 1;
    bits |= static_cast<u32>(x & 1) << i;
  }
  return bits;
}

/* Encodes modes without tiles: the original bytes, one bit per element, or only the checksum. */
DEVICE void encode_flat(Encoding &job) {
  u64 chunks = (job.plan.raw_nbytes + kCheckChunkBytes - 1) / kCheckChunkBytes;
  u64 warps = static_cast<u64>(block_count()) * (kBlockThreads / kWarpThreads);
  u64 body = job.plan.payload_offset - kHeaderBytes;
  bool refused = false;
  u64 warp = thread_in_block() / kWarpThreads + static_cast<u64>(block_index()) * (kBlockThreads / kWarpThreads);
  for (u64 chunk = warp; chunk < chunks; chunk += warps) {
    u64 at = chunk * kCheckChunkBytes;
    uint4 rows[kRows];
    load_chunk(rows, job.src, at, job.plan.raw_nbytes, job.team.lane);
    if (job.plan.flags & kFlagChecksum) job.check += column_check(rows, at, job.team.lane);
    if (job.plan.mode == kRaw) store_chunk(rows, job.dst + kHeaderBytes, at, job.plan.raw_nbytes, job.team.lane);
    if (job.plan.mode != kBoolean) continue;
#pragma unroll
    for (u32 row = 0; row < kRows; row++) {
      u32 first = row * kRowElements + job.team.lane * kPiece;
      u8 *plane = job.dst + kHeaderBytes + at / kWidth / 8;
      bool wanted = (at / kWidth + first) / 8 < body;
      write_lane_bits<kPiece>(plane, first, boolean_bits(rows[row], refused), wanted, job.team.lane);
    }
  }
  if (any_lane(refused) && job.team.lane == 0) fetch_add(&job.work->refused, 1u);
}
