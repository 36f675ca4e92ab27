// What a step that follows its plan saves, in order: the events of a kind of step, compiled.
#pragma once

#include "common.h"

namespace storm {

enum class What : uint8_t {
  KEEP,    // a saved tensor that is kept on the device
  PYTHON,  // a saved tensor that Python looks at
  END,
};

struct Event {
  What what = What::END;
  int64_t nbytes = -1;   // of the whole storage
  uint32_t row = 0;      // of the tallies
  int32_t position = 0;  // among all events of the kind, of which some are no events here
};

struct Script {
  std::vector<Event> events;  // END is the last
  std::vector<uint32_t> next;  // by position among all events, the first event here from there on
};

extern PyTypeObject ScriptType;

const Script& script_of(PyObject* self);

}  // namespace storm
