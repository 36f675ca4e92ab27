#include "tallies.h"

#include <algorithm>

namespace storm {

std::optional<double> Tallies::seconds_an_operation() const {
  constexpr size_t FEWEST = 16;
  if (noted_ < FEWEST) return std::nullopt;
  auto sorted = latest_;
  const auto end = sorted.begin() + std::min(noted_, sorted.size());
  const auto quartile = sorted.begin() + (end - sorted.begin()) / 4;
  std::nth_element(sorted.begin(), quartile, end);
  return *quartile;
}

namespace tallies {

struct TalliesObject {
  PyObject_HEAD
  Tallies tallies;
};

PyObject* create(PyTypeObject* type, PyObject*, PyObject*) {
  PyObject* self = type->tp_alloc(type, 0);
  if (self != nullptr) new (&reinterpret_cast<TalliesObject*>(self)->tallies) Tallies();
  return self;
}

void dealloc(PyObject* self) {
  tallies_of(self).~Tallies();
  Py_TYPE(self)->tp_free(self);
}

PyObject* add_row(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  auto& rows = tallies_of(self).rows;
  rows.emplace_back();
  return PyLong_FromSize_t(rows.size() - 1);
  END_HANDLE_TH_ERRORS
}

// No Python code runs between reading and resetting, so nothing is counted twice or lost.
PyObject* drain(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  auto& tallies = tallies_of(self);
  Ref found = expected(PyList_New(0));
  for (size_t row = 0; row < tallies.rows.size(); ++row) {
    const auto [count, nbytes] = tallies.rows[row];
    if (count == 0) continue;
    Ref one = expected(Py_BuildValue("nLL", static_cast<Py_ssize_t>(row),
                                     static_cast<long long>(count),
                                     static_cast<long long>(nbytes)));
    expect(PyList_Append(found.get(), one.get()) == 0);
  }
  Ref both = expected(Py_BuildValue("Od", found.get(), tallies.replay_seconds));
  for (auto& row : tallies.rows) row = {};
  tallies.replay_seconds = 0.0;
  return both.release();
  END_HANDLE_TH_ERRORS
}

PyObject* seconds_an_operation(PyObject* self, PyObject*) {
  const auto found = tallies_of(self).seconds_an_operation();
  if (!found) Py_RETURN_NONE;
  return PyFloat_FromDouble(*found);
}

PyMethodDef METHODS[] = {
    {"add_row", add_row, METH_NOARGS, "Return the number of a new row."},
    {"drain", drain, METH_NOARGS,
     "Return the row, count and bytes of each kind, and the seconds of recomputation; reset them."},
    {"seconds_an_operation", seconds_an_operation, METH_NOARGS,
     "Return the thread's seconds for recomputing one operation; None if too few were."},
    {nullptr, nullptr, 0, nullptr},
};

PyTypeObject tallies_type() {
  PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};
  type.tp_name = "storm_client.native._follow.Tallies";
  type.tp_basicsize = sizeof(TalliesObject);
  type.tp_dealloc = dealloc;
  type.tp_flags = Py_TPFLAGS_DEFAULT;
  type.tp_doc = "Counts of saved tensors by what was done with them.";
  type.tp_methods = METHODS;
  type.tp_new = create;
  return type;
}

}  // namespace tallies

PyTypeObject TalliesType = tallies::tallies_type();

Tallies& tallies_of(PyObject* self) { return reinterpret_cast<tallies::TalliesObject*>(self)->tallies; }

}  // namespace storm
