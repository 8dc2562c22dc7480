// Sorting few numbers by counting how many are smaller than each: as many comparisons as there are pairs, but of vectors, and
// no branch that depends on them.
#pragma once

#include "cpu/vec.h"

namespace FASTOPS_CPU_NAMESPACE {

// guess: as far as it is quicker than counting halves and merging them
inline constexpr int64_t kCountRows = 64;

// Keys behind the last one that are read, though they mean nothing.
inline constexpr int64_t kBehind = 3 * kLanes<int64_t>;

// The ranks of kVectors vectors of keys from `first` on, among n: how many are smaller, or equal and before them. `distinct`:
// no two are equal.
template <bool distinct, int kVectors>
FASTOPS_HD void count_before(const int64_t* keys, int64_t n, int64_t first, int64_t* ranks) {
  constexpr int kWidth = kLanes<int64_t>;
  vec<int64_t> own[kVectors], rank[kVectors], place[kVectors];
  unrolled<kVectors>([&](auto v) FASTOPS_INLINE_LAMBDA {
    own[v] = unaligned<vec<int64_t>>(keys + first + v * kWidth);
    rank[v] = vec<int64_t>{} + (distinct ? 0 : first);  // as if all before were no greater
    for (int l = 0; l < kWidth; ++l) replace(place[v], l, first + v * kWidth + l);
  });
  const auto add = [&](auto v, const auto& holds, int64_t much) FASTOPS_INLINE_LAMBDA {
    if constexpr (kWidth == 1) {
      rank[v] += holds * much;
    } else {
      rank[v] -= holds * much;  // all bits of a lane say yes
    }
  };
  const int64_t last = distinct ? 0 : std::min(n, first + kVectors * kWidth);
  if constexpr (!distinct) {
    for (int64_t i = 0; i < first; ++i) {
      unrolled<kVectors>([&](auto v) FASTOPS_INLINE_LAMBDA { add(v, own[v] < keys[i], -1); });
    }
    for (int64_t i = first; i < last; ++i) {
      unrolled<kVectors>([&](auto v) FASTOPS_INLINE_LAMBDA { add(v, (keys[i] < own[v]) | ((keys[i] == own[v]) & (i < place[v])), 1); });
    }
  }
  for (int64_t i = last; i < n; ++i) {
    unrolled<kVectors>([&](auto v) FASTOPS_INLINE_LAMBDA { add(v, keys[i] < own[v], 1); });
  }
  unrolled<kVectors>([&](auto v) FASTOPS_INLINE_LAMBDA { std::memcpy(ranks + v * kWidth, &rank[v], sizeof(rank[v])); });
}

// The ranks of n keys, kCountRows at most, with kBehind more that may be read. So many may be written behind the ranks.
template <bool distinct>
FASTOPS_NOINLINE void rank_by_counting(const int64_t* keys, int64_t n, int64_t* ranks) {
  constexpr int64_t kWidth = kLanes<int64_t>;
  for (int64_t i = 0; i < n;) {
    const int64_t left = n - i;
    if (left <= kWidth) {
      count_before<distinct, 1>(keys, n, i, ranks + i);
      i += kWidth;
    } else if (left <= 2 * kWidth) {
      count_before<distinct, 2>(keys, n, i, ranks + i);
      i += 2 * kWidth;
    } else {
      count_before<distinct, 4>(keys, n, i, ranks + i);
      i += 4 * kWidth;
    }
  }
}

// Sorts n elements by what they are compared by; equal ones stay in their order. Behind them, kBehind more may be read.
template <class E>
FASTOPS_HD void sort_by_counting(const E* from, E* to, int64_t n) {
  int64_t ranks[kCountRows + kBehind];
  if constexpr (E::kDistinct) {
    static_assert(sizeof(E) == sizeof(int64_t));
    rank_by_counting<true>(&from->bits, n, ranks);
  } else {
    int64_t keys[kCountRows + kBehind];
    for (int64_t i = 0; i < n; ++i) keys[i] = from[i].compared();
    std::fill_n(keys + n, kBehind, int64_t(0));
    rank_by_counting<false>(keys, n, ranks);
  }
  for (int64_t i = 0; i < n; ++i) to[ranks[i]] = from[i];
}

}  // namespace FASTOPS_CPU_NAMESPACE
