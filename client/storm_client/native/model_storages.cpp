#include "model_storages.h"

#include "objects.h"
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

PyObject* create(PyTypeObject* type, PyObject* arguments, PyObject*) {
  HANDLE_TH_ERRORS
  PyObject* tensors = nullptr;
  expect(PyArg_ParseTuple(arguments, "O!", &PyList_Type, &tensors));
  ModelStorages found;
  for (Py_ssize_t at = 0; at < PyList_GET_SIZE(tensors); ++at) {
    const auto& tensor = THPVariable_Unpack(PyList_GET_ITEM(tensors, at));
    if (is_ordinary(tensor.unsafeGetTensorImpl())) found.add(tensor);
  }
  return object_of<ModelStorages>(type, std::move(found)).release();
  END_HANDLE_TH_ERRORS
}

}  // namespace model_storages

PyTypeObject ModelStoragesType = type_of<ModelStorages>(
    "storm_client.native._follow.ModelStorages",
    "The storages of a list of tensors, which it does not keep alive.", nullptr,
    model_storages::create);

}  // namespace storm
