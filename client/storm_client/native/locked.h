// Waiting for a lock that whoever holds it may need the interpreter's lock to give up.
#pragma once

#include "common.h"

#include <mutex>

namespace storm {

// Holds a lock. Nobody waits for that with the interpreter's lock held, which whoever has it may
// need to go on.
class Locked {
 public:
  explicit Locked(std::recursive_mutex& lock) : lock_(lock) {
    if (lock_.try_lock()) return;
    PyThreadState* state = PyGILState_Check() ? PyEval_SaveThread() : nullptr;
    lock_.lock();
    if (state != nullptr) PyEval_RestoreThread(state);
  }
  ~Locked() { lock_.unlock(); }
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;

 private:
  std::recursive_mutex& lock_;
};

}  // namespace storm
