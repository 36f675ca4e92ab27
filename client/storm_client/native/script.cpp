#include "script.h"

namespace storm {
namespace script {

struct ScriptObject {
  PyObject_HEAD
  Script script;
};

Script& mutable_script(PyObject* self) { return reinterpret_cast<ScriptObject*>(self)->script; }

// Script(events, length): events are tuples of position, kind, bytes and row.
PyObject* create(PyTypeObject* type, PyObject* arguments, PyObject*) {
  HANDLE_TH_ERRORS
  PyObject* events = nullptr;
  int length = 0;
  expect(PyArg_ParseTuple(arguments, "O!i", &PyList_Type, &events, &length));
  Ref self = expected(type->tp_alloc(type, 0));
  auto& script = *new (&mutable_script(self.get())) Script();
  for (Py_ssize_t at = 0; at < PyList_GET_SIZE(events); ++at) {
    Event event;
    int what = 0;
    long long nbytes = 0;
    expect(PyArg_ParseTuple(PyList_GET_ITEM(events, at), "iiLI", &event.position, &what, &nbytes,
                            &event.row));
    event.what = static_cast<What>(what);
    event.nbytes = nbytes;
    script.events.push_back(event);
  }
  Event end;
  end.position = length;
  script.events.push_back(end);
  uint32_t event = 0;
  for (int position = 0; position <= length; ++position) {
    while (script.events[event].position < position) ++event;
    script.next.push_back(event);
  }
  return self.release();
  END_HANDLE_TH_ERRORS
}

void dealloc(PyObject* self) {
  mutable_script(self).~Script();
  Py_TYPE(self)->tp_free(self);
}

PyTypeObject script_type() {
  PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};
  type.tp_name = "storm_client.native._follow.Script";
  type.tp_basicsize = sizeof(ScriptObject);
  type.tp_dealloc = dealloc;
  type.tp_flags = Py_TPFLAGS_DEFAULT;
  type.tp_doc = "What a step that follows its plan saves, in order.";
  type.tp_new = create;
  return type;
}

}  // namespace script

PyTypeObject ScriptType = script::script_type();

const Script& script_of(PyObject* self) { return script::mutable_script(self); }

}  // namespace storm
