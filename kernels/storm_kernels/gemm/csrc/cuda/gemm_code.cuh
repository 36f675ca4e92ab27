// 32 neighbouring elements of a row, as ANCF's mode window codes them (ancf/FORMAT.md, sections 4
// and 5). Elements are rotated left by one bit, the exponent is the symbol, the rest is the
// residue, and the codes are (3, 0). The dictionary is seven consecutive exponents, so a code is
// the difference between the exponent and the first one.
#pragma once

#include <gemm_device.cuh>

constexpr u32 kTile = 4096;      // elements per ANCF tile
constexpr u32 kChunk = 128;      // elements that share a slot for escapes until records are written
constexpr u32 kSlotBytes = 160;  // a chunk's slot: number of escapes, then these; whole sectors
constexpr u32 kCodeBits = 3;
constexpr u32 kEscape = 7;       // the code of a symbol that is not in the window
constexpr u32 kPiece = 32;       // elements per lane
constexpr u32 kPieceWords = kPiece / 2;

struct Bfloat16 {
    static constexpr u32 kHighPlanes = 0;  // bit planes of a residue above its lowest eight bits
    static constexpr u32 kPlanes = kHighPlanes + kCodeBits;
    static constexpr u32 kBits = 8 + kPlanes;

    static DEVICE u32 symbols(u32 rotated) { return bytes_of(rotated, 0, 0x4341); }
    static DEVICE u32 symbol(u32 element) { return element >> 7 & 0xff; }
    static DEVICE u32 high_bytes(u32 symbols, u32) { return symbols; }
    static DEVICE u32 pack(float low, float high) { return pack_bfloat16(low, high); }
    static DEVICE float low(u32 word) { return float_of_bits(word << 16); }
    static DEVICE float high(u32 word) { return float_of_bits(word & 0xffff0000u); }
};

struct Half {
    static constexpr u32 kHighPlanes = 3;
    static constexpr u32 kPlanes = kHighPlanes + kCodeBits;
    static constexpr u32 kBits = 8 + kPlanes;

    static DEVICE u32 symbols(u32 rotated) { return rotated >> 11 & 0x001f001fu; }
    static DEVICE u32 symbol(u32 element) { return element >> 10 & 0x1f; }
    static DEVICE u32 high_bytes(u32 symbols, u32 residues) { return symbols << 3 | residues; }
    static DEVICE u32 pack(float low, float high) { return pack_half(low, high); }
    static DEVICE float low(u32 word) { return float_of_half(word & 0xffff); }
    static DEVICE float high(u32 word) { return float_of_half(word >> 16); }
};

// Planes of 32 elements; bit i of a word is element i.
template <class Format>
struct Planes {
    u32 residues[8];            // the lowest eight bits of each residue
    u32 bits[Format::kPlanes];  // the other bits of residues, then codes

    DEVICE u32 code(u32 b) const { return bits[Format::kHighPlanes + b]; }
    DEVICE u32 escapes() const { return code(0) & code(1) & code(2); }
};

// Both elements of a word, rotated left by one bit.
DEVICE u32 rotated(u32 word)
{
    constexpr u32 shifted = 0xfffefffeu;
    return (word << 1 & shifted) | (word >> 15 & ~shifted);
}

DEVICE u32 rotated_back(u32 word)
{
    constexpr u32 shifted = 0x7fff7fffu;
    return (word >> 1 & shifted) | (word << 15 & ~shifted);
}

// Returns bit b of each of eight bytes as bits 0 to 7.
DEVICE u32 bits_of_bytes(u32 first, u32 second, u32 b)
{
    const u32 mask = 0x01010101u << b;
    return dot_bytes(second & mask, 0x80402010u, dot_bytes(first & mask, 0x08040201u, 0)) >> b;
}

