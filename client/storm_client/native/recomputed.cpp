#include "recomputed.h"

#include "objects.h"
#include "tensors.h"

namespace storm {
namespace {

struct Recomputed {
  std::shared_ptr<Result> result;
  View view;
  SavedVersion version;
};

}  // namespace

PyTypeObject RecomputedType = type_of<Recomputed>(
    "storm_client.native._follow.Recomputed",
    "The handle that autograd holds for a recomputed tensor.", nullptr, nullptr);

PyObject* recomputed(std::shared_ptr<Result> result, const at::Tensor& tensor) {
  Recomputed made{result, View(tensor), SavedVersion(tensor)};
  Ref self = object_of<Recomputed>(&RecomputedType, std::move(made));
  result->expect_use();
  return self.release();
}

at::Tensor unpack_recomputed(PyObject* self, InputRestorer& restorer) {
  const auto& [result, view, version] = value_of<Recomputed>(self);
  at::Tensor tensor = result->unpacked(view, restorer);
  result->add_user(version.counter());
  tensor.unsafeGetTensorImpl()->set_version_counter(version.counter());
  return tensor;
}

at::Tensor make_recomputed(PyObject* self, InputRestorer& restorer) {
  const auto& [result, view, version] = value_of<Recomputed>(self);
  return result->has_recipe() ? result->tried(view, restorer) : at::Tensor();
}

void protect_recomputed(PyObject* self, const at::Tensor& tensor) {
  value_of<Recomputed>(self).result->protect(tensor);
}

const SavedVersion& version_of_recomputed(PyObject* self) {
  return value_of<Recomputed>(self).version;
}

}  // namespace storm
