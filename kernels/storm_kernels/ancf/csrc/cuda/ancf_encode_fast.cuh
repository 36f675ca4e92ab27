/* The encoder of pipeline fast: mode window, one code of three bits (FORMAT.md, sections 4 and 5).
 *
 * A team of warps encodes a tile, each warp a chunk of 2 KiB. The team synchronises once per tile,
 * to exchange the numbers of escapes.
 */
#pragma once
#include <ancf_encoding.cuh>

/* The lookup table of a code: by top byte if elements can be split by words, else by symbol. */
template <class C, bool kPacked>
struct TableOf { using Type = SymbolTable<C>; };
template <class C>
struct TableOf<C, true> { using Type = TopTable<C>; };
template <class C>
using Table = typename TableOf<C, Packed<C>::kFits>::Type;

/* The elements of a tile, for writing escapes; `tops` was written by write_packed. */
struct Coded {
  const u8 *start, *tops;
  template <class C>
  DEVICE u32 symbol(u32 i) const {
    if (Packed<C>::kFits) return tops[i] >> Packed<C>::kLeft;
    return C::symbol(read_element(start + static_cast<u64>(i) * kWidth));
  }
};

template <class C>
DEVICE void write_escapes(const Team &team, u8 *escapes, const u32 (&flags)[kRows], const Ranks &ranks,
                          const Coded &coded) {
#pragma unroll
  for (u32 row = 0; row < kRows; row++) {
    u8 *to = escapes + C::kEscapeBytes * ranks.start[row];
    for (u32 left = flags[row]; left; left &= left - 1, to += C::kEscapeBytes) {
      write_escape<C::kEscapeBytes>(to, coded.symbol<C>(team.first(row) + lowest_bit(left)));
    }
  }
}

/* Writes residues and codes of one row; returns the flags of its escapes. */
template <class C>
DEVICE u32 write_row(const PlaneSet &planes, u32 first, const uint4 &piece, u32 count,
                     const Table<C> &table, u8 *tops, u32 lane) {
  u32 valid = first >= count ? 0 : count - first;
  if constexpr (Packed<C>::kFits) {
    BitPlanes bits = BitPlanes::of<Packed<C>::kWhole>(planes, first);
    return write_packed<C, false>(planes, bits, first, piece, valid, table, tops, lane);
  } else {
    u64 turned[kPiece];
#pragma unroll
    for (u32 i = 0; i < kPiece; i++) turned[i] = C::turned(element(piece, i));
    write_residues<C>(planes, first, turned, first < planes.padded, lane);
    return write_codes<C>(planes, first, piece, valid, table, lane);
  }
}

/* Writes all rows of a full tile; each warp gathers its bit planes in shared memory. */
template <class C>
DEVICE void write_full_rows(Encoding &job, const PlaneSet &planes, const uint4 (&rows)[kRows],
                            const Table<C> &table, u32 (&flags)[kRows]) {
  if constexpr (Packed<C>::kFits) {
    const Team &team = job.team;
    u8 *gathered = job.gathered() + team.warp * (kGatherBytes / kTeamWarps);
#pragma unroll
    for (u32 row = 0; row < kRows; row++) {
      u32 first = team.first(row);
      BitPlanes bits = {gathered, kChunkElements, first - team.warp * kChunkElements, true};
      flags[row] = write_packed<C, true>(planes, bits, first, rows[row], kPiece, table, job.tops(), team.lane);
    }
    store_planes<C>(planes, gathered, team.warp, team.lane);
  }
}

template <class C>
DEVICE void encode_fast_tile(Encoding &job, u32 tile, u32 index, bool is_last, Records &records,
                             const Table<C> &table) {
  const Team &team = job.team;
  u32 count = job.tile_elements(tile);
  uint4 rows[kRows];
  job.load(rows, tile);
  if (!is_last) job.fetch_ahead(tile + 1);
  PlaneSet planes = {job.block(tile), static_cast<u32>(round_up(count, 128))};
  u8 *tops = job.tops();  /* each lane reads back what it wrote */
  u32 flags[kRows], escaped[kRows];
  if (Packed<C>::kFits && count == kTile) {
    planes.padded = kTile;
    write_full_rows<C>(job, planes, rows, table, flags);
  } else {
#pragma unroll
    for (u32 row = 0; row < kRows; row++) {
      flags[row] = write_row<C>(planes, team.first(row), rows[row], count, table, tops, team.lane);
    }
  }
#pragma unroll
  for (u32 row = 0; row < kRows; row++) escaped[row] = ones(flags[row]);
  Ranks ranks = Ranks::in_warp(escaped, team.lane);
  rank_in_team(ranks, team, *job.shared, job.turn);
  if (is_last) job.fetch_ahead(job.shared->unit * job.unit_tiles);  /* the team has met since it was taken */
  u32 bytes = ranks.total * C::kEscapeBytes;
  u8 *record = records.reserve(index, bytes);
  write_escapes<C>(team, record, flags, ranks, {job.src + static_cast<u64>(tile) * kTile * kWidth, tops});
  records.add(bytes);
}

/* Runs the encoder of a code. */
struct EncodeFast {
  Encoding &job;
  u8 *memory;
  template <class C>
  DEVICE void run() const {
    static_assert(sizeof(Table<C>) <= kTableBytes, "a table must fit");
    static_assert(kTile * C::kEscapeBytes <= kBufferBytes - kTile, "escapes must fit beside the top bytes");
    Table<C> &table = *reinterpret_cast<Table<C> *>(memory);
    fill_table(table, job.plan);
    barrier(0, kBlockThreads);
    job.fetches = true;
    encode_units(job, kBufferBytes - kTile, [&](u32 tile, u32 index, bool is_last, Records &records) {
      encode_fast_tile<C>(job, tile, index, is_last, records, table);
    });
  }
};
