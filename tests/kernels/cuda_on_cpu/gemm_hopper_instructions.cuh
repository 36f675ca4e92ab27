/* The instructions of STORM's GEMM on Hopper, with PTX's words on them as code: which element a
 * thread's register is, what a descriptor reads, when a barrier's phase ends. Products are done as
 * late as PTX allows and copies at once, so that memory that is used again too early shows as a wrong
 * result. It stands in for the file of the same name beside the kernels.
 */
#pragma once
#include <gemm_device.cuh>

#include <map>
#include <vector>

/* A matrix of 16-bit elements, as copies and products see it. */
struct TensorMap {
  const u16 *elements;
  u64 rows, columns, pitch;  /* elements */
  u32 box_rows;
};

namespace hopper {

struct Barrier {
  u32 wanted = 0, left = 0, phase = 0;
  int64_t bytes = 0;

  void settle() {
    if (left != 0 || bytes != 0) return;
    left = wanted;
    phase++;
    emulation::progress++;
  }
};

struct Product { float (*sums)[4]; u64 a, b; u32 adds; bool is_half; };

struct Products { std::vector<Product> open; std::vector<std::vector<Product>> pending; };

struct State {
  std::map<std::pair<u32, u32>, Barrier> barriers;  /* by block and address */
  std::map<u32, emulation::Block *> blocks;
  std::map<std::pair<u32, u32>, Products> products;  /* by block and thread */
  std::map<u32, emulation::Meeting> clusters;
};

inline State state;
inline u32 cluster = 1;
constexpr u32 kBegin = 2048;  /* where shared memory begins: 0 is no address */

inline Barrier &barrier_of(u32 block, u32 address) { return state.barriers.at({block, address}); }

inline u8 *at(u32 block, u32 address) { return shared_memory_of(*state.blocks.at(block)) + address - kBegin; }

inline u32 first_of_cluster() { return block_index() / cluster * cluster; }

inline void copy(u32 block, u32 to, const TensorMap &map, u32 column, u32 row, u32 barrier) {
  u8 *const shared = at(block, to);
  for (u32 r = 0; r < map.box_rows; r++)
    for (u32 c = 0; c < 64; c++) {
      const bool is_there = row + r < map.rows && column + c < map.columns;
      const u16 element = is_there ? map.elements[(row + r) * map.pitch + column + c] : 0;
      const u32 swizzled = r * 128 + ((c / 8) ^ ((to / 128 + r) % 8)) * 16 + c % 8 * 2;
      std::memcpy(shared + swizzled, &element, 2);
    }
  Barrier &told = barrier_of(block, barrier);
  told.bytes -= map.box_rows * 128;
  told.settle();
}

/* Element k of 16 of a row of a swizzled matrix. */
inline float element(u64 described, u32 row, u32 k, bool is_half) {
  const u32 begin = static_cast<u32>(described & 0x3fff) << 4;
  const u32 eight_rows = static_cast<u32>(described >> 32 & 0x3fff) << 4;
  u32 address = begin + row / 8 * eight_rows + row % 8 * 128 + 2 * k;
  address ^= (address >> 7 & 7) << 4;
  u16 bits;
  std::memcpy(&bits, at(block_index(), address), 2);
  return is_half ? float_of_half(bits) : float_of_bits(static_cast<u32>(bits) << 16);
}

inline void carry_out(const Product &product) {
  const u32 thread = thread_in_block() % 128, lane = thread % 32;
  if (product.a >> 62 != 1 || product.b >> 62 != 1) std::abort();  /* not swizzled by 128 bytes */
  for (u32 i = 0; i < 4; i++) {
    const u32 row = thread / 32 * 16 + lane / 4 + i / 2 * 8;
    for (u32 n = 0; n < 32; n++) {
      const u32 column = 8 * n + lane % 4 * 2 + i % 2;
      float sum = product.adds ? product.sums[n][i] : 0;
      for (u32 k = 0; k < 16; k++)
        sum += element(product.a, row, k, product.is_half) * element(product.b, column, k, product.is_half);
      product.sums[n][i] = sum;
    }
  }
}

inline Products &mine() { return state.products[{block_index(), thread_in_block()}]; }

}  // namespace hopper

DEVICE u32 shared_address(const void *pointer) {
  hopper::state.blocks[block_index()] = emulation::current->block;
  return static_cast<u32>(static_cast<const u8 *>(pointer) - shared_memory()) + hopper::kBegin;
}

DEVICE void init_barrier(u32 barrier, u32 arrivals) {
  hopper::state.barriers[{block_index(), barrier}] = {arrivals, arrivals, 0, 0};
}
DEVICE void publish_barriers() {}

DEVICE void arrive_of(u32 block, u32 barrier) {
  hopper::Barrier &one = hopper::barrier_of(block, barrier);
  if (one.left == 0) std::abort();
  one.left--;
  one.settle();
}
DEVICE void arrive(u32 barrier) { arrive_of(block_index(), barrier); }
DEVICE void arrive_at(u32 barrier, u32 rank) { arrive_of(hopper::first_of_cluster() + rank, barrier); }

DEVICE void arrive_and_expect(u32 barrier, u32 bytes) {
  hopper::barrier_of(block_index(), barrier).bytes += bytes;
  arrive(barrier);
}

DEVICE void await(u32 barrier, u32 parity) {
  while (hopper::barrier_of(block_index(), barrier).phase % 2 == parity) emulation::yield();
}

DEVICE void copy_box(u32 to, const TensorMap &map, u32 column, u32 row, u32 barrier) {
  hopper::copy(block_index(), to, map, column, row, barrier);
}
DEVICE void copy_box_to(u32 to, const TensorMap &map, u32 column, u32 row, u32 barrier, u16 ranks) {
  for (u32 rank = 0; rank < hopper::cluster; rank++)
    if (ranks >> rank & 1) hopper::copy(hopper::first_of_cluster() + rank, to, map, column, row, barrier);
}
DEVICE void fetch_map(const TensorMap &) {}

DEVICE void begin_products() {}
DEVICE void end_group_of_products() {
  hopper::Products &mine = hopper::mine();
  mine.pending.push_back(mine.open);
  mine.open.clear();
}
template <u32 left>
DEVICE void await_products() {
  hopper::Products &mine = hopper::mine();
  while (mine.pending.size() > left) {
    for (const hopper::Product &one : mine.pending.front()) hopper::carry_out(one);
    mine.pending.erase(mine.pending.begin());
  }
}

template <u32 count>
DEVICE void give_up_registers() {}
template <u32 count>
DEVICE void take_registers() {}

DEVICE u32 cluster_rank() { return block_index() % hopper::cluster; }
DEVICE void meet_cluster() {
  emulation::meet(hopper::state.clusters[hopper::first_of_cluster()], hopper::cluster * threads_in_block());
}

DEVICE void multiply_bfloat16(float (&sums)[32][4], u64 a, u64 b, u32 adds) {
  hopper::mine().open.push_back({sums, a, b, adds, false});
}
DEVICE void multiply_half(float (&sums)[32][4], u64 a, u64 b, u32 adds) {
  hopper::mine().open.push_back({sums, a, b, adds, true});
}
