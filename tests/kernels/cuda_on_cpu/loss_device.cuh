/* The machine operations of the loss' kernels, for the fibres of emulate.h. It stands in for the
 * file of the same name beside the kernels: same names, same meaning, on a CPU.
 */
#pragma once
#include "emulate.h"

#include <cmath>

typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

#define KERNEL(threads, blocks) extern "C" void
#define DEVICE inline

constexpr u32 kWarp = 32;

DEVICE u32 thread_in_block() { return emulation::current->thread; }
DEVICE u32 threads_in_block() { return emulation::block_dim; }
DEVICE i64 block_index() { return emulation::current->block->index; }
DEVICE void block_barrier() { emulation::meet(emulation::current->block->barriers[0], emulation::block_dim); }

DEVICE float from_lanes_above(float value, u32 by) {
  u32 bits, lane = emulation::lane(), from = lane + by < kWarp ? lane + by : lane;
  std::memcpy(&bits, &value, 4);
  bits = static_cast<u32>(emulation::exchange(bits, [&](uint64_t *slot) { return slot[from]; }));
  std::memcpy(&value, &bits, 4);
  return value;
}

DEVICE float *shared_memory() {
  auto address = reinterpret_cast<uintptr_t>(emulation::current->block->shared.data());
  return reinterpret_cast<float *>((address + 15) & ~uintptr_t{15});
}

DEVICE float from_half(u16 bits) {
  _Float16 half;
  std::memcpy(&half, &bits, 2);
  return half;
}
DEVICE u16 to_half(float value) {
  u16 bits;
  auto half = static_cast<_Float16>(value);
  std::memcpy(&bits, &half, 2);
  return bits;
}
DEVICE float from_bfloat16(u16 bits) {
  u32 word = static_cast<u32>(bits) << 16;
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}
DEVICE u16 to_bfloat16(float value) {
  u32 bits;
  std::memcpy(&bits, &value, 4);
  if (value != value) return 0x7fff;
  return static_cast<u16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
