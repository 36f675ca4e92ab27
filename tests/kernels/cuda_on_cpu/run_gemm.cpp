/* What STORM's GEMM does with sums, as CPU functions for the tests: GEMM_HALF, GEMM_PAIRS,
 * GEMM_ENCODES, GEMM_ACTIVATION and GEMM_BIAS as in gemm.cu. Return 0, or 1 at a dead end.
 */
#include "../../../kernels/storm_kernels/gemm/csrc/cuda/gemm_backward.cuh"

#if GEMM_HALF
typedef Half Format;
#else
typedef Bfloat16 Format;
#endif

constexpr u32 kWide = GEMM_PAIRS ? kPanelColumns : kPanels * kPanelColumns;

/* `sums` are float32 (rows, columns) of each product; a warp is a block. */
extern "C" int finish_tiles(const float *first, const float *second, const Job *job) {
  const u32 down = (job->rows + kWarpRows - 1) / kWarpRows, across = (job->columns + kWide - 1) / kWide;
  return !emulation::launch(down * across, kWarp, kStagedBytes, [&] {
    const u32 row = block_index() / across * kWarpRows, column = block_index() % across * kWide;
    const u32 lane = thread_in_block();
    float mine[kGroups][4];
    for (u32 g = 0; g < kGroups; g++)
      for (u32 i = 0; i < 4; i++) {
        const u32 r = row + lane / 4 + i / 2 * 8, panel = g / (kGroups / 2);
        const u32 c = column + (GEMM_PAIRS ? g % (kGroups / 2) : g) * 8 + lane % 4 * 2 + i % 2;
        const float *from = panel && GEMM_PAIRS ? second : first;
        mine[g][i] = r < job->rows && c < job->columns ? from[u64{r} * job->columns + c] : NAN;
      }
    finish<Format, GEMM_PAIRS, GEMM_ENCODES, GEMM_ACTIVATION, GEMM_BIAS>(mine, shared_memory(), *job, row, column);
  });
}

extern "C" int records(const Records *records, u32 blobs) {
  return !emulation::launch(blobs * records->blocks, kRecordThreads, sizeof(RecordsShared),
                            [&] { write_records(*records); });
}

extern "C" int backward(const Backward *job) {
  constexpr u32 warps = kBackwardThreads / kWarp;
  return !emulation::launch((job->tiles + warps - 1) / warps, kBackwardThreads, kBackwardShared,
                            [&] { gated_backward<Format, GEMM_ACTIVATION>(*job); });
}
