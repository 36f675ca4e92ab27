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

// What of all that waits.
enum class Which : uint8_t { ALL, BATCH, LARGE };

class Leaving {
 public:
  // Has results on a device wait from now on, of `least` bytes or more, up to `most` bytes, which are
  // sent `in_place`, or by the thread's own copies.
  void begin(c10::Device device, int64_t least, int64_t most, bool in_place);

  // Whether a storage of so many bytes is best sent as it was made; see LARGE_BYTES of recording.py.
  static bool is_large(int64_t nbytes) { return nbytes >= LARGE; }

  // Whether a tensor may wait: Python then finds all as it would have found it now. A large one waits
  // for the time when nobody else holds it, and for no others.
  bool can_wait(const at::Tensor& tensor) const;

  bool is_empty() const { return waiting_.empty(); }

  // Whether something has to leave before so many bytes more may wait.
  bool is_full(int64_t more) const;

  // Whether nobody else holds one of the large that wait.
  bool has_unshared_large() const;

  // Whether something waits that lies in a storage.
  bool has(const c10::StorageImpl* storage) const;

  void add(PyObject* kept, int64_t nbytes);

  // Returns what is to leave, and keeps it no longer. What somebody else holds, or could be copied with
  // others of its type, and there is none, waits once for the next time, unless ALL is to leave; what is
  // large waits for as long as somebody holds it. Where there is a `capture` nothing counts as unshared:
  // no copies can be made.
  Due due(Which which, bool capture);

  // Returns what waits that lies in a storage, and keeps it no longer.
  Group take(const c10::StorageImpl* storage);

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

    bool is_large() const { return Leaving::is_large(nbytes); }
  };

  void wait(Waiting&& one);
  std::vector<Waiting> take();
  static bool is_unshared(const Waiting& one, const std::vector<Waiting>& all);

  std::vector<Waiting> waiting_;
  size_t small_ = 0;    // how many of them are not large
  int64_t nbytes_ = 0;  // of those
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
