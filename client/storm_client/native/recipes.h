// How a value is recomputed: by calling the operator that made it again on the same inputs. For
// Python functions eager/recompute.py does this, with the same rules and errors.
#pragma once

#include "draws.h"
#include "settings.h"
#include "versions.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <variant>

namespace storm {

using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

// Raises ActivationLost: `what` names the reason in eager/sources.py, which writes the message.
[[noreturn]] void raise_lost(const char* what, PyObject* details);
[[noreturn]] void raise_lost(const char* what);

// Raises it for a tensor that was modified in place since it had `version`.
[[noreturn]] void raise_changed(c10::IntArrayRef shape, uint32_t version, uint32_t now);

// The layout of a tensor in its storage.
struct View {
  explicit View(const at::Tensor& tensor);
  bool describes(const at::Tensor& tensor) const;
  // Returns the tensor over a storage that holds its bytes, with a version counter of its own.
  at::Tensor over(c10::Storage storage) const;

  c10::DispatchKeySet keys;
  caffe2::TypeMeta dtype;
  c10::SmallVector<int64_t, 5> sizes;
  c10::SmallVector<int64_t, 5> strides;
  int64_t offset;  // in elements
};

// Returns a copy with the same strides and offset in a storage of its own: the layout in memory may
// decide in which order an operator sums the elements.
at::Tensor copied(const at::Tensor& tensor);

class Result;

// Returns packed inputs, and measures the seconds that this takes.
struct InputRestorer {
  InputRestorer(PyObject* restore_input, PyObject* load)
      : function(Ref::borrowed(restore_input)), load(Ref::borrowed(load)) {}

  Ref function;  // unpacks what Python has packed
  Ref load;      // returns the storage of a tensor that waited and was offloaded
  double seconds = 0.0;
  int operations = 0;  // that recipes have run meanwhile

  at::Tensor tensor(PyObject* packed);
};

// The ways to hold an input of a recipe. Each returns the tensor as it was.
// All raise RuntimeError or StormError if they cannot return it.

// A constant input, kept on the device: a parameter or the copy of a small tensor.
class Alias {
 public:
  explicit Alias(at::Tensor held);
  at::Tensor tensor(InputRestorer& restorer);

 private:
  at::Tensor held_;
  uint32_t version_;
  size_t nbytes_;
};

// Whether the memory of a value was overwritten without a version counting that.
using Overwritten = std::shared_ptr<bool>;

// A copy of a tensor, for the streams of one device.
class PrivateCopy {
 public:
  explicit PrivateCopy(const at::Tensor& tensor);
  // Returns the copy, complete for this thread's current stream.
  at::Tensor tensor() const;

 private:
  at::Tensor copy_;
  c10::Stream stream_;  // on which it was made
};

// A kept tensor, or the handle that replaced it since. All recipes of a step share it.
class Packed {
 public:
  // `is_overwritten` is null for a copy, and for a small tensor.
  Packed(const at::Tensor& tensor, Overwritten is_overwritten);
  ~Packed();
  at::Tensor tensor(InputRestorer& restorer);
  // Has it read a copy from now on: others may write to the memory.
  void protect(InputRestorer& restorer);
  // Returns whether a tensor still has the kept memory: it may have been given other data since.
  bool keeps(const at::Tensor& tensor) const { return kept_.is_alias_of(tensor); }
  // Replaces the tensor by a handle: one from Python, or a Kept that waits to be offloaded.
  void is_packed(PyObject* handle);

 private:
  at::Tensor unpacked(InputRestorer& restorer);

  at::Tensor kept_;
  SavedVersion version_;
  Overwritten is_overwritten_;
  std::optional<PrivateCopy> copy_;
  PyObject* handle_ = nullptr;
};

// A view of a packed tensor.
class Viewed {
 public:
  Viewed(std::shared_ptr<Packed> packed, const at::Tensor& tensor);
  at::Tensor tensor(InputRestorer& restorer);

