// The saved-tensor hooks of a step that follows a script: `pack` returns the handle that autograd
// holds instead of a tensor, and `unpack` returns the tensor.
#include "configured.h"
#include "following.h"
#include "recomputed.h"

#include <c10/core/InferenceMode.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/graph_task.h>

namespace storm {
namespace follower {

Ref call_hook(const Follower& follower, Hook which, PyObject* first, PyObject* second = nullptr,
              PyObject* third = nullptr) {
  Ref hook = Ref::borrowed(follower.hooks[which]);  // the follower may drop it meanwhile
  if (!hook) {
    PyErr_SetString(PyExc_RuntimeError, "the step of these hooks is gone");
    throw python_error();
  }
  PausedWatching paused;  // Python's own calls are no part of the step
  PyObject* arguments[] = {first, second, third};
  const size_t count = (first != nullptr) + (second != nullptr) + (third != nullptr);
  return expected(PyObject_Vectorcall(hook.get(), arguments, count, nullptr));
}

bool captures(c10::Device device) {
  if (!device.is_cuda() || configured.is_capturing == Py_None) return false;
  Ref found = expected(PyObject_CallNoArgs(configured.is_capturing));
  return PyObject_IsTrue(found.get()) == 1;
}

void offload_waiting(Follower& follower, Which which) {
  auto& queue = follower.queue;
  if (queue.is_empty()) return;
  Due due = queue.due(which, captures(queue.device()));
  if (!due.unshared.empty()) {
    offload_unshared(std::move(due.unshared), due.others, [&](PyObject* units) {
      return call_hook(follower, OFFLOAD_UNSHARED, units);
    });
  }
  if (due.others.empty()) return;
  Ref others = list();
  for (const auto& one : due.others) append(others, one.get());
  call_hook(follower, OFFLOAD, others.get());
}

// Returns whether Python might find a tensor to be a duplicate, if the waiting ones were offloaded.
bool may_duplicate_waiting(const Follower& follower, PyObject* tensor) {
  if (follower.queue.is_empty()) return false;
  if (!THPVariable_Check(tensor)) return true;
  auto* impl = THPVariable_Unpack(tensor).unsafeGetTensorImpl();
  return !is_ordinary(impl) || follower.queue.has(storage_of(impl));
}

bool can_wait(const Follower& follower, const at::Tensor& tensor) {
  const auto* storage = storage_of(tensor);
  return follower.queue.can_wait(tensor) && !captures(tensor.device()) &&
         !follower.model_storages->has(storage);
}

// Keeps the tensor of a value until it is offloaded with others.
Ref wait_for_others(Follower& follower, const at::Tensor& tensor, int number) {
  const auto nbytes = stored_bytes(tensor);
  if (follower.queue.is_full(nbytes)) offload_waiting(follower, Which::BATCH);
  Ref kept = Ref::stolen(keep_for_now(tensor, number));
  follower.queue.add(kept.get(), nbytes);
  return kept;
}

// Returns the handle of a recipe's input.
Ref packed_input(Follower& follower, const at::Tensor& tensor, int number) {
  const Planned& planned = follower.script->values.at(number);
  if (stored_bytes(tensor) <= planned.max_bytes) {
    if (planned.is_kept) return Ref::stolen(keep(tensor));
    if (can_wait(follower, tensor)) return wait_for_others(follower, tensor, number);
  }
  Ref wrapped = expected(THPVariable_Wrap(tensor));
  Ref of = expected(PyLong_FromLong(number));
  return call_hook(follower, PACK_INPUT, wrapped.get(), of.get());
}

void pack_inputs(Follower& follower) {
  while (!follower.unpacked.empty()) {
    const auto [tensor, number, source] = std::move(follower.unpacked.back());
    follower.unpacked.pop_back();
    if (!source->keeps(tensor)) continue;  // the recipe goes on reading the memory that it keeps
    Ref packed = packed_input(follower, tensor, number);
    Locked locked(follower.lock);
    source->is_packed(packed.get());
  }
}

// Lets Python pack a tensor. Python calls `continue_at` or `leave_script` to say how the step
// continues. If `leaves_script`, it gets a negative position, so that the step leaves the script
// there.
Ref pack_in_python(Follower& follower, PyObject* tensor, bool leaves_script) {
  if (leaves_script || !follower.follows_script || may_duplicate_waiting(follower, tensor)) {
    offload_waiting(follower);
  }
  const long at = follower.next().position;
  Ref position = expected(PyLong_FromLong(leaves_script ? -1 - at : at));
  return call_hook(follower, PACK, tensor, position.get());
}

Ref keep_counted(Follower& follower, const at::Tensor& tensor, uint32_t row) {
  Ref kept = Ref::stolen(keep(tensor));
  follower.tallies->add(row, nbytes_of(tensor.unsafeGetTensorImpl()));
  return kept;
}

// Advances past the next event, which is a saved tensor.
void advance_past_save(Follower& follower, int64_t nbytes) {
  const Event& event = follower.next();
  follower.saved_bytes_with_repeats += nbytes;
  if (nbytes > event.max_bytes) follower.larger.emplace_back(event.number, nbytes);
  ++follower.at;
}

Ref make_recomputed_handle(Follower& follower, const at::Tensor& tensor, TrackedStorage& tracked) {
  if (tracked.result == nullptr) tracked.result = Result::held(base_of(tensor));
  return Ref::stolen(recomputed(tracked.result, tensor));
}

// Packs a result, or an alias of one, that the next event expects.
Ref pack_result(Follower& follower, PyObject* object, const at::Tensor& tensor) {
  const Event& event = follower.next();
  const auto nbytes = stored_bytes(tensor);
  if (event.what == What::RECOMPUTE && captures(tensor.device())) {
    return pack_in_python(follower, object, /*leaves_script=*/true);
  }
  Ref handle;
  if (event.matters) {
    Locked locked(follower.lock);
    TrackedStorage* tracked = follower.values.look_up(event, tensor);
    if (tracked != nullptr && event.what == What::RECOMPUTE) {
      handle = make_recomputed_handle(follower, tensor, *tracked);
      if (event.is_byproduct) follower.byproduct = tensor;
    }
    if (tracked == nullptr) follower.meet_unexpected();
  }
  if (follower.met_unexpected) return pack_in_python(follower, object, /*leaves_script=*/true);
  advance_past_save(follower, nbytes);
  if (handle && event.proved.have(nbytes)) {
    follower.tallies->add(event.row, nbytes_of(tensor.unsafeGetTensorImpl()));
    return handle;
  }
  if (event.what == What::KEEP && nbytes <= event.max_bytes) {
    return keep_counted(follower, tensor, event.row);
  }
  if (!handle) {
    if (can_wait(follower, tensor)) return wait_for_others(follower, tensor, event.number);
  }
  if (may_duplicate_waiting(follower, object)) offload_waiting(follower);
  Ref position = expected(PyLong_FromLong(event.position));
  if (handle) return call_hook(follower, PACK_TRIAL, object, position.get(), handle.get());
  return call_hook(follower, PACK_EXPECTED, object, position.get());
}

// Returns whether a tensor now has the value that the next event expects.
bool is_known(Follower& follower, const at::Tensor& tensor) {
  Locked locked(follower.lock);
  return !follower.next().is_new && follower.values.look_up(follower.next(), tensor) != nullptr;
}

// Returns whether a tensor is a parameter or a view of one.
bool is_of_parameter(PyObject* object, const at::Tensor& tensor) {
  const auto is_one = [](PyObject* one) {
    return reinterpret_cast<PyObject*>(Py_TYPE(one)) == configured.parameter;
  };
  const at::Tensor& base = base_of(tensor);
  if (&base == &tensor || !base.is_leaf()) return is_one(object);
  return is_one(expected(THPVariable_Wrap(base)).get());
}

// Returns false for a leaf that the graph holds to accumulate its gradient.
bool is_no_leaf(const at::Tensor& tensor) { return !tensor.requires_grad() || tensor.grad_fn(); }

// The checks have the order of those in `StepHooks._pack` and `Policy.decide`.
Ref pack_ordinary(Follower& follower, PyObject* object, const at::Tensor& tensor) {
  const auto* impl = tensor.unsafeGetTensorImpl();
  const auto* storage = storage_of(impl);
  const Event& event = follower.next();
  const int64_t nbytes = nbytes_of(impl);
  if (nbytes == 0 || (nbytes < follower.min_bytes && !is_view(tensor))) {
    return keep_counted(follower, tensor, follower.small_row);
  }
  const auto stored = static_cast<int64_t>(storage->nbytes());
  const bool is_save = event.what != What::CALL && event.what != What::END;
  const bool fits = is_save && stored >= follower.min_bytes && !follower.met_unexpected;
  const bool is_recomputed_byproduct = event.is_byproduct && event.what == What::RECOMPUTE;
  if (fits && (is_recomputed_byproduct || is_result(tensor)) &&
      !follower.model_storages->has(storage)) {
    return pack_result(follower, object, tensor);
  }
  if (follower.model_storages->has(storage) || is_of_parameter(object, tensor)) {
    return keep_counted(follower, tensor, follower.parameter_row);
  }
  if (stored < follower.min_bytes && is_no_leaf(tensor) && !c10::isQIntType(tensor.scalar_type())) {
    return keep_counted(follower, tensor, follower.small_row);  // a view of a small tensor
  }
  if (fits && event.what == What::KEEP && !event.matters && stored <= event.max_bytes &&
      !tensor.requires_grad()) {
    advance_past_save(follower, stored);
    return keep_counted(follower, tensor, event.row);
  }
  // An alias of a result that the step knows, but no result itself: Python would not recognize it.
  if (fits && event.matters && is_known(follower, tensor)) {
    return pack_result(follower, object, tensor);
  }
  return pack_in_python(follower, object, follower.met_unexpected);
}

PyObject* pack(PyObject* self, PyObject* object) {
  HANDLE_TH_ERRORS
  auto& follower = follower_of(self);
  if (!follower.unpacked.empty()) pack_inputs(follower);
  if (follower.queue.has_unshared_large()) offload_waiting(follower, Which::LARGE);
  auto* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  if (follower.follows_script && (type == THPVariableClass || type == configured.parameter)) {
    const auto& tensor = THPVariable_Unpack(object);
    if (is_ordinary(tensor.unsafeGetTensorImpl())) {
      return pack_ordinary(follower, object, tensor).release();
    }
  }
  const bool leaves_script = follower.follows_script && follower.met_unexpected;
  return pack_in_python(follower, object, leaves_script).release();
  END_HANDLE_TH_ERRORS
}

at::Tensor recompute(Follower& follower, PyObject* packed) {
  const auto& version = version_of_recomputed(packed);
  version.check();
  at::Tensor replaced = version.replaced();
  if (replaced.defined()) return replaced;
  const auto began = std::chrono::steady_clock::now();
  Locked locked(follower.lock);
  InputRestorer restorer(follower.hooks[RESTORE_INPUT], follower.hooks[LOAD]);
  at::Tensor tensor = unpack_recomputed(packed, restorer);
  const std::chrono::duration<double> lasted = std::chrono::steady_clock::now() - began;
  follower.tallies->recomputed(lasted.count() - restorer.seconds, restorer.operations);
  return tensor;
}

// Returns the output of a Recomputed's recipe, for a comparison; None if it has no recipe.
PyObject* recompute_for_trial(PyObject* self, PyObject* packed) {
  HANDLE_TH_ERRORS
  auto& follower = follower_of(self);
  if (Py_TYPE(packed) != &RecomputedType) {
    PyErr_SetString(PyExc_TypeError, "what is recomputed is a Recomputed");
    throw python_error();
  }
  c10::InferenceMode guard(false);
  Locked locked(follower.lock);
  InputRestorer restorer(follower.hooks[RESTORE_INPUT], follower.hooks[LOAD]);
  at::Tensor made = make_recomputed(packed, restorer);
  if (!made.defined()) Py_RETURN_NONE;
  return THPVariable_Wrap(made);
  END_HANDLE_TH_ERRORS
}

// Returns the address of the storage that was packed.
const c10::StorageImpl* packed_storage(PyObject* packed) {
  if (Py_TYPE(packed) == &KeptType) return version_of_kept(packed).storage();
  if (Py_TYPE(packed) == &RecomputedType) return version_of_recomputed(packed).storage();
  Ref version = expected(PyObject_GetAttrString(packed, "version"));
  Ref storage = expected(PyObject_GetAttrString(version.get(), "storage"));
  return static_cast<const c10::StorageImpl*>(PyLong_AsVoidPtr(storage.get()));
}

// Prepares for uncounted writes to an unpacked tensor, by a custom function's backward or a script:
// recipes that read the memory get copies, and the next pass over a retained graph gets the memory.
void hand_out(Follower& follower, PyObject* packed, const at::Tensor& tensor) {
  const auto* impl = tensor.unsafeGetTensorImpl();
  const c10::StorageImpl* saved = packed_storage(packed);
  if (!impl->has_storage() || saved == nullptr) return;
  const c10::StorageImpl* storages[] = {saved, storage_of(impl)};
  {
    Locked locked(follower.lock);
    InputRestorer restorer(follower.hooks[RESTORE_INPUT], follower.hooks[LOAD]);
    for (const auto* storage : storages) follower.values.protect_inputs(storage, restorer);
    if (Py_TYPE(packed) == &RecomputedType) protect_recomputed(packed, tensor);
  }
  if (torch::autograd::get_current_node() && torch::autograd::get_current_graph_task_keep_graph()) {
    follower.written.insert_or_assign(storage_of(impl), tensor.storage());
  }
  if (follower.follows_script) return;
  for (const auto* storage : storages) {
    Ref address = expected(PyLong_FromVoidPtr(const_cast<c10::StorageImpl*>(storage)));
    call_hook(follower, PROTECT_INPUTS, address.get());
  }
}

Ref unpacked(Follower& follower, PyObject* packed) {
  if (follower.hooks[FIRST_UNPACK] != nullptr) {
    Ref hook = Ref::stolen(std::exchange(follower.hooks[FIRST_UNPACK], nullptr));
    expected(PyObject_CallNoArgs(hook.get()));
  }
  offload_waiting(follower);
  const auto* type = Py_TYPE(packed);
  if (type == &KeptType && is_offloaded(packed)) {
    c10::InferenceMode guard(false);
    return expected(THPVariable_Wrap(
        unpack_offloaded(packed, [&](PyObject* use) { return call_hook(follower, LOAD, use); })));
  }
  PyObject* handle = type == &KeptType ? python_handle_of(packed) : nullptr;
  if (handle != nullptr) {
    Ref held = Ref::borrowed(handle);
    return call_hook(follower, UNPACK, held.get());
  }
  if (type != &KeptType && type != &RecomputedType) {
    return call_hook(follower, UNPACK, packed);
  }
  c10::InferenceMode guard(false);  // PyTorch sets the version of the returned tensor
  const bool is_kept = type == &KeptType;
  return expected(THPVariable_Wrap(is_kept ? unpack_kept(packed) : recompute(follower, packed)));
}

PyObject* unpack(PyObject* self, PyObject* packed) {
  HANDLE_TH_ERRORS
  auto& follower = follower_of(self);
  Ref tensor = unpacked(follower, packed);
  if (!is_own_backward()) {
    hand_out(follower, packed, THPVariable_Unpack(tensor.get()));
  }
  return tensor.release();
  END_HANDLE_TH_ERRORS
}

}  // namespace follower
}  // namespace storm
