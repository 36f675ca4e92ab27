// Counts of saved tensors by what was done with them, kept here until they are drained.
#pragma once

#include "common.h"

namespace storm {

struct Tallies {
  struct Row {
    int64_t count = 0;
    int64_t nbytes = 0;
  };
  std::vector<Row> rows;    // their user knows what each stands for
  double replay_seconds = 0.0;

  void add(uint32_t row, int64_t nbytes) {
    ++rows[row].count;
    rows[row].nbytes += nbytes;
  }
};

extern PyTypeObject TalliesType;

Tallies& tallies_of(PyObject* self);

}  // namespace storm