 private:
  std::shared_ptr<Packed> packed_;
  View view_;
};

// A view of another recipe's output, at a version.
class RecipeResult {
 public:
  RecipeResult(std::shared_ptr<Result> result, const at::Tensor& tensor);
  at::Tensor tensor(InputRestorer& restorer);

 private:
  std::shared_ptr<Result> result_;
  View view_;
  SavedVersion version_;
};

// Uninitialized memory with the layout of a tensor whose content does not matter.
class Blank {
 public:
  // PyTorch's own memory starts at multiples of `alignment` bytes.
  Blank(const at::Tensor& tensor, size_t alignment);
  at::Tensor tensor(InputRestorer& restorer);

 private:
  View view_;
  c10::Device device_;
  int64_t nbytes_;
};

// Another recipe's output, for an operation that overwrites it: in memory that nobody else uses.
class OverwrittenResult {
 public:
  OverwrittenResult(std::shared_ptr<Result> result, const at::Tensor& tensor);
  at::Tensor tensor(InputRestorer& restorer);

 private:
  std::shared_ptr<Result> result_;
  View view_;
};

using Source = std::variant<Alias, Viewed, RecipeResult, Blank, OverwrittenResult>;

// The circumstances, besides its arguments, that decide how a call's result is computed.
struct Circumstances {
  c10::DeviceType device;
  std::optional<c10::ScalarType> autocast;  // its dtype, if it is on
  Settings settings;
  KernelChoice choice;
  bool records;  // whether the call may choose kernels by which inputs require gradients

  // Returns the current ones; none if they cannot be read.
  static std::optional<Circumstances> present(c10::DeviceType device, KernelChoice choice);
};

// A launch of a kernel, as in eager/launches.py: a function of the tensors that it has read.
class Launch {
 public:
  Launch(PyObject* kernel, PyObject* options);
  ~Launch();
  Launch(const Launch&) = delete;
  Launch& operator=(const Launch&) = delete;
  // Launches it again and returns its outputs. The caller holds the GIL.
  std::vector<at::Tensor> run(const std::vector<c10::IValue>& tensors) const;

 private:
  PyObject* kernel_;
  PyObject* options_;
};

using Operation = std::variant<c10::OperatorHandle, std::shared_ptr<Launch>>;

class Recipe {
 public:
  // `sources` replace the tensors among the inputs of a call of `operation`, including each tensor
  // of a list. `draw` is null if the call has drawn no random numbers.
  Recipe(Operation operation, c10::ArrayRef<c10::IValue> inputs, std::vector<Source> sources,
         Circumstances circumstances, std::shared_ptr<Draw> draw);
  // Returns the output at a place, or the byproduct if that is KEPT, as no part of any graph. The
  // other outputs of a launch are offered to their results. Releases the GIL meanwhile, except for
  // a launch.
  at::Tensor run(size_t place, InputRestorer& restorer);
  // Notes the result of the call's byproduct: a run offers it to the result, if that is expected.
  void keeps(std::weak_ptr<Result> byproduct) { byproduct_ = std::move(byproduct); }
  // Has the recipe return its output in a shape that the operator does not give it.
  void shapes(c10::IntArrayRef sizes) { sizes_.emplace(sizes.begin(), sizes.end()); }
  void makes(std::weak_ptr<Result> result, size_t place) { results_.emplace_back(std::move(result), place); }

 private:
  struct Input {
    c10::IValue value;  // if it neither is a tensor nor contains one
    enum { VALUE, TENSOR, LIST, OPTIONAL_LIST } is = VALUE;
    std::vector<bool> has;  // for a list, where it has a tensor
  };

  std::vector<c10::IValue> filled(InputRestorer& restorer);
  at::Tensor run(const Launch& launch, const std::vector<c10::IValue>& tensors, size_t place);
  // Calls an operator; returns its byproduct, which is undefined unless it is one tensor.
  at::Tensor kept(const c10::OperatorHandle& op, std::vector<c10::IValue>& stack);
  // Calls an operator; returns whether it has drawn the same random numbers.
  bool call(const c10::OperatorHandle& op, std::vector<c10::IValue>& stack);

