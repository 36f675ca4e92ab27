// PyTorch offers no way to try an allocation again: its observers of running out of memory are told
// before it raises, and what it calls before that holds the allocator's lock, under which Python may
// not run. So the allocator's own method is wrapped where all its callers find it, in the table of
// its class's virtual methods. What wraps it holds no lock when the error comes by.
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
// first argument is the object it is called on.
using Method = c10::DataPtr (c10::Allocator::*)(size_t);
using Function = c10::DataPtr (*)(c10::Allocator*, size_t);

constexpr int MOST_ATTEMPTS = 8;

struct Watched {
  std::atomic<Function>* place = nullptr;  // in the table of virtual methods
  Function original = nullptr;
  PyObject* relief = nullptr;  // held for as long as the process lives
};

Watched watched[2];  // one for each class of allocators: a GPU's, and a test's
int count = 0;       // changed with the interpreter's lock held
thread_local bool is_relieving = false;

const char* const NOT_WATCHED = "an allocator is called that was not watched";

// Returns how far into its table a virtual method lies, in entries; -1 where that is not known.
ptrdiff_t entry_of(Method method) {
  struct {
    ptrdiff_t pointer, adjustment;
  } parts;
  static_assert(sizeof parts == sizeof method);
  std::memcpy(&parts, &method, sizeof parts);
#if defined(__x86_64__)  // the Itanium ABI: an odd pointer is an offset plus one
  return parts.pointer & 1 && !parts.adjustment ? (parts.pointer - 1) / sizeof(void*) : -1;
#elif defined(__aarch64__)  // its variant: the adjustment is odd
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

// Whether no thread may take the interpreter's lock any more.
bool is_ending() {
#if PY_VERSION_HEX >= 0x030D0000
  return !Py_IsInitialized() || Py_IsFinalizing();
#else
  return !Py_IsInitialized() || _Py_IsFinalizing();
#endif
}

enum class Answer { RAISE, RETRY };

// Lets an interrupt that came while Python made room reach the script, where it is looked for next.
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
  if (is_relieving || attempt >= MOST_ATTEMPTS || is_ending()) return Answer::RAISE;
  is_relieving = true;
  Answer answer = Answer::RAISE;
  {
    const WithInterpreter held;
    PyObject *kind, *value, *traceback;  // of an error that the caller is about to handle
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

// Returns how the page of an address may be used, as mprotect takes it; -1 where that is not known.
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

// Puts a function into a table of virtual methods, which the loader has made read-only.
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
      Py_INCREF(relief);  // and the former is not let go: a thread may be calling it
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
