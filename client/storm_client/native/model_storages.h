// The storages of a model's parameters and buffers, for `Policy` of storm_client/policy.py.
#pragma once

#include "versions.h"

#include <unordered_map>

namespace storm {

class ModelStorages {
 public:
  void add(const at::Tensor& tensor);

  // Returns whether a parameter or buffer that lay in this storage when it was added still does.
  bool has(const c10::StorageImpl* storage) const;

 private:
  // The weak references keep addresses of tensors from being reused, but not those of storages. So
  // `has` checks in which storage the tensor lies now.
  std::unordered_map<const c10::StorageImpl*, WeakTensor> tensors_;
};

extern PyTypeObject ModelStoragesType;

const ModelStorages& model_storages_of(PyObject* self);

}  // namespace storm
