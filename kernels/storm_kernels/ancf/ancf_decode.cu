/* The decode kernels: the header is checked by one thread, then every tile or part of one is
 * decoded by its own warp; warps wait for each other only at the end.
 *
 * What stays true: nothing read from a blob is used as a place or a size before it was compared
 * with what the blob and the output have, so damaged bytes give a status, never an access
 * outside. FORMAT.md, section 12, lists the checks.
 */
#include <ancf_decode_header.cuh>
#include <ancf_decode_sparse.cuh>
#include <ancf_decode_spans.cuh>
#include <ancf_decode_whole.cuh>

/* What a block keeps in shared memory beside the warps' own shares. */
struct alignas(16) BlockMemory {
  Launch launch;
  TopPlaces places;
};

/* Two blocks a multiprocessor have 112 KiB of shared memory each; of a kernel for bitmaps only as
 * many warps work as find room in that. */
constexpr u32 kSparseFit = (112 * 1024 - sizeof(BlockMemory)) / sizeof(SparseMemory);
constexpr u32 kSparseWarps = kSparseFit < kDecodeWarps ? kSparseFit : kDecodeWarps;

template <Pipeline kPipeline>
DEVICE constexpr u32 shared_bytes() {
  return sizeof(BlockMemory) + (kPipeline == kWhole        ? kPlacedEntries * sizeof(u64)
                                : kPipeline == kWithBitmap ? kSparseWarps * sizeof(SparseMemory)
                                                           : kDecodeWarps * (kTopsBytes + kRecordAhead));
}

/* For the host: the dynamic shared memory of a block, enough for each kernel of this module. */
DEVICE constexpr u32 most_shared_bytes() {
  u32 most = 0;
  const u32 bytes[] = {shared_bytes<kWhole>(), shared_bytes<kFast>(), shared_bytes<kDense>(), shared_bytes<kWithBitmap>()};
  for (u32 i = 0; i < 4; i++) most = (ANCF_PIPELINES >> i & 1) && bytes[i] > most ? bytes[i] : most;
  return most;
}
constexpr u32 kDecodeSharedBytes = most_shared_bytes();
extern "C" __device__ const u32 ancf_decode_shared_bytes = kDecodeSharedBytes;

/* Where all of a launch's warps are done, tells the outcome: by the last block. */
DEVICE void finish(const Decoding &job, const Plan &plan, u64 *status) {
  Work *work = job.launch.work;
  if (job.launch.checks) add_check(job.check, &work->checksum, job.lane);
  memory_fence();
  barrier(0, kDecodeThreads);
  if (thread_in_block() != 0) return;
  memory_fence();
  if (fetch_add(&work->blocks_done, 1u) + 1 != block_count()) return;
  u64 found = load_shared_word(&work->checksum) + plan.raw_nbytes * kCheckLength;
  bool differs = job.launch.checks && found != plan.checksum;
  *status = fetch_add(&work->status, 0u) ? kBadRecord : differs ? kBadChecksum : kOk;
}

/* The whole of a kernel for one kind of blob; it does nothing where the plan is of another kind
 * or element type, or bad. */
template <Pipeline kPipeline>
DEVICE void decode_blob(const u8 *blob, u8 *dst, u8 *scratch, u64 *status) {
  const Plan &plan = *plan_of(scratch);
  if (plan.status != kOk || plan.width != kWidth || plan.mantissa != kMantissa) return;
  if (pipeline_of(plan) != kPipeline) return;
  u8 *memory = shared_memory();
  BlockMemory &block = *reinterpret_cast<BlockMemory *>(memory);
  memory += sizeof(BlockMemory);
  block.launch.prepare(plan, blob, dst, work_of(scratch));
  Decoding job{block.launch, thread_in_block() % kWarpThreads, 0};
  const u32 own = thread_in_block() / kWarpThreads;
  const u32 spread = own * block_count() + block_index();  /* neighbouring tiles go to different blocks */
  const u32 linear = block_index() * kDecodeWarps + own;   /* or side by side */
  if constexpr (kPipeline == kWhole) {
    decode_whole(job, plan, blob, reinterpret_cast<u64 *>(memory), linear, block_count() * kDecodeWarps);
  } else if constexpr (kPipeline == kWithBitmap) {
    SparseMemory *share = reinterpret_cast<SparseMemory *>(memory) + own;
    with_code<kPipeline>(plan, DecodeSparse{job, plan, block.places, share, spread, block_count() * kSparseWarps});
  } else {
    u8 *tops = memory + own * kTopsBytes, *ahead = memory + kDecodeWarps * kTopsBytes + own * kRecordAhead;
    with_code<kPipeline>(plan, DecodeWindow{job, plan, block.places, tops, ahead, spread, linear});
  }
  finish(job, plan, status);
}

/* Decode `blob` to `dst` as the plan in `scratch` says: one of these does. Blocks of
 * kDecodeThreads, any number. */
#if ANCF_PIPELINES & 2
KERNEL_TWICE(kDecodeThreads)
ancf_decode_fast(const u8 *__restrict__ blob, u8 *__restrict__ dst, u8 *scratch, u64 *status) {
  decode_blob<kFast>(blob, dst, scratch, status);
}
#endif
#if ANCF_PIPELINES & 4
KERNEL_TWICE(kDecodeThreads)
ancf_decode_dense(const u8 *__restrict__ blob, u8 *__restrict__ dst, u8 *scratch, u64 *status) {
  decode_blob<kDense>(blob, dst, scratch, status);
}
#endif
#if ANCF_PIPELINES & 8
KERNEL_TWICE(kDecodeThreads)
ancf_decode_bitmap(const u8 *__restrict__ blob, u8 *__restrict__ dst, u8 *scratch, u64 *status) {
  decode_blob<kWithBitmap>(blob, dst, scratch, status);
}
#endif
#if ANCF_PIPELINES & 1
KERNEL_TWICE(kDecodeThreads)
ancf_decode_whole(const u8 *__restrict__ blob, u8 *__restrict__ dst, u8 *scratch, u64 *status) {
  decode_blob<kWhole>(blob, dst, scratch, status);
}
#endif

/* Checks the header of `blob` and prepares ancf_decode. One block of one warp. `status` is
 * kNotDecoded until the kernel of the blob's pipeline and element type has set it. */
KERNEL(kWarpThreads)
ancf_decode_begin(const u8 *__restrict__ blob, u64 blob_bytes, u64 dst_bytes, u8 *scratch, u64 *status) {
  u32 *work = reinterpret_cast<u32 *>(work_of(scratch));
  for (u32 i = thread_in_block(); i < sizeof(Work) / 4; i += kWarpThreads) work[i] = 0;
  if (thread_in_block() != 0) return;
  Plan plan = {};
  bool ok = blob_bytes >= kHeaderBytes;
  if (ok) {
    u64 words[32];
    for (u32 i = 0; i < 32; i++) words[i] = reinterpret_cast<const u64 *>(blob)[i];
    plan = parse_header(words);
    ok = is_valid(plan, words, blob_bytes, dst_bytes) && directory_ends_fit(plan, blob);
  }
  plan.status = ok ? kOk : kBadHeader;
  *reinterpret_cast<Plan *>(scratch) = plan;
  *status = ok ? kNotDecoded : kBadHeader;
}
