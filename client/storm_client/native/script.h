// The calls and saves of a step that follows its plan, in order: a step signature's events,
// compiled.
#pragma once

#include "settings.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <functional>
#include <set>
#include <string>
#include <unordered_map>
#include <unordered_set>

namespace storm {

enum class What : uint8_t {
  KEEP,       // a saved tensor that is kept on the device
  OFFLOAD,    // a saved tensor that Python offloads
  RECOMPUTE,  // a saved tensor that is recomputed
  CALL,       // one output of a call of an operator
  END,
};

// What to do with an output.
enum class Does : uint8_t {
  COUNT,      // nothing: it only has its place between the other outputs
  LOOK_UP,    // note which value of the step it is, since others are recomputed from it
  RECOMPUTE,  // the same, and make its recipe
};

// Identifies what has run, as far as scripts distinguish it: an operator, or a launched kernel.
struct Called {
  const char* name = nullptr;
  const char* overload = nullptr;
  PyObject* kernel = nullptr;

  bool operator==(const Called& other) const {
    return name == other.name && overload == other.overload && kernel == other.kernel;
  }
};

// What a byproduct depends on, as in eager/byproducts.py.
enum class Depends : uint8_t {
  ARGUMENTS,  // the output is no byproduct
  LAYOUT,     // the memory layout of the first argument, and the random numbers
  VALUES,     // the values of the arguments
  FORMER,     // the value of the first argument before it was overwritten
};

struct Call {
  std::optional<c10::OperatorHandle> op;
  Ref kernel;  // instead of `op`, for a launch; see eager/launches.py
  // Their addresses identify an operator as long as it is registered.
  const char* name = nullptr;
  const char* overload = nullptr;
  uint32_t place = 0;  // among the outputs
  Does does = Does::COUNT;
  std::optional<c10::ScalarType> dtype;
  KernelChoice choice = KernelChoice::NONE;
  bool is_convolution = false;
  bool is_cast = false;
  bool is_copy = false;       // made inside another call, of that call's input
  bool may_draw = false;      // random numbers
  int dropout = -1;           // which of its inputs is the dropout probability; -1 if none
  bool overwrites = false;    // its output is its first input, a value that is recomputed
  Depends depends = Depends::ARGUMENTS;
  std::vector<int> inputs;    // the numbers of its input values; CONSTANT for constant inputs

  Called called() const { return {name, overload, kernel.get()}; }
};

constexpr int CONSTANT = -1;

// The `place` of a call's byproduct: a tensor that the call lets autograd keep, and neither reads
// nor returns; see eager/byproducts.py.
constexpr uint32_t KEPT = UINT32_MAX;

// The sizes at which a value was recomputed and compared; see eager/proofs.py.
struct Sizes {
  static constexpr size_t ENOUGH = 3;
  c10::SmallVector<int64_t, ENOUGH> bytes;  // ascending

  bool have(int64_t nbytes) const {
    if (bytes.size() < ENOUGH) return std::find(bytes.begin(), bytes.end(), nbytes) != bytes.end();
    return bytes.front() <= nbytes && nbytes <= bytes.back();
  }
};

struct Event {
  What what = What::END;
  int64_t max_bytes = 0;   // bytes of a saved tensor's storage that the plan was made for
  Sizes proved;            // of a recomputed tensor
  uint32_t row = 0;        // of the tallies
  int32_t position = 0;    // among all events of the signature, of which a script has only some
  int32_t number = -1;     // of its value in the step
  bool matters = false;    // whether the value is recomputed, or another one from it
  bool is_new = false;     // whether no earlier event has this value
  bool is_byproduct = false;  // of a saved tensor: whether it is a byproduct of a call
  uint32_t call = 0;       // index in the calls of the script
};

// A value of the step, and what the plan does with it where others are recomputed from it.
struct Planned {
  int64_t max_bytes;  // that the plan was made for
  bool is_kept;
};

struct Script {
  std::vector<Event> events;       // END is the last
  std::vector<Call> calls;
  std::vector<uint32_t> next;      // by signature position, the first event here from there on
  std::vector<uint32_t> next_call; // by event, the next call; the number of calls if there is none
  std::unordered_set<const char*> names;  // of the operators of calls
  std::unordered_set<PyObject*> kernels;  // of those that are launches
  std::set<std::string, std::less<>> copying;  // operators inside which copies are expected
  std::vector<Planned> values;  // by number
  bool counts_gradless = false;  // whether results without gradients count
};

extern PyTypeObject ScriptType;

}  // namespace storm
