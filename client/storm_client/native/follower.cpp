// How a step advances along its script: its calls, its beginning and its end.
#include "following.h"

#include <cstring>

namespace storm {
namespace follower {

PyObject* create(PyTypeObject* type, PyObject* arguments, PyObject*) {
  HANDLE_TH_ERRORS
  PyObject *script, *tallies, *model_storages, *hooks;
  long long min_bytes = 0;
  unsigned small_row = 0, parameter_row = 0;
  expect(PyArg_ParseTuple(arguments, "O!O!O!O!LII", &ScriptType, &script, &TalliesType, &tallies,
                          &ModelStoragesType, &model_storages, &PyTuple_Type, &hooks, &min_bytes,
                          &small_row, &parameter_row));
  if (PyTuple_GET_SIZE(hooks) != HOOKS) {
    PyErr_Format(PyExc_ValueError, "%zd hooks, and there are %d", PyTuple_GET_SIZE(hooks), HOOKS);
    throw python_error();
  }
  Ref self = object_of<Follower>(type);
  auto& follower = follower_of(self.get());
  follower.self = self.get();
  follower.script_object = Ref::borrowed(script);
  follower.tallies_object = Ref::borrowed(tallies);
  follower.model_storages_object = Ref::borrowed(model_storages);
  for (int hook = 0; hook < HOOKS; ++hook) {
    follower.hooks[hook] = Py_NewRef(PyTuple_GET_ITEM(hooks, hook));
  }
  follower.script = &value_of<Script>(script);
  follower.tallies = &value_of<Tallies>(tallies);
  follower.model_storages = &value_of<ModelStorages>(model_storages);
  follower.min_bytes = min_bytes;
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
  follower_of(self).queue.clear();
  for (PyObject*& hook : follower_of(self).hooks) Py_CLEAR(hook);
  return 0;
}

void dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  clear(self);
  destroy<Follower>(self);
}

// --- calls ------------------------------------------------------------------------------------

// Records what decides a call's output: its inputs and its random numbers.
void note_begin(const Call& call, const at::RecordFunction& called, Begun& begun) {
  note_read(called, begun.inputs);
  if (!draws_numbers(call, begun.inputs)) return;
  const at::Tensor first = output_at(begun.inputs, 0);
  if (first.defined()) begun.draw = Draw::begin(first);
}

void Follower::begins(const at::RecordFunction& begun, CallKind kind) {
  auto& pending = pending_of(kind);
  pending.begun.clear();
  if (kind == CallKind::COPY) {
    const auto* impl = begun.inputs().front().toTensor().unsafeGetTensorImpl();
    copied = impl->has_storage() ? storage_of(impl) : nullptr;
  }
  pending.is_looked_at = follows_script && !met_unexpected && script->names.count(begun.name()) > 0;
  if (!pending.is_looked_at) return;
  for (size_t expected = script->next_call[at]; expected < script->calls.size(); ++expected) {
    const auto& one = script->calls[expected];
    if (one.name == begun.name() && one.overload == begun.overload_name()) {
      const bool keeps = expected + 1 < script->calls.size() &&
                         script->calls[expected + 1].place == KEPT;
      const auto& last = keeps ? script->calls[expected + 1] : one;
      const bool makes_recipe = one.does == Does::RECOMPUTE || last.does == Does::RECOMPUTE;
      if (makes_recipe) note_begin(one.does == Does::RECOMPUTE ? one : last, begun, pending.begun);
      return;
    }
    if (!one.is_cast && !one.is_copy) return;  // these end before their call does
  }
}

void Follower::ends(const at::RecordFunction& ended, CallKind kind) {
  auto& pending = pending_of(kind);
  if (!pending.is_looked_at || met_unexpected) return pending.begun.clear();
  pending.is_looked_at = false;
  if (pending.begun.draw != nullptr) pending.begun.draw->end();
  uint32_t place = 0;
  const Called called{ended.name(), ended.overload_name()};
  Locked locked(lock);
  for_each_tensor(ended.outputs(), [&](const at::Tensor& output) {
    auto* impl = output.unsafeGetTensorImpl();
    const bool is_view = kind == CallKind::COPY && is_ordinary(impl) && storage_of(impl) == copied;
    const bool is_tracked = is_ordinary(impl) && !is_view && is_large(impl) &&
                            is_counted(output, script->counts_gradless);
    if (is_tracked && !met_unexpected) {
      if (!advance(called, place, output, pending.begun)) meet_unexpected();
    }
    Begun& call = pending_of(CallKind::CALL).begun;
    const bool is_cast = kind == CallKind::CAST && place == 0 && casts_argument();
    if (is_tracked && is_cast && !pending.begun.inputs.empty() && !call.inputs.empty()) {
      call.casts.push_back({pending.begun.inputs.front().toTensor(), output});
    }
    const bool is_reshape = kind == CallKind::COPY && std::strcmp(called.name, "aten::reshape") == 0;
    if (is_reshape && is_ordinary(impl) && !call.inputs.empty()) call.reshapes.push_back({copied, output});
    ++place;
  });
  if (kind == CallKind::CALL && !met_unexpected) {
    if (!advance_byproduct(called, pending.begun)) meet_unexpected();
  }
  if (kind == CallKind::CALL) byproduct.reset();
  pending.begun.clear();
}

// Advances past a call's byproduct if the script expects one; returns false if that has no recipe.
bool Follower::advance_byproduct(const Called& called, Begun& begun) {
  const Event& event = next();
  if (event.what != What::CALL) return true;
  const Call& expected = script->calls[event.call];
  if (expected.place != KEPT || !(expected.called() == called)) return true;
  ++at;
  if (!byproduct.defined()) return true;  // Python packed it
  TrackedStorage* tracked = values.look_up(event, byproduct);
  return tracked != nullptr && make_byproduct_recipe(expected, begun, byproduct, *tracked, values,
                                                     *model_storages, min_bytes, unpacked);
}

// Returns whether the script expects an output of a call; if so, handles it and advances.
bool Follower::advance(const Called& called, uint32_t place, const at::Tensor& output, Begun& begun) {
  const Event& event = next();
  if (event.what != What::CALL) return false;
  const Call& expected = script->calls[event.call];
  const auto nbytes = stored_bytes(output);
  if (!(expected.called() == called) || expected.place != place) return false;
  if (expected.does != Does::COUNT) {
    if (expected.dtype && *expected.dtype != output.scalar_type()) return false;
    TrackedStorage* tracked = values.look_up(event, output);
    if (tracked == nullptr) return false;
    if (expected.does == Does::RECOMPUTE &&
        !make_recipe(expected, begun, output, *tracked, values, *model_storages, min_bytes,
                     unpacked)) {
      return false;
    }
  }
  ++at;
  return true;
}

// launched(the fields of a Launch of eager/launches.py)
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
  const bool is_looked_at = follower.follows_script && !follower.met_unexpected &&
                            follower.script->kernels.count(kernel) > 0 &&
                            !c10::impl::TorchDispatchModeTLS::any_modes_set();
  if (!is_looked_at) Py_RETURN_NONE;
  const Called called{nullptr, nullptr, kernel};
  begun.launch = std::make_shared<Launch>(kernel, options);
  for (Py_ssize_t at = 0; at < PyList_GET_SIZE(tensors); ++at) {
    begun.inputs.emplace_back(THPVariable_Unpack(PyList_GET_ITEM(tensors, at)));
  }
  for (Py_ssize_t at = 0; at < PyList_GET_SIZE(made) && !follower.met_unexpected; ++at) {
    const auto& output = THPVariable_Unpack(PyList_GET_ITEM(made, at));
    const auto* impl = output.unsafeGetTensorImpl();
    if (!follower.is_large(impl)) continue;
    const auto place = static_cast<uint32_t>(at);
    if (!follower.advance(called, place, output, begun)) follower.meet_unexpected();
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

// --- the step's course ------------------------------------------------------------------------

PyObject* watch(PyObject* self, PyObject*) {
  auto& follower = follower_of(self);
  if (follower.script->calls.empty()) Py_RETURN_NONE;
  return watch_for(self, follower);
}

PyObject* unwatch(PyObject* self, PyObject*) { return unwatch_for(self, follower_of(self)); }

PyObject* continue_at(PyObject* self, PyObject* argument) {
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

PyObject* leave_script(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  auto& follower = follower_of(self);
  follower.follows_script = false;
  Locked locked(follower.lock);
  follower.values.hold_results();
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// batch_offloads(a tensor on the device of those that may wait, the most bytes that may wait,
// whether they are sent in place)
PyObject* batch_offloads(PyObject* self, PyObject* arguments) {
  HANDLE_TH_ERRORS
  PyObject* example;
  long long max_bytes = 0;
  int in_place = 0;
  expect(PyArg_ParseTuple(arguments, "OLp", &example, &max_bytes, &in_place));
  auto& follower = follower_of(self);
  const auto device = THPVariable_Unpack(example).device();
  follower.queue.begin(device, follower.min_bytes, max_bytes, in_place);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* forget(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  auto& follower = follower_of(self);
  follower.queue.clear();
  auto unpacked = std::exchange(follower.unpacked, {});
  Locked locked(follower.lock);
  follower.values.forget_storages();
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* end(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  auto& follower = follower_of(self);
  pack_inputs(follower);
  offload_waiting(follower);
  expected(forget(self, nullptr));
  const bool has_left = follower.met_unexpected || !follower.follows_script;
  return PyLong_FromLong(has_left ? -1 : follower.next().position);
  END_HANDLE_TH_ERRORS
}

// Returns the bytes of saved tensors, and a list of (value, bytes) for values larger than planned.
PyObject* get_sizes(PyObject* self, void*) {
  HANDLE_TH_ERRORS
  const auto& follower = follower_of(self);
  Ref larger = list();
  for (const auto& [number, nbytes] : follower.larger) {
    Ref one = expected(Py_BuildValue("iL", number, static_cast<long long>(nbytes)));
    append(larger, one.get());
  }
  const auto saved_bytes = static_cast<long long>(follower.saved_bytes_with_repeats);
  return Py_BuildValue("LO", saved_bytes, larger.get());
  END_HANDLE_TH_ERRORS
}

PyObject* get_follows_script(PyObject* self, void*) {
  return PyBool_FromLong(follower_of(self).follows_script);
}

// Returns the object whose method packs unexpected tensors: the hooks of the step.
PyObject* get_owner(PyObject* self, void*) {
  HANDLE_TH_ERRORS
  PyObject* hook = follower_of(self).hooks[PACK];
  if (hook == nullptr) Py_RETURN_NONE;
  return expected(PyObject_GetAttrString(hook, "__self__")).release();
  END_HANDLE_TH_ERRORS
}

PyMethodDef METHODS[] = {
    {"pack", pack, METH_O, "Return the handle that autograd holds instead of a tensor."},
    {"unpack", unpack, METH_O, "Return the tensor that was packed."},
    {"recompute", recompute_for_trial, METH_O,
     "Return the output of a Recomputed's recipe; None if it has no recipe."},
    {"watch", watch, METH_NOARGS, "Start following this thread's calls."},
    {"unwatch", unwatch, METH_NOARGS, "Stop following this thread's calls."},
    {"launched", launched, METH_VARARGS, "Note the outputs of a kernel launch."},
    {"overwritten", overwritten, METH_O, "Note that a launch has written to a tensor's memory."},
    {"continue_at", continue_at, METH_O,
     "Continue the script at a position among all events of the signature."},
    {"batch_offloads", batch_offloads, METH_VARARGS,
     "Offload results on an example's device in batches of so many bytes, in place or by copies."},
    {"leave_script", leave_script, METH_NOARGS, "Let Python pack all tensors saved from now on."},
    {"end", end, METH_NOARGS,
     "End the step; return the position after its last event, or -1 if it has left the script."},
    {"forget", forget, METH_NOARGS, "Release what is only needed for further saves."},
    {nullptr, nullptr, 0, nullptr},
};

PyGetSetDef GETTERS[] = {
    {"owner", get_owner, nullptr, "The hooks of the step, which pack in Python.", nullptr},
    {"sizes", get_sizes, nullptr, "The bytes of saved tensors, and the values that are larger than planned.", nullptr},
    {"follows_script", get_follows_script, nullptr, "Whether the step still follows its script.",
     nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyTypeObject follower_type() {
  auto type = type_of<Follower>("storm_client.native._follow.Follower",
                                "Saved-tensor hooks of one step that follows a script.", METHODS,
                                create);
  type.tp_dealloc = dealloc;
  type.tp_flags |= Py_TPFLAGS_HAVE_GC;
  type.tp_traverse = traverse;
  type.tp_clear = clear;
  type.tp_getset = GETTERS;
  return type;
}

}  // namespace follower

PyTypeObject FollowerType = follower::follower_type();

}  // namespace storm
