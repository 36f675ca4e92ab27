// Retries a failed allocation of device memory after Python has freed memory.
#pragma once

#include "common.h"

namespace storm {

// Makes the allocator of a device type call relief(nbytes, attempt) when it runs out of memory, in
// the thread that allocates. If that returns True, the allocation is retried. A string is added to
// the error's message. With any other result the error is raised as it is.
// Returns false if the allocator cannot be watched.
bool watch_allocations(c10::DeviceType type, PyObject* relief);

}  // namespace storm
