// What a thread launches of Triton's kernels: who is told of it, and which memory is new.
#pragma once

#include "common.h"

namespace storm {

extern PyTypeObject LaunchesType;

// What the innermost `Launches` of this thread was made with; None where there is none.
PyObject* launch_listener();

// Whether this thread's calls are looked at for new memory; those inside of others need not be told.
bool looks_for_new_memory();

}  // namespace storm
