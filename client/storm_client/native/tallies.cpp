#include "tallies.h"

#include "objects.h"

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

PyObject* create(PyTypeObject* type, PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  return object_of<Tallies>(type).release();
  END_HANDLE_TH_ERRORS
}

PyObject* add_row(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  auto& rows = value_of<Tallies>(self).rows;
  rows.emplace_back();
  return PyLong_FromSize_t(rows.size() - 1);
  END_HANDLE_TH_ERRORS
}

// No Python code runs between reading and resetting, so nothing is counted twice or lost.
PyObject* drain(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  auto& tallies = value_of<Tallies>(self);
  Ref found = list();
  for (size_t row = 0; row < tallies.rows.size(); ++row) {
    const auto [count, nbytes] = tallies.rows[row];
    if (count == 0) continue;
    Ref one = expected(Py_BuildValue("nLL", static_cast<Py_ssize_t>(row),
                                     static_cast<long long>(count),
                                     static_cast<long long>(nbytes)));
    append(found, one.get());
  }
  Ref both = expected(Py_BuildValue("Od", found.get(), tallies.replay_seconds));
  for (auto& row : tallies.rows) row = {};
  tallies.replay_seconds = 0.0;
  return both.release();
  END_HANDLE_TH_ERRORS
}

PyObject* seconds_an_operation(PyObject* self, PyObject*) {
  const auto found = value_of<Tallies>(self).seconds_an_operation();
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

}  // namespace tallies

PyTypeObject TalliesType =
    type_of<Tallies>("storm_client.native._follow.Tallies",
                     "Counts of saved tensors by what was done with them.", tallies::METHODS,
                     tallies::create);

}  // namespace storm
