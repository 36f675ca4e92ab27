#include "call_log.h"

#include "draws.h"
#include "objects.h"
#include "script.h"
#include "tensors.h"
#include "watching.h"

#include <algorithm>
#include <cstring>

namespace storm {
namespace call_log {

// An input of a call. Both addresses are compared only with those of live tensors.
struct Input {
  const at::TensorImpl* tensor = nullptr;
  const c10::StorageImpl* storage = nullptr;  // null if it has no plain one
  bool is_small = false;
};

// A large output of a call that is part of a graph; or a saved tensor, which has no name.
struct Entry {
  std::string name;
  std::string overload;
  Ref kernel;          // of a launch, which has no names
  bool is_cast = false;  // inside another call
  uint32_t place = 0;  // among the call's outputs
  int position = -1;  // of its event in the step's script; -1 for none
  const at::TensorImpl* output = nullptr;  // an address, used only while the tensor lives
  const c10::StorageImpl* storage = nullptr;
  std::vector<Input> inputs;
  std::vector<int> arguments;  // for each input, the function's argument that it is; or -1
  int ordinal = 0;             // of its call, in the Python function
  std::string inside;          // the name of the outer call that it is part of; empty for none

  bool is_call() const { return !name.empty() || kernel; }
};

// Returns the entry for a byproduct: a tensor that a call saves and does not return.
Entry kept_by(const Entry& call) {
  Entry entry;
  entry.name = call.name;
  entry.overload = call.overload;
  entry.place = KEPT;
  entry.inputs = call.inputs;
  return entry;
}

bool lies_in(const at::Tensor& tensor, const at::Tensor& other) {
  const auto* impl = other.unsafeGetTensorImpl();
  return impl->has_storage() && storage_of(impl) == storage_of(tensor);
}

constexpr int NONE = -1;

// An operator call that is not visible as a Python function: a copy of an input inside another
// operator, or a part of what a tensor subclass or an attention without a single kernel computes.
struct Hidden {
  std::string name;
  std::vector<c10::IValue> inputs;
  at::Tensor made;
  bool is_of_attention = false;
  std::shared_ptr<Draw> draw = nullptr;  // if it draws random numbers and that can be recorded
  std::vector<at::Tensor> kept = {};     // if it draws: tensors saved meanwhile
  uint32_t version = 0;                  // of its output, which the next call may overwrite
  int entry = NONE;                      // the index of its entry; a byproduct's comes next
};

class Log : public Watcher {
 public:
  int64_t min_bytes = 0;
  bool logs_events = false;  // whether entries are made; else only hidden calls are recorded
  bool counts_gradless = false;  // whether results without gradients count
  std::vector<Hidden> hidden;
  std::vector<Entry> entries;
  size_t begun = 0;  // number of entries when the current Python function began
  int calls = 0;     // in that function
  bool counts = false;  // whether it is running
  bool is_opened = false;  // whether the calls inside its attention were reported instead
  std::optional<PausedWatching> paused;  // while Python records what was called

  bool wants_copies(const char*) const override { return true; }

  void begins(const at::RecordFunction& call, CallKind kind) override {
    if (kind == CallKind::COPY) copied_ = call.inputs().front().toTensor();
    if (kind == CallKind::CAST) cast_ = call.inputs().front().toTensor();
    if (kind == CallKind::CALL) {
      name_ = call.name();
      is_attention_ = std::strcmp(name_, "aten::scaled_dot_product_attention") == 0;
      given_.clear();
      draw_ = nullptr;
      kept_.clear();
      if (is_in_subclass() || is_in_attention()) note_read(call, given_);
      const bool draws = is_in_attention() && std::strcmp(call.name(), "aten::dropout") == 0;
      if (draws) draw_ = Draw::begin(call.inputs().front().toTensor());
    }
    if (!logs_events) return;
    auto& inputs = inputs_[static_cast<int>(kind)];
    inputs.clear();
    calls += counts && kind == CallKind::CALL;
    note_read(call, read_);
    for_each_tensor(read_, [&](const at::Tensor& one) { inputs.push_back(input_of(one)); });
    read_.clear();
  }

