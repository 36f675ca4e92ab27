// New is memory that an operator such as `empty` has allocated while this was on, that is no part of
// another operator's work, and that no operator or launch has written to since. To know that all
// calls of the thread are looked at by name, in the few steps and blocks that ask for it.
#include "launches.h"

#include "tensors.h"

#include <ATen/record_function.h>

#include <algorithm>
#include <cstring>
#include <unordered_map>

namespace storm {
namespace launches {

using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

struct Launches {
  PyObject* listener = nullptr;
  std::unordered_map<const c10::StorageImpl*, WeakStorage> fresh;  // whose addresses are not reused
};

struct LaunchesObject {
  PyObject_HEAD
  Launches launches;
};

struct Thread {
  std::vector<LaunchesObject*> on;  // the innermost last; each is held
  at::CallbackHandle handle = 0;
  int operators = 0;  // that are under way, in one another
};

thread_local Thread thread;

Launches& of(PyObject* self) { return reinterpret_cast<LaunchesObject*>(self)->launches; }

// Custom functions are told as well, by the names of their classes.
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
  if (thread.operators > 0) --thread.operators;  // a call may have begun before anybody looked
  if (thread.operators > 0 || !allocates(call)) return;
  for (const auto& output : call.outputs()) {
    if (!output.isTensor() || !is_ordinary(output.toTensor().unsafeGetTensorImpl())) continue;
    const auto& tensor = output.toTensor();
    for (auto* one : thread.on) {
      one->launches.fresh.insert_or_assign(storage_of(tensor.unsafeGetTensorImpl()),
                                           tensor.storage().getWeakStorageImpl());
    }
  }
}

PyObject* create(PyTypeObject* type, PyObject* arguments, PyObject*) {
  PyObject* listener;
  if (!PyArg_ParseTuple(arguments, "O", &listener)) return nullptr;
  PyObject* self = type->tp_alloc(type, 0);
  if (self == nullptr) return nullptr;
  (new (&of(self)) Launches())->listener = Py_NewRef(listener);
  return self;
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(of(self).listener);
  return 0;
}

int clear(PyObject* self) {
  Py_CLEAR(of(self).listener);
  return 0;
}

void dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  clear(self);
  of(self).~Launches();
  Py_TYPE(self)->tp_free(self);
}

PyObject* watch(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  if (thread.on.empty()) {
    thread.operators = 0;
    thread.handle = at::addThreadLocalCallback(at::RecordFunctionCallback(begin, end)
                                                   .needsOutputs(true)
                                                   .scopes({at::RecordScope::FUNCTION}));
  }
  thread.on.push_back(reinterpret_cast<LaunchesObject*>(Py_NewRef(self)));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* unwatch(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  auto& on = thread.on;
  const auto found = std::find(on.rbegin(), on.rend(), reinterpret_cast<LaunchesObject*>(self));
  if (found == on.rend()) Py_RETURN_NONE;
  on.erase(std::next(found).base());
  if (on.empty()) at::removeCallback(thread.handle);
  of(self).fresh.clear();
  Py_DECREF(self);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// Whether its elements are all the memory that its storage has, and nobody has counted a change.
bool is_untouched(const at::Tensor& tensor) {
  auto* impl = tensor.unsafeGetTensorImpl();
  return is_ordinary(impl) && impl->version_counter().current_version() == 0 &&
         !tensor.requires_grad() && tensor.storage_offset() == 0 &&
         tensor.is_non_overlapping_and_dense() &&
         nbytes_of(impl) == static_cast<int64_t>(storage_of(impl)->nbytes());
}

PyObject* take(PyObject* self, PyObject* object) {
  HANDLE_TH_ERRORS
  if (!THPVariable_Check(object)) Py_RETURN_FALSE;
  const auto& tensor = THPVariable_Unpack(object);
  if (!tensor.has_storage()) Py_RETURN_FALSE;
  const bool is_new = of(self).fresh.erase(storage_of(tensor.unsafeGetTensorImpl())) > 0;
  return PyBool_FromLong(is_new && is_untouched(tensor));
  END_HANDLE_TH_ERRORS
}

PyMethodDef METHODS[] = {
    {"watch", watch, METH_NOARGS, "Have the listener be this thread's; look at its allocations."},
    {"unwatch", unwatch, METH_NOARGS, "Do so no more, and forget what was new."},
    {"take", take, METH_O,
     "Tell whether a tensor is all of memory that is new; from now on it is not."},
    {nullptr, nullptr, 0, nullptr},
};

PyTypeObject launches_type() {
  PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};
  type.tp_name = "storm_client.native._follow.Launches";
  type.tp_basicsize = sizeof(LaunchesObject);
  type.tp_dealloc = dealloc;
  type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC;
  type.tp_doc = "Who is told of what a thread launches, and which memory is new.";
  type.tp_traverse = traverse;
  type.tp_clear = clear;
  type.tp_methods = METHODS;
  type.tp_new = create;
  return type;
}

}  // namespace launches

PyTypeObject LaunchesType = launches::launches_type();

bool looks_for_new_memory() { return !launches::thread.on.empty(); }

PyObject* launch_listener() {
  const auto& on = launches::thread.on;
  PyObject* listener = on.empty() ? nullptr : on.back()->launches.listener;
  return Py_NewRef(listener == nullptr ? Py_None : listener);
}

}  // namespace storm
