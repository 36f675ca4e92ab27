// The Python objects that configuring.py gives to this module. They are never released: a thread may
// be using one.
#pragma once

#include "common.h"

namespace storm {

struct Configured {
  PyObject* parameter = nullptr;     // torch.nn.Parameter
  PyObject* changed = nullptr;       // returns the error for a modified tensor: saved/versions.py
  PyObject* lost = nullptr;          // returns ActivationLost for a reason: eager/sources.py
  PyObject* is_capturing = nullptr;  // of torch._C; None without CUDA
  PyObject* getters = nullptr;  // pairs of function and arguments: settings that only Python reads
  PyObject* tunes = nullptr;    // returns whether kernels are measured; None if they never are
  PyObject* names = nullptr;    // PyTorch's own set: the operators with Python kernels
  PyObject* overridden = nullptr;  // returns those of them that count
  int (*omp_threads)() = nullptr;
};

extern Configured configured;

}  // namespace storm
