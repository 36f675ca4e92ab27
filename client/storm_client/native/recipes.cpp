#include "recipes.h"

#include "configured.h"
#include "kept.h"
#include "locked.h"
#include "objects.h"
#include "script.h"
#include "tensors.h"
#include "watching.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <c10/core/Event.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <chrono>
#include <cstring>

namespace storm {
namespace recipes {

Ref list_of(c10::IntArrayRef shape) { return expected(PySequence_List(numbers(shape).get())); }

// Sets autocast for the operators of this thread as it was when the recipe was made. This does not
// enter `torch.autocast`: leaving the outermost one of a thread clears autocast's cache for all
// threads.
class Autocasting {
 public:
  Autocasting(c10::DeviceType device, std::optional<c10::ScalarType> dtype)
      : device_(device),
        was_on_(at::autocast::is_autocast_enabled(device)),
        kept_(at::autocast::is_autocast_cache_enabled()),
        before_(at::autocast::get_autocast_dtype(device)),
        differs_(dtype.has_value() || was_on_) {
    if (!differs_) return;
    at::autocast::set_autocast_cache_enabled(false);
    at::autocast::set_autocast_enabled(device, dtype.has_value());
    at::autocast::set_autocast_dtype(device, dtype.value_or(before_));
  }
  ~Autocasting() {
    if (!differs_) return;
    at::autocast::set_autocast_dtype(device_, before_);
    at::autocast::set_autocast_enabled(device_, was_on_);
    at::autocast::set_autocast_cache_enabled(kept_);
  }
  Autocasting(const Autocasting&) = delete;
  Autocasting& operator=(const Autocasting&) = delete;

 private:
  c10::DeviceType device_;
  bool was_on_;
  bool kept_;
  c10::ScalarType before_;
  bool differs_;
};

// Hides saved tensors from all hooks: no backward pass goes through this graph.
class WithoutHooks {
 public:
  explicit WithoutHooks(bool records) {
    const auto& present = at::SavedTensorDefaultHooks::get_tls_state();
    if (!records || present.stack.empty()) return;
    before_ = present;
    at::SavedTensorDefaultHooks::set_tls_state({});
  }
  ~WithoutHooks() {
    if (before_) at::SavedTensorDefaultHooks::set_tls_state(*before_);
  }
  WithoutHooks(const WithoutHooks&) = delete;
  WithoutHooks& operator=(const WithoutHooks&) = delete;

 private:
  std::optional<at::impl::SavedTensorDefaultHooksTLS> before_;
};

thread_local std::vector<at::Tensor>* caught = nullptr;

PyObject* catch_saved(PyObject*, PyObject* tensor) {
  if (caught != nullptr) caught->push_back(THPVariable_Unpack(tensor));
  Py_RETURN_NONE;
}

PyMethodDef CATCH = {"catch", catch_saved, METH_O, "Note a tensor that autograd saves."};

// While an instance lives, tensors that autograd saves in this thread are only recorded. Construct
// it with the GIL held.
class Catching {
 public:
  Catching() : before_(at::SavedTensorDefaultHooks::get_tls_state()) {
    const auto hook = [] {
      return c10::SafePyObject(expected(PyCFunction_New(&CATCH, nullptr)).release(),
                               getPyInterpreter());
    };
    at::impl::SavedTensorDefaultHooksTLS state;
    state.stack.emplace(hook(), hook());
    at::SavedTensorDefaultHooks::set_tls_state(state);
    caught = &saved_;
  }
  ~Catching() {
    caught = nullptr;
    at::SavedTensorDefaultHooks::set_tls_state(before_);
  }
  Catching(const Catching&) = delete;
  Catching& operator=(const Catching&) = delete;

