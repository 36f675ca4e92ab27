// Counts of saved tensors by what was done with them, kept here until they are drained, and what
// recomputation has cost the thread.
#pragma once

#include "common.h"

#include <array>
#include <optional>

namespace storm {

struct Tallies {
  struct Row {
    int64_t count = 0;
    int64_t nbytes = 0;
  };
  std::vector<Row> rows;    // their user knows what each stands for
  double replay_seconds = 0.0;

  // Notes the seconds of a recomputation that ran some operations.
  void recomputed(double seconds, int operations) {
    replay_seconds += seconds;
    if (operations > 0) latest_[noted_++ % latest_.size()] = seconds / operations;
  }

  // Returns the seconds for one operation: of the latest, the lower quartile, since some wait until
  // the device's queue has room. Nothing if too few were noted.
  std::optional<double> seconds_an_operation() const;

  void add(uint32_t row, int64_t nbytes) {
    ++rows[row].count;
    rows[row].nbytes += nbytes;
  }

 private:
  std::array<double, 64> latest_{};
  size_t noted_ = 0;
};

extern PyTypeObject TalliesType;

}  // namespace storm
