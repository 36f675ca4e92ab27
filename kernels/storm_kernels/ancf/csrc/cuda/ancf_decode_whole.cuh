/* Decoders of the modes that code whole values, one warp per tile (integer, ternary, values;
 * FORMAT.md, sections 4 and 7), and of the modes without tiles (raw, constant, boolean).
 */
#pragma once
#include <ancf_decoding.cuh>

constexpr u32 kPlacedEntries = 512;  /* entries of a dictionary of whole values in shared memory */

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

/* Calls `decode(rows, first)` for every chunk of a tile and stores the rows that it sets. */
template <class Decode>
DEVICE void decode_chunks(Decoding &job, u32 tile, u32 count, Decode decode) {
  for (u32 first = 0; first < count; first += kChunkElements) {
    uint4 rows[kRows];
    if (!decode(rows, first + job.lane * kPiece)) return job.refuse();
    job.store<false>(rows, (static_cast<u64>(tile) * kTile + first) * kWidth);
  }
}

DEVICE void decode_integer_tile(Decoding &job, u32 tile, Reader record) {
  u32 count = job.launch.tile_elements(tile);
  const u64 *head = reinterpret_cast<const u64 *>(record.take(kIntegerHeadBytes));
  if (!record.ok) return job.refuse();
  u64 base = head[0];
  u32 width = static_cast<u32>(head[1] & 0xff);
  if (width > 8 * kWidth) return job.refuse();
  u32 padded = (count + 31) / 32 * 32;
  ConstPlaneSet planes = {record.take(padded / 8 * width), padded};
  if (!record.ok) return job.refuse();
  decode_chunks(job, tile, count, [&](uint4 (&rows)[kRows], u32 first) {
    for (u32 row = 0; row < kRows; row++, first += kRowElements) {
      u64 values[kPiece];
      u32 words[4] = {0, 0, 0, 0};
      read_planes(planes, first, width, values);
#pragma unroll
      for (u32 i = 0; i < kPiece; i++) put_element(words, i, first + i < count ? narrowed(values[i] + base) : 0);
      rows[row] = make_uint4(words[0], words[1], words[2], words[3]);
    }
    return true;
  });
}

/* Returns a piece by its codes; escapes are flagged in `escaped`. */
DEVICE uint4 read_values(const ConstPlaneSet &planes, const u64 *placed, u32 bits, u32 first, u32 count, u32 &escaped) {
  u64 codes[kPiece];
  u32 words[4] = {0, 0, 0, 0}, none = (1u << bits) - 1;
  escaped = 0;
  read_planes(planes, first, bits, codes);
#pragma unroll
  for (u32 i = 0; i < kPiece; i++) {
    bool valid = first + i < count;
    escaped |= (valid && codes[i] == none ? 1u : 0u) << i;
    put_element(words, i, valid ? placed[codes[i]] : 0);
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

DEVICE uint4 add_escapes(const uint4 &piece, u32 escaped, const u8 *from) {
  u32 words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
  for (u32 i = 0; i < kPiece; i++) {
    if (!(escaped >> i & 1)) continue;
    put_element(words, i, read_element(from));
    from += kWidth;
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

DEVICE void decode_values_tile(Decoding &job, const u64 *placed, u32 bits, u32 tile, Reader record) {
  u32 count = job.launch.tile_elements(tile);
  ConstPlaneSet planes = {job.launch.block(tile), static_cast<u32>(round_up(count, 128))};
  decode_chunks(job, tile, count, [&](uint4 (&rows)[kRows], u32 first) {
    u32 escaped[kRows], counts[kRows];
#pragma unroll
    for (u32 row = 0; row < kRows; row++) {
      rows[row] = read_values(planes, placed, bits, first + row * kRowElements, count, escaped[row]);
      counts[row] = ones(escaped[row]);
    }
    Ranks ranks = Ranks::in_warp(counts, job.lane);
    const u8 *escapes = record.take(ranks.total * kWidth);
    if (!record.ok) return false;
#pragma unroll
    for (u32 row = 0; row < kRows; row++) rows[row] = add_escapes(rows[row], escaped[row], escapes + kWidth * ranks.start[row]);
    return true;
  });
}

/* Copies the dictionary to `placed`, 0 where there is no entry; by all threads of the block. */
DEVICE void fill_placed(const Plan &plan, const u8 *blob, u64 *placed) {
  const u64 *dictionary = reinterpret_cast<const u64 *>(blob + kHeaderBytes);
  for (u32 code = thread_in_block(); code < 1u << plan.k1; code += threads_in_block()) {
    bool used = code < plan.dict_count;
    placed[code] = used ? narrowed(dictionary[code]) : 0;
  }
}

/* Returns the piece at byte `at` of mode constant or boolean. */
DEVICE uint4 flat_piece(const Plan &plan, const u8 *plane, u64 at) {
  u32 words[4] = {0, 0, 0, 0};
  u64 place = at / kWidth;
  u32 bits = 0;
  if (plan.mode == kBoolean && place < plan.elements) bits = read_lane_bits<kPiece>(plane + place / 8, place % 8);
#pragma unroll
  for (u32 i = 0; i < kPiece; i++) {
    Element x = plan.mode == kBoolean ? bits >> i & 1 : plan.fill;
    put_element(words, i, place + i < plan.elements ? x : 0);
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

/* Loads a lane's pieces of the chunk at byte `at` of a mode without tiles. */
DEVICE void load_flat(const Plan &plan, const u8 *body, u64 at, u32 lane, uint4 (&rows)[kRows]) {
  if (plan.mode == kRaw) return load_chunk(rows, body, at, plan.raw_nbytes, lane);
#pragma unroll
  for (u32 row = 0; row < kRows; row++) rows[row] = flat_piece(plan, body, at + row * 512 + lane * 16);
}

/* Decodes raw, constant and boolean. A chunk is loaded before the previous one is stored. */
DEVICE void decode_flat(Decoding &job, const Plan &plan, u32 warp, u32 warps) {
  const u64 step = static_cast<u64>(warps) * kCheckChunkBytes, nbytes = plan.raw_nbytes;
  const u8 *body = job.launch.blob + kHeaderBytes;
  u64 at = static_cast<u64>(warp) * kCheckChunkBytes;
  uint4 rows[kRows], next[kRows] = {};
  if (at < nbytes) load_flat(plan, body, at, job.lane, rows);
  for (; at < nbytes; at += step) {
    if (at + step < nbytes) load_flat(plan, body, at + step, job.lane, next);
    job.store<false>(rows, at);
#pragma unroll
    for (u32 row = 0; row < kRows; row++) rows[row] = next[row];
  }
}

/* Decodes a blob of pipeline whole; all threads of the block call it and synchronise. */
DEVICE void decode_whole(Decoding &job, const Plan &plan, const u8 *blob, u64 *placed, u32 warp, u32 warps) {
  if (plan.mode == kTernary || plan.mode == kValues) fill_placed(plan, blob, placed);
  barrier(0, threads_in_block());
  if (!has_tiles(plan.mode)) return decode_flat(job, plan, warp, warps);
  decode_each(job, warp, warps, [&](u32 tile, const Reader &record) {
    if (plan.mode == kInteger) decode_integer_tile(job, tile, record);
    else decode_values_tile(job, placed, plan.k1, tile, record);
  });
}
