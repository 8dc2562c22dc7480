// The segments of all outer slices, one slice behind the other: segment g of the stack is segment g % S of slice
// g / S, and position p is position p % N of slice p / N. So keys (segments.h) run on from slice to slice, and a
// block or a group of lanes takes an equal range of them whether there is one long slice or a million short ones.
#pragma once

#include "segments.h"

namespace fastops::cuda {

// Where a chunk begins: row `first` of a segment that begins at position `begin`, all of the slice.
struct Place {
  int64_t slice, segment, begin, first;
};

// The chunks with keys in one range, and the rows that they have: those follow each other. Segments and rows of the
// tile are counted from its first.
struct TileEdges {
  int64_t segment, position;   // of the stack, where the tile begins
  int64_t first;               // rows of that segment before the tile
  int count, rows;             // segments and rows of the tile
  int whole_begin, whole_end;  // segments that the tile does not cut
};

struct StackedSegments {
  SegmentsView one;
  int64_t outer;

  FASTOPS_HD int64_t num_segments() const { return outer * one.num_segments; }
  FASTOPS_HD int64_t num_positions() const { return outer * one.num_positions; }
  FASTOPS_HD int64_t keys_of_slice() const { return one.num_positions + one.num_segments; }
  FASTOPS_HD int64_t num_keys() const { return outer * keys_of_slice(); }

  // Dividing 64-bit numbers takes as long as reading memory, so it is left out where there is nothing to divide.
  FASTOPS_HD int64_t slice_of(int64_t at, int64_t size) const { return outer == 1 ? 0 : at / size; }

  // The position after the last row of a segment of the stack.
  FASTOPS_HD int64_t end(int64_t stacked) const {
    if (outer == 1) return one.offsets[stacked + 1];
    const int64_t slice = stacked / one.num_segments;
    return slice * one.num_positions + one.begin(stacked - slice * one.num_segments + 1);
  }

#ifdef __CUDACC__
  // Whether the first chunk of a segment of a slice lies before the key. Offsets are taken as they are: wrong ones
  // lead to a wrong place, but to one that exists.
  __device__ __forceinline__ bool is_before(int64_t segment, int64_t key) const {
    return one.offsets[segment] + segment < key;
  }

  // Where the key would be among the segments of a slice if all were as long.
  __device__ __forceinline__ int64_t guess(int64_t key) const {
    return int64_t(double(key) * (double(one.num_segments) / double(keys_of_slice())));
  }

  // The first chunk whose key is at least `key`, given the slice, the key in it, and how many segments lie before it.
  // A chunk has a power of two of rows.
  __device__ __forceinline__ Place place(int64_t slice, int64_t key, int64_t before, int chunk) const {
    int64_t begin = 0;
    if (before > 0) {  // the last of them may still have chunks
      const int64_t s = before - 1, last = one.begin(s);
      begin = one.begin(before);
      const int64_t first = max(int64_t(0), (key - (last + s) + chunk - 1) & -int64_t(chunk));
      if (first < begin - last) return {slice, s, last, first};
    } else {
      begin = one.begin(0);
    }
    if (before == one.num_segments) return {slice + 1, 0, slice + 1 < outer ? one.begin(0) : 0, 0};
    return {slice, before, begin, 0};
  }

