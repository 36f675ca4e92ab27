#include "binding.h"

#include "configured.h"
#include "locked.h"
#include "tensors.h"
#include "watching.h"

#include <algorithm>
#include <cstring>

namespace storm {
namespace binding {

// PyTorch's own memory starts at a multiple of this many bytes. Of memory with another alignment,
// such as NumPy's, kernels may sum the first elements separately; of a copy they would not.
constexpr uintptr_t ALIGNMENT = 64;

bool lies_elsewhere(const at::Tensor& tensor) {
  return reinterpret_cast<uintptr_t>(tensor.storage().data()) % ALIGNMENT != 0;
}

bool is_parameter(const at::Tensor& tensor, const ModelStorages& model_storages) {
  const at::Tensor& base = base_of(tensor);
  if (!base.is_leaf()) return false;
  if (model_storages.has(storage_of(tensor))) return true;
  if (!base.requires_grad()) return false;
  const WithInterpreter held;
  PyObject* object = THPVariable_Wrap(base);
  const auto* type = object == nullptr ? nullptr : reinterpret_cast<PyObject*>(Py_TYPE(object));
  Py_XDECREF(object);
  PyErr_Clear();
  return type == configured.parameter;
}

// Returns how to hold a constant input, a small one or a parameter; none for any other input. A
// parameter at rest is read again where it is. Any other small one is copied: if no operation made
// its memory, that can be written to without a version counting it.
std::optional<Source> constant(const at::Tensor& tensor, Values& values,
                               const ModelStorages& model_storages, int64_t min_bytes) {
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) return Alias(tensor);
  const auto nbytes = stored_bytes(tensor);
  const bool is_small = nbytes < min_bytes;
  if (!is_small && !is_parameter(tensor, model_storages)) return {};
  if (!is_small || model_storages.is_at_rest(storage_of(tensor))) return Alias(alias_of(tensor));
  if (!is_result(tensor)) return Alias(copied(tensor));
  auto packed = std::make_shared<Packed>(tensor, nullptr);
  values.add_input(tensor, packed);
  return Viewed(std::move(packed), tensor);
}

// Returns whether a storage is that of an argument, or of a cast that autocast has made of it.
bool is_of(const c10::StorageImpl* storage, const at::Tensor& argument,
           const std::vector<Cast>& casts) {
  const auto has = [&](const at::Tensor& one) { return storage_of(one) == storage; };
  return has(argument) || std::any_of(casts.begin(), casts.end(), [&](const Cast& cast) {
           return cast.source.is_same(argument) && has(cast.made);
         });
}

// Returns what a product of batches has multiplied: its arguments reshaped to three dimensions, if
// some of these are copies, or casts, and all of those are recomputed; else nothing. The product of
// these is the same, in another shape.
std::vector<at::Tensor> recomputed_batches(const Call& call, const Begun& begun,
                                           const at::Tensor& output, const Values& values) {
  constexpr size_t FACTORS = 2;
  const bool is_product = !call.kernel && std::strcmp(call.name, "aten::matmul") == 0;
  if (!is_product || begun.reshapes.size() != FACTORS) return {};
  std::vector<at::Tensor> batches;
  bool copies = false;
  for (size_t at = 0; at < FACTORS; ++at) {
    const auto& [source, made] = begun.reshapes[at];
    const at::Tensor argument = begun.inputs[at].toTensor();
    const bool fits = made.dim() == 3 && argument.dim() > 3 &&
                      made.sizes().slice(1) == argument.sizes().slice(argument.dim() - 2) &&
                      is_of(source, argument, begun.casts);
    const bool is_copy = fits && !made.is_alias_of(argument);
    if (!fits || (is_copy && values.recomputed(made) == nullptr)) return {};
    copies |= is_copy;
    batches.push_back(made);
  }
  const int64_t count = batches[0].size(0);
  const bool is_whole = batches[1].size(0) == count && output.is_contiguous() &&
                        output.numel() == count * batches[0].size(1) * batches[1].size(2);
  return copies && is_whole ? batches : std::vector<at::Tensor>();
}

// Returns how many of the inputs share an output's storage.
size_t count_in(const at::Tensor& output, const std::vector<c10::IValue>& inputs) {
  size_t found = 0;
  const auto* storage = storage_of(output);
  for_each_tensor(inputs, [&](const at::Tensor& one) {
    const auto* impl = one.unsafeGetTensorImpl();
    found += impl->has_storage() && storage_of(impl) == storage;
  });
  return found;
}

// Returns autocast's cast of an argument as a source if the cast is recomputed; else none.
std::optional<Source> recomputed_cast(const std::vector<Cast>& casts, const at::Tensor& argument,
                                        const Values& values) {
  for (const Cast& cast : casts) {
    if (!cast.source.is_same(argument)) continue;
    if (auto result = values.recomputed(cast.made)) {
      return RecipeResult(std::move(result), cast.made);
    }
  }
  return {};
}

// Returns how to hold an input that the call has overwritten; none if it cannot be recomputed.
std::optional<Source> former_of(const Begun& begun, size_t place, const Call& call,
                                const at::Tensor& input, const at::Tensor& output,
                                const Values& values) {
  const int number = call.inputs[place];
  std::shared_ptr<Result> before;
  if (begun.launch != nullptr) {
    const Before& former = begun.former[place];
    if (former.number == number && former.result && former.result->has_recipe()) before = former.result;
  } else if (input.is_same(output) && !is_view(input)) {
    before = values.before(number, input);
  }
  if (before == nullptr) return {};
  return OverwrittenResult(std::move(before), input);
}

// Returns how to hold an input as the value with a number; none if it cannot be that value.
std::optional<Source> source_of(int number, const Begun& begun, const at::Tensor& input,
                                Values& values, const ModelStorages& model_storages,
                                int64_t min_bytes, std::vector<Unpacked>& unpacked) {
  auto cast = recomputed_cast(begun.casts, input, values);
  if (number == CONSTANT) {
    return cast ? std::move(cast) : constant(input, values, model_storages, min_bytes);
  }
  TrackedStorage* tracked = values.match_input(number, input, min_bytes);
  if (tracked == nullptr || cast) return tracked == nullptr ? std::nullopt : std::move(cast);
  if (tracked->result != nullptr) return RecipeResult(tracked->result, input);
  const bool copies = !is_result(input);
  auto& packed = copies ? tracked->copy : tracked->packed;
  if (packed == nullptr) {
    const at::Tensor held = copies ? copied(input) : input;
    if (!copies) tracked->is_overwritten = std::make_shared<bool>(false);
    packed = std::make_shared<Packed>(held, copies ? nullptr : tracked->is_overwritten);
    if (!copies) values.add_input(input, packed);
    unpacked.push_back({held, number, packed});
  }
  return Viewed(packed, input);
}

}  // namespace binding

