/* The machine operations of the ANCF kernels, for the fibres of emulate.h. It stands in for the
 * file of the same name beside the kernels: same names, same meaning, on a CPU.
 */
#pragma once
#include "emulate.h"

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define KERNEL(threads) extern "C" void
#define KERNEL_TWICE(threads) extern "C" void
#define DEVICE inline
#define DEVICE_CALL inline  /* kept out of the caller's loop, where it would cost registers */
#define __restrict__
#define __constant__ static
#define __device__

constexpr u32 kWarpThreads = 32;
constexpr u32 kAllLanes = 0xffffffffu;

DEVICE u32 thread_in_block() { return emulation::current->thread; }
DEVICE u32 block_index() { return emulation::current->block->index; }
DEVICE u32 block_count() { return emulation::grid_dim; }
DEVICE u32 threads_in_block() { return emulation::block_dim; }

/* Launches here come one after another. */
DEVICE void let_next_begin() {}
DEVICE void await_launches_before() {}

DEVICE u8 *shared_memory() {
  auto address = reinterpret_cast<uintptr_t>(emulation::current->block->shared.data());
  return reinterpret_cast<u8 *>((address + 15) & ~uintptr_t{15});
}

DEVICE void barrier(u32 id, u32 threads) {
  emulation::meet(emulation::current->block->barriers[id], threads);
}
DEVICE void warp_barrier() { emulation::meet(emulation::warp().meeting, kWarpThreads); }

template <class T>
DEVICE T from_lane(T value, u32 lane) {
  return static_cast<T>(emulation::exchange(value, [&](uint64_t *slot) { return slot[lane]; }));
}
DEVICE u32 shuffle(u32 value, u32 lane) { return from_lane(value, lane % 32); }
DEVICE u64 shuffle(u64 value, u32 lane) { return from_lane(value, lane % 32); }
DEVICE u32 shuffle_up(u32 value, u32 delta) {
  u32 lane = emulation::lane();
  return from_lane(value, lane >= delta ? lane - delta : lane);
}
DEVICE u32 shuffle_xor(u32 value, u32 mask) { return from_lane(value, emulation::lane() ^ mask); }
DEVICE u64 shuffle_xor(u64 value, u32 mask) { return from_lane(value, emulation::lane() ^ mask); }
DEVICE u32 lanes_where(bool predicate) {
  return static_cast<u32>(emulation::exchange(predicate, [](uint64_t *slot) {
    uint64_t bits = 0;
    for (int i = 0; i < 32; i++) bits |= slot[i] << i;
    return bits;
  }));
}
DEVICE u32 add_from_below(u32 value, u32 delta) {
  u32 below = shuffle_up(value, delta);
  return emulation::lane() >= delta ? value + below : value;
}
DEVICE u32 most_of_lanes(u32 value) {
  return static_cast<u32>(emulation::exchange(value, [](uint64_t *slot) {
    uint64_t most = 0;
    for (int i = 0; i < 32; i++) most = slot[i] > most ? slot[i] : most;
    return most;
  }));
}
DEVICE u32 sum_of_lanes(u32 value) {
  return static_cast<u32>(emulation::exchange(value, [](uint64_t *slot) {
    uint64_t sum = 0;
    for (int i = 0; i < 32; i++) sum += slot[i];
    return sum;
  }));
}
DEVICE u32 bits_of_lanes(u32 value) {
  return static_cast<u32>(emulation::exchange(value, [](uint64_t *slot) {
    uint64_t bits = 0;
    for (int i = 0; i < 32; i++) bits |= slot[i];
    return bits;
  }));
}
DEVICE bool any_lane(bool predicate) { return lanes_where(predicate) != 0; }

DEVICE u32 ones(u32 value) { return __builtin_popcount(value); }
DEVICE u32 lowest_bit(u32 value) { return __builtin_ctz(value); }
DEVICE u32 highest_bit(u32 value) { return 31 - __builtin_clz(value); }

DEVICE u32 nonzero_halves(u32 word) { return (word >> 16 ? 0x10000u : 0u) | (word & 0xffff ? 1u : 0u); }

DEVICE u32 pick_bytes_or_signs(u32 low, u32 high, u32 selector) {
  u64 bytes = (static_cast<u64>(high) << 32) | low;
  u32 result = 0;
  for (int i = 0; i < 4; i++) {
    u32 nibble = selector >> (4 * i) & 0xf;
    u32 byte = bytes >> (8 * (nibble & 7)) & 0xff;
    if (nibble & 8) byte = byte & 0x80 ? 0xff : 0;
    result |= byte << (8 * i);
  }
  return result;
}

DEVICE u32 pick_bytes(u32 low, u32 high, u32 selector) { return pick_bytes_or_signs(low, high, selector & 0x7777); }

DEVICE u32 funnel_right(u32 low, u32 high, u32 shift) {
  return static_cast<u32>(((static_cast<u64>(high) << 32) | low) >> shift % 32);
}

template <class T>
DEVICE T load_cached(const T *address) { return *address; }
template <class T>
DEVICE T load_once(const T *address) { return *address; }
template <class T>
DEVICE void store_once(T *address, T value) { *address = value; }

/* The bytes come at once: the device may deliver them at any time up to the wait. */
DEVICE void copy_behind(u8 *shared, const u8 *address) { std::memcpy(shared, address, 16); }
DEVICE void copies_arrived() {}
DEVICE void prefetch_line(const u8 *address) { static_cast<void>(*const_cast<const volatile u8 *>(address)); }

DEVICE u64 load_shared_word(const u64 *address) { return *const_cast<const volatile u64 *>(address); }
DEVICE void store_shared_word(u64 *address, u64 value) {
  *const_cast<volatile u64 *>(address) = value;
}
template <class T>
DEVICE T fetch_add(T *address, T value) { T before = *address; *address += value; return before; }
DEVICE u32 take_number(u32 *counter) { return (*counter)++; }
template <class T>
DEVICE void fetch_or(T *address, T value) { *address |= value; }
template <class T>
DEVICE void fetch_min(T *address, T value) { if (value < *address) *address = value; }
DEVICE void memory_fence() {}
DEVICE void pause() { emulation::yield(); }
