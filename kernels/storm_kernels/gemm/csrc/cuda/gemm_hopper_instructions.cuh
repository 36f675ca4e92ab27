// Wrappers of the instructions that gemm_hopper.cuh uses.
// (PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions" and "Tensors".)
#pragma once

#include <gemm_device.cuh>

// A tensor's description for copies, created by cuTensorMapEncodeTiled.
struct alignas(64) TensorMap {
    u64 words[16];
};

DEVICE u32 shared_address(const void *pointer)
{
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

DEVICE void init_barrier(u32 barrier, u32 arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes barriers that this thread initialised visible to copies and to the cluster's other blocks.
DEVICE void publish_barriers()
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrives at the same barrier of the cluster's block `rank`. It has no release semantics, since it
// only signals completed reads: a release to the cluster would be a fence and lose the L1 cache's
// contents.
DEVICE void arrive_at(u32 barrier, u32 rank)
{
    asm volatile("{\n.reg .b32 there;\n"
                 "mapa.shared::cluster.u32 there, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(barrier),
                 "r"(rank)
                 : "memory");
}

DEVICE void arrive(u32 barrier)
{
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

DEVICE void arrive_and_expect(u32 barrier, u32 bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                 "r"(bytes)
                 : "memory");
}

// Waits until the phase with this parity is complete.
DEVICE void await(u32 barrier, u32 parity)
{
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n"
                 "}" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
}

// Copies a box of a matrix to shared memory. `barrier` counts the box's bytes, including the zeros
// that fill the box beyond the matrix's edges.
DEVICE void copy_box(u32 to, const TensorMap &map, u32 column, u32 row, u32 barrier)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
                 "[%1, {%2, %3}], [%4];" ::"r"(to),
                 "l"(&map), "r"(column), "r"(row), "r"(barrier)
                 : "memory");
}

// Like copy_box, but to the same offset in the shared memory of all blocks of the cluster in the
// mask `ranks`, and to their barriers.
DEVICE void copy_box_to(u32 to, const TensorMap &map, u32 column, u32 row, u32 barrier, u16 ranks)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
                 "l"(&map), "r"(column), "r"(row), "r"(barrier), "h"(ranks)
                 : "memory");
}

DEVICE void fetch_map(const TensorMap &map)
{
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

DEVICE void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void end_group_of_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits for all groups of products except the last `left`.
template <u32 left>
DEVICE void await_products()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(left) : "memory");
}

// From here on each thread of the warpgroup has `count` registers.
template <u32 count>
DEVICE void give_up_registers()
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}

template <u32 count>
DEVICE void take_registers()
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}

DEVICE u32 cluster_rank()
{
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

DEVICE void meet_cluster()
{
    asm volatile("barrier.cluster.arrive.release.aligned;\n"
                 "barrier.cluster.wait.acquire.aligned;" ::
                     : "memory");
}

#define NAMES_128                                                                                  \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
    "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define FOUR_SUMS(n) "+f"(sums[n][0]), "+f"(sums[n][1]), "+f"(sums[n][2]), "+f"(sums[n][3])
#define SUMS_128                                                                                   \
    FOUR_SUMS(0), FOUR_SUMS(1), FOUR_SUMS(2), FOUR_SUMS(3), \
    FOUR_SUMS(4), FOUR_SUMS(5), FOUR_SUMS(6), FOUR_SUMS(7), \
    FOUR_SUMS(8), FOUR_SUMS(9), FOUR_SUMS(10), FOUR_SUMS(11), \
    FOUR_SUMS(12), FOUR_SUMS(13), FOUR_SUMS(14), FOUR_SUMS(15), \
    FOUR_SUMS(16), FOUR_SUMS(17), FOUR_SUMS(18), FOUR_SUMS(19), \
    FOUR_SUMS(20), FOUR_SUMS(21), FOUR_SUMS(22), FOUR_SUMS(23), \
    FOUR_SUMS(24), FOUR_SUMS(25), FOUR_SUMS(26), FOUR_SUMS(27), \
    FOUR_SUMS(28), FOUR_SUMS(29), FOUR_SUMS(30), FOUR_SUMS(31)
// sums += a * b over 16 products, for 64 rows of a and 256 rows of b. Thread 4 g + t of warp v
// holds in sums[n][i] row 16 v + g (i < 2) or 16 v + g + 8, and column 8 n + 2 t + i % 2. If `adds`
// is 0, sums restart from zero. Asynchronous: do not access sums before await_products.
#define MULTIPLY(name, kind)                                                                       \
    DEVICE void name(float (&sums)[32][4], u64 a, u64 b, u32 adds)                                 \
    {                                                                                              \
        asm volatile("{\n.reg .pred adds;\nsetp.ne.u32 adds, %130, 0;\n"                          \
                     "wgmma.mma_async.sync.aligned.m64n256k16.f32." kind "." kind " {"             \
                     NAMES_128 "}, %128, %129, adds, 1, 1, 0, 0;\n}"                               \
                     : SUMS_128                                                                    \
                     : "l"(a), "l"(b), "r"(adds));                                                 \
    }
MULTIPLY(multiply_bfloat16, "bf16")
MULTIPLY(multiply_half, "f16")
