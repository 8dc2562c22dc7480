// Elements of given rank, and the greatest or least ones, of each segment and column: by selection, without sorting.
//
// A segment of up to kChunk rows is taken by the lanes of a warp or some of them, rows times neighbouring columns. The key
// (keys.h) of a rank is found bit by bit from the top, by counting how many keys are less than a trial; keys are in registers,
// but those of long columns, which are read again each time, from the caches. A longer segment is cut into windows of kChunk
// positions, a block each: in every pass a histogram of one byte is counted, of the elements that lead to the rank by the bytes
// above, and a warp then picks the next byte. The bytes of the key come first, then those of the position, so that of equal
// elements the first rows come first. Counts are whole numbers: atomic additions of them give the same in any order. The rows
// that `top` selects are listed, and then ordered by counting how many of the list come before each.
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

#include "cuda/launch.cuh"
#include "cuda/vectors.cuh"
#include "dispatch.h"
#include "kernels.h"
#include "keys.h"

namespace fastops::cuda {
namespace {

struct SelectPolicy {
  static constexpr int kThreads = 256;
  static constexpr int kChunk = 1024;        // guess: rows that a warp takes, and a block of a longer segment
  static constexpr int kKeptKeys = 8;        // guess: keys that a lane has in registers; others are read for every bit
  static constexpr int kLeastRows = 8;       // guess: rows side by side in a warp, though most segments are shorter
  static constexpr int kWindowColumns = 16;  // guess: of a block; their histograms take 16 KiB of shared memory
};

constexpr int kDigits = 256;
constexpr unsigned kWarp = 0xffffffffu;

template <class K>
using Word = std::conditional_t<sizeof(K) == 8, uint64_t, uint32_t>;

template <class K>
__device__ __forceinline__ Word<K> key_at(const SelectCall& call, const KeyOrder<K>& order, int64_t slice, int64_t row, int64_t column) {
  return order.key(static_cast<const K*>(call.data)[(slice * call.segments.num_rows + row) * call.inner + column]);
}

__device__ __forceinline__ int64_t place_of(const SelectCall& call, int64_t slice, int64_t segment, int64_t i, int64_t column) {
  return ((slice * call.segments.num_segments + segment) * call.count + i) * call.inner + column;
}

// Result i of a segment: what stands in a row, or nothing for -1.
template <class K>
__device__ __forceinline__ void put(const SelectCall& call, int64_t slice, int64_t segment, int64_t i, int64_t column,
                                    int64_t row) {
  const int64_t at = place_of(call, slice, segment, i, column);
  const K* data = static_cast<const K*>(call.data);
  static_cast<K*>(call.values)[at] = row < 0 ? K(call.fill) : data[(slice * call.segments.num_rows + row) * call.inner + column];
  if (call.indices) call.indices[at] = row;
}

// The rank of result i among the rows of a segment, or -1. Of `top`, that of the last one to be listed.
__device__ __forceinline__ int64_t wanted_rank(const SelectCall& call, int64_t length, int64_t i) {
  if (call.selection == Selection::median) return (length - 1) / 2;
  if (call.selection == Selection::top) return min(call.count, length) - 1;
  if (!takes_two(call.interpolation)) return QuantilePlace(call.q[i], length, call.interpolation).low;
  const QuantilePlace place(call.q[i / 2], length, call.interpolation);
  return i % 2 == 0 ? place.low : place.high;
}

// Combines what lanes have that are `first` apart, 2 * first, and so on, below `end`.
template <class V, class Combine>
__device__ __forceinline__ V over_lanes(V value, int first, int end, Combine&& combine) {
  for (int step = first; step < end; step *= 2) value = combine(value, __shfl_xor_sync(kWarp, value, step));
  return value;
}

// A segment of at most kChunk rows, as the lane that has its rows lane_row, lane_row + rows, ... of a column sees it. A warp has
// several such groups of lanes, `columns` neighbouring columns of one segment and perhaps more segments.
template <class K>
struct WarpColumn {
  static constexpr int kKept = SelectPolicy::kKeptKeys;

  const SelectCall& call;
  const KeyOrder<K>& order;
  int64_t slice, begin, column;
  int length, longest;  // rows of the segment, and of the longest one that the warp has
  int columns, rows, lane_row;
  unsigned lanes;  // of the group
  Word<K> kept[kKept];

