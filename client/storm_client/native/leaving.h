// What a step has saved, is to leave, and is kept until there are several: to enter Python with cold
// caches takes several times as long as what is done there for one tensor more.
#pragma once

#include "common.h"

namespace storm {

class Leaving {
 public:
  // Has results on a device wait from now on, of `least` bytes or more, up to `most` bytes.
  void begin(c10::Device device, int64_t least, int64_t most);

  // Whether a storage of so many bytes is sent with others, rather than as soon as it may be.
  bool is_small(int64_t nbytes) const { return nbytes <= std::min(most_, MOST_EACH); }

  // Whether a tensor may wait: Python then finds all as it would have found it now.
  bool can_wait(const at::Tensor& tensor) const;

  bool is_empty() const { return kept_.empty(); }
  bool is_full(int64_t more) const { return kept_.size() >= MOST || nbytes_ + more > most_; }

  void add(PyObject* kept, int64_t nbytes);

  // Returns what waits, and keeps it no longer.
  std::vector<Ref> take();

 private:
  static constexpr size_t MOST = 16;
  // More bytes take the link longer than what is done for one tensor takes the thread.
  static constexpr int64_t MOST_EACH = 4 << 20;

  std::vector<Ref> kept_;
  int64_t nbytes_ = 0;
  int64_t least_ = 0;
  int64_t most_ = 0;
  std::optional<c10::Device> device_;
};

}  // namespace storm
