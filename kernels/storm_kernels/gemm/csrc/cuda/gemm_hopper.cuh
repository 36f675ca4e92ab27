// Matrix products on Hopper's tensor cores: rows of a times rows of weights; `finish` is the
// epilogue.
//
// One persistent block per multiprocessor processes many tiles. The first of its three warpgroups
// starts copies of 64 products each into the stages of a ring. The two others each multiply 64 rows
// with 256 rows of the weights, and run the epilogue. The 256 rows are 128 rows of each of two
// matrices (pairs), or neighbours in one.
//
// One of the two multiplying warpgroups begins `lead` steps before the other and remains ahead. So
// while one runs the epilogue of a tile, the other still multiplies.
//
// The blocks of a cluster have tiles of the same columns, so they need the same rows of weights.
// Each block copies its share of these rows to all blocks of the cluster.
#pragma once

#include "gemm_finish.cuh"
#include <gemm_hopper_instructions.cuh>

constexpr u32 kGroupThreads = 128;
constexpr u32 kConsumers = 2;  // warpgroups that multiply
constexpr u32 kThreads = kGroupThreads * (1 + kConsumers);
constexpr u32 kTileRows = 64 * kConsumers;
constexpr u32 kStep = 64;      // products
constexpr u32 kRowBytes = 2 * kStep;
constexpr u32 kLeftBytes = kTileRows * kRowBytes;
constexpr u32 kPanelBytes = kPanelColumns * kRowBytes;
constexpr u32 kStageBytes = kLeftBytes + kPanels * kPanelBytes;
constexpr u32 kStages = 4;
constexpr u32 kSwizzleAlign = 1024;
constexpr u32 kConsumerWarps = kConsumers * kGroupThreads / kWarp;
constexpr u32 kBarrierBytes = 16 * kStages + 16;
constexpr u32 kSharedBytes =
    kSwizzleAlign + kStages * kStageBytes + kConsumerWarps * kStagedBytes + kBarrierBytes;
static_assert(kSharedBytes <= 227 << 10, "a block has no more");

// Returns the instruction's descriptor of a matrix with rows of 128 bytes, swizzled as by copies
// with CU_TENSOR_MAP_SWIZZLE_128B: eight rows are 1,024 bytes, and the next eight follow. To
// advance by 16 products (32 bytes), add 2 to the descriptor.
DEVICE u64 described(u32 address)
{
    constexpr u64 eight_rows = 1024 / 16, swizzle_128 = 1;
    return (address & 0x3ffff) >> 4 | 1ull << 16 | eight_rows << 32 | swizzle_128 << 62;
}

// The order in which tiles are multiplied: `group` tiles of the same columns, then the next
// columns. So the tiles in progress at the same time share rows of both matrices.
struct Order {
    u32 across, down, group;

    DEVICE u32 count() const { return across * down; }
    DEVICE void find(u32 number, u32 &row, u32 &column) const
    {
        const u32 first = number / (group * across) * group;
        const u32 size = down - first < group ? down - first : group;
        row = first + number % (group * across) % size;
        column = number % (group * across) / size;
    }
};

struct Ring {
    u32 stage = 0, parity = 0;

    DEVICE void advance()
    {
        if (++stage == kStages)
            stage = 0, parity ^= 1;
    }
};

template <bool kPairs, u32 kCluster>
DEVICE void send(const TensorMap &left, const TensorMap &first, const TensorMap &second,
                 const Job &job, const Order &order, u32 memory, u32 full, u32 empty)
{
    constexpr u32 kShareRows = kPanelColumns / kCluster;
    const u32 rank = kCluster > 1 ? cluster_rank() : 0;
    Ring ring;
    for (u32 number = block_index() / kCluster; number < order.count(); number += blocks() / kCluster) {
        u32 row, column;
        order.find(number, row, column);
        row = (row * kCluster + rank) * kTileRows;
        column *= kPairs ? kPanelColumns : kPanels * kPanelColumns;
        for (u32 step = 0; step < job.steps; step++, ring.advance()) {
            const u32 barrier = full + 8 * ring.stage, to = memory + ring.stage * kStageBytes;
            const u32 share = to + kLeftBytes + rank * kShareRows * kRowBytes;
            const u32 weights = column + rank * kShareRows;
            await(empty + 8 * ring.stage, ring.parity ^ 1);
            arrive_and_expect(barrier, kStageBytes);
            copy_box(to, left, step * kStep, row, barrier);
            if (kCluster > 1) {
                constexpr u16 all = (1 << kCluster) - 1;
                copy_box_to(share, first, step * kStep, weights, barrier, all);
                copy_box_to(share + kPanelBytes, second, step * kStep,
                            weights + (kPairs ? 0 : kPanelColumns), barrier, all);
            } else {
                copy_box(share, first, step * kStep, weights, barrier);
                copy_box(share + kPanelBytes, second, step * kStep,
                         weights + (kPairs ? 0 : kPanelColumns), barrier);
            }
        }
    }
}

