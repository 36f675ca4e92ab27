/* Reads and checks a blob's header (FORMAT.md, sections 2, 3 and 12). What stays true: a plan that
 * `is_valid` accepts agrees with the sizes given, so everything derived from it lies inside them.
 */
#pragma once
#include <ancf_format.cuh>

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
