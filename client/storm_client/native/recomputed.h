// What autograd holds for a tensor that is recomputed: Replayed of eager/recompute.py.
#pragma once

#include "recipes.h"

namespace storm {

extern PyTypeObject RecomputedType;

// Stands for `tensor`, a view of what a result makes, at its present version.
PyObject* recomputed(std::shared_ptr<Result> result, const at::Tensor& tensor);

// Returns the tensor, which counts its changes with the saved one. The lock of the step is held.
// Raises RuntimeError where it was changed in place since; ActivationLost, DaemonLost.
at::Tensor unpack_recomputed(PyObject* self, Bringing& bring);

// Returns what its recipe makes, whatever has become of its memory; an undefined tensor where it
// has none. The lock of the step is held. Raises ActivationLost, DaemonLost.
at::Tensor make_recomputed(PyObject* self, Bringing& bring);

const SavedVersion& version_of_recomputed(PyObject* self);

}  // namespace storm