template <u32 kCluster>
DEVICE void release(u32 barrier)
{
    if (thread_in_block() % kWarp)
        return;
    if (kCluster == 1)
        arrive(barrier);
    else
#pragma unroll
        for (u32 rank = 0; rank < kCluster; rank++)
            arrive_at(barrier, rank);
}

template <class Format, bool kPairs, bool kEncodes, u32 kActivation, bool kBias, u32 kCluster>
DEVICE void multiply(const Job &job, const Order &order, u8 *staged, u32 memory, u32 full, u32 empty)
{
    const u32 group = thread_in_block() / kGroupThreads - 1;
    const u32 warp = thread_in_block() / kWarp % 4;
    const u32 rank = kCluster > 1 ? cluster_rank() : 0;
    const u32 started = empty + 8 * kStages;
    u32 until_started = group == 0 ? job.lead : 0;
    float sums[kGroups][4];
    Ring ring;
    if (group == 1 && job.lead)
        await(started, 0);
    for (u32 number = block_index() / kCluster; number < order.count(); number += blocks() / kCluster) {
        u32 row, column, previous = 0;
        order.find(number, row, column);
        for (u32 step = 0; step < job.steps; step++, ring.advance()) {
            const u32 at = memory + ring.stage * kStageBytes;
            const u64 left = described(at + group * 64 * kRowBytes), right = described(at + kLeftBytes);
            await(full + 8 * ring.stage, ring.parity);
            begin_products();
#pragma unroll
            for (u32 i = 0; i < kStep / 16; i++)
                if (Format::kHighPlanes)
                    multiply_half(sums, left + 2 * i, right + 2 * i, step + i);
                else
                    multiply_bfloat16(sums, left + 2 * i, right + 2 * i, step + i);
            end_group_of_products();
            if (until_started && --until_started == 0 && thread_in_block() % kWarp == 0)
                arrive(started);
            await_products<1>();
            if (step)
                release<kCluster>(previous);
            previous = empty + 8 * ring.stage;
        }
        await_products<0>();
        release<kCluster>(previous);
        finish<Format, kPairs, kEncodes, kActivation, kBias>(
            sums, staged, job, (row * kCluster + rank) * kTileRows + group * 64 + warp * kWarpRows,
            column * (kPairs ? kPanelColumns : kPanels * kPanelColumns));
    }
}

template <class Format, bool kPairs, bool kEncodes, u32 kActivation, bool kBias, u32 kCluster>
DEVICE void hopper_product(const TensorMap &left, const TensorMap &first, const TensorMap &second,
                           const Job &job)
{
    u8 *const begin = shared_memory();
    const u32 skipped = (0u - shared_address(begin)) % kSwizzleAlign;
    const u32 memory = shared_address(begin) + skipped, thread = thread_in_block();
    u8 *const staged = begin + skipped + kStages * kStageBytes;
    const u32 full = shared_address(staged) + kConsumerWarps * kStagedBytes, empty = full + 8 * kStages;
    const u32 wide = kPairs ? kPanelColumns : kPanels * kPanelColumns, high = kTileRows * kCluster;
    const Order order = {(job.columns + wide - 1) / wide, (job.rows + high - 1) / high, job.group};
    if (thread == 0) {
        fetch_map(left), fetch_map(first), fetch_map(second);
        for (u32 i = 0; i < kStages; i++) {
            init_barrier(full + 8 * i, 1);
            init_barrier(empty + 8 * i, kConsumerWarps * kCluster);
        }
        init_barrier(empty + 8 * kStages, kGroupThreads / kWarp);
        publish_barriers();
    }
    if (kCluster > 1)
        meet_cluster();
    else
        meet_block();
    if (thread < kGroupThreads) {
        give_up_registers<40>();
        if (thread == 0)
            send<kPairs, kCluster>(left, first, second, job, order, memory, full, empty);
    } else {
        take_registers<232>();
        const u32 warp = thread / kWarp - kGroupThreads / kWarp;
        multiply<Format, kPairs, kEncodes, kActivation, kBias, kCluster>(
            job, order, staged + warp * kStagedBytes, memory, full, empty);
    }
    if (kCluster > 1) {
        meet_warp();
        meet_cluster();  // the other blocks may still write to this block's shared memory
    }
}
