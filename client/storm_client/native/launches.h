// A thread's launches of Triton kernels: who is told of them, and which memory is new.
#pragma once

#include "common.h"

namespace storm {

extern PyTypeObject LaunchesType;

// Returns the listener of this thread's innermost `Launches`; None if there is none.
PyObject* launch_listener();

// Returns whether this thread's calls are checked for new memory, which needs no inner calls.
bool looks_for_new_memory();

}  // namespace storm