template <class Format>
DEVICE Planes<Format> planes_of(const u32 (&words)[kPieceWords], u32 base)
{
    const u32 less_base = ((0u - base) & 0xffffu) * 0x10001u;
    constexpr u32 most = kEscape * 0x10001u;
    Planes<Format> planes = {};
#pragma unroll
    for (u32 eight = 0; eight < 4; eight++) {
        u32 v[4], codes[4];
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            v[i] = rotated(words[4 * eight + i]);
            codes[i] = sums_at_most(Format::symbols(v[i]), less_base, most);
        }
        planes.residues[2 * eight] = bytes_of(v[0], v[1], 0x6420);
        planes.residues[2 * eight + 1] = bytes_of(v[2], v[3], 0x6420);
        const u32 first = bytes_of(codes[0], codes[1], 0x6420);
        const u32 second = bytes_of(codes[2], codes[3], 0x6420);
#pragma unroll
        for (u32 b = 0; b < kCodeBits; b++)
            planes.bits[Format::kHighPlanes + b] += bits_of_bytes(first, second, b) << 8 * eight;
        const u32 upper = bytes_of(v[0], v[1], 0x7531), upper_next = bytes_of(v[2], v[3], 0x7531);
#pragma unroll
        for (u32 b = 0; b < Format::kHighPlanes; b++)
            planes.bits[b] += bits_of_bytes(upper, upper_next, b) << 8 * eight;
    }
    return planes;
}

// Returns bits 0 to 3 as four bytes of 0 or 1.
DEVICE u32 bytes_of_bits(u32 bits) { return (bits & 15) * 0x00204081u & 0x01010101u; }

// Decodes planes to elements. `escapes` points to the symbols of the elements that are escapes.
template <class Format>
DEVICE void elements_of(const Planes<Format> &planes, u32 base, const u8 *escapes,
                        u32 (&words)[kPieceWords])
{
    const u32 missing = planes.escapes();
#pragma unroll
    for (u32 four = 0; four < 8; four++) {
        u32 symbols = base * 0x01010101u;
#pragma unroll
        for (u32 b = 0; b < kCodeBits; b++)
            symbols += bytes_of_bits(planes.code(b) >> 4 * four) << b;
        if (missing >> 4 * four & 15)
#pragma unroll
            for (u32 i = 0; i < 4; i++)
                if (missing >> (4 * four + i) & 1)
                    symbols = (symbols & ~(0xffu << 8 * i)) | static_cast<u32>(*escapes++) << 8 * i;
        u32 high = 0;
#pragma unroll
        for (u32 b = 0; b < Format::kHighPlanes; b++)
            high |= bytes_of_bits(planes.bits[b] >> 4 * four) << b;
        const u32 upper = Format::high_bytes(symbols, high), lower = planes.residues[four];
        words[2 * four] = rotated_back(bytes_of(lower, upper, 0x5140));
        words[2 * four + 1] = rotated_back(bytes_of(lower, upper, 0x7362));
    }
}

// The offsets of the planes of an element's piece in the blob.
struct Place {
    u64 residues, planes, step;  // bytes: offsets from the fixed blocks; plane to plane
};

template <class Format>
DEVICE Place place_of(u64 element, u64 elements)
{
    const u64 tile = element / kTile, at = element % kTile, left = elements - tile * kTile;
    const u64 size = left < kTile ? left : kTile, block = tile * (kTile / 8 * Format::kBits);
    return {block + at, block + size + at / 8, size / 8};
}

template <class Format>
DEVICE void store_residues(const Planes<Format> &planes, u8 *fixed, const Place &place)
{
    uint4 *const residues = reinterpret_cast<uint4 *>(fixed + place.residues);
    residues[0] = make_uint4(planes.residues[0], planes.residues[1], planes.residues[2], planes.residues[3]);
    residues[1] = make_uint4(planes.residues[4], planes.residues[5], planes.residues[6], planes.residues[7]);
}

template <class Format>
DEVICE Planes<Format> load_planes(const u8 *fixed, const Place &place)
{
    Planes<Format> planes = {};
    const uint4 *const residues = reinterpret_cast<const uint4 *>(fixed + place.residues);
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        const uint4 four = residues[i];
        planes.residues[4 * i] = four.x, planes.residues[4 * i + 1] = four.y;
        planes.residues[4 * i + 2] = four.z, planes.residues[4 * i + 3] = four.w;
    }
    const u8 *plane = fixed + place.planes;
#pragma unroll
    for (u32 b = 0; b < Format::kPlanes; b++, plane += place.step)
        planes.bits[b] = *reinterpret_cast<const u32 *>(plane);
    return planes;
}
