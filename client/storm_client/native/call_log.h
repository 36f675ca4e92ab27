// Notes which operators a step calls, beside the recorder that is written in Python: by that a
// step's script learns by which single call each of its values was made.
#pragma once

#include "common.h"

namespace storm {

extern PyTypeObject CallLogType;

}  // namespace storm
