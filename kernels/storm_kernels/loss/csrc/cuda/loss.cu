/* Passes of a cross-entropy over its logits, one block per row: the statistics that turn a row's
 * logits into log-probabilities, and the gradient from logits and statistics.
 *
 * They must match PyTorch's log_softmax of the logits in float32 bit for bit, so they add in its
 * order (aten/src/ATen/native/cuda/SoftMax.cu, block_reduce.cuh). First each thread adds certain
 * elements one after another; then lanes and warps are added by halves. The order is that of
 * float32 rows, also if the logits have another type: a row begins `shift` floats after a 16-byte
 * boundary. Nothing relies on the match unchecked: the caller has compared the kernels with
 * PyTorch's on the same device. Contraction of products and sums is the compiler's default, as in
 * PyTorch's own build.
 */
#include <loss_device.cuh>

constexpr u32 kForwardThreads = 1024;  /* FORWARD_THREADS in cuda.py */
constexpr u32 kBackwardThreads = 512;  /* BACKWARD_THREADS in cuda.py */
constexpr u32 kVector = 4;             /* floats of 16 bytes */
constexpr float kLowest = -3.402823466e+38f;

struct Bfloat16 {
  typedef u16 Word;
  static DEVICE float load(Word bits) { return from_bfloat16(bits); }
  static DEVICE Word store(float value) { return to_bfloat16(value); }
};
struct Half {
  typedef u16 Word;
  static DEVICE float load(Word bits) { return from_half(bits); }
  static DEVICE Word store(float value) { return to_half(value); }
};
struct Float {
  typedef float Word;
  static DEVICE float load(Word value) { return value; }
  static DEVICE Word store(float value) { return value; }
};

template <class Word, u32 kCount>
struct alignas(sizeof(Word) * kCount) Vector {
  Word at[kCount];
};

/* The elements that a thread takes, in order. PyTorch holds short rows in registers, longer rows in
 * shared memory if they consist of whole vectors, and reads the longest rows twice. */
struct Strided {
  template <class T, class Take>
  static DEVICE void visit(const typename T::Word *row, i64 count, u32, Take take) {
    for (i64 i = thread_in_block(); i < count; i += threads_in_block()) take(T::load(row[i]));
  }
};

template <class T, class Take>
DEVICE void visit_vectors(const typename T::Word *row, i64 end, Take take) {
  typedef Vector<typename T::Word, kVector> Four;
#pragma unroll 4
  for (i64 i = thread_in_block(); i * kVector < end; i += threads_in_block()) {
    Four four = reinterpret_cast<const Four *>(row)[i];
#pragma unroll
    for (u32 j = 0; j < kVector; j++) take(T::load(four.at[j]));
  }
}

struct Vectors {
  template <class T, class Take>
  static DEVICE void visit(const typename T::Word *row, i64 count, u32, Take take) {
    visit_vectors<T>(row, count, take);
  }
};

struct Shifted {
  template <class T, class Take>
  static DEVICE void visit(const typename T::Word *row, i64 count, u32 shift, Take take) {
    i64 threads = threads_in_block(), thread = thread_in_block();
    if (shift > 0) {  /* one element per thread up to the first aligned vector */
      row -= shift;
      count += shift;
      if (thread >= shift && thread < count) take(T::load(row[thread]));
      count -= threads < count ? threads : count;
      row += threads;
    }
    i64 vectors = count - count % (kVector * threads);
    visit_vectors<T>(row, vectors, take);
    for (i64 i = vectors + thread; i < count; i += threads) take(T::load(row[i]));
  }
};

struct Most {
  static constexpr float kNothing = kLowest;
  static DEVICE float of(float a, float b) { return a < b ? b : a; }
};
struct Sum {
  static constexpr float kNothing = 0;
  static DEVICE float of(float a, float b) { return a + b; }
};

template <class Op>
DEVICE float across_warp(float value) {
#pragma unroll
  for (u32 by = kWarp / 2; by > 0; by /= 2) value = Op::of(value, from_lanes_above(value, by));
  return value;
}

