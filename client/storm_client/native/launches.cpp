// Memory is new if an operator such as `empty` has allocated it while this was on, outside other
// operators, and no operator or launch has written to it since. To know that, this checks all calls
// of the thread by name, in the few steps and blocks that ask for it.
//
// The report of a launch is made here, because in Python that took the training thread longer than
// the launch.
#include "launches.h"

#include "objects.h"
#include "tensors.h"

#include <ATen/record_function.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/DynamicTypes.h>

#include <algorithm>
#include <cstring>
#include <unordered_map>
#include <unordered_set>

namespace storm {
namespace launches {

using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

struct Launches {
  PyObject* listener = nullptr;
  PyObject* sink = nullptr;
  std::unordered_map<const c10::StorageImpl*, WeakStorage> fresh;  // pins their addresses
};

struct Thread {
  std::vector<PyObject*> on;  // `Launches`, the innermost last; each is held
  at::CallbackHandle handle = 0;
  int operators = 0;  // nested ones in progress
};

thread_local Thread thread;

Launches& of(PyObject* self) { return value_of<Launches>(self); }

// Custom functions are reported, too, by the names of their classes.
bool is_operator(const at::RecordFunction& call) { return std::strchr(call.name(), ':') != nullptr; }

bool allocates(const at::RecordFunction& call) {
  const char* name = call.name();
  const bool is_empty = std::strncmp(name, "aten::empty", 11) == 0 ||
                        std::strncmp(name, "aten::new_empty", 15) == 0;
  return is_empty && std::strstr(call.overload_name(), "out") == nullptr;
}

std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& call) {
  thread.operators += is_operator(call);
  return nullptr;
}

void end(const at::RecordFunction& call, at::ObserverContext*) {
  if (!is_operator(call)) return;
  if (thread.operators > 0) --thread.operators;  // a call may have begun before `watch`
  if (thread.operators > 0 || !allocates(call)) return;
  for (const auto& output : call.outputs()) {
    if (!output.isTensor() || !is_ordinary(output.toTensor().unsafeGetTensorImpl())) continue;
    const auto& tensor = output.toTensor();
    for (auto* one : thread.on) {
      of(one).fresh.insert_or_assign(storage_of(tensor), tensor.storage().getWeakStorageImpl());
    }
  }
}

PyObject* create(PyTypeObject* type, PyObject* arguments, PyObject*) {
  HANDLE_TH_ERRORS
  PyObject *listener, *sink;
  expect(PyArg_ParseTuple(arguments, "OO", &listener, &sink));
  Ref self = object_of<Launches>(type);
  of(self.get()).listener = Py_NewRef(listener);
  of(self.get()).sink = Py_NewRef(sink);
  return self.release();
  END_HANDLE_TH_ERRORS
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(of(self).listener);
  Py_VISIT(of(self).sink);
  return 0;
}

int clear(PyObject* self) {
  Py_CLEAR(of(self).listener);
  Py_CLEAR(of(self).sink);
  return 0;
}

void dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  clear(self);
  destroy<Launches>(self);
}

