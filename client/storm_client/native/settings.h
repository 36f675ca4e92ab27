// What decides which bits an operator makes, as eager/settings.py tells it: noted where it runs, and
// compared where it is to run again.
#pragma once

#include "common.h"

namespace storm {

struct Settings {
  c10::ScalarType default_dtype;
  int overridden;  // which of PyTorch's operators Python computes: a number for each set seen
  // Of a CPU:
  bool onednn = false;
  uint64_t thread = 0;
  int threads = 0;  // among how many OpenMP shares work
  bool flushes_denormals = false;
  // Of products and attention:
  int deciding = 0;  // a number for each set of the process's settings seen

  bool operator==(const Settings&) const = default;

  // Those of this thread for an operator on a type of device. Simple ones have one kernel each.
  // None where they cannot be told, or say that kernels are chosen by measuring.
  static std::optional<Settings> present(c10::DeviceType device, bool is_simple);
};

// Sets how settings are asked for: what Python has to tell of those that decide bits (functions in C
// with their arguments), what is true where kernels are chosen by measuring, None where they never
// are, the set of overridden operators with what tells which count, and the address of
// omp_get_max_threads.
void set_settings(PyObject* getters, PyObject* tunes, PyObject* names, PyObject* overridden,
                  uint64_t omp_threads);

// What is told here without Python, as a dict: numbers that stand for values, by the names of
// torch._C's functions that tell the same.
PyObject* told_settings();

// Looks which operators are overridden; called with the interpreter's lock where Python may run.
void look_for_overridden();

}  // namespace storm
