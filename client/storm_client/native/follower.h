// Follower, a Python type: the saved-tensor hooks of one step that follows a script.
#pragma once

#include "model_storages.h"
#include "script.h"
#include "tallies.h"

namespace storm {

extern PyTypeObject FollowerType;

}  // namespace storm