bool draws_numbers(const Call& call, c10::ArrayRef<c10::IValue> inputs) {
  if (!call.may_draw) return false;
  if (call.dropout < 0 || static_cast<size_t>(call.dropout) >= inputs.size()) return true;
  const auto& dropout = inputs[call.dropout];
  return !dropout.isDouble() || dropout.toDouble() != 0.0;
}

TrackedStorage* Values::track(int number, const at::Tensor& tensor) {
  const auto* storage = storage_of(tensor);
  const auto version = version_of(tensor);
  TrackedStorage tracked{number, version, tensor.storage().getWeakStorageImpl()};
  const auto found = tracked_.find(storage);
  if (found != tracked_.end()) {
    const TrackedStorage& last = found->second;
    tracked.before = {last.number, last.version, last.result};
  }
  return &tracked_.insert_or_assign(storage, std::move(tracked)).first->second;
}

TrackedStorage* Values::look_up(const Event& event, const at::Tensor& tensor) {
  const auto found = tracked_.find(storage_of(tensor));
  const auto version = version_of(tensor);
  if (found != tracked_.end() && found->second.version == version) {
    const bool is_same = !event.is_new && found->second.number == event.number;
    return is_same ? &found->second : nullptr;
  }
  return event.is_new ? track(event.number, tensor) : nullptr;
}

