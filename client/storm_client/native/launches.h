// What a thread launches of Triton's kernels: who is told of it, and which memory is new.
#pragma once

#include "common.h"

namespace storm {

extern PyTypeObject LaunchesType;

// What the innermost `Launches` of this thread was made with; None where there is none.
PyObject* launch_listener();

}  // namespace storm
