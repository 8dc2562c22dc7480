// Sorting within segments by CUB's radix sort, which is stable: the columns of all slices are sequences, and elements of
// many of them are sorted at once, by (sequence, segment, key) in one number of 64 bits, on no more bits than those have.
//
//     sequences | q | q + 1 | ...        element i of a batch is position i / count of sequence i % count, so that
//     position  | 0   0   0 | 1   1 ...  neighbours are neighbours in memory; sorted, they stand by sequence
//
// Where the three do not fit into 64 bits the key is sorted first, and then sequence and segment without moving what is
// equal. Positions of no segment are sorted behind the last one. One thread takes one element. Bytes moved for each: sizeof(T)
// and 12 to make it, 24 for each pass over 8 bits, and for the results 4, 8, and twice sizeof(T), read at random.
//
// Runs of equal elements are counted where they end. For the mode the last element of a run looks back for the first one, in
// steps each twice as long as the one before: few reads however long the run is. Bytes moved for each element: 8, and where keys
// did not fit 4 and sizeof(T), read at random. What a warp has seen of a segment is added atomically, as whole numbers, so that
// the order does not matter.
#include <cuda_runtime.h>

#include <cstdint>
#include <cub/device/device_radix_sort.cuh>
#include <stdexcept>

#include "cuda/launch.cuh"
#include "dispatch.h"
#include "kernels.h"
#include "keys.h"

#ifdef __HIP_PLATFORM_AMD__
namespace cub = hipcub;  // torch's hipify renames what sorts, but not the buffers
#endif

namespace fastops::cuda {
namespace {

struct SortPolicy {
  static constexpr int kThreads = 256;
  // Elements sorted at once, unless one sequence has more: guess, enough to occupy a device, so that the workspace, 24
  // bytes for each, does not grow with the number of columns.
  static constexpr int64_t kBatch = 1 << 24;
};

constexpr unsigned kWarp = 0xffffffffu;

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

  // What is wanted but for rows: one for each segment and sequence.
  __device__ __forceinline__ int64_t num_results() const { return count * call.segments.num_segments; }
};

// Result i of a batch, in the order in which elements are numbered, and its place in memory.
struct Result {
  uint32_t sequence;
  int64_t segment, at;

