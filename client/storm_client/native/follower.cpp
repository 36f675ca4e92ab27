#include "follower.h"

#include "binding.h"
#include "kept.h"
#include "leaving.h"
#include "locked.h"
#include "recomputed.h"
#include "tensors.h"
#include "watching.h"

#include <c10/core/InferenceMode.h>
#include <torch/csrc/Storage.h>

namespace storm {
namespace follower {

PyObject* is_capturing = nullptr;  // of torch._C; None where there is no CUDA

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

Follower& follower_of(PyObject* self) {
  return reinterpret_cast<FollowerObject*>(self)->follower;
}

PyObject* create(PyTypeObject* type, PyObject* arguments, PyObject*) {
  HANDLE_TH_ERRORS
  PyObject *script, *tallies, *owned, *hooks;
  long long least = 0;
  unsigned small_row = 0, parameter_row = 0;
  expect(PyArg_ParseTuple(arguments, "O!O!O!O!LII", &ScriptType, &script, &TalliesType, &tallies,
                          &OwnedType, &owned, &PyTuple_Type, &hooks, &least, &small_row,
                          &parameter_row));
  if (PyTuple_GET_SIZE(hooks) != HOOKS) {
    PyErr_Format(PyExc_ValueError, "%zd hooks, and there are %d", PyTuple_GET_SIZE(hooks), HOOKS);
    throw python_error();
  }
  Ref self = expected(type->tp_alloc(type, 0));
  auto& follower = *new (&follower_of(self.get())) Follower();
  follower.self = self.get();
  follower.script_object = Py_NewRef(script);
  follower.tallies_object = Py_NewRef(tallies);
  follower.owned_object = Py_NewRef(owned);
  for (int hook = 0; hook < HOOKS; ++hook) {
    follower.hooks[hook] = Py_NewRef(PyTuple_GET_ITEM(hooks, hook));
  }
  follower.script = &script_of(script);
  follower.tallies = &tallies_of(tallies);
  follower.owned = &owned_of(owned);
  follower.least = least;
  follower.small_row = small_row;
  follower.parameter_row = parameter_row;
  if (!follower.script->calls.empty()) look_for_overridden();
  return self.release();
  END_HANDLE_TH_ERRORS
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  for (PyObject* hook : follower_of(self).hooks) Py_VISIT(hook);
  return 0;
}

int clear(PyObject* self) {
  follower_of(self).leaving.clear();
  for (PyObject*& hook : follower_of(self).hooks) Py_CLEAR(hook);
  return 0;
}

void dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  clear(self);
  auto& follower = follower_of(self);
  Py_CLEAR(follower.script_object);
  Py_CLEAR(follower.tallies_object);
  Py_CLEAR(follower.owned_object);
  follower.~Follower();
  Py_TYPE(self)->tp_free(self);
}

Ref ask(const Follower& follower, Hook which, PyObject* first, PyObject* second = nullptr,
        PyObject* third = nullptr) {
  Ref hook = Ref::borrowed(follower.hooks[which]);  // which may be dropped meanwhile
  if (!hook) {
    PyErr_SetString(PyExc_RuntimeError, "the step of these hooks is gone");
    throw python_error();
  }
  Unwatched untold;  // what Python does then is no part of the step
  PyObject* arguments[] = {first, second, third};
  const size_t count = (first != nullptr) + (second != nullptr) + (third != nullptr);
  return expected(PyObject_Vectorcall(hook.get(), arguments, count, nullptr));
}

// --- calls ------------------------------------------------------------------------------------

// Notes what decides what a call makes.
void note_begin(const Call& call, const at::RecordFunction& called, Begun& begun) {
  note_read(called, begun.inputs);
  if (!draws_numbers(call, begun.inputs)) return;
  const at::Tensor first = output_at(begun.inputs, 0);
  if (first.defined()) begun.draw = Draw::begin(first);
}

void Follower::begins(const at::RecordFunction& begun, Told told) {
  auto& pending = pending_of(told);
  pending.begun.clear();
  if (told == Told::COPY) {
    const auto* impl = begun.inputs().front().toTensor().unsafeGetTensorImpl();
    copied = impl->has_storage() ? storage_of(impl) : nullptr;
  }
  pending.is_looked_at = walks && !parted && script->names.count(begun.name()) > 0;
  if (!pending.is_looked_at) return;
  for (size_t expected = script->next_call[at]; expected < script->calls.size(); ++expected) {
    const auto& one = script->calls[expected];
    if (one.name == begun.name() && one.overload == begun.overload_name()) {
      const bool keeps = expected + 1 < script->calls.size() &&
                         script->calls[expected + 1].place == KEPT;
      const auto& last = keeps ? script->calls[expected + 1] : one;
      const bool is_bound = one.does == Does::RECOMPUTE || last.does == Does::RECOMPUTE;
      if (is_bound) note_begin(one.does == Does::RECOMPUTE ? one : last, begun, pending.begun);
      return;
    }
    if (!one.is_cast && !one.is_copy) return;  // those of its arguments end before it does
  }
}

void Follower::ends(const at::RecordFunction& ended, Told told) {
  auto& pending = pending_of(told);
  if (!pending.is_looked_at || parted) return pending.begun.clear();
  pending.is_looked_at = false;
  if (pending.begun.draw != nullptr) pending.begun.draw->end();
  uint32_t place = 0;
  const Called called{ended.name(), ended.overload_name()};
  Locked locked(lock);
  for_each_tensor(ended.outputs(), [&](const at::Tensor& output) {
    auto* impl = output.unsafeGetTensorImpl();
    const bool is_view = told == Told::COPY && is_ordinary(impl) && storage_of(impl) == copied;
    const bool is_told = is_ordinary(impl) && !is_view && is_in_graph(output) && is_large(impl);
    if (is_told && !parted) parted = !advance(called, place, output, pending.begun);
    Begun& call = pending_of(Told::CALL).begun;
    const bool is_cast = told == Told::CAST && place == 0 && casts_argument();
    if (is_told && is_cast && !pending.begun.inputs.empty() && !call.inputs.empty()) {
      call.casts.push_back({pending.begun.inputs.front().toTensor(), output});
    }
    ++place;
  });
  if (told == Told::CALL && !parted) parted = !advance_byproduct(called, pending.begun);
  if (told == Told::CALL) byproduct.reset();
  pending.begun.clear();
}

// Goes past what a call keeps if the script expects that; tells whether it can be recomputed.
bool Follower::advance_byproduct(const Called& called, Begun& begun) {
  const Event& event = next();
  if (event.what != What::CALL) return true;
  const Call& expected = script->calls[event.call];
  if (expected.place != KEPT || !(expected.called() == called)) return true;
  ++at;
  if (!byproduct.defined()) return true;  // it was handed over
  Seen* seen = values.look_up(event, byproduct);
  return seen != nullptr && bind_byproduct(*script, expected, begun, byproduct, *seen, values, *owned,
                                           least, unpacked);
}

// Tells whether an output of a call is what the script expects, and does what becomes of it.
bool Follower::advance(const Called& called, uint32_t place, const at::Tensor& output, Begun& begun) {
  const Event& event = next();
  if (event.what != What::CALL) return false;
  const Call& expected = script->calls[event.call];
  const auto nbytes = static_cast<int64_t>(storage_of(output.unsafeGetTensorImpl())->nbytes());
  if (!(expected.called() == called) || expected.place != place) return false;
  if (expected.does != Does::COUNT) {
    if (expected.dtype && *expected.dtype != output.scalar_type()) return false;
    Seen* seen = values.look_up(event, output);
    if (seen == nullptr) return false;
    if (expected.does == Does::RECOMPUTE &&
        !bind(*script, expected, begun, output, *seen, values, *owned, least, unpacked)) {
      return false;
    }
  }
  if (expected.leaves && Leaving::is_large(nbytes)) {
    unpacked.push_back({output, event.number, nullptr});
  }
  ++at;
  return true;
}

// launched(what a Launch of eager/launches.py has)
PyObject* launched(PyObject* self, PyObject* arguments) {
  HANDLE_TH_ERRORS
  auto& follower = follower_of(self);
  PyObject *kernel, *tensors, *options, *made;
  Py_ssize_t over = 0;
  expect(PyArg_ParseTuple(arguments, "OO!O!O!n", &kernel, &PyList_Type, &tensors, &PyDict_Type,
                          &options, &PyList_Type, &made, &over));
  Locked locked(follower.lock);
  Begun begun;
  for (Py_ssize_t at = 0; at < over; ++at) {
    const auto& tensor = THPVariable_Unpack(PyList_GET_ITEM(tensors, at));
    begun.former.push_back(follower.values.overwritten(tensor));
  }
  const bool is_looked_at = follower.walks && !follower.parted &&
                            follower.script->kernels.count(kernel) > 0 &&
                            !c10::impl::TorchDispatchModeTLS::any_modes_set();
  if (!is_looked_at) Py_RETURN_NONE;
  const Called called{nullptr, nullptr, kernel};
  begun.launch = std::make_shared<Launch>(kernel, options);
  for (Py_ssize_t at = 0; at < PyList_GET_SIZE(tensors); ++at) {
    begun.inputs.emplace_back(THPVariable_Unpack(PyList_GET_ITEM(tensors, at)));
  }
  for (Py_ssize_t at = 0; at < PyList_GET_SIZE(made) && !follower.parted; ++at) {
    const auto& output = THPVariable_Unpack(PyList_GET_ITEM(made, at));
    const auto* impl = output.unsafeGetTensorImpl();
    if (!follower.is_large(impl)) continue;
    follower.parted = !follower.advance(called, static_cast<uint32_t>(at), output, begun);
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* overwritten(PyObject* self, PyObject* object) {
  HANDLE_TH_ERRORS
  if (!THPVariable_Check(object)) Py_RETURN_NONE;
  const auto& tensor = THPVariable_Unpack(object);
  if (!is_ordinary(tensor.unsafeGetTensorImpl())) Py_RETURN_NONE;
  Locked locked(follower_of(self).lock);
  follower_of(self).values.overwritten(tensor);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// --- saved tensors ----------------------------------------------------------------------------

bool captures(c10::Device device) {
  if (!device.is_cuda() || is_capturing == Py_None) return false;
  Ref found = expected(PyObject_CallNoArgs(is_capturing));
  return PyObject_IsTrue(found.get()) == 1;
}

// Has Python send what was kept for now, or as much of it as is best sent now. What an error leaves
// is kept.
void send_kept(Follower& follower, Which which = Which::ALL) {
  auto& leaving = follower.leaving;
  if (leaving.is_empty()) return;
  Due due = leaving.due(which, captures(leaving.device()));
  if (!due.unshared.empty()) {
    leave_unshared(std::move(due.unshared), due.others,
                   [&](PyObject* units) { return ask(follower, LEAVE_UNSHARED, units); });
  }
  if (due.others.empty()) return;
  Ref list = expected(PyList_New(0));
  for (const auto& one : due.others) expect(PyList_Append(list.get(), one.get()) == 0);
  ask(follower, LEAVE, list.get());
}

// Whether Python would find a tensor's storage saved already, if what waits had left.
bool waits(const Follower& follower, PyObject* tensor) {
  if (follower.leaving.is_empty()) return false;
  if (!THPVariable_Check(tensor)) return true;
  auto* impl = THPVariable_Unpack(tensor).unsafeGetTensorImpl();
  return !is_ordinary(impl) || follower.leaving.has(storage_of(impl));
}

bool can_wait(const Follower& follower, const at::Tensor& tensor) {
  const auto* storage = storage_of(tensor.unsafeGetTensorImpl());
  return follower.leaving.can_wait(tensor) && !captures(tensor.device()) &&
         !follower.owned->has(storage) && follower.by_python.count(storage) == 0;
}

// Holds a tensor of a result that has left already; null where none has, or it has changed since.
Ref held_with_left(Follower& follower, const at::Tensor& tensor, uint32_t row) {
  const auto found = follower.left.find(storage_of(tensor.unsafeGetTensorImpl()));
  if (found == follower.left.end()) return {};
  auto& [storage, base, version, unsaved, bundle] = found->second;
  const bool is_first = unsaved != nullptr;
  auto of = is_first ? std::move(unsaved) : bundle.lock();
  const auto* made = base_of(tensor).unsafeGetTensorImpl();
  const bool is_same = base._unsafe_get_target() == made && made->version_counter().current_version() == version;
  if (of == nullptr || !is_same || !tensor.grad_fn() || !is_result(tensor)) {
    follower.left.erase(found);
    return {};
  }
  unsaved = nullptr;
  Ref kept = Ref::stolen(keep(tensor));
  leave_in(kept.get(), std::move(of), 0);
  if (!is_first) follower.tallies->add(row, nbytes_of(tensor.unsafeGetTensorImpl()));
  return kept;
}

// Keeps a tensor until there are others to leave with it.
Ref wait_for_others(Follower& follower, const at::Tensor& tensor, int position) {
  const auto nbytes = static_cast<int64_t>(storage_of(tensor.unsafeGetTensorImpl())->nbytes());
  if (follower.leaving.is_full(nbytes)) send_kept(follower, Which::BATCH);
  Ref kept = Ref::stolen(keep_for_now(tensor, position));
  follower.leaving.add(kept.get(), nbytes);
  return kept;
}

// Returns what holds an input of a recipe.
Ref packed_input(Follower& follower, const at::Tensor& tensor, int number) {
  const auto& script = *follower.script;
  const auto saved = script.saved.find(number);
  if (saved != script.saved.end()) {
    Ref held = held_with_left(follower, tensor, script.events[script.next[saved->second]].row);
    if (held) return held;
    if (can_wait(follower, tensor)) return wait_for_others(follower, tensor, saved->second);
  }
  Ref wrapped = expected(THPVariable_Wrap(tensor));
  Ref of = expected(PyLong_FromLong(number));
  return ask(follower, PACK_INPUT, wrapped.get(), of.get());
}

// Whether a large result may leave now: all that it is read for as it is.
bool may_leave(const Follower& follower, const at::Tensor& tensor) {
  const auto* impl = tensor.unsafeGetTensorImpl();
  return is_ordinary(const_cast<at::TensorImpl*>(impl)) && &base_of(tensor) == &tensor &&
         static_cast<size_t>(nbytes_of(impl)) == storage_of(impl)->nbytes() &&
         can_wait(follower, tensor);
}

// Has a large result leave that has been made, or Python note that it was.
void note_made(Follower& follower, const at::Tensor& tensor, int number) {
  const auto* storage = storage_of(tensor.unsafeGetTensorImpl());
  Ref wrapped = expected(THPVariable_Wrap(tensor));
  Ref of = expected(PyLong_FromLong(number));
  if (may_leave(follower, tensor)) {
    auto bundle = std::make_shared<Bundle>(std::vector{tensor.storage()}, tensor.device());
    const uint32_t version = tensor.unsafeGetTensorImpl()->version_counter().current_version();
    Ref use = ask(follower, LEAVE_MADE, of.get(), wrapped.get());
    if (use.get() != Py_None) {
      bundle->leave(use.get());
      for (Ref& kept : follower.leaving.take(storage)) leave_in(kept.get(), bundle, 0);
      const bool is_saved = bundle.use_count() > 1;
      follower.left.insert_or_assign(
          storage, Left{tensor.storage().getWeakStorageImpl(), WeakTensor(tensor.getIntrusivePtr()),
                        version, is_saved ? nullptr : bundle, bundle});
      return;
    }
  }
  if (follower.leaving.has(storage)) send_kept(follower);
  Ref is_packed = ask(follower, MADE, of.get(), wrapped.get());
  if (PyObject_IsTrue(is_packed.get()) == 1) follower.by_python.insert(storage);
}

// Has what recipes rest on be held as what is saved, and what has been made noted.
void pack_inputs(Follower& follower) {
  while (!follower.unpacked.empty()) {
    const auto [tensor, number, source] = std::move(follower.unpacked.back());
    follower.unpacked.pop_back();
    if (source == nullptr) {
      note_made(follower, tensor, number);
      continue;
    }
    Ref packed = packed_input(follower, tensor, number);
    Locked locked(follower.lock);
    source->is_packed(packed.get());
  }
}

// Has Python do what becomes of a tensor, which tells by `go_on` or `leave` how the step goes on.
// A negative position has it leave the script there.
Ref hand_over(Follower& follower, PyObject* tensor, bool leaves) {
  if (leaves || !follower.walks || waits(follower, tensor)) send_kept(follower);
  const long at = follower.next().position;
  Ref position = expected(PyLong_FromLong(leaves ? -1 - at : at));
  return ask(follower, PACK, tensor, position.get());
}

Ref stay(Follower& follower, const at::Tensor& tensor, uint32_t row) {
  Ref kept = Ref::stolen(keep(tensor));
  follower.tallies->add(row, nbytes_of(tensor.unsafeGetTensorImpl()));
  return kept;
}

// Goes on behind the next event, which is a tensor that is saved.
void go_past(Follower& follower, int64_t nbytes) {
  const Event& event = follower.next();
  follower.handed_over += nbytes;
  if (nbytes > event.most) follower.larger.emplace_back(event.number, nbytes);
  ++follower.at;
}

Ref give_up(Follower& follower, const at::Tensor& tensor, Seen& seen) {
  if (seen.result == nullptr) seen.result = Result::held(base_of(tensor));
  return Ref::stolen(recomputed(seen.result, tensor));
}

// What becomes of a result, or an alias of one, that the next event expects.
Ref pack_result(Follower& follower, PyObject* object, const at::Tensor& tensor) {
  const Event& event = follower.next();
  const auto nbytes = static_cast<int64_t>(storage_of(tensor.unsafeGetTensorImpl())->nbytes());
  if (event.what == What::RECOMPUTE && captures(tensor.device())) {
    return hand_over(follower, object, /*leaves=*/true);
  }
  Ref tried;
  if (event.matters) {
    Locked locked(follower.lock);
    Seen* seen = follower.values.look_up(event, tensor);
    if (seen != nullptr && event.what == What::RECOMPUTE) {
      tried = give_up(follower, tensor, *seen);
      if (event.is_byproduct) follower.byproduct = tensor;
    }
    if (seen == nullptr) follower.parted = true;
  }
  if (follower.parted) return hand_over(follower, object, /*leaves=*/true);
  go_past(follower, nbytes);
  if (tried && event.proved.have(nbytes)) {
    follower.tallies->add(event.row, nbytes_of(tensor.unsafeGetTensorImpl()));
    return tried;
  }
  if (event.what == What::KEEP && nbytes <= event.most) return stay(follower, tensor, event.row);
  if (!tried) {
    Ref held = held_with_left(follower, tensor, event.row);
    if (held) return held;
    if (can_wait(follower, tensor)) return wait_for_others(follower, tensor, event.position);
  }
  if (waits(follower, object)) send_kept(follower);
  Ref position = expected(PyLong_FromLong(event.position));
  if (tried) return ask(follower, PACK_TRIED, object, position.get(), tried.get());
  return ask(follower, PACK_EXPECTED, object, position.get());
}

// Whether a tensor has the value now that the next event expects.
bool is_known(Follower& follower, const at::Tensor& tensor) {
  Locked locked(follower.lock);
  return !follower.next().is_new && follower.values.look_up(follower.next(), tensor) != nullptr;
}

// Whether a tensor is a parameter or a view of one.
bool is_of_parameter(PyObject* object, const at::Tensor& tensor) {
  const auto is_one = [](PyObject* one) {
    return reinterpret_cast<PyObject*>(Py_TYPE(one)) == parameter_type();
  };
  const at::Tensor& base = base_of(tensor);
  if (&base == &tensor || !base.is_leaf()) return is_one(object);
  return is_one(expected(THPVariable_Wrap(base)).get());
}

// Whether the graph holds a tensor for another reason than to add up its gradient.
bool is_no_leaf(const at::Tensor& tensor) { return !tensor.requires_grad() || tensor.grad_fn(); }

// The order of questions is that of `StepHooks._pack` and `Policy.decide`.
Ref pack_ordinary(Follower& follower, PyObject* object, const at::Tensor& tensor) {
  const auto* impl = tensor.unsafeGetTensorImpl();
  const auto* storage = storage_of(impl);
  const Event& event = follower.next();
  const int64_t nbytes = nbytes_of(impl);
  if (nbytes == 0 || (nbytes < follower.least && !is_view(tensor))) {
    return stay(follower, tensor, follower.small_row);
  }
  const auto stored = static_cast<int64_t>(storage->nbytes());
  const bool is_save = event.what != What::CALL && event.what != What::END;
  const bool fits = is_save && stored >= follower.least && !follower.parted;
  const bool is_kept = event.is_byproduct && event.what == What::RECOMPUTE;
  if (fits && (is_kept || is_result(tensor)) && !follower.owned->has(storage)) {
    return pack_result(follower, object, tensor);
  }
  if (follower.owned->has(storage) || is_of_parameter(object, tensor)) {
    return stay(follower, tensor, follower.parameter_row);
  }
  if (stored < follower.least && is_no_leaf(tensor) && !c10::isQIntType(tensor.scalar_type())) {
    return stay(follower, tensor, follower.small_row);  // a view of what is small
  }
  if (fits && event.what == What::KEEP && !event.matters && stored <= event.most &&
      !tensor.requires_grad()) {
    go_past(follower, stored);
    return stay(follower, tensor, event.row);
  }
  // An alias that is no result itself, of one that the step knows: Python does not know it.
  if (fits && event.matters && is_known(follower, tensor)) {
    return pack_result(follower, object, tensor);
  }
  return hand_over(follower, object, follower.parted);
}

PyObject* pack(PyObject* self, PyObject* object) {
  HANDLE_TH_ERRORS
  auto& follower = follower_of(self);
  if (!follower.unpacked.empty()) pack_inputs(follower);
  if (follower.leaving.has_unshared_large()) send_kept(follower, Which::LARGE);
  auto* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  if (follower.walks && (type == THPVariableClass || type == parameter_type())) {
    const auto& tensor = THPVariable_Unpack(object);
    if (is_ordinary(tensor.unsafeGetTensorImpl())) {
      return pack_ordinary(follower, object, tensor).release();
    }
  }
  return hand_over(follower, object, follower.walks && follower.parted).release();
  END_HANDLE_TH_ERRORS
}

at::Tensor recompute(Follower& follower, PyObject* packed) {
  const auto& version = version_of_recomputed(packed);
  version.check();
  at::Tensor replaced = version.replaced();
  if (replaced.defined()) return replaced;
  const auto began = std::chrono::steady_clock::now();
  Locked locked(follower.lock);
  Bringing bring(follower.hooks[BRING], follower.hooks[LOAD]);
  at::Tensor tensor = unpack_recomputed(packed, bring);
  const std::chrono::duration<double> lasted = std::chrono::steady_clock::now() - began;
  follower.tallies->replay_seconds += lasted.count() - bring.seconds;
  return tensor;
}

// Returns what the recipe of a Recomputed makes, to be compared; None where it has none.
PyObject* recompute_tried(PyObject* self, PyObject* packed) {
  HANDLE_TH_ERRORS
  auto& follower = follower_of(self);
  if (Py_TYPE(packed) != &RecomputedType) {
    PyErr_SetString(PyExc_TypeError, "what is recomputed is a Recomputed");
    throw python_error();
  }
  c10::InferenceMode guard(false);
  Locked locked(follower.lock);
  Bringing bring(follower.hooks[BRING], follower.hooks[LOAD]);
  at::Tensor made = make_recomputed(packed, bring);
  if (!made.defined()) Py_RETURN_NONE;
  return THPVariable_Wrap(made);
  END_HANDLE_TH_ERRORS
}

PyObject* unpack(PyObject* self, PyObject* packed) {
  HANDLE_TH_ERRORS
  auto& follower = follower_of(self);
  if (follower.hooks[ASKED] != nullptr) {
    Ref asked = Ref::stolen(std::exchange(follower.hooks[ASKED], nullptr));
    expected(PyObject_CallNoArgs(asked.get()));
  }
  send_kept(follower);
  const auto* type = Py_TYPE(packed);
  if (type == &KeptType && has_left(packed)) {
    c10::InferenceMode guard(false);
    return THPVariable_Wrap(
        unpack_left(packed, [&](PyObject* use) { return ask(follower, LOAD, use); }));
  }
  PyObject* moved = type == &KeptType ? moved_of(packed) : nullptr;
  if (moved != nullptr) {
    Ref held = Ref::borrowed(moved);
    return ask(follower, UNPACK, held.get()).release();
  }
  if (type != &KeptType && type != &RecomputedType) return ask(follower, UNPACK, packed).release();
  c10::InferenceMode guard(false);  // PyTorch will set the version of what is returned
  const bool is_kept = type == &KeptType;
  return THPVariable_Wrap(is_kept ? unpack_kept(packed) : recompute(follower, packed));
  END_HANDLE_TH_ERRORS
}

// --- the step's course ------------------------------------------------------------------------

PyObject* watch(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  auto& follower = follower_of(self);
  if (follower.script->calls.empty()) Py_RETURN_NONE;
  follower.watch();
  Py_INCREF(self);  // until nobody is told any more
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* unwatch(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  if (follower_of(self).unwatch()) Py_DECREF(self);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* go_on(PyObject* self, PyObject* argument) {
  auto& follower = follower_of(self);
  const long position = PyLong_AsLong(argument);
  if (position == -1 && PyErr_Occurred()) return nullptr;
  const auto& next = follower.script->next;
  if (position < 0 || static_cast<size_t>(position) >= next.size()) {
    PyErr_Format(PyExc_ValueError, "position is %ld, and the script has %zu", position, next.size());
    return nullptr;
  }
  if (position != follower.next().position) follower.at = next[position];
  Py_RETURN_NONE;
}

PyObject* leave(PyObject* self, PyObject*) {
  follower_of(self).walks = false;
  Py_RETURN_NONE;
}

// (an example of what may be kept for now, of the same device; how many bytes of it; whether they are
// sent from where they lie)
PyObject* together(PyObject* self, PyObject* arguments) {
  HANDLE_TH_ERRORS
  PyObject* example;
  long long most = 0;
  int in_place = 0;
  expect(PyArg_ParseTuple(arguments, "OLp", &example, &most, &in_place));
  auto& follower = follower_of(self);
  follower.leaving.begin(THPVariable_Unpack(example).device(), follower.least, most, in_place);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* forget(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  auto& follower = follower_of(self);
  follower.leaving.clear();
  auto unpacked = std::exchange(follower.unpacked, {});
  auto left = std::exchange(follower.left, {});
  follower.by_python.clear();
  Locked locked(follower.lock);
  follower.values.clear();
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* end(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  auto& follower = follower_of(self);
  pack_inputs(follower);
  send_kept(follower);
  expected(forget(self, nullptr));
  return PyLong_FromLong(follower.parted || !follower.walks ? -1 : follower.next().position);
  END_HANDLE_TH_ERRORS
}

// (bytes of what was saved, a list of values with their bytes where those are more than planned)
PyObject* get_sizes(PyObject* self, void*) {
  HANDLE_TH_ERRORS
  const auto& follower = follower_of(self);
  Ref larger = expected(PyList_New(0));
  for (const auto& [number, nbytes] : follower.larger) {
    Ref one = expected(Py_BuildValue("iL", number, static_cast<long long>(nbytes)));
    expect(PyList_Append(larger.get(), one.get()) == 0);
  }
  return Py_BuildValue("LO", static_cast<long long>(follower.handed_over), larger.get());
  END_HANDLE_TH_ERRORS
}

PyObject* get_walks(PyObject* self, void*) { return PyBool_FromLong(follower_of(self).walks); }

// The object whose method looks at what is handed over: that of the step.
PyObject* get_owner(PyObject* self, void*) {
  HANDLE_TH_ERRORS
  PyObject* hook = follower_of(self).hooks[PACK];
  if (hook == nullptr) Py_RETURN_NONE;
  return expected(PyObject_GetAttrString(hook, "__self__")).release();
  END_HANDLE_TH_ERRORS
}

PyMethodDef METHODS[] = {
    {"pack", pack, METH_O, "Return what autograd is to hold instead of a tensor."},
    {"unpack", unpack, METH_O, "Return the tensor that was packed."},
    {"recompute", recompute_tried, METH_O,
     "Return what the recipe of a Recomputed makes; None where it has none."},
    {"watch", watch, METH_NOARGS, "Look at what this thread calls from now on."},
    {"unwatch", unwatch, METH_NOARGS, "Look at nothing any more that it calls."},
    {"launched", launched, METH_VARARGS, "Note what a launch of a kernel has made."},
    {"overwritten", overwritten, METH_O, "Note that a launch has written to a tensor's memory."},
    {"go_on", go_on, METH_O, "Go on from a position among all events of the signature."},
    {"together", together, METH_VARARGS,
     "Have results on the device of an example leave together, up to so many bytes, in place or not."},
    {"leave", leave, METH_NOARGS, "Have Python look at all that is saved from now on."},
    {"end", end, METH_NOARGS,
     "Return how many events there were, -1 if others; nothing is called or saved any more."},
    {"forget", forget, METH_NOARGS, "Let go of what is only needed for what is saved next."},
    {nullptr, nullptr, 0, nullptr},
};

PyGetSetDef GETTERS[] = {
    {"owner", get_owner, nullptr, "What looks at what is handed over.", nullptr},
    {"sizes", get_sizes, nullptr, "What was seen of the sizes of what is saved.", nullptr},
    {"walks", get_walks, nullptr, "Whether the step is still along its script.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyTypeObject follower_type() {
  PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};
  type.tp_name = "storm_client.native._follow.Follower";
  type.tp_basicsize = sizeof(FollowerObject);
  type.tp_dealloc = dealloc;
  type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC;
  type.tp_doc = "Saved-tensor hooks of one step that follows a script.";
  type.tp_traverse = traverse;
  type.tp_clear = clear;
  type.tp_methods = METHODS;
  type.tp_getset = GETTERS;
  type.tp_new = create;
  return type;
}

}  // namespace follower

PyTypeObject FollowerType = follower::follower_type();

void set_is_capturing(PyObject* function) {
  Py_INCREF(function);
  Py_XSETREF(follower::is_capturing, function);
}

}  // namespace storm
