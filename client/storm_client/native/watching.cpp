#include "watching.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/ivalue_inl.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <algorithm>
#include <cstring>
#include <unordered_set>

namespace storm {
namespace {

struct Watched {
  std::vector<Watcher*> watchers;
  at::CallbackHandle handle = 0;
  int depth = 0;      // of calls in calls
  int unwatched = 0;  // how many `Unwatched` live
  bool casts = false;  // whether autocast may cast what the outermost call is given
  int inside = 0;     // how many calls the present one has made of which nothing is told
  std::unordered_set<const char*> nesting;  // the names of those that make several

  // How deep calls are of whose inside nothing is told.
  int lowest() const { return casts ? 2 : 1; }
};

thread_local Watched watched;

// Half of what a call takes longer that is told, is spent on taking its arguments and results
// apart. So as long as one lives, PyTorch tells nobody of calls: to have it do so, and not, takes
// as long as two calls.
class Silence : public at::ObserverContext {
 public:
  Silence() { at::enableRecordFunction(false); }
  ~Silence() override { at::enableRecordFunction(true); }
  Silence(const Silence&) = delete;
  Silence& operator=(const Silence&) = delete;
};

constexpr int SEVERAL = 3;

// Whether nobody else is told of this thread's calls, as a profiler would be.
bool are_alone() {
  return at::get_record_function_tls_().sorted_tls_callbacks_.size() == 1 &&
         !at::hasGlobalCallbacks();
}

bool is_autocasting() {
  return at::autocast::is_autocast_enabled(at::kCUDA) || at::autocast::is_autocast_enabled(at::kCPU);
}

// Of the calls inside of others, those by which autocast casts an argument.
bool is_cast(const at::RecordFunction& call) {
  return std::strcmp(call.name(), "aten::to") == 0 && std::strcmp(call.overload_name(), "dtype") == 0;
}

// A script's mode may have calls return anything; what a node of a backward pass calls is no event.
bool is_told(const at::RecordFunction& call, int depth) {
  return depth <= watched.lowest() && (depth == 1 || is_cast(call)) && watched.unwatched == 0 &&
         !c10::impl::TorchDispatchModeTLS::any_modes_set() && !torch::autograd::get_current_node();
}

std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& call) {
  const int depth = ++watched.depth;
  if (depth == 1) watched.casts = is_autocasting();
  if (depth > watched.lowest()) {
    ++watched.inside;
    return nullptr;
  }
  if (is_told(call, depth)) {
    for (Watcher* one : watched.watchers) one->begins(call, depth == 2);
  }
  if (depth < watched.lowest()) return nullptr;
  watched.inside = 0;
  const bool nests = watched.nesting.count(call.name()) > 0;
  return nests && are_alone() ? std::make_unique<Silence>() : nullptr;
}

void end(const at::RecordFunction& call, at::ObserverContext*) {
  const int depth = watched.depth;
  if (depth == 0) return;  // it had begun before anybody watched
  --watched.depth;
  if (depth == watched.lowest() && watched.inside >= SEVERAL) watched.nesting.insert(call.name());
  if (!is_told(call, depth)) return;
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