  // Returns the saved tensor that shares no storage with the input or the output; undefined unless
  // there is exactly one.
  at::Tensor kept(const at::Tensor& given, const at::Tensor& made) const {
    at::Tensor found;
    int count = 0;
    for (const at::Tensor& one : saved_) {
      if (one.storage().is_alias_of(given.storage()) || one.storage().is_alias_of(made.storage())) {
        continue;
      }
      found = one;
      ++count;
    }
    return count == 1 ? found : at::Tensor();
  }

 private:
  at::impl::SavedTensorDefaultHooksTLS before_;
  std::vector<at::Tensor> saved_;
};

Pass pass_on(c10::Device device) {
  return {stream_of(device), torch::autograd::get_current_graph_task_id()};
}

}  // namespace recipes

using namespace recipes;

void raise_lost(const char* what, PyObject* details) {
  Ref error = expected(PyObject_CallFunction(configured.lost, "sO", what, details));
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.get())), error.get());
  throw python_error();
}

void raise_lost(const char* what) {
  Ref nothing = expected(PyTuple_New(0));
  raise_lost(what, nothing.get());
}

void raise_changed(c10::IntArrayRef shape, uint32_t version, uint32_t now) {
  Ref list = list_of(shape);
  Ref details = expected(Py_BuildValue("OII", list.get(), version, now));
  raise_lost("changed", details.get());
}

// --- views ------------------------------------------------------------------------------------

View::View(const at::Tensor& tensor)
    : keys(tensor.key_set()),
      dtype(tensor.dtype()),
      sizes(tensor.sizes().begin(), tensor.sizes().end()),
      strides(tensor.strides().begin(), tensor.strides().end()),
      offset(tensor.storage_offset()) {}

bool View::describes(const at::Tensor& tensor) const {
  return tensor.dtype() == dtype && tensor.sizes() == at::IntArrayRef(sizes) &&
         tensor.strides() == at::IntArrayRef(strides) && tensor.storage_offset() == offset &&
         tensor.is_conj() == keys.has(c10::DispatchKey::Conjugate) &&
         tensor.is_neg() == keys.has(c10::DispatchKey::Negative);
}

at::Tensor View::over(c10::Storage storage) const {
  auto impl = c10::make_intrusive<c10::TensorImpl>(
      c10::TensorImpl::VIEW, std::move(storage), keys, dtype);
  impl->set_sizes_and_strides(sizes, strides, offset);
  return at::Tensor(std::move(impl));
}

at::Tensor copied(const at::Tensor& tensor) {
  const auto nbytes = stored_bytes(tensor);
  const auto options = at::TensorOptions().dtype(at::kByte).device(tensor.device());
  PausedWatching paused;
  at::NoGradGuard nothing_recorded;
  at::Tensor copy = at::empty({nbytes}, options);
  if (tensor.is_cpu()) {  // not by an operator, which would change this thread's count of threads
    std::memcpy(copy.mutable_data_ptr(), tensor.storage().data(), nbytes);
  } else {
    auto impl = c10::make_intrusive<c10::TensorImpl>(c10::Storage(tensor.storage()), copy.key_set(),
                                                     copy.dtype());
    impl->set_sizes_contiguous({nbytes});
    copy.copy_(at::Tensor(std::move(impl)));
  }
  return View(tensor).over(copy.storage());
}

at::Tensor InputRestorer::tensor(PyObject* packed) {
  const auto began = std::chrono::steady_clock::now();
  const auto call = [](PyObject* called, PyObject* of) {
    return expected(PyObject_CallOneArg(called, of));
  };
  at::Tensor tensor;
  const bool is_kept = Py_TYPE(packed) == &KeptType;
  if (is_kept) tensor = unpack_input(packed, [&](PyObject* use) { return call(load.get(), use); });
  if (!tensor.defined()) {
    PyObject* handle = is_kept ? python_handle_of(packed) : packed;
    tensor = THPVariable_Unpack(call(function.get(), handle).get());
  }
  seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  return tensor;
}

// --- sources ----------------------------------------------------------------------------------

Alias::Alias(at::Tensor held)
    : held_(std::move(held)),
      version_(version_of(held_)),
      nbytes_(storage_of(held_)->nbytes()) {}

