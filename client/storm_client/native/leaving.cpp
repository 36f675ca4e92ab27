#include "leaving.h"

#include "kept.h"
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

// Whether it may be NumPy's, DLPack's or another process's memory; see `_is_foreign` in policy.py.
bool is_foreign(const c10::StorageImpl& storage) {
  if (!storage.resizable()) return true;
  const auto deleter = c10::GetAllocator(storage.device_type())->raw_deleter();
  return storage.device_type() == c10::DeviceType::CPU &&
         storage.data_ptr().get_deleter() != deleter;
}

// Where saved tensors lie in copies of the storages that they have in common.
struct Placed {
  std::vector<c10::Storage> storages;
  std::vector<size_t> places;  // by tensor
};

Placed placed(const Group& group) {
  Placed found;
  for (const auto& one : group) {
    const c10::Storage& storage = token_of(one.get()).storage();
    const auto begin = found.storages.begin(), end = found.storages.end();
    const auto same = std::find_if(begin, end, [&](const c10::Storage& other) {
      return other.unsafeGetStorageImpl() == storage.unsafeGetStorageImpl();
    });
    found.places.push_back(same - begin);
    if (same == end) found.storages.push_back(storage);
  }
  return found;
}

// For each tensor its event, its bytes, and those of its storage, 0 if an earlier one lies there.
Ref described(const Group& group, const Placed& placed) {
  Ref members = expected(PyList_New(0));
  size_t next = 0;
  for (size_t at = 0; at < group.size(); ++at) {
    const auto* impl = token_of(group[at].get()).unsafeGetTensorImpl();
    const bool is_first = placed.places[at] == next;
    if (is_first) ++next;
    Ref member = expected(Py_BuildValue(
        "iLL", position_of(group[at].get()), static_cast<long long>(nbytes_of(impl)),
        static_cast<long long>(is_first ? storage_of(impl)->nbytes() : 0)));
    expect(PyList_Append(members.get(), member.get()) == 0);
  }
  return members;
}

}  // namespace

void Leaving::begin(c10::Device device, int64_t least, int64_t most, bool in_place) {
  device_ = device;
  least_ = least;
  most_ = most;
  most_copied_ = in_place ? most : most / static_cast<int64_t>(MOST);
}

bool Leaving::can_wait(const at::Tensor& tensor) const {
  const auto device = tensor.device();
  const auto nbytes = static_cast<int64_t>(storage_of(tensor.unsafeGetTensorImpl())->nbytes());
  if (device_ != device || nbytes < least_ || !is_small(nbytes)) return false;
  // What is kept has to be an alias, and its base a result, whose changes are counted.
  if (!tensor.grad_fn() || !is_result(tensor) || c10::isQIntType(tensor.scalar_type())) {
    return false;
  }
  if (!device.is_cuda()) return true;
  const c10::impl::VirtualGuardImpl guard(device.type());
  return guard.getStream(device) == guard.getDefaultStream(device);
}

bool Leaving::has(const c10::StorageImpl* storage) const {
  return std::any_of(waiting_.begin(), waiting_.end(), [&](const Waiting& one) {
    const at::Tensor& token = token_of(one.kept.get());
    return token.defined() && storage_of(token.unsafeGetTensorImpl()) == storage;
  });
}

void Leaving::add(PyObject* kept, int64_t nbytes) {
  waiting_.push_back({Ref::borrowed(kept), nbytes});
  nbytes_ += nbytes;
}

std::vector<Leaving::Waiting> Leaving::take() {
  nbytes_ = 0;
  return std::exchange(waiting_, {});
}

// Whether nothing but those that wait holds a storage, so that nobody can write to it or find it:
// `is_unshared` of snapshots.py.
bool Leaving::may_be_copied(const Waiting& one, const std::vector<Waiting>& all) const {
  const at::Tensor& token = token_of(one.kept.get());
  if (!token.defined() || one.nbytes > most_copied_) return false;
  const c10::Storage& storage = token.storage();
  const auto& impl = *storage.unsafeGetStorageImpl();
  if (static_cast<int64_t>(impl.nbytes()) != one.nbytes || is_foreign(impl)) return false;
  size_t ours = 0;
  for (const Waiting& other : all) {
    const at::Tensor& held = token_of(other.kept.get());
    if (held.defined() && storage_of(held.unsafeGetTensorImpl()) == &impl) {
      if (held.use_count() != 1) return false;
      ++ours;
    }
  }
  return storage.use_count() == ours;
}

Due Leaving::due(bool all, bool copies) {
  auto waiting = take();
  std::erase_if(waiting, [](const Waiting& one) { return Py_REFCNT(one.kept.get()) == 1; });
  Due due;
  std::vector<bool> alone;
  for (const auto& one : waiting) alone.push_back(copies && may_be_copied(one, waiting));
  std::map<c10::ScalarType, std::vector<Waiting>> groups;
  std::vector<Waiting> left;
  for (size_t at = 0; at < waiting.size(); ++at) {
    auto& of = alone[at] ? groups[token_of(waiting[at].kept.get()).scalar_type()] : left;
    of.push_back(std::move(waiting[at]));
  }
  for (auto& [_, group] : groups) {
    if (group.size() == 1) {
      left.push_back(std::move(group.front()));
      continue;
    }
    auto& bundle = due.bundles.emplace_back();
    for (auto& one : group) bundle.push_back(std::move(one.kept));
  }
  for (auto& one : left) {
    if (all || one.is_late || one.nbytes > most_copied_) {
      due.others.push_back(std::move(one.kept));
    } else {
      nbytes_ += one.nbytes;
      waiting_.push_back({std::move(one.kept), one.nbytes, /*is_late=*/true});
    }
  }
  return due;
}

bool leave_copied(const Group& group, SendCopies send) {
  const at::Tensor& first = token_of(group.front().get());
  Ref dtype = Ref::borrowed(reinterpret_cast<PyObject*>(torch::getTHPDtype(first.scalar_type())));
  const Placed where = placed(group);
  Ref members = described(group, where);
  std::shared_ptr<Bundle> bundle;
  try {
    bundle = std::make_shared<Bundle>(where.storages, first.device());
  } catch (const c10::OutOfMemoryError&) {
    return false;
  }
  Ref storage = expected(THPStorage_Wrap(bundle->storage()));
  Ref use = send(storage.get(), dtype.get(), members.get());
  if (use.get() == Py_None) return true;
  bundle->leave(use.get());
  for (size_t at = 0; at < group.size(); ++at) leave_in(group[at].get(), bundle, where.places[at]);
  return true;
}

}  // namespace storm
