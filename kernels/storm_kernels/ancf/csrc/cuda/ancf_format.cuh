/* The constants of the ANCF format and the parameters of one blob, for the CUDA kernels. FORMAT.md
 * explains them; a test compares the constants with layout.py. A `Plan` in device memory is
 * complete before a kernel that reads it starts, and no such kernel changes it.
 */
#pragma once
#include <ancf_device.cuh>

#ifndef ANCF_WIDTH
#define ANCF_WIDTH 2
#endif
#ifndef ANCF_MANTISSA
#define ANCF_MANTISSA 7
#endif

/* The kernels of a module, one bit for each Pipeline: each takes the compiler seconds. */
#ifndef ANCF_PIPELINES
#define ANCF_PIPELINES 0xf
#endif

constexpr u32 kWidth = ANCF_WIDTH;        /* bytes of an element; one module per width, mantissa */
constexpr u32 kMantissa = ANCF_MANTISSA;  /* stored mantissa bits */

constexpr u32 kMagic = 0x46434E41;  /* "ANCF" */
constexpr u32 kVersion = 1;
constexpr u32 kHeaderBytes = 256;
constexpr u32 kTile = 4096;
constexpr u32 kDirectoryAlign = 128;
constexpr u32 kRecordUnit = 8;
constexpr u64 kMaxRecordsBytes = 1ull << 35;
constexpr u32 kFlagChecksum = 1;
constexpr u32 kWindowSlots = 32;
constexpr u32 kSampleMax = 16384;
constexpr u32 kSampleRun = 32;
constexpr u32 kSampleRuns = kSampleMax / kSampleRun;
constexpr u32 kCheckChunkBytes = 2048;
__device__ constexpr u32 kCheckKeys[16] = {
    0xE220A839, 0x6E789E6B, 0x06C45D19, 0xF88BB8A9, 0x1B39896B, 0x53CB9F0D, 0x2C829ABF, 0xC584133B,
    0x3EE57891, 0xF3B8488D, 0x657EECDD, 0xC2D326E1, 0x8621A03F, 0x8E1F7555, 0xB54E0F17, 0x84BB3F97};
constexpr u64 kCheckIndex = 0x7D29825C75521255;
constexpr u64 kCheckMix = 0xC3CF17102B7F7F87;
constexpr u64 kCheckLength = 0x3466E9A083914F65;

enum Mode : u32 {
  kRaw = 0, kWindow = 1, kSparse = 2, kConstant = 3, kBoolean = 4,
  kTruncated = 5, kTernary = 6, kValues = 7, kInteger = 8,
};
enum Bitmap : u32 { kBitmapNone = 0, kBitmapPlain = 1, kBitmapPairs = 2 };
constexpr u32 kBitmapSigns = 4;  /* flag added to a kind: a plane of all signs follows the bitmap */

/* Values of a status word. kNotDecoded: no kernel for this blob was launched. */
enum Status : u32 { kOk = 0, kBadHeader = 1, kBadRecord = 2, kBadChecksum = 3, kNotDecoded = 4 };

/* The blob's parameters (names as in the header) and the values derived from them. */
struct Plan {
  u64 raw_nbytes, elements;
  u64 fixed_offset, payload_offset, payload_bytes;
  u64 fill, checksum;
  u32 mode, dtype, width, mantissa;  /* width: bytes of an element */
  u32 flags, bitmap, rotate, drop, residue_bits, k1, k2, escape_bytes;
  u32 dict_count, tiles, directory_offset;
  u32 status;                /* result of reading the header; an encoder's is kOk */
  u32 may_be_constant;       /* the sample is constant; so is the blob if no element differs */
  u32 window[kWindowSlots];
};

/* A counter in a separate cache line. */
struct Counter {
  u32 taken, unused[31];
};

/* The memory that the blocks of one launch share; zero before the launch. */
constexpr u32 kTileCounters = 4;
struct Work {
  u32 next_unit, blocks_done, refused, status;
  u64 checksum;
  u32 copy_raw, unused[25];
  Counter tiles[kTileCounters];  /* for more draws of tickets than one counter can serve */
};