  __device__ __forceinline__ Result(const Batch& batch, int64_t i)
      : sequence(uint32_t(i % batch.count)),
        segment(i / batch.count),
        at(batch.begin_of(sequence, batch.call.segments.num_segments) + segment * batch.call.inner) {}
};

// The segment that has a position, or the number of segments if none has: rows of no segment, and what offsets that were never
// checked leave out. Wrong ones lead to a wrong segment, but to one that exists.
__device__ __forceinline__ int64_t segment_at(const SegmentsView& segments, int64_t position) {
  const int64_t none = segments.num_segments;
  if (segments.order) {
    const int64_t segment = segments.index[segments.row(position)];
    return uint64_t(segment) < uint64_t(none) ? segment : none;
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
  return low == 0 || (low == none && segments.offsets[none] <= position) ? none : low - 1;
}

__device__ __forceinline__ uint64_t group_of(const Batch& batch, uint32_t sequence, uint32_t position) {
  return sequence * uint64_t(batch.call.segments.num_segments + 1) + uint64_t(segment_at(batch.call.segments, position));
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
  if (batch.call.wanted == Sorted::rows) return;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < batch.num_results(); i += step) {
    const Result result(batch, i);
    const int64_t begin = segments.begin(result.segment);
    if (batch.call.wanted == Sorted::mode) {
      batch.call.indices[result.at] = 0;
    } else {
      batch.call.counts[result.at] = segments.end(result.segment, begin) > begin ? 0 : int64_t(batch.call.fill);
    }
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

// Sorted elements. `keys` are what they were sorted by last: sequence and segment, and below those the key if there was room.
template <class K>
struct SortedElements {
  const Batch& batch;
  const KeyOrder<K>& order;
  const uint64_t* keys;
  const uint32_t* numbers;

  __device__ __forceinline__ uint64_t group(int64_t i) const {
    if constexpr (sizeof(K) < 8) {
      if (batch.with_key) return keys[i] >> (8 * sizeof(K));
    }
    return keys[i];
  }
  __device__ __forceinline__ K key(int64_t i) const {
    const uint32_t position = numbers[i] / batch.count, sequence = numbers[i] - position * batch.count;
    const int64_t row = batch.call.segments.row(position);
    return order.key(static_cast<const K*>(batch.call.data)[batch.begin_of(sequence, batch.call.segments.num_rows) + row * batch.call.inner]);
  }
  __device__ __forceinline__ bool are_equal(int64_t i, int64_t j) const {
    return keys[i] == keys[j] && (batch.with_key || key(i) == key(j));
  }
  // The first element of the run that has element i.
  __device__ int64_t first_of_run(int64_t i) const {
    int64_t first = i, step = 1;
    for (; first >= step && are_equal(first - step, i); step *= 2) first -= step;
    for (step /= 2; step > 0; step /= 2) {  // the run goes on for less than the last step that was tried
      if (first >= step && are_equal(first - step, i)) first -= step;
    }
    return first;
  }
};

// Gathers what runs say of their segments. For the mode that is the length above the complement of the place, among the sorted
// elements of the sequence, of the first element: the greatest is that of the first one of the longest runs. It stands in
// `indices` for the time being. Neighbours are mostly of one segment: the first lane of each speaks for all.
template <class K>
__global__ void __launch_bounds__(SortPolicy::kThreads)
    count_runs_kernel(Batch batch, KeyOrder<K> order, const uint64_t* keys, const uint32_t* numbers) {
  using Word = unsigned long long;  // what atomic operations take
  const SortedElements<K> sorted{batch, order, keys, numbers};
  const int64_t step = int64_t(gridDim.x) * blockDim.x, elements = batch.elements;
  const int lane = threadIdx.x % 32;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i - lane < elements; i += step) {  // whole warps
    const Word group = i < elements ? sorted.group(i) : ~Word(0);
    const bool ends_run = i < elements && (i + 1 == elements || !sorted.are_equal(i, i + 1));
    const Word before = __shfl_up_sync(kWarp, group, 1);
    const bool is_first = i < elements && (lane == 0 || before != group);
    const unsigned ends = __ballot_sync(kWarp, ends_run), firsts = __ballot_sync(kWarp, is_first || i >= elements);
    const unsigned others = firsts & ~(kWarp >> (31 - lane));  // behind this lane, those that are not of its group
    const int end = others ? __ffs(others) - 1 : 32;
    Word best = 0;
    if (batch.call.wanted == Sorted::mode) {
      if (ends_run) {
        const int64_t first = sorted.first_of_run(i);
        best = Word(i + 1 - first) << 32 | uint32_t(~uint32_t(first % batch.call.segments.num_positions));
      }
      for (int apart = 1; apart < 32; apart *= 2) {
        const Word other = __shfl_down_sync(kWarp, best, apart);
        if (lane + apart < end) best = max(best, other);
      }
    }
    const int count = __popc(ends >> lane & kWarp >> (32 - end + lane));
    if (!is_first || count == 0) continue;
    const int64_t groups = batch.call.segments.num_segments + 1, sequence = group / groups, segment = group - sequence * groups;
    if (segment == batch.call.segments.num_segments) continue;
    const int64_t at = batch.begin_of(sequence, batch.call.segments.num_segments) + segment * batch.call.inner;
    if (batch.call.wanted == Sorted::mode) {
      atomicMax(reinterpret_cast<Word*>(batch.call.indices + at), best);
    } else {
      atomicAdd(reinterpret_cast<Word*>(batch.call.counts + at), Word(count));
    }
  }
}

// From the best runs to rows and their values.
template <class K>
__global__ void __launch_bounds__(SortPolicy::kThreads) give_modes_kernel(Batch batch, const uint32_t* numbers) {
  const SegmentsView& segments = batch.call.segments;
  const int64_t step = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < batch.num_results(); i += step) {
    const Result result(batch, i);
    const uint64_t best = batch.call.indices[result.at];
    int64_t row = -1;
    K value = K(batch.call.fill);
    if (best != 0) {
      row = segments.row(numbers[result.sequence * segments.num_positions + uint32_t(~best)] / batch.count);
      value = static_cast<const K*>(batch.call.data)[batch.begin_of(result.sequence, segments.num_rows) + row * batch.call.inner];
    }
    batch.call.indices[result.at] = row;
    static_cast<K*>(batch.call.values)[result.at] = value;
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
    if (sequences == 0 || (call.wanted == Sorted::rows ? positions : call.segments.num_segments) == 0) return;
    if (positions >> 32 != 0) throw std::runtime_error("fastops: CUDA: columns can be sorted if they have fewer than 2^32 rows");
    batch = std::clamp<int64_t>(SortPolicy::kBatch / std::max<int64_t>(positions, 1), 1, sequences);
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
    if (bits == 0 || batch.elements == 0) return;
    check(cub::DeviceRadixSort::SortPairs(workspace + layout.sort, layout.sort_bytes, keys, numbers, batch.elements, 0, bits,
                                          stream));
  };
  constexpr int kKeyBits = 8 * sizeof(K), kThreads = SortPolicy::kThreads;
  const int64_t segments = batch.call.segments.num_segments, results = batch.call.wanted == Sorted::rows ? 0 : batch.count * segments;
  const int group_bits = bits_for(uint64_t(batch.count) * (segments + 1));
  Batch marked = batch;
  marked.with_key = kKeyBits + group_bits <= 64;
  const unsigned blocks = blocks_for(batch.elements, kThreads);
  const KeyOrder<K> order(batch.call.dtype, batch.call.descending);
  make_elements_kernel<K><<<blocks_for(std::max<int64_t>(batch.elements, results), kThreads), kThreads, 0, stream>>>(
      marked, order, keys.Current(), numbers.Current());
  check(cudaGetLastError());
  sort_by_bits(marked.with_key ? kKeyBits + group_bits : kKeyBits);
  if (!marked.with_key) {
    make_groups_kernel<<<blocks, kThreads, 0, stream>>>(batch, numbers.Current(), keys.Current());
    check(cudaGetLastError());
    sort_by_bits(group_bits);
  }
  if (batch.call.wanted == Sorted::rows) {
    give_rows_kernel<K><<<blocks, kThreads, 0, stream>>>(batch, numbers.Current());
    return check(cudaGetLastError());
  }
  if (batch.elements > 0) {
    count_runs_kernel<K><<<blocks, kThreads, 0, stream>>>(marked, order, keys.Current(), numbers.Current());
    check(cudaGetLastError());
  }
  if (batch.call.wanted == Sorted::mode) {
    give_modes_kernel<K><<<blocks_for(results, kThreads), kThreads, 0, stream>>>(batch, numbers.Current());
    check(cudaGetLastError());
  }
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
