// The module storm_client.native._follow: its types and functions.
#include "allocations.h"
#include "binding.h"
#include "call_log.h"
#include "configured.h"
#include "draws.h"
#include "follower.h"
#include "kept.h"
#include "launches.h"
#include "recomputed.h"
#include "settings.h"
#include "watching.h"

namespace storm {

Configured configured;

namespace module {

PyObject* configure(PyObject*, PyObject* arguments) {
  HANDLE_TH_ERRORS
  Configured found;
  unsigned long long omp_threads = 0;
  expect(PyArg_ParseTuple(arguments, "OOOOO!OO!OK", &found.parameter, &found.changed, &found.lost,
                          &found.is_capturing, &PyTuple_Type, &found.getters, &found.tunes,
                          &PySet_Type, &found.names, &found.overridden, &omp_threads));
  found.omp_threads = reinterpret_cast<int (*)()>(omp_threads);
  Py_INCREF(arguments);  // it holds all of them
  configured = found;
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* watch(PyObject*, PyObject* arguments) {
  HANDLE_TH_ERRORS
  const char* device;
  PyObject* relief;
  expect(PyArg_ParseTuple(arguments, "sO", &device, &relief));
  return PyBool_FromLong(watch_allocations(c10::Device(device).type(), relief));
  END_HANDLE_TH_ERRORS
}

PyObject* kept(PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  return all_kept();
  END_HANDLE_TH_ERRORS
}

PyObject* listener(PyObject*, PyObject*) { return launch_listener(); }

PyObject* count_watchers(PyObject*, PyObject*) { return PyLong_FromSize_t(watchers()); }

PyObject* read_settings(PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  return native_settings();
  END_HANDLE_TH_ERRORS
}

PyMethodDef METHODS[] = {
    {"watchers", count_watchers, METH_NOARGS, "Return the number of watchers of this thread's calls."},
    {"launch_listener", listener, METH_NOARGS,
     "Return the listener of this thread's launches; None if there is none."},
    {"kept", kept, METH_NOARGS, "Return all Kept handles, in the order in which they were made."},
    {"watch_allocations", watch, METH_VARARGS,
     "Have failed allocations of a device type tried again where a function of their size and the "
     "number of attempts returns True; what it returns else, if text, is added to the error."},
    {"note_draw", note_draw, METH_O,
     "Record the random numbers drawn next on a tensor's device, as a Draw; None if that cannot be "
     "done."},
    {"native_settings", read_settings, METH_NOARGS,
     "Return the settings that are read without Python, by names of torch._C's functions."},
    {"configure", configure, METH_VARARGS,
     "Set the Python objects that the module uses; see configuring.py."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef MODULE = {PyModuleDef_HEAD_INIT,
                      "_follow",
                      "Follows steps that have a plan.",
                      -1,
                      METHODS,
                      nullptr,
                      nullptr,
                      nullptr,
                      nullptr};

bool add_type(PyObject* module, PyTypeObject* type) {
  return PyType_Ready(type) == 0 && PyModule_AddType(module, type) == 0;
}

}  // namespace module
}  // namespace storm

PyMODINIT_FUNC PyInit__follow() {
  using namespace storm;
  Ref made = Ref::stolen(PyModule_Create(&module::MODULE));
  if (!made) return nullptr;
  for (PyTypeObject* type : {&KeptType, &RecomputedType, &TalliesType, &ModelStoragesType,
                             &ScriptType, &CallLogType, &FollowerType, &DrawType, &LaunchesType}) {
    if (!module::add_type(made.get(), type)) return nullptr;
  }
  return made.release();
}