TrackedStorage* Values::match_input(int number, const at::Tensor& tensor, int64_t min_bytes) {
  const auto* storage = storage_of(tensor);
  if (static_cast<int64_t>(storage->nbytes()) < min_bytes) return nullptr;
  const auto found = tracked_.find(storage);
  const auto version = version_of(tensor);
  if (found != tracked_.end() && found->second.version == version) {
    return found->second.number == number ? &found->second : nullptr;
  }
  return track(number, tensor);
}

std::shared_ptr<Result> Values::before(int number, const at::Tensor& tensor) const {
  const auto found = tracked_.find(storage_of(tensor));
  if (found == tracked_.end()) return nullptr;
  const TrackedStorage& last = found->second;
  const auto version = version_of(tensor);
  const bool is_noted = last.version == version;  // the output is noted already
  const Before before = is_noted ? last.before : Before{last.number, last.version, last.result};
  const bool is_last = before.version + 1 == version;  // each call adds at least one
  const bool is_it = is_last && before.number == number && before.result != nullptr;
  return is_it && before.result->has_recipe() ? before.result : nullptr;
}

Before Values::overwritten(const at::Tensor& tensor) {
  const auto found = tracked_.find(storage_of(tensor));
  if (found == tracked_.end()) return {};
  TrackedStorage tracked = std::move(found->second);
  tracked_.erase(found);
  if (tracked.is_overwritten != nullptr) *tracked.is_overwritten = true;
  if (tracked.result != nullptr) tracked.result->overwritten();
  const auto version = version_of(tensor);
  return tracked.version == version ? Before{tracked.number, version, tracked.result} : Before{};
}

void Values::add_input(const at::Tensor& tensor, const std::shared_ptr<Packed>& packed) {
  inputs_.emplace(storage_of(tensor), packed);
}

void Values::protect_inputs(const c10::StorageImpl* storage, InputRestorer& restorer) {
  const auto [first, last] = inputs_.equal_range(storage);
  for (auto at = first; at != last; ++at) {
    if (const auto packed = at->second.lock()) packed->protect(restorer);
  }
}

void Values::hold_results() const {
  for (const auto& [_, tracked] : tracked_) {
    if (tracked.result != nullptr) tracked.result->hold();
  }
}

std::shared_ptr<Result> Values::recomputed(const at::Tensor& tensor) const {
  const auto found = tracked_.find(storage_of(tensor));
  const auto version = version_of(tensor);
  if (found == tracked_.end() || found->second.version != version) return nullptr;
  const auto& result = found->second.result;
  return result != nullptr && result->has_recipe() ? result : nullptr;
}

