// The settings that decide which bits an operator computes, as in eager/settings.py. They are
// recorded when the operator runs, and compared when it is to run again.
#pragma once

#include "common.h"

namespace storm {

// Which of the process's settings choose an operator's kernel: the same as in eager/settings.py.
enum class KernelChoice : int { NONE = 0, PRODUCT = 1, ATTENTION = 2 };

struct Settings {
  c10::ScalarType default_dtype;
  int overridden;  // a number for the set of operators that Python computes
  // For a CPU:
  bool onednn = false;
  uint64_t thread = 0;
  int threads = 0;  // among which OpenMP shares work
  bool flushes_denormals = false;
  // For operators whose kernels settings choose:
  int deciding = 0;  // a number for the values of the process's settings

  bool operator==(const Settings&) const = default;

  // Returns this thread's settings for an operator on a type of device. None if they cannot be
  // read, or say that kernels are chosen by measuring.
  static std::optional<Settings> present(c10::DeviceType device, KernelChoice choice);

  // Returns the keys of the settings that differ from `now`, as in eager/settings.py, in a tuple.
  Ref differing(const std::optional<Settings>& now, KernelChoice choice) const;
};

// Returns the settings that are read without Python, as a dict: numbers that stand for values, by
// the names of the torch._C functions that return the same settings.
PyObject* native_settings();

// Finds out which operators are overridden. Call it with the GIL held where Python may run.
void look_for_overridden();

}  // namespace storm
