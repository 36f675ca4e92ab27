/* The encode kernel: one pass over the tensor, whatever the plan says (FORMAT.md).
 *
 * A team takes units of a few tiles from a ticket counter. Fixed blocks go straight to their
 * place, records to the payload once their place is known. What stays true: the kernel ends
 * whatever the number of blocks, and every byte of the blob depends on the input alone.
 */
#include <ancf_encode_whole.cuh>

/* Eight bytes of the list from number 8 * octet on, those from `count` on as 0. */
DEVICE uint2 list_octet(const u8 *list, u32 octet, u32 count) {
  uint2 bytes = reinterpret_cast<const uint2 *>(list)[octet];
  u32 left = count - 8 * octet;
  if (left < 4) bytes.x &= (1u << 8 * left) - 1;
  if (left <= 4) bytes.y = 0;
  else if (left < 8) bytes.y &= (1u << 8 * (left - 4)) - 1;
  return bytes;
}

/* The table of a code: by top byte where elements can be split by words, else by symbol. */
template <class C, bool kPacked>
struct TableOf { using Type = SymbolTable<C>; };
template <class C>
struct TableOf<C, true> { using Type = TopTable<C>; };
template <class C>
using Table = typename TableOf<C, Packed<C>::kFits>::Type;

/* The coded elements of a tile, as escapes need them: `at(i)` is element i, `tops` the bytes
 * that write_packed left. */
struct Coded {
  const u8 *start, *tops;
  bool staged;  /* in shared memory, aligned */
  DEVICE Element at(u32 i) const {
    return staged ? read_staged(start, i) : read_element(start + static_cast<u64>(i) * kWidth);
  }
  template <class C>
  DEVICE u32 symbol(u32 i) const {
    if (Packed<C>::kFits && !staged) return tops[i] >> Packed<C>::kLeft;
    return C::symbol(at(i));
  }
};

/* Second codes of the missed elements, as bytes in order. */
template <class C>
DEVICE void list_misses(Encoding &job, const u32 (&flags)[kRows], const Ranks &ranks, const Coded &coded,
                        const Table<C> &table) {
#pragma unroll
  for (u32 row = 0; row < kRows; row++) {
    u32 first = job.team.first(row);
    u8 *to = job.list() + ranks.start[row];
#pragma unroll
    for (u32 i = 0; i < kPiece; i++) {
      if (!(flags[row] >> i & 1)) continue;
      bool escaped = flags[row] >> (16 + i) & 1;
      *to++ = escaped ? C::kSecondSlots : table.second[coded.symbol<C>(first + i)];
    }
  }
}

template <class C>
DEVICE void write_escapes(const Team &team, u8 *escapes, const u32 (&flags)[kRows], const Ranks &ranks,
                          const Coded &coded) {
#pragma unroll
  for (u32 row = 0; row < kRows; row++) {
    u8 *to = escapes + C::kEscapeBytes * ranks.start[row];
    for (u32 left = flags[row] >> 16; left; left &= left - 1, to += C::kEscapeBytes) {
      u32 i = team.first(row) + lowest_bit(left);
      if constexpr (C::kDrop != 0) write_escape<C::kEscapeBytes>(to, coded.at(i));
      else write_escape<C::kEscapeBytes>(to, coded.symbol<C>(i));
    }
  }
}

/* Ranks of the missed and the escaped among a tile's coded elements; the team meets. */
template <class C>
struct Misses {
  Ranks ranks[C::kSecond ? 2 : 1];

  DEVICE static Misses count(Encoding &job, const u32 (&flags)[kRows]) {
    Misses made;
    u32 missed[kRows], escaped[kRows];
#pragma unroll
    for (u32 row = 0; row < kRows; row++) {
      missed[row] = ones(flags[row] & 0xffff);
      escaped[row] = ones(flags[row] >> 16);
    }
    made.ranks[0] = Ranks::in_warp(escaped, job.team.lane);
    if constexpr (C::kSecond != 0) made.ranks[1] = Ranks::in_warp(missed, job.team.lane);
    rank_in_team(made.ranks, job.team, *job.shared, job.turn);
    return made;
  }
  DEVICE u32 plane_bytes() const {
    if constexpr (C::kSecond != 0) return (ranks[1].total + 7) / 8;
    return 0;
  }
  DEVICE u32 bytes() const { return plane_bytes() * C::kSecond + C::kEscapeBytes * ranks[0].total; }
};

