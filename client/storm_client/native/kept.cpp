#include "kept.h"

#include "tensors.h"

namespace storm {
namespace kept {

struct Kept {
  at::Tensor token;  // keeps the memory; undefined once that has been moved
  SavedVersion version;
  bool is_alias;  // a leaf is its own token, and found with whatever data it is given
  PyObject* moved = nullptr;  // what its step is to be given instead, once there is no token
};

struct KeptObject {
  PyObject_HEAD
  Kept kept;
  KeptObject* earlier;  // of all that live, in the order in which they were kept
  KeptObject* later;
};

KeptObject* first = nullptr;  // the interpreter's lock protects the list
KeptObject* last = nullptr;

void link(KeptObject* self) {
  self->earlier = last;
  self->later = nullptr;
  (last == nullptr ? first : last->later) = self;
  last = self;
}

void unlink(KeptObject* self) {
  (self->earlier == nullptr ? first : self->earlier->later) = self->later;
  (self->later == nullptr ? last : self->later->earlier) = self->earlier;
}

Kept& kept_of(PyObject* self) { return reinterpret_cast<KeptObject*>(self)->kept; }

void dealloc(PyObject* self) {
  unlink(reinterpret_cast<KeptObject*>(self));
  Py_CLEAR(kept_of(self).moved);
  kept_of(self).~Kept();
  Py_TYPE(self)->tp_free(self);
}

PyObject* get_token(PyObject* self, void*) {
  HANDLE_TH_ERRORS
  const auto& kept = kept_of(self);
  if (!kept.token.defined()) Py_RETURN_NONE;
  return THPVariable_Wrap(kept.token);
  END_HANDLE_TH_ERRORS
}

PyObject* get_is_alias(PyObject* self, void*) { return PyBool_FromLong(kept_of(self).is_alias); }

// Lets the memory go: what unpacks `moved` has the bytes from now on.
PyObject* move(PyObject* self, PyObject* moved) {
  auto& kept = kept_of(self);
  at::Tensor token = std::move(kept.token);  // let go at the end: Python may run then
  kept.token = at::Tensor();
  Py_XSETREF(kept.moved, Py_NewRef(moved));
  Py_RETURN_NONE;
}

PyMethodDef METHODS[] = {
    {"move", move, METH_O, "Let the tensor go, of which something else has the bytes."},
    {nullptr, nullptr, 0, nullptr},
};

PyGetSetDef GETTERS[] = {
    {"token", get_token, nullptr, "The tensor that is kept, or an alias of it; None once moved.",
     nullptr},
    {"is_alias", get_is_alias, nullptr, "Whether the token is an alias, which may be moved.",
     nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyTypeObject kept_type() {
  PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};
  type.tp_name = "storm_client.native._follow.Kept";
  type.tp_basicsize = sizeof(KeptObject);
  type.tp_dealloc = dealloc;
  type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION;
  type.tp_doc = "What autograd holds for a tensor that is kept on the device.";
  type.tp_methods = METHODS;
  type.tp_getset = GETTERS;
  return type;
}

}  // namespace kept

PyTypeObject KeptType = kept::kept_type();

PyObject* keep(const at::Tensor& tensor) {
  // An output must not be its own token: it would hold itself, by way of the operation that it
  // keeps alive, and never be freed.
  const bool is_alias = static_cast<bool>(tensor.grad_fn());
  kept::Kept kept{is_alias ? alias_of(tensor) : tensor, SavedVersion(tensor), is_alias};
  auto* self = reinterpret_cast<kept::KeptObject*>(KeptType.tp_alloc(&KeptType, 0));
  expect(self != nullptr);
  new (&self->kept) kept::Kept(std::move(kept));
  kept::link(self);
  return reinterpret_cast<PyObject*>(self);
}

PyObject* moved_of(PyObject* self) {
  const auto& kept = kept::kept_of(self);
  if (kept.moved != nullptr) kept.version.check();
  return kept.moved;
}

PyObject* all_kept() {
  Ref found = expected(PyList_New(0));
  for (auto* one = kept::first; one != nullptr; one = one->later) {
    expect(PyList_Append(found.get(), reinterpret_cast<PyObject*>(one)) == 0);
  }
  return found.release();
}

at::Tensor unpack_kept(PyObject* self) {
  const auto& kept = kept::kept_of(self);
  kept.version.check();
  if (kept.is_alias) {
    at::Tensor replaced = kept.version.replaced();
    if (replaced.defined()) return replaced;
  }
  return kept.token;
}

}  // namespace storm
