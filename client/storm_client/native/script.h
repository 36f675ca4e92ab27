// What a step that follows its plan calls and saves, in order: the events of a step signature, compiled.
#pragma once

#include "common.h"

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
  PYTHON,     // a saved tensor that Python looks at
  RECOMPUTE,  // a saved tensor that is recomputed
  CALL,       // one output of a call of an operator
  END,
};

// What is done with an output.
enum class Does : uint8_t {
  COUNT,      // nothing: it stands between those with which something is done
  LOOK_UP,    // it is noted which value of the step it is, since others are made from that
  RECOMPUTE,  // besides, a recipe is made of it
};

// What has run, as far as scripts tell it from others: an operator, or a kernel that was launched.
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
  ARGUMENTS,  // it is none
  LAYOUT,     // how the first argument lies in memory, and what is drawn
  VALUES,     // the arguments
  FORMER,     // what the first argument was before it was written over
};

struct Call {
  std::optional<c10::OperatorHandle> op;
  Ref kernel;  // instead, of a launch; eager/launches.py
  // Their addresses name an operator as long as it is registered.
  const char* name = nullptr;
  const char* overload = nullptr;
  uint32_t place = 0;  // among the outputs
  Does does = Does::COUNT;
  std::optional<c10::ScalarType> dtype;
  bool is_simple = true;      // neither product nor attention: a GPU has one kernel for it
  bool is_convolution = false;
  bool is_cast = false;
  bool is_copy = false;       // made by another call, of what that was given
  bool may_draw = false;      // random numbers
  int dropout = -1;           // which of its inputs says how much is dropped, if one does
  bool leaves = false;        // its output may leave as it was made
  bool overwrites = false;    // its output is its first input, a value that is recomputed
  Depends depends = Depends::ARGUMENTS;
  std::vector<int> inputs;    // which values its tensors are; CONSTANT for those that stay

  Called called() const { return {name, overload, kernel.get()}; }
};

constexpr int CONSTANT = -1;

// Stands in the place of an output for a call's byproduct: what it has autograd keep, and neither
// reads nor returns; see eager/byproducts.py.
constexpr uint32_t KEPT = UINT32_MAX;

// At which sizes a value was recomputed and compared: see eager/proofs.py.
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
  int64_t most = 0;        // bytes of a saved tensor's storage that the plan was made for
  Sizes proved;            // of one that is recomputed
  uint32_t row = 0;        // of the tallies
  int32_t position = 0;    // among all events of the signature, of which some are no events here
  int32_t number = -1;     // of its value in the step
  bool matters = false;    // whether the value is recomputed, or another one from it
  bool is_new = false;     // whether no event before is of this value
  bool is_byproduct = false;  // of a saved tensor: whether it is one of a call
  uint32_t call = 0;       // of those of the script
};

struct Script {
  std::vector<Event> events;       // END is the last
  std::vector<Call> calls;
  std::vector<uint32_t> next;      // by position among all events, the first event here from there
  std::vector<uint32_t> next_call; // by event, the call that is next, the number of calls if none is
  std::unordered_set<const char*> names;  // of the operators of calls
  std::unordered_set<PyObject*> kernels;  // of those that are launches
  std::set<std::string, std::less<>> copying;  // operators that make copies
  std::unordered_map<int, int64_t> kept;  // values that are kept, also as inputs, up to so many bytes
  bool keeps(int number, int64_t nbytes) const {
    const auto found = kept.find(number);
    return found != kept.end() && nbytes <= found->second;
  }
  std::unordered_map<int, int> saved;  // by number of a value, where it is saved first
};

extern PyTypeObject ScriptType;

const Script& script_of(PyObject* self);

}  // namespace storm
