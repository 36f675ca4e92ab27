// The saved-tensor hooks of one step that follows a script: Follower, a type of Python's.
#pragma once

#include "owned.h"
#include "script.h"
#include "tallies.h"

namespace storm {

extern PyTypeObject FollowerType;

// Sets what tells whether a CUDA graph is being captured, None where there is no CUDA.
void set_is_capturing(PyObject* function);

}  // namespace storm
