// Launching kernels.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace fastops::cuda {

inline void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(std::string("fastops: CUDA: ") + cudaGetErrorString(error));
}

// Blocks along x for that many units of work. The limit is the hardware's; kernels stride over what lies beyond.
inline unsigned blocks_for(int64_t units, int64_t per_block) {
  return unsigned(std::clamp<int64_t>((units + per_block - 1) / per_block, 1, (int64_t(1) << 31) - 1));
}
inline unsigned blocks_along_y(int64_t units) {
  return unsigned(std::clamp<int64_t>(units, 1, 65535));
}

}  // namespace fastops::cuda
