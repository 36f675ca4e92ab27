// The values of a followed step that matter to recomputation, and the recipes of its calls, which
// are made right after each call has run.
#pragma once

#include "model_storages.h"
#include "recipes.h"
#include "script.h"

#include <unordered_map>

namespace storm {

// The former value of a storage of the current step: when last noted, or before a launch overwrote
// it.
struct Before {
  int number = CONSTANT;
  uint32_t version = 0;
  std::shared_ptr<Result> result;
};

// A storage of the current step, at one version.
struct TrackedStorage {
  int number;  // of its value
  uint32_t version;
  WeakStorage pin;  // keeps the address from being reused
  std::shared_ptr<Result> result = nullptr;
  std::shared_ptr<Packed> packed = nullptr;  // what recipes read of it, if it has no recipe
  std::shared_ptr<Packed> copy = nullptr;    // what they read of it where no operation made it
  Overwritten is_overwritten = nullptr;  // of `packed`
  Before before = {};
};

// The values of one step, by storage. The lock of the step protects it.
class Values {
 public:
  // Returns the value that an event expects if the tensor has it now; null if it has another.
  TrackedStorage* look_up(const Event& event, const at::Tensor& tensor);

  // Returns a recipe's input as the value with that number; null if it cannot be that value.
  TrackedStorage* match_input(int number, const at::Tensor& tensor, int64_t min_bytes);

  // Returns the result that recomputes a tensor as it is now; null if there is none.
  std::shared_ptr<Result> recomputed(const at::Tensor& tensor) const;

  // Returns the result that recomputes the value with that number, which a call has overwritten to
  // make the tensor. Null if the call is not known to have found that value there.
  std::shared_ptr<Result> before(int number, const at::Tensor& tensor) const;

  // Notes an overwrite of a tensor's memory that no version counts. Returns the former value.
  Before overwritten(const at::Tensor& tensor);

  // Notes a recipe's input that was packed from a tensor whose memory autograd may get, too.
  void add_input(const at::Tensor& tensor, const std::shared_ptr<Packed>& packed);

  // Has the inputs of living recipes that were packed from a storage read copies from now on.
  void protect_inputs(const c10::StorageImpl* storage, InputRestorer& restorer);

  // Holds the results that others hold, too. The step is unlike those in which recomputation was
  // tried, so they may be written to uncounted.
  void hold_results() const;

  // Forgets the storages; the inputs of recipes stay known.
  void forget_storages() { tracked_.clear(); }

 private:
  TrackedStorage* track(int number, const at::Tensor& tensor);

  std::unordered_map<const c10::StorageImpl*, TrackedStorage> tracked_;
  std::unordered_multimap<const c10::StorageImpl*, std::weak_ptr<Packed>> inputs_;
};

// An input that Python packs as soon as Python code may run.
struct Unpacked {
  at::Tensor tensor;
  int number;
  std::shared_ptr<Packed> source;
};

// Autocast's cast of an argument of a call in progress.
struct Cast {
  at::Tensor source;
  at::Tensor made;
};

// A reshape of an argument by a call in progress: a copy, or a view.
struct Reshape {
  const c10::StorageImpl* source;
  at::Tensor made;
};

// A call in progress: the parts that its recipe needs. The object is reused for the next call,
// whose inputs take the same memory.
struct Begun {
  void clear() {
    inputs.clear();
    casts.clear();
    reshapes.clear();
    draw.reset();
    launch.reset();
    former.clear();
    recipe.reset();
  }

  std::vector<c10::IValue> inputs;
  std::vector<Cast> casts;     // of those inputs
  std::vector<Reshape> reshapes;  // of those inputs, in order
  std::shared_ptr<Draw> draw;  // if it draws random numbers and that can be recorded
  std::shared_ptr<Launch> launch;  // of a kernel, if it is no operator's call
  std::vector<Before> former;      // what a launch has overwritten: its first inputs
  std::shared_ptr<Recipe> recipe;  // of its latest output; those of a launch share it
};

// Makes the recipe of a call's output, so that its value `made` is recomputed. Returns whether the
// call's inputs are those that the script expects, and nothing else decides the output.
//
// If the cast of an argument has a recipe, the new recipe reads that cast: otherwise the argument
// would be cast again. So does a product of batches with the copies that it makes of its arguments.
bool make_recipe(const Call& call, Begun& begun, const at::Tensor& output, TrackedStorage& made,
                 Values& values, const ModelStorages& model_storages, int64_t min_bytes,
                 std::vector<Unpacked>& unpacked);

// Does the same for a call's byproduct, whose value must have a result.
bool make_byproduct_recipe(const Call& call, Begun& begun, const at::Tensor& byproduct,
                           TrackedStorage& made, Values& values,
                           const ModelStorages& model_storages, int64_t min_bytes,
                           std::vector<Unpacked>& unpacked);

// Returns whether a call may draw random numbers.
bool draws_numbers(const Call& call, c10::ArrayRef<c10::IValue> inputs);

}  // namespace storm
