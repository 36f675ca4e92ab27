// The handle that autograd holds for a tensor kept on the device: KeptTensor of saved/versions.py.
#pragma once

#include "bundle.h"

namespace storm {

extern PyTypeObject KeptType;

// Returns a handle that keeps `tensor`, which must be ordinary, and its current version.
PyObject* keep(const at::Tensor& tensor);

// Returns what the step unpacks for a tensor that was moved; null if it was not. The reference is
// borrowed. Raises RuntimeError if a moved tensor was modified in place since it was saved.
PyObject* python_handle_of(PyObject* kept);

const SavedVersion& version_of_kept(PyObject* kept);

// Keeps a result until it is offloaded with others; `number` is that of its value.
PyObject* keep_for_now(const at::Tensor& tensor, int number);

// Returns the tensor that holds the memory; undefined once that was moved or offloaded.
const at::Tensor& token_of(PyObject* kept);

// Returns the number of the value of a tensor from `keep_for_now`.
int number_of(PyObject* kept);

// Releases the memory, which is now at a place in a bundle, unless it was moved meanwhile.
void release_into(PyObject* kept, std::shared_ptr<Bundle> bundle, size_t place);

// Returns whether `release` or `release_into` released the memory: alone, or in a bundle.
bool is_offloaded(PyObject* kept);

// Returns the offloaded tensor, or the tensor itself if it was given other data since. `load`
// returns the storage of a Python `Use`. Raises RuntimeError if it was modified in place since.
at::Tensor unpack_offloaded(PyObject* kept, Load load);

// Returns a tensor as it was when it was kept, from memory or restored; undefined if it was moved.
// Raises ActivationLost if it was modified in place since: it is an input of a recipe.
at::Tensor unpack_input(PyObject* kept, Load load);

// Returns a list of all that exist, in the order in which they were kept.
PyObject* all_kept();

// Returns the tensor, which must be kept and not moved.
// Raises RuntimeError if it was modified in place since.
at::Tensor unpack_kept(PyObject* kept);

}  // namespace storm
