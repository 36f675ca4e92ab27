// The epilogue of a tile: rounds its sums, stores them raw or encoded, and computes the gated
// product of two panels.
//
// A warp holds 16 rows of two panels of 128 columns, in the layout of the instruction m64n256k16.
// It rearranges half of both panels' columns at a time through shared memory. Then each lane has 32
// neighbouring elements of a row of each panel, from which it builds ANCF's planes.
#pragma once

#include "gemm_activation.cuh"

constexpr u32 kPanelColumns = 128;
constexpr u32 kPanels = 2;
constexpr u32 kGroups = 2 * kPanelColumns / 8;  // groups of eight columns, in both panels
constexpr u32 kWarpRows = 16;
constexpr u32 kHalfColumns = 64;
constexpr u32 kStagedRow = 2 * kHalfColumns;    // bytes
constexpr u32 kStagedPanel = kWarpRows * kStagedRow;
constexpr u32 kStagedBytes = kPanels * kStagedPanel;  // a warp's shared memory

// The addresses to which a panel's elements are encoded, each a multiple of 16 bytes.
struct Coding {
    u8 *fixed;     // the blob's fixed blocks
    u8 *slots;     // kSlotBytes for each kChunk elements
    u32 *escapes;  // the number of escapes of each tile; the kernel adds to it
    u32 base;      // the window's first symbol
    u32 unused;
};

struct Job {
    u8 *out;              // the combination of the two panels (pairs), or each panel itself
    const u8 *bias[kPanels];
    Coding codings[kPanels];
    u32 rows, columns;    // of every result; columns are a multiple of kPanelColumns
    u32 steps;            // steps of 64 products per element
    u32 group;            // tiles of the same columns that are processed one after another
    u32 lead;             // steps; at most `steps`, and fewer than the ring's stages
    u32 unused;
};

template <class Format, bool kBias>
DEVICE u32 rounded(const float (&sums)[4], u32 i, const u8 *bias, u32 column)
{
    float low = sums[2 * i], high = sums[2 * i + 1];
    if (kBias) {
        const u32 word = *reinterpret_cast<const u32 *>(bias + 2 * column);
        low += Format::low(word), high += Format::high(word);
    }
    return Format::pack(low, high);
}

// Writes half of a panel into the warp's shared memory: rows of 128 bytes, each in pieces of 16
// bytes whose order avoids bank conflicts between lanes.
template <class Format, bool kBias>
DEVICE void stage(const float (&sums)[kGroups][4], u32 panel, u32 half, const u8 *bias, u32 column,
                  u8 *staged)
{
    const u32 lane = thread_in_block() % kWarp, matrix = lane / 8, mine = column + lane % 4 * 2;
    u8 *const row = staged + (lane % 8 + matrix % 2 * 8) * kStagedRow;
#pragma unroll
    for (u32 two = 0; two < 4; two++) {
        const u32 g = kGroups / 2 * panel + 8 * half + 2 * two;
        const u32 c = mine + 16 * two;
        store_matrices(row + ((2 * two + matrix / 2) ^ lane % 8) * 16,
                       rounded<Format, kBias>(sums[g], 0, bias, c),
                       rounded<Format, kBias>(sums[g], 1, bias, c),
                       rounded<Format, kBias>(sums[g + 1], 0, bias, c + 8),
                       rounded<Format, kBias>(sums[g + 1], 1, bias, c + 8));
    }
}

// Returns the address of the lane's 16-byte piece number `eight` (eight of its 32 elements).
DEVICE const u8 *staged_piece(const u8 *staged, u32 eight)
{
    const u32 lane = thread_in_block() % kWarp, row = lane / 2;
    return staged + row * kStagedRow + ((4 * (lane % 2) + eight) ^ row % 8) * 16;
}

DEVICE void load_staged(const u8 *staged, u32 (&words)[kPieceWords])
{
#pragma unroll
    for (u32 eight = 0; eight < 4; eight++) {
        const uint4 four = *reinterpret_cast<const uint4 *>(staged_piece(staged, eight));
        words[4 * eight] = four.x, words[4 * eight + 1] = four.y;
        words[4 * eight + 2] = four.z, words[4 * eight + 3] = four.w;
    }
}

DEVICE void stage_again(u8 *staged, const u32 (&words)[kPieceWords])
{
#pragma unroll
    for (u32 eight = 0; eight < 4; eight++)
        *reinterpret_cast<uint4 *>(const_cast<u8 *>(staged_piece(staged, eight))) =
            make_uint4(words[4 * eight], words[4 * eight + 1], words[4 * eight + 2], words[4 * eight + 3]);
}

// Copies a staged half of a panel to rows of `pitch` bytes, eight lanes per row: whole cache lines.
DEVICE void store_staged(const u8 *staged, u8 *to, u64 pitch, u32 rows)
{
    const u32 lane = thread_in_block() % kWarp, piece = lane % 8;
#pragma unroll
    for (u32 four = 0; four < kWarpRows; four += 4) {
        const u32 row = four + lane / 8;
        const uint4 eight =
            *reinterpret_cast<const uint4 *>(staged + row * kStagedRow + (piece ^ row % 8) * 16);
        if (row < rows)
            *reinterpret_cast<uint4 *>(to + row * pitch + 16 * piece) = eight;
    }
}

