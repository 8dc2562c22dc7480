// Typed calls of the operators, through the dispatcher, and the part of a derivative's context that all share.
#pragma once

#include <ATen/ops/ones.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/where.h>
#include <torch/csrc/autograd/custom_function.h>

#include "host/checks.h"

namespace fastops::host {

inline bool wants_grad(const Tensor& tensor) { return at::GradMode::is_enabled() && tensor.requires_grad(); }

// Grouping tensors held by value, for derivatives.
struct SavedGrouping {
  Tensor offsets;
  OptionalTensor order, index;
  operator Grouping() const { return {offsets, order, index}; }
};

// Saves `tensors`, then the grouping. A later change in place of any of them is found out by autograd.
inline void save_grouping(torch::autograd::AutogradContext* ctx, std::initializer_list<Tensor> tensors, const Grouping& grouping) {
  torch::autograd::variable_list all;
  all.reserve(tensors.size() + 3);
  all.insert(all.end(), tensors);
  all.push_back(grouping.offsets);
  all.push_back(grouping.order.value_or(Tensor()));
  all.push_back(grouping.index.value_or(Tensor()));
  ctx->save_for_backward(std::move(all));
}

// The grouping saved behind `before` other tensors. They are asked for once in a derivative: activation checkpointing lets
// nobody ask twice.
inline SavedGrouping saved_grouping(const torch::autograd::variable_list& tensors, size_t before) {
  const auto optional = [](const Tensor& tensor) { return tensor.defined() ? OptionalTensor(tensor) : std::nullopt; };
  return {tensors[before], optional(tensors[before + 1]), optional(tensors[before + 2])};
}

using OptionalDtype = std::optional<ScalarType>;
using TensorPair = std::tuple<Tensor, Tensor>;
using ReduceSignature = Tensor(const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&, int64_t, OptionalDtype,
                               const at::Scalar&);
using ExtremumSignature = Tensor(const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&, int64_t,
                                 const at::Scalar&);
using PairSignature = TensorPair(const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&, int64_t,
                                 const at::Scalar&);
using BroadcastSignature = Tensor(const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&, SymInt, int64_t);

inline Tensor call_linear(Reduction reduction, const Tensor& data, const Grouping& g, int64_t dim, OptionalDtype dtype,
                          const at::Scalar& fill) {
  FASTOPS_OPERATOR(ReduceSignature, sum, "segment_sum");
  FASTOPS_OPERATOR(ReduceSignature, mean, "segment_mean");
  FASTOPS_OPERATOR(ReduceSignature, prod, "segment_prod");
  const auto& op = reduction == Reduction::sum ? sum : reduction == Reduction::mean ? mean : prod;
  return op.call(data, g.offsets, g.order, g.index, dim, dtype, fill);
}

inline Tensor call_sum(const Tensor& data, const Grouping& g, int64_t dim) {
  return call_linear(Reduction::sum, data, g, dim, std::nullopt, 0);
}

inline Tensor call_extremum(bool largest, const Tensor& data, const Grouping& g, int64_t dim, const at::Scalar& fill) {
  FASTOPS_OPERATOR(ExtremumSignature, amax, "segment_amax");
  FASTOPS_OPERATOR(ExtremumSignature, amin, "segment_amin");
  return (largest ? amax : amin).call(data, g.offsets, g.order, g.index, dim, fill);
}

inline TensorPair call_extremum_with_row(bool largest, const Tensor& data, const Grouping& g, int64_t dim, const at::Scalar& fill) {
  FASTOPS_OPERATOR(PairSignature, max, "segment_max");
  FASTOPS_OPERATOR(PairSignature, min, "segment_min");
  return (largest ? max : min).call(data, g.offsets, g.order, g.index, dim, fill);
}

inline TensorPair call_extremum_count(bool largest, const Tensor& data, const Grouping& g, int64_t dim, const at::Scalar& fill) {
  FASTOPS_OPERATOR(PairSignature, amax, "_segment_amax_count");
  FASTOPS_OPERATOR(PairSignature, amin, "_segment_amin_count");
  return (largest ? amax : amin).call(data, g.offsets, g.order, g.index, dim, fill);
}

inline TensorPair call_prod_parts(const Tensor& data, const Grouping& g, int64_t dim) {
  using Signature = TensorPair(const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&, int64_t);
  FASTOPS_OPERATOR(Signature, op, "_segment_prod_parts");
  return op.call(data, g.offsets, g.order, g.index, dim);
}

inline Tensor call_broadcast(const Tensor& values, const Grouping& g, SymInt num_rows, int64_t dim) {
  FASTOPS_OPERATOR(BroadcastSignature, op, "segment_broadcast");
  return op.call(values, g.offsets, g.order, g.index, std::move(num_rows), dim);
}

// Data with a number in place of what stands in rows of no segment: 0 * NaN would hand it on to derivatives.
inline Tensor without_others(const Tensor& data, const Grouping& g, int64_t dim, double instead) {
  if (!g.order) return data;
  dim = at::maybe_wrap_dim(dim, data.dim());
  const auto listed = g.order->sym_size(0).maybe_as_int(), rows = data.sym_size(dim).maybe_as_int();
  if (listed && listed == rows) return data;
  Tensor belongs = call_broadcast(at::ones_symint({g.offsets.sym_size(0) - 1}, data.options().dtype(at::kBool)), g, data.sym_size(dim), 0);
  for (int64_t d = dim + 1; d < data.dim(); ++d) belongs = belongs.unsqueeze(-1);
  return at::where(belongs, data, at::scalar_tensor(instead, data.options()));
}

inline Tensor call_weighted_sum(const Tensor& data, const Tensor& weight, const Grouping& g, int64_t dim, bool wide,
                                const at::Scalar& fill) {
  using Signature = Tensor(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&, int64_t, bool,
                           const at::Scalar&);
  FASTOPS_OPERATOR(Signature, op, "_segment_weighted_sum");
  return op.call(data, weight, g.offsets, g.order, g.index, dim, wide, fill);
}

inline Tensor call_weighted_broadcast(const Tensor& values, const Tensor& weight, const Grouping& g, int64_t dim, ScalarType dtype) {
  using Signature = Tensor(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&, int64_t, ScalarType);
  FASTOPS_OPERATOR(Signature, op, "_segment_weighted_broadcast");
  return op.call(values, weight, g.offsets, g.order, g.index, dim, dtype);
}

inline Tensor call_dot(const Tensor& values, const Tensor& data, const Grouping& g, int64_t dim, int64_t weight_dim) {
  using Signature = Tensor(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&, int64_t, int64_t);
  FASTOPS_OPERATOR(Signature, op, "_segment_dot");
  return op.call(values, data, g.offsets, g.order, g.index, dim, weight_dim);
}

inline Tensor call_mean_backward(const Tensor& grad, const Grouping& g, SymInt num_rows, int64_t dim) {
  FASTOPS_OPERATOR(BroadcastSignature, op, "_segment_mean_backward");
  return op.call(grad, g.offsets, g.order, g.index, std::move(num_rows), dim);
}

inline Tensor call_select_backward(const Tensor& grad, const Tensor& indices, const Grouping& g, SymInt num_rows, int64_t dim) {
  using Signature = Tensor(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&, SymInt, int64_t);
  FASTOPS_OPERATOR(Signature, op, "_segment_select_backward");
  return op.call(grad, indices, g.offsets, g.order, g.index, std::move(num_rows), dim);
}

inline Tensor call_place(const Tensor& values, const Tensor& indices, SymInt num_rows, int64_t dim) {
  using Signature = Tensor(const Tensor&, const Tensor&, SymInt, int64_t);
  FASTOPS_OPERATOR(Signature, op, "_segment_place");
  return op.call(values, indices, std::move(num_rows), dim);
}

using ThreeSignature = Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
                              const OptionalTensor&, int64_t);

