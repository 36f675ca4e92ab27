#include "offload_queue.h"

#include "kept.h"
#include "objects.h"
#include "tensors.h"

#include <c10/core/Allocator.h>
#include <c10/core/ScalarType.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Storage.h>

#include <algorithm>
#include <map>

namespace storm {
namespace {

// Returns whether NumPy, DLPack or another process may share it; see `_is_foreign` in policy.py.
bool is_foreign(const c10::StorageImpl& storage) {
  if (!storage.resizable()) return true;
  const auto deleter = c10::GetAllocator(storage.device_type())->raw_deleter();
  return storage.device_type() == c10::DeviceType::CPU &&
         storage.data_ptr().get_deleter() != deleter;
}

// Results that are offloaded as one range.
struct Unit {
  Group group;
  c10::Device device;
  Ref dtype;
  Ref members = list();
  std::vector<c10::Storage> storages;
  std::vector<size_t> places;  // by tensor, the index of its storage
  std::shared_ptr<Bundle> bundle;
};

Unit described(Group group) {
  const at::Tensor& first = token_of(group.front().get());
  auto* dtype = reinterpret_cast<PyObject*>(torch::getTHPDtype(first.scalar_type()));
  Unit unit{std::move(group), first.device(), Ref::borrowed(dtype)};
  for (const Ref& one : unit.group) {
    const at::Tensor& token = token_of(one.get());
    const c10::Storage& storage = token.storage();
    const auto begin = unit.storages.begin(), end = unit.storages.end();
    const auto same = std::find_if(begin, end, [&](const c10::Storage& other) {
      return other.unsafeGetStorageImpl() == storage.unsafeGetStorageImpl();
    });
    unit.places.push_back(same - begin);
    const size_t own = same == end ? storage.nbytes() : 0;
    if (same == end) unit.storages.push_back(storage);
    Ref member = expected(Py_BuildValue(
        "iLL", number_of(one.get()), static_cast<long long>(nbytes_of(token.unsafeGetTensorImpl())),
        static_cast<long long>(own)));
    append(unit.members, member.get());
  }
  return unit;
}

}  // namespace

void OffloadQueue::begin(c10::Device device, int64_t min_bytes, int64_t max_bytes, bool in_place) {
  device_ = device;
  min_bytes_ = min_bytes;
  max_bytes_ = max_bytes;
  const int64_t share = max_bytes / static_cast<int64_t>(MAX_WAITING);
  max_copied_ = in_place ? std::min(max_bytes, MAX_COPIED) : share;
}

bool OffloadQueue::can_wait(const at::Tensor& tensor) const {
  const auto device = tensor.device();
  const auto nbytes = stored_bytes(tensor);
  if (device_ != device || nbytes < min_bytes_) return false;
  if (nbytes > max_bytes_ && !is_large(nbytes)) return false;
  // The token has to be an alias, and its base a result, whose changes are counted.
  if (!tensor.grad_fn() || !is_result(tensor) || c10::isQIntType(tensor.scalar_type())) {
    return false;
  }
  if (!device.is_cuda()) return true;
  const c10::impl::VirtualGuardImpl guard(device.type());
  return guard.getStream(device) == guard.getDefaultStream(device);
}

bool OffloadQueue::has(const c10::StorageImpl* storage) const {
  return std::any_of(waiting_.begin(), waiting_.end(), [&](const Waiting& one) {
    const at::Tensor& token = token_of(one.kept.get());
    return token.defined() && storage_of(token) == storage;
  });
}

bool OffloadQueue::is_full(int64_t more) const {
  return !is_large(more) && (small_ >= MAX_WAITING || nbytes_ + more > max_bytes_);
}

bool OffloadQueue::has_unshared_large() const {
  if (small_ == waiting_.size()) return false;
  return std::any_of(waiting_.begin(), waiting_.end(), [&](const Waiting& one) {
    return one.is_large() && is_unshared(one, waiting_);
  });
}

void OffloadQueue::add(PyObject* kept, int64_t nbytes) { wait({Ref::borrowed(kept), nbytes}); }

void OffloadQueue::wait(Waiting&& one) {
  if (!one.is_large()) {
    ++small_;
    nbytes_ += one.nbytes;
  }
  waiting_.push_back(std::move(one));
}

std::vector<OffloadQueue::Waiting> OffloadQueue::take() {
  small_ = 0;
  nbytes_ = 0;
  return std::exchange(waiting_, {});
}

// Returns whether only waiting tensors hold a storage, so that nobody else can write to it or find
// it: see `is_unshared` of saved/snapshots.py.
bool OffloadQueue::is_unshared(const Waiting& one, const std::vector<Waiting>& all) {
  const at::Tensor& token = token_of(one.kept.get());
  if (!token.defined()) return false;
  const c10::Storage& storage = token.storage();
  const auto& impl = *storage.unsafeGetStorageImpl();
  if (static_cast<int64_t>(impl.nbytes()) != one.nbytes || is_foreign(impl)) return false;
  size_t ours = 0;
  for (const Waiting& other : all) {
    const at::Tensor& held = token_of(other.kept.get());
    if (held.defined() && storage_of(held) == &impl) {
      if (held.use_count() != 1) return false;
      ++ours;
    }
  }
  return storage.use_count() == ours;
}

Due OffloadQueue::due(Which which, bool capture) {
  const bool all = which == Which::ALL;
  auto waiting = take();
  std::erase_if(waiting, [](const Waiting& one) { return Py_REFCNT(one.kept.get()) == 1; });
  std::vector<bool> unshared;
  for (const auto& one : waiting) unshared.push_back(!capture && is_unshared(one, waiting));
  Due due;
  // Tensors too large to be copied are grouped only with others in the same storage.
  std::map<std::pair<c10::ScalarType, const c10::StorageImpl*>, std::vector<Waiting>> groups;
  const auto put_off = [&](Waiting&& one) {
    if (all || (one.is_late && !one.is_large())) {
      due.others.push_back(std::move(one.kept));
      return;
    }
    one.is_late = true;
    wait(std::move(one));
  };
  for (size_t at = 0; at < waiting.size(); ++at) {
    Waiting& one = waiting[at];
    if (which == Which::LARGE && !one.is_large()) {
      wait(std::move(one));
      continue;
    }
    if (!unshared[at]) {
      put_off(std::move(one));
      continue;
    }
    const at::Tensor& token = token_of(one.kept.get());
    const auto* apart = one.nbytes > max_copied_ ? storage_of(token) : nullptr;
    groups[{token.scalar_type(), apart}].push_back(std::move(one));
  }
  for (auto& [key, group] : groups) {
    const bool is_late = all || group.front().is_late || group.front().nbytes > max_copied_;
    if (group.size() == 1 && !is_late) {
      put_off(std::move(group.front()));
      continue;
    }
    auto& members = due.unshared.emplace_back();
    for (auto& one : group) members.push_back(std::move(one.kept));
  }
  return due;
}

void offload_unshared(std::vector<Group> groups, Group& others, Send send) {
  std::vector<Unit> units;
  for (Group& group : groups) units.push_back(described(std::move(group)));
  Ref sent = list();
  for (Unit& unit : units) {
    try {
      unit.bundle = std::make_shared<Bundle>(unit.storages, unit.device);
    } catch (const c10::OutOfMemoryError&) {
      for (Ref& one : unit.group) others.push_back(std::move(one));
      continue;
    }
    unit.storages.clear();
    Ref storage = expected(THPStorage_Wrap(unit.bundle->storage()));
    Ref item = expected(PyTuple_Pack(3, storage.get(), unit.dtype.get(), unit.members.get()));
    append(sent, item.get());
  }
  std::erase_if(units, [](const Unit& unit) { return unit.bundle == nullptr; });
  if (units.empty()) return;
  Ref uses = send(sent.get());
  if (uses.get() == Py_None) return;
  for (size_t at = 0; at < units.size(); ++at) {
    Unit& unit = units[at];
    PyObject* use = PyList_GetItem(uses.get(), static_cast<Py_ssize_t>(at));
    expect(use != nullptr);
    unit.bundle->release(use);
    for (size_t one = 0; one < unit.group.size(); ++one) {
      release_into(unit.group[one].get(), unit.bundle, unit.places[one]);
    }
  }
}

}  // namespace storm