at::Tensor Alias::tensor(InputRestorer&) {
  const auto now = version_of(held_);
  if (now != version_) raise_changed(held_.sizes(), version_, now);
  if (storage_of(held_)->nbytes() != nbytes_) {
    Ref shape = list_of(held_.sizes());
    Ref details = expected(Py_BuildValue("(O)", shape.get()));
    raise_lost("parameter", details.get());
  }
  return held_;
}

PrivateCopy::PrivateCopy(const at::Tensor& tensor)
    : copy_(copied(tensor)),
      stream_(c10::impl::VirtualGuardImpl(tensor.device().type()).getStream(tensor.device())) {}

at::Tensor PrivateCopy::tensor() const {
  const auto device = copy_.device();
  const c10::impl::VirtualGuardImpl streams(device.type());
  const c10::Stream now = streams.getStream(device);
  if (now != stream_) {
    c10::Event made(device.type());
    made.record(stream_);
    made.block(now);
    streams.recordDataPtrOnStream(copy_.storage().data_ptr(), now);
  }
  return copy_;
}

Packed::Packed(const at::Tensor& tensor, Overwritten is_overwritten)
    : kept_(alias_of(tensor)), version_(tensor), is_overwritten_(std::move(is_overwritten)) {}

Packed::~Packed() {
  if (handle_ == nullptr) return;
  const WithInterpreter held;
  Py_DECREF(handle_);
}

void Packed::is_packed(PyObject* handle) {
  handle_ = Py_NewRef(handle);
  kept_.reset();
}

at::Tensor Packed::tensor(InputRestorer& restorer) {
  if (is_overwritten_ != nullptr && *is_overwritten_) raise_lost("overwritten");
  return copy_ ? copy_->tensor() : unpacked(restorer);
}

at::Tensor Packed::unpacked(InputRestorer& restorer) {
  if (handle_ != nullptr) return restorer.tensor(handle_);
  version_.check_input();
  return kept_;
}

void Packed::protect(InputRestorer& restorer) {
  if (!copy_ && version_.is_unchanged()) copy_.emplace(unpacked(restorer));
}

Viewed::Viewed(std::shared_ptr<Packed> packed, const at::Tensor& tensor)
    : packed_(std::move(packed)), view_(tensor) {}

at::Tensor Viewed::tensor(InputRestorer& restorer) {
  return view_.over(packed_->tensor(restorer).storage());
}

RecipeResult::RecipeResult(std::shared_ptr<Result> result, const at::Tensor& tensor)
    : result_(std::move(result)), view_(tensor), version_(tensor) {
  result_->expect_use();
}

at::Tensor RecipeResult::tensor(InputRestorer& restorer) {
  if (!result_->has_recipe()) version_.check_input();
  return result_->viewed(view_, restorer);
}

Blank::Blank(const at::Tensor& tensor, size_t alignment) : view_(tensor), device_(tensor.device()) {
  const auto size = static_cast<int64_t>(tensor.itemsize());
  view_.offset %= static_cast<int64_t>(alignment) / size;
  const auto reach = at::detail::computeStorageNbytes(view_.sizes, view_.strides, size, view_.offset);
  nbytes_ = static_cast<int64_t>(reach);
}

at::Tensor Blank::tensor(InputRestorer&) {
  const auto options = at::TensorOptions().dtype(at::kByte).device(device_);
  return view_.over(at::empty({nbytes_}, options).storage());
}

OverwrittenResult::OverwrittenResult(std::shared_ptr<Result> result, const at::Tensor& tensor)
    : result_(std::move(result)), view_(tensor) {
  result_->overwritten();
  result_->expect_use();
}

at::Tensor OverwrittenResult::tensor(InputRestorer& restorer) {
  return result_->viewed_for_writing(view_, restorer);
}

// --- recipes ----------------------------------------------------------------------------------

