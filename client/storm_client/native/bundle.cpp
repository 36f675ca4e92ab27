#include "bundle.h"

#include "locked.h"
#include "tensors.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/record_function.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/Storage.h>

#include <algorithm>
#include <cstring>

namespace storm {
namespace bundles {

constexpr size_t ALIGNMENT = 512;  // bytes; the alignment of GPU allocations

struct Copy {
  const c10::Storage& from;
  size_t from_offset;
  const c10::Storage& to;
  size_t to_offset;
  size_t nbytes;
};

// Puts this thread's work on a device into its default or its current stream.
class OnStream {
 public:
  OnStream(c10::Device device, bool is_default) {
    if (device.is_cpu()) return;
    const c10::impl::VirtualGuardImpl guard(device.type());
    guard_.emplace(is_default ? guard.getDefaultStream(device) : guard.getStream(device));
  }

 private:
  std::optional<c10::StreamGuard> guard_;
};

// Allocates without an operator, which would fill the memory if deterministic algorithms are on.
c10::Storage allocated(size_t nbytes, c10::Device device) {
  return c10::Storage(c10::Storage::use_byte_size_t(), nbytes, c10::GetAllocator(device.type()),
                      /*resizable=*/true);
}

at::Tensor over(const c10::Storage& storage, size_t offset, size_t nbytes, c10::ScalarType word) {
  const auto size = static_cast<int64_t>(c10::elementSize(word));
  auto impl = c10::make_intrusive<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::CUDA),
      c10::scalarTypeToTypeMeta(word));
  impl->set_storage_offset(static_cast<int64_t>(offset) / size);
  impl->set_sizes_contiguous({static_cast<int64_t>(nbytes) / size});
  return at::Tensor(std::move(impl));
}

bool is_word(const Copy& copy) {
  constexpr size_t size = sizeof(int32_t);
  const auto address = reinterpret_cast<uintptr_t>(copy.from.data()) + copy.from_offset;
  return copy.nbytes % size == 0 && address % size == 0;
}

// Copies with one kernel, which no observer sees. Copies of integers preserve all bits. With 32-bit
// words each GPU thread moves sixteen bytes at a time.
void copy_on_device(const std::vector<Copy>& copies) {
  const bool by_words = std::all_of(copies.begin(), copies.end(), is_word);
  const auto word = by_words ? at::kInt : at::kByte;
  std::vector<at::Tensor> from, to;
  for (const Copy& one : copies) {
    from.push_back(over(one.from, one.from_offset, one.nbytes, word));
    to.push_back(over(one.to, one.to_offset, one.nbytes, word));
  }
  at::DisableRecordFunctionGuard paused;
  at::AutoDispatchBelowADInplaceOrView no_graph;
  c10::impl::ExcludeDispatchKeyGuard unaltered(MODES_OF_PYTHON);
  at::_foreach_copy_(to, from);
}

// On a CPU uses memcpy: operators would query the number of threads, which also sets it.
void copy_all(const std::vector<Copy>& copies, c10::Device device) {
  if (copies.empty()) return;
  if (!device.is_cpu()) return copy_on_device(copies);
  for (const Copy& one : copies) {
    std::memcpy(static_cast<char*>(one.to.mutable_data()) + one.to_offset,
                static_cast<const char*>(one.from.data()) + one.from_offset, one.nbytes);
  }
}

}  // namespace bundles

using namespace bundles;

Bundle::Bundle(const std::vector<c10::Storage>& storages, c10::Device device) : device_(device) {
  size_t end = 0;
  for (const auto& storage : storages) {
    parts_.push_back({storage.getWeakStorageImpl(), end, storage.nbytes()});
    end += (storage.nbytes() + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  }
  if (storages.size() == 1) {
    storage_ = storages.front();
    return;
  }
  WithoutInterpreter others_may_run;
  const OnStream in_order(device, /*is_default=*/true);
  storage_ = allocated(end, device);
  std::vector<Copy> copies;
  for (size_t at = 0; at < storages.size(); ++at) {
    copies.push_back({storages[at], 0, storage_, parts_[at].offset, parts_[at].nbytes});
  }
  copy_all(copies, device);
}

void Bundle::release(PyObject* use) {
  use_ = Ref::borrowed(use);
  storage_ = c10::Storage();
}

void Bundle::drop(size_t place, uint32_t last_round) {
  Part& part = parts_[place];
  --part.tensors;
  if (last_round != part.round) part.count_taken();
}

c10::Storage Bundle::take(size_t place, uint32_t& last_round, Load load) {
  Part& part = parts_[place];
  const uint64_t stream = stream_of(device_);
  c10::Storage found = part.restored(stream);
  if (!found) {
    Ref loaded = load(use_.get());
    restore(THPStorage_Unpack(loaded.get()), stream);
    found = part.restored(stream);
  }
  if (last_round != part.round) {
    last_round = part.round;
    part.count_taken();
  }
  return found;
}

// Copies each storage that live tensors use into memory of its own, unless it is restored already.
void Bundle::restore(const c10::Storage& source, uint64_t stream) {
  std::vector<std::pair<Part*, c10::Storage>> made;
  for (Part& part : parts_) {
    if (part.tensors > 0 && !part.restored(stream)) made.emplace_back(&part, source);
  }
  if (parts_.size() > 1) {
    WithoutInterpreter others_may_run;
    const OnStream in_order(device_, /*is_default=*/false);
    std::vector<Copy> copies;
    for (auto& [part, storage] : made) {
      storage = allocated(part->nbytes, device_);
      copies.push_back({source, part->offset, storage, 0, part->nbytes});
    }
    copy_all(copies, device_);
  }
  for (auto& [part, storage] : made) {
    if (part->tensors <= 0 || part->restored(stream)) continue;
    part->set_restored(std::move(storage), stream);
  }
}

// Returns the storage that was restored in the order of a stream, if it still exists.
c10::Storage Bundle::Part::restored(uint64_t on) const {
  if (stream != on || !latest) return {};
  if (storage) return storage;
  auto impl = latest->lock();
  return impl && impl->nbytes() == nbytes ? c10::Storage(std::move(impl)) : c10::Storage();
}

void Bundle::Part::set_restored(c10::Storage restored, uint64_t on) {
  latest = restored.getWeakStorageImpl();
  storage = std::move(restored);
  stream = on;
  ++round;
  waiting = tensors;
}

void Bundle::Part::count_taken() {
  if (--waiting == 0) storage = c10::Storage();
}

}  // namespace storm