/* An encoder's result, in memory that the caller provides. */
struct Result {
  u64 total_bytes, status, mode;
};

/* An element type: bytes, mantissa bits (FORMAT.md, section 3), kind. */
struct Traits {
  u32 width, mantissa;
  bool is_float, is_signed;
};
constexpr u32 kBoolType = 7, kDtypes = 19;

DEVICE Traits traits_of(u32 dtype) {
  switch (dtype) {
    case 1: return {2, 7, true, false};    /* bfloat16 */
    case 2: return {2, 10, true, false};   /* float16 */
    case 3: return {4, 23, true, false};   /* float32 */
    case 4: return {8, 52, true, false};   /* float64 */
    case 5: return {1, 3, true, false};    /* float8_e4m3fn */
    case 6: return {1, 2, true, false};    /* float8_e5m2 */
    case 8: return {1, 3, false, true};    /* int8 */
    case 10: return {2, 7, false, true};   /* int16 */
    case 11: return {2, 7, false, false};  /* uint16 */
    case 12: return {4, 23, false, true};  /* int32 */
    case 13: return {4, 23, false, false}; /* uint32 */
    case 14: return {8, 52, false, true};  /* int64 */
    case 15: return {8, 52, false, false}; /* uint64 */
    case 16: return {2, 10, true, false};  /* complex32 */
    case 17: return {4, 23, true, false};  /* complex64 */
    case 18: return {8, 52, true, false};  /* complex128 */
    default: return {1, 3, false, false};  /* bytes, bool, uint8 */
  }
}

/* Scratch: the plan, the dictionary of whole values, the work area, one word per unit. */
constexpr u32 kPlanBytes = 512;
constexpr u32 kValuesBytes = 4096;
constexpr u32 kWorkBytes = 128 * (1 + kTileCounters);
static_assert(sizeof(Plan) <= kPlanBytes, "scratch layout");
static_assert(sizeof(Work) == kWorkBytes, "scratch layout");

DEVICE const Plan *plan_of(const u8 *scratch) { return reinterpret_cast<const Plan *>(scratch); }
DEVICE u64 *values_of(u8 *scratch) { return reinterpret_cast<u64 *>(scratch + kPlanBytes); }
DEVICE Work *work_of(u8 *scratch) {
  return reinterpret_cast<Work *>(scratch + kPlanBytes + kValuesBytes);
}
/* One word per unit of tiles: state in the top two bits, record bytes / 8 below. */
DEVICE u64 *prefixes_of(u8 *scratch) {
  return reinterpret_cast<u64 *>(scratch + kPlanBytes + kValuesBytes + kWorkBytes);
}

DEVICE u64 round_up(u64 value, u64 multiple) { return (value + multiple - 1) / multiple * multiple; }

DEVICE bool has_pairs(u32 bitmap) { return (bitmap & ~kBitmapSigns) == kBitmapPairs; }
DEVICE bool keeps_signs_apart(u32 bitmap) { return (bitmap & kBitmapSigns) != 0; }

/* The bytes of a bit plane with one bit per element of a tile of `count` elements, or per pair. */
DEVICE u32 plane_bytes(u32 count) { return (count + 127) / 128 * 16; }
DEVICE u32 pair_plane_bytes(u32 count) { return (count + 255) / 256 * 16; }
/* The bytes of a bitmap's plane A. */
DEVICE u32 bitmap_bytes(bool pairs, u32 count) { return pairs ? pair_plane_bytes(count) : plane_bytes(count); }

/* The bytes of the fixed block of a tile of `count` elements. */
DEVICE u32 block_bytes(const Plan &plan, u32 count) {
  bool sparse = plan.mode == kSparse, pairs = sparse && has_pairs(plan.bitmap);
  u32 planes = sparse ? (pairs ? 0 : 1) + plan.bitmap / kBitmapSigns : plan.residue_bits + plan.k1;
  return planes * plane_bytes(count) + (pairs ? pair_plane_bytes(count) : 0);
}

/* The kernels that process a blob. Each pipeline has its own, so none pays for another's
 * registers. */