std::optional<Circumstances> Circumstances::present(c10::DeviceType device, KernelChoice choice) {
  auto settings = Settings::present(device, choice);
  if (!settings) return {};
  std::optional<c10::ScalarType> autocast;
  if (at::autocast::is_autocast_enabled(device)) autocast = at::autocast::get_autocast_dtype(device);
  const bool records = choice != KernelChoice::NONE && at::GradMode::is_enabled();
  return Circumstances{device, autocast, *settings, choice, records};
}

Launch::Launch(PyObject* kernel, PyObject* options)
    : kernel_(Py_NewRef(kernel)), options_(Py_NewRef(options)) {}

Launch::~Launch() {
  const WithInterpreter held;
  Py_DECREF(kernel_);
  Py_DECREF(options_);
}

std::vector<at::Tensor> Launch::run(const std::vector<c10::IValue>& tensors) const {
  const auto wrap = [](const c10::IValue& one) { return THPVariable_Wrap(one.toTensor()); };
  Ref arguments = tuple_of(tensors, wrap);
  Ref made = expected(PyObject_Call(kernel_, arguments.get(), options_));
  std::vector<at::Tensor> outputs;
  for (Py_ssize_t at = 0; at < PyList_GET_SIZE(made.get()); ++at) {
    outputs.push_back(THPVariable_Unpack(PyList_GET_ITEM(made.get(), at)));
  }
  return outputs;
}

Recipe::Recipe(Operation operation, c10::ArrayRef<c10::IValue> inputs,
               std::vector<Source> sources, Circumstances circumstances,
               std::shared_ptr<Draw> draw)
    : operation_(std::move(operation)),
      sources_(std::move(sources)),
      circumstances_(circumstances),
      draw_(std::move(draw)) {
  if (circumstances.records) {
    for_each_tensor(inputs, [&](const at::Tensor& one) { requires_grad_.push_back(one.requires_grad()); });
  }
  inputs_.reserve(inputs.size());
  for (const auto& value : inputs) {
    Input& input = inputs_.emplace_back();
    if (value.isTensor() && value.toTensor().defined()) {
      input.is = Input::TENSOR;
    } else if (value.isTensorList()) {
      input.is = Input::LIST;
      input.has.assign(value.toTensorList().size(), true);
    } else if (value.isOptionalTensorList()) {
      input.is = Input::OPTIONAL_LIST;
      for (const std::optional<at::Tensor>& one : value.toOptionalTensorVector()) {
        input.has.push_back(one && one->defined());
      }
    } else {
      input.value = value;
    }
  }
}

std::vector<c10::IValue> Recipe::filled(InputRestorer& restorer) {
  std::vector<c10::IValue> stack;
  stack.reserve(inputs_.size());
  size_t next = 0;
  const auto take = [&] {
    at::Tensor tensor =
        std::visit([&](auto& source) { return source.tensor(restorer); }, sources_[next]);
    if (circumstances_.records && requires_grad_[next]) tensor = tensor.detach().requires_grad_();
    ++next;
    return tensor;
  };
  for (const auto& input : inputs_) {
    if (input.is == Input::VALUE) {
      stack.push_back(input.value);
    } else if (input.is == Input::TENSOR) {
      stack.emplace_back(take());
    } else if (input.is == Input::LIST) {
      c10::List<at::Tensor> list;
      for (size_t at = 0; at < input.has.size(); ++at) list.push_back(take());
      stack.emplace_back(std::move(list));
    } else {
      c10::List<std::optional<at::Tensor>> list;
      for (const bool has : input.has) {
        list.push_back(has ? std::optional<at::Tensor>(take()) : std::nullopt);
      }
      stack.emplace_back(std::move(list));
    }
  }
  return stack;
}

bool Recipe::call(const c10::OperatorHandle& op, std::vector<c10::IValue>& stack) {
  WithoutInterpreter others_may_run;
  std::optional<DrawingAgain> drawing;
  if (draw_ != nullptr) drawing.emplace(*draw_);
  op.callBoxed(stack);
  return !drawing || drawing->end();
}

