// Records which operators a step calls, next to the recorder that is written in Python. From this
// log a step's script learns which single call made each of its values. Python also learns from it
// which inputs calls copy.
#pragma once

#include "common.h"

namespace storm {

extern PyTypeObject CallLogType;

}  // namespace storm
