/* The machine operations that the loss kernels use, each under one name. The tests run the same
 * kernels on a CPU: they put another file of this name in the include path.
 */
#pragma once

typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

#define KERNEL(threads, blocks) extern "C" __global__ void __launch_bounds__(threads, blocks)
#define DEVICE __device__ __forceinline__

constexpr u32 kWarp = 32;

DEVICE u32 thread_in_block() { return threadIdx.x; }
DEVICE u32 threads_in_block() { return blockDim.x; }
DEVICE i64 block_index() { return blockIdx.x; }
DEVICE void block_barrier() { __syncthreads(); }
DEVICE float from_lanes_above(float value, u32 by) { return __shfl_down_sync(0xffffffffu, value, by); }

/* The block's dynamic shared memory: one float for each warp. */
DEVICE float *shared_memory() {
  extern __shared__ float storm_loss_shared[];
  return storm_loss_shared;
}

DEVICE float from_half(u16 bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}
DEVICE u16 to_half(float value) {
  u16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
DEVICE float from_bfloat16(u16 bits) { return __uint_as_float(static_cast<u32>(bits) << 16); }
DEVICE u16 to_bfloat16(float value) {
  u32 bits = __float_as_uint(value);
  if (value != value) return 0x7fff;
  return static_cast<u16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
