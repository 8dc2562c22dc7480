// Element types as kernels see them. The 16-bit floats are storage only: every kernel loads them into float,
// computes there, and rounds once when it stores.
#pragma once

#include <math.h>

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__) || defined(__HIPCC__)
#define FASTOPS_HD __host__ __device__ __forceinline__
#elif defined(_MSC_VER)
#define FASTOPS_HD __forceinline
#else
#define FASTOPS_HD inline __attribute__((always_inline))
#endif

namespace fastops {

enum class DType : int8_t { u8, i8, i16, i32, i64, f16, bf16, f32, f64, b8 };

constexpr int64_t size_of(DType dtype) {
  constexpr int64_t kBytes[] = {1, 1, 2, 4, 8, 2, 2, 4, 8, 1};
  return kBytes[int(dtype)];
}

struct Half {
  uint16_t bits;
};

struct BFloat16 {
  uint16_t bits;
};

template <class To, class From>
FASTOPS_HD To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

FASTOPS_HD float to_float(BFloat16 x) { return bit_cast<float>(uint32_t(x.bits) << 16); }

FASTOPS_HD BFloat16 to_bfloat16(float x) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  if (x != x) return {uint16_t((bits >> 16) | 0x40)};  // a quiet NaN: rounding could carry a NaN into an infinity
  return {uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

FASTOPS_HD float to_float(Half x) {
#ifdef __CUDA_ARCH__  // one instruction there
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(x.bits));
  return value;
#else
  // The exponent is moved by a multiplication, which turns subnormal halves into normal floats on the way.
  const uint32_t sign = uint32_t(x.bits & 0x8000) << 16;
  const uint32_t magnitude = uint32_t(x.bits & 0x7fff) << 13;
  if (magnitude >= (0x7c00u << 13)) return bit_cast<float>(sign | magnitude | 0x7f800000u);  // infinity, NaN
  const float scaled = bit_cast<float>(magnitude) * bit_cast<float>(uint32_t(254 - 15) << 23);
  return bit_cast<float>(bit_cast<uint32_t>(scaled) | sign);
#endif
}

FASTOPS_HD Half to_half(float x) {
#ifdef __CUDA_ARCH__
  Half rounded;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(rounded.bits) : "f"(x));
  return rounded;
#else
  const uint32_t bits = bit_cast<uint32_t>(x);
  const uint16_t sign = uint16_t((bits >> 16) & 0x8000);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {uint16_t(sign | 0x7e00)};
  if (magnitude >= 0x477ff000u) return {uint16_t(sign | 0x7c00)};  // 65520 and above round to infinity
  if (magnitude < 0x38800000u) {  // subnormal half: adding 0.5 lets the float adder round at the right bit
    const uint32_t rounded = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f);
    return {uint16_t(sign | (rounded - 0x3f000000u))};
  }
  const uint32_t odd = (magnitude >> 13) & 1;
  return {uint16_t(sign | ((magnitude - (112u << 23) + 0xfff + odd) >> 13))};
#endif
}

// The type that arithmetic on elements of T is done in (sums and products of integers use int64_t instead).
template <class T>
struct Compute {
  using type = int32_t;  // the integers of up to 32 bits: wide enough to compare, and vectors of it are everywhere
};
template <>
struct Compute<int64_t> {
  using type = int64_t;
};
template <>
struct Compute<double> {
  using type = double;
};
template <>
struct Compute<float> {
  using type = float;
};
template <>
struct Compute<Half> {
  using type = float;
};
template <>
struct Compute<BFloat16> {
  using type = float;
};
template <class T>
using compute_t = typename Compute<T>::type;

template <class T>
inline constexpr bool is_floating = false;
template <>
inline constexpr bool is_floating<float> = true;
template <>
inline constexpr bool is_floating<double> = true;
template <>
inline constexpr bool is_floating<Half> = true;
template <>
inline constexpr bool is_floating<BFloat16> = true;

template <class V, class T>
FASTOPS_HD V load_as(T x) {
  return V(x);
}
template <class V>
FASTOPS_HD V load_as(Half x) {
  return V(to_float(x));
}
template <class V>
FASTOPS_HD V load_as(BFloat16 x) {
  return V(to_float(x));
}

// exp, log and sqrt of what is computed in; of the CPU's vectors in cpu/math.h.
template <class V>
struct Math;
template <>
struct Math<float> {
  FASTOPS_HD static float exp(float x) { return ::expf(x); }
  FASTOPS_HD static float log(float x) { return ::logf(x); }
  FASTOPS_HD static float sqrt(float x) { return ::sqrtf(x); }
};
template <>
struct Math<double> {
  FASTOPS_HD static double exp(double x) { return ::exp(x); }
  FASTOPS_HD static double log(double x) { return ::log(x); }
  FASTOPS_HD static double sqrt(double x) { return ::sqrt(x); }
};

// Rounds a computed value to the element type T.
template <class T, class V>
struct Store {
  FASTOPS_HD static T round(V x) { return T(x); }
};
template <class V>
struct Store<Half, V> {
  FASTOPS_HD static Half round(V x) { return to_half(float(x)); }
};
template <class V>
struct Store<BFloat16, V> {
  FASTOPS_HD static BFloat16 round(V x) { return to_bfloat16(float(x)); }
};
template <class T, class V>
FASTOPS_HD T store_as(V x) {
  return Store<T, V>::round(x);
}

}  // namespace fastops
