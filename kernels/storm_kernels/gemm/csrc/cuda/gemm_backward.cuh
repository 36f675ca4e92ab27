// Computes the gradients of gate and up, and recomputes activation(gate) * up, from the blobs of
// gate and up. The kernel decodes in registers, so decoded gate and up are never written to memory.
#pragma once

#include "gemm_records.cuh"

constexpr u32 kBackwardThreads = 256;

struct Encoded {
    const u8 *bytes;
    u32 base, unused;
};

struct Backward {
    Encoded gate, up;
    const u8 *grad;         // of the product
    u8 *out, *grad_gate, *grad_up;
    u64 elements, fixed_offset, payload_offset;
    u32 tiles, unused;
};

// A warp's shared memory: 64 bytes per lane, in pieces of 16 bytes whose order avoids bank
// conflicts between lanes. Neighbouring lanes read and write neighbouring pieces of global memory.
constexpr u32 kLaneBytes = 2 * kPiece;
constexpr u32 kExchangeBytes = kWarp * kLaneBytes;
constexpr u32 kBackwardShared = kBackwardThreads / kWarp * kExchangeBytes;

DEVICE uint4 *exchanged(u8 *memory, u32 lane, u32 piece)
{
    return reinterpret_cast<uint4 *>(memory + lane * kLaneBytes + (piece ^ lane / 2 % 4) * 16);
}

// Loads the elements of all lanes; only `bytes` of them exist.
DEVICE void load_elements(const u8 *from, u64 bytes, u8 *memory, u32 (&words)[kPieceWords])
{
    const u32 lane = thread_in_block() % kWarp;
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        const u32 piece = kWarp * i + lane;
        if (16 * piece < bytes)
            *exchanged(memory, piece / 4, piece % 4) = reinterpret_cast<const uint4 *>(from)[piece];
    }
    meet_warp();
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        const uint4 four = *exchanged(memory, lane, i);
        words[4 * i] = four.x, words[4 * i + 1] = four.y;
        words[4 * i + 2] = four.z, words[4 * i + 3] = four.w;
    }
    meet_warp();
}

DEVICE void store_elements(const u32 (&words)[kPieceWords], u8 *memory, u64 bytes, u8 *to)
{
    const u32 lane = thread_in_block() % kWarp;
#pragma unroll
    for (u32 i = 0; i < 4; i++)
        *exchanged(memory, lane, i) =
            make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
    meet_warp();
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        const u32 piece = kWarp * i + lane;
        if (16 * piece < bytes)
            reinterpret_cast<uint4 *>(to)[piece] = *exchanged(memory, piece / 4, piece % 4);
    }
    meet_warp();
}

// Decodes the lane's 32 elements. `escapes` points to the warp's next escape, and the function
// advances it. All lanes call it.
template <class Format>
DEVICE void decode(const Backward &job, const Encoded &blob, const Place &place, bool is_there,
                   const u8 *&escapes, u32 (&words)[kPieceWords])
{
    Planes<Format> planes = {};
    if (is_there)
        planes = load_planes<Format>(blob.bytes + job.fixed_offset, place);
    const u32 lane = thread_in_block() % kWarp, count = count_ones(planes.escapes());
    u32 end = count;
#pragma unroll
    for (u32 by = 1; by < kWarp; by *= 2) {
        const u32 below = from_lanes_below(end, by);
        end += lane >= by ? below : 0;
    }
    elements_of(planes, blob.base, escapes + end - count, words);
    escapes += from_lane(end, kWarp - 1);
}

// Each warp processes one tile.
template <class Format, u32 kActivation>
DEVICE void gated_backward(const Backward &job)
{
    const u32 lane = thread_in_block() % kWarp, warps = threads_in_block() / kWarp;
    const u32 tile = block_index() * warps + thread_in_block() / kWarp;
    if (tile >= job.tiles)
        return;
    const u8 *escapes[2];
    const Encoded *const blobs[2] = {&job.gate, &job.up};
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        const u32 *const directory = reinterpret_cast<const u32 *>(blobs[i]->bytes + kHeaderBytes);
        escapes[i] = blobs[i]->bytes + job.payload_offset + 8ull * directory[tile];
    }
    u8 *const memory = shared_memory() + thread_in_block() / kWarp * kExchangeBytes;
    for (u32 part = 0; part < kTile / (kWarp * kPiece); part++) {
        const u64 first = static_cast<u64>(tile) * kTile + part * kWarp * kPiece;
        if (first >= job.elements)
            return;
        const u64 element = first + lane * kPiece, bytes = 2 * (job.elements - first);
        const bool is_there = element < job.elements;
        const Place place = place_of<Format>(is_there ? element : 0, job.elements);
        u32 gate[kPieceWords], up[kPieceWords], grad[kPieceWords];
        decode<Format>(job, job.gate, place, is_there, escapes[0], gate);
        decode<Format>(job, job.up, place, is_there, escapes[1], up);
        load_elements(job.grad + 2 * first, bytes, memory, grad);
#pragma unroll
        for (u32 i = 0; i < kPieceWords; i++) {
            const u32 activated = activated_word<Format, kActivation>(gate[i]);
            const u32 of_gate = gate_gradient_word<Format, kActivation>(
                gate[i], product_word<Format>(grad[i], up[i]));
            grad[i] = product_word<Format>(grad[i], activated);
            up[i] = product_word<Format>(activated, up[i]);
            gate[i] = of_gate;
        }
        store_elements(gate, memory, bytes, job.grad_gate + 2 * first);
        store_elements(grad, memory, bytes, job.grad_up + 2 * first);
        store_elements(up, memory, bytes, job.out + 2 * first);
    }
}
