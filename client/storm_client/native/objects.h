// Python objects of this module: each holds one C++ value.
#pragma once

#include "common.h"

namespace storm {

template <typename Value>
struct Object {
  PyObject_HEAD
  Value value;
};

template <typename Value>
Value& value_of(PyObject* self) {
  return reinterpret_cast<Object<Value>*>(self)->value;
}

// Returns a new object that holds a value made of these arguments.
template <typename Value, typename... Arguments>
Ref object_of(PyTypeObject* type, Arguments&&... arguments) {
  Ref self = expected(type->tp_alloc(type, 0));
  new (&value_of<Value>(self.get())) Value(std::forward<Arguments>(arguments)...);
  return self;
}

template <typename Value>
void destroy(PyObject* self) {
  value_of<Value>(self).~Value();
  Py_TYPE(self)->tp_free(self);
}

// Returns the type of such objects. Without `create` only this module makes them.
template <typename Value>
PyTypeObject type_of(const char* name, const char* doc, PyMethodDef* methods, newfunc create) {
  PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};
  type.tp_name = name;
  type.tp_basicsize = sizeof(Object<Value>);
  type.tp_dealloc = destroy<Value>;
  type.tp_flags = Py_TPFLAGS_DEFAULT;
  if (create == nullptr) type.tp_flags |= Py_TPFLAGS_DISALLOW_INSTANTIATION;
  type.tp_doc = doc;
  type.tp_methods = methods;
  type.tp_new = create;
  return type;
}

inline Ref list() { return expected(PyList_New(0)); }

inline void append(const Ref& list, PyObject* one) { expect(PyList_Append(list.get(), one) == 0); }

// Returns a tuple of what `make` returns for each of some values.
template <typename Values, typename Make>
Ref tuple_of(const Values& values, const Make& make) {
  Ref tuple = expected(PyTuple_New(static_cast<Py_ssize_t>(values.size())));
  Py_ssize_t at = 0;
  for (const auto& one : values) PyTuple_SET_ITEM(tuple.get(), at++, expected(make(one)).release());
  return tuple;
}

// Returns whole numbers as a tuple.
template <typename Values>
Ref numbers(const Values& values) {
  return tuple_of(values, [](int64_t one) { return PyLong_FromLongLong(one); });
}

}  // namespace storm
