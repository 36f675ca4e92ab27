// Saved tensors of a step that are to be offloaded, and wait until there are several. Entering
// Python with cold caches takes several times as long as the work there for one more tensor.
#pragma once

#include "common.h"

#include <c10/util/FunctionRef.h>

namespace storm {

using Group = std::vector<Ref>;

// The tensors to offload now.
struct Due {
  std::vector<Group> unshared;  // nobody else holds them; each group is copied into one storage
  Group others;
};

// Which of the waiting tensors to offload.
enum class Which : uint8_t { ALL, BATCH, LARGE };

class OffloadQueue {
 public:
  // Lets results on a device wait from now on: those of at least `min_bytes`, up to `max_bytes` in
  // all. They are sent `in_place`, or copied by the training thread.
  void begin(c10::Device device, int64_t min_bytes, int64_t max_bytes, bool in_place);

  // Returns whether a storage of so many bytes is sent as soon as nobody else holds it: its transfer
  // takes so long that waiting for others gains nothing.
  static bool is_large(int64_t nbytes) { return nbytes >= LARGE_BYTES; }

  // Returns whether a tensor may wait: Python later finds the same state as it would now. A large
  // one waits until nobody else holds it, and not for other tensors.
  bool can_wait(const at::Tensor& tensor) const;

  bool is_empty() const { return waiting_.empty(); }

  // Returns whether waiting tensors have to be offloaded before `more` bytes may wait.
  bool is_full(int64_t more) const;

  // Returns whether a large tensor waits that nobody else holds.
  bool has_unshared_large() const;

  // Returns whether a tensor waits that lies in a storage.
  bool has(const c10::StorageImpl* storage) const;

  void add(PyObject* kept, int64_t nbytes);

  // Returns the tensors to offload, and holds them no longer. Unless ALL are to be offloaded, a
  // tensor waits once more if somebody else holds it, or if it could be copied with others of its
  // dtype but none waits. A large tensor waits as long as somebody else holds it. During a CUDA
  // graph `capture` nothing counts as unshared: no copies can be made.
  Due due(Which which, bool capture);

  // Returns the device of the waiting tensors, if there are any.
  c10::Device device() const { return *device_; }

  // Drops all waiting tensors.
  void clear() { take(); }

 private:
  static constexpr size_t MAX_WAITING = 16;
  static constexpr int64_t LARGE_BYTES = 16 << 20;
  // Of each tensor that is copied: copying more takes longer than the thread's work for one tensor.
  static constexpr int64_t MAX_COPIED = 4 << 20;

  struct Waiting {
    Ref kept;
    int64_t nbytes;  // of the storage, when it was saved
    bool is_late = false;

    bool is_large() const { return OffloadQueue::is_large(nbytes); }
  };

  void wait(Waiting&& one);
  std::vector<Waiting> take();
  static bool is_unshared(const Waiting& one, const std::vector<Waiting>& all);

  std::vector<Waiting> waiting_;
  size_t small_ = 0;    // how many of them are not large
  int64_t nbytes_ = 0;  // of those
  int64_t min_bytes_ = 0;
  int64_t max_bytes_ = 0;
  int64_t max_copied_ = 0;  // of each copied tensor
  std::optional<c10::Device> device_;
};

// Takes a list of storages, each with its dtype and a list of the tensors in it: for each tensor
// its event, its bytes, and the bytes of its storage, 0 if an earlier tensor shares that. Returns
// what restores each storage, or None if all stay kept.
using Send = c10::function_ref<Ref(PyObject*)>;

// Sends tensors that nobody else holds. A group with a single storage is sent in place; other
// groups are copied into one storage each. Tensors that are not offloaded stay kept. If there is no
// memory for copies, they are added to `others`.
void offload_unshared(std::vector<Group> groups, Group& others, Send send);

}  // namespace storm
