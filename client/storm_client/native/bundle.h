// Results that nobody else holds, and that are offloaded as one range. Small ones are copied one
// after another into one storage. Python offloads and restores that like any other, so they share
// the cost for the training thread. Restored bytes are copied back into a storage for each, so
// users cannot tell.
// A single storage is not copied in either direction.
#pragma once

#include "recipes.h"

#include <c10/util/FunctionRef.h>

namespace storm {

// Returns the storage that a Python `Use` restores.
using Load = c10::function_ref<Ref(PyObject*)>;

class Bundle {
 public:
  // Copies several storages into new memory, behind the work in their device's default stream.
  // Releases the GIL meanwhile.
  // Throws c10::OutOfMemoryError if there is no memory.
  Bundle(const std::vector<c10::Storage>& storages, c10::Device device);

  // The storage to offload, until `release` is called.
  const c10::Storage& storage() const { return storage_; }

  // Releases the memory, which `use` can restore.
  void release(PyObject* use);

  // Count a saved tensor in the storage at a place, and one that was freed. In `last_round`, `take`
  // notes the tensor's last round. A storage restored before the tensor was saved is not held for
  // it.
  void join(size_t place, uint32_t& last_round) {
    ++parts_[place].tensors;
    last_round = parts_[place].round;
  }
  void drop(size_t place, uint32_t last_round);

  // Returns the storage at a place, in the order of the current stream. The first call restores all
  // storages that live tensors use. Each is held here until all its tensors have taken it.
  // Raises what `load` does.
  c10::Storage take(size_t place, uint32_t& last_round, Load load);

 private:
  struct Part {
    WeakStorage origin;  // keeps its address from being reused
    size_t offset;
    size_t nbytes;
    int tensors = 0;                     // live ones in this storage
    c10::Storage storage;                // restored, until all of these have taken it
    std::optional<WeakStorage> latest;   // the same, while one of them uses it
    uint64_t stream = 0;                 // in whose order it was restored
    uint32_t round = 0;                  // how often it was restored
    int waiting = 0;                     // tensors that have not taken it in this round

    c10::Storage restored(uint64_t on) const;
    void set_restored(c10::Storage restored, uint64_t on);
    void count_taken();
  };

  void restore(const c10::Storage& source, uint64_t stream);

  c10::Device device_;
  std::vector<Part> parts_;  // the GIL protects them
  c10::Storage storage_;
  Ref use_;
};

}  // namespace storm
