/* The kernels for Hopper on a CPU, one fibre a CUDA thread, with PTX's words on their instructions
 * as code: which thread's register is which element, and what a descriptor reads. What is
 * asynchronous is done as late as PTX allows (products, copies of planes) or at once (copies of x),
 * so that a register or place that is used again too early shows as a wrong result.
 */
#include "../cuda_on_cpu/emulate.h"

#include <map>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)

static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector)
{
    const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
    unsigned found = 0;
    for (unsigned i = 0; i < 4; i++)
        found |= static_cast<unsigned>(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return found;
}
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __uint_as_float(unsigned bits)
{
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

#include "ternary_planes.cuh"

constexpr u32 kMatrixBytes = 128;
constexpr u32 kBase = 1024;  // where shared memory begins, so that address 0 is none
constexpr u32 kGroup = 128;

static unsigned ranks = 1;  // blocks of a cluster

struct Barrier {
    u32 wanted = 0, left = 0, phase = 0;
    i64 bytes = 0;

    void settle()
    {
        if (left == 0 && bytes == 0) {
            left = wanted;
            phase++;
            emulation::progress++;
        }
    }
};

struct Product {
    u64 described;
    const u32* a[kGroup];
    void* sums[kGroup];
};

struct Warpgroup {
    emulation::Meeting meeting;
    std::vector<Product> open;                  // of the group that has not ended
    std::vector<std::vector<Product>> pending;  // groups, the oldest first
    u32 posted = 0;
};

struct Copy {
    u8* to;
    const u8* from;
    u32 size, used;
};

struct Thread {
    std::vector<Copy> open;
    std::vector<std::vector<Copy>> pending;
};

struct BlockState {
    std::map<u32, Barrier> barriers;
    std::map<u32, Warpgroup> warpgroups;
    std::map<u32, Thread> threads;
    u8* memory;
};

struct Cluster {
    emulation::Meeting meeting;
};

static std::map<unsigned, BlockState> states;  // by the block's number
static std::map<unsigned, Cluster> clusters;
static emulation::Meeting* barrier_of_block() { return &emulation::current->block->barriers[0]; }

static BlockState& state() { return states[blockIdx.x]; }
static void __syncthreads() { emulation::meet(*barrier_of_block(), emulation::block_dim); }
static void __syncwarp() { emulation::meet(emulation::warp().meeting, 32); }

static u32 look_up(u32 table, u32 selector)
{
    if (selector & 0x8888)
        std::abort();  // PTX would spread a sign
    return __byte_perm(table, 0, selector);
}

static u8* shared_memory()
{
    u8* at = emulation::current->block->shared.data();
    at += -reinterpret_cast<uintptr_t>(at) % 16;
    state().memory = at;
    return at;
}
static u32 shared_address(const void* pointer)
{
    return kBase + static_cast<u32>(static_cast<const u8*>(pointer) - state().memory);
}
static u8* at_address(u32 address, unsigned block)
{
    BlockState& its = states[block];
    return its.memory + (address - kBase);
}
static u8* mine(u32 address) { return at_address(address, blockIdx.x); }

static void init_barrier(u32 barrier, u32 arrivals)
{
    state().barriers[barrier] = Barrier{arrivals, arrivals, 0, 0};
}
static void publish_barriers() {}
static void arrive(u32 barrier)
{
    Barrier& it = state().barriers.at(barrier);
    if (it.left-- == 0)
        std::abort();
    it.settle();
}
static void arrive_and_expect(u32 barrier, u32 bytes)
{
    state().barriers.at(barrier).bytes += bytes;
    arrive(barrier);
}
static void await(u32 barrier, u32 parity)
{
    while ((state().barriers.at(barrier).phase & 1) == parity)
        emulation::yield();
}
static void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier)
{
    if (to % 16 || bytes % 16 || reinterpret_cast<uintptr_t>(from) % 16)
        std::abort();
    std::memcpy(mine(to), from, bytes);
    state().barriers.at(barrier).bytes -= bytes;
    state().barriers.at(barrier).settle();
}
static void copy(u32 to, const u8* from, u32 size, u32 used)
{
    if (to % size || reinterpret_cast<uintptr_t>(from) % size || used > size)
        std::abort();
    state().threads[threadIdx.x].open.push_back({mine(to), from, size, used});
}
static void copy_16(u32 to, const u8* from, u32 used) { copy(to, from, 16, used); }
static void copy_8(u32 to, const u8* from, u32 used) { copy(to, from, 8, used); }
static u32 load_shared(u32 address)
{
    u32 word;
    std::memcpy(&word, mine(address), 4);
    return word;
}
static void end_group_of_copies()
{
    Thread& it = state().threads[threadIdx.x];
    it.pending.push_back(std::move(it.open));
    it.open.clear();
}
template <u32 left>
static void await_copies()
{
    auto& pending = state().threads[threadIdx.x].pending;
    for (; pending.size() > left; pending.erase(pending.begin()))
        for (const Copy& copy : pending.front()) {
            std::memset(copy.to, 0, copy.size);
            std::memcpy(copy.to, copy.from, copy.used);
        }
}

static u32 cluster_size() { return ranks; }
static u32 cluster_rank() { return blockIdx.x % ranks; }
static void meet_cluster()
{
    emulation::meet(clusters[blockIdx.x / ranks].meeting, ranks * emulation::block_dim);
}
static u32 load_of_rank(u32 address, u32 rank)
{
    u32 word;
    std::memcpy(&word, at_address(address, blockIdx.x / ranks * ranks + rank), 4);
    return word;
}
static void from_bits(int& to, u32 bits) { to = static_cast<int>(bits); }
static void from_bits(float& to, u32 bits) { to = __uint_as_float(bits); }

static Warpgroup& warpgroup() { return state().warpgroups[threadIdx.x / kGroup]; }
static void begin_products() { emulation::meet(warpgroup().meeting, kGroup); }
static void end_group_of_products()
{
    Warpgroup& it = warpgroup();
    if (++it.posted == kGroup) {
        it.pending.push_back(std::move(it.open));
        it.open.clear();
        it.posted = 0;
    }
    emulation::meet(it.meeting, kGroup);
}

// Element number `i` of a register.
template <class T>
static T element(u32 word, u32 i);
template <>
int element<int>(u32 word, u32 i)
{
    return static_cast<signed char>(word >> 8 * i);
}
template <>
float element<float>(u32 word, u32 i)
{
    return __uint_as_float((word >> 16 * i) << 16);
}

static u64 described(u32 address)
{
    constexpr u64 along_columns = kMatrixBytes / 16, along_x = 2 * kMatrixBytes / 16;
    return (address & 0x3ffff) >> 4 | along_columns << 16 | along_x << 32;
}

// D += A B, as PTX has m64nNk(256 bits): elements of 256 bits of a row of A and of a column of B.
template <class T, u32 eights>
static void perform(const Product& product)
{
    constexpr u32 in_word = sizeof(T) == 4 && std::is_same<T, int>::value ? 4 : 2;
    const u32 start = (product.described & 0x3fff) << 4;
    const u32 leading = (product.described >> 16 & 0x3fff) << 4;
    const u32 stride = (product.described >> 32 & 0x3fff) << 4;
    for (u32 m = 0; m < 64; m++)
        for (u32 n = 0; n < 8 * eights; n++) {
            T sum = 0;
            for (u32 k = 0; k < 8 * in_word; k++) {
                // A: row m % 8 + 8 r of warp m / 16 is in threads 4 (m % 8) + t; columns go through
                // a register, then through threads, then on to the next two registers.
                const u32 register_of_a = m / 8 % 2 + 2 * (k / (4 * in_word));
                const u32 thread = m / 16 * 32 + m % 8 * 4 + k / in_word % 4;
                const u32 a = product.a[thread][register_of_a];
                // B: 16 bytes of columns a row of a matrix, matrices apart by `leading` along
                // columns and by `stride` along x.
                const u32 at = start + k / (4 * in_word) * leading + n / 8 * stride + n % 8 * 16 +
                               k % (4 * in_word) / in_word * 4;
                u32 b;
                std::memcpy(&b, mine(at), 4);
                sum += element<T>(a, k % in_word) * element<T>(b, k % in_word);
            }
            const u32 thread = m / 16 * 32 + m % 8 * 4 + n % 8 / 2;
            static_cast<T*>(product.sums[thread])[n / 8 * 4 + m / 8 % 2 * 2 + n % 2] += sum;
        }
}

static std::function<void(const Product&)> performed;

template <u32 left>
static void await_products()
{
    Warpgroup& it = warpgroup();
    // The last to come does it, before anybody goes on.
    if (it.meeting.arrived == kGroup - 1)
        for (; it.pending.size() > left; it.pending.erase(it.pending.begin()))
            for (const Product& product : it.pending.front())
                performed(product);
    emulation::meet(it.meeting, kGroup);
}

template <u32 kEights>
struct Multiply {
    template <class T>
    static void add(T (&sums)[kEights][4], const u32 (&a)[4], u64 described_x)
    {
        Warpgroup& it = warpgroup();
        const u32 thread = threadIdx.x % kGroup;
        if (it.posted == 0 && !it.meeting.arrived)
            it.open.push_back({described_x, {}, {}});
        it.open.back().a[thread] = a;
        it.open.back().sums[thread] = sums;
        performed = perform<T, kEights>;
        emulation::meet(it.meeting, kGroup);
    }
};

#include "ternary_hopper.cuh"

template <class Math, u32 kEights>
static bool product(const HopperArguments& to, unsigned groups, size_t shared_bytes)
{
    const unsigned rows = 64 * groups, tiles = (to.batch + 8 * kEights - 1) / (8 * kEights);
    const unsigned blocks = (to.rows + rows - 1) / rows * tiles * ranks;
    bool done = true;
    for (unsigned first = 0; first < blocks && done; first += blocks) {
        states.clear();
        clusters.clear();
        done = emulation::launch(blocks, 128 * groups + 32, shared_bytes,
                                 [&] { hopper_matmul<Math, kEights>(to); });
    }
    return done;
}

extern "C" bool order(int is_bf16, const u8* x, u64 pitch, u64 bytes, u64 spans, u64 batch, u64 eights,
                      u32 width, u32* ordered, unsigned blocks)
{
    return emulation::launch(blocks, kHopperOrderThreads, 0, [&] {
        if (is_bf16)
            ternary_hopper_order_bf16(x, pitch, bytes, spans, batch, eights, width, ordered);
        else
            ternary_hopper_order_i8(x, pitch, bytes, spans, batch, eights, width, ordered);
    });
}

extern "C" bool multiply(int is_bf16, u32 eights, unsigned groups, unsigned splits,
                         size_t shared_bytes, const u8* bit0, const u8* bit1, u64 pitch, u64 rows,
                         u64 columns, const u8* ordered, u64 batch, const float* scale, void* out,
                         int out_kind, u32 stages, u32 depth, u64 seed)
{
    const HopperArguments to = {bit0, bit1, pitch, rows, columns, ordered, batch, scale, out, out_kind,
                                stages, depth};
    ranks = splits;
    emulation::seed = seed;
    switch (eights + 100 * is_bf16) {
    case 2: return product<HopperInt8, 2>(to, groups, shared_bytes);
    case 8: return product<HopperInt8, 8>(to, groups, shared_bytes);
    case 102: return product<HopperBfloat16, 2>(to, groups, shared_bytes);
    case 103: return product<HopperBfloat16, 3>(to, groups, shared_bytes);
    case 108: return product<HopperBfloat16, 8>(to, groups, shared_bytes);
    }
    return false;
}