enum Pipeline : u32 { kWhole = 0, kFast = 1, kDense = 2, kWithBitmap = 3 };
DEVICE Pipeline pipeline_of(const Plan &plan) {
  if (plan.mode == kSparse) return kWithBitmap;
  if (plan.mode != kWindow && plan.mode != kTruncated) return kWhole;
  return plan.k2 ? kDense : kFast;
}

DEVICE bool has_tiles(u32 mode) { return mode != kRaw && mode != kConstant && mode != kBoolean; }
DEVICE bool has_dictionary_apart(u32 mode) { return mode == kTernary || mode == kValues; }

/* Sets all values derived from mode, bits and raw_nbytes, for elements of `width` bytes. */
DEVICE void derive(Plan &plan, u32 width, u32 mantissa) {
  plan.width = width;
  plan.mantissa = mantissa;
  plan.elements = plan.raw_nbytes >> lowest_bit(width);  /* faster than a division */
  u32 symbol_bits = plan.drop ? 8 * plan.width : 8 * plan.width - plan.residue_bits;
  plan.escape_bytes = !plan.k1 ? 0 : symbol_bits <= 8 ? 1 : symbol_bits <= 16 ? 2 : symbol_bits <= 32 ? 4 : 8;
  u64 tiles = has_tiles(plan.mode) ? (plan.elements + kTile - 1) / kTile : 0;
  plan.tiles = static_cast<u32>(tiles);
  u64 apart = has_dictionary_apart(plan.mode) ? 8ull << plan.k1 : 0;
  plan.directory_offset = kHeaderBytes + static_cast<u32>(round_up(apart, kDirectoryAlign));
  if (has_tiles(plan.mode)) {
    plan.fixed_offset = plan.directory_offset + round_up(4 * (tiles + 1), kDirectoryAlign);
    u64 whole = plan.elements / kTile;
    plan.payload_offset = plan.fixed_offset + whole * block_bytes(plan, kTile) +
                          block_bytes(plan, static_cast<u32>(plan.elements % kTile));
    return;
  }
  plan.fixed_offset = kHeaderBytes;
  u64 body = plan.mode == kRaw ? plan.raw_nbytes
             : plan.mode == kBoolean ? round_up((plan.elements + 7) / 8, 16) : 0;
  plan.payload_offset = kHeaderBytes + body;
}
DEVICE void derive(Plan &plan) {
  Traits traits = traits_of(plan.dtype);
  derive(plan, traits.width, traits.mantissa);
}

DEVICE u64 header_check(const u64 *words) {
  u64 check = 0;
  for (u32 i = 0; i < 31; i++) {
    check = (check ^ words[i]) * kCheckMix;
    check ^= check >> 29;
  }
  return check;
}

/* Sets the 32 words of the header of `plan`. */
DEVICE void pack_header(const Plan &plan, u64 (&words)[32]) {
  for (u32 i = 0; i < 32; i++) words[i] = 0;
  words[0] = kMagic | static_cast<u64>(kVersion) << 32 | static_cast<u64>(plan.mode) << 48 |
             static_cast<u64>(plan.dtype) << 56;
  words[1] = plan.flags | plan.bitmap << 8 | plan.rotate << 16 | plan.drop << 24 |
             static_cast<u64>(plan.residue_bits | plan.k1 << 8 | plan.k2 << 16 |
                              plan.escape_bytes << 24) << 32;
  words[2] = plan.raw_nbytes;
  words[3] = plan.payload_offset + plan.payload_bytes;
  words[4] = plan.checksum;
  words[5] = plan.fill;
  words[6] = plan.tiles | static_cast<u64>(plan.dict_count) << 32;
  words[7] = plan.fixed_offset;
  words[8] = plan.payload_offset;
  words[9] = plan.payload_bytes;
  if (!has_dictionary_apart(plan.mode)) {
    for (u32 i = 0; i < kWindowSlots; i++) {
      words[10 + i / 4] |= static_cast<u64>(plan.window[i] & 0xffff) << (16 * (i % 4));
    }
  }
  words[31] = header_check(words);
}
