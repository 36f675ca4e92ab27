// Properties of a tensor, determined as in storm_client/policy.py and saved/snapshots.py.
#pragma once

#include "common.h"

namespace storm {

// Returns whether a tensor's bytes are its storage's, and mean the same as a plain strided
// tensor's. Those of a subclass, or of a sparse, nested, quantized, wrapped or inference tensor may
// not.
bool is_ordinary(at::TensorImpl* impl);

// Returns whether an operation made the tensor's memory: then versions count its changes.
bool is_result(const at::Tensor& tensor);

bool is_view(const at::Tensor& tensor);

// Returns whether scripts count an operator's new output. It is part of a graph, or may become so
// because a custom function's `forward` runs: only there forward-gradient mode and inference mode
// are both off. Or steps count results without gradients as well, and gradients are on.
bool is_counted(const at::Tensor& output, bool counts_gradless);

// Returns the base of a view; of any other tensor, itself.
const at::Tensor& base_of(const at::Tensor& tensor);

inline c10::StorageImpl* storage_of(const at::TensorImpl* impl) {
  return impl->unsafe_storage().unsafeGetStorageImpl();
}

inline c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return storage_of(tensor.unsafeGetTensorImpl());
}

inline int64_t stored_bytes(const at::Tensor& tensor) {
  return static_cast<int64_t>(storage_of(tensor)->nbytes());
}

// Returns a tensor's present version, by which changes in place are counted.
inline uint32_t version_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->version_counter().current_version();
}

inline int64_t nbytes_of(const at::TensorImpl* impl) {
  return impl->numel() * static_cast<int64_t>(impl->itemsize());
}

// Returns the id of this thread's current stream on a device; 0 on a CPU.
uint64_t stream_of(c10::Device device);

// The dispatch keys by which Python's modes see operator calls.
const c10::DispatchKeySet MODES_OF_PYTHON({c10::DispatchKey::Python,
                                           c10::DispatchKey::PythonTLSSnapshot});

// Returns whether one of PyTorch's own backward functions is running in this thread: they do not
// write to saved tensors. A custom function's may.
bool is_own_backward();

// Returns an alias that shares the version counter and is part of no graph.
at::Tensor alias_of(const at::Tensor& tensor);

// Returns such an alias with the given counter.
at::Tensor alias_of(const at::Tensor& tensor, const c10::VariableVersion& counter);

}  // namespace storm
