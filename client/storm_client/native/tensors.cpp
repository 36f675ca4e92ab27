#include "tensors.h"

#include <c10/core/AutogradState.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstring>
#include <typeinfo>

namespace storm {
namespace {

using c10::DispatchKey;

// The dispatch keys of dense tensors in CPU or CUDA memory. Tensors with any other key are handled
// in Python.
const c10::DispatchKeySet ORDINARY =
    c10::DispatchKeySet({DispatchKey::CPU, DispatchKey::CUDA, DispatchKey::AutogradCPU,
                         DispatchKey::AutogradCUDA, DispatchKey::AutocastCPU,
                         DispatchKey::AutocastCUDA, DispatchKey::ADInplaceOrView,
                         DispatchKey::Conjugate, DispatchKey::Negative});

}  // namespace

bool is_ordinary(at::TensorImpl* impl) {
  const uint64_t others = impl->key_set().raw_repr() & ~ORDINARY.raw_repr();
  return others == 0 && impl->has_storage() && !impl->is_inference();
}

bool is_view(const at::Tensor& tensor) {
  const auto* meta = torch::autograd::impl::get_view_autograd_meta(tensor);
  return meta != nullptr && meta->has_bw_view();
}

const at::Tensor& base_of(const at::Tensor& tensor) {
  const auto* meta = torch::autograd::impl::get_view_autograd_meta(tensor);
  const bool has_base = meta != nullptr && meta->has_bw_view();
  return has_base ? meta->get_backward_view().base_ : tensor;
}

bool is_result(const at::Tensor& tensor) {
  const at::Tensor& base = base_of(tensor);
  if (!base.is_leaf()) return true;
  return &base != &tensor && !base.requires_grad() && tensor.grad_fn() != nullptr;
}

bool is_counted(const at::Tensor& output, bool counts_gradless) {
  const auto& state = c10::AutogradState::get_tls_state();
  if (output.requires_grad() || (counts_gradless && state.get_grad_mode())) return true;
  return !(state.get_fw_grad_mode() || state.get_inference_mode());
}

bool is_own_backward() {
  static constexpr char GENERATED[] = "N5torch8autograd9generated";  // a namespace, mangled
  const auto node = torch::autograd::get_current_node();
  if (!node) return false;
  const auto& ran = *node;
  return std::strncmp(typeid(ran).name(), GENERATED, sizeof(GENERATED) - 1) == 0;
}

uint64_t stream_of(c10::Device device) {
  if (device.is_cpu()) return 0;
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device).id();
}

at::Tensor alias_of(const at::Tensor& tensor, const c10::VariableVersion& counter) {
  return at::Tensor(tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(
      counter, /*allow_tensor_metadata_change=*/true));
}

at::Tensor alias_of(const at::Tensor& tensor) {
  return alias_of(tensor, tensor.unsafeGetTensorImpl()->version_counter());
}

}  // namespace storm
