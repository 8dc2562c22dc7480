// Sorting within segments by CUB's radix sort, which is stable: the columns of all slices are sequences, and elements of
// many of them are sorted at once, by (sequence, segment, key) in one number of 64 bits, on no more bits than those have.
//
//     sequences | q | q + 1 | ...        element i of a batch is position i / count of sequence i % count, so that
//     position  | 0   0   0 | 1   1 ...  neighbours are neighbours in memory; sorted, they stand by sequence
//
// Where the three do not fit into 64 bits the key is sorted first, and then sequence and segment without moving what is
// equal. One thread takes one element. Bytes moved for each: sizeof(T) and 12 to make it, 24 for each pass over 8 bits, and
// for the results 4, 8, and twice sizeof(T), read at random.
#include <cuda_runtime.h>

#include <cstdint>
#include <cub/device/device_radix_sort.cuh>
#include <stdexcept>

#include "cuda/launch.cuh"
#include "dispatch.h"
#include "kernels.h"
#include "keys.h"

namespace fastops::cuda {
namespace {

struct SortPolicy {
  static constexpr int kThreads = 256;
  // Elements sorted at once, unless one sequence has more: guess, enough to occupy a device, so that the workspace, 24
  // bytes for each, does not grow with the number of columns.
  static constexpr int64_t kBatch = 1 << 24;
};

// The elements that are sorted at once.
struct Batch {
  SortCall call;
  int64_t first;        // of its sequences, column first % inner of slice first / inner
  uint32_t count;       // of sequences
  uint32_t elements;    // count * positions
  bool with_key;        // sequence, segment and key fit into one number

  // The place of a sequence of the batch in rows of `rows` rows: that of its row 0.
  __device__ __forceinline__ int64_t begin_of(uint32_t sequence, int64_t rows) const {
    const int64_t at = first + sequence, slice = call.outer == 1 ? 0 : at / call.inner;
    return slice * rows * call.inner + (at - slice * call.inner);
  }
};

// The segment that has a position. Wrong offsets or indices lead to a wrong segment, but to one that exists.
__device__ __forceinline__ int64_t segment_at(const SegmentsView& segments, int64_t position) {
  if (segments.order) {
    const int64_t segment = segments.index[segments.row(position)];
    return max(int64_t(0), min(segment, segments.num_segments - 1));
  }
  int64_t low = 0, high = segments.num_segments;  // the first one that begins behind the position lies in [low, high]
#pragma unroll 1
  while (low < high) {
    const int64_t middle = int64_t(uint64_t(low + high) / 2);
    if (segments.offsets[middle] <= position) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return max(low - 1, int64_t(0));
}

__device__ __forceinline__ uint64_t group_of(const Batch& batch, uint32_t sequence, uint32_t position) {
  return sequence * uint64_t(batch.call.segments.num_segments) + uint64_t(segment_at(batch.call.segments, position));
}

template <class K>
__global__ void __launch_bounds__(SortPolicy::kThreads)
    make_elements_kernel(Batch batch, KeyOrder<K> order, uint64_t* keys, uint32_t* numbers) {
  const SegmentsView& segments = batch.call.segments;
  const int64_t step = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < batch.elements; i += step) {
    const uint32_t position = uint32_t(i) / batch.count, sequence = uint32_t(i) - position * batch.count;
    const int64_t at = batch.begin_of(sequence, segments.num_rows) + segments.row(position) * batch.call.inner;
    uint64_t key = order.key(static_cast<const K*>(batch.call.data)[at]);
    if constexpr (sizeof(K) < 8) {
      if (batch.with_key) key |= group_of(batch, sequence, position) << (8 * sizeof(K));
    }
    keys[i] = key;
    numbers[i] = uint32_t(i);
  }
}

// Of elements that are sorted by their keys.
__global__ void __launch_bounds__(SortPolicy::kThreads)
    make_groups_kernel(Batch batch, const uint32_t* numbers, uint64_t* groups) {
  const int64_t step = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < batch.elements; i += step) {
    const uint32_t position = numbers[i] / batch.count;
    groups[i] = group_of(batch, numbers[i] - position * batch.count, position);
  }
}

// The results, in the order in which they stand in memory.
template <class K>
__global__ void __launch_bounds__(SortPolicy::kThreads) give_rows_kernel(Batch batch, const uint32_t* numbers) {
  const SegmentsView& segments = batch.call.segments;
  const int64_t step = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < batch.elements; i += step) {
    const uint32_t position = uint32_t(i) / batch.count, sequence = uint32_t(i) - position * batch.count;
    const int64_t row = segments.row(numbers[sequence * segments.num_positions + position] / batch.count);
    const int64_t to = batch.begin_of(sequence, segments.num_positions) + position * batch.call.inner;
    batch.call.indices[to] = row;
    if (batch.call.values) {
      const int64_t from = batch.begin_of(sequence, segments.num_rows) + row * batch.call.inner;
      static_cast<K*>(batch.call.values)[to] = static_cast<const K*>(batch.call.data)[from];
    }
  }
}

