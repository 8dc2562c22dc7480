// Where a quantile lies among the rows of a segment, and what lies between two of them; shared by the CPU and CUDA.
#pragma once

#include <cstdint>

#include "numeric.h"

namespace fastops {

enum class Interpolation : int8_t { linear, lower, higher, midpoint, nearest };

FASTOPS_HD bool takes_two(Interpolation interpolation) {
  return interpolation == Interpolation::linear || interpolation == Interpolation::midpoint;
}

// The rows around q * (length - 1), which is counted in double, and how far it is from the first to the second.
struct QuantilePlace {
  int64_t low, high;  // ranks; -1 if q is out of range
  double share;       // of the row of the higher rank; 0 where there is but one

  FASTOPS_HD QuantilePlace(double q, int64_t length, Interpolation interpolation) {
    if (!(q >= 0 && q <= 1)) {
      low = high = -1, share = 0;
      return;
    }
    const double place = q * double(length > 0 ? length - 1 : 0);
    low = int64_t(place);
    share = place - double(low);
    high = low + (share > 0);
    switch (interpolation) {
      case Interpolation::linear:
        break;
      case Interpolation::midpoint:
        share = share > 0 ? 0.5 : 0.0;
        break;
      case Interpolation::lower:
        high = low;
        break;
      case Interpolation::higher:
        low = high;
        break;
      case Interpolation::nearest:  // of two that are as near, the even one
        low += share > 0.5 || (share == 0.5 && low % 2 == 1);
        high = low;
        break;
    }
    if (high == low) share = 0;
  }
};

// From a to b. Beside an infinity, or where the gap overflows, there is no way along it; what has no share changes nothing, nor
// what has so little that it is rounded away.
template <class V>
FASTOPS_HD V between(V a, V b, V share) {
  const V gap = b - a;
  if (gap - gap == 0) return share < V(0.5) ? a + share * gap : b - gap * (1 - share);
  return share == 0 ? a : share == 1 ? b : (1 - share) * a + share * b;
}

}  // namespace fastops
