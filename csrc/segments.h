// A grouping as kernels see it.
#pragma once

#include <cstdint>

#include "numeric.h"

namespace fastops {

// A tensor of row or segment numbers, 32 or 64 bits wide. The width is a run-time branch, always taken the same way
// and met once per segment, so that kernels need not be compiled twice.
struct IndexArray {
  const void* data = nullptr;
  bool wide = true;

  FASTOPS_HD explicit operator bool() const { return data != nullptr; }
  FASTOPS_HD int64_t operator[](int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i] : int64_t(static_cast<const int32_t*>(data)[i]);
  }
};

// Rows [offsets[s], offsets[s + 1]) of the grouped sequence belong to segment s; order says which row of the data
// stands at a position of that sequence. Offsets may be wrong when their check was switched off, so nobody reads them
// but through begin() and end(), which stay inside [0, num_rows].
struct SegmentsView {
  IndexArray offsets;        // [num_segments + 1]
  IndexArray order;          // [num_positions], none when rows already stand in order
  IndexArray index;          // [num_rows] the segment of each row, given exactly when order is
  int64_t num_segments = 0;  // S
  int64_t num_rows = 0;      // N
  int64_t num_positions = 0; // rows that belong to a segment: the length of order, else num_rows

  FASTOPS_HD int64_t clamped(int64_t s) const {
    const int64_t at = offsets[s];
    return at < 0 ? 0 : at > num_positions ? num_positions : at;
  }
  FASTOPS_HD int64_t begin(int64_t s) const { return clamped(s); }
  FASTOPS_HD int64_t end(int64_t s, int64_t begin) const {
    const int64_t at = clamped(s + 1);
    return at < begin ? begin : at;
  }
  // The row at a position. Where order is out of range, which only a caller who made it up can bring about, some row:
  // what comes out means nothing then, but nothing outside is touched.
  FASTOPS_HD int64_t row(int64_t position) const {
    if (!order) return position;
    const int64_t at = order[position];
    return uint64_t(at) < uint64_t(num_rows) ? at : 0;
  }
};

// Segments are cut into chunks of `chunk` rows. A chunk's key is the work before it, counted in rows and segments:
//     key(s, c) = offsets[s] + s + c * chunk,      0 <= c < max(1, ceil(length(s) / chunk))
// Keys ascend, and at most chunk + 1 units of work lie between neighbours, so equal ranges of keys are equal work
// however uneven the segments are. Where a segment is cut does not depend on its neighbours or on the thread count:
// results are the same bits wherever a segment stands.
struct Chunk {
  int64_t segment;
  int64_t first;  // rows of the segment before this chunk
};

FASTOPS_HD int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The first chunk whose key is at least `key`, given the number of segments whose first key lies before it.
FASTOPS_HD Chunk chunk_after(const SegmentsView& segments, int64_t segments_before, int64_t key, int64_t chunk) {
  if (segments_before > 0) {  // the last of them may still have chunks
    const int64_t s = segments_before - 1, begin = segments.begin(s);
    const int64_t first = ceil_div(key - (begin + s), chunk) * chunk;
    if (first < segments.end(s, begin) - begin) return {s, first};
  }
  return {segments_before, 0};
}

FASTOPS_HD Chunk first_chunk(const SegmentsView& segments, int64_t key, int64_t chunk) {
  int64_t low = 0, high = segments.num_segments;  // the first segment with key(s, 0) >= key lies in [low, high]
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (segments.begin(middle) + middle < key) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return chunk_after(segments, low, key, chunk);
}

// Partial results of segments longer than a chunk are kept in slots, two for each `chunk` rows. Chunks that start
// in the same window of `chunk` rows are at most two: one that continues a segment and one that begins another.
FASTOPS_HD int64_t num_slots(int64_t num_positions, int64_t chunk) { return 2 * (num_positions / chunk + 1); }
FASTOPS_HD int64_t slot(int64_t begin, int64_t first, int64_t chunk) {
  return 2 * ((begin + first) / chunk) + (first == 0);
}

}  // namespace fastops
