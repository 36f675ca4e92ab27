// PyTorch's check that a saved tensor was not modified in place, as in saved/versions.py.
#pragma once

#include "common.h"

namespace storm {

using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

class SavedVersion {
 public:
  // Records the current version of `tensor`, which must be ordinary.
  explicit SavedVersion(const at::Tensor& tensor);

  bool is_unchanged() const { return counter_.current_version() == expected_; }

  // Raises PyTorch's RuntimeError if the tensor has been modified in place since.
  void check() const;

  // Raises ActivationLost if the tensor, which a recipe reads, has been modified in place since. The
  // gradient may not need it, as PyTorch's error would say.
  void check_input() const;

  // Returns the tensor if it has been given other data since and PyTorch would use them; else an
  // undefined one. PyTorch would not for an operation's own output, which it holds as it was.
  at::Tensor replaced() const;

  const c10::VariableVersion& counter() const { return counter_; }

  uint32_t number() const { return expected_; }

  // The address of its storage when it was saved.
  const c10::StorageImpl* storage() const { return storage_; }

  // The tensor itself, while it lives.
  const WeakTensor& saved() const { return saved_; }

 private:
  c10::VariableVersion counter_;
  uint32_t expected_;
  WeakTensor saved_;
  const c10::StorageImpl* storage_;  // an address, which the owner of this keeps from being reused
  // For the error message.
  std::string producer_;  // the operation's name, empty where there is none
  uint32_t output_ = 0;
  c10::ScalarType dtype_;
  c10::Device device_;
  c10::SmallVector<int64_t, 5> shape_;
};

}  // namespace storm