  Operation operation_;
  std::vector<Input> inputs_;
  std::vector<bool> requires_grad_;  // by source, if `Circumstances::records`
  std::vector<Source> sources_;
  Circumstances circumstances_;
  std::shared_ptr<Draw> draw_;
  std::optional<c10::SmallVector<int64_t, 5>> sizes_;
  std::weak_ptr<Result> byproduct_;
  std::vector<std::pair<std::weak_ptr<Result>, size_t>> results_;
};

// A backward pass's work on one stream.
struct Pass {
  uint64_t stream = 0;
  int backward = -1;  // the number of the backward pass; -1 outside of all

  bool operator==(const Pass& other) const {
    return stream == other.stream && backward == other.backward;
  }
};

// A storage that a recipe recomputes. The lock of its step protects it.
class Result : public std::enable_shared_from_this<Result> {
 public:
  explicit Result(const at::Tensor& tensor);
  // Returns a result without a known recipe, which holds the tensor.
  static std::shared_ptr<Result> held(const at::Tensor& tensor);

  bool has_recipe() const { return recipe_ != nullptr; }
  void made_by(std::shared_ptr<Recipe> recipe, size_t place);
  void expect_use();
  // Holds the original memory if somebody holds it: a backward pass reads it as it is then.
  void hold();
  // Notes an overwrite of the original memory that no version counts.
  void overwritten() { is_overwritten_ = true; }
  // Returns a view of a recomputed storage. Only without a recipe it reads the original memory, if
  // somebody holds that: it may be written to without a version counting that.
  at::Tensor viewed(const View& view, InputRestorer& restorer);
  // Returns a tensor that autograd saved, as a view of the original memory if somebody holds that:
  // PyTorch would read it, whatever was written to it. Otherwise the memory is recomputed. As long
  // as a backward pass holds what it got before, it gets the same memory again: it may write to one
  // of its saved tensors and read another.
  at::Tensor unpacked(const View& view, InputRestorer& restorer);
  // Returns the same as `unpacked` does when nobody holds the original memory.
  at::Tensor tried(const View& view, InputRestorer& restorer);
  // Returns a view of recomputed memory that nobody else has, for an operation that writes to it.
  at::Tensor viewed_for_writing(const View& view, InputRestorer& restorer);
  // Has recipes read a copy of what `unpacked` has returned, which may be written to uncounted: of
  // the memory that is remembered for them, or of its own.
  void protect(const at::Tensor& tensor);
  // Keeps an output that was recomputed with another result, if a use is still expected.
  void offered(const at::Tensor& made);
  bool is_expected() const;
  // Notes that the memory was returned to a user, who may modify it and count that in `counter`.
  void add_user(const c10::VariableVersion& counter);

 private:
  at::Tensor made(InputRestorer& restorer);
  // Returns the original storage if somebody holds it, else null. Raises if it was overwritten then.
  c10::intrusive_ptr<c10::StorageImpl> original_storage() const;
  // Returns whether a recomputed tensor is remembered for this pass, and nobody has modified it.
  bool remembers(const Pass& now) const;
  void note_request(at::Tensor made, Pass pass);

  WeakStorage origin_;
  size_t nbytes_;
  bool is_overwritten_ = false;
  View view_;
  c10::Device device_;
  at::Tensor original_;
  std::shared_ptr<Recipe> recipe_;
  size_t place_ = 0;
  // For further requests of the same backward pass: by the next one the inputs may have changed, so
  // a trial must recompute it then.
  at::Tensor memo_;
  Pass memo_pass_;
  std::optional<PrivateCopy> protected_;  // without a recipe: what recipes read of it
  std::optional<WeakStorage> unpacked_;  // what autograd got last
  uint64_t unpacked_stream_ = 0;
  std::vector<std::pair<c10::VariableVersion, uint32_t>> users_;
  int uses_ = 0;
  int remaining_uses_ = 0;
};

}  // namespace storm
