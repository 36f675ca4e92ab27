#include "kept.h"

#include "tensors.h"

namespace storm {
namespace kept {

struct Kept {
  at::Tensor token;  // keeps the memory
  SavedVersion version;
  bool is_alias;  // a leaf is its own token, and found with whatever data it is given
};

struct KeptObject {
  PyObject_HEAD
  Kept kept;
};

Kept& kept_of(PyObject* self) { return reinterpret_cast<KeptObject*>(self)->kept; }

void dealloc(PyObject* self) {
  kept_of(self).~Kept();
  Py_TYPE(self)->tp_free(self);
}

PyObject* get_token(PyObject* self, void*) {
  HANDLE_TH_ERRORS
  return THPVariable_Wrap(kept_of(self).token);
  END_HANDLE_TH_ERRORS
}

PyGetSetDef GETTERS[] = {
    {"token", get_token, nullptr, "The tensor that is kept, or an alias of it.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyTypeObject kept_type() {
  PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};
  type.tp_name = "storm_client.native._follow.Kept";
  type.tp_basicsize = sizeof(KeptObject);
  type.tp_dealloc = dealloc;
  type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION;
  type.tp_doc = "What autograd holds for a tensor that is kept on the device.";
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
  return reinterpret_cast<PyObject*>(self);
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