int bits_for(uint64_t numbers) {
  int bits = 0;
  while (bits < 64 && (numbers - 1) >> bits != 0) ++bits;
  return bits;
}

// Parts of the workspace, in bytes from its beginning: two of each, between which sorting goes back and forth.
struct Layout {
  int64_t sequences = 0, batch = 0;  // of all, and at once
  size_t keys[2] = {}, numbers[2] = {}, sort = 0, sort_bytes = 0, end = 0;

  explicit Layout(const SortCall& call) {
    const int64_t positions = call.segments.num_positions;
    sequences = call.outer * call.inner;
    if (sequences == 0 || positions == 0) return;
    if (positions >> 32 != 0) throw std::runtime_error("fastops: CUDA: columns can be sorted if they have fewer than 2^32 rows");
    batch = std::clamp<int64_t>(SortPolicy::kBatch / positions, 1, sequences);
    const size_t elements = size_t(batch * positions);
    cub::DoubleBuffer<uint64_t> some_keys;
    cub::DoubleBuffer<uint32_t> some_numbers;
    check(cub::DeviceRadixSort::SortPairs(nullptr, sort_bytes, some_keys, some_numbers, uint32_t(elements)));
    const auto take = [&](size_t bytes) {
      const size_t at = end;
      end += (bytes + 255) / 256 * 256;
      return at;
    };
    for (size_t& at : keys) at = take(elements * sizeof(uint64_t));
    for (size_t& at : numbers) at = take(elements * sizeof(uint32_t));
    sort = take(sort_bytes);
  }
};

template <class K>
void sort_batch(const Batch& batch, Layout& layout, unsigned char* workspace, cudaStream_t stream) {
  const auto part = [&](auto* type, size_t at) { return reinterpret_cast<decltype(type)>(workspace + at); };
  uint64_t* const a_key = nullptr;
  uint32_t* const a_number = nullptr;
  cub::DoubleBuffer<uint64_t> keys(part(a_key, layout.keys[0]), part(a_key, layout.keys[1]));
  cub::DoubleBuffer<uint32_t> numbers(part(a_number, layout.numbers[0]), part(a_number, layout.numbers[1]));
  const auto sort_by_bits = [&](int bits) {
    if (bits == 0) return;
    check(cub::DeviceRadixSort::SortPairs(workspace + layout.sort, layout.sort_bytes, keys, numbers, batch.elements, 0, bits,
                                          stream));
  };
  constexpr int kKeyBits = 8 * sizeof(K), kThreads = SortPolicy::kThreads;
  const int group_bits = bits_for(uint64_t(batch.count) * std::max<int64_t>(batch.call.segments.num_segments, 1));
  Batch marked = batch;
  marked.with_key = kKeyBits + group_bits <= 64;
  const unsigned blocks = blocks_for(batch.elements, kThreads);
  make_elements_kernel<K><<<blocks, kThreads, 0, stream>>>(marked, {batch.call.dtype, batch.call.descending}, keys.Current(),
                                                           numbers.Current());
  check(cudaGetLastError());
  sort_by_bits(marked.with_key ? kKeyBits + group_bits : kKeyBits);
  if (!marked.with_key) {
    make_groups_kernel<<<blocks, kThreads, 0, stream>>>(batch, numbers.Current(), keys.Current());
    check(cudaGetLastError());
    sort_by_bits(group_bits);
  }
  give_rows_kernel<K><<<blocks, kThreads, 0, stream>>>(batch, numbers.Current());
  check(cudaGetLastError());
}

}  // namespace

size_t sort_workspace(const SortCall& call) {
  return Layout(call).end;
}

void sort(const SortCall& call, void* workspace, cudaStream_t stream) {
  Layout layout(call);
  visit_width(call.dtype, [&](auto k) {
    using K = typename decltype(k)::type;
    for (int64_t first = 0; first < layout.sequences && layout.batch > 0; first += layout.batch) {
      const int64_t count = std::min(layout.batch, layout.sequences - first);
      const Batch batch{call, first, uint32_t(count), uint32_t(count * call.segments.num_positions), false};
      sort_batch<K>(batch, layout, static_cast<unsigned char*>(workspace), stream);
    }
  });
}

}  // namespace fastops::cuda
