// The saved-tensor hooks of one step that follows a script: Follower, a type of Python's.
#pragma once

#include "owned.h"
#include "script.h"
#include "tallies.h"

namespace storm {

extern PyTypeObject FollowerType;

// Sets torch.nn.Parameter.
void set_parameter_type(PyObject* type);

}  // namespace storm
