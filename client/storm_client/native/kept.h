// What autograd holds for a tensor that is kept on the device: KeptTensor of saved/versions.py.
#pragma once

#include "bundle.h"

namespace storm {

extern PyTypeObject KeptType;

// Keeps `tensor`, an ordinary one, and its present version.
PyObject* keep(const at::Tensor& tensor);

// Returns what has the bytes of a tensor that was moved, for the step's unpack; null where it was
// not. A borrowed reference. Raises RuntimeError where the tensor was changed in place before.
PyObject* moved_of(PyObject* kept);

// Keeps a result until there are others to leave with it; `position` is that of its event.
PyObject* keep_for_now(const at::Tensor& tensor, int position);

// What keeps the memory; undefined once that has been moved, or has left.
const at::Tensor& token_of(PyObject* kept);

// Which event of the script one is that was kept for now.
int position_of(PyObject* kept);

// Lets the memory go, which has been copied to a place in a bundle, unless it was moved meanwhile.
void leave_in(PyObject* kept, std::shared_ptr<Bundle> bundle, size_t place);

// Whether it was kept for now and has left, alone or in a bundle.
bool has_left(PyObject* kept);

// Returns the tensor that has left; `load` returns bytes of what Python has.
// Raises RuntimeError where it was changed in place since.
at::Tensor unpack_left(PyObject* kept, Load load);

// Returns the tensor that was kept for now as it was then, wherever it is; undefined if it was moved.
// Raises RuntimeError where it was changed in place since.
at::Tensor unpack_input(PyObject* kept, Load load);

// Returns a list of all that live, in the order in which they were kept.
PyObject* all_kept();

// Returns the tensor that was kept, and not moved.
// Raises RuntimeError where it was changed in place since.
at::Tensor unpack_kept(PyObject* kept);

}  // namespace storm
