// Weighted sums. With g of segments [*, S, *], w of rows and heads [N, *] and x of rows [*, N, *], all of it is one form,
//     T(g, w, x) = sum over rows i and columns c of g[segment of i, c] w[i, head of c] x[i, c]
// which is linear in each: the three operators are its derivatives by g, x and w, and each other's.
//     _segment_weighted_sum(x, w)         dT/dg
//     _segment_weighted_broadcast(g, w)   dT/dx
//     _segment_dot(g, x)                  dT/dw
// x alone may have 16 bits; g and w have the type that is computed in.
#include <ATen/ops/zeros.h>

#include "host/calls.h"
#include "host/checks.h"

namespace fastops::host {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kOp = "segment_sum";

// Whether weight has the first dimensions of rows, counted from dim.
void check_weight(const Tensor& weight, const Tensor& like, int64_t dim, const SymInt& num_rows) {
  check_same_device(kOp, "weight", weight, "data", like);
  TORCH_CHECK_VALUE(weight.dim() >= 1 && weight.dim() <= like.dim() - dim, kOp, ": weight must have between 1 and ", like.dim() - dim,
                    " dimensions, but got ", weight.dim());
  for (int64_t d = 0; d < weight.dim(); ++d) {
    const SymInt size = d == 0 ? num_rows : like.sym_size(dim + d);
    TORCH_CHECK_VALUE(weight.sym_size(d) == size, kOp, ": weight must have size ", size, " in dim ", d, ", but got ", weight.sym_size(d));
  }
}

void check_weight_dtype(const Tensor& weight, ScalarType data) {
  TORCH_CHECK_TYPE(weight.scalar_type() == computed_in(data), kOp, ": weight must be ", name_of(computed_in(data)), " for ",
                   name_of(data), " data, but got ", name_of(weight.scalar_type()));
}

// Of a contiguous weight.
RowWeights weights_of(const Tensor& weight, const SymInt& inner) {
  int64_t heads = 1;
  for (int64_t d = 1; d < weight.dim(); ++d) heads *= weight.size(d);
  return {weight.const_data_ptr(), heads, heads == 0 ? 0 : inner.expect_int() / heads};
}

Tensor segment_weighted_sum(const Tensor& data, const Tensor& weight, FASTOPS_GROUPING, int64_t dim, bool wide, const at::Scalar& fill) {
  const ScalarType type = data.scalar_type();
  TORCH_CHECK_TYPE(is_floating(type) || type == at::kLong, kOp, ": data must be one of ", kFloatingNames, ", int64, but got ", name_of(type));
  const Shape shape = check_grouping(kOp, "data", data, {offsets, order, index}, dim);
  check_weight_dtype(weight, type);
  check_weight(weight, data, shape.dim, shape.num_rows);
  const Tensor flat = weight.contiguous();
  const RowWeights weights = data.is_meta() ? RowWeights{} : weights_of(flat, shape.inner);
  return reduce_weighted(data, weights, {offsets, order, index}, dim, wide ? computed_in(type) : type, fill);
}

Tensor segment_weighted_broadcast(const Tensor& values, const Tensor& weight, FASTOPS_GROUPING, int64_t dim, ScalarType dtype) {
  check_dtype(kOp, "grad", dtype, true);
  check_weight_dtype(values, dtype);
  check_weight_dtype(weight, dtype);
  dim = check_dim(kOp, "values", values, dim);
  TORCH_CHECK_VALUE(weight.dim() >= 1, kOp, ": weight must have at least 1 dimension, but got 0");
  const SymInt num_rows = weight.sym_size(0);
  const Shape shape = check_grouping(kOp, "values", values, {offsets, order, index}, dim, num_rows);
  check_weight(weight, values, dim, num_rows);
  const Tensor flat = weight.contiguous();
  const RowWeights weights = values.is_meta() ? RowWeights{} : weights_of(flat, shape.inner);
  return broadcast_weighted(values, weights, {offsets, order, index}, num_rows, dim, dtype);
}

Tensor segment_dot(const Tensor& values, const Tensor& data, FASTOPS_GROUPING, int64_t dim, int64_t weight_dim) {
  const ScalarType type = data.scalar_type(), wide = computed_in(type);
  check_dtype(kOp, "data", type, true);
  check_weight_dtype(values, type);
  const Shape shape = check_grouping(kOp, "data", data, {offsets, order, index}, dim);
  TORCH_CHECK_VALUE(values.dim() == data.dim(), kOp, ": values must have the dimensions of data, but got ", values.dim());
  for (int64_t d = 0; d < data.dim(); ++d) {
    const SymInt size = d == shape.dim ? shape.num_segments : data.sym_size(d);
    TORCH_CHECK_VALUE(values.sym_size(d) == size, kOp, ": values must have size ", size, " in dim ", d, ", but got ", values.sym_size(d));
  }
  TORCH_CHECK_VALUE(weight_dim >= 1 && weight_dim <= data.dim() - shape.dim, kOp, ": weight must have between 1 and ",
                    data.dim() - shape.dim, " dimensions, but got ", weight_dim);
  const auto sizes = data.sym_sizes().slice(shape.dim, weight_dim);
  if (data.is_meta()) return at::empty_symint(sizes, data.options().dtype(wide));
  if (data.numel() == 0) return at::zeros_symint(sizes, data.options().dtype(wide));

  const HeldGrouping held({offsets, order, index}, shape);
  const Tensor out = at::empty_symint(sizes, data.options().dtype(wide)), handed = values.contiguous(), rows = data.contiguous();
  const RowWeights heads = weights_of(out, shape.inner);
  const DotCall call{*dtype_of(type), handed.const_data_ptr(), rows.const_data_ptr(), out.mutable_data_ptr(), heads.heads, heads.per_head,
                     held.view, shape.outer.expect_int(), shape.inner.expect_int()};
  FASTOPS_RUN_WITHOUT_WORKSPACE(dot_rows, data, call);
  return out;
}

// Derivatives. Those of each operator are the other two, and each argument is saved where the other has one.

Tensor saved_for(const Tensor& other, const Tensor& argument) { return other.requires_grad() ? argument : Tensor(); }

struct WeightedSumFunction : torch::autograd::Function<WeightedSumFunction> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& data, const Tensor& weight, FASTOPS_GROUPING, int64_t dim, bool wide,
                        const at::Scalar& fill) {
    at::AutoDispatchBelowADInplaceOrView guard;
    save_grouping(ctx, {saved_for(weight, data), saved_for(data, weight)}, {offsets, order, index});
    ctx->saved_data["dim"] = dim;
    ctx->saved_data["dtype"] = data.scalar_type();
    ctx->saved_data["weight_dim"] = weight.dim();
    return call_weighted_sum(data, weight, {offsets, order, index}, dim, wide, fill);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto tensors = ctx->get_saved_variables();
    const auto saved = saved_grouping(tensors, 2);
    const int64_t dim = ctx->saved_data["dim"].toInt();
    const ScalarType type = ctx->saved_data["dtype"].toScalarType();
    const Tensor grad = grads[0].to(computed_in(type));
    variable_list back(8);
    if (ctx->needs_input_grad(0)) back[0] = call_weighted_broadcast(grad, tensors[1], saved, dim, type);
    if (ctx->needs_input_grad(1)) back[1] = call_dot(grad, tensors[0], saved, dim, ctx->saved_data["weight_dim"].toInt());
    return back;
  }
};

