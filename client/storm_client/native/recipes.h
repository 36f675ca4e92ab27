// How a value is recomputed: the operator that has made it, called again on the same inputs. What
// eager/recompute.py does for functions of Python's, with the same rules and errors.
#pragma once

#include "draws.h"
#include "settings.h"
#include "versions.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <variant>

namespace storm {

using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

// Raises ActivationLost: `what` names the reason in eager/recompute.py, which writes the text.
[[noreturn]] void raise_lost(const char* what, PyObject* details);
[[noreturn]] void raise_lost(const char* what);

// Sets what returns the error for a reason and its details.
void set_lost_error(PyObject* function);

// How a tensor lies in its storage.
struct View {
  explicit View(const at::Tensor& tensor);
  bool describes(const at::Tensor& tensor) const;
  // The tensor over a storage that holds the bytes again, with a version counter of its own.
  at::Tensor over(c10::Storage storage) const;

  c10::DispatchKeySet keys;
  caffe2::TypeMeta dtype;
  c10::SmallVector<int64_t, 5> sizes;
  c10::SmallVector<int64_t, 5> strides;
  int64_t offset;  // in elements
};

// A copy with the same strides in a storage of its own, at the same offset: how a tensor lies in
// memory may decide in which order an operator adds its elements.
at::Tensor copied(const at::Tensor& tensor);

class Result;

// Returns inputs that were packed, and counts the seconds that this takes.
struct Bringing {
  Bringing(PyObject* bring, PyObject* load)
      : function(Ref::borrowed(bring)), load(Ref::borrowed(load)) {}

  Ref function;  // returns what Python has packed
  Ref load;      // returns the storage of what was kept for now and has left
  double seconds = 0.0;

  at::Tensor tensor(PyObject* packed);
};

// How an input of a recipe is held: as one of these, of which each gives the tensor as it was.
// All raise RuntimeError, StormError: it cannot be had.

// What stays: a parameter, or something small.
class Alias {
 public:
  explicit Alias(at::Tensor held);
  at::Tensor tensor(Bringing& bring);

 private:
  at::Tensor held_;
  uint32_t version_;
  size_t nbytes_;
};

// Whether the memory of a value has got other bytes, which no version counts.
using Overwritten = std::shared_ptr<bool>;

// What was kept, or what Python has packed for it since. All recipes of a step share it.
class Packed {
 public:
  // `is_overwritten` is null for a copy.
  Packed(const at::Tensor& tensor, Overwritten is_overwritten);
  ~Packed();
  at::Tensor tensor(Bringing& bring);
  // Has it be held by what Python has packed, or by what is kept until it leaves.
  void is_packed(PyObject* handle);

 private:
  at::Tensor kept_;
  SavedVersion version_;
  Overwritten is_overwritten_;
  PyObject* handle_ = nullptr;
};

class Shared {
 public:
  explicit Shared(std::shared_ptr<Packed> packed) : packed_(std::move(packed)) {}
  at::Tensor tensor(Bringing& bring) { return packed_->tensor(bring); }

 private:
  std::shared_ptr<Packed> packed_;
};

// A view of what no operation made: of the copy that was packed in its stead.
class Copied {
 public:
  Copied(std::shared_ptr<Packed> copy, const at::Tensor& tensor);
  at::Tensor tensor(Bringing& bring);

 private:
  std::shared_ptr<Packed> copy_;
  View view_;
};

// A view of what another recipe makes, at a version.
class Made {
 public:
  Made(std::shared_ptr<Result> result, const at::Tensor& tensor);
  at::Tensor tensor(Bringing& bring);

 private:
  std::shared_ptr<Result> result_;
  View view_;
  SavedVersion version_;
};

// Memory in which a tensor would lie as one did, of which nothing else is asked.
class Blank {
 public:
  // Memory of PyTorch's own begins at multiples of `alignment` bytes.
  Blank(const at::Tensor& tensor, size_t alignment);
  at::Tensor tensor(Bringing& bring);

 private:
  View view_;
  c10::Device device_;
  int64_t nbytes_;
};

// What another recipe makes, for an operation that writes to it: the memory is nobody else's.
class Written {
 public:
  Written(std::shared_ptr<Result> result, const at::Tensor& tensor);
  at::Tensor tensor(Bringing& bring);

