// PyTorch offers no way to retry an allocation. It calls its out-of-memory observers only just
// before it raises the error. Its earlier callbacks run with the allocator's lock held, under which
// Python may not run. So this file wraps the allocator's own method where all callers find it: in
// the virtual method table of its class. The wrapper holds no lock when it catches the error.
#include "allocations.h"

#include "locked.h"

#include <c10/core/Allocator.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>

namespace storm {
namespace allocations {

// A method that returns an object by hidden address has the calling convention of a function whose
// first argument is the method's object.
using Method = c10::DataPtr (c10::Allocator::*)(size_t);
using Function = c10::DataPtr (*)(c10::Allocator*, size_t);

constexpr int MAX_ATTEMPTS = 8;

struct Watched {
  std::atomic<Function>* place = nullptr;  // in the virtual method table
  Function original = nullptr;
  PyObject* relief = nullptr;  // never released
};

Watched watched[2];  // one for each allocator class: a GPU's, and a test's
int count = 0;       // changed with the GIL held
thread_local bool is_relieving = false;

const char* const NOT_WATCHED = "an allocator is called that was not watched";

// Returns the index of a virtual method in its table; -1 if it is unknown.
ptrdiff_t entry_of(Method method) {
  struct {
    ptrdiff_t pointer, adjustment;
  } parts;
  static_assert(sizeof parts == sizeof method);
  std::memcpy(&parts, &method, sizeof parts);
#if defined(__x86_64__)  // the Itanium ABI: an odd pointer is an offset plus one
  return parts.pointer & 1 && !parts.adjustment ? (parts.pointer - 1) / sizeof(void*) : -1;
#elif defined(__aarch64__)  // its Arm variant: the adjustment is odd
  return parts.adjustment == 1 ? parts.pointer / sizeof(void*) : -1;
#else
  return -1;
#endif
}

std::atomic<Function>* place_of(c10::Allocator* allocator) {
  const ptrdiff_t entry = entry_of(&c10::Allocator::allocate);
  if (entry < 0) return nullptr;
  auto* table = *reinterpret_cast<std::atomic<Function>**>(allocator);
  return table + entry;
}

// Returns whether the interpreter is ending, so that no thread may take the GIL any more.
bool is_ending() {
#if PY_VERSION_HEX >= 0x030D0000
  return !Py_IsInitialized() || Py_IsFinalizing();
#else
  return !Py_IsInitialized() || _Py_IsFinalizing();
#endif
}

enum class Answer { RAISE, RETRY };

// Passes on an interrupt that came while Python freed memory: the script gets it at Python's next
// check for signals. Reports any other error as unraisable.
void pass_on_interrupt() {
  const bool is_interrupt = PyErr_ExceptionMatches(PyExc_KeyboardInterrupt);
  if (is_interrupt) {
    PyErr_Clear();
    PyErr_SetInterruptEx(SIGINT);
  } else {
    PyErr_WriteUnraisable(nullptr);
  }
}

Answer ask(PyObject* relief, size_t nbytes, int attempt, c10::OutOfMemoryError& error) {
  if (is_relieving || attempt >= MAX_ATTEMPTS || is_ending()) return Answer::RAISE;
  is_relieving = true;
  Answer answer = Answer::RAISE;
  {
    const WithInterpreter held;
    PyObject *kind, *value, *traceback;  // of an error that the caller is handling
    PyErr_Fetch(&kind, &value, &traceback);
    Ref said = Ref::stolen(PyObject_CallFunction(relief, "ni", static_cast<Py_ssize_t>(nbytes), attempt));
    if (!said) {
      pass_on_interrupt();
    } else if (said.get() == Py_True) {
      answer = Answer::RETRY;
    } else if (PyUnicode_Check(said.get())) {
      const char* line = PyUnicode_AsUTF8(said.get());
      if (line == nullptr) {
        PyErr_Clear();
      } else if (*line != '\0') {
        error.add_context(line);
      }
    }
    PyErr_Restore(kind, value, traceback);
  }
  is_relieving = false;
  return answer;
}

const Watched& found(c10::Allocator* allocator) {
  const auto* place = place_of(allocator);
  for (const Watched& one : watched) {
    if (one.place == place) return one;
  }
  TORCH_INTERNAL_ASSERT(false, NOT_WATCHED);
}

c10::DataPtr allocate(c10::Allocator* self, size_t nbytes) {
  const Watched& one = found(self);
  for (int attempt = 0;; ++attempt) {
    try {
      return one.original(self, nbytes);
    } catch (c10::OutOfMemoryError& error) {
      if (ask(one.relief, nbytes, attempt, error) == Answer::RAISE) throw;
    }
  }
}

// Returns the access rights of the page at an address, as for mprotect; -1 if they are unknown.
int access_to(const void* address) {
  std::ifstream maps("/proc/self/maps");
  const auto wanted = reinterpret_cast<uintptr_t>(address);
  for (std::string line; std::getline(maps, line);) {
    unsigned long begin, end;
    char access[5];
    if (std::sscanf(line.c_str(), "%lx-%lx %4s", &begin, &end, access) != 3) return -1;
    if (wanted < begin || wanted >= end) continue;
    return (access[0] == 'r' ? PROT_READ : 0) | (access[1] == 'w' ? PROT_WRITE : 0) |
           (access[2] == 'x' ? PROT_EXEC : 0);
  }
  return -1;
}

bool set_access(void* address, int access) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<uintptr_t>(address) / page * page;
  return mprotect(reinterpret_cast<void*>(begin), page, access) == 0;
}

// Stores a function in a virtual method table, which the loader may have made read-only.
bool put(std::atomic<Function>* place, Function function) {
  const int access = access_to(place);
  if (access < 0) return false;
  if (access & PROT_WRITE) {
    place->store(function);
    return true;
  }
  if (!set_access(place, access | PROT_WRITE)) return false;
  place->store(function);
  set_access(place, access);
  return true;
}

}  // namespace allocations

bool watch_allocations(c10::DeviceType type, PyObject* relief) {
  using namespace allocations;
  c10::Allocator* allocator = c10::GetAllocator(type);
  auto* place = allocator == nullptr ? nullptr : place_of(allocator);
  if (place == nullptr) return false;
  for (Watched& one : watched) {
    if (one.place == place) {
      Py_INCREF(relief);  // the former one is not released: a thread may be calling it
      one.relief = relief;
      return true;
    }
  }
  if (count == std::size(watched)) return false;
  Watched& one = watched[count];
  one.original = place->load();
  one.relief = relief;
  one.place = place;
  if (!put(place, &allocate)) {
    one.place = nullptr;
    return false;
  }
  Py_INCREF(relief);
  ++count;
  return true;
}

}  // namespace storm