  void ends(const at::RecordFunction& call, CallKind kind) override {
    Hidden one;
    const at::Tensor copied = std::exchange(copied_, {}), cast = std::exchange(cast_, {});
    if (kind == CallKind::COPY) one.inputs = {copied};
    if (kind == CallKind::CAST && is_attention_ && casts_argument()) one.inputs = {cast};
    if (kind == CallKind::CALL) {
      one.inputs.swap(given_);
      one.draw = std::exchange(draw_, nullptr);
      one.kept.swap(kept_);
      if (one.draw != nullptr) one.draw->end();
      casts_.clear();
    }
    if (!logs_events && one.inputs.empty()) return;
    uint32_t place = 0;
    for_each_tensor(call.outputs(), [&](const at::Tensor& output) {
      if (!is_large(output)) return void(++place);
      if (kind == CallKind::COPY && lies_in(output, copied)) return;
      one.entry = NONE;
      if (logs_events) {
        one.entry = add(call.operator_name(), output, place++, kind, !one.kept.empty());
      }
      if (one.inputs.empty() || output.is_inference()) return;
      one.name = call.name();
      one.is_of_attention = is_in_attention();
      one.made = output;
      one.version = version_of(output);
      (kind == CallKind::CAST ? casts_ : hidden).push_back(one);
    });
  }

  void reports_inner_calls() override {
    is_opened = true;
    for (Hidden& one : casts_) {
      one.is_of_attention = true;
      hidden.push_back(std::move(one));
    }
    casts_.clear();
  }

  // Notes that a tensor is saved.
  void add_saved_tensor(const at::Tensor& tensor) {
    if (draw_ != nullptr) kept_.push_back(tensor);
  }

 private:
  Input input_of(const at::Tensor& tensor) const {
    auto* impl = tensor.unsafeGetTensorImpl();
    if (!is_ordinary(impl)) return {impl};
    return {impl, storage_of(impl), static_cast<int64_t>(storage_of(impl)->nbytes()) < min_bytes};
  }

  bool is_large(const at::Tensor& output) const {
    auto* impl = output.unsafeGetTensorImpl();
    if (!is_ordinary(impl) || !is_counted(output, counts_gradless)) return false;
    return static_cast<int64_t>(storage_of(impl)->nbytes()) >= min_bytes;
  }

  // Returns the index of the new entry. If the call `keeps` a byproduct, its entry comes next.
  int add(const std::optional<c10::OperatorName>& name, const at::Tensor& output, uint32_t place,
          CallKind kind, bool keeps) {
    if (!name) return NONE;
    auto* impl = output.unsafeGetTensorImpl();
    Entry entry;
    entry.name = name->name;
    entry.overload = name->overload_name;
    entry.is_cast = kind == CallKind::CAST;
    entry.place = place;
    entry.output = impl;
    entry.storage = storage_of(impl);
    entry.inputs = inputs_[static_cast<int>(kind)];
    entry.ordinal = calls;
    if (kind == CallKind::COPY) entry.inside = name_;
    entries.push_back(std::move(entry));
    if (keeps) entries.push_back(kept_by(entries.back()));
    return static_cast<int>(entries.size()) - 1 - keeps;
  }

