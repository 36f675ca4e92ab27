#include "settings.h"

#include <ATen/Context.h>
#include <c10/core/DefaultDtype.h>
#include <pthread.h>

namespace storm {
namespace settings {

PyObject* getters = nullptr;     // a tuple of pairs
PyObject* tunes = nullptr;
PyObject* names = nullptr;       // the set that PyTorch keeps
PyObject* overridden = nullptr;  // a function of Python's
int (*omp_threads)() = nullptr;

Py_ssize_t looked_at = -1;  // names, when overridden operators were looked for
int overridden_number = -1;

// Numbers for values that were seen: equal values have equal numbers.
class Seen {
 public:
  int number_of(PyObject* value) {
    for (size_t at = 0; at < values_.size(); ++at) {
      const int equal = PyObject_RichCompareBool(values_[at].get(), value, Py_EQ);
      expect(equal >= 0);
      if (equal) return static_cast<int>(at);
    }
    values_.push_back(Ref::borrowed(value));
    return static_cast<int>(values_.size()) - 1;
  }

 private:
  std::vector<Ref> values_;
};

// Never destroyed: what it holds may not be let go of once the interpreter has ended.
Seen& seen_sets() {
  static auto* seen = new Seen();
  return *seen;
}

Seen& seen_deciding() {
  static auto* seen = new Seen();
  return *seen;
}

class WithInterpreter {
 public:
  WithInterpreter() : state_(PyGILState_Ensure()) {}
  ~WithInterpreter() { PyGILState_Release(state_); }
  WithInterpreter(const WithInterpreter&) = delete;
  WithInterpreter& operator=(const WithInterpreter&) = delete;

 private:
  PyGILState_STATE state_;
};

// Asks functions that are written in C, between which no signal is looked for. A negative number
// where one fails, or where kernels are chosen by measuring.
int present_deciding() {
  WithInterpreter held;
  Ref measuring = Ref::stolen(PyObject_CallNoArgs(tunes));
  const int is_measuring = measuring ? PyObject_IsTrue(measuring.get()) : -1;
  const auto count = PyTuple_GET_SIZE(getters);
  Ref values = Ref::stolen(PyTuple_New(count));
  bool fails = is_measuring != 0 || !values;
  for (Py_ssize_t at = 0; at < count && !fails; ++at) {
    PyObject* pair = PyTuple_GET_ITEM(getters, at);
    PyObject* value = PyObject_Call(PyTuple_GET_ITEM(pair, 0), PyTuple_GET_ITEM(pair, 1), nullptr);
    fails = value == nullptr;
    if (!fails) PyTuple_SET_ITEM(values.get(), at, value);
  }
  int number = -1;
  if (!fails) {
    try {
      number = seen_deciding().number_of(values.get());
    } catch (const python_error&) {
    }
  }
  PyErr_Clear();
  return number;
}

// What is as small as a normal number can be, halved: zero in a thread that has no smaller ones.
bool flushes_denormals() {
  volatile double smallest = 2.2250738585072014e-308;
  return smallest * 0.5 == 0.0;
}

}  // namespace settings

void set_settings(PyObject* getters, PyObject* tunes, PyObject* names, PyObject* overridden,
                  uint64_t omp_threads) {
  for (auto [place, value] : {std::pair{&settings::getters, getters},
                              {&settings::tunes, tunes},
                              {&settings::names, names},
                              {&settings::overridden, overridden}}) {
    Py_INCREF(value);
    Py_XSETREF(*place, value);
  }
  settings::omp_threads = reinterpret_cast<int (*)()>(omp_threads);
}

void look_for_overridden() {
  const Py_ssize_t count = PySet_GET_SIZE(settings::names);
  if (count == settings::looked_at) return;
  Ref found = expected(PyObject_CallNoArgs(settings::overridden));
  settings::overridden_number = settings::seen_sets().number_of(found.get());
  settings::looked_at = count;
}

std::optional<Settings> Settings::present(c10::DeviceType device, bool is_simple) {
  if (PySet_GET_SIZE(settings::names) != settings::looked_at) return {};
  Settings found{c10::get_default_dtype_as_scalartype(), settings::overridden_number};
  if (device == c10::DeviceType::CPU) {
    if (settings::omp_threads == nullptr) return {};
    found.onednn = at::globalContext().userEnabledMkldnn();
    found.thread = static_cast<uint64_t>(pthread_self());
    found.threads = settings::omp_threads();
    found.flushes_denormals = settings::flushes_denormals();
  }
  if (!is_simple) {
    found.deciding = settings::present_deciding();
    if (found.deciding < 0) return {};
  }
  return found;
}

}  // namespace storm