at::Tensor Recipe::run(size_t place, InputRestorer& restorer) {
  look_for_overridden();
  const auto now = Settings::present(circumstances_.device, circumstances_.choice);
  if (!now || *now != circumstances_.settings) {
    Ref keys = circumstances_.settings.differing(now, circumstances_.choice);
    raise_lost("settings", keys.get());
  }
  std::vector<c10::IValue> stack = filled(restorer);
  ++restorer.operations;
  const bool keeps = place == KEPT;
  const auto byproduct = keeps ? nullptr : byproduct_.lock();
  const bool offers = byproduct != nullptr && byproduct->is_expected();
  at::AutoGradMode recording(circumstances_.records || keeps || offers);
  WithoutHooks unseen(circumstances_.records);
  Autocasting casting(circumstances_.device, circumstances_.autocast);
  c10::impl::ExcludeDispatchKeyGuard unaltered(MODES_OF_PYTHON);
  PausedWatching paused;
  if (const auto* launch = std::get_if<std::shared_ptr<Launch>>(&operation_)) {
    return run(**launch, stack, place);
  }
  const auto& op = std::get<c10::OperatorHandle>(operation_);
  if (keeps || offers) {
    const at::Tensor found = kept(op, stack);
    if (offers && found.defined()) byproduct->offered(found);
    TORCH_CHECK(offers || found.defined(), op.operator_name(), " has kept one tensor, and does not now");
    if (keeps) return found;
  } else if (!call(op, stack)) {
    raise_lost("drawn");
  }
  at::Tensor made = output_at(stack, place);
  TORCH_CHECK(made.defined(), op.operator_name(), " has no output ", place, " any more");
  if (sizes_) made = made.view(*sizes_);
  return circumstances_.records || offers ? made.detach() : made;
}

at::Tensor Recipe::run(const Launch& launch, const std::vector<c10::IValue>& tensors, size_t place) {
  const auto outputs = launch.run(tensors);
  for (const auto& [known, at] : results_) {
    const auto result = known.lock();
    if (result != nullptr && at != place) result->offered(outputs.at(at));
  }
  return outputs.at(place);
}

at::Tensor Recipe::kept(const c10::OperatorHandle& op, std::vector<c10::IValue>& stack) {
  const at::Tensor given = stack.front().toTensor().detach().requires_grad_();
  stack.front() = given;
  Catching catching;
  if (!call(op, stack)) raise_lost("drawn");
  const at::Tensor found = catching.kept(given, output_at(stack, 0));
  return found.defined() ? found.detach() : found;
}

// --- results ----------------------------------------------------------------------------------

Result::Result(const at::Tensor& tensor)
    : origin_(tensor.storage().getWeakStorageImpl()),
      nbytes_(storage_of(tensor)->nbytes()),
      view_(tensor),
      device_(tensor.device()) {}

std::shared_ptr<Result> Result::held(const at::Tensor& tensor) {
  auto result = std::make_shared<Result>(tensor);
  result->original_ = alias_of(tensor);
  return result;
}

void Result::made_by(std::shared_ptr<Recipe> recipe, size_t place) {
  recipe_ = std::move(recipe);
  recipe_->makes(weak_from_this(), place);
  place_ = place;
  original_.reset();
}

at::Tensor Result::tried(const View& view, InputRestorer& restorer) {
  if (is_overwritten_) raise_lost("overwritten");
  return viewed(view, restorer);
}

bool Result::is_expected() const { return remaining_uses_ > 0 && !remembers(pass_on(device_)); }

bool Result::remembers(const Pass& now) const {
  const auto is_unmodified = [](const auto& user) {
    return user.first.current_version() == user.second;
  };
  return memo_.defined() && memo_pass_ == now &&
         std::all_of(users_.begin(), users_.end(), is_unmodified);
}

