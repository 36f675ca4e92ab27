/* The decode kernels: the header is checked by one thread, then every tile by its own team.
 *
 * What stays true: nothing read from a blob is used as a place or a size before it was compared
 * with what the blob and the output have, so damaged bytes give a status, never an access
 * outside. FORMAT.md, section 12, lists the checks.
 */
#include <ancf_decode_whole.cuh>

/* Bits [kAt, kAt + kSize) of each of a lane's elements, from a whole-byte piece. */
template <u32 kAt, u32 kSize>
DEVICE void read_piece(const ConstPlaneSet &planes, u32 first, u64 *values) {
  constexpr u32 kBytes = kPiece * kSize / 8;
  const u8 *at = planes.plane(kAt) + first * (kSize / 8);
  u32 words[2] = {0, 0};
  if (kBytes == 2) words[0] = *reinterpret_cast<const u16 *>(at);
  else words[0] = *reinterpret_cast<const u32 *>(at);
  if (kBytes == 8) words[1] = reinterpret_cast<const u32 *>(at)[1];
#pragma unroll
  for (u32 i = 0; i < kPiece; i++) {
    u32 field = words[i * kSize / 32] >> (i * kSize % 32);
    if (kSize < 32) field &= (1u << kSize % 32) - 1;
    values[i] |= static_cast<u64>(field) << kAt;
  }
}

/* Bits that lie in planes: byte i of the result holds element i's, from bit 0 on. */
template <u32 kPlanes>
DEVICE void gather_planes(const u32 (&planes)[kPlanes], u32 octet, u32 &low, u32 &high) {
  low = high = 0;
#pragma unroll
  for (u32 bit = 0; bit < kPlanes; bit++) {
    u32 byte = planes[bit] >> (8 * octet) & 0xff;
    if (bit < 4) low |= byte << (8 * bit);
    else high |= byte << (8 * (bit - 4));
  }
  transpose_bits(low, high);
}

DEVICE u32 octet_byte(u32 low, u32 high, u32 i) { return (i < 4 ? low : high) >> (8 * (i % 4)) & 0xff; }

/* Whole-byte pieces and left-over bits of the residues of a lane's piece. */
template <class C>
DEVICE void read_residues(const ConstPlaneSet &planes, u32 first, u64 (&values)[kPiece]) {
  constexpr u32 kWords = C::kResidue / 32 * 32;
  constexpr u32 kHalves = C::kResidue / 16 * 16;
  constexpr u32 kBytes = C::kResidue / 8 * 8;
  if constexpr (kWords != 0) read_piece<0, 32>(planes, first, values);
  if constexpr (kHalves != kWords) read_piece<kWords, 16>(planes, first, values);
  if constexpr (kBytes != kHalves) read_piece<kHalves, 8>(planes, first, values);
  constexpr u32 kLeft = C::kResidue - kBytes;
  if constexpr (kLeft != 0) {
    u32 bits[kLeft];
#pragma unroll
    for (u32 bit = 0; bit < kLeft; bit++) bits[bit] = read_lane_bits<kPiece>(planes.plane(kBytes + bit), first);
    u32 low = 0, high = 0;
#pragma unroll
    for (u32 i = 0; i < kPiece; i++) {
      if (i % 8 == 0) gather_planes(bits, i / 8, low, high);
      values[i] |= static_cast<u64>(octet_byte(low, high, i % 8)) << kBytes;
    }
  }
}

