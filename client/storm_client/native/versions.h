// PyTorch's check that a saved tensor was not changed in place, as saved/versions.py makes it.
#pragma once

#include "common.h"

namespace storm {

using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

class SavedVersion {
 public:
  // Notes the present version of `tensor`, an ordinary one.
  explicit SavedVersion(const at::Tensor& tensor);

  bool is_unchanged() const { return counter_.current_version() == expected_; }

  // Raises PyTorch's RuntimeError where the tensor has been changed in place since.
  void check() const;

  // The tensor if it has been given other data since, where PyTorch would use those; else an
  // undefined one. PyTorch would not for an operation's own output, which it holds as it was.
  at::Tensor replaced() const;

  const c10::VariableVersion& counter() const { return counter_; }

  uint32_t number() const { return expected_; }

  // The tensor itself, while it lives.
  const WeakTensor& saved() const { return saved_; }

 private:
  c10::VariableVersion counter_;
  uint32_t expected_;
  WeakTensor saved_;
  const c10::StorageImpl* storage_;  // an address: whoever holds this keeps it from being reused
  // For the message.
  std::string producer_;  // the operation's name, empty where there is none
  uint32_t output_ = 0;
  c10::ScalarType dtype_;
  c10::Device device_;
  c10::SmallVector<int64_t, 5> shape_;
};

// Sets what returns the error for a tensor that was changed in place; see saved/versions.py.
void set_changed_error(PyObject* function);

}  // namespace storm
