/* The decode kernels: one warp checks the header; then each tile, or part of a tile, is decoded by
 * its own warp. Only the warps of one tile wait for each other, and all warps at the end.
 *
 * Damaged bytes result in a status, never in an access outside the buffers: FORMAT.md, section 12,
 * lists what is checked before use.
 */
#include <ancf_decode_header.cuh>
#include <ancf_decode_sparse.cuh>
#include <ancf_decode_spans.cuh>
#include <ancf_decode_whole.cuh>

/* A block's shared memory besides the warps' own parts. */
struct alignas(16) BlockMemory {
  Launch launch;
  TopPlaces places;
  u64 checks[kFastWarps];  /* sums of its warps, at the end */
};

template <Pipeline kPipeline>
constexpr u32 kWarps = kPipeline == kFast ? kFastWarps : kDecodeWarps;

/* With two blocks per multiprocessor, each has 112 KiB of shared memory. In a kernel for bitmaps
 * only as many warps work as fit. */
constexpr u32 kSparseFit = (112 * 1024 - sizeof(BlockMemory)) / sizeof(SparseMemory);
constexpr u32 kSparseWarps = kSparseFit < kDecodeWarps ? kSparseFit : kDecodeWarps;

template <Pipeline kPipeline>
DEVICE constexpr u32 shared_bytes() {
  return sizeof(BlockMemory) + (kPipeline == kWhole        ? kPlacedEntries * sizeof(u64)
                                : kPipeline == kWithBitmap ? kSparseWarps * sizeof(SparseMemory)
                                : kPipeline == kDense      ? kDecodeWarps * kTopsBytes
                                                           : kFastBytes);
}

/* Read by the host: a block's dynamic shared memory, enough for each kernel of this module. */
DEVICE constexpr u32 most_shared_bytes() {
  u32 most = 0;
  const u32 bytes[] = {shared_bytes<kWhole>(), shared_bytes<kFast>(), shared_bytes<kDense>(), shared_bytes<kWithBitmap>()};
  for (u32 i = 0; i < 4; i++) most = (ANCF_PIPELINES >> i & 1) && bytes[i] > most ? bytes[i] : most;
  return most;
}
constexpr u32 kDecodeSharedBytes = most_shared_bytes();
extern "C" __device__ const u32 ancf_decode_shared_bytes = kDecodeSharedBytes;

/* Ends a launch; the last block writes the outcome. All blocks end at about the same time and
 * additions to one word are serial, so each block adds once. */
DEVICE void finish(const Decoding &job, const Plan &plan, u64 *checks, u64 *status) {
  Work *work = job.launch.work;
  u64 sum = over_lanes(job.check);
  if (job.lane == 0) checks[thread_in_block() / kWarpThreads] = sum;
  memory_fence();
  barrier(0, threads_in_block());
  if (thread_in_block() != 0) return;
  for (u32 warp = 1; warp < threads_in_block() / kWarpThreads; warp++) sum += checks[warp];
  fetch_add(&work->checksum, sum);
  memory_fence();
  if (fetch_add(&work->blocks_done, 1u) + 1 != block_count()) return;
  u64 found = load_shared_word(&work->checksum) + plan.raw_nbytes * kCheckLength;
  bool differs = job.launch.checks && found != plan.checksum;
  *status = fetch_add(&work->status, 0u) ? kBadRecord : differs ? kBadChecksum : kOk;
}

/* The body of a kernel for one pipeline. It does nothing if the plan has another pipeline or
 * element type, or is bad. */
