// A step that follows a script: what it is to do, and what it has done so far. `follower.cpp` goes along
// the script, `packing.cpp` decides what becomes of what is saved.
#pragma once

#include "binding.h"
#include "follower.h"
#include "kept.h"
#include "leaving.h"
#include "locked.h"
#include "tensors.h"
#include "watching.h"

namespace storm {
namespace follower {

extern PyObject* is_capturing;  // of torch._C; None where there is no CUDA

// Calls of the step's Python, by what they are for.
enum Hook {
  PACK,            // a tensor, and the position to look at it at: its handle
  PACK_EXPECTED,   // a tensor that the event at a position expects: its handle
  PACK_TRIED,      // the same of one that is recomputed besides, by what is given, and compared
  UNPACK,          // what those return: the tensor
  LEAVE,           // a list of what was kept for now: nothing; it has left, or stays
  LEAVE_UNSHARED,  // storages, dtypes, and what lies in them: a list of what LOAD is given, or None
  LOAD,            // what LEAVE has given one of those, or LEAVE_UNSHARED returned: the storage
  PACK_INPUT,      // a tensor that others are made from, and its number: what BRING is given
  BRING,           // that: the tensor
  MADE,            // a value's number, and a large tensor that has been made: whether Python packs it
  LEAVE_MADE,      // the same of what may leave at once: what LOAD is given, None if it does not
  ASKED,           // called once, when the backward pass asks for something
  HOOKS,
};

// A large result that left as it was made, though somebody may hold it: what is saved of it as long as
// it has not changed has left with it.
struct Left {
  WeakStorage storage;  // keeps its address from being used again
  WeakTensor base;
  uint32_t version;
  std::shared_ptr<Bundle> unsaved;  // until something is saved of it; then that alone keeps it
  std::weak_ptr<Bundle> bundle;
};

// A call that is under way, as far as the script looks at it.
struct Pending {
  bool is_looked_at = false;
  Begun begun;  // if the call that is expected next is to be made again
};

// Hooks of one step. What they do not expect they hand over to Python, where the step goes on from
// the same event, or leaves the script for good.
struct Follower : public Watcher {
  PyObject* self = nullptr;  // whose part this is
  PyObject* script_object = nullptr;
  PyObject* tallies_object = nullptr;
  PyObject* owned_object = nullptr;
  PyObject* hooks[HOOKS] = {};

  const Script* script = nullptr;
  Tallies* tallies = nullptr;
  const Owned* owned = nullptr;
  int64_t least = 0;   // bytes: what has fewer is kept
  uint32_t at = 0;     // in the script
  bool walks = true;   // along the script, until something else happens
  bool parted = false;  // a call was not the one that was expected; Python does not know yet
  int64_t handed_over = 0;  // bytes of what was saved, as far as Python has not looked at it
  std::vector<std::pair<int, int64_t>> larger;  // values of more bytes than the plan knows
  uint32_t small_row = 0;
  uint32_t parameter_row = 0;

  Pending pending[3];  // the calls that began last, by what they are
  const c10::StorageImpl* copied = nullptr;  // in which lies what is copied, if that is a storage
  at::Tensor byproduct;  // of the call, once that is saved
  std::vector<Unpacked> unpacked;
  Leaving leaving;
  std::unordered_map<const c10::StorageImpl*, Left> left;
  std::unordered_set<const c10::StorageImpl*> by_python;  // large results that Python packs
  std::recursive_mutex lock;  // protects `values`, and all results of the step
  Values values;

  const Event& next() const { return script->events[at]; }
  Pending& pending_of(Told told) { return pending[static_cast<int>(told)]; }
  bool wants_copies(const char* name) const override {
    return !script->copying.empty() && script->copying.count(name) > 0;
  }
  void begins(const at::RecordFunction& call, Told told) override;
  void ends(const at::RecordFunction& call, Told told) override;
  void forgets() override {
    pending_of(Told::CALL).is_looked_at = false;
    pending_of(Told::CALL).begun.clear();
  }
  bool advance_byproduct(const Called& called, Begun& begun);
  bool advance(const Called& called, uint32_t place, const at::Tensor& output, Begun& begun);
  // Whether an output is among those that scripts tell of.
  bool is_large(const at::TensorImpl* impl) const {
    return static_cast<int64_t>(storage_of(impl)->nbytes()) >= least;
  }
};

struct FollowerObject {
  PyObject_HEAD
  Follower follower;
};

inline Follower& follower_of(PyObject* self) {
  return reinterpret_cast<FollowerObject*>(self)->follower;
}

// Has Python send what was kept for now, or as much of it as is best sent now. What an error leaves
// is kept.
void send_kept(Follower& follower, Which which = Which::ALL);

// Has what recipes rest on be held as what is saved, and what has been made noted.
void pack_inputs(Follower& follower);

// Methods of Python's.
PyObject* pack(PyObject* self, PyObject* object);
PyObject* recompute_tried(PyObject* self, PyObject* packed);
PyObject* unpack(PyObject* self, PyObject* packed);

}  // namespace follower
}  // namespace storm