struct WeightedBroadcastFunction : torch::autograd::Function<WeightedBroadcastFunction> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& values, const Tensor& weight, FASTOPS_GROUPING, int64_t dim, ScalarType dtype) {
    at::AutoDispatchBelowADInplaceOrView guard;
    save_grouping(ctx, {saved_for(weight, values), saved_for(values, weight)}, {offsets, order, index});
    ctx->saved_data["dim"] = dim;
    ctx->saved_data["weight_dim"] = weight.dim();
    return call_weighted_broadcast(values, weight, {offsets, order, index}, dim, dtype);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto tensors = ctx->get_saved_variables();
    const auto saved = saved_grouping(tensors, 2);
    const int64_t dim = ctx->saved_data["dim"].toInt();
    variable_list back(7);
    if (ctx->needs_input_grad(0)) back[0] = call_weighted_sum(grads[0], tensors[1], saved, dim, true, 0);
    if (ctx->needs_input_grad(1)) back[1] = call_dot(tensors[0], grads[0], saved, dim, ctx->saved_data["weight_dim"].toInt());
    return back;
  }
};

struct DotFunction : torch::autograd::Function<DotFunction> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& values, const Tensor& data, FASTOPS_GROUPING, int64_t dim, int64_t weight_dim) {
    at::AutoDispatchBelowADInplaceOrView guard;
    save_grouping(ctx, {saved_for(data, values), saved_for(values, data)}, {offsets, order, index});
    ctx->saved_data["dim"] = dim;
    ctx->saved_data["dtype"] = data.scalar_type();
    return call_dot(values, data, {offsets, order, index}, dim, weight_dim);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto tensors = ctx->get_saved_variables();
    const auto saved = saved_grouping(tensors, 2);
    const int64_t dim = ctx->saved_data["dim"].toInt();
    variable_list back(7);
    if (ctx->needs_input_grad(0)) back[0] = call_weighted_sum(tensors[1], grads[0], saved, dim, true, 0);
    if (ctx->needs_input_grad(1)) {
      back[1] = call_weighted_broadcast(tensors[0], grads[0], saved, dim, ctx->saved_data["dtype"].toScalarType());
    }
    return back;
  }
};

