#include "versions.h"

#include "configured.h"
#include "objects.h"
#include "recipes.h"

#include <ATen/ops/empty.h>

namespace storm {

SavedVersion::SavedVersion(const at::Tensor& tensor)
    : counter_(tensor.unsafeGetTensorImpl()->version_counter()),
      expected_(counter_.current_version()),
      saved_(tensor.getIntrusivePtr()),
      storage_(tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl()),
      dtype_(tensor.scalar_type()),
      device_(tensor.device()),
      shape_(tensor.sizes().begin(), tensor.sizes().end()) {
  const auto& node = tensor.grad_fn();
  if (node) {
    producer_ = node->name();
    output_ = tensor.output_nr();
  }
}

void SavedVersion::check() const {
  const uint32_t found = counter_.current_version();
  if (found == expected_) return;
  at::Tensor like = at::empty({0}, at::TensorOptions().dtype(dtype_).device(device_));
  Ref shape = numbers(shape_);
  Ref wrapped = expected(THPVariable_Wrap(like));
  Ref error = expected(PyObject_CallFunction(configured.changed, "OOsIII", wrapped.get(),
                                             shape.get(), producer_.c_str(), output_, expected_,
                                             found));
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.get())), error.get());
  throw python_error();
}

void SavedVersion::check_input() const {
  const uint32_t found = counter_.current_version();
  if (found != expected_) raise_changed(shape_, expected_, found);
}

at::Tensor SavedVersion::replaced() const {
  at::Tensor tensor;
  if (auto impl = saved_.lock()) tensor = at::Tensor(std::move(impl));
  if (!tensor.defined()) return tensor;
  const auto* impl = tensor.unsafeGetTensorImpl();
  if (!impl->has_storage() || impl->unsafe_storage().unsafeGetStorageImpl() == storage_) return {};
  const auto& maker = tensor.grad_fn();
  const bool is_own_output = maker && maker.get() == torch::autograd::get_current_node().get();
  return is_own_output ? at::Tensor() : tensor;
}

}  // namespace storm
