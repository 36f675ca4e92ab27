// Questions about a tensor, answered as storm_client/policy.py and saved/snapshots.py answer them.
#pragma once

#include "common.h"

namespace storm {

// Whether its bytes are its storage's bytes and mean what a plain strided tensor's mean. A
// subclass's, a sparse, nested, quantized, wrapped or inference tensor's may not.
bool is_ordinary(at::TensorImpl* impl);

// Whether an operation made its memory: then its changes are counted.
bool is_result(const at::Tensor& tensor);

bool is_view(const at::Tensor& tensor);

// Whether what an operator has just made is part of a graph, or may come to be: a custom function's
// `forward` runs, and autograd alone switches both modes off for that.
bool is_in_graph(const at::Tensor& output);

// The tensor of which one is a view, or itself.
const at::Tensor& base_of(const at::Tensor& tensor);

inline c10::StorageImpl* storage_of(const at::TensorImpl* impl) {
  return impl->unsafe_storage().unsafeGetStorageImpl();
}

inline int64_t nbytes_of(const at::TensorImpl* impl) {
  return impl->numel() * static_cast<int64_t>(impl->itemsize());
}

// Which stream of a device this thread's work goes to.
uint64_t stream_of(c10::Device device);

// What has Python see what operators are called with, under its modes.
const c10::DispatchKeySet MODES_OF_PYTHON({c10::DispatchKey::Python,
                                           c10::DispatchKey::PythonTLSSnapshot});

// An alias that shares the version counter and is part of no graph.
at::Tensor alias_of(const at::Tensor& tensor);

// The same with a counter that is given.
at::Tensor alias_of(const at::Tensor& tensor, const c10::VariableVersion& counter);

}  // namespace storm
