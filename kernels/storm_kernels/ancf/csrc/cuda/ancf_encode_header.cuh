/* The end of encoding: determines the final mode and writes the header (FORMAT.md, sections 2 and
 * 9). One thread writes the header once all its values are known.
 */
#pragma once
#include <ancf_look_back.cuh>

DEVICE void write_header(const Plan &plan, u8 *dst) {
  u64 words[32];
  pack_header(plan, words);
  for (u32 i = 0; i < 32; i++) reinterpret_cast<u64 *>(dst)[i] = words[i];
}

/* Completes the blob after the last record. `units`: the units of records. One thread. */
DEVICE void conclude(Plan plan, u32 units, u8 *dst, u8 *scratch, Result *result) {
  Work *work = work_of(scratch);
  if (plan.tiles != 0) {
    plan.payload_bytes = (load_shared_word(prefixes_of(scratch) + units - 1) & kSumMask) * kRecordUnit;
  }
  u32 mode = plan.mode;
  u64 limit = kHeaderBytes + plan.raw_nbytes;
  if (plan.payload_offset + plan.payload_bytes > limit || plan.payload_bytes >= kMaxRecordsBytes ||
      work->refused) {
    mode = kRaw;
  } else if (plan.may_be_constant && plan.payload_bytes == 0) {
    mode = kConstant;
  }
  work->copy_raw = mode == kRaw && plan.mode != kRaw;
  if (mode != plan.mode) {
    plan.mode = mode;
    plan.bitmap = plan.rotate = plan.drop = plan.residue_bits = plan.k1 = plan.k2 = plan.dict_count = 0;
    plan.payload_bytes = 0;
    if (mode == kRaw) plan.fill = 0;
    for (u32 i = 0; i < kWindowSlots; i++) plan.window[i] = 0;
    derive(plan);
  }
  if (plan.flags & kFlagChecksum) plan.checksum = load_shared_word(&work->checksum) + plan.raw_nbytes * kCheckLength;
  if (has_dictionary_apart(mode)) {
    const u64 *values = values_of(scratch);
    for (u32 i = 0; i < (plan.directory_offset - kHeaderBytes) / 8; i++) {
      reinterpret_cast<u64 *>(dst + kHeaderBytes)[i] = i < plan.dict_count ? values[i] : 0;
    }
  }
  write_header(plan, dst);
  result->total_bytes = plan.payload_offset + plan.payload_bytes;
  result->mode = mode;
  result->status = kOk;
}

/* The end of every encoder: all threads of the block call it. */
DEVICE void finish(const Plan &plan, u32 units, u64 check, u8 *dst, u8 *scratch, Result *result) {
  Work *work = work_of(scratch);
  u64 sum = over_lanes(check);
  if (plan.flags & kFlagChecksum && thread_in_block() % kWarpThreads == 0) fetch_add(&work->checksum, sum);
  memory_fence();
  barrier(0, threads_in_block());
  if (thread_in_block() != 0) return;
  memory_fence();
  if (fetch_add(&work->blocks_done, 1u) + 1 == block_count()) conclude(plan, units, dst, scratch, result);
}
