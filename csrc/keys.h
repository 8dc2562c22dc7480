// Unsigned integers in the order in which torch sorts elements: NaN is greater than all numbers and equal to itself, and
// -0.0 equals 0.0. A descending order is the ascending one of the complement, so that equal elements stay equal.
#pragma once

#include <type_traits>

#include "numeric.h"

namespace fastops {

template <class T>
using key_t = std::conditional_t<sizeof(T) == 1, uint8_t, std::conditional_t<sizeof(T) == 2, uint16_t, std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>>;

template <class T>
FASTOPS_HD key_t<T> key_of(T x, bool descending) {
  using Key = key_t<T>;
  constexpr Key kSign = Key(1) << (8 * sizeof(T) - 1);
  Key key = bit_cast<Key>(x);
  if constexpr (is_floating<T>) {
    constexpr int kMantissa = std::is_same_v<T, double> ? 52 : std::is_same_v<T, float> ? 23 : std::is_same_v<T, BFloat16> ? 7 : 10;
    constexpr Key kInfinity = Key(~kSign) >> kMantissa << kMantissa;
    const Key magnitude = key & Key(~kSign);
    // All bits of a negative number are flipped, and the sign of others: without a branch, as no sign can be predicted.
    key = magnitude == 0 ? kSign : Key(key ^ Key(Key(Key(0) - Key(key >> (8 * sizeof(T) - 1))) | kSign));
    if (magnitude > kInfinity) key = Key(~Key(0));
  } else if constexpr (std::is_signed_v<T>) {
    key = key ^ kSign;
  }
  return descending ? Key(~key) : key;
}

// The way back. Zeros share a key, and so do NaNs: true for keys of which only the element itself can tell.
template <class T>
FASTOPS_HD bool is_shared(key_t<T> key, bool descending) {
  using Key = key_t<T>;
  if (!is_floating<T>) return false;
  if (descending) key = Key(~key);
  return key == Key(Key(1) << (8 * sizeof(T) - 1)) || key == Key(~Key(0));
}
template <class T>
FASTOPS_HD T element_of(key_t<T> key, bool descending) {
  using Key = key_t<T>;
  constexpr Key kSign = Key(1) << (8 * sizeof(T) - 1);
  if (descending) key = Key(~key);
  if constexpr (is_floating<T>) {
    key = Key(key ^ Key(Key(Key(key >> (8 * sizeof(T) - 1)) - Key(1)) | kSign));
  } else if constexpr (std::is_signed_v<T>) {
    key = key ^ kSign;
  }
  return bit_cast<T>(key);
}

}  // namespace fastops
