// Releases the GIL during waits, and takes it where Python is called.
#pragma once

#include "common.h"

#include <mutex>

namespace storm {

// Releases the GIL while an instance lives: the thread that ends a wait may need it.
class WithoutInterpreter {
 public:
  WithoutInterpreter() : state_(PyEval_SaveThread()) {}
  ~WithoutInterpreter() { PyEval_RestoreThread(state_); }
  WithoutInterpreter(const WithoutInterpreter&) = delete;
  WithoutInterpreter& operator=(const WithoutInterpreter&) = delete;

 private:
  PyThreadState* state_;
};

// Holds the GIL while an instance lives, whether or not the thread has it already.
class WithInterpreter {
 public:
  WithInterpreter() : state_(PyGILState_Ensure()) {}
  ~WithInterpreter() { PyGILState_Release(state_); }
  WithInterpreter(const WithInterpreter&) = delete;
  WithInterpreter& operator=(const WithInterpreter&) = delete;

 private:
  PyGILState_STATE state_;
};

// Holds a lock. A thread that waits for it releases the GIL, which the lock's owner may need to
// continue.
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
