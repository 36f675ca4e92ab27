/* Reads and checks a blob's header (FORMAT.md, sections 2, 3 and 12), by one warp. It must be
 * short: every decoding waits for it, while its code and the header are not yet in any cache. An
 * accepted plan agrees with the given sizes, so all offsets derived from it are inside them.
 */
#pragma once
#include <ancf_format.cuh>

constexpr u32 kWindowWord = 10, kZeroWord = kWindowWord + kWindowSlots / 4, kCheckWord = 31;
static_assert(kHeaderBytes == 8 * kWarpThreads && kWindowSlots == kWarpThreads, "a word and a window entry a lane");

/* A header; each lane holds the word with the lane's number. */
struct Header {
  u64 own;
  u32 lane;

  DEVICE static Header of(const u8 *blob, u32 lane) { return {reinterpret_cast<const u64 *>(blob)[lane], lane}; }

  DEVICE u64 word(u32 number) const { return shuffle(own, number); }
  /* Returns the window's entry with the lane's number. */
  DEVICE u32 entry() const { return static_cast<u32>(word(kWindowWord + lane / 4) >> (16 * (lane % 4)) & 0xffff); }

  DEVICE u64 check() const {
    u64 check = 0;
#pragma unroll 4
    for (u32 i = 0; i < kCheckWord; i++) {
      check = (check ^ word(i)) * kCheckMix;
      check ^= check >> 29;
    }
    return check;
  }
};

DEVICE bool is_window_code(const Plan &plan) {
  bool fast = plan.k1 == 3 && plan.k2 == 0 && plan.mode == kWindow;
  bool dense = (plan.k1 == 2 && plan.k2 == 3) || (plan.k1 == 3 && plan.k2 == 4);
  u32 kind = plan.bitmap & ~kBitmapSigns;
  bool bitmap = plan.mode == kSparse ? kind == kBitmapPlain || kind == kBitmapPairs : plan.bitmap == kBitmapNone;
  bool signs = !keeps_signs_apart(plan.bitmap) || (plan.rotate == 0 && plan.fill == 0);
  bool truncates = (plan.width == 4 && (plan.drop == 16 || plan.drop == 13)) || (plan.width == 8 && plan.drop == 29);
  bool drop = plan.mode == kWindow ? plan.drop == 0 : truncates || (plan.mode == kSparse && plan.drop == 0);
  return (fast || dense) && bitmap && signs && drop && plan.rotate <= 1 &&
         plan.residue_bits == plan.mantissa - plan.drop + plan.rotate;
}

/* Whether any encoder writes blobs with these parameters. */
DEVICE bool is_known(const Plan &plan) {
  if (plan.mode == kWindow || plan.mode == kSparse || plan.mode == kTruncated) return is_window_code(plan);
  if (plan.bitmap || plan.rotate || plan.drop || plan.residue_bits || plan.k2) return false;
  if (plan.mode == kTernary) return plan.k1 == 2;
  if (plan.mode == kValues) return plan.k1 >= 7 && plan.k1 <= 9;
  return plan.mode <= kInteger && plan.k1 == 0;
}

/* Returns the parameters in a header, without the window, and the values derived from them. */
DEVICE Plan parse_header(const Header &header) {
  const u64 kind = header.word(0), bits = header.word(1);
  Plan plan = {};
  plan.mode = static_cast<u32>(kind >> 48 & 0xff);
  plan.dtype = static_cast<u32>(kind >> 56);
  plan.flags = static_cast<u32>(bits & 0xff);
  plan.bitmap = static_cast<u32>(bits >> 8 & 0xff);
  plan.rotate = static_cast<u32>(bits >> 16 & 0xff);
  plan.drop = static_cast<u32>(bits >> 24 & 0xff);
  plan.residue_bits = static_cast<u32>(bits >> 32 & 0xff);
  plan.k1 = static_cast<u32>(bits >> 40 & 0xff);
  plan.k2 = static_cast<u32>(bits >> 48 & 0xff);
  plan.raw_nbytes = header.word(2);
  plan.checksum = header.word(4);
  plan.fill = header.word(5);
  plan.dict_count = static_cast<u32>(header.word(6) >> 32);
  plan.payload_bytes = header.word(9);
  derive(plan);
  return plan;
}

