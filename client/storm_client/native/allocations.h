// Tries a failed allocation of device memory again, once Python has made room.
#pragma once

#include "common.h"

namespace storm {

// Has the allocator of a device type ask `relief` when it has no memory left, by calling
// relief(nbytes, attempt) in the thread that allocates: true has the allocation tried again, a
// string is added to the error's message, anything else lets the error pass.
// False where the allocator cannot be watched.
bool watch_allocations(c10::DeviceType type, PyObject* relief);

}  // namespace storm