  std::vector<c10::IValue> read_;
  std::vector<Input> inputs_[3];  // of the calls that began last, by `CallKind`
  at::Tensor copied_;             // the input of the last call, if that is a copy
  at::Tensor cast_;               // the same for a cast
  bool is_attention_ = false;     // whether the outermost call is one
  std::vector<Hidden> casts_;     // of its arguments, if so
  std::vector<c10::IValue> given_;  // inputs of the last call, if it is hidden
  std::shared_ptr<Draw> draw_;    // of that call
  std::vector<at::Tensor> kept_;  // tensors saved while it draws
  const char* name_ = "";         // of the outermost call
};

Log& log_of(PyObject* self) { return value_of<Log>(self); }

PyObject* create(PyTypeObject* type, PyObject* arguments, PyObject*) {
  HANDLE_TH_ERRORS
  long long min_bytes = 0;
  int logs_events = 0, counts_gradless = 0;
  expect(PyArg_ParseTuple(arguments, "Lpp", &min_bytes, &logs_events, &counts_gradless));
  Ref self = object_of<Log>(type);
  auto& log = log_of(self.get());
  log.min_bytes = min_bytes;
  log.logs_events = logs_events;
  log.counts_gradless = counts_gradless;
  return self.release();
  END_HANDLE_TH_ERRORS
}

PyObject* watch(PyObject* self, PyObject*) { return watch_for(self, log_of(self)); }

PyObject* unwatch(PyObject* self, PyObject*) { return unwatch_for(self, log_of(self)); }

PyObject* begin(PyObject* self, PyObject*) {
  auto& log = log_of(self);
  log.begun = log.entries.size();
  log.calls = 0;
  log.counts = true;
  log.is_opened = false;
  Py_RETURN_NONE;
}

PyObject* end(PyObject* self, PyObject*) {
  log_of(self).counts = false;
  return PyBool_FromLong(log_of(self).is_opened);
}

PyObject* enter(PyObject* self, PyObject*) {
  log_of(self).paused.emplace();
  Py_RETURN_NONE;
}

PyObject* exit(PyObject* self, PyObject*) {
  log_of(self).paused.reset();
  Py_RETURN_NONE;
}

PyObject* add_saved_tensor(PyObject* self, PyObject* tensor) {
  HANDLE_TH_ERRORS
  log_of(self).add_saved_tensor(THPVariable_Unpack(tensor));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* add_save_event(PyObject* self, PyObject* argument) {
  HANDLE_TH_ERRORS
  Entry entry;
  entry.position = static_cast<int>(PyLong_AsLong(argument));
  expect(!PyErr_Occurred());
  log_of(self).entries.push_back(std::move(entry));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// launched(a Launch of eager/launches.py): records its large outputs, as of a separate function.
PyObject* launched(PyObject* self, PyObject* tuple) {
  HANDLE_TH_ERRORS
  PyObject *kernel, *tensors, *options, *made;
  Py_ssize_t over = 0;
  expect(PyArg_ParseTuple(tuple, "OO!OO!n", &kernel, &PyList_Type, &tensors, &options, &PyList_Type,
                          &made, &over));
  auto& log = log_of(self);
  log.begun = log.entries.size();
  log.calls = 1;
  for (Py_ssize_t at = 0; at < PyList_GET_SIZE(made); ++at) {
    const auto& output = THPVariable_Unpack(PyList_GET_ITEM(made, at));
    Entry entry;
    entry.kernel = Ref::borrowed(kernel);
    entry.place = static_cast<uint32_t>(at);
    entry.output = output.unsafeGetTensorImpl();
    entry.storage = storage_of(entry.output);
    for (Py_ssize_t input = 0; input < PyList_GET_SIZE(tensors); ++input) {
      const auto& tensor = THPVariable_Unpack(PyList_GET_ITEM(tensors, input));
      entry.inputs.push_back({tensor.unsafeGetTensorImpl()});
    }
    const auto nbytes = static_cast<int64_t>(entry.storage->nbytes());
    if (nbytes >= log.min_bytes) log.entries.push_back(std::move(entry));
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// Returns which of the arguments a call's input is, or shares its storage with; -1 if none.
int argument_of(const Input& input, PyObject* given) {
  int argument = -1;
  for (Py_ssize_t at = 0; at < PyList_GET_SIZE(given); ++at) {
    const auto* impl = THPVariable_Unpack(PyList_GET_ITEM(given, at)).unsafeGetTensorImpl();
    if (impl == input.tensor) return static_cast<int>(at);
    const bool has_storage = input.storage != nullptr && impl->has_storage();
    if (has_storage && storage_of(impl) == input.storage) argument = static_cast<int>(at);
  }
  return argument;
}

// Notes that an entry is the event at a position, and which of the given arguments it reads.
void assign(Entry& entry, PyObject* given, int position) {
  for (const auto& input : entry.inputs) entry.arguments.push_back(argument_of(input, given));
  entry.position = position;
}

// Returns whether a call's large inputs are all arguments of the function, or views of these.
bool is_bound(const Entry& entry, PyObject* given) {
  return std::all_of(entry.inputs.begin(), entry.inputs.end(), [&](const Input& input) {
    return input.is_small || argument_of(input, given) >= 0;
  });
}

// assign_output(output, arguments, position, entry): returns whether a single call made all of the
// current function's output. Before that call the function may have taken views and written
// indices. For a hidden call the entry is known.
PyObject* assign_output(PyObject* self, PyObject* arguments) {
  HANDLE_TH_ERRORS
  PyObject *made, *given;
  int position = 0, entry = NONE;
  expect(PyArg_ParseTuple(arguments, "OO!ii", &made, &PyList_Type, &given, &position, &entry));
  const auto* output = THPVariable_Unpack(made).unsafeGetTensorImpl();
  auto& log = log_of(self);
  if (entry != NONE) {
    assign(log.entries.at(entry), given, position);
    Py_RETURN_TRUE;
  }
  for (size_t at = log.entries.size(); at-- > log.begun;) {  // a call's own outputs come last
    auto& entry = log.entries[at];
    if (entry.output != output || !entry.is_call() || entry.is_cast || entry.position >= 0) continue;
    if (log.calls != 1 && (entry.ordinal != log.calls || !is_bound(entry, given))) continue;
    assign(entry, given, position);
    Py_RETURN_TRUE;
  }
  Py_RETURN_FALSE;
  END_HANDLE_TH_ERRORS
}

// assign_byproduct(arguments, position, entry): notes that the event is the byproduct of the
// current function's call, or of an entry's hidden call. Returns whether there was a single call,
// with a known result.
PyObject* assign_byproduct(PyObject* self, PyObject* arguments) {
  HANDLE_TH_ERRORS
  PyObject* given;
  int position = 0, hidden = NONE;
  expect(PyArg_ParseTuple(arguments, "O!ii", &PyList_Type, &given, &position, &hidden));
  auto& log = log_of(self);
  if (hidden != NONE) {
    assign(log.entries.at(hidden + 1), given, position);
    Py_RETURN_TRUE;
  }
  if (log.calls != 1 || log.entries.size() == log.begun) Py_RETURN_FALSE;
  if (!log.entries.back().is_call() || !log.entries.back().inside.empty()) Py_RETURN_FALSE;
  Entry entry = kept_by(log.entries.back());
  assign(entry, given, position);
  log.entries.push_back(std::move(entry));
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

// assign_cast(storage's address, source, position): returns whether the call that made it is known.
PyObject* assign_cast(PyObject* self, PyObject* arguments) {
  HANDLE_TH_ERRORS
  PyObject* given;
  unsigned long long address = 0;
  int position = 0;
  expect(PyArg_ParseTuple(arguments, "KO!i", &address, &PyList_Type, &given, &position));
  auto& entries = log_of(self).entries;
  for (auto entry = entries.rbegin(); entry != entries.rend(); ++entry) {
    if (reinterpret_cast<uint64_t>(entry->storage) != address || entry->name != "aten::to") continue;
    if (entry->position < 0) assign(*entry, given, position);  // else it is in autocast's cache
    Py_RETURN_TRUE;
  }
  Py_RETURN_FALSE;
  END_HANDLE_TH_ERRORS
}

// Returns an argument as a Python object; null if it is not a tensor, a number or None. A dtype is
// a number.
Ref argument(const c10::IValue& value) {
  if (value.isTensor() && value.toTensor().defined()) return expected(THPVariable_Wrap(value.toTensor()));
  if (value.isNone() || value.isTensor()) return Ref::borrowed(Py_None);
  if (value.isBool()) return Ref::borrowed(value.toBool() ? Py_True : Py_False);
  if (value.isInt()) return expected(PyLong_FromLongLong(value.toInt()));
  if (value.isDouble()) return expected(PyFloat_FromDouble(value.toDouble()));
  return Ref();
}

// Returns the hidden calls since the last such request, as tuples: `HiddenCall` in eager/calls.py
// names the fields. Leaves out calls with lists as arguments.
PyObject* take_hidden(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  const std::vector<Hidden> hidden = std::exchange(log_of(self).hidden, {});
  Ref found = list();
  for (const auto& one : hidden) {
    Ref arguments = list();
    const bool is_known = std::all_of(one.inputs.begin(), one.inputs.end(), [&](const c10::IValue& value) {
      Ref made = argument(value);
      return made && PyList_Append(arguments.get(), made.get()) == 0;
    });
    expect(!PyErr_Occurred());
    if (!is_known) continue;
    Ref made = expected(THPVariable_Wrap(one.made));
    Ref draw = expected(wrapped(one.draw));
    Ref kept = list();
    for (const auto& tensor : one.kept) append(kept, expected(THPVariable_Wrap(tensor)).get());
    Ref call = expected(Py_BuildValue("sOOOOOIi", one.name.c_str(), arguments.get(), made.get(),
                                      one.is_of_attention ? Py_True : Py_False, draw.get(), kept.get(),
                                      one.version, one.entry));
    append(found, call.get());
  }
  return found.release();
  END_HANDLE_TH_ERRORS
}

// Returns tuples of position, name, overload, kernel or None, place, arguments and outer call.
PyObject* entries(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  Ref found = list();
  for (const auto& entry : log_of(self).entries) {
    if (entry.place == KEPT && entry.position < 0) continue;  // there was no byproduct
    Ref arguments = numbers(entry.arguments);
    PyObject* kernel = entry.kernel ? entry.kernel.get() : Py_None;
    Ref one = expected(Py_BuildValue("issOIOs", entry.position, entry.name.c_str(),
                                     entry.overload.c_str(), kernel, entry.place, arguments.get(),
                                     entry.inside.c_str()));
    append(found, one.get());
  }
  return found.release();
  END_HANDLE_TH_ERRORS
}

PyMethodDef METHODS[] = {
    {"watch", watch, METH_NOARGS, "Start logging this thread's calls."},
    {"unwatch", unwatch, METH_NOARGS, "Stop logging."},
    {"begin", begin, METH_NOARGS, "Note that a Python function begins."},
    {"end", end, METH_NOARGS,
     "Note that it has ended; return whether it was an attention computed by other calls."},
    {"__enter__", enter, METH_NOARGS, "Pause logging: calls inside are not part of the step."},
    {"__exit__", exit, METH_VARARGS, "Resume logging."},
    {"launched", launched, METH_O, "Log the outputs of a kernel launch."},
    {"add_saved_tensor", add_saved_tensor, METH_O, "Log a saved tensor."},
    {"add_save_event", add_save_event, METH_O, "Log the save event at a position."},
    {"assign_output", assign_output, METH_VARARGS,
     "Assign an event to the output of the current function; return whether one call made it."},
    {"assign_byproduct", assign_byproduct, METH_VARARGS,
     "Assign an event to the byproduct of the current function; return whether its call is known."},
    {"assign_cast", assign_cast, METH_VARARGS,
     "Assign an event to a cast by autocast; return whether the call that made it is known."},
    {"take_hidden", take_hidden, METH_NOARGS,
     "Return the calls that no Python function reports, since the last request."},
    {"entries", entries, METH_NOARGS, "Return the logged saves and calls, in order."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace call_log

PyTypeObject CallLogType =
    type_of<call_log::Log>("storm_client.native._follow.CallLog",
                           "Logs the operators that a step calls.", call_log::METHODS,
                           call_log::create);

}  // namespace storm
