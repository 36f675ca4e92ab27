// The random numbers that an operation has drawn from its device's default generator, recorded so
// that the operation can draw them again.
//
// Operations like dropout take no generator. So the default one gets the state that it had then,
// and afterwards its own state back. If other threads draw from it meanwhile, they and the
// operation draw other numbers; the state after the operation shows that. States are read and set
// with the generator's lock held, so that nobody can draw.
#pragma once

#include "locked.h"

#include <ATen/core/Generator.h>

namespace storm {

class Draw {
 public:
  // Records the generator's state before an operation on a tensor runs. Returns null if there is no
  // state to record, as during the capture of a CUDA graph.
  static std::shared_ptr<Draw> begin(const at::Tensor& tensor);

  // Records the state after the operation.
  void end();

 private:
  friend class DrawingAgain;
  Draw(at::Generator generator, at::Tensor found);

  at::Generator generator_;
  at::Tensor state_before_;
  at::Tensor state_after_;
};

// While an instance lives, its thread draws the recorded numbers again: one thread at a time.
class DrawingAgain {
 public:
  explicit DrawingAgain(const Draw& draw);
  // Gives the generator its own state back.
  ~DrawingAgain();
  // Does the same, and returns whether the numbers were the recorded ones.
  bool end();
  DrawingAgain(const DrawingAgain&) = delete;
  DrawingAgain& operator=(const DrawingAgain&) = delete;

 private:
  at::Tensor put_back();

  Locked locked_;
  const Draw& draw_;
  at::Generator generator_;
  at::Generator own_;     // on a GPU: holds the generator's own state object
  at::Tensor own_state_;  // on a CPU
  bool is_put_back_ = false;
};

extern PyTypeObject DrawType;

// Returns a draw as a Python object; None for null.
PyObject* wrapped(std::shared_ptr<Draw> draw);

// Draw::begin for Python: a Draw, or None.
PyObject* note_draw(PyObject*, PyObject* tensor);

}  // namespace storm