inline Tensor call_extremum_backward(const Tensor& grad, const Tensor& data, const Tensor& values, const Tensor& counts,
                                     const Grouping& g, int64_t dim) {
  FASTOPS_OPERATOR(ThreeSignature, op, "_segment_extremum_backward");
  return op.call(grad, data, values, counts, g.offsets, g.order, g.index, dim);
}

inline Tensor call_prod_backward(const Tensor& grad, const Tensor& data, const Tensor& product, const Tensor& zeros,
                                 const Grouping& g, int64_t dim) {
  FASTOPS_OPERATOR(ThreeSignature, op, "_segment_prod_backward");
  return op.call(grad, data, product, zeros, g.offsets, g.order, g.index, dim);
}

using RowSignature = Tensor(const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&, int64_t);
using RowBackwardSignature = Tensor(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&, int64_t);

inline Tensor call_softmax(bool log, const Tensor& data, const Grouping& g, int64_t dim) {
  FASTOPS_OPERATOR(RowSignature, softmax, "segment_softmax");
  FASTOPS_OPERATOR(RowSignature, log_softmax, "segment_log_softmax");
  return (log ? log_softmax : softmax).call(data, g.offsets, g.order, g.index, dim);
}

inline Tensor call_softmax_backward(bool log, const Tensor& grad, const Tensor& result, const Grouping& g, int64_t dim) {
  FASTOPS_OPERATOR(RowBackwardSignature, softmax, "_segment_softmax_backward");
  FASTOPS_OPERATOR(RowBackwardSignature, log_softmax, "_segment_log_softmax_backward");
  return (log ? log_softmax : softmax).call(grad, result, g.offsets, g.order, g.index, dim);
}