Tensor weighted_sum_autograd(const Tensor& data, const Tensor& weight, FASTOPS_GROUPING, int64_t dim, bool wide, const at::Scalar& fill) {
  if ((wants_grad(data) || wants_grad(weight)) && is_floating(data.scalar_type())) {
    return WeightedSumFunction::apply(data, weight, offsets, order, index, dim, wide, fill);
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return call_weighted_sum(data, weight, {offsets, order, index}, dim, wide, fill);
}

Tensor weighted_broadcast_autograd(const Tensor& values, const Tensor& weight, FASTOPS_GROUPING, int64_t dim, ScalarType dtype) {
  if (wants_grad(values) || wants_grad(weight)) {
    return WeightedBroadcastFunction::apply(values, weight, offsets, order, index, dim, dtype);
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return call_weighted_broadcast(values, weight, {offsets, order, index}, dim, dtype);
}

Tensor dot_autograd(const Tensor& values, const Tensor& data, FASTOPS_GROUPING, int64_t dim, int64_t weight_dim) {
  if (wants_grad(values) || wants_grad(data)) return DotFunction::apply(values, data, offsets, order, index, dim, weight_dim);
  at::AutoDispatchBelowADInplaceOrView guard;
  return call_dot(values, data, {offsets, order, index}, dim, weight_dim);
}

void implement_weighted(torch::Library& m) {
  m.impl("_segment_weighted_sum", segment_weighted_sum);
  m.impl("_segment_weighted_broadcast", segment_weighted_broadcast);
  m.impl("_segment_dot", segment_dot);
}

}  // namespace

TORCH_LIBRARY_IMPL(fastops, CPU, m) { implement_weighted(m); }
TORCH_LIBRARY_IMPL(fastops, Meta, m) { implement_weighted(m); }
#ifdef FASTOPS_WITH_CUDA
TORCH_LIBRARY_IMPL(fastops, CUDA, m) { implement_weighted(m); }
#endif

TORCH_LIBRARY_IMPL(fastops, Autograd, m) {
  m.impl("_segment_weighted_sum", weighted_sum_autograd);
  m.impl("_segment_weighted_broadcast", weighted_broadcast_autograd);
  m.impl("_segment_dot", dot_autograd);
}

}  // namespace fastops::host
