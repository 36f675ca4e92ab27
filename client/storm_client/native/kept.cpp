#include "kept.h"

#include "objects.h"
#include "recipes.h"
#include "tensors.h"

#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Storage.h>

namespace storm {
namespace kept {

struct Kept {
  at::Tensor token;  // holds the memory; undefined once that was moved or offloaded
  SavedVersion version;
  bool is_alias;  // a leaf is its own token, and is returned with any data it was given since
  PyObject* python_handle = nullptr;  // what Python unpacks instead, once there is no token
  std::optional<WeakTensor> base;  // if to be offloaded: the tensor whose version counter it has
  int number = -1;  // of its value in the step, if it is to be offloaded
  std::optional<View> layout;  // if it was offloaded
  std::shared_ptr<Bundle> bundle;  // in which it was offloaded, at `place`, if not alone
  size_t place = 0;
  uint32_t last_round = 0;  // see Bundle
  PyObject* earlier = nullptr;  // of all that exist, in the order in which they were kept
  PyObject* later = nullptr;
};

Kept& kept_of(PyObject* self) { return value_of<Kept>(self); }

PyObject* first = nullptr;  // the GIL protects the list
PyObject* last = nullptr;

void link(PyObject* self) {
  kept_of(self).earlier = last;
  (last == nullptr ? first : kept_of(last).later) = self;
  last = self;
}

void unlink(const Kept& kept) {
  (kept.earlier == nullptr ? first : kept_of(kept.earlier).later) = kept.later;
  (kept.later == nullptr ? last : kept_of(kept.later).earlier) = kept.earlier;
}

// Returns the tensor, or None if it was freed.
PyObject* wrapped(const WeakTensor& weak) {
  auto impl = weak.lock();
  return impl ? THPVariable_Wrap(at::Tensor(std::move(impl))) : Py_NewRef(Py_None);
}

void dealloc(PyObject* self) {
  auto& kept = kept_of(self);
  unlink(kept);
  if (kept.bundle != nullptr) kept.bundle->drop(kept.place, kept.last_round);
  Py_CLEAR(kept.python_handle);
  destroy<Kept>(self);
}

// Returns the offloaded tensor, over bytes that `load` returns.
at::Tensor restored(Kept& kept, Load load) {
  at::Tensor tensor;
  if (kept.bundle != nullptr) {
    tensor = kept.layout->over(kept.bundle->take(kept.place, kept.last_round, load));
  } else {
    Ref use = Ref::borrowed(kept.python_handle);
    Ref storage = load(use.get());
    tensor = kept.layout->over(THPStorage_Unpack(storage.get()));
  }
  tensor.unsafeGetTensorImpl()->set_version_counter(kept.version.counter());
  return tensor;
}

PyObject* get_token(PyObject* self, void*) {
  HANDLE_TH_ERRORS
  const auto& kept = kept_of(self);
  if (!kept.token.defined()) Py_RETURN_NONE;
  return THPVariable_Wrap(kept.token);
  END_HANDLE_TH_ERRORS
}

PyObject* get_is_alias(PyObject* self, void*) { return PyBool_FromLong(kept_of(self).is_alias); }

// Releases the memory: from now on the tensor is unpacked from `handle`.
PyObject* move(PyObject* self, PyObject* handle) {
  auto& kept = kept_of(self);
  at::Tensor token = std::move(kept.token);  // released at the end: Python may run then
  kept.token = at::Tensor();
  Py_XSETREF(kept.python_handle, Py_NewRef(handle));
  Py_RETURN_NONE;
}

// Returns (storage, dtype, bytes, number, version, base or None, tensor or None) of a tensor to
// offload; None if it was moved already.
PyObject* describe(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  const auto& kept = kept_of(self);
  if (!kept.token.defined() || !kept.base) Py_RETURN_NONE;
  const auto* impl = kept.token.unsafeGetTensorImpl();
  Ref storage = expected(THPStorage_Wrap(impl->unsafe_storage()));
  auto* dtype = reinterpret_cast<PyObject*>(torch::getTHPDtype(kept.token.scalar_type()));
  Ref base = expected(wrapped(*kept.base));
  Ref tensor = expected(wrapped(kept.version.saved()));
  return Py_BuildValue("OOLiIOO", storage.get(), dtype, static_cast<long long>(nbytes_of(impl)),
                       kept.number, kept.version.number(), base.get(), tensor.get());
  END_HANDLE_TH_ERRORS
}

// Releases the memory: the step restores the bytes of `use`, and makes the tensor of them. Does
// nothing if another thread has moved the tensor meanwhile.
PyObject* release(PyObject* self, PyObject* use) {
  HANDLE_TH_ERRORS
  auto& kept = kept_of(self);
  if (!kept.token.defined()) Py_RETURN_NONE;
  kept.layout.emplace(kept.token);
  return move(self, use);
  END_HANDLE_TH_ERRORS
}

PyMethodDef METHODS[] = {
    {"describe", describe, METH_NOARGS, "Describe a tensor to offload; None if moved."},
    {"release", release, METH_O, "Release the memory; the step restores the bytes from a use."},
    {"move", move, METH_O, "Release the memory; a Python handle has the bytes."},
    {nullptr, nullptr, 0, nullptr},
};

PyGetSetDef GETTERS[] = {
    {"token", get_token, nullptr, "The kept tensor, or an alias of it; None once moved.",
     nullptr},
    {"is_alias", get_is_alias, nullptr, "Whether the token is an alias, which may be moved.",
     nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyTypeObject kept_type() {
  auto type = type_of<Kept>("storm_client.native._follow.Kept",
                            "The handle that autograd holds for a tensor kept on the device.",
                            METHODS, nullptr);
  type.tp_dealloc = dealloc;
  type.tp_getset = GETTERS;
  return type;
}

}  // namespace kept

PyTypeObject KeptType = kept::kept_type();

PyObject* keep(const at::Tensor& tensor) {
  // An output must not be its own token: it would hold itself through the operation that it keeps
  // alive, and would never be freed.
  const bool is_alias = static_cast<bool>(tensor.grad_fn());
  kept::Kept kept{is_alias ? alias_of(tensor) : tensor, SavedVersion(tensor), is_alias};
  PyObject* self = object_of<kept::Kept>(&KeptType, std::move(kept)).release();
  kept::link(self);
  return self;
}

PyObject* python_handle_of(PyObject* self) {
  const auto& kept = kept::kept_of(self);
  if (kept.python_handle != nullptr) kept.version.check();
  return kept.python_handle;
}

const SavedVersion& version_of_kept(PyObject* self) { return kept::kept_of(self).version; }

PyObject* keep_for_now(const at::Tensor& tensor, int number) {
  PyObject* self = keep(tensor);
  kept::kept_of(self).base = WeakTensor(base_of(tensor).getIntrusivePtr());
  kept::kept_of(self).number = number;
  return self;
}

const at::Tensor& token_of(PyObject* self) { return kept::kept_of(self).token; }

int number_of(PyObject* self) { return kept::kept_of(self).number; }

void release_into(PyObject* self, std::shared_ptr<Bundle> bundle, size_t place) {
  auto& kept = kept::kept_of(self);
  if (!kept.token.defined()) return;  // it was moved meanwhile
  kept.layout.emplace(kept.token);
  bundle->join(place, kept.last_round);
  kept.place = place;
  kept.bundle = std::move(bundle);
  kept.token.reset();
}

bool is_offloaded(PyObject* self) { return kept::kept_of(self).layout.has_value(); }

at::Tensor unpack_offloaded(PyObject* self, Load load) {
  auto& kept = kept::kept_of(self);
  kept.version.check();
  at::Tensor replaced = kept.version.replaced();
  return replaced.defined() ? replaced : kept::restored(kept, load);
}

at::Tensor unpack_input(PyObject* self, Load load) {
  auto& kept = kept::kept_of(self);
  kept.version.check_input();
  return kept.layout ? kept::restored(kept, load) : kept.token;
}

PyObject* all_kept() {
  Ref found = list();
  for (auto* one = kept::first; one != nullptr; one = kept::kept_of(one).later) append(found, one);
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
