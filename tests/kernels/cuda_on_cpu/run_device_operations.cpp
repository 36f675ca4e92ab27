/* The kernel of device_operations.cu as a CPU function. Returns 0, or 1 at a dead end. */
#include "device_operations.cu"

extern "C" int run_device_operations(const u32 *words, uint4 *results, Cell *cells, u32 operations, u32 blocks) {
  bool ok = emulation::launch(blocks, kWarpThreads, 16 * kWarpThreads,
                              [&] { device_operations(words, results, cells, operations); });
  return ok ? 0 : 1;
}