// Encodes a lane's 32 elements except their bit planes. Two neighbouring lanes hold 64 elements of
// a chunk; `before` is the number of escapes among the chunk's earlier elements. Returns `before`
// plus the escapes of both lanes. All lanes call it.
template <class Format>
DEVICE u32 encode(const Planes<Format> &planes, const u8 *staged, const Coding &to, u64 element,
                  const Place &place, u32 before, bool is_there)
{
    u32 escapes = is_there ? planes.escapes() : 0;
    const u32 count = count_ones(escapes), other = from_lane_across(count, 1);
    if (is_there) {
        store_residues(planes, to.fixed, place);
        u8 *slot = to.slots + element / kChunk * kSlotBytes + 1 + before;
        slot += thread_in_block() % 2 ? other : 0;
        for (; escapes; escapes &= escapes - 1) {
            const u32 i = lowest_one(escapes);
            const u8 *const found = staged_piece(staged, i / 8) + i % 8 * 2;
            *slot++ = static_cast<u8>(Format::symbol(*reinterpret_cast<const u16 *>(found)));
        }
    }
    return before + count + other;
}

// Stores the bit planes of a chunk. Two neighbouring lanes hold its first half in `first` and its
// second half in `second`, and each lane stores one half. `place` is that of the lane's `second`.
template <class Format>
DEVICE void store_bits(const u32 (&first)[Format::kPlanes], const u32 (&second)[Format::kPlanes],
                       u8 *fixed, const Place &place, bool is_there)
{
    const bool is_odd = thread_in_block() % 2;
    u8 *plane = fixed + place.planes - (is_odd ? 4 : 8);
#pragma unroll
    for (u32 b = 0; b < Format::kPlanes; b++, plane += place.step) {
        const u32 other = from_lane_across(is_odd ? first[b] : second[b], 1);
        if (is_there)
            *reinterpret_cast<uint2 *>(plane) =
                make_uint2(is_odd ? other : first[b], is_odd ? second[b] : other);
    }
}

// Stores the number of escapes of a chunk; the lane that completes the chunk calls it.
DEVICE void close_chunk(const Coding &to, u64 element, u32 escaped)
{
    to.slots[element / kChunk * kSlotBytes] = static_cast<u8>(escaped);
    if (escaped)
        add_to(to.escapes + element / kTile, escaped);
}

// With kPairs the panels are the same columns of two products, else neighbouring columns of one.
// `staged` is the warp's shared memory, kStagedBytes long.
template <class Format, bool kPairs, bool kEncodes, u32 kActivation, bool kBias>
DEVICE void finish(const float (&sums)[kGroups][4], u8 *staged, const Job &job, u32 first_row,
                   u32 first_column)
{
    const u32 lane = thread_in_block() % kWarp, row = first_row + lane / 2;
    const u64 elements = static_cast<u64>(job.rows) * job.columns;
    const u32 rows_left = first_row < job.rows ? job.rows - first_row : 0;
    const u64 pitch = 2ull * job.columns;
    u32 escaped[kPanels] = {}, bits[kPanels][Format::kPlanes];
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        const u32 column = first_column + half * kHalfColumns;
        const u64 corner = first_row * pitch + 2 * column;  // bytes
        u32 words[kPanels][kPieceWords];
#pragma unroll
        for (u32 panel = 0; panel < kPanels; panel++) {
            const u32 begin = column + (kPairs ? 0 : panel * kPanelColumns);
            if (kPairs || begin < job.columns)
                stage<Format, kBias>(sums, panel, half, job.bias[panel], begin,
                                     staged + panel * kStagedPanel);
        }
        meet_warp();
#pragma unroll
        for (u32 panel = 0; panel < kPanels; panel++) {
            const u32 begin = column + (kPairs ? 0 : panel * kPanelColumns);
            const bool is_panel = kPairs || begin < job.columns;
            const u8 *const mine = staged + panel * kStagedPanel;
            if (!kPairs && is_panel)
                store_staged(mine, job.out + corner + 2 * (begin - column), pitch, rows_left);
            if (!kPairs && !kEncodes)
                continue;
            load_staged(mine, words[panel]);
            if (kEncodes) {
                const bool is_there = row < job.rows && is_panel;
                const u64 element = static_cast<u64>(row) * job.columns + begin + lane % 2 * kPiece;
                const Coding &to = job.codings[panel];
                const Planes<Format> planes = planes_of<Format>(words[panel], to.base);
                const Place place = place_of<Format>(element, elements);
                escaped[panel] = encode(planes, mine, to, element, place, escaped[panel], is_there);
                if (half == 0)
#pragma unroll
                    for (u32 b = 0; b < Format::kPlanes; b++)
                        bits[panel][b] = planes.bits[b];
                else
                    store_bits<Format>(bits[panel], planes.bits, to.fixed, place, is_there);
                if (half == 1 && lane % 2 == 1 && is_there)
                    close_chunk(to, element, escaped[panel]);
            }
        }
        if (kPairs) {
#pragma unroll
            for (u32 i = 0; i < kPieceWords; i++)
                words[0][i] = gated_word<Format, kActivation>(words[0][i], words[1][i]);
            stage_again(staged, words[0]);
            meet_warp();
            store_staged(staged, job.out + corner, pitch, rows_left);
        }
        meet_warp();
    }
}