inline Tensor call_logsumexp(const Tensor& data, const Grouping& g, int64_t dim, const std::optional<at::Scalar>& fill, bool wide) {
  using Signature = Tensor(const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&, int64_t,
                           const std::optional<at::Scalar>&);
  FASTOPS_OPERATOR(Signature, plain, "segment_logsumexp");
  FASTOPS_OPERATOR(Signature, wider, "_segment_logsumexp_wide");
  return (wide ? wider : plain).call(data, g.offsets, g.order, g.index, dim, fill);
}

inline Tensor call_logsumexp_backward(const Tensor& grad, const Tensor& data, const Tensor& result, const Grouping& g, int64_t dim) {
  using Signature = Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&, int64_t);
  FASTOPS_OPERATOR(Signature, op, "_segment_logsumexp_backward");
  return op.call(grad, data, result, g.offsets, g.order, g.index, dim);
}

inline Tensor call_spread(bool root, const Tensor& data, const Grouping& g, int64_t dim, double correction, const at::Scalar& fill) {
  using Signature = Tensor(const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&, int64_t, double, const at::Scalar&);
  FASTOPS_OPERATOR(Signature, var, "segment_var");
  FASTOPS_OPERATOR(Signature, std, "segment_std");
  return (root ? std : var).call(data, g.offsets, g.order, g.index, dim, correction, fill);
}

inline TensorPair call_moments(bool root, const Tensor& data, const Grouping& g, int64_t dim, double correction, const at::Scalar& fill) {
  using Signature = TensorPair(const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&, int64_t, double, bool,
                               const at::Scalar&);
  FASTOPS_OPERATOR(Signature, op, "_segment_moments");
  return op.call(data, g.offsets, g.order, g.index, dim, correction, root, fill);
}

inline Tensor call_var_backward(const Tensor& grad, const Tensor& data, const Tensor& mean, const Grouping& g, int64_t dim,
                                double correction) {
  using Signature = Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&,
                           int64_t, double);
  FASTOPS_OPERATOR(Signature, op, "_segment_var_backward");
  return op.call(grad, data, mean, g.offsets, g.order, g.index, dim, correction);
}

using ScanSignature = Tensor(const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&, int64_t, bool, bool);

