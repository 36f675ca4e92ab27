// What a step has saved, is to leave, and is kept until there are several: to enter Python with cold
// caches takes several times as long as what is done there for one tensor more.
#pragma once

#include "common.h"

#include <c10/util/FunctionRef.h>

namespace storm {

using Group = std::vector<Ref>;

// What is to leave now.
struct Due {
  std::vector<Group> unshared;  // nobody else holds them; those of each are copied into one storage
  Group others;
};

class Leaving {
 public:
  // Has results on a device wait from now on, of `least` bytes or more, up to `most` bytes, which are
  // sent `in_place`, or by the thread's own copies.
  void begin(c10::Device device, int64_t least, int64_t most, bool in_place);

  // Whether a storage of so many bytes is best sent as it was made; see LARGE_BYTES of recording.py.
  static bool is_large(int64_t nbytes) { return nbytes >= LARGE; }

  // Whether a tensor may wait: Python then finds all as it would have found it now.
  bool can_wait(const at::Tensor& tensor) const;

  bool is_empty() const { return waiting_.empty(); }
  bool is_full(int64_t more) const { return waiting_.size() >= MOST || nbytes_ + more > most_; }

  // Whether something waits that lies in a storage.
  bool has(const c10::StorageImpl* storage) const;

  void add(PyObject* kept, int64_t nbytes);

  // Returns what is to leave, and keeps it no longer. What somebody else holds, or could be copied with
  // others of its type, and there is none, waits once for the next time, unless `all` is to leave. Where
  // there is a `capture` nothing counts as unshared: no copies can be made.
  Due due(bool all, bool capture);

  // That of what waits, if something does.
  c10::Device device() const { return *device_; }

  // Keeps nothing any longer.
  void clear() { take(); }

 private:
  static constexpr size_t MOST = 16;
  static constexpr int64_t LARGE = 16 << 20;
  // Of each that is copied: more bytes take longer than what is done for one tensor takes the thread.
  static constexpr int64_t MOST_COPIED = 4 << 20;

  struct Waiting {
    Ref kept;
    int64_t nbytes;  // of the storage, when it was saved
    bool is_late = false;
  };

  std::vector<Waiting> take();
  static bool is_unshared(const Waiting& one, const std::vector<Waiting>& all);

  std::vector<Waiting> waiting_;
  int64_t nbytes_ = 0;
  int64_t least_ = 0;
  int64_t most_ = 0;
  int64_t most_copied_ = 0;  // of each
  std::optional<c10::Device> device_;
};

// Given a list of storages, each with its dtype and a list of the tensors in it: of each its event, its
// bytes, and those of its storage, 0 if an earlier one lies there. Returns what is the way back to the
// bytes of each, or None if all stay.
using Send = c10::function_ref<Ref(PyObject*)>;

// Sends what nobody else holds: what is alone in its group from where it lies, other groups as copies in
// one storage each. What has not left is kept; where there is no memory for copies, it is added to
// `others`.
void leave_unshared(std::vector<Group> groups, Group& others, Send send);

}  // namespace storm
