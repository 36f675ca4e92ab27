// The gradients of gate and up, and activation(gate) * up again, from blobs: decoded on the way, so
// that neither is ever written as it was.
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

DEVICE void load_raw(const u8 *from, u32 (&words)[kPieceWords])
{
#pragma unroll
    for (u32 i = 0; i < kPieceWords / 4; i++) {
        const uint4 four = reinterpret_cast<const uint4 *>(from)[i];
        words[4 * i] = four.x, words[4 * i + 1] = four.y;
        words[4 * i + 2] = four.z, words[4 * i + 3] = four.w;
    }
}

// The lane's 32 elements. `escapes` points at the warp's next, and is moved on. All lanes call it.
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

// A warp has a tile.
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
    for (u32 part = 0; part < kTile / (kWarp * kPiece); part++) {
        const u64 element = static_cast<u64>(tile) * kTile + (part * kWarp + lane) * kPiece;
        const bool is_there = element < job.elements;
        const Place place = place_of<Format>(is_there ? element : 0, job.elements);
        u32 gate[kPieceWords], up[kPieceWords], grad[kPieceWords];
        decode<Format>(job, job.gate, place, is_there, escapes[0], gate);
        decode<Format>(job, job.up, place, is_there, escapes[1], up);
        if (!is_there)
            continue;
        load_raw(job.grad + 2 * element, grad);
#pragma unroll
        for (u32 i = 0; i < kPieceWords; i++) {
            const u32 activated = activated_word<Format, kActivation>(gate[i]);
            const u32 of_gate = gate_gradient_word<Format, kActivation>(
                gate[i], product_word<Format>(grad[i], up[i]));
            grad[i] = product_word<Format>(grad[i], activated);
            up[i] = product_word<Format>(activated, up[i]);
            gate[i] = of_gate;
        }
        store_raw(gate, job.grad_gate + 2 * element);
        store_raw(grad, job.grad_up + 2 * element);
        store_raw(up, job.out + 2 * element);
    }
}
