// The module storm_client.native._follow: its types, and what it is told of Python's.
#include "allocations.h"
#include "follower.h"
#include "kept.h"

namespace storm {
namespace module {

PyObject* configure(PyObject*, PyObject* arguments) {
  HANDLE_TH_ERRORS
  PyObject *parameter, *changed;
  expect(PyArg_ParseTuple(arguments, "OO", &parameter, &changed));
  set_parameter_type(parameter);
  set_changed_error(changed);
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

PyMethodDef METHODS[] = {
    {"kept", kept, METH_NOARGS, "Return all that is kept, in the order in which it was saved."},
    {"watch_allocations", watch, METH_VARARGS,
     "Have failed allocations of a device type tried again where a function of their size and the "
     "number of attempts returns True; what it returns else, if text, is added to the error."},
    {"configure", configure, METH_VARARGS,
     "Set torch.nn.Parameter, and what returns the error of a tensor that was changed in place."},
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
  for (PyTypeObject* type : {&KeptType, &TalliesType, &OwnedType, &ScriptType, &FollowerType}) {
    if (!module::add_type(made.get(), type)) return nullptr;
  }
  return made.release();
}
