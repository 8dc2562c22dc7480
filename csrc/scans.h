// What is scanned, written once for both devices: running results of the rows of a segment, in either direction. The
// algebra is that of the reductions (reducers.h), of which a scan shows all steps, and one more:
//
//     linear     y_i = data_i + factor_i * y_(i - 1)
//
// whose rows are affine maps, joined one after the other. It serves the derivatives: what a later row hands back to
// earlier ones fades by the factors in between.
#pragma once

#include <limits>

#include "numeric.h"
#include "reducers.h"

namespace fastops {

enum class Scan : int8_t { sum, prod, max, min, logsumexp, linear };

template <class V, class I>
struct Linear {
  using Row = I;
  static constexpr Extra kExtra = Extra::none;
  V factor;
  V total;
  FASTOPS_HD static Linear of(V x, V factor) { return {factor, x}; }
  FASTOPS_HD static Linear combine(const Linear& a, const Linear& b) { return {a.factor * b.factor, b.total + b.factor * a.total}; }
  FASTOPS_HD V value(int64_t) const { return total; }
  template <class S, class J, class Pick>
  FASTOPS_HD Linear<S, J> at(Pick pick, J) const {
    return {S(pick(factor)), S(pick(total))};
  }
};

// What is known of some rows and of those met after them. Of extrema that tie, the smallest row number wins whatever the
// direction.
template <class R>
FASTOPS_HD R met(const R& before, const R& after, [[maybe_unused]] bool reverse) {
  if constexpr (R::kExtra == Extra::row) {
    return reverse ? R::combine(after, before) : R::combine(before, after);
  } else {
    return R::combine(before, after);
  }
}

// The result of no rows, with which an exclusive scan begins, as Out; V is what is computed in.
template <class Out, class V>
FASTOPS_HD Out nothing(Scan kind, [[maybe_unused]] DType dtype) {
  if (kind == Scan::prod) return store_as<Out>(V(1));
  if constexpr (is_floating<V>) {
    if (kind == Scan::min) return store_as<Out>(V(INFINITY));
    if (kind == Scan::max || kind == Scan::logsumexp) return store_as<Out>(V(-INFINITY));
  } else {
    if (kind == Scan::min) return dtype == DType::b8 ? Out(1) : std::numeric_limits<Out>::max();
    if (kind == Scan::max) return std::numeric_limits<Out>::min();
  }
  return store_as<Out>(V(0));
}

}  // namespace fastops