  // That place, found by one thread. Segments are often as long as each other, or nearly so: looking around the guess
  // first saves most of the steps then, and costs two if not.
  __device__ __forceinline__ Place find(int64_t key, int chunk) const {
    constexpr int kAround = 4;
    const int64_t slice = slice_of(key, keys_of_slice());
    if (slice >= outer) return {outer, 0, 0, 0};
    key -= slice * keys_of_slice();
    int64_t low = 0, high = one.num_segments;
    const int64_t guessed = guess(key), below = guessed - kAround, above = guessed + kAround;
    if (below >= 0) {
      if (is_before(below, key)) {
        low = below + 1;
      } else {
        high = below;
      }
    }
    if (above < high) {
      if (is_before(above, key)) {
        low = above + 1;
      } else {
        high = above;
      }
    }
#pragma unroll 1
    while (low < high) {
      const int64_t middle = int64_t(uint64_t(low + high) / 2);
      if (is_before(middle, key)) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return place(slice, key, low, chunk);
  }

  // And found by kLanes neighbouring lanes: the first read covers the segments around the guess; on a miss the lanes
  // cut what is left into kLanes + 1 parts at a time. Only the first lane gets the place.
  template <int kLanes>
  __device__ __forceinline__ Place find_together(int64_t key, int chunk) const {
    const int lane = threadIdx.x % kLanes;
    const unsigned group = ((1u << kLanes) - 1) << (threadIdx.x % 32 / kLanes * kLanes);
    const int64_t slice = slice_of(key, keys_of_slice());
    if (slice >= outer) return {outer, 0, 0, 0};
    key -= slice * keys_of_slice();
    int64_t low = 0, high = one.num_segments;
    int64_t from = max(int64_t(0), min(guess(key) - kLanes / 2, high - kLanes));
    const auto count_before = [&](int64_t s, int64_t end) {
      return __popc(__ballot_sync(group, s < end && is_before(s, key)) & group);
    };
    for (;;) {
      const int before = count_before(from + lane, high);
      if (before > 0) low = from + before;
      if (before < kLanes) high = from + before;
      if (low >= high) break;
#pragma unroll 1
      while (high - low > kLanes) {
        const int64_t step = (high - low) / (kLanes + 1) + 1;
        const int parts = count_before(low + (lane + 1) * step - 1, high);
        if (parts < kLanes) high = min(high, low + (parts + 1) * step - 1);
        low += parts * step;
      }
      from = low;
    }
    if (lane > 0) return {};
    return place(slice, key, low, chunk);
  }

  // Tile number `tile` of `keys` keys each, found by the first 2 * kLanes threads of a block for the first of them,
  // which gets true.
  template <int kLanes>
  __device__ __forceinline__ bool find_tile(int64_t tile, int keys, int chunk, TileEdges& edges) const {
    const Place at = find_together<kLanes>((tile + threadIdx.x / kLanes) * keys, chunk);
    const int64_t segment = at.slice * one.num_segments + at.segment;
    const int64_t position = at.slice * one.num_positions + at.begin + at.first;
    constexpr unsigned kBoth = (1u << kLanes << kLanes) - 1;
    const int64_t last_segment = __shfl_sync(kBoth, segment, kLanes),
                  last_position = __shfl_sync(kBoth, position, kLanes);
    const bool goes_on = __shfl_sync(kBoth, int(at.first > 0), kLanes);
    if (threadIdx.x > 0) return false;
    // Within these bounds for offsets that ascend, and by force for others.
    const int count = int(max(int64_t(0), min(last_segment - segment + goes_on, int64_t(keys + 1))));
    const int rows = int(max(int64_t(0), min(last_position - position, int64_t(keys + chunk))));
    edges = {segment, position, at.first, count, rows, at.first > 0 && count > 0, count - goes_on};
    return true;
  }

  // Where the segments of a tile end, counted in its first `rows` rows, by all threads of a block: segment i at starts[i + 1].
  __device__ __forceinline__ void find_ends(const TileEdges& edges, int rows, uint16_t* starts) const {
#pragma unroll 1
    for (int i = threadIdx.x; i < edges.count; i += blockDim.x) {
      starts[i + 1] = uint16_t(max(int64_t(0), min(end(edges.segment + i) - edges.position, int64_t(rows))));
    }
  }

  // The first row of segment i of a tile, whose segments end where starts[1], starts[2], ... say. `gaps`: before the first
  // segment of a slice there may be rows of no segment.
  __device__ __forceinline__ int start_in_tile(const TileEdges& edges, const uint16_t* starts, int i, bool gaps) const {
    if (gaps && i > 0) {
      const int64_t stacked = edges.segment + i, slice = stacked / one.num_segments;
      if (stacked == slice * one.num_segments) {
        const int64_t begin = slice * one.num_positions + one.begin(0) - edges.position;
        return int(max(int64_t(0), min(begin, int64_t(edges.rows))));
      }
    }
    return starts[i];
  }

  // Where a segment of the stack begins and how many rows it has; false if there is no such segment.
  __device__ __forceinline__ bool find_segment(int64_t stacked, int64_t& begin, int64_t& length) const {
    if (stacked < 0 || stacked >= num_segments()) return false;
    const int64_t slice = slice_of(stacked, one.num_segments), s = stacked - slice * one.num_segments, in_slice = one.begin(s);
    begin = slice * one.num_positions + in_slice;
    length = one.end(s, in_slice) - in_slice;
    return true;
  }
#endif
};

#ifdef __CUDACC__
// The segment of a tile that has row `end` - 1, or the last one.
__device__ __forceinline__ int segment_with_row(const uint16_t* starts, int count, int end) {
  int low = 0, high = count - 1;
#pragma unroll 1
  while (low < high) {
    const int middle = unsigned(low + high) / 2;
    if (starts[middle + 1] >= end) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

// Notes, by all threads of a block, which segment stands at the end of each window of `chunk` positions that ends in a tile,
// if it is longer than a chunk, or else -1. The last window of the stack may be shorter.
template <class StartOf>
__device__ __forceinline__ void cover_windows(const StackedSegments& stack, const TileEdges& edges, const uint16_t* starts,
                                              int log2_chunk, StartOf&& start_of, int64_t* covering) {
  const int chunk = 1 << log2_chunk, before = int(edges.position & (chunk - 1));
  const bool last = edges.rows > 0 && edges.position + edges.rows == stack.num_positions();
  const int windows = (before + edges.rows + (last ? chunk - 1 : 0)) >> log2_chunk;
#pragma unroll 1
  for (int w = threadIdx.x; w < windows; w += blockDim.x) {
    const int i = segment_with_row(starts, edges.count, ((w + 1) << log2_chunk) - before);
    const bool is_long = i < edges.whole_begin || i >= edges.whole_end || starts[i + 1] - start_of(i) > chunk;
    covering[(edges.position >> log2_chunk) + w] = is_long ? edges.segment + i : -1;
  }
}
#endif

}  // namespace fastops::cuda