/* Reduces the values of all threads; every thread gets the result. */
template <class Op>
DEVICE float across_block(float value) {
  u32 thread = thread_in_block(), lane = thread % kWarp, warp = thread / kWarp;
  float *shared = shared_memory();
  value = across_warp<Op>(value);
  block_barrier();  /* all threads have read the result of an earlier call */
  if (lane == 0) shared[warp] = value;
  block_barrier();
  value = thread < threads_in_block() / kWarp ? shared[lane] : Op::kNothing;
  if (warp == 0) value = across_warp<Op>(value);
  if (thread == 0) shared[0] = value;
  block_barrier();
  return shared[0];
}

/* Computes each row's largest logit, the logarithm of the sum of exp(logit - largest), and the
 * log-probability of its class. `first_shift` is the shift of the first row. */
template <class T, class Order>
DEVICE void forward(const typename T::Word *logits, const i64 *classes, float *picked, float *largest,
                    float *log_total, i64 count, u32 first_shift) {
  i64 row = block_index();
  const typename T::Word *data = logits + row * count;
  u32 shift = static_cast<u32>((first_shift + row * count) % kVector);
  float most = kLowest;
  Order::template visit<T>(data, count, shift, [&](float x) { most = fmaxf(most, x); });
  most = across_block<Most>(most);
  float total = 0;
  Order::template visit<T>(data, count, shift, [&](float x) { total = total + expf(x - most); });
  total = across_block<Sum>(total);
  if (thread_in_block() == 0) {
    float logarithm = logf(total);
    largest[row] = most;
    log_total[row] = logarithm;
    picked[row] = T::load(data[classes[row]]) - most - logarithm;
  }
}

/* Computes the gradient of a row of logits from that of its class's log-probability. `out` may be
 * `logits`. PyTorch first sums the row's gradients, which are zeros except that of the class. */
template <class T>
DEVICE void backward(const typename T::Word *logits, const i64 *classes, const float *gradients,
                     const float *largest, const float *log_total, typename T::Word *out, i64 count) {
  typedef typename T::Word Word;
  constexpr u32 kWide = 16 / sizeof(Word);
  typedef Vector<Word, kWide> Wide;
  i64 row = block_index(), threads = threads_in_block(), thread = thread_in_block();
  const Word *from = logits + row * count;
  Word *to = out + row * count;
  i64 its_class = classes[row];
  float gradient = gradients[row], sum = 0.0f + gradient, most = largest[row], logarithm = log_total[row];
  auto of = [&](Word word, i64 column) {
    float log_probability = T::load(word) - most - logarithm;
    float given = column == its_class ? gradient : 0.0f;
    return T::store(given - expf(log_probability) * sum);
  };
  u64 address = reinterpret_cast<u64>(from);
  i64 lead = (16 - address % 16) % 16 / sizeof(Word);  /* elements before an aligned vector */
  if (lead > count || address % 16 != reinterpret_cast<u64>(to) % 16) lead = count;
  i64 vectors = (count - lead) / kWide, rest = lead + vectors * kWide;
  for (i64 i = thread; i < lead; i += threads) to[i] = of(from[i], i);
  for (i64 i = thread; i < vectors; i += threads) {
    Wide wide = reinterpret_cast<const Wide *>(from + lead)[i];
#pragma unroll
    for (u32 j = 0; j < kWide; j++) wide.at[j] = of(wide.at[j], lead + i * kWide + j);
    reinterpret_cast<Wide *>(to + lead)[i] = wide;
  }
  for (i64 i = rest + thread; i < count; i += threads) to[i] = of(from[i], i);
}

#define FORWARD(name, type, order)                                                                      \
  KERNEL(kForwardThreads, 2) name(const type::Word *logits, const i64 *classes, float *picked,          \
                                  float *largest, float *log_total, i64 count, u32 first_shift) {       \
    forward<type, order>(logits, classes, picked, largest, log_total, count, first_shift);              \
  }
#define LOSS(kind, type)                                                                                \
  FORWARD(loss_forward_strided_##kind, type, Strided)                                                   \
  FORWARD(loss_forward_vectors_##kind, type, Vectors)                                                   \
  FORWARD(loss_forward_shifted_##kind, type, Shifted)                                                   \
  KERNEL(kBackwardThreads, 2) loss_backward_##kind(                                                     \
      const type::Word *logits, const i64 *classes, const float *gradients, const float *largest,       \
      const float *log_total, type::Word *out, i64 count) {                                             \
    backward<type>(logits, classes, gradients, largest, log_total, out, count);                         \
  }

LOSS(bf16, Bfloat16)
LOSS(f16, Half)
LOSS(f32, Float)
