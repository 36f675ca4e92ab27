/* The encoder of pipeline dense: modes window and truncated, with second codes.
 *
 * A warp processes its tile in stages of a few KiB. It writes planes of fixed blocks directly to
 * their place. It keeps the tile's record in shared memory while it works on its next tile; at each
 * stage it checks whether the record's place is known. A stage's memory is refilled only after all
 * lanes have passed the barrier after their last use of it.
 */
#pragma once
#include <ancf_tail.cuh>

constexpr u32 kDenseStage = kBatchBytes < kCheckChunkBytes ? kCheckChunkBytes : kBatchBytes;
constexpr u32 kDenseStages = kTile * kWidth / kDenseStage;  /* per tile */
constexpr u32 kStageBatches = kDenseStage / kBatchBytes;
constexpr u32 kDenseRoom = kDenseStage + 2 * kTailRoom;  /* tails of two tiles */

template <class C>
struct DenseEncoder {
  WarpEncoding &job;
  const CodeTable<C> &table;
  Tail<C> tail, ended;  /* of the current tile, and of the previous one, if it `waits` */
  u32 waiting;
  bool waits;

  DEVICE static DenseEncoder make(WarpEncoding &job, const CodeTable<C> &table) {
    u32 *streams = reinterpret_cast<u32 *>(job.room + kDenseStage);
    return {job, table, {streams, 0, 0}, {streams + kTailRoom / 4, 0, 0}, 0, false};
  }

  DEVICE void encode_all() {
    u32 tile = shuffle(job.draw(), 0);
    fetch(tile, 0);
    while (tile < job.tiles) {
      u32 drawn = job.draw(), next = tile;
#pragma unroll 1
      for (u32 stage = 0; next == tile; stage++) {
        settle<false>();
        copies_arrived();
        warp_barrier();
        if (stage == 0) tail.open(job.lane);
        bool is_last = stage + 1 == kDenseStages || (stage + 1) * kDenseStage / kWidth >= job.tile_elements(tile);
        if (is_last) next = shuffle(drawn, 0);
        encode_stage(tile, stage, next, is_last ? 0 : stage + 1);
      }
      job.announce(tile, padded_record(tail.bytes()));
      settle<true>();
      Tail<C> free = ended;
      ended = tail;
      tail = free;
      waiting = tile;
      waits = true;
      tile = next;
    }
    settle<true>();
  }

  DEVICE void fetch(u32 tile, u32 stage) const {
    if (tile >= job.tiles) return;
    job.fetch(job.room, static_cast<u64>(tile) * kTile * kWidth + stage * kDenseStage, kDenseStage);
  }

  /* Encodes a stage, and starts to fetch the next one. */
  DEVICE void encode_stage(u32 tile, u32 stage, u32 next_tile, u32 next_stage) {
    job.add_to_check(job.room, static_cast<u64>(tile) * kTile * kWidth + stage * kDenseStage, kDenseStage);
    u32 count = job.tile_elements(tile);
    PlaneSet planes = {job.block(tile), static_cast<u32>(round_up(count, 128))};
#pragma unroll
    for (u32 batch = 0; batch < kStageBatches; batch++) {
      u32 first = stage * (kDenseStage / kWidth) + batch * kBatchElements + job.lane * kRunElements;
      Run run = Run::staged(job.room, batch * kWarpThreads + job.lane);
      RunPlanes<C> made = RunPlanes<C>::of(run, existing(first, count), table);
      u32 before = tail.add_escapes(run, made);
      store_whole(planes, first, batch, run);
      if (batch + 1 == kStageBatches) {
        warp_barrier();
        fetch(next_tile, next_stage);
      }
      if (first < planes.padded) store_bits(planes, first, made);
      tail.add_seconds(made, before);
    }
    warp_barrier();
  }

  DEVICE void store_whole(const PlaneSet &planes, u32 first, u32 batch, const Run &run) const {
    using Whole = WholeParts<C>;
    if constexpr (Whole::kWhole != 0) {
      warp_barrier();  /* the checksum has been computed */
      Whole::template replace<kWidth <= 2 ? kOctets : kWidth == 4 ? 2 : 1>(run, run);
      warp_barrier();
      u32 begin = first - job.lane * kRunElements;
      u32 runs = begin < planes.padded ? (planes.padded - begin) / kRunElements : 0;
      Whole::template store<true>(planes, begin, runs, job.room + batch * kBatchBytes, job.lane);
    }
  }

  DEVICE static void store_bits(const PlaneSet &planes, u32 first, const RunPlanes<C> &made) {
    using Table = CodeTable<C>;
    u8 *to = planes.plane(Table::kWhole) + first / 8;
    u32 stride = planes.padded / 8;
#pragma unroll
    for (u32 i = 0; i < Table::kLeft; i++, to += stride) *reinterpret_cast<u32 *>(to) = made.left[i];
#pragma unroll
    for (u32 i = 0; i < C::kFirst; i++, to += stride) *reinterpret_cast<u32 *>(to) = made.first[i];
  }

  /* Writes the waiting record if its place is known; with `kWaits`, waits for the place. */
  template <bool kWaits>
  DEVICE void settle() {
    if (!waits) return;
    u32 bytes = ended.bytes(), padded = padded_record(bytes);
    Place place;
    if (!job.template find_place<kWaits>(waiting, padded, place)) return;
    waits = false;
    if (!place.fits) return;
    if (ended.is_kept()) ended.write(place.record, padded - bytes, job.lane);
    else ended.template write_again<false>(job, waiting, place.record, padded - bytes, table);
    warp_barrier();
  }
};
