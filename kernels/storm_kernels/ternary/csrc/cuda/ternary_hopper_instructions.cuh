// Wrappers of the instructions that ternary_hopper.cuh uses.
#pragma once

#include "ternary_planes.cuh"

constexpr u32 kMatrixBytes = 128;  // 8 rows of 16 bytes, the unit of the matrix instruction

// Returns bytes of `table` selected by the low 16 bits of `selector`, four bits per byte.
__device__ __forceinline__ u32 look_up(u32 table, u32 selector)
{
    u32 found;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(found) : "r"(table), "r"(selector));
    return found;
}

// The dynamic shared memory of the block.
__device__ __forceinline__ u8* shared_memory()
{
    extern __shared__ __align__(128) u8 memory[];
    return memory;
}

__device__ __forceinline__ u32 shared_address(const void* pointer)
{
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void init_barrier(u32 barrier, u32 arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes barriers that this thread initialised visible to copies.
__device__ __forceinline__ void publish_barriers()
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void arrive(u32 barrier)
{
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void arrive_and_expect(u32 barrier, u32 bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                 "r"(bytes)
                 : "memory");
}

// Waits until the phase with this parity is complete.
__device__ __forceinline__ void await(u32 barrier, u32 parity)
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

// Copies to shared memory; `barrier` counts the bytes as they arrive.
__device__ __forceinline__ void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
                 "[%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

// Copies 16 bytes to shared memory; bytes from `used` on become zeros.
__device__ __forceinline__ void copy_16(u32 to, const u8* from, u32 used)
{
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(used)
                 : "memory");
}

__device__ __forceinline__ void copy_8(u32 to, const u8* from, u32 used)
{
    asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 8, %2;" ::"r"(to), "l"(from),
                 "r"(used)
                 : "memory");
}

__device__ __forceinline__ u32 load_shared(u32 address)
{
    u32 word;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
    return word;
}

__device__ __forceinline__ void end_group_of_copies()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits for all groups of this thread's copies except the last `left`.
template <u32 left>
__device__ __forceinline__ void await_copies()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(left) : "memory");
}

__device__ __forceinline__ void begin_products()
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void end_group_of_products()
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <u32 left>
__device__ __forceinline__ void await_products()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(left) : "memory");
}

__device__ __forceinline__ u32 cluster_size()
{
    u32 size;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    return size;
}

__device__ __forceinline__ u32 cluster_rank()
{
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ void meet_cluster()
{
    asm volatile("barrier.cluster.arrive.release;\n"
                 "barrier.cluster.wait.acquire;" ::
                     : "memory");
}

// Loads the word at the same offset in the shared memory of the cluster's block `rank`.
__device__ __forceinline__ u32 load_of_rank(u32 address, u32 rank)
{
    u32 there, word;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(word) : "r"(there) : "memory");
    return word;
}

__device__ __forceinline__ void from_bits(int& to, u32 bits) { to = static_cast<int>(bits); }
__device__ __forceinline__ void from_bits(float& to, u32 bits) { to = __uint_as_float(bits); }

// Returns the instruction's descriptor of x: consecutive matrices of 8 rows of 16 bytes, those for
// registers h = 0 and 1 adjacent, then those of the next eight x, without swizzling.
__device__ __forceinline__ u64 described(u32 address)
{
    constexpr u64 along_columns = kMatrixBytes / 16, along_x = 2 * kMatrixBytes / 16;
    return (address & 0x3ffff) >> 4 | along_columns << 16 | along_x << 32;
}

// sums[n][i] += w * x: thread 4 g + t of warp v has row 16 v + g (i < 2) or 16 v + g + 8, and x
// number 8 n + 2 t + i % 2. Asynchronous: do not access sums or a before await_products.
template <u32 kEights>
struct Multiply;

#define NAMES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define NAMES_12 NAMES_8 ", %8, %9, %10, %11"
#define NAMES_16 NAMES_12 ", %12, %13, %14, %15"
#define NAMES_24 NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define NAMES_32 NAMES_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_48                                                                                   \
    NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define NAMES_64                                                                                   \
    NAMES_48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define FOUR_SUMS(kind, n)                                                                         \
    "+" kind(sums[n][0]), "+" kind(sums[n][1]), "+" kind(sums[n][2]), "+" kind(sums[n][3])
#define SUMS_8(kind) FOUR_SUMS(kind, 0), FOUR_SUMS(kind, 1)
#define SUMS_12(kind) SUMS_8(kind), FOUR_SUMS(kind, 2)
#define SUMS_16(kind) SUMS_12(kind), FOUR_SUMS(kind, 3)
#define SUMS_24(kind) SUMS_16(kind), FOUR_SUMS(kind, 4), FOUR_SUMS(kind, 5)
#define SUMS_32(kind) SUMS_24(kind), FOUR_SUMS(kind, 6), FOUR_SUMS(kind, 7)
#define SUMS_48(kind)                                                                              \
    SUMS_32(kind), FOUR_SUMS(kind, 8), FOUR_SUMS(kind, 9), FOUR_SUMS(kind, 10), FOUR_SUMS(kind, 11)
#define SUMS_64(kind)                                                                              \
    SUMS_48(kind), FOUR_SUMS(kind, 12), FOUR_SUMS(kind, 13), FOUR_SUMS(kind, 14),                  \
        FOUR_SUMS(kind, 15)

// `count` is the number of sums per thread; a0 to a3 and b are the numbers of the next operands.
#define MULTIPLY(eights, x, count, a0, a1, a2, a3, b)                                              \
    template <>                                                                                    \
    struct Multiply<eights> {                                                                      \
        static __device__ __forceinline__ void add(int (&sums)[eights][4], const u32 (&a)[4],      \
                                                   u64 described_x)                                \
        {                                                                                          \
            asm volatile("{\n.reg .pred adds;\nsetp.eq.u32 adds, 0, 0;\n"                          \
                         "wgmma.mma_async.sync.aligned.m64n" #x "k32.s32.s8.s8 {" NAMES_##count    \
                         "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b ", adds;\n}"          \
                         : SUMS_##count("r")                                                       \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(described_x));          \
        }                                                                                          \
        static __device__ __forceinline__ void add(float (&sums)[eights][4], const u32 (&a)[4],    \
                                                   u64 described_x)                                \
        {                                                                                          \
            asm volatile("{\n.reg .pred adds;\nsetp.eq.u32 adds, 0, 0;\n"                          \
                         "wgmma.mma_async.sync.aligned.m64n" #x "k16.f32.bf16.bf16 {" NAMES_##count \
                         "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b ", adds, 1, 1, 0;\n}" \
                         : SUMS_##count("f")                                                       \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(described_x));          \
        }                                                                                          \
    };
MULTIPLY(2, 16, 8, 8, 9, 10, 11, 12)
MULTIPLY(3, 24, 12, 12, 13, 14, 15, 16)
MULTIPLY(4, 32, 16, 16, 17, 18, 19, 20)
MULTIPLY(6, 48, 24, 24, 25, 26, 27, 28)
MULTIPLY(8, 64, 32, 32, 33, 34, 35, 36)
MULTIPLY(12, 96, 48, 48, 49, 50, 51, 52)
MULTIPLY(16, 128, 64, 64, 65, 66, 67, 68)
