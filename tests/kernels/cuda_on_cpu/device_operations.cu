/* Every operation of ancf_device.cuh, for a test that a device and the CPU that stands in for it
 * get the same results. Why by itself: where both sides of a test run on the CPU, an operation
 * that means something else on a device goes unseen.
 * What stays true: arguments are such that a device's answer is defined, and each result is put
 * under a name of its own, in the order of this file, which is how the test knows it.
 */
#include <ancf_device.cuh>  /* the kernels' own, or the CPU's beside this file */

/* What a lane writes to and reads back; zeros at first. */
struct Cell {
  uint4 four;
  uint2 two;
  u64 wide;
  u32 word, counter;
};
static_assert(sizeof(Cell) == 48, "the test gives each lane this many bytes");

/* A lane's three words and where it puts its next result: four words, of which unused ones are 0. */
struct Lane {
  u32 number, a, b, c;
  uint4 *result;

  DEVICE void put(const char *, uint4 value) {
    *result = value;
    result += kWarpThreads;
  }
  DEVICE void put(const char *name, uint2 value) { put(name, make_uint4(value.x, value.y, 0, 0)); }
  template <class T>
  DEVICE void put(const char *name, T value) {
    put(name, make_uint4(static_cast<u32>(value), static_cast<u32>(static_cast<u64>(value) >> 32), 0, 0));
  }
  DEVICE u64 wide() const { return static_cast<u64>(b) << 32 | a; }
  DEVICE u64 other_wide() const { return static_cast<u64>(c) << 32 | b; }
};

DEVICE void places(Lane &lane) {
  lane.put("thread_in_block", thread_in_block());
  lane.put("block_index", block_index());
  lane.put("block_count", block_count());
  lane.put("threads_in_block", threads_in_block());
}

DEVICE void bits(Lane &lane) {
  u32 a = lane.a, b = lane.b, c = lane.c, not_zero = a != 0 ? a : 1;
  lane.put("ones", ones(a));
  lane.put("lowest_bit", lowest_bit(not_zero));
  lane.put("highest_bit", highest_bit(not_zero));
  lane.put("nonzero_halves", nonzero_halves(a));
  lane.put("pick_bytes", pick_bytes(a, b, c));
  lane.put("pick_bytes_or_signs", pick_bytes_or_signs(a, b, c));
  lane.put("pick_bytes, constant", pick_bytes(a, b, 0x6420));
  lane.put("pick_bytes_or_signs, constant", pick_bytes_or_signs(a, b, 0xba98));
  lane.put("funnel_right", funnel_right(a, b, c));
}

DEVICE void exchanges(Lane &lane) {
  u32 a = lane.a, b = lane.b;
  lane.put("shuffle", shuffle(a, b));
  lane.put("shuffle, 64 bits", shuffle(lane.wide(), lane.c));
  lane.put("shuffle_up", shuffle_up(a, b % kWarpThreads));
  lane.put("shuffle_xor", shuffle_xor(a, b % kWarpThreads));
  lane.put("shuffle_xor, 64 bits", shuffle_xor(lane.wide(), lane.c % kWarpThreads));
  lane.put("add_from_below", add_from_below(a, b % kWarpThreads));
  lane.put("lanes_where", lanes_where(a > b));
  lane.put("most_of_lanes", most_of_lanes(a));
  lane.put("sum_of_lanes", sum_of_lanes(a));
  lane.put("bits_of_lanes", bits_of_lanes(a));
  lane.put("any_lane", any_lane(a != 0));
}