 private:
  std::shared_ptr<Result> result_;
  View view_;
};

using Source = std::variant<Alias, Shared, Copied, Made, Blank, Written>;

// What decides how a call's result is computed besides its arguments.
struct Circumstances {
  c10::DeviceType device;
  std::optional<c10::ScalarType> autocast;  // to which dtype, where that is on
  Settings settings;
  bool is_simple;
  bool records;  // whether it may have chosen its kernels by what needs a gradient

  // The present ones; none where they cannot be told.
  static std::optional<Circumstances> present(c10::DeviceType device, bool is_simple);
};

// A launch of a kernel, as eager/launches.py tells it: a function of the tensors that it has read.
class Launch {
 public:
  Launch(PyObject* kernel, PyObject* options);
  ~Launch();
  Launch(const Launch&) = delete;
  Launch& operator=(const Launch&) = delete;
  // Runs it again; returns its outputs. The interpreter's lock is held.
  std::vector<at::Tensor> run(const std::vector<c10::IValue>& tensors) const;

 private:
  PyObject* kernel_;
  PyObject* options_;
};

using Operation = std::variant<c10::OperatorHandle, std::shared_ptr<Launch>>;

class Recipe {
 public:
  // `sources` stand for the tensors among the inputs of a call of `operation`, those of lists one by
  // one. `draw` is none where the call has drawn no random numbers.
  Recipe(Operation operation, c10::ArrayRef<c10::IValue> inputs, std::vector<Source> sources,
         Circumstances circumstances, std::shared_ptr<Draw> draw);
  // The output at a place, or what the call keeps, as no part of any graph. Other results of a launch
  // are offered its other outputs. The interpreter's lock is given up meanwhile, but for a launch.
  at::Tensor run(size_t place, Bringing& bring);
  void makes(std::weak_ptr<Result> result, size_t place) { results_.emplace_back(std::move(result), place); }

 private:
  struct Input {
    c10::IValue value;  // where it is no tensor and has none
    enum { VALUE, TENSOR, LIST, OPTIONAL_LIST } is = VALUE;
    std::vector<bool> has;  // of a list, where it has a tensor
  };

  std::vector<c10::IValue> filled(Bringing& bring);
  at::Tensor run(const Launch& launch, const std::vector<c10::IValue>& tensors, size_t place);
  // What a call of an operator keeps.
  at::Tensor kept(const c10::OperatorHandle& op, std::vector<c10::IValue>& stack);
  // Calls an operator; tells whether it has drawn the same random numbers.
  bool call(const c10::OperatorHandle& op, std::vector<c10::IValue>& stack);

  Operation operation_;
  std::vector<Input> inputs_;
  std::vector<bool> requires_grad_;  // by source, where what needs a gradient decides
  std::vector<Source> sources_;
  Circumstances circumstances_;
  std::shared_ptr<Draw> draw_;
  std::vector<std::pair<std::weak_ptr<Result>, size_t>> results_;
};

// One storage that a recipe makes. The lock of its step protects it.
class Result : public std::enable_shared_from_this<Result> {
 public:
  explicit Result(const at::Tensor& tensor);
  // One of which no recipe is known: the tensor is held.
  static std::shared_ptr<Result> held(const at::Tensor& tensor);

  bool has_recipe() const { return recipe_ != nullptr; }
  void made_by(std::shared_ptr<Recipe> recipe, size_t place);
  void expect_use();
  // Its own memory has got other bytes, which no version counts.
  void overwritten() { is_overwritten_ = true; }
  bool is_overwritten() const { return is_overwritten_; }
  // A view of its memory: its own while somebody holds that, else what is made anew.
  at::Tensor viewed(const View& view, Bringing& bring);
  at::Tensor viewed_anew(const View& view, Bringing& bring);
  // The same for one who writes to it: in memory that nobody else has.
  at::Tensor viewed_for_writing(const View& view, Bringing& bring);
  // Remembers what was made with another result, if somebody will ask for it.
  void offered(const at::Tensor& made);
  // Notes who has been handed the memory, and may change it under that version's counter.
  void given(const c10::VariableVersion& counter);

 private:
  at::Tensor made(Bringing& bring);
  void asked(at::Tensor made, uint64_t stream);

  WeakStorage origin_;
  size_t nbytes_;
  bool is_overwritten_ = false;
  View view_;
  c10::Device device_;
  at::Tensor original_;
  std::shared_ptr<Recipe> recipe_;
  size_t place_ = 0;
  at::Tensor memo_;
  uint64_t memo_stream_ = 0;
  std::vector<std::pair<c10::VariableVersion, uint32_t>> given_;
  int uses_ = 0;
  int left_ = 0;
};

}  // namespace storm
