#include "settings.h"

#include "configured.h"
#include "locked.h"
#include "objects.h"

#include <ATen/Context.h>
#include <c10/core/DefaultDtype.h>
#include <pthread.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <type_traits>

namespace storm {
namespace settings {

Py_ssize_t looked_at = -1;  // number of names at the last search for overridden operators
int overridden_number = -1;

// --- settings of the process, without Python --------------------------------------------------

using Get = int64_t (*)(at::Context&);

// A getter of a setting, with the name of the torch._C function that returns the same setting.
struct NativeSetting {
  const char* name;
  Get get;

  bool decides(KernelChoice choice) const {
    return choice == KernelChoice::ATTENTION || std::strstr(name, "_sdp_") == nullptr;
  }
};

// Adds a getter of a setting, if this PyTorch has the setting.
template <typename Getter>
void add(std::vector<NativeSetting>& found, const char* name, Getter get) {
  if constexpr (std::is_invocable_v<Getter, at::Context&>) found.push_back({name, get});
}

#define STORM_ADD(name, call)                                                 \
  add(found, name, [](auto& context) -> int64_t requires requires { context.call; } { \
    return static_cast<int64_t>(context.call);                                \
  })

// Adds the precision of float32 for each backend and kind of operator. This is a template because
// some versions of PyTorch name these by strings; then the setting is read from Python.
template <typename By, typename Kind, typename Found>
void add_precisions(std::vector<NativeSetting>& found, Found (at::Context::*)(By, Kind) const) {
  if constexpr (std::is_enum_v<By> && std::is_enum_v<Kind>) {
    found.push_back({"_get_fp32_precision_getter", [](at::Context& context) {
      int64_t found = 0;
      for (const By by : {By::CUDA, By::MKLDNN}) {
        for (const Kind kind : {Kind::MATMUL, Kind::CONV, Kind::RNN}) {
          found = 16 * found + static_cast<int64_t>(context.float32Precision(by, kind));
        }
      }
      return found;
    }});
  }
}

std::vector<NativeSetting> all_native() {
  std::vector<NativeSetting> found;
  STORM_ADD("_get_blas_preferred_backend", blasPreferredBackend());
  STORM_ADD("_get_cpu_allow_fp16_reduced_precision_reduction", allowFP16ReductionCPU());
  STORM_ADD("_get_cublas_allow_bf16_reduced_precision_reduction", allowBF16ReductionCuBLAS());
  STORM_ADD("_get_cublas_allow_fp16_accumulation", allowFP16AccumulationCuBLAS());
  STORM_ADD("_get_cublas_allow_fp16_reduced_precision_reduction", allowFP16ReductionCuBLAS());
  STORM_ADD("_get_cublaslt_prefer_grouped_gemm", preferCublasltGroupedGemm());
  STORM_ADD("_get_cudnn_benchmark", benchmarkCuDNN());
  STORM_ADD("_get_cudnn_depthwise_kernel", cudnnDepthwiseKernel());
  STORM_ADD("_get_cudnn_deterministic", deterministicCuDNN());
  STORM_ADD("_get_cudnn_enabled", userEnabledCuDNN());
  STORM_ADD("_get_cudnn_sdp_enabled", userEnabledCuDNNSDP());
  STORM_ADD("_get_deterministic_algorithms", deterministicAlgorithms());
  STORM_ADD("_get_fa3_sdp_enabled", userEnabledFA3SDP());
  STORM_ADD("_get_fa4_sdp_enabled", userEnabledFA4SDP());
  STORM_ADD("_get_flash_sdp_enabled", userEnabledFlashSDP());
  STORM_ADD("_get_math_sdp_allow_fp16_bf16_reduction", allowFP16BF16ReductionMathSDP());
  STORM_ADD("_get_math_sdp_enabled", userEnabledMathSDP());
  STORM_ADD("_get_mem_efficient_sdp_enabled", userEnabledMemEfficientSDP());
  STORM_ADD("_get_miopen_immediate", immediateMiopen());
  STORM_ADD("_get_mkldnn_deterministic", deterministicMkldnn());
  STORM_ADD("_get_mkldnn_enabled", userEnabledMkldnn());
  STORM_ADD("_get_native_aot_enabled", allowNativeAot());
  STORM_ADD("_get_native_aot_unconditional_masked", maskUnconditionalNativeAot());
  STORM_ADD("_get_nnpack_enabled", userEnabledNNPACK());
  STORM_ADD("_get_onednn_allow_tf32", allowTF32OneDNN());
  STORM_ADD("_get_overrideable_sdp_enabled", userEnabledOverrideableSDP());
  STORM_ADD("_get_rocm_fa_preferred_backend", getROCmFAPreferredBackend());
  STORM_ADD("_get_sm_carveout_experimental", _SMCarveout_EXPERIMENTAL().value_or(-1));
  found.push_back({"_get_sdp_priority_order", [](at::Context& context) {
    int64_t found = 0;
    for (const auto backend : context.sDPPriorityOrder()) {
      found = 16 * found + static_cast<int64_t>(backend) + 1;
    }
    return found;
  }});
  found.push_back({"get_default_dtype", [](at::Context&) {
    return static_cast<int64_t>(c10::get_default_dtype_as_scalartype());
  }});
  add_precisions(found, &at::Context::float32Precision);
  return found;
}

#undef STORM_ADD

const std::vector<NativeSetting>& native() {
  static const auto* all = new std::vector<NativeSetting>(all_native());
  return *all;
}

// --- numbers for values that were seen --------------------------------------------------------

// Returns a number for an object: equal objects have equal numbers. The table is never destroyed:
// its objects may not be released once the interpreter has ended.
int number_of(PyObject* value) {
  static auto* seen = new std::vector<Ref>();
  for (size_t at = 0; at < seen->size(); ++at) {
    const int equal = PyObject_RichCompareBool((*seen)[at].get(), value, Py_EQ);
    expect(equal >= 0);
    if (equal) return static_cast<int>(at);
  }
  seen->push_back(Ref::borrowed(value));
  return static_cast<int>(seen->size()) - 1;
}

std::mutex lock;  // protects the following
auto* numbers = new std::map<std::vector<int64_t>, int>();

// Returns a number for the values of settings, without the GIL. A thread mostly sees the same
// values as the last time.
int number_of(const std::vector<int64_t>& values, KernelChoice choice) {
  thread_local std::pair<std::vector<int64_t>, int> of_products{{}, -1}, of_attention{{}, -1};
  auto& latest = choice == KernelChoice::PRODUCT ? of_products : of_attention;
  if (latest.second < 0 || latest.first != values) {
    std::lock_guard<std::mutex> locked(lock);
    latest = {values, numbers->try_emplace(values, static_cast<int>(numbers->size())).first->second};
  }
  return latest.second;
}

// Returns the values that have a number.
std::vector<int64_t> values_of(int number) {
  std::lock_guard<std::mutex> locked(lock);
  for (const auto& [values, known] : *numbers) {
    if (known == number) return values;
  }
  return {};
}

// Adds the settings that Python reads, by functions written in C, between which Python does not
// check for signals. Returns whether all can be read, and no kernels are chosen by measuring.
bool add_from_python(std::vector<int64_t>& values) {
  const auto count = PyTuple_GET_SIZE(configured.getters);
  if (count == 0 && configured.tunes == Py_None) return true;
  const WithInterpreter held;
  try {
    if (configured.tunes != Py_None) {
      if (expected(PyObject_CallNoArgs(configured.tunes)).get() != Py_False) return false;
    }
    for (Py_ssize_t at = 0; at < count; ++at) {
      PyObject* pair = PyTuple_GET_ITEM(configured.getters, at);
      Ref value = expected(
          PyObject_Call(PyTuple_GET_ITEM(pair, 0), PyTuple_GET_ITEM(pair, 1), nullptr));
      values.push_back(number_of(value.get()));
    }
  } catch (const python_error&) {
    PyErr_Clear();
    return false;
  }
  return true;
}

// Returns a number for the settings; negative if some cannot be read or kernels are measured.
int present_deciding(KernelChoice choice) {
  thread_local std::vector<int64_t> values;
  values.clear();
  for (const auto& one : native()) {
    if (one.decides(choice)) values.push_back(one.get(at::globalContext()));
  }
  return add_from_python(values) ? number_of(values, choice) : -1;
}

// Returns the names of the getters of those settings, in the same order.
std::vector<std::string> deciding_names(KernelChoice choice) {
  std::vector<std::string> names;
  for (const auto& one : native()) {
    if (one.decides(choice)) names.emplace_back(one.name);
  }
  for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(configured.getters); ++at) {
    PyObject* getter = PyTuple_GET_ITEM(PyTuple_GET_ITEM(configured.getters, at), 0);
    Ref name = expected(PyObject_GetAttrString(getter, "__name__"));
    const char* text = PyUnicode_AsUTF8(name.get());
    expect(text != nullptr);
    names.emplace_back(text);
  }
  return names;
}

// Returns whether the smallest normal number, halved, is zero in this thread.
bool flushes_denormals() {
  volatile double smallest = 2.2250738585072014e-308;
  return smallest * 0.5 == 0.0;
}

}  // namespace settings

