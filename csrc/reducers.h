// The algebra of the reductions, written once for scalars and for vectors, for the CPU and for CUDA.
//
// A reducer R<V, I> is what is known of some rows. V is the type it computes in (a scalar, or a vector of several
// columns); I is the integer of row numbers and counts, as wide as V where V is a vector.
//     R::of(x, row)     one row
//     combine(a, b)     the rows of a, then those of b
//     value(length)     the result, given the number of rows it stands for
//     extra()           what some reductions return beside it (kExtra): a row number, a count or a mean
//     at<S, J>(pick, n) the same as R<S, J>, for one lane of a vector or with other row numbers: row + n
//     merge(a, b)       combine for rows that interleave (the lanes of a vector along a segment)
// Where a step is dear, the rows of a block may be met twice instead, which comes to the same (kTwice):
//     start(x, base)    what pass one joins, with lead(a, b); `base` is the first row of the segment
//     settle(joined, n) what all n rows of the block are then measured from
//     term(x, base, from)       what pass two adds up
//     part(from, sum, n)        R of the n rows; a mean is counted from `base`
// There is no identity element: a segment without rows is never reduced, so no value of the data can be mistaken for
// "empty". Conditions are combined with | and & and chosen with ?:, which mean the same for scalars and vectors.
#pragma once

#include <type_traits>

#include "numeric.h"

