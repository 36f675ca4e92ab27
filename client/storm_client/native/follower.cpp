#include "follower.h"

#include "kept.h"
#include "tensors.h"

#include <c10/core/InferenceMode.h>

namespace storm {
namespace follower {

PyObject* parameter_type = nullptr;

// Hooks of one step. What they do not expect they hand over to Python, where the step goes on from
// the same event, or leaves the script for good.
struct Follower {
  // References that tell Python's garbage collector: hooks of Python's may hold this one.
  PyObject* script_object = nullptr;
  PyObject* tallies_object = nullptr;
  PyObject* owned_object = nullptr;
  PyObject* pack = nullptr;    // of a tensor, and the position among all events; returns its handle
  PyObject* unpack = nullptr;  // of what that returns
  PyObject* asked = nullptr;   // called once, when the backward pass asks for something

  const Script* script = nullptr;
  Tallies* tallies = nullptr;
  const Owned* owned = nullptr;
  int64_t least = 0;  // bytes: what has fewer is kept
  uint32_t at = 0;    // in the script
  bool walks = true;  // along the script, until something else happens
  uint32_t small_row = 0;
  uint32_t parameter_row = 0;

  const Event& next() const { return script->events[at]; }
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
  PyObject *script, *tallies, *owned, *pack, *unpack, *asked;
  long long least = 0;
  unsigned small_row = 0, parameter_row = 0;
  expect(PyArg_ParseTuple(arguments, "O!O!O!OOOLII", &ScriptType, &script, &TalliesType, &tallies,
                          &OwnedType, &owned, &pack, &unpack, &asked, &least, &small_row,
                          &parameter_row));
  Ref self = expected(type->tp_alloc(type, 0));
  auto& follower = *new (&follower_of(self.get())) Follower();
  follower.script_object = Py_NewRef(script);
  follower.tallies_object = Py_NewRef(tallies);
  follower.owned_object = Py_NewRef(owned);
  follower.pack = Py_NewRef(pack);
  follower.unpack = Py_NewRef(unpack);
  follower.asked = Py_NewRef(asked);
  follower.script = &script_of(script);
  follower.tallies = &tallies_of(tallies);
  follower.owned = &owned_of(owned);
  follower.least = least;
  follower.small_row = small_row;
  follower.parameter_row = parameter_row;
  return self.release();
  END_HANDLE_TH_ERRORS
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  const auto& follower = follower_of(self);
  Py_VISIT(follower.pack);
  Py_VISIT(follower.unpack);
  Py_VISIT(follower.asked);
  return 0;
}

int clear(PyObject* self) {
  auto& follower = follower_of(self);
  Py_CLEAR(follower.pack);
  Py_CLEAR(follower.unpack);
  Py_CLEAR(follower.asked);
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

// Has Python do what becomes of a tensor, which tells by `go_on` or `leave` how the step goes on.
PyObject* hand_over(Follower& follower, PyObject* tensor) {
  Ref position = expected(PyLong_FromLong(follower.walks ? follower.next().position : -1));
  PyObject* arguments[] = {tensor, position.get()};
  Ref pack = Ref::borrowed(follower.pack);  // which may be dropped meanwhile
  if (!pack) {
    PyErr_SetString(PyExc_RuntimeError, "the step of these hooks is gone");
    throw python_error();
  }
  return expected(PyObject_Vectorcall(pack.get(), arguments, 2, nullptr)).release();
}

PyObject* stay(Follower& follower, const at::Tensor& tensor, uint32_t row) {
  PyObject* kept = keep(tensor);
  follower.tallies->add(row, nbytes_of(tensor.unsafeGetTensorImpl()));
  return kept;
}

// Returns null where Python is to look at the tensor. The order of questions is that of
// `StepHooks._pack` and `Policy.decide`.
PyObject* pack_ordinary(Follower& follower, PyObject* object, const at::Tensor& tensor) {
  const auto* impl = tensor.unsafeGetTensorImpl();
  const auto* storage = storage_of(impl);
  const Event& event = follower.next();
  const bool fits = event.what == What::KEEP && event.nbytes == static_cast<int64_t>(storage->nbytes());
  if (fits && is_result(tensor)) {
    ++follower.at;
    return stay(follower, tensor, event.row);
  }
  const int64_t nbytes = nbytes_of(impl);
  if (nbytes == 0 || (nbytes < follower.least && !is_view(tensor))) {
    return stay(follower, tensor, follower.small_row);
  }
  if (reinterpret_cast<PyObject*>(Py_TYPE(object)) == parameter_type ||
      follower.owned->has(storage)) {
    return stay(follower, tensor, follower.parameter_row);
  }
  if (fits && !tensor.requires_grad()) {
    ++follower.at;
    return stay(follower, tensor, event.row);
  }
  return nullptr;
}

PyObject* pack(PyObject* self, PyObject* object) {
  HANDLE_TH_ERRORS
  auto& follower = follower_of(self);
  auto* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  if (follower.walks && (type == THPVariableClass || type == parameter_type)) {
    const auto& tensor = THPVariable_Unpack(object);
    if (is_ordinary(tensor.unsafeGetTensorImpl())) {
      PyObject* packed = pack_ordinary(follower, object, tensor);
      if (packed != nullptr) return packed;
    }
  }
  return hand_over(follower, object);
  END_HANDLE_TH_ERRORS
}

PyObject* unpack(PyObject* self, PyObject* packed) {
  HANDLE_TH_ERRORS
  auto& follower = follower_of(self);
  if (follower.asked != nullptr) {
    Ref asked = Ref::stolen(std::exchange(follower.asked, nullptr));
    expected(PyObject_CallNoArgs(asked.get()));
  }
  PyObject* other = Py_TYPE(packed) == &KeptType ? moved_of(packed) : packed;
  if (other != nullptr) {
    Ref held = Ref::borrowed(other);
    return expected(PyObject_CallOneArg(follower.unpack, held.get())).release();
  }
  c10::InferenceMode guard(false);  // PyTorch will set the version of what is returned
  return THPVariable_Wrap(unpack_kept(packed));
  END_HANDLE_TH_ERRORS
}

PyObject* go_on(PyObject* self, PyObject* argument) {
  auto& follower = follower_of(self);
  const long position = PyLong_AsLong(argument);
  if (position == -1 && PyErr_Occurred()) return nullptr;
  if (position < 0 || static_cast<size_t>(position) >= follower.script->next.size()) {
    PyErr_Format(PyExc_ValueError, "position is %ld, and the script has %zu", position,
                 follower.script->next.size());
    return nullptr;
  }
  follower.at = follower.script->next[position];
  Py_RETURN_NONE;
}

PyObject* leave(PyObject* self, PyObject*) {
  follower_of(self).walks = false;
  Py_RETURN_NONE;
}

PyObject* get_position(PyObject* self, void*) {
  const auto& follower = follower_of(self);
  return PyLong_FromLong(follower.next().position);
}

PyObject* get_walks(PyObject* self, void*) { return PyBool_FromLong(follower_of(self).walks); }

// The object whose method looks at what is handed over: that of the step.
PyObject* get_owner(PyObject* self, void*) {
  HANDLE_TH_ERRORS
  auto& follower = follower_of(self);
  if (follower.pack == nullptr) Py_RETURN_NONE;
  return expected(PyObject_GetAttrString(follower.pack, "__self__")).release();
  END_HANDLE_TH_ERRORS
}

PyMethodDef METHODS[] = {
    {"pack", pack, METH_O, "Return what autograd is to hold instead of a tensor."},
    {"unpack", unpack, METH_O, "Return the tensor that was packed."},
    {"go_on", go_on, METH_O, "Go on from a position among all events of the kind."},
    {"leave", leave, METH_NOARGS, "Have Python look at all that is saved from now on."},
    {nullptr, nullptr, 0, nullptr},
};

PyGetSetDef GETTERS[] = {
    {"position", get_position, nullptr, "How many events of the kind there were.", nullptr},
    {"owner", get_owner, nullptr, "What looks at what is handed over.", nullptr},
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

void set_parameter_type(PyObject* type) {
  Py_INCREF(type);
  Py_XSETREF(follower::parameter_type, type);
}

}  // namespace storm
