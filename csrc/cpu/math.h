// exp, log and sqrt of vectors. SLEEF's exp and log err by at most 1 ulp; libtorch_cpu, which is there already, brings
// them along. They are declared weak: where they are missing, the lanes go through the C library one by one.
#pragma once

#include "cpu/capability.h"

#include "cpu/vec.h"

#if FASTOPS_VECTOR_EXTENSION
#if FASTOPS_CAPABILITY == 2
extern "C" {
__attribute__((weak)) __m512 Sleef_expf16_u10(__m512);
__attribute__((weak)) __m512 Sleef_logf16_u10(__m512);
__attribute__((weak)) __m512d Sleef_expd8_u10(__m512d);
__attribute__((weak)) __m512d Sleef_logd8_u10(__m512d);
}
#elif FASTOPS_CAPABILITY == 1
extern "C" {
__attribute__((weak)) __m256 Sleef_expf8_u10(__m256);
__attribute__((weak)) __m256 Sleef_logf8_u10(__m256);
__attribute__((weak)) __m256d Sleef_expd4_u10(__m256d);
__attribute__((weak)) __m256d Sleef_logd4_u10(__m256d);
}
#endif

namespace FASTOPS_CPU_NAMESPACE {
namespace {

template <class T>
FASTOPS_NOINLINE vec<T> lanes_exp(vec<T> x) {
  for (int i = 0; i < kLanes<T>; ++i) x[i] = Math<T>::exp(x[i]);
  return x;
}
template <class T>
FASTOPS_NOINLINE vec<T> lanes_log(vec<T> x) {
  for (int i = 0; i < kLanes<T>; ++i) x[i] = Math<T>::log(x[i]);
  return x;
}

}  // namespace
}  // namespace FASTOPS_CPU_NAMESPACE

namespace fastops {

// By SLEEF's function, if it is there.
template <class V, class M>
FASTOPS_HD V by_sleef(M (*function)(M), V (*otherwise)(V), const V& x) {
  return function != nullptr ? bit_cast<V>(function(bit_cast<M>(x))) : otherwise(x);
}
template <class V>
FASTOPS_HD V by_sleef(std::nullptr_t, V (*otherwise)(V), const V& x) {
  return otherwise(x);
}

#define FASTOPS_VECTOR_MATH(T, exp_function, log_function)                                           \
  template <>                                                                                        \
  struct Math<FASTOPS_CPU_NAMESPACE::vec<T>> {                                                       \
    using V = FASTOPS_CPU_NAMESPACE::vec<T>;                                                         \
    FASTOPS_HD static V exp(const V& x) {                                                            \
      return by_sleef<V>(exp_function, FASTOPS_CPU_NAMESPACE::lanes_exp<T>, x);                       \
    }                                                                                                \
    FASTOPS_HD static V log(const V& x) {                                                            \
      return by_sleef<V>(log_function, FASTOPS_CPU_NAMESPACE::lanes_log<T>, x);                       \
    }                                                                                                \
    FASTOPS_HD static V sqrt(V x) {                                                                  \
      for (int i = 0; i < FASTOPS_CPU_NAMESPACE::kLanes<T>; ++i) x[i] = Math<T>::sqrt(x[i]);         \
      return x;                                                                                      \
    }                                                                                                \
  }
#if FASTOPS_CAPABILITY == 2
FASTOPS_VECTOR_MATH(float, Sleef_expf16_u10, Sleef_logf16_u10);
FASTOPS_VECTOR_MATH(double, Sleef_expd8_u10, Sleef_logd8_u10);
#elif FASTOPS_CAPABILITY == 1
FASTOPS_VECTOR_MATH(float, Sleef_expf8_u10, Sleef_logf8_u10);
FASTOPS_VECTOR_MATH(double, Sleef_expd4_u10, Sleef_logd4_u10);
#else
FASTOPS_VECTOR_MATH(float, nullptr, nullptr);
FASTOPS_VECTOR_MATH(double, nullptr, nullptr);
#endif
#undef FASTOPS_VECTOR_MATH

}  // namespace fastops
#endif
