/* The encode kernels: one pass over the tensor for every plan (FORMAT.md).
 *
 * Tiles are drawn from a ticket counter. Fixed blocks are written directly to their place, records
 * to the payload once their place is known. A kernel ends with any number of blocks, and every byte
 * of the blob depends only on the input.
 */
#include <ancf_encode_dense.cuh>
#include <ancf_encode_fast.cuh>
#include <ancf_encode_header.cuh>
#include <ancf_encode_sparse.cuh>
#include <ancf_encode_whole.cuh>

/* Pipelines fast and whole: blocks of kBlockThreads, divided into teams. */
template <Pipeline kPipeline>
DEVICE void encode_by_teams(const u8 *src, u8 *dst, u8 *scratch, Result *result, u32 unit_tiles) {
  let_next_begin();
  await_launches_before();
  const Plan &plan = *plan_of(scratch);
  if (pipeline_of(plan) != kPipeline) return;
  Team team = Team::here();
  u8 *memory = shared_memory();
  TeamShared *shared = reinterpret_cast<TeamShared *>(memory) + team.id;
  u8 *arena = memory + kTeams * sizeof(TeamShared) + team.id * kArenaBytes;
  u8 *table = memory + kTeams * (sizeof(TeamShared) + kArenaBytes);
  Encoding job{plan, plan.raw_nbytes, dst + plan.fixed_offset, block_bytes(plan, kTile),
               static_cast<u32>(plan.elements / kTile), static_cast<u32>(plan.elements % kTile),
               (plan.flags & kFlagChecksum) != 0, src, dst, work_of(scratch), prefixes_of(scratch), unit_tiles,
               team, shared, arena, false, 0, 0};
  if constexpr (kPipeline == kFast) {
    with_code<kFast>(plan, EncodeFast{job, table});
  } else {
    if (!has_tiles(plan.mode)) encode_flat(job);
    else if (plan.mode == kInteger) encode_integers(job);
    else encode_values(job, values_of(scratch));
  }
  finish(plan, job.units(), job.check, dst, scratch, result);
}

/* The shared memory of the other two pipelines: one part per warp, then a CodeTable. Two blocks
 * share a multiprocessor. Dense has as many warps as leave each thread enough registers. */
constexpr u32 kCodeTableBytes = kWidth == 8 ? 32768 : 4096;
constexpr u32 kDenseWarps = kWidth == 8 ? 7 : kWidth == 4 ? 8 : 12;
constexpr u32 kBitmapWarps = kWidth == 1 ? 16 : kWidth == 2 ? 11 : kWidth == 4 ? 6 : 2;
constexpr u32 kDenseShared = kDenseWarps * kDenseRoom + kCodeTableBytes;
constexpr u32 kBitmapShared = kBitmapWarps * kSparseRoom + kCodeTableBytes;

/* Runs the encoder of a code. */
template <Pipeline kPipeline>
struct EncodeByWarps {
  WarpEncoding &job;
  u8 *memory;
  template <class C>
  DEVICE void run() const {
    static_assert(sizeof(CodeTable<C>) <= kCodeTableBytes, "a table must fit");
    CodeTable<C> &table = *reinterpret_cast<CodeTable<C> *>(memory);
    table.fill(job.plan);
    barrier(0, threads_in_block());
    if constexpr (kPipeline == kWithBitmap) SparseEncoder<C>::make(job, table).encode_all();
    else DenseEncoder<C>::make(job, table).encode_all();
  }
};

template <Pipeline kPipeline>
DEVICE void encode_by_warps(const u8 *src, u8 *dst, u8 *scratch, Result *result) {
  constexpr bool kHasBitmap = kPipeline == kWithBitmap;
  constexpr u32 kRoom = kHasBitmap ? kSparseRoom : kDenseRoom, kWarps = kHasBitmap ? kBitmapWarps : kDenseWarps;
  static_assert(kRoom % 16 == 0, "aligned rooms");
  let_next_begin();
  await_launches_before();
  const Plan &plan = *plan_of(scratch);
  if (pipeline_of(plan) != kPipeline) return;
  u8 *memory = shared_memory();
  WarpEncoding job{plan, plan.raw_nbytes, dst + plan.fixed_offset, block_bytes(plan, kTile),
                   plan.tiles, src, dst, work_of(scratch), prefixes_of(scratch),
                   memory + thread_in_block() / kWarpThreads * kRoom, thread_in_block() % kWarpThreads,
                   (plan.flags & kFlagChecksum) != 0, 0};
  with_code<kPipeline>(plan, EncodeByWarps<kPipeline>{job, memory + kWarps * kRoom});
  finish(plan, plan.tiles, job.check, dst, scratch, result);
}