/* Elements of one row, those of the missed codes without their symbol; returns the missed. */
template <class C>
DEVICE u32 read_row(const Decoding &job, const ConstPlaneSet &planes, u32 first, u32 count, uint4 &piece) {
  piece = make_uint4(0, 0, 0, 0);
  if (first >= count) return 0;
  u64 values[kPiece] = {};
  read_residues<C>(planes, first, values);
  u32 bits[C::kFirst];
  u32 missed = 0xffff;
#pragma unroll
  for (u32 bit = 0; bit < C::kFirst; bit++) {
    bits[bit] = read_lane_bits<kPiece>(planes.plane(C::kResidue + bit), first);
    missed &= bits[bit];
  }
  u32 valid = count - first;
  u32 words[4] = {0, 0, 0, 0};
  u32 low = 0, high = 0;
#pragma unroll
  for (u32 i = 0; i < kPiece; i++) {
    if (i % 8 == 0) gather_planes(bits, i / 8, low, high);
    Element x = C::turned_back(values[i]) | job.placed[octet_byte(low, high, i % 8)];
    put_element(words, i, i < valid ? x : 0);
  }
  piece = make_uint4(words[0], words[1], words[2], words[3]);
  return valid < kPiece ? missed & ((1u << valid) - 1) : missed;
}

/* The bits of an element that its symbol takes, or the whole element of a truncated one. */
template <class C>
DEVICE Element read_escape(const u8 *at) {
  u64 value = 0;
#pragma unroll
  for (u32 i = 0; i < C::kEscapeBytes; i++) value |= static_cast<u64>(at[i]) << (8 * i);
  return C::kDrop ? value : C::place(value);
}

/* Level 2: the missing bits of `count` elements, in order, into job.stage. */
template <class C>
DEVICE void read_misses(Decoding &job, Reader &record, u32 count) {
  const Team &team = job.team;
  u32 plane_bytes = (count + 7) / 8;
  const u8 *planes = record.take(plane_bytes * C::kSecond);
  if (!record.ok) return;
  for (u32 start = 0; start < plane_bytes; start += kTeamThreads) {
    u32 octet = start + team.thread, first = 8 * octet, finals = 0xff, codes[C::kSecond];
#pragma unroll
    for (u32 bit = 0; bit < C::kSecond; bit++) {
      codes[bit] = first < count ? planes[plane_bytes * bit + octet] : 0;
      finals &= codes[bit];
    }
    u32 valid = first < count ? count - first : 0;
    if (valid < 8) finals &= (1u << valid) - 1;
    u32 counts[kRows] = {ones(finals), 0, 0, 0};
    Ranks ranks[1] = {Ranks::in_warp(counts, team.lane)};
    rank_in_team(ranks, team, *job.shared, job.turn);
    const u8 *escapes = record.take(ranks[0].total * C::kEscapeBytes);
    if (!record.ok) return;
    u32 rank = ranks[0].start[0], low, high;
    gather_planes(codes, 0, low, high);
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
      Element bits = job.placed[8 + octet_byte(low, high, i)];
      if (finals >> i & 1) bits = read_escape<C>(escapes + C::kEscapeBytes * rank++);
      if (i < valid) write_staged(job.stage, first + i, bits);
    }
  }
  team.meet();
}