/* Level 2 and escapes of a tile at `record`, from the flags of its codes. */
template <class C>
DEVICE void write_misses(Encoding &job, u8 *record, const u32 (&flags)[kRows], const Misses<C> &misses,
                         const Coded &coded, const Table<C> &table) {
  const Team &team = job.team;
  u32 plane_bytes = misses.plane_bytes();
  write_escapes<C>(team, record + plane_bytes * C::kSecond, flags, misses.ranks[0], coded);
  if constexpr (C::kSecond != 0) {
    list_misses<C>(job, flags, misses.ranks[1], coded, table);
    team.meet();
    for (u32 octet = team.thread; octet < plane_bytes; octet += kTeamThreads) {
      uint2 bytes = list_octet(job.list(), octet, misses.ranks[1].total);
      transpose_bits(bytes.x, bytes.y);
      for (u32 bit = 0; bit < C::kSecond; bit++) {
        record[plane_bytes * bit + octet] = static_cast<u8>(bytes.x >> (8 * bit));
      }
    }
  }
}

/* Residues and codes of one row; returns its flags. kFull: all its elements exist. */
template <class C, bool kFull, bool kInRecord>
DEVICE u32 write_row(const PlaneSet &planes, u32 first, const uint4 &piece, u32 count,
                     const Table<C> &table, u8 *tops, u32 lane) {
  u32 valid = first >= count ? 0 : count - first;
  if constexpr (Packed<C>::kFits) {
    BitPlanes bits = BitPlanes::of<Packed<C>::kWhole>(planes, first);
    return write_packed<C, kFull, kInRecord>(planes, bits, first, piece, valid, table, tops, lane);
  } else {
    u64 turned[kPiece];
#pragma unroll
    for (u32 i = 0; i < kPiece; i++) turned[i] = C::turned(element(piece, i));
    write_residues<C>(planes, first, turned, first < planes.padded, lane);
    return write_codes<C>(planes, first, piece, valid, table, lane);
  }
}

/* All rows of a full tile; the team's list serves to gather the bit planes of each warp. */
template <class C>
DEVICE void write_full_rows(Encoding &job, const PlaneSet &planes, const uint4 (&rows)[kRows],
                            const Table<C> &table, u32 (&flags)[kRows]) {
  if constexpr (Packed<C>::kFits) {
    const Team &team = job.team;
    u8 *gathered = job.list() + team.warp * (kListBytes / kTeamWarps);
    if (C::kSecond) team.meet();  /* the tile before has been read from the list */
#pragma unroll
    for (u32 row = 0; row < kRows; row++) {
      u32 first = team.first(row);
      BitPlanes bits = {gathered, kChunkElements, first - team.warp * kChunkElements, true};
      flags[row] = write_packed<C, true, false>(planes, bits, first, rows[row], kPiece, table, job.tops(), team.lane);
    }
    store_planes<C>(planes, gathered, team.warp, team.lane);
  }
}

template <class C>
DEVICE void encode_window_tile(Encoding &job, u32 tile, u32 index, bool is_last, Records &records,
                               const Table<C> &table) {
  const Team &team = job.team;
  u32 count = job.tile_elements(tile);
  uint4 rows[kRows];
  job.load(rows, tile);
  if (!is_last) job.fetch_ahead(tile + 1);
  PlaneSet planes = {job.block(tile), static_cast<u32>(round_up(count, 128))};
  u8 *tops = job.tops();  /* each lane reads back what it wrote */
  u32 flags[kRows];
  if (Packed<C>::kFits && count == kTile) {
    planes.padded = kTile;
    write_full_rows<C>(job, planes, rows, table, flags);
  } else {
#pragma unroll
    for (u32 row = 0; row < kRows; row++) {
      flags[row] = write_row<C, false, false>(planes, team.first(row), rows[row], count, table, tops, team.lane);
    }
  }
  Misses<C> misses = Misses<C>::count(job, flags);
  if (is_last) job.fetch_ahead(job.shared->unit * job.unit_tiles);  /* the team has met since it was taken */
  u8 *record = records.reserve(index, misses.bytes());
  Coded coded = {job.src + static_cast<u64>(tile) * kTile * kWidth, tops, false};
  write_misses<C>(job, record, flags, misses, coded, table);
  records.add(misses.bytes());
}

