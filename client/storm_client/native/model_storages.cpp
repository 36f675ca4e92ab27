#include "model_storages.h"

#include "objects.h"
#include "tensors.h"

namespace storm {

void ModelStorages::add(const at::Tensor& tensor, bool is_at_rest) {
  const c10::Storage& storage = tensor.storage();
  storages_.insert_or_assign(storage.unsafeGetStorageImpl(),
                             Known{WeakStorage(storage.getWeakStorageImpl()), is_at_rest});
}

bool ModelStorages::has(const c10::StorageImpl* storage) const {
  return storages_.contains(storage);
}

bool ModelStorages::is_at_rest(const c10::StorageImpl* storage) const {
  const auto found = storages_.find(storage);
  return found != storages_.end() && found->second.is_at_rest;
}

namespace model_storages {

PyObject* create(PyTypeObject* type, PyObject* arguments, PyObject*) {
  HANDLE_TH_ERRORS
  PyObject *at_rest = nullptr, *others = nullptr;
  expect(PyArg_ParseTuple(arguments, "O!O!", &PyList_Type, &at_rest, &PyList_Type, &others));
  ModelStorages found;
  for (PyObject* tensors : {at_rest, others}) {
    for (Py_ssize_t at = 0; at < PyList_GET_SIZE(tensors); ++at) {
      const auto& tensor = THPVariable_Unpack(PyList_GET_ITEM(tensors, at));
      if (is_ordinary(tensor.unsafeGetTensorImpl())) found.add(tensor, tensors == at_rest);
    }
  }
  return object_of<ModelStorages>(type, std::move(found)).release();
  END_HANDLE_TH_ERRORS
}

}  // namespace model_storages

PyTypeObject ModelStoragesType = type_of<ModelStorages>(
    "storm_client.native._follow.ModelStorages",
    "The storages of two lists of tensors, which it does not keep alive.", nullptr,
    model_storages::create);

}  // namespace storm