/* Encode `src` to `dst` by the plan in `scratch`; only the kernel of the plan's pipeline does so.
 * Any number of blocks; the host knows their threads, and reads their dynamic shared memory from
 * here. `dst`: 16-byte aligned, kHeaderBytes + raw_nbytes bytes. */
#if ANCF_PIPELINES & 2
extern "C" __device__ const u32 ancf_encode_fast_shared_bytes = kSharedBytes;
KERNEL_TWICE(kBlockThreads)
ancf_encode_fast(const u8 *__restrict__ src, u8 *__restrict__ dst, u8 *scratch, Result *result, u32 unit_tiles) {
  encode_by_teams<kFast>(src, dst, scratch, result, unit_tiles);
}
#endif
#if ANCF_PIPELINES & 4
extern "C" __device__ const u32 ancf_encode_dense_shared_bytes = kDenseShared;
KERNEL_TWICE(kDenseWarps * kWarpThreads)
ancf_encode_dense(const u8 *__restrict__ src, u8 *__restrict__ dst, u8 *scratch, Result *result) {
  encode_by_warps<kDense>(src, dst, scratch, result);
}
#endif
#if ANCF_PIPELINES & 8
extern "C" __device__ const u32 ancf_encode_bitmap_shared_bytes = kBitmapShared;
KERNEL_TWICE(kBitmapWarps * kWarpThreads)
ancf_encode_bitmap(const u8 *__restrict__ src, u8 *__restrict__ dst, u8 *scratch, Result *result) {
  encode_by_warps<kWithBitmap>(src, dst, scratch, result);
}
#endif
#if ANCF_PIPELINES & 1
extern "C" __device__ const u32 ancf_encode_whole_shared_bytes = kSharedBytes;
KERNEL_TWICE(kBlockThreads)
ancf_encode_whole(const u8 *__restrict__ src, u8 *__restrict__ dst, u8 *scratch, Result *result, u32 unit_tiles) {
  encode_by_teams<kWhole>(src, dst, scratch, result, unit_tiles);
}
#endif

/* Value of `launched` if all encoders that the plan may need were launched. */
constexpr u32 kAllPipelines = 255;

/* Runs after the encoders: copies the original bytes if the encoding turned out too large. If only
 * the encoder of the guessed pipeline `launched` ran and the plan has another pipeline, it writes
 * the whole raw blob, since no kernel has read the source. */
KERNEL_TWICE(kBlockThreads)
ancf_encode_raw(const u8 *__restrict__ src, u8 *__restrict__ dst, u8 *scratch, Result *result, u32 launched) {
  await_launches_before();
  const Plan &plan = *plan_of(scratch);
  Work *work = work_of(scratch);
  bool is_left = launched != kAllPipelines && pipeline_of(plan) != launched;
  if (!is_left && !work->copy_raw) return;
  u64 check = 0;
  visit_chunks(src, plan.raw_nbytes, [&](const uint4 (&rows)[kRows], u64 at, u32 lane) {
    store_chunk(rows, dst + kHeaderBytes, at, plan.raw_nbytes, lane);
    if (is_left) check += column_check(rows, at, lane);
  });
  if (!is_left) return;
  if (thread_in_block() == 0) fetch_add(&work->refused, 1u);
  finish(plan, plan.tiles, check, dst, scratch, result);
}

/* A range of device memory. */
struct Span {
  const u8 *address;
  u64 nbytes;
};

/* Computes each span's checksum for raw blobs whose bytes are copied by other means. Every block
 * writes its partial sum; all sums plus the length's term (FORMAT.md, section 8) are the checksum.
 * Any number of blocks. */
extern "C" __device__ const u32 ancf_check_shared_bytes = kBlockThreads / kWarpThreads * sizeof(u64);
KERNEL_TWICE(kBlockThreads)
ancf_check(const Span *spans, u32 count, u64 *sums) {
  await_launches_before();
  u64 *of_warps = reinterpret_cast<u64 *>(shared_memory());
  for (u32 number = 0; number < count; number++) {
    u64 sum = 0;
    visit_chunks(spans[number].address, spans[number].nbytes, [&](const uint4 (&rows)[kRows], u64 at, u32 lane) {
      sum += column_check(rows, at, lane);
    });
    sum = over_lanes(sum);
    if (thread_in_block() % kWarpThreads == 0) of_warps[thread_in_block() / kWarpThreads] = sum;
    barrier(0, kBlockThreads);
    if (thread_in_block() == 0) {
      for (u32 warp = 1; warp < kBlockThreads / kWarpThreads; warp++) sum += of_warps[warp];
      sums[number * block_count() + block_index()] = sum;
    }
    barrier(0, kBlockThreads);
  }
}