bool make_recipe(const Call& call, Begun& begun, const at::Tensor& output, TrackedStorage& made,
                 Values& values, const ModelStorages& model_storages, int64_t min_bytes,
                 std::vector<Unpacked>& unpacked) {
  const bool measures = call.is_convolution && at::globalContext().benchmarkCuDNN();
  const size_t over = begun.launch ? begun.former.size() : binding::count_in(output, begun.inputs);
  if (measures || (!begun.launch && over != call.overwrites)) return false;
  if (begun.draw == nullptr && draws_numbers(call, begun.inputs)) return false;
  if (begun.launch && begun.recipe != nullptr) {
    if (made.result == nullptr) made.result = std::make_shared<Result>(output);
    made.result->made_by(begun.recipe, call.place);
    return true;
  }
  const auto circumstances = Circumstances::present(output.device().type(), call.choice);
  if (!circumstances) return false;
  const auto batches = binding::recomputed_batches(call, begun, output, values);
  std::vector<Source> sources;
  sources.reserve(call.inputs.size());
  const size_t known = unpacked.size();
  bool fits = true;
  for_each_tensor(begun.inputs, [&](const at::Tensor& one) {
    const size_t next = sources.size();
    fits = fits && next < call.inputs.size() && is_ordinary(one.unsafeGetTensorImpl()) &&
           !binding::lies_elsewhere(one);
    if (!fits) return;
    if (!batches.empty() && !batches[next].is_alias_of(one)) {
      sources.push_back(RecipeResult(values.recomputed(batches[next]), batches[next]));
      return;
    }
    const at::Tensor& read = batches.empty() ? one : batches[next];
    std::optional<Source> source =
        next < over ? binding::former_of(begun, next, call, one, output, values)
                    : binding::source_of(call.inputs[next], begun, read, values, model_storages,
                                         min_bytes, unpacked);
    fits = source.has_value();
    if (fits) sources.push_back(*std::move(source));
  });
  if (!fits || sources.size() != call.inputs.size()) {
    unpacked.erase(unpacked.begin() + known, unpacked.end());
    return false;
  }
  Operation operation = begun.launch ? Operation(begun.launch) : Operation(*call.op);
  auto recipe = std::make_shared<Recipe>(std::move(operation), begun.inputs, std::move(sources),
                                         *circumstances, begun.draw);
  if (!batches.empty()) recipe->shapes(output.sizes());
  begun.recipe = recipe;
  if (made.result == nullptr) made.result = std::make_shared<Result>(output);
  made.result->made_by(std::move(recipe), call.place);
  return true;
}

namespace binding {

// Returns the recipe of dropout's mask: uninitialized memory serves as the input.
std::optional<Recipe> of_layout(const Call& call, const Begun& begun, Circumstances circumstances) {
  const at::Tensor given = output_at(begun.inputs, 0);
  if (begun.draw == nullptr || !given.defined()) return {};
  if (!is_ordinary(given.unsafeGetTensorImpl()) || lies_elsewhere(given)) return {};
  std::vector<Source> sources;
  sources.emplace_back(Blank(given, ALIGNMENT));
  return Recipe(*call.op, begun.inputs, std::move(sources), circumstances, begun.draw);
}

// Returns the recipe of a copy of an overwritten input: the memory in which that is recomputed.
std::optional<Recipe> of_former(const Call& call, const Begun& begun, const Values& values,
                                Circumstances circumstances) {
  static const auto alias = c10::Dispatcher::singleton().findSchemaOrThrow("aten::alias", "");
  const at::Tensor given = output_at(begun.inputs, 0);
  if (!given.defined() || !is_ordinary(given.unsafeGetTensorImpl()) || is_view(given)) return {};
  auto before = call.inputs.empty() ? nullptr : values.before(call.inputs[0], given);
  if (before == nullptr) return {};
  std::vector<Source> sources;
  sources.emplace_back(OverwrittenResult(std::move(before), given));
  const c10::IValue input(given);
  return Recipe(alias, c10::ArrayRef<c10::IValue>(input), std::move(sources), circumstances, nullptr);
}

}  // namespace binding

bool make_byproduct_recipe(const Call& call, Begun& begun, const at::Tensor& byproduct,
                           TrackedStorage& made, Values& values,
                           const ModelStorages& model_storages, int64_t min_bytes,
                           std::vector<Unpacked>& unpacked) {
  if (made.result == nullptr) return false;
  if (begun.recipe && call.depends != Depends::FORMER) begun.recipe->keeps(made.result);
  if (call.depends == Depends::VALUES) {
    return make_recipe(call, begun, byproduct, made, values, model_storages, min_bytes, unpacked);
  }
  const auto circumstances = Circumstances::present(byproduct.device().type(), call.choice);
  if (!circumstances) return false;
  const bool is_former = call.depends == Depends::FORMER;
  auto recipe = is_former ? binding::of_former(call, begun, values, *circumstances)
                          : binding::of_layout(call, begun, *circumstances);
  if (!recipe) return false;
  made.result->made_by(std::make_shared<Recipe>(*std::move(recipe)), is_former ? 0 : KEPT);
  return true;
}

}  // namespace storm
