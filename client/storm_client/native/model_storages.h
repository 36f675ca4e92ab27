// The storages of a model's parameters and buffers, for `Policy` of storm_client/policy.py.
#pragma once

#include "recipes.h"

#include <unordered_map>

namespace storm {

class ModelStorages {
 public:
  void add(const at::Tensor& tensor, bool is_at_rest);

  // Returns whether a parameter or buffer lay in this storage when it was added.
  bool has(const c10::StorageImpl* storage) const;

  // Returns whether it is a parameter whose bytes stay in place and unchanged between the passes.
  bool is_at_rest(const c10::StorageImpl* storage) const;

 private:
  // The weak reference keeps the address from being reused. There is none to the tensor, since
  // PyTorch refuses to swap tensors that have weak references.
  struct Known {
    WeakStorage storage;
    bool is_at_rest;
  };
  std::unordered_map<const c10::StorageImpl*, Known> storages_;
};

extern PyTypeObject ModelStoragesType;

}  // namespace storm
