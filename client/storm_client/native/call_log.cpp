#include "call_log.h"

#include "tensors.h"
#include "watching.h"

namespace storm {
namespace call_log {

// One output of a call that is large and part of a graph, or, without a name, a saved tensor.
struct Entry {
  std::string name;
  std::string overload;
  Ref kernel;          // of a launch, which has neither
  uint32_t place = 0;  // among the call's outputs
  int position = -1;  // of the event that it is in the step's script
  const at::TensorImpl* output = nullptr;  // an address, looked at as long as the tensor lives
  const c10::StorageImpl* storage = nullptr;
  std::vector<const at::TensorImpl*> inputs;
  std::vector<int> arguments;  // of which of the function's arguments each input is one; or -1

  bool is_call() const { return !name.empty() || kernel; }
};

class Log : public Watcher {
 public:
  int64_t least = 0;
  std::vector<Entry> entries;
  size_t begun = 0;  // entries before the present function of Python's began
  int calls = 0;     // in that function
  bool counts = false;

  void begins(const at::RecordFunction& call, bool is_cast) override {
    auto& inputs = is_cast ? cast_inputs_ : inputs_;
    inputs.clear();
    calls += counts && !is_cast;
    for (const auto& value : call.inputs()) {
      for_each_tensor(value, [&](const at::Tensor& one) { inputs.push_back(one.unsafeGetTensorImpl()); });
    }
  }

  void ends(const at::RecordFunction& call, bool is_cast) override {
    const auto name = call.operator_name();
    uint32_t place = 0;
    for_each_tensor(call.outputs(), [&](const at::Tensor& output) {
      add(name, output, place++, is_cast ? cast_inputs_ : inputs_);
    });
  }

 private:
  void add(const std::optional<c10::OperatorName>& name, const at::Tensor& output, uint32_t place,
           const std::vector<const at::TensorImpl*>& inputs) {
    auto* impl = output.unsafeGetTensorImpl();
    if (!name || !is_ordinary(impl) || !output.requires_grad()) return;
    if (static_cast<int64_t>(storage_of(impl)->nbytes()) < least) return;
    Entry entry;
    entry.name = name->name;
    entry.overload = name->overload_name;
    entry.place = place;
    entry.output = impl;
    entry.storage = storage_of(impl);
    entry.inputs = inputs;
    entries.push_back(std::move(entry));
  }

