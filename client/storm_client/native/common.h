// Common includes of this module, and how it holds Python objects.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace storm {

// A reference to a Python object; it is changed only with the GIL held.
class Ref {
 public:
  Ref() = default;
  static Ref stolen(PyObject* object) { return Ref(object); }
  static Ref borrowed(PyObject* object) {
    Py_XINCREF(object);
    return Ref(object);
  }
  Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Ref(const Ref&) = delete;
  Ref& operator=(Ref&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  Ref& operator=(const Ref&) = delete;
  ~Ref() { Py_XDECREF(object_); }

  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }
  void clear() { Py_CLEAR(object_); }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  explicit Ref(PyObject* object) : object_(object) {}
  PyObject* object_ = nullptr;
};

// Throws python_error unless `holds`; Python's error must be set already.
inline void expect(bool holds) {
  if (!holds) throw python_error();
}

inline Ref expected(PyObject* object) {
  expect(object != nullptr);
  return Ref::stolen(object);
}

}  // namespace storm
