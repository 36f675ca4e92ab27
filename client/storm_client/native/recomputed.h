// The handle that autograd holds for a recomputed tensor: Replayed of eager/recompute.py.
#pragma once

#include "recipes.h"

namespace storm {

extern PyTypeObject RecomputedType;

// Returns a handle for `tensor`, a view of a result, at its current version.
PyObject* recomputed(std::shared_ptr<Result> result, const at::Tensor& tensor);

// Returns the tensor, which shares the saved one's version counter. The caller holds the step's
// lock, and has checked the saved version. Raises RuntimeError if an input was modified in place
// since; ActivationLost, DaemonLost.
at::Tensor unpack_recomputed(PyObject* self, InputRestorer& restorer);

// Returns the output of its recipe, even if its original memory still exists; an undefined tensor
// if it has no recipe. The caller holds the step's lock. Raises ActivationLost, DaemonLost.
at::Tensor make_recomputed(PyObject* self, InputRestorer& restorer);

// Has recipes read a copy of what `unpack_recomputed` has returned: whoever gets it may write to it.
// The caller holds the step's lock.
void protect_recomputed(PyObject* self, const at::Tensor& tensor);

const SavedVersion& version_of_recomputed(PyObject* self);

}  // namespace storm
