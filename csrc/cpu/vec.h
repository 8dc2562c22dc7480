// Vectors of kVectorBytes, as the compiler's own vector type: the operators and ?: work on every lane, so the algebra
// of reducers.h serves for them unchanged. Where the compiler has no such type, a vector is one number.
#pragma once

#include "cpu/capability.h"

#if FASTOPS_CAPABILITY > 0
#include <immintrin.h>
#endif

#include "numeric.h"
#include "reducers.h"

namespace FASTOPS_CPU_NAMESPACE {

#if FASTOPS_VECTOR_EXTENSION
// Lambdas in the inner loops: accumulators stay in registers only if every call is inlined.
#define FASTOPS_INLINE_LAMBDA __attribute__((always_inline))
#define FASTOPS_NOINLINE __attribute__((noinline))
template <class T, int kCount>
struct Vector {
  typedef T type __attribute__((vector_size(kCount * sizeof(T))));
};
template <class T>
inline constexpr int kLanes = kVectorBytes / int(sizeof(T));
#else
#define FASTOPS_INLINE_LAMBDA
#define FASTOPS_NOINLINE
template <class T, int kCount>
struct Vector {
  typedef T type;
};
template <class T>
inline constexpr int kLanes = 1;
#endif

// T, kLanes<T> of it.
template <class T>
using vec = typename Vector<T, kLanes<T>>::type;
// As many lanes of T as a vector of V has.
template <class T, class V>
using vec_like = typename Vector<T, kLanes<V>>::type;

// Integers as wide as V's lanes: the type of comparisons, row numbers and counts.
template <class V>
using lane_int = std::conditional_t<sizeof(V) == 8, int64_t, int32_t>;

template <class V, class T>
FASTOPS_HD V unaligned(const T* from) {
  V to;
  std::memcpy(&to, from, sizeof(V));
  return to;
}

// kLanes<V> elements of T, as V.
template <class V, class T>
FASTOPS_HD vec<V> load(const T* from) {
  if constexpr (kLanes<V> == 1) {
    return load_as<V>(*from);
  } else if constexpr (std::is_same_v<V, T>) {
    return unaligned<vec<V>>(from);
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    const auto bits = __builtin_convertvector(unaligned<vec_like<uint16_t, float>>(from), vec<uint32_t>) << 16;
    if constexpr (std::is_same_v<V, float>) {
      return bit_cast<vec<float>>(bits);
    } else {
      vec<V> to{};
      for (int i = 0; i < kLanes<V>; ++i) to[i] = load_as<V>(from[i]);
      return to;
    }
  } else if constexpr (std::is_same_v<T, Half>) {
#if FASTOPS_CAPABILITY > 0
    if constexpr (std::is_same_v<V, float>) {
      if constexpr (kVectorBytes == 64) {
        return bit_cast<vec<float>>(_mm512_maskz_cvtph_ps(__mmask16(-1), unaligned<__m256i>(from)));
      } else {
        return bit_cast<vec<float>>(_mm256_cvtph_ps(unaligned<__m128i>(from)));
      }
    }
#endif
    vec<V> to{};
    for (int i = 0; i < kLanes<V>; ++i) to[i] = load_as<V>(from[i]);
    return to;
  } else {
    return __builtin_convertvector(unaligned<vec_like<T, V>>(from), vec<V>);
  }
}

template <class T, class V>
FASTOPS_HD void store(T* to, const V& from) {
  using S = scalar_of<V>;
  if constexpr (kLanes<S> == 1) {
    *to = store_as<T>(from);
  } else if constexpr (std::is_same_v<T, S>) {
    std::memcpy(to, &from, sizeof(V));
#if FASTOPS_CAPABILITY > 0
  } else if constexpr (std::is_same_v<T, Half> && std::is_same_v<S, float> && kVectorBytes == 64) {
    const __m256i bits = _mm512_maskz_cvtps_ph(__mmask16(-1), bit_cast<__m512>(from), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    std::memcpy(to, &bits, sizeof(bits));
  } else if constexpr (std::is_same_v<T, Half> && std::is_same_v<S, float> && kVectorBytes == 32) {
    const __m128i bits = _mm256_cvtps_ph(bit_cast<__m256>(from), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    std::memcpy(to, &bits, sizeof(bits));
#endif
  } else if constexpr (std::is_same_v<T, BFloat16> && std::is_same_v<S, float>) {  // as to_bfloat16() does
    const auto bits = bit_cast<vec<uint32_t>>(from);
    const auto quiet = (bits >> 16) | 0x40, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const auto narrowed = __builtin_convertvector(from != from ? quiet : rounded, vec_like<uint16_t, float>);
    std::memcpy(to, &narrowed, sizeof(narrowed));
  } else if constexpr (std::is_same_v<T, Half> || std::is_same_v<T, BFloat16>) {
    for (int i = 0; i < kLanes<S>; ++i) to[i] = store_as<T>(from[i]);
  } else {
    const auto narrowed = __builtin_convertvector(from, vec_like<T, S>);
    std::memcpy(to, &narrowed, sizeof(narrowed));
  }
}

template <class V>
FASTOPS_HD scalar_of<V> lane(const V& v, int i) {
  if constexpr (std::is_same_v<scalar_of<V>, V>) {
    return v;
  } else {
    return v[i];
  }
}

template <class V>
FASTOPS_HD void replace(V& v, int i, scalar_of<V> x) {
  if constexpr (std::is_same_v<scalar_of<V>, V>) {
    v = x;
  } else {
    v[i] = x;
  }
}

// body(0) to body(K - 1), of constants.
template <int K, class Body>
FASTOPS_HD void unrolled(Body&& body) {
  [&]<int... k>(std::integer_sequence<int, k...>) FASTOPS_INLINE_LAMBDA {
    (body(std::integral_constant<int, k>{}), ...);
  }(std::make_integer_sequence<int, K>{});
}

// The sum of the lanes: halves are added until two numbers are left.
template <class V, int kCount>
FASTOPS_HD V sum_lanes(const typename Vector<V, kCount>::type& lanes) {
  if constexpr (kCount == 1) {
    return lanes;
  } else if constexpr (kCount == 2) {
    return lanes[0] + lanes[1];
  } else {
    typename Vector<V, kCount / 2>::type halves[2];
    std::memcpy(halves, &lanes, sizeof(lanes));
    return sum_lanes<V, kCount / 2>(halves[0] + halves[1]);
  }
}

// And the least of them.
template <class V, int kCount>
FASTOPS_HD V min_lanes(const typename Vector<V, kCount>::type& lanes) {
  if constexpr (kCount == 1) {
    return lanes;
  } else if constexpr (kCount == 2) {
    return std::min(lanes[0], lanes[1]);
  } else {
    typename Vector<V, kCount / 2>::type halves[2];
    std::memcpy(halves, &lanes, sizeof(lanes));
    return min_lanes<V, kCount / 2>(halves[0] < halves[1] ? halves[0] : halves[1]);
  }
}

// A structure of numbers for each lane as one of vectors, field by field, and back.
template <class Vectors, class Scalars, class V>
FASTOPS_HD Vectors of_lanes(const Scalars* lanes) {
  constexpr int kWidth = kLanes<V>, kFields = sizeof(Scalars) / sizeof(V);
  static_assert(sizeof(Scalars) == kFields * sizeof(V) && sizeof(Vectors) == kFields * sizeof(vec<V>));
  V fields[kFields][kWidth];
  for (int l = 0; l < kWidth; ++l) {
    V of_lane[kFields];
    std::memcpy(of_lane, lanes + l, sizeof(Scalars));
    for (int f = 0; f < kFields; ++f) fields[f][l] = of_lane[f];
  }
  Vectors known;
  std::memcpy(&known, fields, sizeof(Vectors));
  return known;
}
template <class V, class Vectors, class Scalars>
FASTOPS_HD void to_lanes(const Vectors& known, Scalars* lanes) {
  constexpr int kWidth = kLanes<V>, kFields = sizeof(Scalars) / sizeof(V);
  V fields[kFields][kWidth];
  std::memcpy(fields, &known, sizeof(Vectors));
  for (int l = 0; l < kWidth; ++l) {
    V of_lane[kFields];
    for (int f = 0; f < kFields; ++f) of_lane[f] = fields[f][l];
    std::memcpy(lanes + l, of_lane, sizeof(Scalars));
  }
}

// `n` neighbours times a factor. Heads of attention are often narrower than a vector, so its half has a turn.
template <class T, class S, class V>
FASTOPS_HD void scale_run(T* to, const S* from, V factor, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes<V> <= n; i += kLanes<V>) store(to + i, load<V>(from + i) * factor);
#if FASTOPS_VECTOR_EXTENSION
  if constexpr (std::is_same_v<T, V> && std::is_same_v<S, V> && kLanes<V> > 2) {
    if (i + kLanes<V> / 2 <= n) {
      const auto half = unaligned<typename Vector<V, kLanes<V> / 2>::type>(from + i) * factor;
      std::memcpy(to + i, &half, sizeof(half));
      i += kLanes<V> / 2;
    }
  }
#endif
  for (; i < n; ++i) to[i] = store_as<T>(load_as<V>(from[i]) * factor);
}

// Neighbours times neighbours.
template <class T, class S, class V>
FASTOPS_HD void multiply_runs(T* to, const S* a, const V* b, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes<V> <= n; i += kLanes<V>) store(to + i, load<V>(a + i) * unaligned<vec<V>>(b + i));
  for (; i < n; ++i) to[i] = store_as<T>(load_as<V>(a[i]) * b[i]);
}

// Columns [column, column + width) of a row times its weights, of which each is for `per_head` columns.
template <class T, class S, class V>
FASTOPS_HD void weigh_row(T* to, const S* from, const V* weights, int64_t column, int64_t width, int64_t per_head) {
  if (per_head == 1) return multiply_runs(to, from, weights + column, width);
  if (column == 0 && width <= per_head) return scale_run(to, from, *weights, width);
  for (int64_t c = 0, head = column / per_head; c < width; ++head) {
    const int64_t end = std::min(width, (head + 1) * per_head - column);
    scale_run(to + c, from + c, weights[head], end - c);
    c = end;
  }
}

// Into the first-level cache, and into the second.
FASTOPS_HD void prefetch([[maybe_unused]] const void* address) {
#if FASTOPS_VECTOR_EXTENSION
  __builtin_prefetch(address);
#endif
}
FASTOPS_HD void prefetch_far([[maybe_unused]] const void* address) {
#if FASTOPS_VECTOR_EXTENSION
  __builtin_prefetch(address, 0, 2);
#endif
}

// To an aligned address; to be followed by fence_stores() before another thread looks.
template <class T, class V>
FASTOPS_HD void store_past_caches(T* to, const V& from) {
#if FASTOPS_CAPABILITY == 2
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), bit_cast<__m512i>(from));
#elif FASTOPS_CAPABILITY == 1
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to), bit_cast<__m256i>(from));
#else
  store(to, from);
#endif
}
FASTOPS_HD void fence_stores() {
#if FASTOPS_CAPABILITY > 0
  _mm_sfence();
#endif
}

}  // namespace FASTOPS_CPU_NAMESPACE
