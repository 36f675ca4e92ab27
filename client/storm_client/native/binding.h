// What a followed step has made so far of what matters to recomputation, and the recipes that are
// made of its calls where they have just run.
#pragma once

#include "owned.h"
#include "recipes.h"
#include "script.h"

#include <unordered_map>

namespace storm {

// What a storage of the step at hand was before: when it was last looked at, or till a launch.
struct Before {
  int number = CONSTANT;
  uint32_t version = 0;
  std::shared_ptr<Result> result;
};

// A storage of the step at hand, at one version.
struct Seen {
  int number;  // of its value
  uint32_t version;
  WeakStorage pin;  // keeps the address from being used again
  std::shared_ptr<Result> result;
  std::shared_ptr<Packed> copy;  // of one that no operation made, what recipes read in its stead
  Overwritten is_overwritten = nullptr;  // where a recipe reads it as it is
  Before before = {};
};

// The values of one step, by storage. The lock of the step protects it.
class Values {
 public:
  // The value that an event expects if the tensor has it now; null if it has another.
  Seen* look_up(const Event& event, const at::Tensor& tensor);

  // What a recipe's input is as the value of that number; null if it cannot be that.
  Seen* meet(int number, const at::Tensor& tensor, int64_t least);

  // What recomputes a tensor as it is now; null if nothing does.
  std::shared_ptr<Result> recomputed(const at::Tensor& tensor) const;

  // What recomputes the value of a number that a call has written over to make the tensor; null if it
  // is not known to have found that.
  std::shared_ptr<Result> before(int number, const at::Tensor& tensor) const;

  // A tensor's memory has got other bytes, which no version counts. Returns what it was.
  Before overwritten(const at::Tensor& tensor);

  void clear() { seen_.clear(); }

 private:
  Seen* see(int number, const at::Tensor& tensor);

  std::unordered_map<const c10::StorageImpl*, Seen> seen_;
};

// An input that is to be packed by Python, once that may run.
struct Unpacked {
  at::Tensor tensor;
  int number;
  std::shared_ptr<Packed> source;  // none for what is only told to have been made
};

// What autocast has made of an argument of a call that is under way.
struct Cast {
  at::Tensor source;
  at::Tensor made;
};

// A call that has begun, as far as it is needed to make a recipe of it. It is used again for the
// next, whose inputs take the same memory.
struct Begun {
  void clear() {
    inputs.clear();
    casts.clear();
    draw.reset();
    launch.reset();
    former.clear();
    recipe.reset();
  }

  std::vector<c10::IValue> inputs;
  std::vector<Cast> casts;     // of those inputs
  std::shared_ptr<Draw> draw;  // of one that draws random numbers, if that can be noted
  std::shared_ptr<Launch> launch;  // of a kernel, which is no operator's call
  std::vector<Before> former;      // what a launch has written over: its first inputs
  std::shared_ptr<Recipe> recipe;  // of a launch, of which several outputs may be recomputed
};

// Makes the recipe of a call's output, whose value is `made`, and has that be recomputed. Tells
// whether the call's inputs are what its script expects, and nothing else decides what it makes.
//
// An argument whose cast is recomputed by itself is taken from there: it would be cast again.
bool bind(const Script& script, const Call& call, Begun& begun, const at::Tensor& output, Seen& made,
          Values& values, const Owned& owned, int64_t least, std::vector<Unpacked>& unpacked);

// The same of a call's byproduct, whose value has a result.
bool bind_byproduct(const Script& script, const Call& call, Begun& begun,
                    const at::Tensor& byproduct, Seen& made, Values& values, const Owned& owned,
                    int64_t least, std::vector<Unpacked>& unpacked);

// Tells whether a call may draw random numbers.
bool draws_numbers(const Call& call, c10::ArrayRef<c10::IValue> inputs);

// Sets torch.nn.Parameter.
void set_parameter_type(PyObject* type);
PyObject* parameter_type();

}  // namespace storm