PyObject* native_settings() {
  Ref all = expected(PyDict_New());
  for (const auto& [name, get] : settings::native()) {
    Ref value = expected(PyLong_FromLongLong(get(at::globalContext())));
    expect(PyDict_SetItemString(all.get(), name, value.get()) == 0);
  }
  return all.release();
}

void look_for_overridden() {
  const Py_ssize_t count = PySet_GET_SIZE(configured.names);
  if (count == settings::looked_at) return;
  Ref found = expected(PyObject_CallNoArgs(configured.overridden));
  settings::overridden_number = settings::number_of(found.get());
  settings::looked_at = count;
}

std::optional<Settings> Settings::present(c10::DeviceType device, KernelChoice choice) {
  if (PySet_GET_SIZE(configured.names) != settings::looked_at) return {};
  Settings found{c10::get_default_dtype_as_scalartype(), settings::overridden_number};
  if (device == c10::DeviceType::CPU) {
    if (configured.omp_threads == nullptr) return {};
    found.onednn = at::globalContext().userEnabledMkldnn();
    found.thread = static_cast<uint64_t>(pthread_self());
    found.threads = configured.omp_threads();
    found.flushes_denormals = settings::flushes_denormals();
  }
  if (choice != KernelChoice::NONE) {
    found.deciding = settings::present_deciding(choice);
    if (found.deciding < 0) return {};
  }
  return found;
}

Ref Settings::differing(const std::optional<Settings>& now, KernelChoice choice) const {
  std::vector<std::string> keys;
  const auto add = [&](bool differs, const char* key) {
    if (differs) keys.emplace_back(key);
  };
  if (!now) {
    keys.emplace_back("measured");
  } else {
    add(now->default_dtype != default_dtype, "get_default_dtype");
    add(now->overridden != overridden, "overridden");
    add(now->onednn != onednn, "_get_mkldnn_enabled");
    add(now->thread != thread, "thread");
    add(now->threads != threads, "threads");
    add(now->flushes_denormals != flushes_denormals, "denormals");
  }
  if (now && now->deciding != deciding) {
    const auto then = settings::values_of(deciding), found = settings::values_of(now->deciding);
    const auto names = settings::deciding_names(choice);
    for (size_t at = 0; at < std::min({names.size(), then.size(), found.size()}); ++at) {
      add(then[at] != found[at], names[at].c_str());
    }
  }
  return tuple_of(keys, [](const std::string& key) { return PyUnicode_FromString(key.c_str()); });
}

}  // namespace storm
