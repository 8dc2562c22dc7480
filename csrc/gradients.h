// What each row receives from its segment, written once for the CPU and for CUDA: the broadcast itself and the
// derivatives of the reductions. Forward there is an algebra that meets rows one after the other; here each row is on
// its own, so these are plain functions of one element.
//
// A map M<T> is made for one segment and column, from the values there, and then asked for each row:
//     M(args, at, column, length)   args: the arrays of the call; at: element of [outer, S, inner]; column: of inner;
//                                   length: rows of s
//     map(x, row)                   x: the element of data (kReadsData), row: its row number
#pragma once

#include <type_traits>

#include "numeric.h"

namespace fastops {

enum class RowMap : int8_t {
  broadcast,
  weighted,  // the broadcast times a factor of the row
  mean,      // the derivative of the mean
  select,    // of max and min: to the row that was returned
  extremum,  // of amax and amin: evenly to all rows that tie
  prod,
  logsumexp,
  variance,
};

// Factors of rows: one for each row and each of `heads` runs of neighbouring columns, the same for all outer slices.
struct RowWeights {
  const void* data;  // [N, heads] of the type that is computed in; none: all are 1
  int64_t heads, per_head;  // heads * per_head = inner

  FASTOPS_HD int64_t head(int64_t column) const {
    if (per_head == 1) return column;
    // Dividing numbers of 32 bits is several times as fast.
    return column < UINT32_MAX && per_head < UINT32_MAX ? uint32_t(column) / uint32_t(per_head) : column / per_head;
  }
};

struct RowMapArrays {
  const void* values;    // [outer, S, inner] what is handed down
  const void* result;    // extremum, logsumexp: the reduction's result; prod: the product of the elements that are not
                         // zero; variance: the mean
  const int64_t* extra;  // select: row numbers; extremum: number of ties; prod: number of zeros
  double correction;     // variance
  RowWeights weights;    // weighted
};

// The types of values and of result where they are not those of the elements.
template <class M, class T>
struct MapTypes {
  using Value = T;
  using Result = T;
};

template <class T>
struct BroadcastMap {
  static constexpr bool kReadsData = false;
  T value;
  FASTOPS_HD BroadcastMap(const RowMapArrays& arrays, int64_t at, int64_t, int64_t)
      : value(static_cast<const T*>(arrays.values)[at]) {}
  FASTOPS_HD T operator()(T, int64_t) const { return value; }
};

// The derivative of a weighted sum: the segment's value times the factor of the row.
template <class T>
struct WeightedMap {
  static constexpr bool kReadsData = false;
  using V = compute_t<T>;
  V value;
  const V* weight;  // of row 0
  int64_t heads;
  FASTOPS_HD WeightedMap(const RowMapArrays& arrays, int64_t at, int64_t column, int64_t)
      : value(static_cast<const V*>(arrays.values)[at]),
        weight(static_cast<const V*>(arrays.weights.data) + arrays.weights.head(column)),
        heads(arrays.weights.heads) {}
  FASTOPS_HD T operator()(T, int64_t row) const { return store_as<T>(value * weight[row * heads]); }
};
template <class T>
struct MapTypes<WeightedMap<T>, T> {
  using Value = compute_t<T>;
  using Result = T;
};

// The same where each element has a weight of its type: they are read as data.
template <class T>
struct ElementwiseMap {
  static constexpr bool kReadsData = true;
  T value;
  FASTOPS_HD ElementwiseMap(const RowMapArrays& arrays, int64_t at, int64_t, int64_t)
      : value(static_cast<const T*>(arrays.values)[at]) {}
  FASTOPS_HD T operator()(T weight, int64_t) const { return value * weight; }
};

template <class T>
struct MeanMap {
  static constexpr bool kReadsData = false;
  T value;
  FASTOPS_HD MeanMap(const RowMapArrays& arrays, int64_t at, int64_t, int64_t length) {
    using V = compute_t<T>;
    value = store_as<T>(load_as<V>(static_cast<const T*>(arrays.values)[at]) / V(length));
  }
  FASTOPS_HD T operator()(T, int64_t) const { return value; }
};

template <class T>
struct SelectMap {
  static constexpr bool kReadsData = false;
  T value;
  int64_t selected;
  FASTOPS_HD SelectMap(const RowMapArrays& arrays, int64_t at, int64_t, int64_t)
      : value(static_cast<const T*>(arrays.values)[at]), selected(arrays.extra[at]) {}
  FASTOPS_HD T operator()(T, int64_t row) const { return row == selected ? value : T{}; }
};

template <class T>
struct ExtremumMap {
  static constexpr bool kReadsData = true;
  using V = compute_t<T>;
  T share;
  V best;
  FASTOPS_HD ExtremumMap(const RowMapArrays& arrays, int64_t at, int64_t, int64_t)
      : share(store_as<T>(load_as<V>(static_cast<const T*>(arrays.values)[at]) / V(arrays.extra[at]))),
        best(load_as<V>(static_cast<const T*>(arrays.result)[at])) {}
  FASTOPS_HD T operator()(T element, int64_t) const {
    const V x = load_as<V>(element);
    return (x == best) | ((x != x) & (best != best)) ? share : T{};
  }
};

// d prod / d x_i = the product of the others: product / x_i without zeros; with one zero it is the product for the
// zero and 0 for the rest; with more it is 0. In double, where the product of floats cannot overflow before dividing.
template <class T>
struct ProductMap {
  static constexpr bool kReadsData = true;
  double share;  // gradient times the product of the elements that are not zero
  int64_t zeros;
  FASTOPS_HD ProductMap(const RowMapArrays& arrays, int64_t at, int64_t, int64_t)
      : share(load_as<double>(static_cast<const T*>(arrays.values)[at]) *
              static_cast<const double*>(arrays.result)[at]),
        zeros(arrays.extra[at]) {}
  FASTOPS_HD T operator()(T element, int64_t) const {
    const double x = load_as<double>(element);
    if (zeros == 0) return store_as<T>(share / x);
    return zeros == 1 && x == 0 ? store_as<T>(share) : T{};
  }
};

template <class T>
struct MapTypes<ProductMap<T>, T> {
  using Value = T;
  using Result = double;
};

// d log(sum(exp(x))) / d x_i = exp(x_i - result)
template <class T>
struct LogSumExpMap {
  static constexpr bool kReadsData = true;
  using V = compute_t<T>;
  V grad, result;
  FASTOPS_HD LogSumExpMap(const RowMapArrays& arrays, int64_t at, int64_t, int64_t)
      : grad(load_as<V>(static_cast<const T*>(arrays.values)[at])), result(static_cast<const V*>(arrays.result)[at]) {
    if (result == -V(INFINITY)) grad = 0, result = V(INFINITY);  // all rows are -inf: no direction is up
  }
  FASTOPS_HD T operator()(T element, int64_t) const {
    return store_as<T>(grad * Math<V>::exp(load_as<V>(element) - result));
  }
};
template <class T>
struct MapTypes<LogSumExpMap<T>, T> {
  using Value = T;
  using Result = compute_t<T>;
};

// d var / d x_i = 2 (x_i - mean) / (length - correction)
template <class T>
struct VarianceMap {
  static constexpr bool kReadsData = true;
  using V = compute_t<T>;
  V factor, mean;
  bool is_defined;
  FASTOPS_HD VarianceMap(const RowMapArrays& arrays, int64_t at, int64_t, int64_t length)
      : factor(static_cast<const V*>(arrays.values)[at]), mean(static_cast<const V*>(arrays.result)[at]) {
    const double divisor = double(length) - arrays.correction;
    is_defined = divisor > 0;
    factor = factor * (2 / V(divisor));
    mean += mean - mean;  // around an infinity there is no direction
  }
  FASTOPS_HD T operator()(T element, int64_t) const {
    return is_defined ? store_as<T>(factor * (load_as<V>(element) - mean)) : T{};
  }
};
template <class T>
struct MapTypes<VarianceMap<T>, T> {
  using Value = compute_t<T>;
  using Result = compute_t<T>;
};

}  // namespace fastops