void Result::hold() {
  auto origin = origin_.lock();
  if (origin) original_ = view_.over(c10::Storage(std::move(origin)));
}

void Result::expect_use() {
  ++uses_;
  ++remaining_uses_;
}

at::Tensor Result::viewed(const View& view, InputRestorer& restorer) {
  c10::Storage read;
  if (protected_) {
    read = protected_->tensor().storage();
  } else if (!has_recipe()) {
    if (auto origin = original_storage()) read = c10::Storage(std::move(origin));
  }
  if (!read) return view.over(made(restorer).storage());
  note_request({}, {});
  return view.over(std::move(read));
}

void Result::protect(const at::Tensor& tensor) {
  if (memo_.defined() && memo_.is_alias_of(tensor)) {
    memo_ = copied(memo_);
    users_.clear();
  }
  const bool is_own = storage_of(tensor) == origin_._unsafe_get_target();
  if (!has_recipe() && uses_ > 1 && is_own) protected_.emplace(tensor);
}

at::Tensor Result::unpacked(const View& view, InputRestorer& restorer) {
  const uint64_t stream = stream_of(device_);
  auto storage = original_storage();
  if (!storage && unpacked_ && unpacked_stream_ == stream) storage = unpacked_->lock();
  if (storage) {
    note_request(memo_, memo_pass_);
    return view.over(c10::Storage(std::move(storage)));
  }
  at::Tensor tensor = viewed(view, restorer);
  unpacked_ = tensor.storage().getWeakStorageImpl();
  unpacked_stream_ = stream;
  return tensor;
}

c10::intrusive_ptr<c10::StorageImpl> Result::original_storage() const {
  auto origin = origin_.lock();
  if (origin && origin->nbytes() == nbytes_) return origin;
  if (is_overwritten_) raise_lost("overwritten");
  return {};
}

at::Tensor Result::viewed_for_writing(const View& view, InputRestorer& restorer) {
  at::Tensor tensor = made(restorer);
  const bool is_alone = uses_ == 1 && tensor.storage().use_count() == 1;
  if (!is_alone) tensor = copied(tensor);
  return view.over(tensor.storage());
}

// Shows profilers a recomputation, as monitoring/profiler_ranges.py does in Python.
class ProfilerRange {
 public:
  explicit ProfilerRange(size_t nbytes) : range_(at::RecordScope::USER_SCOPE) {
    if (range_.isActive()) range_.before("storm replay #0, " + std::to_string(nbytes) + " B");
  }

 private:
  at::RecordFunction range_;
};

at::Tensor Result::made(InputRestorer& restorer) {
  if (!recipe_) raise_lost("memory");
  const Pass now = pass_on(device_);
  at::Tensor tensor = memo_;
  if (!remembers(now)) {
    const ProfilerRange range(nbytes_);
    tensor = recipe_->run(place_, restorer);
    const size_t nbytes = storage_of(tensor)->nbytes();
    if (!view_.describes(tensor) || nbytes != nbytes_) {
      Ref wrapped = expected(THPVariable_Wrap(tensor));
      Ref details = expected(Py_BuildValue("OKK", wrapped.get(), static_cast<uint64_t>(nbytes),
                                           static_cast<uint64_t>(nbytes_)));
      raise_lost("layout", details.get());
    }
  }
  note_request(tensor, now);
  return tensor;
}

void Result::note_request(at::Tensor made, Pass pass) {
  if (--remaining_uses_ > 0) {
    memo_ = std::move(made);
    memo_pass_ = pass;
  } else {
    memo_.reset();
    remaining_uses_ = uses_;
    users_.clear();
  }
}

void Result::offered(const at::Tensor& made) {
  if (!is_expected() || !view_.describes(made)) return;
  memo_ = made;
  memo_pass_ = pass_on(device_);
  users_.clear();
}

void Result::add_user(const c10::VariableVersion& counter) {
  if (memo_.defined()) users_.emplace_back(counter, counter.current_version());
}

}  // namespace storm
