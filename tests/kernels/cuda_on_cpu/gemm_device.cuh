/* The machine operations of STORM's GEMM, for the fibres of emulate.h. It stands in for the file of
 * the same name beside the kernels: same names, same meaning, on a CPU.
 */
#pragma once
#include "emulate.h"

#include <cmath>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE inline

constexpr u32 kWarp = 32;

DEVICE u32 thread_in_block() { return emulation::current->thread; }
DEVICE u32 threads_in_block() { return emulation::block_dim; }
DEVICE u32 block_index() { return emulation::current->block->index; }
DEVICE u32 blocks() { return emulation::grid_dim; }
DEVICE void meet_block() { emulation::meet(emulation::current->block->barriers[0], emulation::block_dim); }
DEVICE void meet_warp() { emulation::meet(emulation::warp().meeting, kWarp); }
DEVICE u32 from_lane(u32 value, u32 lane) {
  return static_cast<u32>(emulation::exchange(value, [&](uint64_t *slot) { return slot[lane]; }));
}
DEVICE u32 from_lane_across(u32 value, u32 mask) { return from_lane(value, emulation::lane() ^ mask); }
DEVICE u32 from_lanes_below(u32 value, u32 by) {
  u32 lane = emulation::lane();
  return from_lane(value, lane >= by ? lane - by : lane);
}

DEVICE u8 *shared_memory_of(emulation::Block &block) {
  auto address = reinterpret_cast<uintptr_t>(block.shared.data());
  return reinterpret_cast<u8 *>((address + 15) & ~uintptr_t{15});
}
DEVICE u8 *shared_memory() { return shared_memory_of(*emulation::current->block); }

DEVICE u32 count_ones(u32 word) { return __builtin_popcount(word); }
DEVICE u32 lowest_one(u32 word) { return __builtin_ctz(word); }
DEVICE void add_to(u32 *place, u32 value) { *place += value; }

DEVICE u32 bytes_of(u32 a, u32 b, u32 selector) {
  const u64 both = static_cast<u64>(b) << 32 | a;
  u32 found = 0;
  for (u32 i = 0; i < 4; i++) found |= static_cast<u32>(both >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return found;
}

DEVICE u32 dot_bytes(u32 a, u32 b, u32 sum) {
  for (u32 i = 0; i < 32; i += 8) sum += (a >> i & 0xff) * (b >> i & 0xff);
  return sum;
}

DEVICE u32 sums_at_most(u32 a, u32 b, u32 limit) {
  u32 found = 0;
  for (u32 i = 0; i < 32; i += 16) {
    const u32 sum = ((a >> i) + (b >> i)) & 0xffff, most = limit >> i & 0xffff;
    found |= (sum < most ? sum : most) << i;
  }
  return found;
}

DEVICE void store_matrices(u8 *row, u32 a, u32 b, u32 c, u32 d) {
  const u32 words[4] = {a, b, c, d}, lane = emulation::lane();
  const uint64_t mine = reinterpret_cast<uint64_t>(row);
  for (u32 m = 0; m < 4; m++) {
    const uint64_t to = emulation::exchange(mine, [&](uint64_t *slot) { return slot[8 * m + lane / 4]; });
    std::memcpy(reinterpret_cast<u8 *>(to) + lane % 4 * 4, &words[m], 4);
  }
}

DEVICE float exponential(float x) { return std::exp(x); }
DEVICE float quotient(float a, float b) { return a / b; }
DEVICE float hyperbolic_tangent(float x) { return std::tanh(x); }
DEVICE float error_function(float x) { return std::erf(x); }
DEVICE float float_of_bits(u32 bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

DEVICE u32 bfloat16_bits(float value) {
  u32 bits;
  std::memcpy(&bits, &value, 4);
  if (value != value) return 0x7fff;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
DEVICE u32 pack_bfloat16(float low, float high) { return bfloat16_bits(low) | bfloat16_bits(high) << 16; }

DEVICE u32 half_bits(float value) {
  u16 bits;
  auto half = static_cast<_Float16>(value);
  std::memcpy(&bits, &half, 2);
  return bits;
}
DEVICE u32 pack_half(float low, float high) { return half_bits(low) | half_bits(high) << 16; }
DEVICE float float_of_half(u32 bits) {
  const u16 word = static_cast<u16>(bits);
  _Float16 half;
  std::memcpy(&half, &word, 2);
  return half;
}
