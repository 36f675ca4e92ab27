// Reports the operators that a thread calls, by PyTorch's RecordFunction, with arguments and
// results: below Python's torch functions, and above its dispatch modes.
//
// Only outermost calls are reported, and inside them the casts under autocast, and the reshapes and
// casts for kernels of products. Some calls are passed over, and the calls inside them are
// reported: custom functions, calls that tensor subclasses handle, and an attention that no single
// kernel computes. Nothing here runs Python code or needs the GIL.
#pragma once

#include "common.h"

#include <ATen/record_function.h>

namespace storm {

// The kind of a reported call.
enum class CallKind : uint8_t {
  CALL,  // an outermost call
  CAST,  // a cast inside such a call: of an input by autocast, or by the operator itself
  COPY,  // such a call's reshape of an input (a copy or a view), or autocast's cast further inside
};

class Watcher {
 public:
  virtual ~Watcher() = default;

  // Called when a call begins; its inputs can only be read now.
  virtual void begins(const at::RecordFunction& call, CallKind kind) = 0;

  // Called when the latest unfinished call ends: by an exception if it has no outputs.
  virtual void ends(const at::RecordFunction& call, CallKind kind) = 0;

  // The latest call was an attention, and is reported no further: next come the calls inside it.
  virtual void reports_inner_calls() = 0;

  // Returns whether to report copies inside calls of an operator. That makes these calls slower.
  virtual bool wants_copies(const char* name) const = 0;

  // Start and stop reports of this thread's calls; `unwatch` returns whether they were on.
  void watch();
  bool unwatch();
};

// `watch` and `unwatch` as methods of a watcher's Python object, which lives at least as long.
PyObject* watch_for(PyObject* self, Watcher& watcher);
PyObject* unwatch_for(PyObject* self, Watcher& watcher);

// Returns whether the reported call is part of a call that a tensor subclass handles.
bool is_in_subclass();

// Returns whether it is part of an attention that is computed by such calls. Autocast is off there.
bool is_in_attention();

// Returns whether autocast makes the reported cast, of an argument of the call; else the operator
// makes it. Autocast is off in its own calls.
bool casts_argument();

// Returns the number of watchers of this thread.
size_t watchers();

// While an instance lives, this thread's calls are not reported.
class PausedWatching {
 public:
  PausedWatching();
  ~PausedWatching();
  PausedWatching(const PausedWatching&) = delete;
  PausedWatching& operator=(const PausedWatching&) = delete;
};

// Sets `inputs` to those that a call reads. A norm in training only writes its running statistics,
// so they are replaced by None.
void note_read(const at::RecordFunction& call, std::vector<c10::IValue>& inputs);

// Returns the tensor at a place among a call's outputs, counting each one of a list; else
// undefined.
at::Tensor output_at(c10::ArrayRef<c10::IValue> outputs, size_t place);

// Calls `visit` with each defined tensor among values, including each one of a list.
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
