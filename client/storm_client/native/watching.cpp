#include "watching.h"

#include "launches.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/ivalue_inl.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <algorithm>
#include <cstring>
#include <unordered_set>

namespace storm {
namespace {

// The outermost call in progress, and the depth of the current call inside it.
struct Outermost {
  int depth = 0;        // of nested calls
  int casts = 0;        // for which devices autocast may cast its inputs
  bool copies = false;  // whether a watcher wants to know which inputs it copies
  bool copies_casts = false;  // whether those may be copies of autocast's casts
  int inside = 0;       // number of unreported calls inside the current one
  bool is_attention = false;
  bool is_reported = false;       // whether watchers know that it has begun
  bool has_reported_inner = false;  // whether the calls inside it were reported instead

  // Returns the greatest depth at which casts are reported.
  int casting() const { return casts ? 2 : 1; }

  // Returns the depth below which only copies are reported. In an attention it is one deeper: calls
  // there may be `Opened`.
  int lowest() const { return casting() + is_attention; }
};

struct Watched : Outermost {
  std::vector<Watcher*> watchers;
  at::CallbackHandle handle = 0;
  int paused = 0;  // number of `PausedWatching` instances
  int of_subclasses = 0;  // number of calls in progress that tensor subclasses handle
  int of_attentions = 0;  // number of attentions in progress that are `Opened`
  std::unordered_set<const char*> nesting;  // the names of calls that make several others

  Outermost& outermost() { return *this; }
};

thread_local Watched watched;

// Half of the overhead of a reported call is spent on unpacking its arguments and results. So while
// an instance lives, PyTorch reports no calls. Switching reports off and on costs as much as two.
class Silence : public at::ObserverContext {
 public:
  Silence() { at::enableRecordFunction(false); }
  ~Silence() override { at::enableRecordFunction(true); }
  Silence(const Silence&) = delete;
  Silence& operator=(const Silence&) = delete;
};

// A call that is passed over: the calls inside it are reported as if it were not there.
class PassedOver : public at::ObserverContext {
 public:
  explicit PassedOver(bool is_of_subclass) : is_of_subclass_(is_of_subclass) {
    watched.of_subclasses += is_of_subclass_;
  }
  ~PassedOver() override { watched.of_subclasses -= is_of_subclass_; }
  PassedOver(const PassedOver&) = delete;
  PassedOver& operator=(const PassedOver&) = delete;

 private:
  bool is_of_subclass_;
};

// An attention that is computed by other calls: each of these counts as an outermost one.
class Opened : public PassedOver {
 public:
  Opened() : PassedOver(false), around_(watched.outermost()) {
    if (around_.depth > 0 && around_.is_reported) {
      for (Watcher* one : watched.watchers) one->reports_inner_calls();
    }
    watched.outermost() = Outermost();
    ++watched.of_attentions;
  }
  ~Opened() override {
    --watched.of_attentions;
    watched.outermost() = around_;
    watched.has_reported_inner = true;
  }