/* Every second bit of `bits`, from bit 0 on. */
DEVICE u32 even_bits(u32 bits) {
  bits &= 0x5555;
  bits = (bits | bits >> 1) & 0x3333;
  bits = (bits | bits >> 2) & 0x0f0f;
  return (bits | bits >> 4) & 0xff;
}

/* The bits of a list of 0/1 bytes, as a plane padded to 32 bits; returns its bytes. */
DEVICE u32 write_list_bits(const Team &team, u8 *plane, const u8 *list, u32 count) {
  u32 bytes = (count + 31) / 32 * 4;
  for (u32 octet = team.thread; octet < bytes; octet += kTeamThreads) {
    uint2 flags = octet * 8 < count ? list_octet(list, octet, count) : make_uint2(0, 0);
    plane[octet] = static_cast<u8>((flags.x * 0x10204080u) >> 28 | (flags.y * 0x10204080u) >> 28 << 4);
  }
  return bytes;
}

/* A sparse tile's bitmap and its other elements, these in job.compact(); `counts` become the
 * ranks' totals: elements, pairs with one, pairs whose second is one. */
DEVICE void split_sparse(Encoding &job, u32 tile, u32 count, u32 (&counts)[3]) {
  const Team &team = job.team;
  bool pairs = job.plan.bitmap == kBitmapPairs;
  uint4 rows[kRows];
  job.load(rows, tile);
  u32 masks[kRows], kept[kRows], either[kRows], second[kRows];
#pragma unroll
  for (u32 row = 0; row < kRows; row++) {
    u32 mask = 0, first = team.first(row);
#pragma unroll
    for (u32 i = 0; i < kPiece; i++) {
      mask |= (first + i < count && element(rows[row], i) != job.plan.fill ? 1u : 0u) << i;
    }
    masks[row] = mask;
    kept[row] = ones(mask);
    u32 any_of_pair = even_bits(mask | mask >> 1);
    either[row] = ones(any_of_pair);
    second[row] = ones(even_bits(mask >> 1));
    if (pairs) write_lane_bits<kPiece / 2>(job.block(tile), first / 2, any_of_pair, first < round_up(count, 256), team.lane);
    else write_lane_bits<kPiece>(job.block(tile), first, mask, first < round_up(count, 128), team.lane);
  }
  Ranks ranks[3] = {Ranks::in_warp(kept, team.lane), Ranks::in_warp(either, team.lane),
                    Ranks::in_warp(second, team.lane)};
  rank_in_team(ranks, team, *job.shared, job.turn);
  u8 *compact = job.compact();
#pragma unroll
  for (u32 row = 0; row < kRows; row++) {
    u32 at = ranks[0].start[row], pair = ranks[1].start[row], both = ranks[2].start[row];
#pragma unroll
    for (u32 i = 0; i < kPiece; i++) {
      if (masks[row] >> i & 1) write_staged(compact, at++, element(rows[row], i));
      if (!pairs || i % 2 || !(masks[row] >> i & 3)) continue;
      job.list()[pair++] = masks[row] >> i >> 1 & 1;
      if (masks[row] >> i & 2) job.list()[kTile / 2 + both++] = masks[row] >> i & 1;
    }
  }
  for (u32 kind = 0; kind < 3; kind++) counts[kind] = ranks[kind].total;
  u32 pad = counts[0] + team.thread;
  if (pad < (counts[0] + 31) / 32 * 32) write_staged(compact, pad, 0);
  team.meet();
}

template <class C>
DEVICE void encode_sparse_tile(Encoding &job, u32 tile, u32 index, bool is_last, Records &records,
                               const Table<C> &table) {
  const Team &team = job.team;
  u32 counts[3];
  split_sparse(job, tile, job.tile_elements(tile), counts);
  job.prefetch(is_last ? job.shared->unit * job.unit_tiles : tile + 1);
  u8 *record = records.reserve(index, C::max_record(counts[0], counts[1] + counts[2]));
  u32 head = 0;
  if (job.plan.bitmap == kBitmapPairs) {
    head = write_list_bits(team, record, job.list(), counts[1]);
    head += write_list_bits(team, record + head, job.list() + kTile / 2, counts[2]);
  }
  PlaneSet planes = {record + head, (counts[0] + 31) / 32 * 32};
  const u8 *compact = job.compact();
  u32 flags[kRows];
#pragma unroll
  for (u32 row = 0; row < kRows; row++) {
    u32 first = team.first(row);
    uint4 piece = make_uint4(0, 0, 0, 0);
    if (first < planes.padded) piece = *reinterpret_cast<const uint4 *>(compact + first * kWidth);
    flags[row] = write_row<C, false, true>(planes, first, piece, counts[0], table, nullptr, team.lane);
  }
  u32 front = head + planes.padded / 8 * C::kPlaneBits;
  Coded coded = {compact, nullptr, true};
  Misses<C> misses = Misses<C>::count(job, flags);
  write_misses<C>(job, record + front, flags, misses, coded, table);
  records.add(front + misses.bytes());
}

