// Grouping of an index: a stable sort of (segment, row) pairs by CUB's radix sort, on no more bits than a segment
// number has, and then a binary search for where each segment begins.
//
// Numbers are sorted as 32 bits whatever the index has, which halves the traffic of the larger one; rows that belong to
// no segment get the number after the last one, so that they come last. Bytes moved for each row: 8 + 4 for each pass
// over 8 bits, twice, and the index.
#include <cuda_runtime.h>

#include <cstdint>
#include <cub/device/device_radix_sort.cuh>
#include <stdexcept>

#include "cuda/launch.cuh"
#include "kernels.h"

namespace fastops::cuda {
namespace {

struct GroupPolicy {
  static constexpr int kThreads = 256;
};

// Row i as a pair to sort. One thread takes one row.
__global__ void __launch_bounds__(GroupPolicy::kThreads)
    make_pairs_kernel(IndexArray index, int64_t num_rows, int64_t num_segments, uint32_t* segments, uint32_t* rows) {
  const int64_t step = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < num_rows; i += step) {
    const int64_t segment = index[i];
    segments[i] = uint32_t(uint64_t(segment) < uint64_t(num_segments) ? segment : num_segments);
    rows[i] = uint32_t(i);
  }
}

__global__ void __launch_bounds__(GroupPolicy::kThreads)
    widen_kernel(const uint32_t* rows, int64_t num_rows, int64_t* order) {
  const int64_t step = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < num_rows; i += step) order[i] = rows[i];
}

// offsets[s] = the number of ascending ids before s. One thread takes one segment, which costs the same however the
// rows are spread; neighbours read nearly the same ids.
template <class Ids>
__global__ void __launch_bounds__(GroupPolicy::kThreads)
    begin_segments_kernel(Ids ids, int64_t num_rows, int64_t num_segments, void* offsets, bool wide) {
  const int64_t step = int64_t(gridDim.x) * blockDim.x;
  for (int64_t s = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; s <= num_segments; s += step) {
    int64_t low = 0, high = num_rows;
    while (low < high) {
      const int64_t middle = low + (high - low) / 2;
      if (int64_t(ids[middle]) < s) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    if (wide) {
      static_cast<int64_t*>(offsets)[s] = low;
    } else {
      static_cast<int32_t*>(offsets)[s] = int32_t(low);
    }
  }
}

// Parts of the workspace, in bytes from its beginning.
struct Layout {
  size_t segments = 0, rows = 0, sorted_segments = 0, sorted_rows = 0, sort = 0, sort_bytes = 0, end = 0;
  int bits = 0;

  explicit Layout(const GroupCall& call) {
    if (!call.order || call.num_rows == 0) return;
    if (uint64_t(call.num_rows) >> 32 != 0 || uint64_t(call.num_segments) >> 32 != 0) {
      throw std::runtime_error("fastops: CUDA: an index can be grouped if it has fewer than 2^32 rows and segments");
    }
    while (uint64_t(call.num_segments) >> bits != 0) ++bits;
    uint32_t* const none = nullptr;
    check(
        cub::DeviceRadixSort::SortPairs(nullptr, sort_bytes, none, none, none, none, uint32_t(call.num_rows), 0, bits));
    const auto take = [&](size_t bytes) {
      const size_t at = end;
      end += (bytes + 255) / 256 * 256;
      return at;
    };
    const size_t list = call.num_rows * sizeof(uint32_t);
    segments = take(list);
    rows = take(list);
    sorted_segments = take(list);
    sorted_rows = take(call.index.wide ? list : 0);
    sort = take(sort_bytes);
  }
};

template <class Ids>
void begin_segments(const GroupCall& call, Ids ids, cudaStream_t stream) {
  begin_segments_kernel<<<blocks_for(call.num_segments + 1, GroupPolicy::kThreads), GroupPolicy::kThreads, 0, stream>>>(
      ids, call.num_rows, call.num_segments, call.offsets, call.index.wide);
  check(cudaGetLastError());
}

}  // namespace

size_t group_workspace(const GroupCall& call) {
  return Layout(call).end;
}

void group(const GroupCall& call, void* workspace, cudaStream_t stream) {
  if (!call.order || call.num_rows == 0) return begin_segments(call, call.index, stream);
  Layout layout(call);
  const auto part = [&](size_t at) { return reinterpret_cast<uint32_t*>(static_cast<unsigned char*>(workspace) + at); };
  uint32_t* const segments = part(layout.segments);
  uint32_t* const rows = part(layout.rows);
  uint32_t* const sorted_segments = part(layout.sorted_segments);
  uint32_t* const sorted_rows = call.index.wide ? part(layout.sorted_rows) : static_cast<uint32_t*>(call.order);

  const unsigned blocks = blocks_for(call.num_rows, GroupPolicy::kThreads);
  make_pairs_kernel<<<blocks, GroupPolicy::kThreads, 0, stream>>>(call.index, call.num_rows, call.num_segments,
                                                                  segments, rows);
  check(cudaGetLastError());
  check(cub::DeviceRadixSort::SortPairs(part(layout.sort), layout.sort_bytes, segments, sorted_segments, rows,
                                        sorted_rows, uint32_t(call.num_rows), 0, layout.bits, stream));
  if (call.index.wide) {
    widen_kernel<<<blocks, GroupPolicy::kThreads, 0, stream>>>(sorted_rows, call.num_rows,
                                                               static_cast<int64_t*>(call.order));
    check(cudaGetLastError());
  }
  begin_segments(call, static_cast<const uint32_t*>(sorted_segments), stream);
}

}  // namespace fastops::cuda
