#include "model_storages.h"

#include "tensors.h"

namespace storm {

void ModelStorages::add(const at::Tensor& tensor) {
  const c10::Storage& storage = tensor.storage();
  storages_.insert_or_assign(storage.unsafeGetStorageImpl(),
                             WeakStorage(storage.getWeakStorageImpl()));
}

bool ModelStorages::has(const c10::StorageImpl* storage) const {
  return storages_.contains(storage);
}

namespace model_storages {

struct ModelStoragesObject {
  PyObject_HEAD
  ModelStorages model_storages;
};

ModelStorages& mutable_storages(PyObject* self) {
  return reinterpret_cast<ModelStoragesObject*>(self)->model_storages;
}

PyObject* create(PyTypeObject* type, PyObject* arguments, PyObject*) {
  HANDLE_TH_ERRORS
  PyObject* tensors = nullptr;
  expect(PyArg_ParseTuple(arguments, "O!", &PyList_Type, &tensors));
  Ref self = expected(type->tp_alloc(type, 0));
  new (&mutable_storages(self.get())) ModelStorages();
  for (Py_ssize_t at = 0; at < PyList_GET_SIZE(tensors); ++at) {
    const auto& tensor = THPVariable_Unpack(PyList_GET_ITEM(tensors, at));
    if (is_ordinary(tensor.unsafeGetTensorImpl())) mutable_storages(self.get()).add(tensor);
  }
  return self.release();
  END_HANDLE_TH_ERRORS
}

void dealloc(PyObject* self) {
  mutable_storages(self).~ModelStorages();
  Py_TYPE(self)->tp_free(self);
}

PyTypeObject model_storages_type() {
  PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};
  type.tp_name = "storm_client.native._follow.ModelStorages";
  type.tp_basicsize = sizeof(ModelStoragesObject);
  type.tp_dealloc = dealloc;
  type.tp_flags = Py_TPFLAGS_DEFAULT;
  type.tp_doc = "The storages of a list of tensors, which it does not keep alive.";
  type.tp_new = create;
  return type;
}

}  // namespace model_storages

PyTypeObject ModelStoragesType = model_storages::model_storages_type();

const ModelStorages& model_storages_of(PyObject* self) {
  return model_storages::mutable_storages(self);
}

}  // namespace storm
