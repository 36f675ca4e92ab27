// Watches the operators that a thread calls, by PyTorch's RecordFunction: arguments and results,
// before any of Python's modes and behind all of its functions.
//
// Only calls that are no part of another are told, and of what is inside of those the casts, under
// autocast, and what is reshaped or cast for kernels of products. Custom functions are passed over, and so
// is what subclasses of tensors do themselves, and an attention that no kernel computes as a whole: the
// calls inside of those are told. Nothing here runs Python code or needs the interpreter's lock.
#pragma once

#include "common.h"

#include <ATen/record_function.h>

namespace storm {

// What is told of a call.
enum class Told : uint8_t {
  CALL,  // it is no part of another
  CAST,  // autocast casts what such a call was given
  COPY,  // such a call reshapes what it was given, a copy, or a view; or autocast casts it further inside
};

class Watcher {
 public:
  virtual ~Watcher() = default;

  // A call begins; its inputs can be looked at now only.
  virtual void begins(const at::RecordFunction& call, Told told) = 0;

  // The call that began last, and has not ended, has ended: by an exception if it has no outputs.
  virtual void ends(const at::RecordFunction& call, Told told) = 0;

  // The call that began last was an attention, and is told no more: what follows is inside of it.
  virtual void forgets() = 0;

  // Whether it is to be told of copies inside of calls of an operator. That takes them longer.
  virtual bool wants_copies(const char* name) const = 0;

  // Have the calls of this thread be told from now on, and not any more; tells whether they were.
  void watch();
  bool unwatch();
};

// Whether the call that is being told is part of what a subclass of tensors does itself.
bool is_in_subclass();

// Whether it is part of an attention that is computed by such calls. Autocast is off there.
bool is_in_attention();

// Whether it is autocast that makes the cast which is being told, of an argument of the call; else the
// operator makes it. Autocast is off in what it calls itself.
bool casts_argument();

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

// Sets `inputs` to those that a call reads. A norm only writes to its running statistics while it
// trains: in their place is nothing.
void note_read(const at::RecordFunction& call, std::vector<c10::IValue>& inputs);

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
