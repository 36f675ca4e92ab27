#include "watching.h"

#include <ATen/core/ivalue_inl.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <algorithm>
#include <cstring>

namespace storm {
namespace {

struct Watched {
  std::vector<Watcher*> watchers;
  at::CallbackHandle handle = 0;
  int depth = 0;    // of calls in calls
  int unwatched = 0;  // how many `Unwatched` live
};

thread_local Watched watched;

// Of the calls inside of others, those by which autocast casts an argument.
bool is_cast(const at::RecordFunction& call) {
  return std::strcmp(call.name(), "aten::to") == 0 && std::strcmp(call.overload_name(), "dtype") == 0;
}

// A script's mode may have calls return anything; what a node of a backward pass calls is no event.
bool is_told() {
  return watched.unwatched == 0 && !c10::impl::TorchDispatchModeTLS::any_modes_set() &&
         !torch::autograd::get_current_node();
}

std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& call) {
  const int depth = ++watched.depth;
  if (depth > 2 || (depth == 2 && !is_cast(call)) || !is_told()) return nullptr;
  for (Watcher* one : watched.watchers) one->begins(call, depth == 2);
  return nullptr;
}

void end(const at::RecordFunction& call, at::ObserverContext*) {
  const int depth = watched.depth;
  if (depth > 0) --watched.depth;  // a call may have begun before anybody watched
  if (depth == 0 || depth > 2 || (depth == 2 && !is_cast(call)) || !is_told()) return;
  for (Watcher* one : watched.watchers) one->ends(call, depth == 2);
}

}  // namespace

void Watcher::watch() {
  if (watched.watchers.empty()) {
    watched.depth = 0;
    watched.handle = at::addThreadLocalCallback(at::RecordFunctionCallback(begin, end)
                                                    .needsInputs(true)
                                                    .needsOutputs(true)
                                                    .scopes({at::RecordScope::FUNCTION}));
  }
  watched.watchers.push_back(this);
}

bool Watcher::unwatch() {
  auto& watchers = watched.watchers;
  const auto found = std::find(watchers.rbegin(), watchers.rend(), this);
  if (found == watchers.rend()) return false;
  watchers.erase(std::next(found).base());
  if (watchers.empty()) at::removeCallback(watched.handle);
  return true;
}

size_t watchers() { return watched.watchers.size(); }

Unwatched::Unwatched() { ++watched.unwatched; }

Unwatched::~Unwatched() { --watched.unwatched; }

at::Tensor output_at(c10::ArrayRef<c10::IValue> outputs, size_t place) {
  at::Tensor found;
  size_t at = 0;
  for_each_tensor(outputs, [&](const at::Tensor& tensor) {
    if (at++ == place) found = tensor;
  });
  return found;
}

}  // namespace storm
