/* The ANCF kernels as CPU functions for the tests: one call runs the launches of one encode or
 * decode. Returns 0, or 1 at a dead end.
 */
#include <cstddef>

#include "../../../kernels/storm_kernels/ancf/csrc/cuda/ancf_choose.cu"
#include "../../../kernels/storm_kernels/ancf/csrc/cuda/ancf_values.cu"
#include "../../../kernels/storm_kernels/ancf/csrc/cuda/ancf_encode.cu"
#include "../../../kernels/storm_kernels/ancf/csrc/cuda/ancf_decode.cu"

extern "C" size_t scratch_bytes(u64 nbytes) {
  return kPlanBytes + kValuesBytes + kWorkBytes + 8 * (nbytes / kWidth / kTile + 2);
}

/* Has warps take turns in an order of their own from now on; 0: in theirs. */
extern "C" void mix_warps(u64 seed) { emulation::seed = seed; }

/* What the launches' table in Python has to say of a block's warps, by pipeline. */
extern "C" u32 encode_warps(u32 pipeline) {
  return pipeline == kDense ? kDenseWarps : pipeline == kWithBitmap ? kBitmapWarps : kBlockThreads / kWarpThreads;
}

extern "C" u32 decode_warps(u32 pipeline) { return pipeline == kFast ? kFastWarps : kDecodeWarps; }

extern "C" int encode(const u8 *src, u64 nbytes, u8 *dst, u8 *scratch, u8 *result, u32 dtype,
                      u32 mode, u32 dense, u32 checksum, u32 policy, u32 blocks,
                      u32 unit_tiles, u32 launched) {
  u32 words = (scratch_bytes(nbytes) - kPlanBytes - kValuesBytes) / 4;
  bool ok = emulation::launch(2, kChooseThreads, kChooseSharedBytes,
                              [&] { ancf_choose(src, nbytes, scratch, words, dtype, mode, dense, checksum); });
  if (mode == kTernary || mode == kValues) {
    ok = ok && emulation::launch(1, kChooseThreads, kValuesSharedBytes,
                                 [&] { ancf_values(src, scratch, mode, policy); });
  }
  auto *told = reinterpret_cast<Result *>(result);
  auto is_launched = [&](u32 pipeline) { return launched == kAllPipelines || launched == pipeline; };
  auto by_teams = [&](Pipeline pipeline, auto kernel) {
    ok = ok && (!is_launched(pipeline) || emulation::launch(blocks, kBlockThreads, kSharedBytes,
                                                            [&] { kernel(src, dst, scratch, told, unit_tiles); }));
  };
  by_teams(kFast, ancf_encode_fast);
  by_teams(kWhole, ancf_encode_whole);
  ok = ok && (!is_launched(kDense) || emulation::launch(blocks, kDenseWarps * kWarpThreads, kDenseShared,
                                                        [&] { ancf_encode_dense(src, dst, scratch, told); }));
  ok = ok && (!is_launched(kWithBitmap) || emulation::launch(blocks, kBitmapWarps * kWarpThreads, kBitmapShared,
                                                             [&] { ancf_encode_bitmap(src, dst, scratch, told); }));
  ok = ok && emulation::launch(blocks, kBlockThreads, 0, [&] {
    ancf_encode_raw(src, dst, scratch, told, launched);
  });
  return ok ? 0 : 1;
}

/* What `blocks` blocks have of the checksums of spans. */
extern "C" int check(const Span *spans, u32 count, u64 *sums, u32 blocks) {
  return emulation::launch(blocks, kBlockThreads, ancf_check_shared_bytes, [&] { ancf_check(spans, count, sums); }) ? 0 : 1;
}

extern "C" int decode(const u8 *blob, u64 blob_bytes, u8 *dst, u64 dst_bytes, u8 *scratch,
                      u64 *status, u32 blocks) {
  bool ok = emulation::launch(1, kWarpThreads, 0, [&] {
    ancf_decode_begin(blob, blob_bytes, dst_bytes, scratch, status);
  });
  ok = ok && emulation::launch(blocks, kFastWarps * kWarpThreads, kDecodeSharedBytes,
                               [&] { ancf_decode_fast(blob, dst, scratch, status); });
  for (auto kernel : {ancf_decode_dense, ancf_decode_bitmap, ancf_decode_whole}) {
    ok = ok && emulation::launch(blocks, kDecodeWarps * kWarpThreads, kDecodeSharedBytes,
                                 [&] { kernel(blob, dst, scratch, status); });
  }
  return ok ? 0 : 1;
}