inline Tensor call_cumulative(Scan kind, const Tensor& data, const Grouping& g, int64_t dim, bool exclusive, bool reverse,
                              OptionalDtype dtype = std::nullopt) {
  using Signature = Tensor(const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&, int64_t, OptionalDtype, bool, bool);
  FASTOPS_OPERATOR(Signature, sum, "segment_cumsum");
  FASTOPS_OPERATOR(Signature, prod, "segment_cumprod");
  return (kind == Scan::sum ? sum : prod).call(data, g.offsets, g.order, g.index, dim, dtype, exclusive, reverse);
}

inline TensorPair call_cumulative_extremum(bool largest, const Tensor& data, const Grouping& g, int64_t dim, bool exclusive, bool reverse) {
  using Signature = TensorPair(const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&, int64_t, bool, bool);
  FASTOPS_OPERATOR(Signature, max, "segment_cummax");
  FASTOPS_OPERATOR(Signature, min, "segment_cummin");
  return (largest ? max : min).call(data, g.offsets, g.order, g.index, dim, exclusive, reverse);
}

inline Tensor call_logcumsumexp(const Tensor& data, const Grouping& g, int64_t dim, bool exclusive, bool reverse) {
  FASTOPS_OPERATOR(ScanSignature, op, "segment_logcumsumexp");
  return op.call(data, g.offsets, g.order, g.index, dim, exclusive, reverse);
}

inline Tensor call_linear_scan(const Tensor& factors, const Tensor& data, const Grouping& g, int64_t dim, bool reverse) {
  using Signature = Tensor(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&, int64_t, bool);
  FASTOPS_OPERATOR(Signature, op, "_segment_linear_scan");
  return op.call(factors, data, g.offsets, g.order, g.index, dim, reverse);
}

// What goes to selected rows, and back. Saved with the grouping, so that a change of that in place is found out here too.
// Row numbers are integers, which autograd knows to have no derivative; compiled autograd refuses to be told so.
template <class Select>
torch::autograd::variable_list forward_select(torch::autograd::AutogradContext* ctx, const Tensor& data, const Grouping& grouping,
                                              int64_t dim, Select&& select) {
  at::AutoDispatchBelowADInplaceOrView guard;
  const auto [values, indices] = select();
  save_grouping(ctx, {indices}, grouping);
  dim = at::maybe_wrap_dim(dim, data.dim());
  ctx->saved_data["dim"] = dim;
  ctx->saved_data["num_rows"] = data.sym_size(dim);
  return {values, indices};
}

// One row of each segment.
inline Tensor backward_one(torch::autograd::AutogradContext* ctx, const Tensor& grad) {
  const auto tensors = ctx->get_saved_variables();
  return call_select_backward(grad, tensors[0], saved_grouping(tensors, 1), ctx->saved_data["num_rows"].toSymInt(),
                              ctx->saved_data["dim"].toInt());
}

using RowSelectionSignature = TensorPair(const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&, int64_t,
                                         const OptionalScalar&);
using RowSelection = TensorPair (*)(const Tensor& data, const Grouping&, int64_t dim, const OptionalScalar& fill);

// The derivative of an operator that selects a row of each segment by its value: `call` is its call.
template <RowSelection call>
struct SelectRowFunction : torch::autograd::Function<SelectRowFunction<call>> {
  static constexpr bool is_traceable = true;

  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* ctx, const Tensor& data, FASTOPS_GROUPING, int64_t dim,
                                                const OptionalScalar& fill) {
    return forward_select(ctx, data, {offsets, order, index}, dim, [&] { return call(data, {offsets, order, index}, dim, fill); });
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx, const torch::autograd::variable_list& grads) {
    return {backward_one(ctx, grads[0]), {}, {}, {}, {}, {}};
  }
};

template <RowSelection call>
TensorPair select_row_autograd(const Tensor& data, FASTOPS_GROUPING, int64_t dim, const OptionalScalar& fill) {
  if (wants_grad(data) && is_floating(data.scalar_type())) {
    const auto results = SelectRowFunction<call>::apply(data, offsets, order, index, dim, fill);
    return {results[0], results[1]};
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return call(data, {offsets, order, index}, dim, fill);
}

}  // namespace fastops::host