namespace fastops {

enum class Reduction : int8_t {
  sum,
  mean,
  prod,
  amax,
  amin,
  max,  // value and row
  min,
  amax_count,  // value and how often it occurs
  amin_count,
  any,
  all,
  prod_parts,  // product of the elements that are not zero, and how many are
  logsumexp,
  moments,  // variance or standard deviation, and the mean
};

enum class Extra : int8_t { none, row, count, mean };

template <class V, class = void>
struct Scalar {
  using type = V;
};
template <class V>
struct Scalar<V, std::void_t<decltype(std::declval<V&>()[0])>> {
  using type = std::remove_cv_t<std::remove_reference_t<decltype(std::declval<V&>()[0])>>;
};
template <class V>
using scalar_of = typename Scalar<V>::type;

// A number in every lane.
template <class V>
FASTOPS_HD V constant(scalar_of<V> x) {
  return V{} + x;
}

template <class V, class I>
struct Sum {
  using Row = I;
  static constexpr Extra kExtra = Extra::none;
  V total;
  FASTOPS_HD static Sum of(V x, I) { return {x}; }
  FASTOPS_HD static Sum combine(const Sum& a, const Sum& b) { return {a.total + b.total}; }
  FASTOPS_HD V value(int64_t) const { return total; }
  template <class S, class J, class Pick>
  FASTOPS_HD Sum<S, J> at(Pick pick, J) const {
    return {S(pick(total))};
  }
};

template <class V, class I>
struct Mean {
  using Row = I;
  static constexpr Extra kExtra = Extra::none;
  V total;
  FASTOPS_HD static Mean of(V x, I) { return {x}; }
  FASTOPS_HD static Mean combine(const Mean& a, const Mean& b) { return {a.total + b.total}; }
  FASTOPS_HD V value(int64_t length) const { return total / scalar_of<V>(length); }
  template <class S, class J, class Pick>
  FASTOPS_HD Mean<S, J> at(Pick pick, J) const {
    return {S(pick(total))};
  }
};

// The mean of rows whose sum overflows: each is scaled by a power of two first, which is exact for all but the
// smallest numbers, and those do not matter beside ones that large. `load(i)` is element i.
template <class T, class Load>
FASTOPS_HD T scaled_mean(int64_t length, Load load) {
  T scale = 1;
  for (int64_t reach = 1; reach < length; reach *= 2) scale /= 2;
  T total = 0;
  for (int64_t i = 0; i < length; ++i) total += load(i) * scale;
  return total / (T(length) * scale);
}

// A part of a mean, for those who cannot come back to its rows: beside the total it has the same scaled by a power of
// two, from which the mean follows where the total overflows.
template <class V, class I>
struct ScaledMean {
  using Row = I;
  static constexpr Extra kExtra = Extra::none;
  static constexpr V kScale = V(1) / V(uint64_t(1) << 63) / 2;  // 2^-64: more rows than there can be
  V total;
  V scaled;
  FASTOPS_HD static bool finite(V x) { return x - x == 0; }
  FASTOPS_HD static ScaledMean combine(const ScaledMean& a, const ScaledMean& b) {
    return {a.total + b.total, a.scaled + b.scaled};
  }
  FASTOPS_HD V value(int64_t length) const {
    return finite(total) ? total / V(length) : scaled / V(length) / kScale;
  }
  template <class S, class J, class Pick>
  FASTOPS_HD ScaledMean<S, J> at(Pick pick, J) const {
    return {S(pick(total)), S(pick(scaled))};
  }
};

template <class V, class I>
struct Product {  // of integers: exact modulo 2^64
  using Row = I;
  static constexpr Extra kExtra = Extra::none;
  V product;
  FASTOPS_HD static Product of(V x, I) { return {x}; }
  FASTOPS_HD static Product combine(const Product& a, const Product& b) { return {a.product * b.product}; }
  FASTOPS_HD V value(int64_t) const { return product; }
  template <class S, class J, class Pick>
  FASTOPS_HD Product<S, J> at(Pick pick, J) const {
    return {S(pick(product))};
  }
};

// Of floating numbers. Zeros are kept apart, so that a product which overflows before it meets one is 0, not NaN.
// An infinity that stands in the data still makes it NaN, as the rules of arithmetic want: `poison` remembers it.
template <class V, class I>
struct FloatProduct {
  using Row = I;
  static constexpr Extra kExtra = Extra::none;
  V product;    // of the elements that are not zero
  V none_zero;  // 1, or 0 once there was a zero
  V poison;     // 0, or NaN once there was an infinity or a NaN
  FASTOPS_HD static FloatProduct of(V x, I) {
    const V one = constant<V>(1);
    return {x == 0 ? one : x, x == 0 ? V{} : one, x - x};
  }
  FASTOPS_HD static FloatProduct combine(const FloatProduct& a, const FloatProduct& b) {
    return {a.product * b.product, a.none_zero * b.none_zero, a.poison + b.poison};
  }
  FASTOPS_HD V value(int64_t) const { return none_zero == 0 ? poison : product; }
  template <class S, class J, class Pick>
  FASTOPS_HD FloatProduct<S, J> at(Pick pick, J) const {
    return {S(pick(product)), S(pick(none_zero)), S(pick(poison))};
  }
};

// What the gradient of a product needs, see gradients.h.
template <class V, class I>
struct ProductParts {
  using Row = I;
  static constexpr Extra kExtra = Extra::count;
  V product;  // of the elements that are not zero
  I zeros;
  FASTOPS_HD static ProductParts of(V x, I) { return {x == 0 ? constant<V>(1) : x, I(x == 0) & 1}; }
  FASTOPS_HD static ProductParts combine(const ProductParts& a, const ProductParts& b) {
    return {a.product * b.product, a.zeros + b.zeros};
  }
  FASTOPS_HD V value(int64_t) const { return product; }
  FASTOPS_HD I extra() const { return zeros; }
  template <class S, class J, class Pick>
  FASTOPS_HD ProductParts<S, J> at(Pick pick, J) const {
    return {S(pick(product)), J(pick(zeros))};
  }
};

// Whether b is greater than a: strictly, so that the earlier row wins a tie (and -0.0 ties with 0.0). NaN is greater than
// all numbers, as in torch.
template <class V>
FASTOPS_HD auto beats(const V& b, const V& a) {
  if constexpr (std::is_floating_point_v<V>) {  // the same as below, in fewer steps
    return !(a >= b) & (a == a);
  } else if constexpr (std::is_floating_point_v<scalar_of<V>>) {
    return (b > a) | ((b != b) & (a == a));
  } else {
    return b > a;
  }
}

// The number that stands as far from the other end: the least x has the greatest mirrored x, with the same ties, so that
// one kernel can look for both.
template <class V>
FASTOPS_HD V mirrored(V x, bool mirror) {
  if constexpr (std::is_floating_point_v<V>) {
    return x * V(mirror ? -1 : 1);
  } else {
    return x ^ -V(mirror);
  }
}

// The greatest; the least is found among mirrored elements.
struct Extremum {
  template <class V, class I>
  struct Value {
    using Row = I;
    static constexpr Extra kExtra = Extra::none;
    V best;
    FASTOPS_HD static Value of(V x, I) { return {x}; }
    FASTOPS_HD static Value combine(const Value& a, const Value& b) {
      return {beats(b.best, a.best) ? b.best : a.best};
    }
    FASTOPS_HD V value(int64_t) const { return best; }
    template <class S, class J, class Pick>
    FASTOPS_HD Value<S, J> at(Pick pick, J) const {
      return {S(pick(best))};
    }
  };