template <Pipeline kPipeline>
DEVICE void decode_blob(const u8 *blob, u8 *dst, u8 *scratch, u64 *status) {
  let_next_begin();
  await_launches_before();
  const Plan &plan = *plan_of(scratch);
  if (plan.status != kOk || plan.width != kWidth || plan.mantissa != kMantissa) return;
  if (pipeline_of(plan) != kPipeline) return;
  u8 *memory = shared_memory();
  BlockMemory &block = *reinterpret_cast<BlockMemory *>(memory);
  memory += sizeof(BlockMemory);
  block.launch.prepare(plan, blob, dst, work_of(scratch));
  Decoding job{block.launch, thread_in_block() % kWarpThreads, 0};
  const u32 own = thread_in_block() / kWarpThreads;
  const u32 spread = own * block_count() + block_index();  /* neighbours in different blocks */
  const u32 linear = block_index() * kWarps<kPipeline> + own;         /* or in one block */
  const u32 warps = block_count() * kWarps<kPipeline>;
  if constexpr (kPipeline == kWhole) {
    decode_whole(job, plan, blob, reinterpret_cast<u64 *>(memory), linear, warps);
  } else if constexpr (kPipeline == kWithBitmap) {
    SparseMemory *share = reinterpret_cast<SparseMemory *>(memory) + own;
    with_code<kPipeline>(plan, DecodeSparse{job, plan, block.places, share, spread, block_count() * kSparseWarps});
  } else if constexpr (kPipeline == kDense) {
    with_code<kPipeline>(plan, DecodeDense{job, plan, block.places, memory + own * kTopsBytes, spread, warps});
  } else {
    with_code<kPipeline>(plan, DecodeFast{job, plan, block.places, FastMemory::at(memory), linear + 1 == warps});
  }
  finish(job, plan, block.checks, status);
}

/* Decode `blob` to `dst` by the plan in `scratch`; only the kernel of the plan's pipeline does so.
 * Blocks have kWarps warps of their pipeline; any number of blocks. */
#if ANCF_PIPELINES & 2
KERNEL_TWICE(kWarps<kFast> * kWarpThreads)
ancf_decode_fast(const u8 *__restrict__ blob, u8 *__restrict__ dst, u8 *scratch, u64 *status) {
  decode_blob<kFast>(blob, dst, scratch, status);
}
#endif
#if ANCF_PIPELINES & 4
KERNEL_TWICE(kWarps<kDense> * kWarpThreads)
ancf_decode_dense(const u8 *__restrict__ blob, u8 *__restrict__ dst, u8 *scratch, u64 *status) {
  decode_blob<kDense>(blob, dst, scratch, status);
}
#endif
#if ANCF_PIPELINES & 8
KERNEL_TWICE(kWarps<kWithBitmap> * kWarpThreads)
ancf_decode_bitmap(const u8 *__restrict__ blob, u8 *__restrict__ dst, u8 *scratch, u64 *status) {
  decode_blob<kWithBitmap>(blob, dst, scratch, status);
}
#endif
#if ANCF_PIPELINES & 1
KERNEL_TWICE(kWarps<kWhole> * kWarpThreads)
ancf_decode_whole(const u8 *__restrict__ blob, u8 *__restrict__ dst, u8 *scratch, u64 *status) {
  decode_blob<kWhole>(blob, dst, scratch, status);
}
#endif

/* Checks the header of `blob` and prepares ancf_decode. One block of one warp. `status` is
 * kNotDecoded until the kernel of the blob's pipeline and element type sets it. */
KERNEL(kWarpThreads)
ancf_decode_begin(const u8 *__restrict__ blob, u64 blob_bytes, u64 dst_bytes, u8 *scratch, u64 *status) {
  let_next_begin();
  const u32 lane = thread_in_block();
  for (u32 word = lane; word < sizeof(Work) / 4; word += kWarpThreads) reinterpret_cast<u32 *>(work_of(scratch))[word] = 0;
  Plan &plan = *reinterpret_cast<Plan *>(scratch);
  bool ok = read_header(blob, blob_bytes, dst_bytes, lane, plan);
  if (lane != 0) return;
  plan.status = ok ? kOk : kBadHeader;
  *status = ok ? kNotDecoded : kBadHeader;
}
