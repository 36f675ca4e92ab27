// Giving up the interpreter's lock while something is waited for; taking it where Python is called.
#pragma once

#include "common.h"

#include <mutex>

namespace storm {

// Gives it up for as long as this lives: whoever ends a wait may need it.
class WithoutInterpreter {
 public:
  WithoutInterpreter() : state_(PyEval_SaveThread()) {}
  ~WithoutInterpreter() { PyEval_RestoreThread(state_); }
  WithoutInterpreter(const WithoutInterpreter&) = delete;
  WithoutInterpreter& operator=(const WithoutInterpreter&) = delete;

 private:
  PyThreadState* state_;
};

// Holds it for as long as this lives, whether or not the thread has it already.
class WithInterpreter {
 public:
  WithInterpreter() : state_(PyGILState_Ensure()) {}
  ~WithInterpreter() { PyGILState_Release(state_); }
  WithInterpreter(const WithInterpreter&) = delete;
  WithInterpreter& operator=(const WithInterpreter&) = delete;

 private:
  PyGILState_STATE state_;
};

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
