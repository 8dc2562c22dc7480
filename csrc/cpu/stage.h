// Rows brought together in the first-level cache, from where they stand and in the type they are worked with.
#pragma once

#include "cpu/capability.h"

#include "cpu/vec.h"
#include "segments.h"

namespace FASTOPS_CPU_NAMESPACE {

inline constexpr int64_t kPrefetchRows = 24;  // gathered rows asked for ahead

// Rows at [position, position + n) of the sequence, columns [column, column + width), as E, `stride` apart.
template <class E, class T>
void stage_rows(const SegmentsView& segments, const T* data, int64_t inner, int64_t position, int64_t n, int64_t column,
                int64_t width, E* to, int64_t stride) {
  const auto copy = [](E* out, const T* from, int64_t count) FASTOPS_INLINE_LAMBDA {
    if constexpr (std::is_same_v<E, T>) {
      std::memcpy(out, from, count * sizeof(E));
    } else {
      int64_t c = 0;
      for (; c + kLanes<E> <= count; c += kLanes<E>) store(out + c, load<E>(from + c));
      for (; c < count; ++c) out[c] = load_as<E>(from[c]);
    }
  };
  if (!segments.order && inner == width && stride == width) return copy(to, data + position * inner, n * width);
  const int64_t known = segments.order ? segments.num_positions - kPrefetchRows : 0;  // before which to ask ahead
  for (int64_t i = 0; i < n; ++i, to += stride) {
    if (position + i < known) {
      const T* ahead = data + segments.row(position + i + kPrefetchRows) * inner + column;
      for (int64_t c = 0; c < width; c += 64 / int64_t(sizeof(T))) prefetch(ahead + c);
    }
    copy(to, data + segments.row(position + i) * inner + column, width);
  }
}

// And back to where they stand.
template <class E, class T>
void unstage_rows(const SegmentsView& segments, T* data, int64_t inner, int64_t position, int64_t n, int64_t column,
                  int64_t width, const E* from, int64_t stride) {
  const auto copy = [](T* to, const E* values, int64_t count) FASTOPS_INLINE_LAMBDA {
    if constexpr (std::is_same_v<E, T>) {
      std::memcpy(to, values, count * sizeof(E));
    } else {
      int64_t c = 0;
      for (; c + kLanes<E> <= count; c += kLanes<E>) store(to + c, unaligned<vec<E>>(values + c));
      for (; c < count; ++c) to[c] = store_as<T>(values[c]);
    }
  };
  if (!segments.order && inner == width && stride == width) return copy(data + position * inner, from, n * width);
  for (int64_t i = 0; i < n; ++i, from += stride) copy(data + segments.row(position + i) * inner + column, from, width);
}

// Calls body(first, last) for runs of stacked rows that belong to no segment.
template <class Body>
void for_rows_of_no_segment(const SegmentsView& segments, int64_t outer, Body&& body) {
  const int64_t rows = segments.num_rows, s = segments.num_segments;
  if (!segments.order) {  // only offsets that were never checked leave any
    const int64_t first = s > 0 ? segments.begin(0) : rows, last = s > 0 ? segments.clamped(s) : rows;
    for (int64_t o = 0; o < outer; ++o) {
      if (first > 0) body(o * rows, o * rows + first);
      if (last < rows) body(o * rows + std::max(last, first), (o + 1) * rows);
    }
  } else if (s == 0 || segments.clamped(s) < rows) {  // order lists all rows where nobody knew how many belong to none
    for (int64_t r = 0; r < rows; ++r) {
      if (uint64_t(segments.index[r]) < uint64_t(s)) continue;
      for (int64_t o = 0; o < outer; ++o) body(o * rows + r, o * rows + r + 1);
    }
  }
}

}  // namespace FASTOPS_CPU_NAMESPACE
