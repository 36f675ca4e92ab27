// An allocator of a device type that nobody has, with as much memory as a test gives it.
#include <c10/core/Allocator.h>
#include <c10/util/Exception.h>

#include <cstdlib>
#include <string>

namespace {

size_t room = 0;
std::string message;

void give_back(void* memory) { std::free(memory); }

struct Failing final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes > room) {
      TORCH_CHECK_WITH(OutOfMemoryError, false, "out of memory: ", nbytes, " bytes");
    }
    void* memory = std::malloc(nbytes);
    return {memory, memory, &give_back, c10::Device(c10::DeviceType::PrivateUse1, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, size_t nbytes) const override {
    default_copy_data(to, from, nbytes);
  }
};

Failing allocator;

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

void install() { c10::SetAllocator(c10::DeviceType::PrivateUse1, &allocator); }

void set_room(size_t nbytes) { room = nbytes; }

// Returns null if the allocation fails, or the error's text.
const char* allocate(size_t nbytes) {
  try {
    c10::GetAllocator(c10::DeviceType::PrivateUse1)->allocate(nbytes);
    return nullptr;
  } catch (const c10::OutOfMemoryError& error) {
    message = error.what_without_backtrace();
    return message.c_str();
  }
}
}
#pragma GCC visibility pop
