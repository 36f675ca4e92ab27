/* The few machine operations that the ANCF kernels use, each under one name.
 *
 * So the kernels contain no inline assembly and no vendor intrinsics. The tests run the same
 * kernels on a CPU: they put another file of this name in the include path. Each operation is one
 * instruction or a short sequence.
 */
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

/* Requests one block per multiprocessor; else the compiler may spill registers to fit two. */
#define KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads, 1)
/* The same, with registers for two blocks per multiprocessor. */
#define KERNEL_TWICE(threads) extern "C" __global__ void __launch_bounds__(threads, 2)
#define DEVICE __device__ __forceinline__
#define DEVICE_CALL __device__ __noinline__  /* inlined, it would cost registers */

constexpr u32 kWarpThreads = 32;
constexpr u32 kAllLanes = 0xffffffffu;

DEVICE u32 thread_in_block() { return threadIdx.x; }
DEVICE u32 block_index() { return blockIdx.x; }
DEVICE u32 block_count() { return gridDim.x; }
DEVICE u32 threads_in_block() { return blockDim.x; }

/* From compute capability 9.0 on, a launch may begin while the previous one on its stream still
 * runs. Each of its threads awaits the previous launch's end and writes before it accesses memory
 * that both use, and before it returns. So for the next launch all earlier launches are
 * complete. */
DEVICE void let_next_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
DEVICE void await_launches_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* The block's dynamic shared memory, 16-byte aligned. */
DEVICE u8 *shared_memory() {
  extern __shared__ uint4 storm_shared[];
  return reinterpret_cast<u8 *>(storm_shared);
}

/* Synchronises `threads` threads of the block at barrier `id` (0..15); whole warps only. */
DEVICE void barrier(u32 id, u32 threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
DEVICE void warp_barrier() { __syncwarp(); }

DEVICE u32 shuffle(u32 value, u32 lane) { return __shfl_sync(kAllLanes, value, lane); }
DEVICE u64 shuffle(u64 value, u32 lane) { return __shfl_sync(kAllLanes, value, lane); }
DEVICE u32 shuffle_up(u32 value, u32 delta) { return __shfl_up_sync(kAllLanes, value, delta); }
DEVICE u32 shuffle_xor(u32 value, u32 mask) { return __shfl_xor_sync(kAllLanes, value, mask); }
DEVICE u64 shuffle_xor(u64 value, u32 mask) { return __shfl_xor_sync(kAllLanes, value, mask); }
DEVICE u32 lanes_where(bool predicate) { return __ballot_sync(kAllLanes, predicate); }
/* Returns this lane's value plus that of the lane `delta` below, if there is such a lane. */
DEVICE u32 add_from_below(u32 value, u32 delta) {
  u32 sum = value;
  asm volatile(
      "{ .reg .pred has; .reg .u32 other; shfl.sync.up.b32 other|has, %1, %2, 0, 0xffffffff; @has add.u32 %0, %0, other; }"
      : "+r"(sum) : "r"(value), "r"(delta));
  return sum;
}
DEVICE u32 most_of_lanes(u32 value) { return __reduce_max_sync(kAllLanes, value); }
DEVICE u32 sum_of_lanes(u32 value) { return __reduce_add_sync(kAllLanes, value); }
DEVICE u32 bits_of_lanes(u32 value) { return __reduce_or_sync(kAllLanes, value); }
DEVICE bool any_lane(bool predicate) { return __any_sync(kAllLanes, predicate) != 0; }

DEVICE u32 ones(u32 value) { return __popc(value); }
DEVICE u32 lowest_bit(u32 value) { return __ffs(value) - 1; }   /* value != 0 */
DEVICE u32 highest_bit(u32 value) { return 31 - __clz(value); } /* value != 0 */

/* Returns 1 in each half of the word that is not 0. */
DEVICE u32 nonzero_halves(u32 word) { return __vminu2(word, 0x00010001); }

/* Picks four of the eight bytes of (low, high) by the nibbles of `selector`. No nibble exceeds 7,
 * since the compiler ignores their highest bits. */
DEVICE u32 pick_bytes(u32 low, u32 high, u32 selector) { return __byte_perm(low, high, selector); }
/* The same, but a nibble from 8 on gives the top bit of its byte, replicated eight times. */
DEVICE u32 pick_bytes_or_signs(u32 low, u32 high, u32 selector) {
  u32 picked;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(picked) : "r"(low), "r"(high), "r"(selector));
  return picked;
}

/* Returns 32 bits of the 64 bits (low, high), from bit `shift` (0..31) on. */
DEVICE u32 funnel_right(u32 low, u32 high, u32 shift) { return __funnelshift_r(low, high, shift); }

/* Reads, through the nearest cache, memory that no thread of this launch writes. */
DEVICE u32 load_cached(const u32 *address) { return __ldg(address); }
DEVICE u16 load_cached(const u16 *address) { return __ldg(address); }
DEVICE u8 load_cached(const u8 *address) { return __ldg(address); }
DEVICE uint2 load_cached(const uint2 *address) { return __ldg(address); }
DEVICE uint4 load_cached(const uint4 *address) { return __ldg(address); }

/* Streaming reads and writes: every byte of a tensor is accessed once. */
DEVICE uint4 load_once(const uint4 *address) { return __ldcs(address); }
DEVICE uint2 load_once(const uint2 *address) { return __ldcs(address); }
DEVICE u32 load_once(const u32 *address) { return __ldcs(address); }
DEVICE u16 load_once(const u16 *address) { return __ldcs(address); }
DEVICE u8 load_once(const u8 *address) { return __ldcs(address); }
DEVICE void store_once(uint4 *address, uint4 value) { __stcs(address, value); }
DEVICE void store_once(uint2 *address, uint2 value) { __stcs(address, value); }

/* Copies 16 bytes to shared memory asynchronously; `copies_arrived` waits for this thread's
 * copies. */
DEVICE void copy_behind(u8 *shared, const u8 *address) {
  u32 place = static_cast<u32>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(place), "l"(address) : "memory");
}
DEVICE void copies_arrived() { asm volatile("cp.async.wait_all;" ::: "memory"); }

/* Prefetches the 128-byte line of `address`, which must be in an allocation, to the L2 cache. */
DEVICE void prefetch_line(const u8 *address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

/* Access words that blocks of one launch exchange: never torn, never from a stale cache. */
DEVICE u64 load_shared_word(const u64 *address) {
  u64 value;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}
DEVICE void store_shared_word(u64 *address, u64 value) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}
DEVICE u32 fetch_add(u32 *address, u32 value) { return atomicAdd(address, value); }
DEVICE u64 fetch_add(u64 *address, u64 value) { return atomicAdd(address, value); }
/* Takes the next number of `counter`, for one lane only. The compiler turns atomicAdd into an
 * operation of the whole warp, which waits for the result at once. */
DEVICE u32 take_number(u32 *counter) {
  u32 number;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;" : "=r"(number) : "l"(counter) : "memory");
  return number;
}
DEVICE void fetch_or(u32 *address, u32 value) { atomicOr(address, value); }
DEVICE void fetch_or(u64 *address, u64 value) { atomicOr(address, value); }
DEVICE void fetch_min(u32 *address, u32 value) { atomicMin(address, value); }
DEVICE void fetch_min(u64 *address, u64 value) { atomicMin(address, value); }
DEVICE void memory_fence() { __threadfence(); }

/* Lets other warps run while this thread waits for a word of another block. */
DEVICE void pause() { __nanosleep(40); }