  // The element of a rank, as far as it must be known: it has the bits of `known` under `mask`, and `skip` such elements stand
  // before it.
  struct Found {
    Word<K> known, mask;
    int skip;
  };

  __device__ __forceinline__ int64_t row(int i) const { return call.segments.row(begin + i); }
  __device__ __forceinline__ Word<K> key(int i) const { return key_at(call, order, slice, row(i), column); }

  __device__ __forceinline__ void keep() {
#pragma unroll
    for (int k = 0; k < kKept; ++k) {
      kept[k] = 0;
      if (lane_row + k * rows < length) kept[k] = key(lane_row + k * rows);
    }
  }

  template <class Visit>
  __device__ __forceinline__ void for_each_key(Visit&& visit) const {
#pragma unroll
    for (int k = 0; k < kKept; ++k) {
      if (k * rows >= longest) return;
      if (lane_row + k * rows < length) visit(kept[k]);
    }
    for (int i = lane_row + kKept * rows; i < length; i += rows) visit(key(i));
  }

  template <class V, class Combine>
  __device__ __forceinline__ V over_group(V value, Combine&& combine) const {
    return over_lanes(value, columns, rows * columns, combine);
  }

  __device__ Found find(int rank) const {
    Word<K> all = ~Word<K>(0), any = 0;
    for_each_key([&](Word<K> x) { all &= x, any |= x; });
    all = over_group(all, [](Word<K> a, Word<K> b) { return a & b; });
    any = over_group(any, [](Word<K> a, Word<K> b) { return a | b; });
    // Bits that differ in some group of the warp.
    const Word<K> varying = over_lanes(Word<K>(length > 0 ? all ^ any : 0), 1, 32, [](Word<K> a, Word<K> b) { return a | b; });
    Found found{all, ~Word<K>(0), 0};
    int low = 0, high = length;
    for (Word<K> bit = Word<K>(1) << (8 * sizeof(K) - 1); bit > 0; bit >>= 1) {
      if (!(varying & bit)) continue;
      const Word<K> above = ~(bit - 1), trial = (found.known & above) | bit;
      int less = 0;
      for_each_key([&](Word<K> x) { less += x < trial; });
      less = over_group(less, [](int a, int b) { return a + b; });
      if (less <= rank) {
        found.known |= bit, low = less;
      } else {
        high = less;
      }
      if (__all_sync(kWarp, high - low <= 1)) {
        found.mask = above;
        break;
      }
    }
    found.skip = rank - low;
    return found;
  }

  __device__ Word<K> greatest() const {
    Word<K> greatest = 0;
    for_each_key([&](Word<K> x) { greatest = max(greatest, x); });
    return over_group(greatest, [](Word<K> a, Word<K> b) { return max(a, b); });
  }

  // The row of what was found.
  __device__ int64_t locate(const Found& found) const {
    int skip = found.skip, at = -1;
    for (int i = 0; i < longest && __any_sync(kWarp, at < 0); i += rows) {
      const bool match = i + lane_row < length && ((key(i + lane_row) ^ found.known) & found.mask) == 0;
      unsigned matches = __ballot_sync(kWarp, match) & lanes;
      const int count = __popc(matches);
      if (at < 0 && skip < count) {
        for (int k = 0; k < skip; ++k) matches &= matches - 1;
        at = i + (__ffs(matches) - 1) % (rows * columns) / columns;
      }
      skip -= count;
    }
    return at < 0 ? -1 : row(at);
  }