template <class C, bool kHasBitmap>
DEVICE void encode_tiles(Encoding &job, Table<C> &table) {
  static_assert(sizeof(Table<C>) <= kTableBytes, "a table must fit");
  static_assert(C::kMaxRecord <= kBufferBytes, "a record must fit the buffer");
  fill_table(table, job.plan);
  barrier(0, kBlockThreads);
  static_assert(C::kMaxMisses <= kBufferBytes - kTile, "misses must fit beside the top bytes");
  job.fetches = !kHasBitmap;
  u32 capacity = kHasBitmap ? kBufferBytes : kBufferBytes - kTile;
  encode_units(job, capacity, [&](u32 tile, u32 index, bool is_last, Records &records) {
    if constexpr (kHasBitmap) encode_sparse_tile<C>(job, tile, index, is_last, records, table);
    else encode_window_tile<C>(job, tile, index, is_last, records, table);
  });
}

/* Runs the encoder of a code. */
template <bool kHasBitmap>
struct EncodeCoded {
  Encoding &job;
  u8 *table;
  template <class C>
  DEVICE void run() const { encode_tiles<C, kHasBitmap>(job, *reinterpret_cast<Table<C> *>(table)); }
};

/* The bits of a piece of elements that are 0 or 1; `refused` if one is neither. */
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

/* Modes without tiles: the original bytes, one bit an element, or the checksum alone. */
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

DEVICE void write_header(const Plan &plan, u8 *dst) {
  u64 words[32];
  pack_header(plan, words);
  for (u32 i = 0; i < 32; i++) reinterpret_cast<u64 *>(dst)[i] = words[i];
}

/* After the last team: what became of the blob. One thread. */
DEVICE void conclude(const Encoding &job, const u64 *values, Result *result) {
  Plan plan = job.plan;
  if (plan.tiles != 0) {
    plan.payload_bytes = (load_shared_word(job.prefixes + job.units() - 1) & kSumMask) * kRecordUnit;
  }
  u32 mode = plan.mode;
  if (plan.payload_offset + plan.payload_bytes > job.limit() || plan.payload_bytes >= kMaxRecordsBytes ||
      job.work->refused) {
    mode = kRaw;
  } else if (plan.may_be_constant && plan.payload_bytes == 0) {
    mode = kConstant;
  }
  job.work->copy_raw = mode == kRaw && plan.mode != kRaw;
  if (mode != plan.mode) {
    plan.mode = mode;
    plan.bitmap = plan.rotate = plan.drop = plan.residue_bits = plan.k1 = plan.k2 = plan.dict_count = 0;
    plan.payload_bytes = 0;
    if (mode == kRaw) plan.fill = 0;
    for (u32 i = 0; i < kWindowSlots; i++) plan.window[i] = 0;
    derive(plan);
  }
  if (plan.flags & kFlagChecksum) plan.checksum = load_shared_word(&job.work->checksum) + plan.raw_nbytes * kCheckLength;
  if (has_dictionary_apart(mode)) {
    for (u32 i = 0; i < (plan.directory_offset - kHeaderBytes) / 8; i++) {
      reinterpret_cast<u64 *>(job.dst + kHeaderBytes)[i] = i < plan.dict_count ? values[i] : 0;
    }
  }
  write_header(plan, job.dst);
  result->total_bytes = plan.payload_offset + plan.payload_bytes;
  result->mode = mode;
  result->status = kOk;
}

/* For the host: the dynamic shared memory of a block. */
extern "C" __device__ const u32 ancf_encode_shared_bytes = kSharedBytes;

