/* Tile decoders of the modes that code whole values: integer, ternary and values (FORMAT.md,
 * sections 4 and 7). What stays true: as in ancf_decoding.cuh.
 */
#pragma once
#include <ancf_decoding.cuh>

/* The inverse of planes(values, bits, padded), for a lane's elements from `first` on. */
DEVICE void read_planes(const ConstPlaneSet &planes, u32 first, u32 bits, u64 (&values)[kPiece]) {
#pragma unroll
  for (u32 i = 0; i < kPiece; i++) values[i] = 0;
  if (first >= planes.padded) return;
  u32 at = 0;
  while (bits - at >= 8) {
    u32 bytes = bits - at >= 32 ? 4 : bits - at >= 16 ? 2 : 1;
    const u8 *from = planes.plane(at) + first * bytes;
#pragma unroll
    for (u32 i = 0; i < kPiece; i++, from += bytes) {
      u64 field = bytes == 4   ? *reinterpret_cast<const u32 *>(from)
                  : bytes == 2 ? *reinterpret_cast<const u16 *>(from) : *from;
      values[i] |= field << at;
    }
    at += 8 * bytes;
  }
  for (; at < bits; at++) {
    u32 plane = read_lane_bits<kPiece>(planes.plane(at), first);
#pragma unroll
    for (u32 i = 0; i < kPiece; i++) values[i] |= static_cast<u64>(plane >> i & 1) << at;
  }
}

DEVICE void decode_integer_tile(Decoding &job, u32 tile) {
  u32 count = job.tile_elements(tile);
  Reader record = Extent::of(job, tile).record(job);
  const u64 *head = reinterpret_cast<const u64 *>(record.take(kIntegerHeadBytes));
  if (!record.ok) return job.refuse();
  u64 base = head[0];
  u32 width = static_cast<u32>(head[1] & 0xff);
  if (width > 8 * kWidth) return job.refuse();
  u32 padded = (count + 31) / 32 * 32;
  ConstPlaneSet planes = {record.take(padded / 8 * width), padded};
  if (!record.ok) return job.refuse();
  uint4 rows[kRows];
  for (u32 row = 0; row < kRows; row++) {
    u64 values[kPiece];
    u32 words[4] = {0, 0, 0, 0}, first = job.team.first(row);
    read_planes(planes, first, width, values);
#pragma unroll
    for (u32 i = 0; i < kPiece; i++) put_element(words, i, first + i < count ? narrowed(values[i] + base) : 0);
    rows[row] = make_uint4(words[0], words[1], words[2], words[3]);
  }
  job.store(rows, static_cast<u64>(tile) * kTile * kWidth + job.team.warp * kCheckChunkBytes);
}

DEVICE void decode_integers(Decoding &job) {
  decode_each(job, [&](u32 tile) { decode_integer_tile(job, tile); });
}

DEVICE void decode_values_tile(Decoding &job, u32 tile) {
  const Team &team = job.team;
  u32 count = job.tile_elements(tile), bits = job.plan.k1, none = (1u << bits) - 1;
  Reader record = Extent::of(job, tile).record(job);
  ConstPlaneSet planes = {job.block(tile), static_cast<u32>(round_up(count, 128))};
  uint4 rows[kRows];
  u32 escaped[kRows];
#pragma unroll
  for (u32 row = 0; row < kRows; row++) {
    u64 codes[kPiece];
    u32 words[4] = {0, 0, 0, 0}, first = team.first(row);
    escaped[row] = 0;
    read_planes(planes, first, bits, codes);
#pragma unroll
    for (u32 i = 0; i < kPiece; i++) {
      bool valid = first + i < count;
      escaped[row] |= (valid && codes[i] == none ? 1u : 0u) << i;
      put_element(words, i, valid ? job.placed[codes[i]] : 0);
    }
    rows[row] = make_uint4(words[0], words[1], words[2], words[3]);
  }
  Ranks ranks = rank_bits(job, escaped);
  const u8 *escapes = record.take(ranks.total * kWidth);
  if (!record.ok) return job.refuse();
#pragma unroll
  for (u32 row = 0; row < kRows; row++) {
    u32 words[4] = {rows[row].x, rows[row].y, rows[row].z, rows[row].w}, rank = ranks.start[row];
#pragma unroll
    for (u32 i = 0; i < kPiece; i++) {  /* an escape's place holds 0 until here */
      if (escaped[row] >> i & 1) put_element(words, i, read_element(escapes + kWidth * rank++));
    }
    rows[row] = make_uint4(words[0], words[1], words[2], words[3]);
  }
  job.store(rows, static_cast<u64>(tile) * kTile * kWidth + team.warp * kCheckChunkBytes);
}

DEVICE void decode_values(Decoding &job, u64 *placed) {
  const u64 *dictionary = reinterpret_cast<const u64 *>(job.blob + kHeaderBytes);
  for (u32 code = thread_in_block(); code < 1u << job.plan.k1; code += kBlockThreads) {
    bool used = code < job.plan.dict_count;
    placed[code] = used ? narrowed(dictionary[code]) : 0;
  }
  barrier(0, kBlockThreads);
  decode_each(job, [&](u32 tile) { decode_values_tile(job, tile); });
}