/* Whether the header's values equal those derived from the plan. */
DEVICE bool says_what_follows(const Plan &plan, const Header &header) {
  const u64 magic = kMagic | static_cast<u64>(kVersion) << 32;
  bool kind = header.word(0) << 16 == magic << 16, escapes = header.word(1) >> 56 == plan.escape_bytes;
  bool total = header.word(3) == plan.payload_offset + plan.payload_bytes;
  bool tiles = static_cast<u32>(header.word(6)) == plan.tiles;
  bool places = header.word(7) == plan.fixed_offset, payload = header.word(8) == plan.payload_offset;
  return kind && escapes && total && tiles && places && payload;
}

/* Whether the plan, without the window, is valid for these sizes. */
DEVICE bool is_valid(const Plan &plan, u64 blob_bytes, u64 dst_bytes) {
  u32 slots = ((1u << plan.k1 % 16) - 1) + (plan.k2 ? (1u << plan.k2 % 16) - 1 : 0);
  bool checked = (plan.flags & kFlagChecksum) != 0, filled = plan.mode == kSparse || plan.mode == kConstant;
  return plan.dtype < kDtypes && is_known(plan) && plan.raw_nbytes == dst_bytes &&
         (dst_bytes & (plan.width - 1)) == 0 && plan.dict_count <= slots && (plan.flags & ~kFlagChecksum) == 0 &&
         (plan.fill == 0 || (filled && !(plan.width < 8 && plan.fill >> 8 * plan.width))) &&
         (checked || plan.checksum == 0) && plan.payload_offset <= blob_bytes &&
         plan.payload_bytes == blob_bytes - plan.payload_offset;
}

/* Whether this lane's part of the window and of the words after it is 0 where it must be. */
DEVICE bool rest_is_zero(const Plan &plan, const Header &header) {
  u32 used = has_dictionary_apart(plan.mode) ? 0 : plan.dict_count, entry = header.entry();
  bool is_zero_word = header.lane >= kZeroWord && header.lane < kCheckWord;
  return (header.lane < used || entry == 0) && (!is_zero_word || header.own == 0);
}

/* The directory's first and last entry, loaded before they are needed. The plan must be valid. */
struct DirectoryEnds {
  u32 first, last;

  DEVICE static DirectoryEnds of(const Plan &plan, const u8 *blob) {
    if (!has_tiles(plan.mode)) return {0, 0};
    const u32 *directory = reinterpret_cast<const u32 *>(blob + plan.directory_offset);
    return {directory[0], directory[plan.tiles]};
  }
  DEVICE bool fit(const Plan &plan) const {
    return first == 0 && last * static_cast<u64>(kRecordUnit) == plan.payload_bytes;
  }
};

/* Reads the header of `blob` to `plan`; returns whether it is valid. By one warp. */
DEVICE bool read_header(const u8 *blob, u64 blob_bytes, u64 dst_bytes, u32 lane, Plan &plan) {
  if (blob_bytes < kHeaderBytes) return false;
  const Header header = Header::of(blob, lane);
  Plan found = parse_header(header);
  if (!says_what_follows(found, header) || !is_valid(found, blob_bytes, dst_bytes)) return false;
  const DirectoryEnds ends = DirectoryEnds::of(found, blob);
  if (any_lane(!rest_is_zero(found, header))) return false;
  if (header.check() != header.word(kCheckWord) || !ends.fit(found)) return false;
  if (lane == 0) plan = found;
  warp_barrier();
  plan.window[lane] = header.entry();
  return true;
}
