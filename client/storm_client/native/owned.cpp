#include "owned.h"

#include "tensors.h"

namespace storm {

void Owned::add(const at::Tensor& tensor) {
  tensors_.insert_or_assign(storage_of(tensor.unsafeGetTensorImpl()),
                            WeakTensor(tensor.getIntrusivePtr()));
}

bool Owned::has(const c10::StorageImpl* storage) const {
  const auto found = tensors_.find(storage);
  if (found == tensors_.end()) return false;
  const auto tensor = found->second.lock();
  return tensor && tensor->has_storage() && storage_of(tensor.get()) == storage;
}

namespace owned {

struct OwnedObject {
  PyObject_HEAD
  Owned owned;
};

Owned& mutable_owned(PyObject* self) { return reinterpret_cast<OwnedObject*>(self)->owned; }

PyObject* create(PyTypeObject* type, PyObject* arguments, PyObject*) {
  HANDLE_TH_ERRORS
  PyObject* tensors = nullptr;
  expect(PyArg_ParseTuple(arguments, "O!", &PyList_Type, &tensors));
  Ref self = expected(type->tp_alloc(type, 0));
  new (&mutable_owned(self.get())) Owned();
  for (Py_ssize_t at = 0; at < PyList_GET_SIZE(tensors); ++at) {
    const auto& tensor = THPVariable_Unpack(PyList_GET_ITEM(tensors, at));
    if (is_ordinary(tensor.unsafeGetTensorImpl())) mutable_owned(self.get()).add(tensor);
  }
  return self.release();
  END_HANDLE_TH_ERRORS
}

void dealloc(PyObject* self) {
  mutable_owned(self).~Owned();
  Py_TYPE(self)->tp_free(self);
}

PyTypeObject owned_type() {
  PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};
  type.tp_name = "storm_client.native._follow.Owned";
  type.tp_basicsize = sizeof(OwnedObject);
  type.tp_dealloc = dealloc;
  type.tp_flags = Py_TPFLAGS_DEFAULT;
  type.tp_doc = "The storages of a list of tensors, none of which it keeps.";
  type.tp_new = create;
  return type;
}

}  // namespace owned

PyTypeObject OwnedType = owned::owned_type();

const Owned& owned_of(PyObject* self) { return owned::mutable_owned(self); }

}  // namespace storm