  // Lists the rows up to what was found, in their order: `listed` is the first place, the next one `step` further on.
  __device__ void list(const Found& found, int64_t* listed, int64_t step, bool is_real) const {
    const unsigned before = lanes & ((1u << threadIdx.x % 32) - 1);
    int skip = found.skip, filled = 0;
    for (int i = 0; i < longest; i += rows) {
      const bool inside = i + lane_row < length;
      const Word<K> x = inside ? key(i + lane_row) & found.mask : 0, last = found.known & found.mask;
      const unsigned matches = __ballot_sync(kWarp, inside && x == last) & lanes;
      const bool taken = inside && (x < last || (x == last && __popc(matches & before) <= skip));
      const unsigned all = __ballot_sync(kWarp, taken) & lanes;
      if (taken && is_real) listed[(filled + __popc(all & before)) * step] = row(i + lane_row);
      skip -= __popc(matches);
      filled += __popc(all);
    }
  }
};

// A warp takes `columns` columns of 32 / (rows * columns) segments; both are powers of two.
template <class K>
__global__ void __launch_bounds__(SelectPolicy::kThreads)
    select_short_kernel(SelectCall call, KeyOrder<K> order, int columns, int rows, int64_t* listed) {
  const int lane = threadIdx.x % 32, lanes_of_segment = rows * columns, in_segment = lane % lanes_of_segment;
  unsigned lanes = 0;
  for (int r = 0; r < rows; ++r) lanes |= 1u << (lane - in_segment + r * columns + lane % columns);
  const int64_t tiles = ceil_div(call.inner, columns), segments = call.segments.num_segments, all = call.outer * segments;
  const int together = 32 / lanes_of_segment;
  const int64_t units = ceil_div(all, together) * tiles, step = int64_t(gridDim.x) * (blockDim.x / 32);
  for (int64_t unit = int64_t(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32; unit < units; unit += step) {
    const int64_t wanted_segment = unit / tiles * together + lane / lanes_of_segment, stacked = min(wanted_segment, all - 1);
    const int64_t slice = stacked / segments, segment = stacked % segments;
    const int64_t begin = call.segments.begin(segment), whole = call.segments.end(segment, begin) - begin;
    const bool is_mine = wanted_segment < all && whole <= SelectPolicy::kChunk;
    if (!__any_sync(kWarp, is_mine)) continue;
    const int length = is_mine ? int(whole) : 0;
    const int longest = over_lanes(length, 1, 32, [](int a, int b) { return max(a, b); });
    const int64_t wanted = unit % tiles * columns + lane % columns, column = min(wanted, call.inner - 1);
    const bool is_real = is_mine && wanted < call.inner;  // the lanes of others keep company
    WarpColumn<K> here{call, order, slice, begin, column, length, longest, columns, rows, in_segment / columns, lanes, {}};
    here.keep();
    if (call.selection == Selection::top) {
      here.list(here.find(int(wanted_rank(call, length, 0))), listed + place_of(call, slice, segment, 0, column), call.inner, is_real);
      continue;
    }
    const Word<K> greatest = here.greatest();  // no lane goes its own way before the last vote
    const bool has_nan = length > 0 && order.is_nan(K(greatest));
    for (int64_t i = 0; i < call.count; ++i) {
      const int64_t rank = wanted_rank(call, length, i);
      auto found = here.find(int(max(rank, int64_t(0))));
      if (call.selection == Selection::median) found.skip = 0;
      if (has_nan) found = {K(~K(0)), ~Word<K>(0), 0};
      const int64_t row = here.locate(found);
      if (is_real && in_segment < columns) put<K>(call, slice, segment, i, column, length == 0 || (rank < 0 && !has_nan) ? -1 : row);
    }
  }
}

// What is known of a rank in a long segment and column.
struct State {
  uint64_t key, position;  // their leading bytes, zeros behind
  int64_t rank;            // among the elements that have these bytes; -1: there is none
};

// The arrays of long segments, each in the slot of the window where it begins: no two begin in the same one.
struct LongSegments {
  int64_t slots;
  int64_t* segment;                 // [slots] which one; -1: none
  unsigned long long* histogram;    // [outer, slots, inner, kDigits], all 0 between passes
  State* state;                     // [outer, slots, inner]
  int* has_nan;                     // [outer, slots, inner]
  unsigned long long* listed;       // [outer, slots, inner] how many rows are in the list

  __device__ __forceinline__ int64_t at(const SelectCall& call, int64_t slice, int64_t slot, int64_t column) const {
    return (slice * slots + slot) * call.inner + column;
  }
};

// A pass over one byte: of the key, from the top, then of the position.
struct Pass {
  bool of_position, is_first;
  int shift;
};

__global__ void __launch_bounds__(SelectPolicy::kThreads) mark_long_kernel(SelectCall call, LongSegments longs) {
  const int64_t step = int64_t(gridDim.x) * blockDim.x;
  for (int64_t s = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; s < call.segments.num_segments; s += step) {
    const int64_t begin = call.segments.begin(s);
    if (call.segments.end(s, begin) - begin > SelectPolicy::kChunk) longs.segment[begin / SelectPolicy::kChunk] = s;
  }
}

// Positions [first, last) of a long segment that begins at `begin` and has a slot.
struct WindowPart {
  int64_t slot, begin, first, last;
};

// The part of a window that belongs to the long segment at a position of it, if there is one. Found by a binary search.
__device__ __forceinline__ WindowPart part_at(const SelectCall& call, const LongSegments& longs, int64_t position, int64_t first,
                                              int64_t last) {
  const SegmentsView& segments = call.segments;
  int64_t low = 0, high = segments.num_segments;  // the last segment that begins at the position or before it
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    if (segments.begin(middle) <= position) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const int64_t begin = segments.begin(low), end = segments.end(low, begin), slot = begin / SelectPolicy::kChunk;
  if (longs.segment[slot] != low || position < begin || position >= end) return {0, 0, 0, 0};
  return {slot, begin, max(begin, first), min(end, last)};
}

// Calls visit(part, slice, first column) for the parts of each window, with all threads of the block. A block takes one window
// and `columns` columns: thread t has column t % columns of them.
template <class Visit>
__device__ __forceinline__ void for_each_part(const SelectCall& call, const LongSegments& longs, int columns, Visit&& visit) {
  __shared__ WindowPart parts[2];
  const int64_t tiles = ceil_div(call.inner, columns), windows = ceil_div(call.segments.num_positions, SelectPolicy::kChunk);
  const int64_t units = call.outer * windows * tiles;
  for (int64_t unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const int64_t tile = unit % tiles, window = unit / tiles % windows, slice = unit / tiles / windows;
    const int64_t first = window * SelectPolicy::kChunk, last = min(first + SelectPolicy::kChunk, call.segments.num_positions);
    if (threadIdx.x < 2) {  // a window has an end of one, the beginning of another, or both
      const WindowPart part = part_at(call, longs, threadIdx.x == 0 ? first : last - 1, first, last);
      parts[threadIdx.x] = threadIdx.x == 1 && part.begin <= first ? WindowPart{0, 0, 0, 0} : part;
    }
    __syncthreads();
    const WindowPart both[2] = {parts[0], parts[1]};
    __syncthreads();
    for (const WindowPart& part : both) {
      if (part.last > part.first) visit(part, slice, tile * columns);
    }
  }
}

template <class K>
__global__ void __launch_bounds__(SelectPolicy::kThreads)
    histogram_kernel(SelectCall call, KeyOrder<K> order, LongSegments longs, Pass pass, int columns) {
  __shared__ unsigned counts[SelectPolicy::kWindowColumns * kDigits];
  for_each_part(call, longs, columns, [&](const WindowPart& part, int64_t slice, int64_t first_column) {
    for (int i = threadIdx.x; i < columns * kDigits; i += blockDim.x) counts[i] = 0;
    __syncthreads();
    const int own = threadIdx.x % columns, rows = blockDim.x / columns;
    const int64_t column = first_column + own, state_at = longs.at(call, slice, part.slot, column);
    if (column < call.inner) {
      const State state = pass.is_first ? State{} : longs.state[state_at];
      bool has_nan = false;
      if (state.rank >= 0) {
        for (int64_t position = part.first + threadIdx.x / columns; position < part.last; position += rows) {
          const Word<K> key = key_at(call, order, slice, call.segments.row(position), column);
          const uint64_t word = pass.of_position ? uint64_t(position - part.begin) : uint64_t(key);
          const uint64_t known = pass.of_position ? state.position : state.key;
          if (pass.of_position && key != state.key) continue;
          if (!pass.is_first && ((word ^ known) >> pass.shift >> 8) != 0) continue;
          if (pass.is_first && call.selection != Selection::top && order.is_nan(K(key))) has_nan = true;
          atomicAdd(&counts[own * kDigits + int(word >> pass.shift & (kDigits - 1))], 1u);
        }
      }
      if (has_nan) longs.has_nan[state_at] = 1;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < columns * kDigits; i += blockDim.x) {
      if (counts[i] == 0) continue;
      const int64_t at = longs.at(call, slice, part.slot, first_column + i / kDigits) * kDigits + i % kDigits;
      atomicAdd(&longs.histogram[at], static_cast<unsigned long long>(counts[i]));
    }
    __syncthreads();
  });
}

// The next byte of rank i. One warp takes one slot and column; a lane has the digits 8 * lane to 8 * lane + 7.
__global__ void __launch_bounds__(SelectPolicy::kThreads)
    pick_digit_kernel(SelectCall call, LongSegments longs, Pass pass, bool is_last_of_key, uint64_t nan_key, int64_t i) {
  constexpr int kOfLane = kDigits / 32;
  const int lane = threadIdx.x % 32;
  const int64_t units = call.outer * longs.slots * call.inner, step = int64_t(gridDim.x) * (blockDim.x / 32);
  for (int64_t unit = int64_t(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32; unit < units; unit += step) {
    const int64_t segment = longs.segment[unit / call.inner % longs.slots];
    if (segment < 0) continue;
    unsigned long long* const digits = longs.histogram + unit * kDigits + lane * kOfLane;
    int64_t counts[kOfLane], total = 0;
    for (int d = 0; d < kOfLane; ++d) {
      counts[d] = int64_t(digits[d]);
      digits[d] = 0;
      total += counts[d];
    }
    int64_t before = total;  // of the lanes up to this one, and then of those before it
    for (int distance = 1; distance < 32; distance *= 2) {
      const int64_t other = __shfl_up_sync(kWarp, before, distance);
      if (lane >= distance) before += other;
    }
    before -= total;

    State state = pass.is_first ? State{0, 0, 0} : longs.state[unit];
    const bool has_nan = longs.has_nan[unit] != 0;
    if (pass.is_first) {
      const int64_t begin = call.segments.begin(segment);
      state.rank = wanted_rank(call, call.segments.end(segment, begin) - begin, i);
      if (has_nan) state.rank = 0;
    }
    const bool is_here = state.rank >= before && state.rank < before + total;
    const unsigned holder = __ballot_sync(kWarp, is_here);
    uint64_t digit = 0;
    int64_t rank = state.rank;
    if (is_here) {
      rank -= before;
      int d = 0;
      for (; d < kOfLane - 1 && rank >= counts[d]; ++d) rank -= counts[d];
      digit = uint64_t(lane * kOfLane + d);
    }
    if (holder != 0) {
      digit = __shfl_sync(kWarp, digit, __ffs(holder) - 1);
      rank = __shfl_sync(kWarp, rank, __ffs(holder) - 1);
    }
    __syncwarp();  // all have read the state
    if (lane > 0) continue;
    state.rank = rank;
    (pass.of_position ? state.position : state.key) |= digit << pass.shift;
    // Of a NaN, and of what the median is, the first row is wanted.
    if (has_nan && !pass.of_position) state.key = nan_key >> pass.shift << pass.shift, state.rank = 0;
    if (is_last_of_key && call.selection == Selection::median && state.rank > 0) state.rank = 0;
    longs.state[unit] = state;
  }
}

// Result i of long segments. One thread takes one slot and column.
template <class K>
__global__ void __launch_bounds__(SelectPolicy::kThreads) put_long_kernel(SelectCall call, LongSegments longs, int64_t i) {
  const int64_t units = call.outer * longs.slots * call.inner, step = int64_t(gridDim.x) * blockDim.x;
  for (int64_t unit = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; unit < units; unit += step) {
    const int64_t segment = longs.segment[unit / call.inner % longs.slots];
    if (segment < 0) continue;
    const State state = longs.state[unit];
    const int64_t begin = call.segments.begin(segment), length = call.segments.end(segment, begin) - begin;
    const bool is_there = state.rank >= 0 && int64_t(state.position) < length;
    put<K>(call, unit / call.inner / longs.slots, segment, i, unit % call.inner,
        is_there ? call.segments.row(begin + int64_t(state.position)) : -1);
  }
}

// The rows of long segments up to the last one of `top`, listed in any order.
template <class K>
__global__ void __launch_bounds__(SelectPolicy::kThreads)
    list_long_kernel(SelectCall call, KeyOrder<K> order, LongSegments longs, int columns, int64_t* listed) {
  for_each_part(call, longs, columns, [&](const WindowPart& part, int64_t slice, int64_t first_column) {
    const int64_t column = first_column + threadIdx.x % columns, state_at = longs.at(call, slice, part.slot, column);
    if (column >= call.inner) return;
    const State last = longs.state[state_at];
    const int64_t segment = longs.segment[part.slot];
    for (int64_t position = part.first + threadIdx.x / columns; position < part.last; position += blockDim.x / columns) {
      const int64_t row = call.segments.row(position);
      const uint64_t key = key_at(call, order, slice, row, column);
      if (key > last.key || (key == last.key && uint64_t(position - part.begin) > last.position)) continue;
      const int64_t place = int64_t(atomicAdd(&longs.listed[state_at], 1ull));
      if (place < call.count) listed[place_of(call, slice, segment, place, column)] = row;
    }
  });
}

// Puts the listed rows into their order: each goes behind those of the list that come before it. One thread takes one place.
template <class K>
__global__ void __launch_bounds__(SelectPolicy::kThreads) order_list_kernel(SelectCall call, KeyOrder<K> order, const int64_t* listed) {
  const int64_t units = call.outer * call.segments.num_segments * call.count * call.inner, step = int64_t(gridDim.x) * blockDim.x;
  for (int64_t unit = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; unit < units; unit += step) {
    const int64_t column = unit % call.inner, i = unit / call.inner % call.count, stacked = unit / call.inner / call.count;
    const int64_t slice = stacked / call.segments.num_segments, segment = stacked % call.segments.num_segments;
    const int64_t begin = call.segments.begin(segment), count = min(call.count, call.segments.end(segment, begin) - begin);
    if (i >= count) {
      put<K>(call, slice, segment, i, column, -1);
      continue;
    }
    const int64_t* const list = listed + place_of(call, slice, segment, 0, column);
    const auto row_at = [&](int64_t k) {
      const int64_t row = list[k * call.inner];
      return uint64_t(row) < uint64_t(call.segments.num_rows) ? row : 0;  // where offsets are wrong, the list may have gaps
    };
    const int64_t row = row_at(i);
    const Word<K> key = key_at(call, order, slice, row, column);
    int64_t rank = 0;
    for (int64_t k = 0; k < count; ++k) {
      const int64_t other_row = row_at(k);
      const Word<K> other = call.sorted ? key_at(call, order, slice, other_row, column) : key;
      rank += other < key || (other == key && other_row < row);
    }
    put<K>(call, slice, segment, rank, column, row);
  }
}

// From the rows that were selected to what lies between them. One thread takes one result.
template <class T>
__global__ void __launch_bounds__(SelectPolicy::kThreads) interpolate_kernel(SelectCall call) {
  using V = compute_t<T>;
  const int64_t per_quantile = takes_two(call.interpolation) ? 2 : 1, segments = call.segments.num_segments;
  const int64_t all = call.outer * segments, units = call.count / per_quantile * all * call.inner, step = int64_t(gridDim.x) * blockDim.x;
  for (int64_t unit = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; unit < units; unit += step) {
    const int64_t column = unit % call.inner, at = unit / call.inner % all, i = unit / call.inner / all, s = at % segments;
    const int64_t begin = call.segments.begin(s);
    const QuantilePlace place(call.q[i], call.segments.end(s, begin) - begin, call.interpolation);
    const T* a = static_cast<const T*>(call.values) + (at * call.count + i * per_quantile) * call.inner + column;
    const T b = a[(per_quantile - 1) * call.inner];
    const V share = V(place.share);
    static_cast<T*>(call.between)[unit] = store_as<T>(between(load_as<V>(*a), load_as<V>(b), share));
    if (call.shares && at < segments && column == 0) {
      V* shares = static_cast<V*>(call.shares) + s * call.count + i * per_quantile;
      shares[0] = 1 - share;
      if (per_quantile == 2) shares[1] = share;
    }
  }
}

// Parts of the workspace, in bytes from its beginning.
struct Layout {
  size_t listed = 0, histogram = 0, counts = 0, nans = 0, segments = 0, states = 0, end = 0;
  int64_t slots = 0;

  explicit Layout(const SelectCall& call) {
    const auto take = [&](int64_t bytes) {
      const size_t at = end;
      end += (size_t(bytes) + 255) / 256 * 256;
      return at;
    };
    if (call.selection == Selection::top) listed = take(call.outer * call.segments.num_segments * call.count * call.inner * 8);
    if (call.segments.num_positions <= SelectPolicy::kChunk) return;
    slots = call.segments.num_positions / SelectPolicy::kChunk + 1;
    const int64_t columns = call.outer * slots * call.inner;
    histogram = take(columns * kDigits * 8);  // zeros at first, and so are counts and nans
    counts = take(columns * 8);
    nans = take(columns * 4);
    segments = take(slots * 8);
    states = take(columns * int64_t(sizeof(State)));
  }
};

int power_of_two(int64_t inner, int limit) {
  int columns = 1;
  while (columns < inner && columns < limit) columns *= 2;
  return columns;
}

template <class K>
void select_wide(const SelectCall& call, unsigned char* workspace, cudaStream_t stream) {
  constexpr int kThreads = SelectPolicy::kThreads;
  const SegmentsView& segments = call.segments;
  const int64_t all = call.outer * segments.num_segments;
  const KeyOrder<K> order(call.dtype, call.selection == Selection::top && call.largest);
  const Layout layout(call);
  int64_t* const listed = reinterpret_cast<int64_t*>(workspace + layout.listed);
  const int columns = power_of_two(call.inner, 32);
  const int rows = power_of_two(std::max<int64_t>(segments.num_positions / segments.num_segments, SelectPolicy::kLeastRows), 32 / columns);
  const int64_t warps = ceil_div(all, 32 / (rows * columns)) * ceil_div(call.inner, columns);
  select_short_kernel<K><<<blocks_for(warps, kThreads / 32), kThreads, 0, stream>>>(call, order, columns, rows, listed);
  check(cudaGetLastError());

  if (layout.slots > 0) {
    const auto part = [&](size_t at) { return static_cast<void*>(workspace + at); };
    const LongSegments longs{layout.slots,
                             static_cast<int64_t*>(part(layout.segments)),
                             static_cast<unsigned long long*>(part(layout.histogram)),
                             static_cast<State*>(part(layout.states)),
                             static_cast<int*>(part(layout.nans)),
                             static_cast<unsigned long long*>(part(layout.counts))};
    check(cudaMemsetAsync(longs.histogram, 0, layout.segments - layout.histogram, stream));
    check(cudaMemsetAsync(longs.segment, 0xff, layout.slots * sizeof(int64_t), stream));
    mark_long_kernel<<<blocks_for(segments.num_segments, kThreads), kThreads, 0, stream>>>(call, longs);
    check(cudaGetLastError());

    const int window_columns = power_of_two(call.inner, SelectPolicy::kWindowColumns);
    const int64_t windows = call.outer * ceil_div(segments.num_positions, SelectPolicy::kChunk) * ceil_div(call.inner, window_columns);
    const int64_t states = call.outer * layout.slots * call.inner;
    int position_bytes = 1;
    while (uint64_t(segments.num_positions - 1) >> (8 * position_bytes) != 0) ++position_bytes;
    const uint64_t nan_key = K(~K(0));
    const int64_t rounds = call.selection == Selection::top ? 1 : call.count;
    for (int64_t i = 0; i < rounds; ++i) {
      for (int byte = 0; byte < int(sizeof(K)) + position_bytes; ++byte) {
        const bool of_position = byte >= int(sizeof(K));
        const int behind = (of_position ? int(sizeof(K)) + position_bytes : int(sizeof(K))) - 1 - byte;
        const Pass pass{of_position, byte == 0, 8 * behind};
        histogram_kernel<K><<<blocks_for(windows, 1), kThreads, 0, stream>>>(call, order, longs, pass, window_columns);
        check(cudaGetLastError());
        pick_digit_kernel<<<blocks_for(states, kThreads / 32), kThreads, 0, stream>>>(call, longs, pass, !of_position && behind == 0,
                                                                                      nan_key, i);
        check(cudaGetLastError());
      }
      if (call.selection == Selection::top) {
        list_long_kernel<K><<<blocks_for(windows, 1), kThreads, 0, stream>>>(call, order, longs, window_columns, listed);
      } else {
        put_long_kernel<K><<<blocks_for(states, kThreads), kThreads, 0, stream>>>(call, longs, i);
      }
      check(cudaGetLastError());
    }
  }
  if (call.selection == Selection::top) {
    order_list_kernel<K><<<blocks_for(all * call.count * call.inner, kThreads), kThreads, 0, stream>>>(call, order, listed);
    check(cudaGetLastError());
  }
}

// One thread takes one segment and column, and so all entries of a row.
template <class T>
__global__ void __launch_bounds__(SelectPolicy::kThreads) place_kernel(PlaceCall call) {
  using V = compute_t<T>;
  const int64_t units = call.outer * call.num_segments * call.inner, step = int64_t(gridDim.x) * blockDim.x;
  for (int64_t unit = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; unit < units; unit += step) {
    const int64_t column = unit % call.inner, stacked = unit / call.inner, slice = stacked / call.num_segments;
    for (int64_t i = 0; i < call.count; ++i) {
      const int64_t at = (stacked * call.count + i) * call.inner + column, row = call.indices[at];
      if (uint64_t(row) >= uint64_t(call.num_rows)) continue;
      T& to = static_cast<T*>(call.out)[(slice * call.num_rows + row) * call.inner + column];
      to = store_as<T>(V(load_as<V>(to) + load_as<V>(static_cast<const T*>(call.values)[at])));
    }
  }
}

// One thread takes one segment and column.
template <class K>
__global__ void __launch_bounds__(SelectPolicy::kThreads) copy_ends_kernel(EndCall call, K fill) {
  const SegmentsView& segments = call.segments;
  const int64_t units = call.outer * segments.num_segments * call.inner, step = int64_t(gridDim.x) * blockDim.x;
  for (int64_t unit = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; unit < units; unit += step) {
    const int64_t column = unit % call.inner, stacked = unit / call.inner, slice = stacked / segments.num_segments;
    const int64_t segment = stacked % segments.num_segments, begin = segments.begin(segment), end = segments.end(segment, begin);
    const int64_t row = begin == end ? 0 : segments.row(call.last ? end - 1 : begin);
    const int64_t in_data = (slice * segments.num_rows + row) * call.inner + column;
    const K* const from = static_cast<const K*>(call.from);
    K* const to = static_cast<K*>(call.to);
    if (!call.back) {
      to[unit] = begin == end ? fill : from[in_data];
    } else if (begin != end) {
      to[in_data] = from[unit];
    }
  }
}

}  // namespace

size_t select_workspace(const SelectCall& call) {
  return Layout(call).end;
}

void select(const SelectCall& call, void* workspace, cudaStream_t stream) {
  if (call.outer * call.segments.num_segments * call.count * call.inner == 0) return;
  visit_width(call.dtype, [&](auto k) {
    select_wide<typename decltype(k)::type>(call, static_cast<unsigned char*>(workspace), stream);
  });
  if (call.selection != Selection::quantiles) return;
  const int64_t results = call.outer * call.segments.num_segments * call.count * call.inner;
  visit_floating(call.dtype, [&](auto t) {
    interpolate_kernel<typename decltype(t)::type>
        <<<blocks_for(results, SelectPolicy::kThreads), SelectPolicy::kThreads, 0, stream>>>(call);
    check(cudaGetLastError());
  });
}

void place(const PlaceCall& call, cudaStream_t stream) {
  const int64_t units = call.outer * call.num_segments * call.inner;
  if (units * call.count == 0) return;
  visit_floating(call.dtype, [&](auto t) {
    place_kernel<typename decltype(t)::type><<<blocks_for(units, SelectPolicy::kThreads), SelectPolicy::kThreads, 0, stream>>>(call);
    check(cudaGetLastError());
  });
}

void copy_ends(const EndCall& call, cudaStream_t stream) {
  if (call.outer * call.segments.num_segments * call.inner == 0) return;
  const int64_t element = size_of(call.dtype), row_bytes = call.inner * element;
  visit_unit(row_bytes, call.from, call.to, [&](auto unit) {
    using K = typename decltype(unit)::type;
    EndCall whole = call;
    whole.inner = row_bytes / int64_t(sizeof(K));
    unsigned char bytes[sizeof(K)];
    for (int64_t i = 0; i < int64_t(sizeof(K)); ++i) bytes[i] = static_cast<unsigned char>(call.fill >> 8 * (i % element));
    K fill;
    std::memcpy(&fill, bytes, sizeof(K));
    const int64_t units = call.outer * call.segments.num_segments * whole.inner;
    copy_ends_kernel<K><<<blocks_for(units, SelectPolicy::kThreads), SelectPolicy::kThreads, 0, stream>>>(whole, fill);
    check(cudaGetLastError());
  });
}

}  // namespace fastops::cuda