 private:
  Outermost around_;
};

// Returns false for a custom function, whose name is that of its class.
bool is_of_operator(const at::RecordFunction& call) { return std::strchr(call.name(), ':') != nullptr; }

// Returns whether a tensor subclass handles the call in `__torch_dispatch__`, by other operators.
bool is_of_subclass(const at::RecordFunction& call) {
  const auto inputs = call.inputs();
  return std::any_of(inputs.begin(), inputs.end(), [](const c10::IValue& one) {
    return one.isTensor() && one.toTensor().defined() &&
           one.toTensor().key_set().has(c10::DispatchKey::Python);
  });
}

bool is_named(const at::RecordFunction& call, const char* name) {
  return std::strcmp(call.name(), name) == 0;
}

constexpr int SEVERAL = 3;

// Returns whether only this module observes this thread's calls, and no profiler, for example.
bool are_alone() {
  const size_t own = looks_for_new_memory() ? 2 : 1;
  return at::get_record_function_tls_().sorted_tls_callbacks_.size() == own &&
         !at::hasGlobalCallbacks();
}

// Returns for which devices autocast is on, one bit each.
int autocasting() {
  return at::autocast::is_autocast_enabled(at::kCUDA) |
         at::autocast::is_autocast_enabled(at::kCPU) << 1;
}

// Returns whether a call computes an attention by other calls that are to be reported. They are not
// if autocast would cast their inputs.
bool is_opened(const at::RecordFunction& call) {
  const bool is_outermost =
      watched.depth == 0 || (watched.is_attention && watched.depth <= watched.casting());
  return is_outermost && is_named(call, "aten::_scaled_dot_product_attention_math") &&
         autocasting() == 0;
}

// Returns whether an inner call is a cast: of an argument by autocast, or by the operator itself.
bool is_cast(const at::RecordFunction& call) {
  return is_named(call, "aten::to") && std::strcmp(call.overload_name(), "dtype") == 0;
}

bool want_copies(const char* name) {
  return std::any_of(watched.watchers.begin(), watched.watchers.end(),
                     [&](const Watcher* one) { return one->wants_copies(name); });
}

// Reports no calls under the user's dispatch modes, which may return anything, nor calls of
// backward nodes, which are no events.
std::optional<CallKind> kind_of(const at::RecordFunction& call, int depth) {
  std::optional<CallKind> kind;
  if (depth == 1) {
    kind = CallKind::CALL;
  } else if (depth <= watched.casting() && is_cast(call) && !watched.copies_casts) {
    kind = CallKind::CAST;
  } else if (watched.copies &&
             (is_named(call, "aten::reshape") || (is_cast(call) && casts_argument()))) {
    kind = CallKind::COPY;
  }
  const bool is_silent = !kind || watched.has_reported_inner || watched.paused != 0 ||
                         c10::impl::TorchDispatchModeTLS::any_modes_set() ||
                         torch::autograd::get_current_node();
  return is_silent ? std::nullopt : kind;
}

std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& call) {
  if (!is_of_operator(call)) return std::make_unique<PassedOver>(false);
  if (watched.depth == 0 && is_of_subclass(call)) return std::make_unique<PassedOver>(true);
  if (is_opened(call)) return std::make_unique<Opened>();
  const int depth = ++watched.depth;
  if (depth == 1) {
    watched.casts = autocasting();
    watched.copies = want_copies(call.name());
    watched.copies_casts = watched.copies && is_named(call, "aten::einsum");
    watched.is_attention = is_named(call, "aten::scaled_dot_product_attention");
    watched.is_reported = watched.has_reported_inner = false;
  }
  if (const auto kind = kind_of(call, depth)) {
    watched.is_reported |= depth == 1;
    for (Watcher* one : watched.watchers) one->begins(call, *kind);
  }
  if (depth > watched.lowest()) ++watched.inside;
  if (depth != watched.lowest()) return nullptr;
  watched.inside = 0;
  const bool nests = !watched.copies && watched.nesting.count(call.name()) > 0;
  return nests && are_alone() ? std::make_unique<Silence>() : nullptr;
}

void end(const at::RecordFunction& call, at::ObserverContext* context) {
  if (dynamic_cast<PassedOver*>(context) != nullptr) return;
  const int depth = watched.depth;
  if (depth == 0) return;  // it began before `watch`
  --watched.depth;
  if (depth == watched.lowest() && watched.inside >= SEVERAL) watched.nesting.insert(call.name());
  if (const auto kind = kind_of(call, depth)) {
    for (Watcher* one : watched.watchers) one->ends(call, *kind);
  }
}

}  // namespace

void Watcher::watch() {
  if (watched.watchers.empty()) {
    watched.outermost() = Outermost();
    watched.handle = at::addThreadLocalCallback(at::RecordFunctionCallback(begin, end)
                                                    .needsInputs(true)
                                                    .needsOutputs(true)
                                                    .scopes({at::RecordScope::FUNCTION}));
  }
  watched.watchers.push_back(this);
}

bool is_in_subclass() { return watched.of_subclasses > 0; }

bool is_in_attention() { return watched.of_attentions > 0; }

bool casts_argument() { return (watched.casts & ~autocasting()) != 0; }

bool Watcher::unwatch() {
  auto& watchers = watched.watchers;
  const auto found = std::find(watchers.rbegin(), watchers.rend(), this);
  if (found == watchers.rend()) return false;
  watchers.erase(std::next(found).base());
  if (watchers.empty()) at::removeCallback(watched.handle);
  return true;
}

PyObject* watch_for(PyObject* self, Watcher& watcher) {
  HANDLE_TH_ERRORS
  watcher.watch();
  Py_INCREF(self);  // until `unwatch`
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* unwatch_for(PyObject* self, Watcher& watcher) {
  HANDLE_TH_ERRORS
  if (watcher.unwatch()) Py_DECREF(self);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

size_t watchers() { return watched.watchers.size(); }

PausedWatching::PausedWatching() { ++watched.paused; }

PausedWatching::~PausedWatching() { --watched.paused; }

void note_read(const at::RecordFunction& call, std::vector<c10::IValue>& inputs) {
  inputs.assign(call.inputs().begin(), call.inputs().end());
  const bool has_statistics = is_named(call, "aten::batch_norm") || is_named(call, "aten::instance_norm");
  if (!has_statistics) return;
  constexpr size_t RUNNING_MEAN = 3, RUNNING_VAR = 4, TRAINING = 5;
  if (inputs.size() > TRAINING && inputs[TRAINING].toBool()) {
    inputs[RUNNING_MEAN] = inputs[RUNNING_VAR] = c10::IValue();
  }
}

at::Tensor output_at(c10::ArrayRef<c10::IValue> outputs, size_t place) {
  at::Tensor found;
  size_t at = 0;
  for_each_tensor(outputs, [&](const at::Tensor& tensor) {
    if (at++ == place) found = tensor;
  });
  return found;
}

}  // namespace storm
