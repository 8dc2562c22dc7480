// What is done to each row once all rows of its segment are known: softmax, its logarithm, and the derivatives of both.
// Written once for scalars and for vectors, for the CPU and for CUDA, like the reducers that they build on.
//
//     N::State              a reducer: what has to be known of the rows
//     N::of(x, g)           of one row; x: data, or the result of which it is the derivative; g: the gradient
//     N::settle(state)      of all: what each row is measured by
//     N::apply(x, g, by)    the result for one row
//
// Infinities are values: where all rows are -inf, softmax is 0, its logarithm -inf and both gradients are 0. Where one is
// +inf, all are NaN, as in torch.
#pragma once

#include "numeric.h"
#include "reducers.h"

namespace fastops {

enum class Normalise : int8_t { softmax, log_softmax, softmax_backward, log_softmax_backward };

constexpr bool is_derivative(Normalise kind) {
  return kind == Normalise::softmax_backward || kind == Normalise::log_softmax_backward;
}

template <class V>
struct Settled {
  V top, by;
};

// x - top, where both may be infinite.
template <class V>
FASTOPS_HD V below(V x, V top) {
  return x == top ? V{} : x - top;
}

template <class V>
FASTOPS_HD V infinity() {
  return constant<V>(scalar_of<V>(INFINITY));
}

// The sum of the gradients of some rows, and the greatest of their results.
template <class V, class I>
struct GradientSum {
  using Row = I;
  static constexpr Extra kExtra = Extra::none;
  V total, top;
  FASTOPS_HD static GradientSum combine(const GradientSum& a, const GradientSum& b) {
    return {a.total + b.total, beats(b.top, a.top) ? b.top : a.top};
  }
  template <class S, class J, class Pick>
  FASTOPS_HD GradientSum<S, J> at(Pick pick, J) const {
    return {S(pick(total)), S(pick(top))};
  }
};

template <Normalise kind, class V>
struct Normaliser;

template <class V>
struct Normaliser<Normalise::softmax, V> {
  using State = LogSumExp<V, V>;
  FASTOPS_HD static State of(V x, V) { return State::of(x, V{}); }
  FASTOPS_HD static Settled<V> settle(const State& state) {
    const V one = constant<V>(1), infinite = state.top * V{};  // NaN for infinities
    return {state.top, state.top == -infinity<V>() ? V{} : one / state.total + infinite};
  }
  FASTOPS_HD static V apply(V x, V, const Settled<V>& settled) { return Math<V>::exp(below(x, settled.top)) * settled.by; }
};

template <class V>
struct Normaliser<Normalise::log_softmax, V> {
  using State = LogSumExp<V, V>;
  FASTOPS_HD static State of(V x, V) { return State::of(x, V{}); }
  FASTOPS_HD static Settled<V> settle(const State& state) {
    const V infinite = state.top * V{};
    return {state.top, state.top == -infinity<V>() ? infinity<V>() : Math<V>::log(state.total) + infinite};
  }
  FASTOPS_HD static V apply(V x, V, const Settled<V>& settled) { return below(x, settled.top) - settled.by; }
};

// dx_i = y_i (g_i - sum_j y_j g_j)
template <class V>
struct Normaliser<Normalise::softmax_backward, V> {
  using State = Sum<V, V>;
  FASTOPS_HD static State of(V y, V g) { return {y * g}; }
  FASTOPS_HD static Settled<V> settle(const State& state) { return {V{}, state.total}; }
  FASTOPS_HD static V apply(V y, V g, const Settled<V>& settled) { return y * (g - settled.by); }
};

// dx_i = g_i - exp(y_i) sum_j g_j
template <class V>
struct Normaliser<Normalise::log_softmax_backward, V> {
  using State = GradientSum<V, V>;
  FASTOPS_HD static State of(V y, V g) { return {g, y}; }
  FASTOPS_HD static Settled<V> settle(const State& state) { return {state.top, state.total}; }
  FASTOPS_HD static V apply(V y, V g, const Settled<V>& settled) {
    return settled.top == -infinity<V>() ? V{} : g - Math<V>::exp(y) * settled.by;
  }
};

}  // namespace fastops
