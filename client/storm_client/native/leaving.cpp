#include "leaving.h"

#include "tensors.h"

#include <c10/core/ScalarType.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace storm {

void Leaving::begin(c10::Device device, int64_t least, int64_t most) {
  device_ = device;
  least_ = least;
  most_ = most;
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

void Leaving::add(PyObject* kept, int64_t nbytes) {
  kept_.push_back(Ref::borrowed(kept));
  nbytes_ += nbytes;
}

std::vector<Ref> Leaving::take() {
  nbytes_ = 0;
  return std::exchange(kept_, {});
}

}  // namespace storm
