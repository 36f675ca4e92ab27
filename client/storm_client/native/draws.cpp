#include "draws.h"

#include "objects.h"
#include "recipes.h"

#include <ATen/Context.h>
#include <cstring>

namespace storm {
namespace draws {

// Protects the states of the default generators while numbers are drawn again.
std::recursive_mutex& lock() {
  static auto* lock = new std::recursive_mutex();
  return *lock;
}

at::Tensor state_of(at::Generator& generator) {
  std::lock_guard<std::mutex> nobody_draws(generator.mutex());
  return generator.get_state();
}

bool are_same(const at::Tensor& one, const at::Tensor& other) {
  return one.numel() == other.numel() &&
         std::memcmp(one.const_data_ptr(), other.const_data_ptr(), one.numel()) == 0;
}

using Held = std::shared_ptr<Draw>;

PyObject* end(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  value_of<Held>(self)->end();
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// again(function, arguments, options)
PyObject* again(PyObject* self, PyObject* arguments) {
  HANDLE_TH_ERRORS
  PyObject *function, *given, *options;
  expect(PyArg_ParseTuple(arguments, "OO!O!", &function, &PyList_Type, &given, &PyDict_Type,
                          &options));
  Ref positional = expected(PyList_AsTuple(given));
  Ref made;
  bool is_same = false;
  {
    DrawingAgain drawing(*value_of<Held>(self));
    made = expected(PyObject_Call(function, positional.get(), options));
    is_same = drawing.end();
  }
  if (!is_same) raise_lost("drawn");
  return made.release();
  END_HANDLE_TH_ERRORS
}

PyMethodDef METHODS[] = {
    {"end", end, METH_NOARGS, "Note that the drawing operation has run."},
    {"again", again, METH_VARARGS, "Call a function with the recorded random numbers."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace draws

PyTypeObject DrawType = type_of<draws::Held>("storm_client.native._follow.Draw",
                                             "Random numbers that an operation has drawn.",
                                             draws::METHODS, nullptr);

PyObject* wrapped(std::shared_ptr<Draw> draw) {
  if (draw == nullptr) Py_RETURN_NONE;
  return object_of<draws::Held>(&DrawType, std::move(draw)).release();
}

PyObject* note_draw(PyObject*, PyObject* tensor) {
  HANDLE_TH_ERRORS
  return wrapped(Draw::begin(THPVariable_Unpack(tensor)));
  END_HANDLE_TH_ERRORS
}

Draw::Draw(at::Generator generator, at::Tensor found)
    : generator_(std::move(generator)), state_before_(std::move(found)) {}

std::shared_ptr<Draw> Draw::begin(const at::Tensor& tensor) {
  const auto device = tensor.device();
  if (!device.is_cpu() && !device.is_cuda()) return nullptr;
  at::Generator generator = at::globalContext().defaultGenerator(device);
  try {
    at::Tensor found = draws::state_of(generator);
    return std::shared_ptr<Draw>(new Draw(std::move(generator), std::move(found)));
  } catch (const c10::Error&) {  // a graph is being captured
    return nullptr;
  }
}

void Draw::end() { state_after_ = draws::state_of(generator_); }

DrawingAgain::DrawingAgain(const Draw& draw)
    : locked_(draws::lock()), draw_(draw), generator_(draw.generator_) {
  TORCH_CHECK(draw.state_after_.defined(), "what has drawn has not ended");
  std::lock_guard<std::mutex> nobody_draws(generator_.mutex());
  if (generator_.device().is_cpu()) {
    own_state_ = generator_.get_state();
    generator_.set_state(draw.state_before_);
    return;
  }
  // Setting a state would make cuDNN's recurrent layers draw their dropout anew. Exchanging the
  // state object does not, and a replayed CUDA graph continues to count in the object it knows.
  at::Generator found = generator_.clone();
  found.set_state(draw.state_before_);
  own_ = generator_.graphsafe_get_state();
  generator_.graphsafe_set_state(found);
}

DrawingAgain::~DrawingAgain() {
  if (!is_put_back_) put_back();
}

bool DrawingAgain::end() { return draws::are_same(put_back(), draw_.state_after_); }

at::Tensor DrawingAgain::put_back() {
  is_put_back_ = true;
  std::lock_guard<std::mutex> nobody_draws(generator_.mutex());
  at::Tensor left;
  if (own_state_.defined()) {
    left = generator_.get_state();
    generator_.set_state(own_state_);
  } else {
    const at::Generator drawn_from = generator_.graphsafe_get_state();
    generator_.graphsafe_set_state(own_);
    left = drawn_from.get_state();
  }
  return left;
}

}  // namespace storm
