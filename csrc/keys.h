// Unsigned integers in the order in which torch sorts elements: NaN is greater than all numbers and equal to itself, and
// -0.0 equals 0.0. A descending order is the ascending one of the complement, so that equal elements stay equal. What an
// element is besides its bits is known at run time, so that kernels are compiled once for each width of elements.
#pragma once

#include "dispatch.h"
#include "numeric.h"

namespace fastops {

template <class K>
class KeyOrder {
  static constexpr K kSign = K(K(1) << (8 * sizeof(K) - 1));
  K minus_zero_ = 0;       // what becomes 0
  K infinity_ = K(~K(0));  // what is beyond is NaN, whatever its sign
  K flipped_ = 0;          // bits that are flipped in negative numbers, which count backwards
  K turned_ = 0;           // and in all
  K complement_ = 0;
  bool floating_ = false;

 public:
  FASTOPS_HD KeyOrder(DType dtype, bool descending) : complement_(descending ? K(~K(0)) : K(0)), floating_(is_floating_dtype(dtype)) {
    if (floating_) {
      const int mantissa = dtype == DType::f64 ? 52 : dtype == DType::f32 ? 23 : dtype == DType::bf16 ? 7 : 10;
      minus_zero_ = kSign;
      infinity_ = K(K(~kSign) >> mantissa << mantissa);
      flipped_ = K(~K(0));
    }
    if (dtype != DType::u8 && dtype != DType::b8) turned_ = kSign;
  }

  FASTOPS_HD K key(K bits) const {
    const K known = bits == minus_zero_ ? K(0) : bits;
    // Without a branch, as no sign can be predicted.
    const K key = K(known ^ K(K(K(K(0) - K(known >> (8 * sizeof(K) - 1))) & flipped_) | turned_));
    return K((K(bits & K(~kSign)) > infinity_ ? K(~K(0)) : key) ^ complement_);
  }

  // The way back. Zeros share a key, and so do NaNs: true for keys of which only the element itself can tell.
  FASTOPS_HD bool is_shared(K key) const {
    key = K(key ^ complement_);
    return floating_ && (key == kSign || key == K(~K(0)));
  }
  FASTOPS_HD K bits(K key) const {
    key = K(key ^ complement_);
    return K(key ^ K(K(K(K(key >> (8 * sizeof(K) - 1)) - K(1)) & flipped_) | turned_));
  }

  // In ascending order, whether a key is that of NaN.
  FASTOPS_HD bool is_nan(K key) const { return floating_ && key == K(~K(0)); }
};

}  // namespace fastops
