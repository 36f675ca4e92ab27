// What autograd holds for a tensor that is kept on the device: KeptTensor of saved/versions.py.
#pragma once

#include "versions.h"

namespace storm {

extern PyTypeObject KeptType;

// Keeps `tensor`, an ordinary one, and its present version.
PyObject* keep(const at::Tensor& tensor);

// Returns the tensor that was kept.
// Raises RuntimeError where it was changed in place since.
at::Tensor unpack_kept(PyObject* kept);

}  // namespace storm