/* Gives the missed elements of all rows the bits that job.stage holds for them. */
DEVICE void merge_misses(const Decoding &job, const u32 (&missed)[kRows], const Ranks &ranks, uint4 (&rows)[kRows]) {
#pragma unroll
  for (u32 row = 0; row < kRows; row++) {
    u32 words[4] = {rows[row].x, rows[row].y, rows[row].z, rows[row].w}, rank = ranks.start[row];
#pragma unroll
    for (u32 i = 0; i < kPiece; i++) {
      if (missed[row] >> i & 1) merge_element(words, i, read_staged(job.stage, rank++));
    }
    rows[row] = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

/* The same where misses are few, from their symbols at `escapes`. */
template <class C>
DEVICE void merge_escapes(const Decoding &job, const u8 *escapes, const u32 (&missed)[kRows], const Ranks &ranks,
                          uint4 (&rows)[kRows]) {
#pragma unroll
  for (u32 row = 0; row < kRows; row++) {
    if (!any_lane(missed[row] != 0)) continue;
    u32 first = job.team.first(row);
    const u8 *from = escapes + C::kEscapeBytes * ranks.start[row];
    uint4 *staged = reinterpret_cast<uint4 *>(job.stage + first * kWidth);
    *staged = rows[row];
    for (u32 left = missed[row]; left; left &= left - 1, from += C::kEscapeBytes) {
      u32 index = first + lowest_bit(left);
      write_staged(job.stage, index, read_staged(job.stage, index) | read_escape<C>(from));
    }
    rows[row] = *staged;
  }
}

/* Elements of all rows without the symbols of the missed; `missed` says which these are.
 * kFull: all elements of the tile exist. kAligned: pieces may be read 8 bytes at a time. */
template <class C, bool kFull, bool kAligned>
DEVICE void read_rows(const Decoding &job, const ConstPlaneSet &planes, u32 count, uint4 (&rows)[kRows],
                      u32 (&missed)[kRows]) {
  const Team &team = job.team;
  if constexpr (Packed<C>::kFits) {
    PackedRow<C> parts[kRows];
#pragma unroll
    for (u32 row = 0; row < kRows; row++) {
      if (kFull || team.first(row) < count) parts[row] = PackedRow<C>::template load<kAligned>(planes, team.first(row));
    }
    const TopPlaces &places = *job.places;
    u32 low = places.dictionary[0], high = places.dictionary[1];
#pragma unroll
    for (u32 row = 0; row < kRows; row++) {
      u32 first = team.first(row);
      missed[row] = 0;
      rows[row] = make_uint4(0, 0, 0, 0);
      if (!kFull && first >= count) continue;
      missed[row] = parts[row].missed();
      rows[row] = parts[row].elements(places, low, high);
      if (kFull || count - first >= kPiece) continue;
      missed[row] &= (1u << (count - first)) - 1;
      rows[row] = first_elements(rows[row], count - first);
    }
  } else {
#pragma unroll
    for (u32 row = 0; row < kRows; row++) missed[row] = read_row<C>(job, planes, team.first(row), count, rows[row]);
  }
}

/* `count` elements, coded in `planes` and the rest of `record`. */
template <class C, bool kFull, bool kAligned>
DEVICE void decode_elements(Decoding &job, const ConstPlaneSet &planes, Reader &record, u32 count,
                            uint4 (&rows)[kRows]) {
  u32 missed[kRows];
  read_rows<C, kFull, kAligned>(job, planes, count, rows, missed);
  Ranks ranks = rank_bits(job, missed);
  if constexpr (C::kSecond != 0) {
    read_misses<C>(job, record, ranks.total);
    if (record.ok) merge_misses(job, missed, ranks, rows);
  } else {
    const u8 *escapes = record.take(ranks.total * C::kEscapeBytes);
    if (record.ok) merge_escapes<C>(job, escapes, missed, ranks, rows);
  }
}

template <class C, bool kFull>
DEVICE void decode_window_tile(Decoding &job, u32 tile, const u8 *block, Reader record) {
  u32 count = kFull ? kTile : job.tile_elements(tile);
  ConstPlaneSet planes = {block, kFull ? kTile : static_cast<u32>(round_up(count, 128))};
  uint4 rows[kRows];
  decode_elements<C, kFull, true>(job, planes, record, count, rows);
  if (!record.ok) return job.refuse();
  job.store(rows, static_cast<u64>(tile) * kTile * kWidth + job.team.warp * kCheckChunkBytes);
}

/* One bit of a plane for each set bit of `flags`, in order from bit `rank` on. */
DEVICE u32 pick_bits(const u8 *plane, u32 flags, u32 rank) {
  u32 picked = 0;
  for (u32 left = flags; left; left &= left - 1, rank++) {
    if (plane[rank / 8] >> (rank % 8) & 1) picked |= left & (0 - left);
  }
  return picked;
}

/* Bit i of `bits` to bit 2i. */
DEVICE u32 spread_bits(u32 bits) {
  bits = (bits | bits << 4) & 0x0f0f;
  bits = (bits | bits << 2) & 0x3333;
  return (bits | bits << 1) & 0x5555;
}

/* Turns plane A of a pairs bitmap, in `masks`, into the elements' bits. */
DEVICE void read_pairs(Decoding &job, Reader &record, u32 (&masks)[kRows]) {
  Ranks ranks = rank_bits(job, masks);
  const u8 *plane = record.take((ranks.total + 31) / 32 * 4);
  if (!record.ok) return;
  u32 second[kRows];
  for (u32 row = 0; row < kRows; row++) second[row] = pick_bits(plane, masks[row], ranks.start[row]);
  ranks = rank_bits(job, second);
  plane = record.take((ranks.total + 31) / 32 * 4);
  if (!record.ok) return;
  for (u32 row = 0; row < kRows; row++) {
    u32 both = pick_bits(plane, second[row], ranks.start[row]);
    u32 first = masks[row] & (~second[row] | both);
    masks[row] = spread_bits(first) | spread_bits(second[row]) << 1;
  }
}

/* Which of this lane's elements of a sparse tile differ from the fill. */
DEVICE void read_bitmap(Decoding &job, const u8 *block, Reader &record, u32 count, u32 (&masks)[kRows]) {
  bool pairs = job.plan.bitmap == kBitmapPairs;
  u32 bound = static_cast<u32>(pairs ? round_up(count, 256) : round_up(count, 128));
#pragma unroll
  for (u32 row = 0; row < kRows; row++) {
    u32 first = job.team.first(row);
    masks[row] = first >= bound ? 0
                 : pairs        ? read_lane_bits<kPiece / 2>(block, first / 2)
                                : read_lane_bits<kPiece>(block, first);
  }
  if (pairs) read_pairs(job, record, masks);
#pragma unroll
  for (u32 row = 0; row < kRows; row++) {
    u32 valid = count > job.team.first(row) ? count - job.team.first(row) : 0;
    if (valid < kPiece) masks[row] &= (1u << valid) - 1;
  }
}

template <class C>
DEVICE void decode_sparse_tile(Decoding &job, u32 tile, const u8 *block, Reader record) {
  const Team &team = job.team;
  u32 count = job.tile_elements(tile);
  u32 masks[kRows];
  read_bitmap(job, block, record, count, masks);
  if (!record.ok) return job.refuse();
  Ranks ranks = rank_bits(job, masks);
  u32 padded = (ranks.total + 31) / 32 * 32;
  ConstPlaneSet planes = {record.take(padded / 8 * C::kPlaneBits), padded};
  if (!record.ok) return job.refuse();
  uint4 rows[kRows];
  decode_elements<C, false, false>(job, planes, record, ranks.total, rows);
  if (!record.ok) return job.refuse();
  team.meet();  /* the stage held the misses until here */
#pragma unroll
  for (u32 row = 0; row < kRows; row++) {
    *reinterpret_cast<uint4 *>(job.stage + team.first(row) * kWidth) = rows[row];
  }
  team.meet();
#pragma unroll
  for (u32 row = 0; row < kRows; row++) {
    u32 words[4] = {0, 0, 0, 0}, rank = ranks.start[row], first = team.first(row);
#pragma unroll
    for (u32 i = 0; i < kPiece; i++) {
      Element x = job.plan.fill;
      if (masks[row] >> i & 1) x = read_staged(job.stage, rank++);
      put_element(words, i, first + i < count ? x : 0);
    }
    rows[row] = make_uint4(words[0], words[1], words[2], words[3]);
  }
  job.store(rows, static_cast<u64>(tile) * kTile * kWidth + team.warp * kCheckChunkBytes);
}

/* The dictionary as bits of elements; the codes that stand for no entry give none. */
template <class C>
DEVICE void fill_placed(const Plan &plan, u64 *placed) {
  if (thread_in_block() < kWindowPlaced) {
    bool first = thread_in_block() < 8;
    u32 code = first ? thread_in_block() : thread_in_block() - 8;
    u32 slots = first ? C::kFirstSlots : C::kSecondSlots;
    u32 index = first ? code : C::kFirstSlots + code;
    bool used = code < slots && index < plan.dict_count;
    placed[thread_in_block()] = C::place(used ? plan.window[index] : 0);
  }
  barrier(0, kBlockThreads);
}

/* Starts to bring what a whole tile needs to one side of the team's memory: the larger part, the
 * block or with a bitmap the record, to block_ahead, the other to record_ahead. */
template <class C, bool kHasBitmap>
DEVICE void fetch_ahead(const Decoding &job, u32 tile, u32 turn, u32 side) {
  if (tile >= job.whole_tiles) return;
  const u8 *block = job.block(tile);
  u8 *block_to = kHasBitmap ? job.record_ahead(side) : job.block_ahead(side);
  u32 block_bytes = kHasBitmap ? job.block_size : kTile / 8 * C::kPlaneBits;
  for (u32 at = 16 * job.team.thread; at < block_bytes; at += 16 * kTeamThreads) copy_behind(block_to + at, block + at);
  Reader record = ExtentsAhead::get(job, turn).record(job);
  constexpr u32 kRoom = kHasBitmap ? kBlockAhead : kRecordAhead;
  u8 *record_to = kHasBitmap ? job.block_ahead(side) : job.record_ahead(side);
  if (record.left > kRoom) return;
  for (u32 at = 8 * job.team.thread; at < record.left; at += 8 * kTeamThreads) copy_behind8(record_to + at, record.at + at);
}

template <class C, bool kHasBitmap, bool kFull>
DEVICE void decode_tile(Decoding &job, u32 tile, const u8 *block, const Reader &record) {
  if constexpr (kHasBitmap) decode_sparse_tile<C>(job, tile, block, record);
  else decode_window_tile<C, kFull>(job, tile, block, record);
}

/* The team's whole tiles. While one is decoded, the next one's bytes are on their way, and the
 * directory entries of the one after that. */
template <class C, bool kHasBitmap>
DEVICE void decode_whole_tiles(Decoding &job, u32 tile, u32 step) {
  ExtentsAhead::fetch(job, tile, 0);
  ExtentsAhead::fetch(job, tile + step, 1);
  copies_arrived();
  job.team.meet();
  fetch_ahead<C, kHasBitmap>(job, tile, 0, 0);
  for (u32 turn = 0; tile < job.whole_tiles; tile += step, turn++) {
    u32 side = turn % 2;
    copies_arrived();
    job.team.meet();
    fetch_ahead<C, kHasBitmap>(job, tile + step, turn + 1, side ^ 1);
    ExtentsAhead::fetch(job, tile + 2 * step, turn + 2);
    Reader record = ExtentsAhead::get(job, turn).record(job);
    constexpr u32 kRoom = kHasBitmap ? kBlockAhead : kRecordAhead;
    if (record.left <= kRoom && record.ok) record.at = kHasBitmap ? job.block_ahead(side) : job.record_ahead(side);
    const u8 *block = kHasBitmap ? job.record_ahead(side) : job.block_ahead(side);
    decode_tile<C, kHasBitmap, true>(job, tile, block, record);
  }
}

template <class C, bool kHasBitmap>
DEVICE void decode_tiles(Decoding &job, u64 *placed) {
  if constexpr (Packed<C>::kFits) fill_places<C>(*job.places, job.plan);
  fill_placed<C>(job.plan, placed);
  u32 step = block_count() * kTeams, first = block_index() * kTeams + job.team.id;
  constexpr bool kAhead = Packed<C>::kFits;
  if constexpr (kAhead) {
    decode_whole_tiles<C, kHasBitmap>(job, first, step);
    job.team.meet();
    if (job.tiles == job.whole_tiles || job.whole_tiles % step != first) return;
    first = job.whole_tiles;
  }
  for (u32 tile = first; tile < job.tiles; tile += step) {
    decode_tile<C, kHasBitmap, false>(job, tile, job.block(tile), Extent::of(job, tile).record(job));
  }
}

/* Runs the decoder of a code. */
template <bool kHasBitmap>
struct DecodeCoded {
  Decoding &job;
  u64 *placed;
  template <class C>
  DEVICE void run() const { decode_tiles<C, kHasBitmap>(job, placed); }
};

/* A piece of a mode without tiles, of the chunk at byte `at`. */
DEVICE uint4 flat_piece(const Decoding &job, u64 at, u32 row) {
  u32 words[4] = {0, 0, 0, 0};
  u64 place = (at + row * 512 + job.team.lane * 16) / kWidth;
  u32 bits = 0;
  if (job.plan.mode == kBoolean && place < job.plan.elements) {
    bits = read_lane_bits<kPiece>(job.blob + kHeaderBytes + place / 8, place % 8);
  }
#pragma unroll
  for (u32 i = 0; i < kPiece; i++) {
    Element x = job.plan.mode == kBoolean ? bits >> i & 1 : job.plan.fill;
    put_element(words, i, place + i < job.plan.elements ? x : 0);
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

DEVICE void decode_flat(Decoding &job) {
  constexpr u32 kWarps = kBlockThreads / kWarpThreads;
  u64 warp = static_cast<u64>(block_index()) * kWarps + thread_in_block() / kWarpThreads;
  u64 step = static_cast<u64>(block_count()) * kWarps * kCheckChunkBytes;
  for (u64 at = warp * kCheckChunkBytes; at < job.plan.raw_nbytes; at += step) {
    uint4 rows[kRows];
    if (job.plan.mode == kRaw) {
      load_chunk(rows, job.blob + kHeaderBytes, at, job.plan.raw_nbytes, job.team.lane);
    } else {
#pragma unroll
      for (u32 row = 0; row < kRows; row++) rows[row] = flat_piece(job, at, row);
    }
    job.store(rows, at);
  }
}

/* For the host: the dynamic shared memory of a block. */
extern "C" __device__ const u32 ancf_decode_shared_bytes = kDecodeSharedBytes;

/* The whole of a kernel for one kind of blob; it does nothing where the plan is of another kind
 * or element type, or bad. */
template <Pipeline kPipeline>
DEVICE void decode_blob(const u8 *blob, u8 *dst, u8 *scratch, u64 *status) {
  const Plan &plan = *plan_of(scratch);
  if (plan.status != kOk || plan.width != kWidth || plan.mantissa != kMantissa) return;
  if (pipeline_of(plan) != kPipeline) return;
  Team team = Team::here();
  u8 *memory = shared_memory();
  TeamShared *shared = reinterpret_cast<TeamShared *>(memory) + team.id;
  u8 *arena = memory + kTeams * sizeof(TeamShared) + team.id * kDecodeArenaBytes;
  u64 *placed = reinterpret_cast<u64 *>(memory + kTeams * (sizeof(TeamShared) + kDecodeArenaBytes));
  TopPlaces *places = reinterpret_cast<TopPlaces *>(placed + kPlacedEntries);
  Decoding job{plan, plan.raw_nbytes, blob + plan.fixed_offset, blob + plan.payload_offset,
               reinterpret_cast<const u32 *>(blob + plan.directory_offset),
               static_cast<u32>(plan.payload_bytes / kRecordUnit), static_cast<u32>(block_bytes(plan, kTile)),
               plan.tiles, static_cast<u32>(plan.elements / kTile), static_cast<u32>(plan.elements % kTile),
               (plan.flags & kFlagChecksum) != 0, blob, dst, work_of(scratch), team, shared, arena, placed,
               places, 0, 0};
  if constexpr (kPipeline != kWhole) {
    with_code<kPipeline>(plan, DecodeCoded<kPipeline == kWithBitmap>{job, placed});
  } else {
    if (!has_tiles(plan.mode)) decode_flat(job);
    else if (plan.mode == kInteger) decode_integers(job);
    else decode_values(job, placed);
  }
  if (plan.flags & kFlagChecksum) add_check(job.check, &job.work->checksum, team.lane);
  memory_fence();
  barrier(0, kBlockThreads);
  if (thread_in_block() != 0) return;
  memory_fence();
  if (fetch_add(&job.work->blocks_done, 1u) + 1 != block_count()) return;
  u64 found = load_shared_word(&job.work->checksum) + plan.raw_nbytes * kCheckLength;
  bool differs = (plan.flags & kFlagChecksum) && found != plan.checksum;
  *status = fetch_add(&job.work->status, 0u) ? kBadRecord : differs ? kBadChecksum : kOk;
}

/* Decode `blob` to `dst` as the plan in `scratch` says: one of these does. Blocks of
 * kBlockThreads, any number. */
#if ANCF_PIPELINES & 2
KERNEL_TWICE(kBlockThreads)
ancf_decode_fast(const u8 *__restrict__ blob, u8 *__restrict__ dst, u8 *scratch, u64 *status) {
  decode_blob<kFast>(blob, dst, scratch, status);
}
#endif
#if ANCF_PIPELINES & 4
KERNEL_TWICE(kBlockThreads)
ancf_decode_dense(const u8 *__restrict__ blob, u8 *__restrict__ dst, u8 *scratch, u64 *status) {
  decode_blob<kDense>(blob, dst, scratch, status);
}
#endif
#if ANCF_PIPELINES & 8
KERNEL_TWICE(kBlockThreads)
ancf_decode_bitmap(const u8 *__restrict__ blob, u8 *__restrict__ dst, u8 *scratch, u64 *status) {
  decode_blob<kWithBitmap>(blob, dst, scratch, status);
}
#endif
#if ANCF_PIPELINES & 1
KERNEL_TWICE(kBlockThreads)
ancf_decode_whole(const u8 *__restrict__ blob, u8 *__restrict__ dst, u8 *scratch, u64 *status) {
  decode_blob<kWhole>(blob, dst, scratch, status);
}
#endif

DEVICE bool is_window_code(const Plan &plan) {
  bool fast = plan.k1 == 3 && plan.k2 == 0 && plan.mode == kWindow;
  bool dense = (plan.k1 == 2 && plan.k2 == 3) || (plan.k1 == 3 && plan.k2 == 4);
  bool bitmap = plan.mode == kSparse ? plan.bitmap == kBitmapPlain || plan.bitmap == kBitmapPairs
                                     : plan.bitmap == kBitmapNone;
  u32 width = traits_of(plan.dtype).width;
  bool truncates = (width == 4 && (plan.drop == 16 || plan.drop == 13)) || (width == 8 && plan.drop == 29);
  bool drop = plan.mode == kWindow ? plan.drop == 0 : truncates || (plan.mode == kSparse && plan.drop == 0);
  return (fast || dense) && bitmap && drop && plan.rotate <= 1 &&
         plan.residue_bits == traits_of(plan.dtype).mantissa - plan.drop + plan.rotate;
}

/* Whether some encoder writes blobs with these parameters. */
DEVICE bool is_known(const Plan &plan) {
  if (plan.mode == kWindow || plan.mode == kSparse || plan.mode == kTruncated) return is_window_code(plan);
  if (plan.bitmap || plan.rotate || plan.drop || plan.residue_bits || plan.k2) return false;
  if (plan.mode == kTernary) return plan.k1 == 2;
  if (plan.mode == kValues) return plan.k1 >= 7 && plan.k1 <= 9;
  return plan.mode <= kInteger && plan.k1 == 0;
}

/* Reads the parameters from a header's words; the rest follows from them. */
DEVICE Plan parse_header(const u64 (&words)[32]) {
  Plan plan = {};
  plan.mode = static_cast<u32>(words[0] >> 48 & 0xff);
  plan.dtype = static_cast<u32>(words[0] >> 56);
  plan.flags = static_cast<u32>(words[1] & 0xff);
  plan.bitmap = static_cast<u32>(words[1] >> 8 & 0xff);
  plan.rotate = static_cast<u32>(words[1] >> 16 & 0xff);
  plan.drop = static_cast<u32>(words[1] >> 24 & 0xff);
  plan.residue_bits = static_cast<u32>(words[1] >> 32 & 0xff);
  plan.k1 = static_cast<u32>(words[1] >> 40 & 0xff);
  plan.k2 = static_cast<u32>(words[1] >> 48 & 0xff);
  plan.raw_nbytes = words[2];
  plan.checksum = words[4];
  plan.fill = words[5];
  plan.dict_count = static_cast<u32>(words[6] >> 32);
  plan.payload_bytes = words[9];
  for (u32 i = 0; i < kWindowSlots; i++) {
    plan.window[i] = i < plan.dict_count ? words[10 + i / 4] >> (16 * (i % 4)) & 0xffff : 0;
  }
  return plan;
}

/* Whether the plan can be trusted with these sizes and equals the header it came from. */
DEVICE bool is_valid(Plan &plan, const u64 (&words)[32], u64 blob_bytes, u64 dst_bytes) {
  u32 slots = ((1u << plan.k1 % 16) - 1) + (plan.k2 ? (1u << plan.k2 % 16) - 1 : 0);
  if (plan.dtype >= kDtypes || !is_known(plan)) return false;
  u32 width = traits_of(plan.dtype).width;
  if (plan.raw_nbytes != dst_bytes || dst_bytes % width) return false;
  if (plan.dict_count > slots || (plan.flags & ~kFlagChecksum)) return false;
  if (width < 8 && plan.fill >> 8 * width) return false;
  if (plan.fill && plan.mode != kSparse && plan.mode != kConstant) return false;
  if (!(plan.flags & kFlagChecksum) && plan.checksum) return false;
  derive(plan);
  if (plan.payload_offset > blob_bytes || plan.payload_bytes != blob_bytes - plan.payload_offset) return false;
  u64 expected[32];
  pack_header(plan, expected);
  for (u32 i = 0; i < 32; i++) {
    if (expected[i] != words[i]) return false;
  }
  return true;
}

DEVICE bool directory_ends_fit(const Plan &plan, const u8 *blob) {
  if (!has_tiles(plan.mode)) return plan.payload_bytes == 0;
  const u32 *directory = reinterpret_cast<const u32 *>(blob + plan.directory_offset);
  return directory[0] == 0 && directory[plan.tiles] * static_cast<u64>(kRecordUnit) == plan.payload_bytes;
}

/* Checks the header of `blob` and prepares ancf_decode. One block of one warp. `status` is
 * kNotDecoded until the kernel of the blob's pipeline and element type has set it. */
KERNEL(kWarpThreads)
ancf_decode_begin(const u8 *__restrict__ blob, u64 blob_bytes, u64 dst_bytes, u8 *scratch, u64 *status) {
  u32 *work = reinterpret_cast<u32 *>(work_of(scratch));
  for (u32 i = thread_in_block(); i < sizeof(Work) / 4; i += kWarpThreads) work[i] = 0;
  if (thread_in_block() != 0) return;
  Plan plan = {};
  bool ok = blob_bytes >= kHeaderBytes;
  if (ok) {
    u64 words[32];
    for (u32 i = 0; i < 32; i++) words[i] = reinterpret_cast<const u64 *>(blob)[i];
    plan = parse_header(words);
    ok = is_valid(plan, words, blob_bytes, dst_bytes) && directory_ends_fit(plan, blob);
  }
  plan.status = ok ? kOk : kBadHeader;
  *reinterpret_cast<Plan *>(scratch) = plan;
  *status = ok ? kNotDecoded : kBadHeader;
}
