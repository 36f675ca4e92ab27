// What an operation has drawn from the default generator of its device, so that it can draw that
// again.
//
// Operations like dropout are not given a generator. So the default one gets the state that it had,
// and its own back behind them. Threads that draw from it meanwhile would draw other numbers, and
// so would the operation: that shows in the state that it leaves. Both are read and set while
// nobody can draw.
#pragma once

#include "locked.h"

#include <ATen/core/Generator.h>

namespace storm {

class Draw {
 public:
  // Notes the state that an operation on a tensor will find, before it runs. None where there is
  // none to be noted, as while a CUDA graph is captured.
  static std::shared_ptr<Draw> begin(const at::Tensor& tensor);

  // Notes the state that it has left.
  void end();

 private:
  friend class DrawingAgain;
  Draw(at::Generator generator, at::Tensor found);

  at::Generator generator_;
  at::Tensor found_;
  at::Tensor left_;
};

// As long as one lives, its thread draws what was drawn before. Only one thread does at a time.
class DrawingAgain {
 public:
  explicit DrawingAgain(const Draw& draw);
  // Gives the generator its own state back.
  ~DrawingAgain();
  // The same, and tells whether the numbers were those that were drawn before.
  bool end();
  DrawingAgain(const DrawingAgain&) = delete;
  DrawingAgain& operator=(const DrawingAgain&) = delete;

 private:
  at::Tensor put_back();

  Locked locked_;
  const Draw& draw_;
  at::Generator generator_;
  at::Generator own_;     // on a GPU: holds what the generator has exchanged for another state
  at::Tensor own_state_;  // on a CPU
  bool is_put_back_ = false;
};

extern PyTypeObject DrawType;

// A draw as Python has it; None where there is none.
PyObject* wrapped(std::shared_ptr<Draw> draw);

// Draw::begin for Python: a Draw, or None.
PyObject* note_draw(PyObject*, PyObject* tensor);

}  // namespace storm
