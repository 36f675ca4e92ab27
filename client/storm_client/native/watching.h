// Watches the operators that a thread calls, by PyTorch's RecordFunction: arguments and results,
// before any of Python's modes and behind all of its functions.
//
// Only calls that are no part of another are told, and casts that autocast makes for those. Nothing
// here runs Python code or needs the interpreter's lock.
#pragma once

#include "common.h"

#include <ATen/record_function.h>

namespace storm {

class Watcher {
 public:
  virtual ~Watcher() = default;

  // A call begins; its inputs can be looked at now only.
  virtual void begins(const at::RecordFunction& call, bool is_cast) = 0;

  // The call that began last, and has not ended, has ended: by an exception if it has no outputs.
  virtual void ends(const at::RecordFunction& call, bool is_cast) = 0;

  // Have the calls of this thread be told from now on, and not any more; tells whether they were.
  void watch();
  bool unwatch();
};

// How many look at what this thread calls.
size_t watchers();

// While one lives, what this thread calls is told nobody.
class Unwatched {
 public:
  Unwatched();
  ~Unwatched();
  Unwatched(const Unwatched&) = delete;
  Unwatched& operator=(const Unwatched&) = delete;
};

// The tensor at a place among the outputs of a call, those of lists one by one; undefined if there
// is none.
at::Tensor output_at(c10::ArrayRef<c10::IValue> outputs, size_t place);

// Calls `visit` with each defined tensor among values, those of lists one by one.
template <typename Visit>
void for_each_tensor(c10::ArrayRef<c10::IValue> values, const Visit& visit) {
  for (const auto& value : values) {
    if (value.isTensor()) {
      if (value.toTensor().defined()) visit(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& one : value.toTensorVector()) visit(one);
    } else if (value.isOptionalTensorList()) {
      for (const std::optional<at::Tensor>& one : value.toOptionalTensorVector()) {
        if (one && one->defined()) visit(*one);
      }
    }
  }
}

}  // namespace storm
