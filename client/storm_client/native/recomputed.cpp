#include "recomputed.h"

#include "tensors.h"

namespace storm {
namespace recomputed_type {

struct Recomputed {
  std::shared_ptr<Result> result;
  View view;
  SavedVersion version;
};

struct RecomputedObject {
  PyObject_HEAD
  Recomputed recomputed;
};

Recomputed& of(PyObject* self) { return reinterpret_cast<RecomputedObject*>(self)->recomputed; }

void dealloc(PyObject* self) {
  of(self).~Recomputed();
  Py_TYPE(self)->tp_free(self);
}

PyTypeObject type() {
  PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};
  type.tp_name = "storm_client.native._follow.Recomputed";
  type.tp_basicsize = sizeof(RecomputedObject);
  type.tp_dealloc = dealloc;
  type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION;
  type.tp_doc = "The handle that autograd holds for a recomputed tensor.";
  return type;
}

}  // namespace recomputed_type

PyTypeObject RecomputedType = recomputed_type::type();

PyObject* recomputed(std::shared_ptr<Result> result, const at::Tensor& tensor) {
  recomputed_type::Recomputed made{std::move(result), View(tensor), SavedVersion(tensor)};
  PyObject* self = RecomputedType.tp_alloc(&RecomputedType, 0);
  expect(self != nullptr);
  made.result->expect_use();
  new (&recomputed_type::of(self)) recomputed_type::Recomputed(std::move(made));
  return self;
}

at::Tensor unpack_recomputed(PyObject* self, InputRestorer& restorer) {
  const auto& [result, view, version] = recomputed_type::of(self);
  at::Tensor tensor = result->unpacked(view, restorer);
  result->add_user(version.counter());
  tensor.unsafeGetTensorImpl()->set_version_counter(version.counter());
  return tensor;
}

at::Tensor make_recomputed(PyObject* self, InputRestorer& restorer) {
  const auto& [result, view, version] = recomputed_type::of(self);
  return result->has_recipe() ? result->tried(view, restorer) : at::Tensor();
}

void protect_recomputed(PyObject* self, const at::Tensor& tensor) {
  recomputed_type::of(self).result->protect(tensor);
}

const SavedVersion& version_of_recomputed(PyObject* self) {
  return recomputed_type::of(self).version;
}

}  // namespace storm
