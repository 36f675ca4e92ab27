/* Runs the CUDA sources on a CPU, one fibre a CUDA thread, so that their bytes can be checked
 * where no GPU exists. What stays true: every block-wide and warp-wide meeting point is a real
 * one (a fibre waits until all the others named by the barrier or mask have come), so a missing
 * barrier shows as a wrong result or as a dead end, which `launch` reports. Slow by design.
 */
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include <setjmp.h>
#include <ucontext.h>

struct uint3_ { unsigned x, y, z; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }

namespace emulation {

constexpr size_t kStackBytes = 64 * 1024;
constexpr unsigned kWarp = 32;

/* A meeting point of `expected` fibres; `round` tells one meeting from the next. */
struct Meeting { unsigned arrived = 0, round = 0; };

struct Warp {
  Meeting meeting;
  uint64_t slot[kWarp];
};

struct Block {
  unsigned index;
  std::vector<uint8_t> shared;
  std::vector<Warp> warps;
  Meeting barriers[16];
};

/* A fibre begins in `context` and goes on from `place`: swapcontext asks the kernel for the
 * signal mask at every switch, _setjmp does not. */
struct Fibre {
  ucontext_t context;
  jmp_buf place;
  Block *block;
  unsigned thread;
  bool begun = false, done = false;
};

inline ucontext_t beginning;  /* nothing returns to it: `entry` leaves through `scheduler` */
inline jmp_buf scheduler;
inline Fibre *current;
inline std::vector<std::unique_ptr<uint8_t[]>> stacks;  /* kept from launch to launch */
inline uint64_t progress;  /* meetings completed and fibres ended: no change in a round = dead end */
inline std::function<void()> *body;
inline uint64_t seed;      /* of the order of warps; 0: each has its turn in every round */

inline void yield() {
  if (_setjmp(current->place) == 0) _longjmp(scheduler, 1);
}

/* Runs `current` until it yields or is done. */
inline void resume() {
  if (_setjmp(scheduler) != 0) return;
  if (current->begun) _longjmp(current->place, 1);
  current->begun = true;
  swapcontext(&beginning, &current->context);
}

inline void meet(Meeting &meeting, unsigned expected) {
  unsigned round = meeting.round;
  if (++meeting.arrived == expected) {
    meeting.arrived = 0;
    meeting.round++;
    progress++;
    return;
  }
  while (meeting.round == round) yield();
}

inline void entry() {
  (*body)();
  current->done = true;
  progress++;
  _longjmp(scheduler, 1);
}

}  // namespace emulation

struct IndexView { unsigned x; };
#define threadIdx (IndexView{emulation::current->thread})
#define blockIdx (IndexView{emulation::current->block->index})
#define blockDim (IndexView{emulation::block_dim})
#define gridDim (IndexView{emulation::grid_dim})

namespace emulation {

inline unsigned block_dim, grid_dim;

constexpr int kSpell = 256;  /* rounds */

/* Whether a warp has its turn in this round: with a seed it rests for spells that are long enough
 * for others to get as far ahead as their meetings let them. */
inline bool has_turn(uint64_t round, const Fibre &fibre) {
  if (seed == 0) return true;
  uint64_t warp = fibre.block->index * 64 + fibre.thread / kWarp;
  uint64_t mixed = (seed * 0x9E3779B97F4A7C15 + round / kSpell) * 0xBF58476D1CE4E5B9 + warp;
  mixed = (mixed ^ mixed >> 31) * 0x94D049BB133111EB;
  return mixed >> 63 == 0;
}

/* Says which fibres wait for ever. */
inline bool report(const std::vector<std::unique_ptr<Fibre>> &fibres) {
  unsigned left = 0, first = 0;
  for (unsigned i = 0; i < fibres.size(); i++) {
    if (fibres[i]->done) continue;
    if (left++ == 0) first = i;
  }
  std::fprintf(stderr, "dead end: %u of %zu threads wait, the first is %u\n", left, fibres.size(), first);
  return false;
}

/* Runs `kernel` over grid x block fibres. Returns false at a dead end (fibres wait for ever). */
inline bool launch(unsigned grid, unsigned block, size_t shared_bytes, std::function<void()> kernel) {
  grid_dim = grid;
  block_dim = block;
  body = &kernel;
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<std::unique_ptr<Fibre>> fibres;
  for (unsigned b = 0; b < grid; b++) {
    auto made = std::make_unique<Block>();
    made->index = b;
    made->shared.assign(shared_bytes + 16, 0xA5);
    made->warps.resize((block + kWarp - 1) / kWarp);
    for (unsigned t = 0; t < block; t++) {
      auto fibre = std::make_unique<Fibre>();
      fibre->block = made.get();
      fibre->thread = t;
      if (fibres.size() == stacks.size()) stacks.emplace_back(new uint8_t[kStackBytes]);
      getcontext(&fibre->context);
      fibre->context.uc_stack.ss_sp = stacks[fibres.size()].get();
      fibre->context.uc_stack.ss_size = kStackBytes;
      makecontext(&fibre->context, entry, 0);
      fibres.push_back(std::move(fibre));
    }
    blocks.push_back(std::move(made));
  }
  const int patience = seed == 0 ? 1000 : 64 * kSpell;  /* rounds without progress: spinning on memory counts as none */
  int idle = 0;
  uint64_t round = 0;
  for (size_t left = fibres.size(); left != 0; round++) {
    uint64_t before = progress;
    left = 0;
    for (auto &fibre : fibres) {
      if (fibre->done) continue;
      left++;
      if (!has_turn(round, *fibre)) continue;
      current = fibre.get();
      resume();
      left -= fibre->done;
    }
    idle = progress == before ? idle + 1 : 0;
    if (idle > patience) return report(fibres);
  }
  return true;
}

inline Warp &warp() { return current->block->warps[current->thread / kWarp]; }
inline unsigned lane() { return current->thread % kWarp; }

/* All lanes exchange; `pick` maps the 32 values to this lane's result. */
template <class Pick>
inline uint64_t exchange(uint64_t value, Pick pick) {
  Warp &w = warp();
  w.slot[lane()] = value;
  meet(w.meeting, kWarp);
  uint64_t result = pick(w.slot);
  meet(w.meeting, kWarp);
  return result;
}

}  // namespace emulation
