// The module storm_client.native._follow: its types and functions.
#include "allocations.h"
#include "binding.h"
#include "call_log.h"
#include "draws.h"
#include "follower.h"
#include "kept.h"
#include "launches.h"
#include "recomputed.h"
#include "settings.h"
#include "watching.h"

namespace storm {
namespace module {

PyObject* configure(PyObject*, PyObject* arguments) {
  HANDLE_TH_ERRORS
  PyObject *parameter, *changed, *lost, *capturing, *getters, *tunes, *names, *overridden;
  unsigned long long omp_threads = 0;
  expect(PyArg_ParseTuple(arguments, "OOOOO!OO!OK", &parameter, &changed, &lost, &capturing,
                          &PyTuple_Type, &getters, &tunes, &PySet_Type, &names, &overridden,
                          &omp_threads));
  set_parameter_type(parameter);
  set_changed_error(changed);
  set_lost_error(lost);
  set_is_capturing(capturing);
  set_settings(getters, tunes, names, overridden, omp_threads);
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

PyObject* told(PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  return told_settings();
  END_HANDLE_TH_ERRORS
}

PyMethodDef METHODS[] = {
    {"watchers", count_watchers, METH_NOARGS, "Return how many look at what this thread calls."},
    {"launch_listener", listener, METH_NOARGS,
     "Return who is told of this thread's launches; None for nobody."},
    {"kept", kept, METH_NOARGS, "Return all that is kept, in the order in which it was saved."},
    {"watch_allocations", watch, METH_VARARGS,
     "Have failed allocations of a device type tried again where a function of their size and the "
     "number of attempts returns True; what it returns else, if text, is added to the error."},
    {"note_draw", note_draw, METH_O,
     "Return what notes the random numbers that are drawn next on the device of a tensor; None where "
     "that cannot be done."},
    {"told_settings", told, METH_NOARGS,
     "Return what is told of settings without Python, by names of torch._C's functions."},
    {"configure", configure, METH_VARARGS,
     "Set what is asked of Python; see _follow.pyi."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef MODULE = {PyModuleDef_HEAD_INIT,
                      "_follow",
                      "Follows steps whose plan is made.",
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
  for (PyTypeObject* type : {&KeptType, &RecomputedType, &TalliesType, &OwnedType, &ScriptType,
                             &CallLogType, &FollowerType, &DrawType, &LaunchesType}) {
    if (!module::add_type(made.get(), type)) return nullptr;
  }
  return made.release();
}
