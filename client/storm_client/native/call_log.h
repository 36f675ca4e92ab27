// Notes which operators a step calls, beside the recorder that is written in Python: by that a
// step's script learns by which single call each of its values was made. And Python hears so what
// calls copy of what they are given.
#pragma once

#include "common.h"

namespace storm {

extern PyTypeObject CallLogType;

}  // namespace storm
