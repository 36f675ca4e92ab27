// Completes a blob whose fixed blocks and escapes are written: directory, records, header.
//
// Each block processes neighbouring tiles. It sums the record sizes of all earlier tiles, 4 bytes
// per tile, so no block waits for another. The last block knows the whole blob's size.
#pragma once

#include "gemm_finish.cuh"

constexpr u32 kRecordThreads = 256;
constexpr u32 kHeaderBytes = 256;
constexpr u32 kDirectoryAlign = 128;
constexpr u32 kTileChunks = kTile / kChunk;
constexpr u64 kCheckMix = 0xC3CF17102B7F7F87ull;  // C2
constexpr u32 kTotalAt = 24, kPayloadBytesAt = 72, kWindowAt = 80, kHeaderCheckAt = 248;

struct Blob {
    u8 *bytes;
    u64 room;            // bytes of the buffer; records that do not fit are not written
    const u8 *slots;
    const u32 *escapes;  // of each tile
    u64 *result;         // the blob's bytes, and whether they fit
    u32 base, unused;
};

struct Records {
    Blob blobs[kPanels];
    u64 elements, payload_offset;
    u32 tiles, blocks;   // blocks per blob
    u64 header[kHeaderBytes / 8];  // complete except window, sizes and check
};

// The block's shared memory.
struct RecordsShared {
    u32 sums[kRecordThreads / kWarp];
    u32 escapes[kRecordThreads], before[kRecordThreads];  // of a round of tiles
};

// Returns the sum over the block; `before` is set to the sum over earlier threads.
DEVICE u32 sum_of_block(u32 value, u32 *sums, u32 &before)
{
    const u32 lane = thread_in_block() % kWarp, warp = thread_in_block() / kWarp;
    u32 reached = value;
#pragma unroll
    for (u32 by = 1; by < kWarp; by *= 2) {
        const u32 below = from_lanes_below(reached, by);
        reached += lane >= by ? below : 0;
    }
    if (lane == kWarp - 1)
        sums[warp] = reached;
    meet_block();
    u32 total = 0;
    before = reached - value;
    for (u32 i = 0; i < threads_in_block() / kWarp; i++) {
        before += i < warp ? sums[i] : 0;
        total += sums[i];
    }
    meet_block();
    return total;
}

DEVICE u32 units_of(u32 escapes) { return (escapes + 7) / 8; }

// A warp writes a tile's record.
DEVICE void write_record(const Blob &blob, u64 elements, u32 tile, u64 begin, u32 escapes)
{
    const u32 lane = thread_in_block() % kWarp;
    const u64 chunk = static_cast<u64>(tile) * kTileChunks + lane;
    const bool is_there = chunk * kChunk < elements;
    const u8 *const slot = blob.slots + (is_there ? chunk : 0) * kSlotBytes;
    const u32 count = is_there ? slot[0] : 0;
    u32 end = count;
#pragma unroll
    for (u32 by = 1; by < kWarp; by *= 2) {
        const u32 below = from_lanes_below(end, by);
        end += lane >= by ? below : 0;
    }
    u8 *const to = blob.bytes + begin + end - count;
    for (u32 i = 0; i < count; i++)
        to[i] = slot[1 + i];
    if (lane < units_of(escapes) * 8 - escapes)
        blob.bytes[begin + escapes + lane] = 0;
}

DEVICE void write_header(const Records &records, const Blob &blob, u64 payload_bytes)
{
    u64 *const header = reinterpret_cast<u64 *>(blob.bytes);
    u64 check = 0;
    for (u32 i = 0; i < kHeaderBytes / 8 - 1; i++) {
        u64 word = records.header[i];
        if (i == kTotalAt / 8)
            word = records.payload_offset + payload_bytes;
        if (i == kPayloadBytesAt / 8)
            word = payload_bytes;
        if (i == kWindowAt / 8)
            word = blob.base * 0x0001000100010001ull + 0x0003000200010000ull;
        if (i == kWindowAt / 8 + 1)
            word = blob.base * 0x000100010001ull + 0x000600050004ull;
        header[i] = word;
        check = (check ^ word) * kCheckMix;
        check ^= check >> 29;
    }
    header[kHeaderCheckAt / 8] = check;
}

// Completes a blob's directory and writes its header; the blob's last block calls it.
DEVICE void end_blob(const Records &records, const Blob &blob, u64 units)
{
    const u64 payload_bytes = 8 * units, total = records.payload_offset + payload_bytes;
    u32 *const directory = reinterpret_cast<u32 *>(blob.bytes + kHeaderBytes);
    const u32 words = (records.tiles + 1 + kDirectoryAlign / 4 - 1) / (kDirectoryAlign / 4) * (kDirectoryAlign / 4);
    for (u32 i = records.tiles + thread_in_block(); i < words; i += threads_in_block())
        directory[i] = i == records.tiles ? static_cast<u32>(units) : 0;
    if (thread_in_block() == 0) {
        write_header(records, blob, payload_bytes);
        blob.result[0] = total;
        blob.result[1] = total <= blob.room;
    }
}

DEVICE void write_records(const Records &records)
{
    RecordsShared &shared = *reinterpret_cast<RecordsShared *>(shared_memory());
    const Blob &blob = records.blobs[block_index() / records.blocks];
    const u32 block = block_index() % records.blocks, thread = thread_in_block();
    const u32 each = (records.tiles + records.blocks - 1) / records.blocks;
    const u32 first = each * block < records.tiles ? each * block : records.tiles;
    const u32 last = records.tiles - first < each ? records.tiles : first + each;
    u32 *const directory = reinterpret_cast<u32 *>(blob.bytes + kHeaderBytes);
    u32 mine = 0, before;
    for (u32 tile = thread; tile < first; tile += threads_in_block())
        mine += units_of(blob.escapes[tile]);
    u64 units = sum_of_block(mine, shared.sums, before);
    for (u32 begin = first; begin < last; begin += threads_in_block()) {
        const u32 tile = begin + thread, escapes = tile < last ? blob.escapes[tile] : 0;
        const u32 total = sum_of_block(units_of(escapes), shared.sums, before);
        if (tile < last)
            directory[tile] = static_cast<u32>(units) + before;
        shared.escapes[thread] = escapes;
        shared.before[thread] = before;
        meet_block();
        for (u32 i = thread / kWarp; i < threads_in_block() && begin + i < last;
             i += threads_in_block() / kWarp) {
            const u64 at = records.payload_offset + 8 * (units + shared.before[i]);
            if (shared.escapes[i] && at + 8 * units_of(shared.escapes[i]) <= blob.room)
                write_record(blob, records.elements, begin + i, at, shared.escapes[i]);
        }
        units += total;
        meet_block();
    }
    if (block == records.blocks - 1)
        end_blob(records, blob, units);
}