  template <class V, class I>
  struct WithRow {
    using Row = I;
    static constexpr Extra kExtra = Extra::row;
    V best;
    I row;
    FASTOPS_HD static WithRow of(V x, I row) { return {x, row}; }
    FASTOPS_HD static WithRow combine(const WithRow& a, const WithRow& b) {
      const auto take = beats(b.best, a.best);
      return {take ? b.best : a.best, take ? b.row : a.row};
    }
    FASTOPS_HD static WithRow merge(const WithRow& a, const WithRow& b) {
      const auto ahead = beats(b.best, a.best);
      const auto take = ahead | ((ahead == beats(a.best, b.best)) & (b.row < a.row));
      return {take ? b.best : a.best, take ? b.row : a.row};
    }
    FASTOPS_HD V value(int64_t) const { return best; }
    FASTOPS_HD I extra() const { return row; }
    template <class S, class J, class Pick>
    FASTOPS_HD WithRow<S, J> at(Pick pick, J rows_before) const {
      return {S(pick(best)), J(pick(row)) + rows_before};
    }
  };

  template <class V, class I>
  struct WithCount {  // NaN ties with NaN, so that its gradient has somewhere to go
    using Row = I;
    static constexpr Extra kExtra = Extra::count;
    V best;
    I count;
    FASTOPS_HD static WithCount of(V x, I) { return {x, I{} + 1}; }
    FASTOPS_HD static WithCount combine(const WithCount& a, const WithCount& b) {
      const auto take = beats(b.best, a.best);
      const auto tie = (a.best == b.best) | ((a.best != a.best) & (b.best != b.best));
      const I count = take ? b.count : a.count;
      return {take ? b.best : a.best, tie ? a.count + b.count : count};
    }
    FASTOPS_HD V value(int64_t) const { return best; }
    FASTOPS_HD I extra() const { return count; }
    template <class S, class J, class Pick>
    FASTOPS_HD WithCount<S, J> at(Pick pick, J) const {
      return {S(pick(best)), J(pick(count))};
    }
  };
};

// log(sum(exp(x))), from the greatest element and the sum of exp(x - greatest): nothing overflows, and what is measured
// from another greatest element is scaled (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018).
template <class V, class I>
struct LogSumExp {
  using Row = I;
  static constexpr Extra kExtra = Extra::none;
  static constexpr bool kTwice = true;
  V top;
  V total;  // where top is infinite: how often it occurs
  FASTOPS_HD static LogSumExp of(V x, I) { return {x, constant<V>(1)}; }
  FASTOPS_HD static LogSumExp combine(const LogSumExp& a, const LogSumExp& b) {
    const auto take = beats(b.top, a.top);
    const V top = take ? b.top : a.top, other = take ? a.top : b.top;
    const V scale = Math<V>::exp(other == top ? V{} : other - top);
    return {top, take ? b.total + a.total * scale : a.total + b.total * scale};
  }
  FASTOPS_HD V value(int64_t) const { return top - top == 0 ? top + Math<V>::log(total) : top; }
  template <class S, class J, class Pick>
  FASTOPS_HD LogSumExp<S, J> at(Pick pick, J) const {
    return {S(pick(top)), S(pick(total))};
  }
  FASTOPS_HD static V start(V x, V) { return x; }
  FASTOPS_HD static V lead(V a, V b) { return beats(b, a) ? b : a; }
  FASTOPS_HD static V settle(V joined, int64_t) { return joined; }
  FASTOPS_HD static V term(V x, V, V from) { return Math<V>::exp(x == from ? V{} : x - from); }
  FASTOPS_HD static LogSumExp part(V from, V sum, int64_t) { return {from, sum}; }
};

// Mean and sum of squared differences from it (Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for
// computing sample variances", 1979). Equal rows differ by exactly 0.
template <class V, class I>
struct Moments {
  using Row = I;
  static constexpr Extra kExtra = Extra::mean;
  static constexpr bool kTwice = true;
  V mean;
  V squares;
  V count;
  FASTOPS_HD static Moments of(V x, I) { return {x, x - x, constant<V>(1)}; }  // infinities and NaN have no variance
  FASTOPS_HD static Moments combine(const Moments& a, const Moments& b) {
    const V count = a.count + b.count, by = b.mean - a.mean, share = b.count / count;
    return {a.mean + by * share, a.squares + b.squares + by * by * (a.count * share), count};
  }
  FASTOPS_HD V value(int64_t) const { return squares; }
  // Of `divisor` rows less correction.
  FASTOPS_HD V spread(double divisor, bool root) const {
    const V variance = squares / scalar_of<V>(divisor);
    return root ? Math<V>::sqrt(variance) : variance;
  }
  FASTOPS_HD V extra() const { return mean; }
  template <class S, class J, class Pick>
  FASTOPS_HD Moments<S, J> at(Pick pick, J) const {
    return {S(pick(mean)), S(pick(squares)), S(pick(count))};
  }
  // Counted from a row of the segment, means far from zero lose no digits when they are rounded.
  FASTOPS_HD static V start(V x, V base) { return x - base; }
  FASTOPS_HD static V lead(V a, V b) { return a + b; }
  FASTOPS_HD static V settle(V joined, int64_t n) { return joined / scalar_of<V>(n); }
  FASTOPS_HD static V term(V x, V base, V from) {
    const V by = x - base - from;
    return by * by;
  }
  FASTOPS_HD static Moments part(V from, V sum, int64_t n) { return {from, sum, constant<V>(scalar_of<V>(n))}; }
};

template <class R, class = void>
inline constexpr bool kTwice = false;
template <class R>
inline constexpr bool kTwice<R, std::enable_if_t<R::kTwice>> = true;

template <class R>
FASTOPS_HD R merge(const R& a, const R& b) {
  if constexpr (R::kExtra == Extra::row) {
    return R::merge(a, b);
  } else {
    return R::combine(a, b);
  }
}

// all = no row is zero; any = some row is not.
template <bool all>
struct Truth {
  template <class V, class I>
  struct Of {
    using Row = I;
    static constexpr Extra kExtra = Extra::none;
    I found;
    FASTOPS_HD static Of of(V x, I) { return {I(all ? x == 0 : x != 0)}; }
    FASTOPS_HD static Of combine(const Of& a, const Of& b) { return {a.found | b.found}; }
    FASTOPS_HD I value(int64_t) const { return I(all ? found == 0 : found != 0) & 1; }
    template <class S, class J, class Pick>
    FASTOPS_HD Of<S, J> at(Pick pick, J) const {
      return {J(pick(found))};
    }
  };
};

}  // namespace fastops