PyObject* watch(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  if (thread.on.empty()) {
    thread.operators = 0;
    thread.handle = at::addThreadLocalCallback(at::RecordFunctionCallback(begin, end)
                                                   .needsOutputs(true)
                                                   .scopes({at::RecordScope::FUNCTION}));
  }
  thread.on.push_back(Py_NewRef(self));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* unwatch(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  auto& on = thread.on;
  const auto found = std::find(on.rbegin(), on.rend(), self);
  if (found == on.rend()) Py_RETURN_NONE;
  on.erase(std::next(found).base());
  if (on.empty()) at::removeCallback(thread.handle);
  of(self).fresh.clear();
  Py_DECREF(self);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// Returns whether the tensor covers all of its storage.
bool is_whole(const at::Tensor& tensor) {
  auto* impl = tensor.unsafeGetTensorImpl();
  return is_ordinary(impl) && tensor.storage_offset() == 0 && tensor.is_non_overlapping_and_dense() &&
         nbytes_of(impl) == static_cast<int64_t>(storage_of(impl)->nbytes());
}

// Returns whether the tensor covers new memory, at version 0, and requires no gradient. The memory
// is not new from now on.
bool take(Launches& launches, const at::Tensor& tensor) {
  auto* impl = tensor.unsafeGetTensorImpl();
  if (!tensor.has_storage() || launches.fresh.erase(storage_of(impl)) == 0) return false;
  return is_whole(tensor) && impl->version_counter().current_version() == 0 && !tensor.requires_grad();
}

Ref layout_of(const at::Tensor& tensor) {
  Ref sizes = numbers(tensor.sizes()), strides = numbers(tensor.strides());
  Ref device = expected(THPDevice_New(tensor.device()));
  auto* dtype = torch::getTHPDtype(tensor.scalar_type());
  return expected(PyTuple_Pack(4, sizes.get(), strides.get(), dtype, device.get()));
}

// Returns the three numbers of the grid with which a kernel is launched.
Ref size_of(PyObject* grid) {
  Ref given = expected(PySequence_Tuple(grid)), size = expected(PyTuple_New(3));
  for (Py_ssize_t at = 0; at < 3; ++at) {
    const bool has = at < PyTuple_GET_SIZE(given.get());
    PyObject* one = has ? PyNumber_Long(PyTuple_GET_ITEM(given.get(), at)) : PyLong_FromLong(1);
    PyTuple_SET_ITEM(size.get(), at, expected(one).release());
  }
  return size;
}

// Returns the tensor that an object is, or wraps as Triton's `reinterpret` does; null for others.
Ref memory_of(PyObject* object) {
  if (THPVariable_Check(object)) return Ref::borrowed(object);
  Ref base = Ref::stolen(PyObject_GetAttrString(object, "base"));
  PyErr_Clear();
  return base && THPVariable_Check(base.get()) ? std::move(base) : Ref();
}

// Calls `visit` with each argument whose place is in the attribute `which` of a kernel.
template <typename Visit>
void for_each_argument(PyObject* kernel, const char* which, const Ref& values, const Visit& visit) {
  Ref places = expected(PyObject_GetAttrString(kernel, which));
  for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(places.get()); ++at) {
    const auto place = PyLong_AsSsize_t(PyTuple_GET_ITEM(places.get(), at));
    Ref one = Ref::borrowed(PyList_GetItem(values.get(), place));
    expect(static_cast<bool>(one));
    visit(one.get());
  }
}

bool is_number(PyObject* one) {
  return PyBool_Check(one) || PyLong_CheckExact(one) || PyFloat_CheckExact(one);
}

// Returns the arguments besides tensors with which a kernel computes the same again.
Ref options_of(PyObject* grid, const Ref& numbers, const Ref& layouts) {
  Ref size = size_of(grid);
  Ref fixed = expected(PyList_AsTuple(numbers.get())), lies = expected(PyList_AsTuple(layouts.get()));
  return expected(Py_BuildValue("{sOsOsO}", "grid", size.get(), "numbers", fixed.get(), "layouts",
                                lies.get()));
}

void call(PyObject* sink, const char* method, const Ref& arguments) {
  Ref bound = expected(PyObject_GetAttrString(sink, method));
  expected(PyObject_Call(bound.get(), arguments.get(), nullptr));
}

// report(a Kernel of eager/launches.py, its arguments by name, the grid): reports a launch to the
// sink, as an operation, or else the tensors that it has overwritten.
PyObject* report(PyObject* self, PyObject* arguments) {
  HANDLE_TH_ERRORS
  PyObject *kernel, *bound, *grid;
  expect(PyArg_ParseTuple(arguments, "OOO", &kernel, &bound, &grid));
  Ref sink = Ref::borrowed(of(self).sink), values = expected(PyMapping_Values(bound));
  Ref tensors = list(), made = list(), layouts = list(), others = list();
  std::unordered_set<PyObject*> updated;
  std::unordered_set<const c10::StorageImpl*> written;
  std::optional<c10::Device> device;
  bool is_operation = true;
  const auto is_beside = [&](const at::Tensor& tensor) {  // on one device, in memory of its own
    if (!device) device = tensor.device();
    const auto* impl = tensor.unsafeGetTensorImpl();
    return *device == tensor.device() && impl->has_storage() && written.count(storage_of(impl)) == 0;
  };
  for_each_argument(kernel, "updates", values, [&](PyObject* one) { updated.insert(one); });
  for_each_argument(kernel, "writes", values, [&](PyObject* one) {
    Ref memory = memory_of(one);
    is_operation = is_operation && memory.get() == one;
    if (!memory) return;
    const auto& tensor = THPVariable_Unpack(memory.get());
    const bool is_new = take(of(self), tensor);
    if (!is_new) append(tensors, memory.get());
    const bool is_known = is_new ? updated.count(one) == 0 : is_whole(tensor);
    is_operation = is_operation && is_known && is_beside(tensor);
    if (!is_operation) return;
    written.insert(storage_of(tensor));
    append(made, one);
    append(layouts, is_new ? layout_of(tensor).get() : Py_None);
  });
  const Py_ssize_t over = PyList_GET_SIZE(tensors.get());
  for_each_argument(kernel, "reads", values, [&](PyObject* one) {
    is_operation = is_operation && THPVariable_Check(one) && is_beside(THPVariable_Unpack(one));
    append(tensors, one);
  });
  for_each_argument(kernel, "numbers", values, [&](PyObject* one) {
    is_operation = is_operation && is_number(one);
    append(others, one);
  });
  if (is_operation && PyList_GET_SIZE(made.get()) > 0 && PyList_GET_SIZE(tensors.get()) > 0) {
    Ref options = options_of(grid, others, layouts);
    call(sink.get(), "launched", expected(Py_BuildValue("OOOOn", kernel, tensors.get(), options.get(),
                                                        made.get(), over)));
    Py_RETURN_NONE;
  }
  for (Py_ssize_t at = 0; at < over; ++at) {
    call(sink.get(), "overwritten", expected(PyTuple_Pack(1, PyList_GET_ITEM(tensors.get(), at))));
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyMethodDef METHODS[] = {
    {"watch", watch, METH_NOARGS, "Have the listener be this thread's; look at its allocations."},
    {"unwatch", unwatch, METH_NOARGS, "Do so no more, and forget what was new."},
    {"report", report, METH_VARARGS, "Report a launch: a kernel, its arguments and its grid."},
    {nullptr, nullptr, 0, nullptr},
};

PyTypeObject launches_type() {
  auto type = type_of<Launches>("storm_client.native._follow.Launches",
                                "Who is told of what a thread launches, and which memory is new.",
                                METHODS, create);
  type.tp_dealloc = dealloc;
  type.tp_flags |= Py_TPFLAGS_HAVE_GC;
  type.tp_traverse = traverse;
  type.tp_clear = clear;
  return type;
}

}  // namespace launches

PyTypeObject LaunchesType = launches::launches_type();

bool looks_for_new_memory() { return !launches::thread.on.empty(); }

PyObject* launch_listener() {
  const auto& on = launches::thread.on;
  PyObject* listener = on.empty() ? nullptr : launches::of(on.back()).listener;
  return Py_NewRef(listener == nullptr ? Py_None : listener);
}

}  // namespace storm
