#include "script.h"

#include "objects.h"

#include <torch/csrc/Dtype.h>

namespace storm {
namespace script {

// (name, overload, kernel or None, place, name of the outer call, does, dtype or None, choice,
// may draw, overwrites, what it depends on if it is a byproduct, numbers of inputs)
Call call_of(PyObject* tuple, Script& script) {
  const char *name, *overload, *inside;
  PyObject *kernel, *dtype, *inputs;
  int does = 0, choice = 0, may_draw = 0, overwrites = 0, depends = 0;
  Call call;
  expect(PyArg_ParseTuple(tuple, "ssOIsiOippiO!", &name, &overload, &kernel, &call.place, &inside,
                          &does, &dtype, &choice, &may_draw, &overwrites, &depends,
                          &PyTuple_Type, &inputs));
  call.is_copy = *inside != 0;
  if (call.is_copy) script.copying.insert(inside);
  call.does = static_cast<Does>(does);
  if (THPDtype_Check(dtype)) call.dtype = reinterpret_cast<THPDtype*>(dtype)->scalar_type;
  call.choice = static_cast<KernelChoice>(choice);
  call.may_draw = may_draw;
  call.overwrites = overwrites;
  call.depends = static_cast<Depends>(depends);
  for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(inputs); ++at) {
    call.inputs.push_back(static_cast<int>(PyLong_AsLong(PyTuple_GET_ITEM(inputs, at))));
  }
  expect(!PyErr_Occurred());
  if (kernel != Py_None) {
    call.kernel = Ref::borrowed(kernel);
    return call;
  }
  call.op = c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
  const auto& schema = call.op->schema();
  call.name = schema.name().c_str();
  call.overload = schema.overload_name().c_str();
  call.is_cast = schema.name() == "aten::to";
  call.is_convolution = schema.name().find("conv") != std::string::npos;
  call.dropout = schema.argumentIndexWithName("dropout_p").value_or(-1);
  return call;
}

// (position, what, most bytes, proved sizes, row, number, matters, is new, call or None)
Event event_of(PyObject* tuple, Script& script) {
  Event event;
  int what = 0, matters = 0, is_new = 0;
  long long max_bytes = 0;
  PyObject *proved, *call;
  expect(PyArg_ParseTuple(tuple, "iiLO!IippO", &event.position, &what, &max_bytes, &PyTuple_Type,
                          &proved, &event.row, &event.number, &matters, &is_new, &call));
  event.what = static_cast<What>(what);
  event.max_bytes = max_bytes;
  for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(proved); ++at) {
    event.proved.bytes.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(proved, at)));
  }
  expect(!PyErr_Occurred());
  event.matters = matters;
  event.is_new = is_new;
  if (event.what == What::CALL) {
    event.call = static_cast<uint32_t>(script.calls.size());
    script.calls.push_back(call_of(call, script));
    const Call& last = script.calls.back();
    if (last.kernel) {
      script.kernels.insert(last.kernel.get());
    } else {
      script.names.insert(last.name);
    }
  }
  return event;
}

// Script(events, the most bytes of each value and whether it is kept, length, counts gradless)
PyObject* create(PyTypeObject* type, PyObject* arguments, PyObject*) {
  HANDLE_TH_ERRORS
  PyObject *events, *values;
  int length = 0, counts_gradless = 0;
  expect(PyArg_ParseTuple(arguments, "O!O!ip", &PyList_Type, &events, &PyList_Type, &values, &length,
                          &counts_gradless));
  Script script;
  script.counts_gradless = counts_gradless;
  for (Py_ssize_t at = 0; at < PyList_GET_SIZE(events); ++at) {
    script.events.push_back(event_of(PyList_GET_ITEM(events, at), script));
  }
  for (Py_ssize_t at = 0; at < PyList_GET_SIZE(values); ++at) {
    long long max_bytes = 0;
    int is_kept = 0;
    expect(PyArg_ParseTuple(PyList_GET_ITEM(values, at), "Lp", &max_bytes, &is_kept));
    script.values.push_back({max_bytes, is_kept != 0});
  }
  std::unordered_set<int> byproducts;
  for (const Event& event : script.events) {
    if (event.what != What::CALL || script.calls[event.call].place != KEPT) continue;
    byproducts.insert(event.number);
  }
  for (Event& event : script.events) {
    event.is_byproduct = event.what != What::CALL && byproducts.count(event.number) > 0;
  }
  Event end;
  end.position = length;
  script.events.push_back(end);
  uint32_t event = 0;
  for (int position = 0; position <= length; ++position) {
    while (script.events[event].position < position) ++event;
    script.next.push_back(event);
  }
  auto call = static_cast<uint32_t>(script.calls.size());
  script.next_call.resize(script.events.size());
  for (size_t at = script.events.size(); at-- > 0;) {
    if (script.events[at].what == What::CALL) call = script.events[at].call;
    script.next_call[at] = call;
  }
  return object_of<Script>(type, std::move(script)).release();
  END_HANDLE_TH_ERRORS
}

}  // namespace script

PyTypeObject ScriptType =
    type_of<Script>("storm_client.native._follow.Script",
                    "What a step that follows its plan saves, in order.", nullptr, script::create);

}  // namespace storm
