/* The scans of one instruction set: scan_cell.h once per element type, and the table of them.
 *
 * The including file defines TABLE, put_row (write finished results to memory) and finish_rows. */
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "scan_job.h"

#define ALWAYS static inline __attribute__((always_inline))

ALWAYS float float_of_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

ALWAYS uint32_t bits_of_float(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

ALWAYS float float_of_bf16(uint16_t value) { return float_of_bits((uint32_t)value << 16); }

/* Rounds to nearest, ties to even; a NaN keeps its sign and becomes quiet. */
ALWAYS uint16_t bf16_of_float(float value)
{
    uint32_t bits = bits_of_float(value);
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (uint16_t)(value != value ? bits >> 16 | 0x40 : rounded);
}

/* Converts half precision without branches: the value of a subnormal is its bits times 2^-24; the
 * exponent of a normal number changes from bias 15 to bias 127. */
ALWAYS float float_of_half(uint16_t value)
{
    uint32_t sign = (uint32_t)(value & 0x8000) << 16, magnitude = value & 0x7fff;
    float tiny = (float)(int32_t)magnitude * 0x1p-24f;
    uint32_t exponent = magnitude >= 0x7c00 ? 224u << 23 : 112u << 23;
    uint32_t normal = (magnitude << 13) + exponent;
    return float_of_bits(sign | (magnitude < 0x400 ? bits_of_float(tiny) : normal));
}

/* Rounds to nearest, ties to even. 2^-14 is the smallest normal number; 65520 rounds to infinity.
 * To round a number below 2^-14 to a multiple of 2^-24, add 0.5: the lowest bits are the
 * multiple. */
ALWAYS uint16_t half_of_float(float value)
{
    uint32_t bits = bits_of_float(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    uint32_t tiny = bits_of_float(float_of_bits(magnitude) + 0.5f) - bits_of_float(0.5f);
    uint32_t normal = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
    uint32_t large = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
    uint32_t result = magnitude < 0x38800000 ? tiny : normal;
    return (uint16_t)(sign | (magnitude >= 0x477ff000 ? large : result));
}

#define CAT_(a, b) a##_##b
#define CAT(a, b) CAT_(a, b)
#define NAME(what) CAT(what, TYPE_NAME)

#define KEEP(value) (value)

/* Sums of float accumulate in double: loads, not additions, limit the speed. */
#define TYPE_NAME f64
#define ELEMENT double
#define SUM double
#define STATE double
#define UP KEEP
#define DOWN KEEP
#include "scan_cell.h"

#define TYPE_NAME f32
#define ELEMENT float
#define SUM double
#define STATE float
#define UP KEEP
#define DOWN(value) ((float)(value))
#include "scan_cell.h"

#define TYPE_NAME bf16
#define ELEMENT uint16_t
#define SUM float
#define STATE float
#define UP float_of_bf16
#define DOWN bf16_of_float
#include "scan_cell.h"

#define TYPE_NAME f16
#define ELEMENT uint16_t
#define SUM float
#define STATE float
#define UP float_of_half
#define DOWN half_of_float
#include "scan_cell.h"

#define TYPE_NAME i64
#define ELEMENT int64_t
#define SUM int64_t
#define UP KEEP
#define DOWN KEEP
#define INTEGER
#include "scan_cell.h"
#undef INTEGER

#include "scan_complex.h"

const struct scan_kernels TABLE = {
    .fold = {fold_f64, fold_f32, fold_bf16, fold_f16, fold_i64, NULL},
    .linear = {linear_f64, linear_f32, linear_bf16, linear_f16, NULL, linear_c64},
    .gradient = {gradient_f64, gradient_f32, gradient_bf16, gradient_f16, NULL, gradient_c64},
};
