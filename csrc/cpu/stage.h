// Rows brought together in the first-level cache, from where they stand and in the type they are worked with.
#pragma once

#include "cpu/capability.h"

#include "cpu/vec.h"
#include "segments.h"

namespace FASTOPS_CPU_NAMESPACE {

inline constexpr int64_t kPrefetchRows = 24;  // gathered rows asked for ahead

// Calls body with the number of elements of a row, where they are so few that to copy them takes less than a call does, or with 0.
template <class Body>
FASTOPS_HD void for_narrow_rows(int64_t width, Body&& body) {
  switch (width) {
    case 1: return body(std::integral_constant<int64_t, 1>{});
    case 2: return body(std::integral_constant<int64_t, 2>{});
    case 3: return body(std::integral_constant<int64_t, 3>{});
    case 4: return body(std::integral_constant<int64_t, 4>{});
    case 8: return body(std::integral_constant<int64_t, 8>{});
    default: return body(std::integral_constant<int64_t, 0>{});
  }
}

// `count` elements to another type, kCount of them if that is not 0.
template <int64_t kCount = 0, class To, class From>
FASTOPS_HD void convert_run(To* to, const From* from, int64_t count) {
  using V = std::conditional_t<(sizeof(To) < sizeof(From)), From, To>;  // the one that is computed in
  if constexpr (std::is_same_v<To, From>) {
    std::memcpy(to, from, (kCount > 0 ? kCount : count) * sizeof(To));
  } else if constexpr (kCount > 0) {
    for (int64_t c = 0; c < kCount; ++c) to[c] = store_as<To>(load_as<V>(from[c]));
  } else {
    int64_t c = 0;
    for (; c + kLanes<V> <= count; c += kLanes<V>) store(to + c, load<V>(from + c));
    for (; c < count; ++c) to[c] = store_as<To>(load_as<V>(from[c]));
  }
}

// Rows at [position, position + n) of the sequence, columns [column, column + width), as E, `stride` apart.
template <class E, class T>
void stage_rows(const SegmentsView& segments, const T* data, int64_t inner, int64_t position, int64_t n, int64_t column,
                int64_t width, E* to, int64_t stride) {
  if (!segments.order && inner == width && stride == width) return convert_run(to, data + position * inner, n * width);
  const int64_t known = segments.order ? segments.num_positions - kPrefetchRows : 0;  // before which to ask ahead
  for_narrow_rows(width, [&](auto elements) FASTOPS_INLINE_LAMBDA {
    constexpr int64_t kElements = decltype(elements)::value;
    for (int64_t i = 0; i < n; ++i, to += stride) {
      if (position + i < known) {
        const T* ahead = data + segments.row(position + i + kPrefetchRows) * inner + column;
        for (int64_t c = 0; c < (kElements > 0 ? 1 : width); c += 64 / int64_t(sizeof(T))) prefetch(ahead + c);
      }
      convert_run<kElements>(to, data + segments.row(position + i) * inner + column, width);
    }
  });
}

// And back to where they stand.
template <class E, class T>
void unstage_rows(const SegmentsView& segments, T* data, int64_t inner, int64_t position, int64_t n, int64_t column,
                  int64_t width, const E* from, int64_t stride) {
  if (!segments.order && inner == width && stride == width) return convert_run(data + position * inner, from, n * width);
  for_narrow_rows(width, [&](auto elements) FASTOPS_INLINE_LAMBDA {
    constexpr int64_t kElements = decltype(elements)::value;
    for (int64_t i = 0; i < n; ++i, from += stride) {
      convert_run<kElements>(data + segments.row(position + i) * inner + column, from, width);
    }
  });
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
