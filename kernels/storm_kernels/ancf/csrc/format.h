/* The constants and the header of FORMAT.md; a test compares the constants with layout.py. */
#ifndef STORM_FORMAT_H
#define STORM_FORMAT_H

#include <stddef.h>
#include <stdint.h>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "ANCF blobs are little-endian and this code copies them as they are"
#endif

#define ANCF_MAGIC 0x46434E41u
#define ANCF_VERSION 1
#define ANCF_HEADER_BYTES 256
#define ANCF_TILE 4096
#define ANCF_ALIGN 128
#define ANCF_WINDOW_SLOTS 32
#define ANCF_SAMPLE 16384
#define ANCF_SAMPLE_RUNS 512
#define ANCF_SAMPLE_RUN 32
#define ANCF_CHUNK_BYTES 2048
#define ANCF_CHUNK_COLUMNS 32
#define ANCF_PAYLOAD_END (UINT64_C(1) << 35) /* a directory's u32 counts units of 8 bytes */

/* splitmix64's outputs 0..15 (upper halves, odd) and 16..18 (odd). */
#define ANCF_K \
    { 0xE220A839, 0x6E789E6B, 0x06C45D19, 0xF88BB8A9, 0x1B39896B, 0x53CB9F0D, \
      0x2C829ABF, 0xC584133B, 0x3EE57891, 0xF3B8488D, 0x657EECDD, 0xC2D326E1, \
      0x8621A03F, 0x8E1F7555, 0xB54E0F17, 0x84BB3F97 }
#define ANCF_C1 UINT64_C(0x7D29825C75521255)
#define ANCF_C2 UINT64_C(0xC3CF17102B7F7F87)
#define ANCF_C3 UINT64_C(0x3466E9A083914F65)

enum ancf_mode {
    ANCF_RAW = 0,
    ANCF_WINDOW = 1,
    ANCF_SPARSE = 2,
    ANCF_CONSTANT = 3,
    ANCF_BOOLEAN = 4,
    ANCF_TRUNCATED = 5,
    ANCF_TERNARY = 6,
    ANCF_VALUES = 7,
    ANCF_INTEGER = 8,
    ANCF_MODES = 9,
    ANCF_AUTO = -1
};

enum ancf_dtype {
    ANCF_BYTES,
    ANCF_BFLOAT16,
    ANCF_FLOAT16,
    ANCF_FLOAT32,
    ANCF_FLOAT64,
    ANCF_FLOAT8_E4M3FN,
    ANCF_FLOAT8_E5M2,
    ANCF_BOOL,
    ANCF_INT8,
    ANCF_UINT8,
    ANCF_INT16,
    ANCF_UINT16,
    ANCF_INT32,
    ANCF_UINT32,
    ANCF_INT64,
    ANCF_UINT64,
    ANCF_COMPLEX32,
    ANCF_COMPLEX64,
    ANCF_COMPLEX128,
    ANCF_DTYPES
};

enum ancf_bitmap { ANCF_NO_BITMAP = 0, ANCF_PLAIN = 1, ANCF_PAIRS = 2 };
#define ANCF_SIGNS 4 /* flag, added to a kind: a plane of all signs follows the bitmap */

#define ANCF_FLAG_CHECKSUM 1

struct ancf_header {
    uint32_t magic;
    uint16_t version;
    uint8_t mode;
    uint8_t dtype;
    uint8_t flags;
    uint8_t bitmap;
    uint8_t rotate;
    uint8_t drop;
    uint8_t residue_bits;
    uint8_t k1;
    uint8_t k2;
    uint8_t escape_bytes;
    uint64_t raw_nbytes;
    uint64_t total_bytes;
    uint64_t checksum;
    uint64_t fill;
    uint32_t tiles;
    uint32_t dict_count;
    uint64_t fixed_offset;
    uint64_t payload_offset;
    uint64_t payload_bytes;
    uint16_t window[ANCF_WINDOW_SLOTS];
    uint8_t zero[104];
    uint64_t header_check;
};

_Static_assert(sizeof(struct ancf_header) == ANCF_HEADER_BYTES, "the header is 256 bytes");
_Static_assert(offsetof(struct ancf_header, raw_nbytes) == 16, "raw_nbytes at 16");
_Static_assert(offsetof(struct ancf_header, tiles) == 48, "tiles at 48");
_Static_assert(offsetof(struct ancf_header, window) == 80, "window at 80");
_Static_assert(offsetof(struct ancf_header, header_check) == 248, "header_check at 248");

struct ancf_dtype_info {
    uint8_t bits;      /* w */
    uint8_t mantissa;  /* M */
    uint8_t is_signed; /* order of values in mode integer */
    uint8_t is_float;
};

static inline uint64_t ancf_up(uint64_t value, uint64_t multiple)
{
    return (value + multiple - 1) / multiple * multiple;
}

/* Returns the bytes of plane A of a bitmap of `count` elements. */
static inline uint64_t bitmap_bytes(unsigned kind, uint64_t count)
{
    return kind == ANCF_PAIRS ? ancf_up(count, 256) / 16 : ancf_up(count, 128) / 8;
}

#endif
