/* DietGPU's float codec as two C functions over device addresses, for codec_gpu_peers.py.
 *
 * Built against a checkout of DietGPU, of which nothing is kept here (see codec_gpu_peers.py for the
 * command). Both run on `stream`; decompression gives its status in device memory as DietGPU does.
 */
#include <cassert>
#include <cstdint>

#include "dietgpu/float/GpuFloatCodec.h"
#include "dietgpu/utils/StackDeviceMemory.h"

#ifndef DIETGPU_COMMIT
#define DIETGPU_COMMIT "of unknown version"
#endif

namespace {

constexpr int kProbabilityBits = 10; /* what DietGPU's own bindings take */

dietgpu::FloatCodecConfig config_of(uint32_t type) {
  return {static_cast<dietgpu::FloatType>(type), dietgpu::ANSCodecConfig(kProbabilityBits, false),
          true /* buffers are aligned to 16 bytes */, false};
}

}  // namespace

extern "C" const char *bench_dietgpu_commit() { return DIETGPU_COMMIT; }

/* `type`: 1 float16, 2 bfloat16, 3 float32. */
extern "C" uint32_t bench_dietgpu_bound(uint32_t type, uint32_t count) {
  return dietgpu::getMaxFloatCompressedSize(static_cast<dietgpu::FloatType>(type), count);
}

extern "C" void *bench_dietgpu_memory(int device, void *memory, size_t bytes) {
  return new dietgpu::StackDeviceMemory(device, memory, bytes);
}

extern "C" void bench_dietgpu_forget(void *memory) {
  delete static_cast<dietgpu::StackDeviceMemory *>(memory);
}

extern "C" void bench_dietgpu_encode(void *memory, uint32_t type, const void *src, uint32_t count, void *dst,
                                     uint32_t *dst_bytes, cudaStream_t stream) {
  dietgpu::floatCompress(*static_cast<dietgpu::StackDeviceMemory *>(memory), config_of(type), 1, &src, &count,
                         &dst, dst_bytes, stream);
}

extern "C" void bench_dietgpu_decode(void *memory, uint32_t type, const void *src, void *dst, uint32_t count,
                                     uint8_t *success, uint32_t *found, cudaStream_t stream) {
  dietgpu::floatDecompress(*static_cast<dietgpu::StackDeviceMemory *>(memory), config_of(type), 1, &src, &dst,
                           &count, success, found, stream);
}
