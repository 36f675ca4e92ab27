// Results that nobody else holds, and that leave as one range. Bytes of small ones are copied one behind
// the other into one storage, which Python has leave, and brings back, as it does any. So what that takes
// the thread is theirs in common. What comes back is copied into a storage for each again, so that
// nobody can tell. A single storage is not copied, neither way.
#pragma once

#include "recipes.h"

#include <c10/util/FunctionRef.h>

namespace storm {

// Returns the storage that one of Python's uses is the way back to.
using Load = c10::function_ref<Ref(PyObject*)>;

class Bundle {
 public:
  // Copies several storages into new memory, behind what their device's default stream has been given.
  // The interpreter's lock is given up meanwhile.
  // Throws c10::OutOfMemoryError where there is no memory.
  Bundle(const std::vector<c10::Storage>& storages, c10::Device device);

  // What is to leave, until it has.
  const c10::Storage& storage() const { return storage_; }

  // Lets the memory go, which `use` is the way back to.
  void leave(PyObject* use);

  // Counts a saved tensor that lies in the storage at a place, and one that has died; `had` is what
  // `take` notes of it. What was brought back before it was saved is not kept for it.
  void join(size_t place, uint32_t& had) {
    ++parts_[place].tensors;
    had = parts_[place].round;
  }
  void drop(size_t place, uint32_t had);

  // Returns the storage at a place, in the order of the current stream. The first that is taken
  // brings all back of which tensors live; each is kept here until these have taken it.
  // Raises what `load` does.
  c10::Storage take(size_t place, uint32_t& had, Load load);

 private:
  struct Part {
    WeakStorage origin;  // keeps its address from being used again
    size_t offset;
    size_t nbytes;
    int tensors = 0;                     // that lie in it and live
    c10::Storage storage;                // brought back, until all of these have taken it
    std::optional<WeakStorage> latest;   // the same, for as long as one of them uses it
    uint64_t stream = 0;                 // in whose order that is
    uint32_t round = 0;                  // how often it was brought back
    int waiting = 0;                     // tensors that have not taken it in this round

    c10::Storage found(uint64_t on) const;
    void give(c10::Storage restored, uint64_t on);
    void had();
  };

  void restore(const c10::Storage& source, uint64_t stream);

  c10::Device device_;
  std::vector<Part> parts_;  // the interpreter's lock protects them
  c10::Storage storage_;
  Ref use_;
};

}  // namespace storm
