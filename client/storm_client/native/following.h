// A step that follows a script: its expected events and its state so far. `follower.cpp` advances
// along the script; `packing.cpp` packs the saved tensors.
#pragma once

#include "binding.h"
#include "follower.h"
#include "kept.h"
#include "offload_queue.h"
#include "locked.h"
#include "objects.h"
#include "tensors.h"
#include "watching.h"

namespace storm {
namespace follower {

// The step's Python functions that this module calls, with arguments and, after a colon, results.
enum Hook {
  PACK,              // a tensor, the position of the next event: its handle
  PACK_EXPECTED,     // a tensor, the position of the event that expects it: its handle
  PACK_TRIAL,        // the same, and a Recomputed to be compared with the tensor: its handle
  UNPACK,            // a handle that those returned: the tensor
  OFFLOAD,           // a list of waiting Kept: nothing; each is offloaded or stays kept
  OFFLOAD_UNSHARED,  // a list of Unit: a list of uses for LOAD, or None if all stay kept
  LOAD,              // a use that one of the OFFLOAD hooks made: the storage
  PACK_INPUT,        // a recipe's input, its value's number: a handle for RESTORE_INPUT
  RESTORE_INPUT,     // such a handle: the tensor
  PROTECT_INPUTS,    // once the script was left, an address of a storage: nothing; recipes copy it
  FIRST_UNPACK,      // called once, when the backward pass first unpacks a tensor
  HOOKS,
};

// A call in progress, as far as the script needs it.
struct Pending {
  bool is_looked_at = false;
  Begun begun;  // if the call that is expected next is to be recomputed
};

// Hooks of one step. They let Python pack unexpected tensors, after which the step continues
// from the same event, or leaves the script for good.
struct Follower : public Watcher {
  PyObject* self = nullptr;  // the object that contains this
  Ref script_object;
  Ref tallies_object;
  Ref model_storages_object;
  PyObject* hooks[HOOKS] = {};

  const Script* script = nullptr;
  Tallies* tallies = nullptr;
  const ModelStorages* model_storages = nullptr;
  int64_t min_bytes = 0;        // smaller tensors are kept
  uint32_t at = 0;              // index of the next event in the script
  bool follows_script = true;   // until it has left the script
  bool met_unexpected = false;  // a call was not the expected one; Python does not know yet
  int64_t saved_bytes_with_repeats = 0;  // bytes of saved tensors, except those packed by PACK
  std::vector<std::pair<int, int64_t>> larger;  // values with more bytes than the plan knows
  uint32_t small_row = 0;
  uint32_t parameter_row = 0;

  Pending pending[3];  // the calls that began last, by `CallKind`
  const c10::StorageImpl* copied = nullptr;  // the storage that is copied, if there is one
  at::Tensor byproduct;  // of the call, once it is saved
  std::vector<Unpacked> unpacked;
  OffloadQueue queue;
  // Memory that a custom function's backward may have written to, for the next backward pass over
  // the same graph.
  std::unordered_map<const c10::StorageImpl*, c10::Storage> written;
  std::recursive_mutex lock;  // protects `values`, and all results of the step
  Values values;

  const Event& next() const { return script->events[at]; }
  Pending& pending_of(CallKind kind) { return pending[static_cast<int>(kind)]; }
  bool wants_copies(const char* name) const override {
    return !script->copying.empty() && script->copying.count(name) > 0;
  }
  void begins(const at::RecordFunction& call, CallKind kind) override;
  void ends(const at::RecordFunction& call, CallKind kind) override;
  void reports_inner_calls() override {
    pending_of(CallKind::CALL).is_looked_at = false;
    pending_of(CallKind::CALL).begun.clear();
  }
  // Notes a call that the script does not expect. The caller holds `lock`.
  void meet_unexpected() {
    met_unexpected = true;
    values.hold_results();
  }
  bool advance_byproduct(const Called& called, Begun& begun);
  bool advance(const Called& called, uint32_t place, const at::Tensor& output, Begun& begun);
  // Returns whether an output is large enough for scripts.
  bool is_large(const at::TensorImpl* impl) const {
    return static_cast<int64_t>(storage_of(impl)->nbytes()) >= min_bytes;
  }
};

inline Follower& follower_of(PyObject* self) { return value_of<Follower>(self); }

// Offloads the waiting tensors through Python, or those that are due now. Tensors that are not
// offloaded because of an error stay kept.
void offload_waiting(Follower& follower, Which which = Which::ALL);

// Packs the inputs of recipes like saved tensors.
void pack_inputs(Follower& follower);

// Methods of the Python type.
PyObject* pack(PyObject* self, PyObject* object);
PyObject* recompute_for_trial(PyObject* self, PyObject* packed);
PyObject* unpack(PyObject* self, PyObject* packed);

}  // namespace follower
}  // namespace storm
