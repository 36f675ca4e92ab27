// What autograd holds for a tensor that is kept on the device: KeptTensor of saved/versions.py.
#pragma once

#include "versions.h"

namespace storm {

extern PyTypeObject KeptType;

// Keeps `tensor`, an ordinary one, and its present version.
PyObject* keep(const at::Tensor& tensor);

// Returns what has the bytes of a tensor that was moved, for the step's unpack; null where it was
// not. A borrowed reference. Raises RuntimeError where the tensor was changed in place before.
PyObject* moved_of(PyObject* kept);

// Keeps a result until there are others to leave with it; `position` is that of its event.
PyObject* keep_for_now(const at::Tensor& tensor, int position);

// Whether it was kept for now and has left: then what was moved leads to the bytes alone.
bool has_left(PyObject* kept);

// Returns the tensor that has left, of its bytes: a storage.
at::Tensor unpack_left(PyObject* kept, PyObject* storage);

// Returns the tensor if it has been given other data since, where PyTorch would use those; else an
// undefined one.
at::Tensor replaced_in(PyObject* kept);

// Returns a list of all that live, in the order in which they were kept.
PyObject* all_kept();

// Returns the tensor that was kept, and not moved.
// Raises RuntimeError where it was changed in place since.
at::Tensor unpack_kept(PyObject* kept);

}  // namespace storm
