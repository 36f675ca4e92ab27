// What a step has saved, is to leave, and is kept until there are several: to enter Python with cold
// caches takes several times as long as what is done there for one tensor more.
#pragma once

#include "common.h"

#include <c10/util/FunctionRef.h>

namespace storm {

using Group = std::vector<Ref>;

// What is to leave now.
struct Due {
  std::vector<Group> bundles;  // those of each may be copied into one storage
  Group others;
};

class Leaving {
 public:
  // Has results on a device wait from now on, of `least` bytes or more, up to `most` bytes, which are
  // sent `in_place`, or by the thread's own copies.
  void begin(c10::Device device, int64_t least, int64_t most, bool in_place);

  // Whether a storage of so many bytes is sent with others, rather than as soon as it may be.
  bool is_small(int64_t nbytes) const { return nbytes <= std::min(most_, MOST_EACH); }

  // Whether a tensor may wait: Python then finds all as it would have found it now.
  bool can_wait(const at::Tensor& tensor) const;

  bool is_empty() const { return waiting_.empty(); }
  bool is_full(int64_t more) const { return waiting_.size() >= MOST || nbytes_ + more > most_; }

  // Whether something waits that lies in a storage.
  bool has(const c10::StorageImpl* storage) const;

  void add(PyObject* kept, int64_t nbytes);

  // Returns what is to leave, and keeps it no longer. What may be copied, but somebody else holds it
  // or there is no other of its type, waits once for the next time, unless `all` is to leave. Where no
  // `copies` can be made now there are no bundles.
  Due due(bool all, bool copies);

  // That of what waits, if something does.
  c10::Device device() const { return *device_; }

  // Keeps nothing any longer.
  void clear() { take(); }

 private:
  static constexpr size_t MOST = 16;
  // More bytes take the link longer than what is done for one tensor takes the thread.
  static constexpr int64_t MOST_EACH = 4 << 20;

  struct Waiting {
    Ref kept;
    int64_t nbytes;  // of the storage, when it was saved
    bool is_late = false;
  };

  std::vector<Waiting> take();
  bool may_be_copied(const Waiting& one, const std::vector<Waiting>& all) const;

  std::vector<Waiting> waiting_;
  int64_t nbytes_ = 0;
  int64_t least_ = 0;
  int64_t most_ = 0;
  int64_t most_copied_ = 0;  // of each: what more bytes take a thread is more than what Python does
  std::optional<c10::Device> device_;
};

// Given a storage, its dtype, and of each tensor in it its event, its bytes, and those of its storage, 0
// if an earlier one lies there; returns what is the way back to the bytes, or None if they stay.
using SendCopies = c10::function_ref<Ref(PyObject*, PyObject*, PyObject*)>;

// Sends what was kept for now as copies in one storage. Tells whether there was memory for that; what
// has not left is kept.
bool leave_copied(const Group& group, SendCopies send);

}  // namespace storm
