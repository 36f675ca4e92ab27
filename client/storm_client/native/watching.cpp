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

// The outermost call that is under way, and how deep in it the present one is.
struct Outermost {
  int depth = 0;        // of calls in calls
  int casts = 0;        // for which devices autocast may cast what it is given
  bool copies = false;  // whether somebody wants to know what it copies of that
  bool copies_casts = false;  // whether that may be copies of what autocast has made of it
  int inside = 0;       // how many calls the present one has made of which nothing is told
  bool is_attention = false;
  bool is_told = false;       // whether watchers know that it has begun
  bool is_forgotten = false;  // whether what is inside of it was told instead

  // How deep calls are whose casts are told.
  int casting() const { return casts ? 2 : 1; }

  // How deep those are of whose inside nothing is told: an attention's are told if they are opened.
  int lowest() const { return casting() + is_attention; }
};

struct Watched : Outermost {
  std::vector<Watcher*> watchers;
  at::CallbackHandle handle = 0;
  int unwatched = 0;  // how many `Unwatched` live
  int of_subclasses = 0;  // how many calls are under way that subclasses of tensors do themselves
  int of_attentions = 0;  // how many are that are `Opened`
  std::unordered_set<const char*> nesting;  // the names of calls that make several

  Outermost& outermost() { return *this; }
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

// A call that is passed over: what is inside of it is told as if it were not there.
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

// An attention that is computed by other calls: each of those is an outermost one.
class Opened : public PassedOver {
 public:
  Opened() : PassedOver(false), around_(watched.outermost()) {
    if (around_.depth > 0 && around_.is_told) {
      for (Watcher* one : watched.watchers) one->forgets();
    }
    watched.outermost() = Outermost();
    ++watched.of_attentions;
  }
  ~Opened() override {
    --watched.of_attentions;
    watched.outermost() = around_;
    watched.is_forgotten = true;
  }

 private:
  Outermost around_;
};

// None is a custom function, whose name is that of its class.
bool is_of_operator(const at::RecordFunction& call) { return std::strchr(call.name(), ':') != nullptr; }

// Whether a subclass of tensors does the call by its `__torch_dispatch__`, in operators of its own.
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

// Whether nobody but this module is told of this thread's calls, as a profiler would be.
bool are_alone() {
  const size_t own = looks_for_new_memory() ? 2 : 1;
  return at::get_record_function_tls_().sorted_tls_callbacks_.size() == own &&
         !at::hasGlobalCallbacks();
}

// For which devices autocast is on, a bit each.
int autocasting() {
  return at::autocast::is_autocast_enabled(at::kCUDA) |
         at::autocast::is_autocast_enabled(at::kCPU) << 1;
}

// Whether a call computes an attention by others. Where those would cast what they are given nothing
// of it is told.
bool is_opened(const at::RecordFunction& call) {
  const bool is_outermost =
      watched.depth == 0 || (watched.is_attention && watched.depth <= watched.casting());
  return is_outermost && is_named(call, "aten::_scaled_dot_product_attention_math") &&
         autocasting() == 0;
}

// Of the calls inside of others, those by which autocast casts an argument, or the operator something.
bool is_cast(const at::RecordFunction& call) {
  return is_named(call, "aten::to") && std::strcmp(call.overload_name(), "dtype") == 0;
}

bool want_copies(const char* name) {
  return std::any_of(watched.watchers.begin(), watched.watchers.end(),
                     [&](const Watcher* one) { return one->wants_copies(name); });
}

// A script's mode may have calls return anything; what a node of a backward pass calls is no event.
std::optional<Told> told_of(const at::RecordFunction& call, int depth) {
  std::optional<Told> told;
  if (depth == 1) {
    told = Told::CALL;
  } else if (depth <= watched.casting() && is_cast(call) && !watched.copies_casts) {
    told = Told::CAST;
  } else if (watched.copies &&
             (is_named(call, "aten::reshape") || (is_cast(call) && casts_argument()))) {
    told = Told::COPY;
  }
  const bool is_silent = !told || watched.is_forgotten || watched.unwatched != 0 ||
                         c10::impl::TorchDispatchModeTLS::any_modes_set() ||
                         torch::autograd::get_current_node();
  return is_silent ? std::nullopt : told;
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
    watched.is_told = watched.is_forgotten = false;
  }
  if (const auto told = told_of(call, depth)) {
    watched.is_told |= depth == 1;
    for (Watcher* one : watched.watchers) one->begins(call, *told);
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
  if (depth == 0) return;  // it had begun before anybody watched
  --watched.depth;
  if (depth == watched.lowest() && watched.inside >= SEVERAL) watched.nesting.insert(call.name());
  if (const auto told = told_of(call, depth)) {
    for (Watcher* one : watched.watchers) one->ends(call, *told);
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

size_t watchers() { return watched.watchers.size(); }

Unwatched::Unwatched() { ++watched.unwatched; }

Unwatched::~Unwatched() { --watched.unwatched; }

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