DEVICE void loads(Lane &lane, const u32 *words) {
  const u16 *halves = reinterpret_cast<const u16 *>(words);
  const u8 *bytes = reinterpret_cast<const u8 *>(words);
  const uint2 *twos = reinterpret_cast<const uint2 *>(words);
  const uint4 *fours = reinterpret_cast<const uint4 *>(words);
  u32 at = lane.number, four_at = lane.number % 24;
  let_next_begin();
  await_launches_before();
  prefetch_line(bytes + at);
  lane.put("load_cached", load_cached(words + at));
  lane.put("load_cached, 16 bits", load_cached(halves + at));
  lane.put("load_cached, 8 bits", load_cached(bytes + at));
  lane.put("load_cached, two words", load_cached(twos + at));
  lane.put("load_cached, four words", load_cached(fours + four_at));
  lane.put("load_once", load_once(words + at));
  lane.put("load_once, 16 bits", load_once(halves + at));
  lane.put("load_once, 8 bits", load_once(bytes + at));
  lane.put("load_once, two words", load_once(twos + at));
  lane.put("load_once, four words", load_once(fours + four_at));

  uint4 *shared = reinterpret_cast<uint4 *>(shared_memory());
  copy_behind(reinterpret_cast<u8 *>(shared + at), bytes + 16 * four_at);
  copies_arrived();
  warp_barrier();
  lane.put("copy_behind", shared[kWarpThreads - 1 - at]);
}

DEVICE void stores(Lane &lane, Cell *own) {
  store_once(&own->four, make_uint4(lane.a, lane.b, lane.c, lane.number));
  store_once(&own->two, make_uint2(lane.c, lane.a));
  store_shared_word(&own->wide, lane.wide());
  lane.put("store_once, four words", own->four);
  lane.put("store_once, two words", own->two);
  lane.put("store_shared_word", own->wide);
  lane.put("load_shared_word", load_shared_word(&own->wide));
}

/* On a cell of the lane's own, so that every value on the way is known. */
DEVICE void updates(Lane &lane, Cell *own) {
  u32 a = lane.a, b = lane.b, c = lane.c;
  own->word = a;
  lane.put("fetch_add, before", fetch_add(&own->word, b));
  lane.put("fetch_add, after", own->word);
  fetch_or(&own->word, c);
  lane.put("fetch_or", own->word);
  fetch_min(&own->word, b);
  lane.put("fetch_min", own->word);

  own->wide = lane.wide();
  lane.put("fetch_add, 64 bits, before", fetch_add(&own->wide, lane.other_wide()));
  lane.put("fetch_add, 64 bits, after", own->wide);
  fetch_or(&own->wide, static_cast<u64>(a) << 32 | c);
  lane.put("fetch_or, 64 bits", own->wide);
  fetch_min(&own->wide, lane.other_wide());
  lane.put("fetch_min, 64 bits", own->wide);

  own->counter = c;
  lane.put("take_number, before", take_number(&own->counter));
  lane.put("take_number, after", own->counter);
}

/* On one cell for the whole warp: what is left does not depend on whose turn comes first. */
DEVICE void shared_updates(Lane &lane, Cell *common) {
  fetch_add(&common->wide, lane.wide());
  fetch_or(&common->word, lane.c);
  memory_fence();
  pause();
  barrier(1, kWarpThreads);
  lane.put("fetch_add, 64 bits, by all lanes", load_shared_word(&common->wide));
  lane.put("fetch_or, by all lanes", load_once(&common->word));
}

/* A block of one warp and 512 bytes of shared memory for each 3 x 32 words: first every lane's a,
 * then its b, then its c. `results` takes `operations` x 32 results a block, `cells` has 33. */
KERNEL(32) device_operations(const u32 *words, uint4 *results, Cell *cells, u32 operations) {
  u32 number = thread_in_block();
  words += 3 * kWarpThreads * block_index();
  results += static_cast<u64>(operations) * kWarpThreads * block_index();
  cells += (kWarpThreads + 1) * block_index();
  Lane lane = {number, words[number], words[kWarpThreads + number], words[2 * kWarpThreads + number],
               results + number};
  places(lane);
  bits(lane);
  exchanges(lane);
  loads(lane, words);
  stores(lane, cells + number);
  updates(lane, cells + number);
  shared_updates(lane, cells + kWarpThreads);
}