/* The whole of a kernel for one kind of blob; it does nothing where the plan is of another. */
template <Pipeline kPipeline>
DEVICE void encode_blob(const u8 *src, u8 *dst, u8 *scratch, Result *result, u32 unit_tiles) {
  const Plan &plan = *plan_of(scratch);
  if (pipeline_of(plan) != kPipeline) return;
  Team team = Team::here();
  u8 *memory = shared_memory();
  TeamShared *shared = reinterpret_cast<TeamShared *>(memory) + team.id;
  u8 *arena = memory + kTeams * sizeof(TeamShared) + team.id * kArenaBytes;
  u8 *table = memory + kTeams * (sizeof(TeamShared) + kArenaBytes);
  Encoding job{plan, plan.raw_nbytes, dst + plan.fixed_offset, static_cast<u32>(block_bytes(plan, kTile)),
               static_cast<u32>(plan.elements / kTile), static_cast<u32>(plan.elements % kTile),
               (plan.flags & kFlagChecksum) != 0, src, dst, work_of(scratch), prefixes_of(scratch), unit_tiles,
               team, shared, arena, false, 0, 0};
  if (kPipeline == kWithBitmap && unit_tiles > 2) job.unit_tiles = 2;  /* of larger records two units fit */
  if constexpr (kPipeline != kWhole) {
    with_code<kPipeline>(plan, EncodeCoded<kPipeline == kWithBitmap>{job, table});
  } else {
    if (!has_tiles(plan.mode)) encode_flat(job);
    else if (plan.mode == kInteger) encode_integers(job);
    else encode_values(job, values_of(scratch));
  }
  if (job.checks) add_check(job.check, &job.work->checksum, team.lane);
  memory_fence();
  barrier(0, kBlockThreads);
  if (thread_in_block() != 0) return;
  memory_fence();
  if (fetch_add(&job.work->blocks_done, 1u) + 1 == block_count()) conclude(job, values_of(scratch), result);
}

/* Encode `src` to `dst` as the plan in `scratch` says: one of these does. Blocks of
 * kBlockThreads, any number. `dst`: 16-byte aligned, kHeaderBytes + raw_nbytes bytes. */
#if ANCF_PIPELINES & 2
KERNEL_TWICE(kBlockThreads)
ancf_encode_fast(const u8 *__restrict__ src, u8 *__restrict__ dst, u8 *scratch, Result *result, u32 unit_tiles) {
  encode_blob<kFast>(src, dst, scratch, result, unit_tiles);
}
#endif
#if ANCF_PIPELINES & 4
KERNEL_TWICE(kBlockThreads)
ancf_encode_dense(const u8 *__restrict__ src, u8 *__restrict__ dst, u8 *scratch, Result *result, u32 unit_tiles) {
  encode_blob<kDense>(src, dst, scratch, result, unit_tiles);
}
#endif
#if ANCF_PIPELINES & 8
KERNEL_TWICE(kBlockThreads)
ancf_encode_bitmap(const u8 *__restrict__ src, u8 *__restrict__ dst, u8 *scratch, Result *result, u32 unit_tiles) {
  encode_blob<kWithBitmap>(src, dst, scratch, result, unit_tiles);
}
#endif
#if ANCF_PIPELINES & 1
KERNEL_TWICE(kBlockThreads)
ancf_encode_whole(const u8 *__restrict__ src, u8 *__restrict__ dst, u8 *scratch, Result *result, u32 unit_tiles) {
  encode_blob<kWhole>(src, dst, scratch, result, unit_tiles);
}
#endif

/* Runs after these: copies the original bytes where only then it was clear that the blob
 * must be raw. */
KERNEL_TWICE(kBlockThreads)
ancf_encode_raw(const u8 *__restrict__ src, u8 *__restrict__ dst, u8 *scratch) {
  const Plan &plan = *plan_of(scratch);
  if (!work_of(scratch)->copy_raw) return;
  u64 stride = static_cast<u64>(block_count()) * kBlockThreads / kWarpThreads * kCheckChunkBytes;
  u64 warp = static_cast<u64>(block_index()) * (kBlockThreads / kWarpThreads) + thread_in_block() / kWarpThreads;
  u32 lane = thread_in_block() % kWarpThreads;
  for (u64 at = warp * kCheckChunkBytes; at < plan.raw_nbytes; at += stride) {
    uint4 rows[kRows];
    load_chunk(rows, src, at, plan.raw_nbytes, lane);
    store_chunk(rows, dst + kHeaderBytes, at, plan.raw_nbytes, lane);
  }
}