  std::vector<const at::TensorImpl*> inputs_;
  std::vector<const at::TensorImpl*> cast_inputs_;
};

struct LogObject {
  PyObject_HEAD
  Log log;
};

Log& log_of(PyObject* self) { return reinterpret_cast<LogObject*>(self)->log; }

PyObject* create(PyTypeObject* type, PyObject* arguments, PyObject*) {
  long long least = 0;
  if (!PyArg_ParseTuple(arguments, "L", &least)) return nullptr;
  PyObject* self = type->tp_alloc(type, 0);
  if (self == nullptr) return nullptr;
  (new (&log_of(self)) Log())->least = least;
  return self;
}

void dealloc(PyObject* self) {
  log_of(self).~Log();
  Py_TYPE(self)->tp_free(self);
}

PyObject* watch(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  log_of(self).watch();
  Py_INCREF(self);  // until nobody is told any more
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* unwatch(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  if (log_of(self).unwatch()) Py_DECREF(self);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* begin(PyObject* self, PyObject*) {
  auto& log = log_of(self);
  log.begun = log.entries.size();
  log.calls = 0;
  log.counts = true;
  Py_RETURN_NONE;
}

PyObject* end(PyObject* self, PyObject*) {
  log_of(self).counts = false;
  Py_RETURN_NONE;
}

PyObject* saved(PyObject* self, PyObject* argument) {
  HANDLE_TH_ERRORS
  Entry entry;
  entry.position = static_cast<int>(PyLong_AsLong(argument));
  expect(!PyErr_Occurred());
  log_of(self).entries.push_back(std::move(entry));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// launched(a Launch of eager/launches.py): notes its large outputs; it is as a function of its own.
PyObject* launched(PyObject* self, PyObject* tuple) {
  HANDLE_TH_ERRORS
  PyObject *kernel, *tensors, *options, *made;
  expect(PyArg_ParseTuple(tuple, "OO!OO!", &kernel, &PyList_Type, &tensors, &options, &PyList_Type,
                          &made));
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
      entry.inputs.push_back(tensor.unsafeGetTensorImpl());
    }
    const auto nbytes = static_cast<int64_t>(entry.storage->nbytes());
    if (nbytes >= log.least) log.entries.push_back(std::move(entry));
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// Notes that an entry is the event at a position, made of some of the arguments that are given.
void assign(Entry& entry, PyObject* given, int position) {
  for (const auto* input : entry.inputs) {
    int argument = -1;
    for (Py_ssize_t at = 0; at < PyList_GET_SIZE(given); ++at) {
      if (THPVariable_Unpack(PyList_GET_ITEM(given, at)).unsafeGetTensorImpl() == input) {
        argument = static_cast<int>(at);
      }
    }
    entry.arguments.push_back(argument);
  }
  entry.position = position;
}

// made(output, arguments, position): tells whether the present function was a single call.
PyObject* made(PyObject* self, PyObject* arguments) {
  HANDLE_TH_ERRORS
  PyObject *made, *given;
  int position = 0;
  expect(PyArg_ParseTuple(arguments, "OO!i", &made, &PyList_Type, &given, &position));
  const auto* output = THPVariable_Unpack(made).unsafeGetTensorImpl();
  auto& log = log_of(self);
  if (log.calls != 1) Py_RETURN_FALSE;
  for (size_t at = log.begun; at < log.entries.size(); ++at) {
    auto& entry = log.entries[at];
    if (entry.output != output || !entry.is_call() || entry.position >= 0) continue;
    assign(entry, given, position);
    Py_RETURN_TRUE;
  }
  Py_RETURN_FALSE;
  END_HANDLE_TH_ERRORS
}

// cast(storage's address, source, position): tells whether it is known which call has made it.
PyObject* cast(PyObject* self, PyObject* arguments) {
  HANDLE_TH_ERRORS
  PyObject* given;
  unsigned long long address = 0;
  int position = 0;
  expect(PyArg_ParseTuple(arguments, "KO!i", &address, &PyList_Type, &given, &position));
  auto& entries = log_of(self).entries;
  for (auto entry = entries.rbegin(); entry != entries.rend(); ++entry) {
    if (reinterpret_cast<uint64_t>(entry->storage) != address || entry->name != "aten::to") continue;
    if (entry->position < 0) assign(*entry, given, position);  // else autocast has kept it
    Py_RETURN_TRUE;
  }
  Py_RETURN_FALSE;
  END_HANDLE_TH_ERRORS
}

// Tuples of position, name, overload, kernel or None, place and arguments.
PyObject* entries(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  Ref found = expected(PyList_New(0));
  for (const auto& entry : log_of(self).entries) {
    Ref arguments = expected(PyTuple_New(static_cast<Py_ssize_t>(entry.arguments.size())));
    for (size_t at = 0; at < entry.arguments.size(); ++at) {
      PyTuple_SET_ITEM(arguments.get(), at, expected(PyLong_FromLong(entry.arguments[at])).release());
    }
    PyObject* kernel = entry.kernel ? entry.kernel.get() : Py_None;
    Ref one = expected(Py_BuildValue("issOIO", entry.position, entry.name.c_str(),
                                     entry.overload.c_str(), kernel, entry.place, arguments.get()));
    expect(PyList_Append(found.get(), one.get()) == 0);
  }
  return found.release();
  END_HANDLE_TH_ERRORS
}

PyMethodDef METHODS[] = {
    {"watch", watch, METH_NOARGS, "Note what this thread calls from now on."},
    {"unwatch", unwatch, METH_NOARGS, "Note nothing any more."},
    {"begin", begin, METH_NOARGS, "Note that a function of Python's begins."},
    {"end", end, METH_NOARGS, "Note that it has ended."},
    {"launched", launched, METH_O, "Note what a launch of a kernel has made."},
    {"saved", saved, METH_O, "Note that the event at a position has been saved."},
    {"made", made, METH_VARARGS, "Note which event the present function has made."},
    {"cast", cast, METH_VARARGS, "Note which event a cast is that autocast has made."},
    {"entries", entries, METH_NOARGS, "Return what was noted, in order."},
    {nullptr, nullptr, 0, nullptr},
};

PyTypeObject log_type() {
  PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};
  type.tp_name = "storm_client.native._follow.CallLog";
  type.tp_basicsize = sizeof(LogObject);
  type.tp_dealloc = dealloc;
  type.tp_flags = Py_TPFLAGS_DEFAULT;
  type.tp_doc = "Notes which operators a step calls.";
  type.tp_methods = METHODS;
  type.tp_new = create;
  return type;
}

}  // namespace call_log

PyTypeObject CallLogType = call_log::log_type();

}  // namespace storm
