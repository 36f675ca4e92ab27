/* The tile coder in plain C: runs everywhere, and tests compare the other variants with it. */
#include "primitives_portable.h"

#define TABLE kernels_portable
#define TABLE_NAME "portable"

#define planes_of_bytes portable_planes_of_bytes
#define bytes_of_planes portable_bytes_of_planes
#define planes_of_symbols portable_planes_of_symbols
#define symbols_of_planes portable_symbols_of_planes
#define put_bytes portable_put_bytes
#define take_bytes portable_take_bytes
#define mover struct portable_mover
#define make_mover portable_make_mover
#define extract_bits portable_extract_bits
#define deposit_bits portable_deposit_bits
#define kernel_checksum portable_checksum
#define kernel_copy_checksum portable_copy_checksum
#define compress_u8 portable_compress_u8
#define compress_u16 portable_compress_u16
#define compress_u32 portable_compress_u32
#define compress_u64 portable_compress_u64
#define expand_u8 portable_expand_u8
#define expand_u16 portable_expand_u16
#define expand_u32 portable_expand_u32
#define expand_u64 portable_expand_u64
#define expand_signed_u8 portable_expand_signed_u8
#define expand_signed_u16 portable_expand_signed_u16
#define expand_signed_u32 portable_expand_signed_u32
#define expand_signed_u64 portable_expand_signed_u64

#include "tile_template.h"
