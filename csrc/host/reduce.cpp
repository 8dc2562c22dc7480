// Reductions: checks, allocation, choice of the kernel, derivatives.
#include <ATen/ops/ones.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include "host/calls.h"
#include "host/checks.h"

namespace fastops::host {
namespace {

using at::Scalar;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using OptionalType = std::optional<ScalarType>;
using Pair = std::tuple<Tensor, Tensor>;

struct Wanted {
  Reduction reduction;
  ScalarType out;          // undefined: only `extra` is wanted
  bool extra = false;
  int64_t fill_extra = 0;
  bool mean = false;       // moments: in place of extra
  double correction = 0;
  bool root = false;
  RowWeights weights = {};
};

// Runs a reduction: (values, extra or mean), either of which may be undefined.
Pair reduce(const char* op, const Tensor& data, const Grouping& grouping, int64_t dim, const Scalar& fill, const Wanted& wanted) {
  const Shape shape = check_grouping(op, "data", data, grouping, dim);
  ReduceCall call{};
  Tensor out, extra;
  if (wanted.out != ScalarType::Undefined) {
    std::tie(call.fill, call.fill_integer) = fill_as(op, fill, wanted.out);
    out = empty_resized(data, shape.dim, shape.num_segments, wanted.out);
  }
  if (wanted.extra) extra = empty_resized(data, shape.dim, shape.num_segments, at::kLong);
  if (wanted.mean) extra = empty_resized(data, shape.dim, shape.num_segments, computed_in(data.scalar_type()));
  if (data.is_meta()) return {out, extra};

  const HeldGrouping held(grouping, shape);
  const Tensor rows = data.contiguous();
  call.reduction = wanted.reduction;
  call.dtype = *dtype_of(data.scalar_type());
  call.wide_out = wanted.out == at::kFloat && data.element_size() == 2 && data.is_floating_point();
  call.data = rows.const_data_ptr();
  call.out = out.defined() ? out.mutable_data_ptr() : nullptr;
  call.extra = wanted.extra ? extra.mutable_data_ptr<int64_t>() : nullptr;
  call.mean = wanted.mean ? extra.mutable_data_ptr() : nullptr;
  call.correction = wanted.correction;
  call.root = wanted.root;
  call.weights = wanted.weights;
  call.fill_extra = wanted.fill_extra;
  call.segments = held.view;
  call.outer = shape.outer.expect_int();
  call.inner = shape.inner.expect_int();
  FASTOPS_RUN(reduce, data, call);
  return {out, extra};
}

Tensor reduce_promoted(Reduction reduction, const char* op, const Tensor& data, const Grouping& grouping, int64_t dim,
                       const OptionalType& dtype, const Scalar& fill) {
  const auto [rows, out, final] = promote(op, data, dtype, reduction == Reduction::mean);
  Tensor result = std::get<0>(reduce(op, rows, grouping, dim, fill, {reduction, out}));
  return final ? result.to(*final) : result;
}

Tensor segment_sum(const Tensor& data, FASTOPS_GROUPING, int64_t dim, OptionalType dtype, const Scalar& fill) {
  return reduce_promoted(Reduction::sum, "segment_sum", data, {offsets, order, index}, dim, dtype, fill);
}
Tensor segment_mean(const Tensor& data, FASTOPS_GROUPING, int64_t dim, OptionalType dtype, const Scalar& fill) {
  return reduce_promoted(Reduction::mean, "segment_mean", data, {offsets, order, index}, dim, dtype, fill);
}
Tensor segment_prod(const Tensor& data, FASTOPS_GROUPING, int64_t dim, OptionalType dtype, const Scalar& fill) {
  return reduce_promoted(Reduction::prod, "segment_prod", data, {offsets, order, index}, dim, dtype, fill);
}

template <Reduction reduction>
const char* name() {
  switch (reduction) {
    case Reduction::amax:
    case Reduction::amax_count: return "segment_amax";
    case Reduction::amin:
    case Reduction::amin_count: return "segment_amin";
    case Reduction::max: return "segment_max";
    case Reduction::min: return "segment_min";
    case Reduction::any: return "segment_any";
    case Reduction::all: return "segment_all";
    default: return "segment_prod";
  }
}

template <Reduction reduction>
Tensor segment_extremum(const Tensor& data, FASTOPS_GROUPING, int64_t dim, const Scalar& fill) {
  check_dtype(name<reduction>(), "data", data.scalar_type(), false);
  return std::get<0>(reduce(name<reduction>(), data, {offsets, order, index}, dim, fill, {reduction, data.scalar_type()}));
}

template <Reduction reduction>
Pair segment_extremum_and_extra(const Tensor& data, FASTOPS_GROUPING, int64_t dim, const Scalar& fill) {
  constexpr bool counts = reduction == Reduction::amax_count || reduction == Reduction::amin_count;
  check_dtype(name<reduction>(), "data", data.scalar_type(), counts);
  return reduce(name<reduction>(), data, {offsets, order, index}, dim, fill,
                {reduction, data.scalar_type(), true, counts ? 0 : -1});
}

template <Reduction reduction>
Tensor segment_arg(const Tensor& data, FASTOPS_GROUPING, int64_t dim, int64_t fill) {
  const char* op = reduction == Reduction::max ? "segment_argmax" : "segment_argmin";
  check_dtype(op, "data", data.scalar_type(), false);
  return std::get<1>(reduce(op, data, {offsets, order, index}, dim, 0, {reduction, ScalarType::Undefined, true, fill}));
}

template <Reduction reduction>
Tensor segment_truth(const Tensor& data, FASTOPS_GROUPING, int64_t dim, bool fill) {
  check_dtype(name<reduction>(), "data", data.scalar_type(), false);
  const ScalarType out = data.scalar_type() == at::kByte ? at::kByte : at::kBool;  // torch.any of uint8 is uint8
  return std::get<0>(reduce(name<reduction>(), data, {offsets, order, index}, dim, Scalar(int64_t(fill)), {reduction, out}));
}

Pair segment_prod_parts(const Tensor& data, FASTOPS_GROUPING, int64_t dim) {
  check_dtype("segment_prod", "data", data.scalar_type(), true);
  return reduce("segment_prod", data, {offsets, order, index}, dim, 1, {Reduction::prod_parts, at::kDouble, true, 0});
}

// Where none is given: a schema cannot say -inf.
const Scalar& or_minus_infinity(const OptionalScalar& fill) {
  static const Scalar minus_infinity(-std::numeric_limits<double>::infinity());
  return fill ? *fill : minus_infinity;
}

Tensor segment_logsumexp(const Tensor& data, FASTOPS_GROUPING, int64_t dim, const OptionalScalar& fill) {
  check_dtype("segment_logsumexp", "data", data.scalar_type(), true);
  return std::get<0>(reduce("segment_logsumexp", data, {offsets, order, index}, dim, or_minus_infinity(fill), {Reduction::logsumexp, data.scalar_type()}));
}

// In the type that is computed in, which the derivative wants.
Tensor segment_logsumexp_wide(const Tensor& data, FASTOPS_GROUPING, int64_t dim, const OptionalScalar& fill) {
  check_dtype("segment_logsumexp", "data", data.scalar_type(), true);
  return std::get<0>(reduce("segment_logsumexp", data, {offsets, order, index}, dim, or_minus_infinity(fill),
                            {Reduction::logsumexp, computed_in(data.scalar_type())}));
}

Pair moments(bool root, bool mean, const Tensor& data, const Grouping& grouping, int64_t dim, double correction, const Scalar& fill) {
  const char* op = root ? "segment_std" : "segment_var";
  check_dtype(op, "data", data.scalar_type(), true);
  TORCH_CHECK_VALUE(correction >= 0, op, ": correction must be at least 0, but got ", correction);
  Wanted wanted{Reduction::moments, data.scalar_type()};
  wanted.mean = mean;
  wanted.correction = correction;
  wanted.root = root;
  return reduce(op, data, grouping, dim, fill, wanted);
}

template <bool root>
Tensor segment_spread(const Tensor& data, FASTOPS_GROUPING, int64_t dim, double correction, const Scalar& fill) {
  return std::get<0>(moments(root, false, data, {offsets, order, index}, dim, correction, fill));
}

Pair segment_moments(const Tensor& data, FASTOPS_GROUPING, int64_t dim, double correction, bool root, const Scalar& fill) {
  return moments(root, true, data, {offsets, order, index}, dim, correction, fill);
}

// Derivatives.

// sum and mean: each row receives its segment's gradient, divided by the length for the mean.
template <Reduction reduction>
struct LinearFunction : torch::autograd::Function<LinearFunction<reduction>> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& data, FASTOPS_GROUPING, int64_t dim, OptionalType dtype,
                        const Scalar& fill) {
    at::AutoDispatchBelowADInplaceOrView guard;
    save_grouping(ctx, {}, {offsets, order, index});
    ctx->saved_data["dim"] = dim;
    ctx->saved_data["num_rows"] = data.sym_size(at::maybe_wrap_dim(dim, data.dim()));
    if (dtype && *dtype != data.scalar_type()) ctx->saved_data["dtype"] = data.scalar_type();
    return call_linear(reduction, data, {offsets, order, index}, dim, dtype, fill);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = saved_grouping(ctx->get_saved_variables(), 0);
    const int64_t dim = ctx->saved_data["dim"].toInt();
    const SymInt num_rows = ctx->saved_data["num_rows"].toSymInt();
    const auto dtype = ctx->saved_data.find("dtype");
    const Tensor grad = dtype == ctx->saved_data.end() ? grads[0] : grads[0].to(dtype->second.toScalarType());
    return {reduction == Reduction::sum ? call_broadcast(grad, saved, num_rows, dim)
                                        : call_mean_backward(grad, saved, num_rows, dim),
            {}, {}, {}, {}, {}, {}};
  }
};

template <Reduction reduction>
Tensor linear_autograd(const Tensor& data, FASTOPS_GROUPING, int64_t dim, OptionalType dtype, const Scalar& fill) {
  if (wants_grad(data) && data.dim() > 0) {
    const auto promoted = promote(reduction == Reduction::sum ? "segment_sum" : "segment_mean", data, dtype,
                                  reduction == Reduction::mean);
    if (is_floating(promoted.out)) {
      check_dim(reduction == Reduction::sum ? "segment_sum" : "segment_mean", "data", data, dim);
      return LinearFunction<reduction>::apply(promoted.data, offsets, order, index, dim, dtype, fill);
    }
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return call_linear(reduction, data, {offsets, order, index}, dim, dtype, fill);
}

struct ProductFunction : torch::autograd::Function<ProductFunction> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& data, FASTOPS_GROUPING, int64_t dim, OptionalType dtype,
                        const Scalar& fill) {
    at::AutoDispatchBelowADInplaceOrView guard;
    save_grouping(ctx, {data}, {offsets, order, index});
    ctx->saved_data["dim"] = dim;
    return call_linear(Reduction::prod, data, {offsets, order, index}, dim, dtype, fill);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto tensors = ctx->get_saved_variables();
    const auto saved = saved_grouping(tensors, 1);
    const int64_t dim = ctx->saved_data["dim"].toInt();
    const Tensor data = without_others(tensors[0], saved, dim, 1);
    const auto [product, zeros] = call_prod_parts(data, saved, dim);
    return {call_prod_backward(grads[0].to(data.scalar_type()), data, product, zeros, saved, dim), {}, {}, {}, {}, {}, {}};
  }
};

Tensor prod_autograd(const Tensor& data, FASTOPS_GROUPING, int64_t dim, OptionalType dtype, const Scalar& fill) {
  if (wants_grad(data)) {
    const auto promoted = promote("segment_prod", data, dtype, false);
    if (is_floating(promoted.out)) return ProductFunction::apply(promoted.data, offsets, order, index, dim, dtype, fill);
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return call_linear(Reduction::prod, data, {offsets, order, index}, dim, dtype, fill);
}

// amax and amin: evenly to the rows that tie.
template <Reduction reduction>
struct ExtremumFunction : torch::autograd::Function<ExtremumFunction<reduction>> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& data, FASTOPS_GROUPING, int64_t dim, const Scalar& fill) {
    at::AutoDispatchBelowADInplaceOrView guard;
    const auto [values, counts] = call_extremum_count(reduction == Reduction::amax, data, {offsets, order, index}, dim, fill);
    save_grouping(ctx, {data, values, counts}, {offsets, order, index});
    ctx->saved_data["dim"] = dim;
    return values;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto tensors = ctx->get_saved_variables();
    const auto saved = saved_grouping(tensors, 3);
    return {call_extremum_backward(grads[0], tensors[0], tensors[1], tensors[2], saved, ctx->saved_data["dim"].toInt()),
            {}, {}, {}, {}, {}};
  }
};

template <Reduction reduction>
Tensor extremum_autograd(const Tensor& data, FASTOPS_GROUPING, int64_t dim, const Scalar& fill) {
  if (wants_grad(data) && is_floating(data.scalar_type())) {
    return ExtremumFunction<reduction>::apply(data, offsets, order, index, dim, fill);
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return call_extremum(reduction == Reduction::amax, data, {offsets, order, index}, dim, fill);
}

// max and min: to the row that was returned.
template <Reduction reduction>
struct SelectFunction : torch::autograd::Function<SelectFunction<reduction>> {
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* ctx, const Tensor& data, FASTOPS_GROUPING, int64_t dim, const Scalar& fill) {
    at::AutoDispatchBelowADInplaceOrView guard;
    const auto [values, indices] = call_extremum_with_row(reduction == Reduction::max, data, {offsets, order, index}, dim, fill);
    save_grouping(ctx, {indices}, {offsets, order, index});
    ctx->saved_data["dim"] = dim;
    ctx->saved_data["num_rows"] = data.sym_size(at::maybe_wrap_dim(dim, data.dim()));
    return {values, indices};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto tensors = ctx->get_saved_variables();
    const auto saved = saved_grouping(tensors, 1);
    return {call_select_backward(grads[0], tensors[0], saved, ctx->saved_data["num_rows"].toSymInt(),
                                 ctx->saved_data["dim"].toInt()),
            {}, {}, {}, {}, {}};
  }
};

template <Reduction reduction>
Pair select_autograd(const Tensor& data, FASTOPS_GROUPING, int64_t dim, const Scalar& fill) {
  if (wants_grad(data) && is_floating(data.scalar_type())) {
    const auto results = SelectFunction<reduction>::apply(data, offsets, order, index, dim, fill);
    return {results[0], results[1]};
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return call_extremum_with_row(reduction == Reduction::max, data, {offsets, order, index}, dim, fill);
}

struct LogSumExpFunction : torch::autograd::Function<LogSumExpFunction> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& data, FASTOPS_GROUPING, int64_t dim, const OptionalScalar& fill) {
    at::AutoDispatchBelowADInplaceOrView guard;
    const bool wide = computed_in(data.scalar_type()) != data.scalar_type();
    const Tensor result = call_logsumexp(data, {offsets, order, index}, dim, fill, wide);
    save_grouping(ctx, {data, result}, {offsets, order, index});
    ctx->saved_data["dim"] = dim;
    return wide ? result.to(data.scalar_type()) : result;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto tensors = ctx->get_saved_variables();
    return {call_logsumexp_backward(grads[0], tensors[0], tensors[1], saved_grouping(tensors, 2), ctx->saved_data["dim"].toInt()),
            {}, {}, {}, {}, {}};
  }
};

Tensor logsumexp_autograd(const Tensor& data, FASTOPS_GROUPING, int64_t dim, const OptionalScalar& fill) {
  if (wants_grad(data) && is_floating(data.scalar_type())) {
    return LogSumExpFunction::apply(data, offsets, order, index, dim, fill);
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return call_logsumexp(data, {offsets, order, index}, dim, fill, false);
}

// var and std. The latter is the root of the former, whose derivative is not finite at 0: there it is 0, as in torch.
template <bool root>
struct SpreadFunction : torch::autograd::Function<SpreadFunction<root>> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& data, FASTOPS_GROUPING, int64_t dim, double correction, const Scalar& fill) {
    at::AutoDispatchBelowADInplaceOrView guard;
    const auto [values, mean] = call_moments(root, data, {offsets, order, index}, dim, correction, fill);
    save_grouping(ctx, {data, mean, root ? values : Tensor()}, {offsets, order, index});
    ctx->saved_data["dim"] = dim;
    ctx->saved_data["correction"] = correction;
    return values;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto tensors = ctx->get_saved_variables();
    const auto saved = saved_grouping(tensors, 3);
    const Tensor &data = tensors[0], &mean = tensors[1];
    Tensor grad = grads[0].to(mean.scalar_type());
    if (root) {
      const Tensor std = tensors[2].to(mean.scalar_type()), flat = std <= 0;  // a NaN is not flat, and goes on
      grad = at::where(flat, at::zeros({}, std.options()), grad / (2 * at::where(flat, at::ones({}, std.options()), std)));
    }
    return {call_var_backward(grad, data, mean, saved, ctx->saved_data["dim"].toInt(), ctx->saved_data["correction"].toDouble()),
            {}, {}, {}, {}, {}, {}};
  }
};

template <bool root>
Tensor spread_autograd(const Tensor& data, FASTOPS_GROUPING, int64_t dim, double correction, const Scalar& fill) {
  if (wants_grad(data) && is_floating(data.scalar_type())) {
    return SpreadFunction<root>::apply(data, offsets, order, index, dim, correction, fill);
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return call_spread(root, data, {offsets, order, index}, dim, correction, fill);
}

void implement_reduce(torch::Library& m) {
  m.impl("segment_sum", segment_sum);
  m.impl("segment_mean", segment_mean);
  m.impl("segment_prod", segment_prod);
  m.impl("segment_amax", segment_extremum<Reduction::amax>);
  m.impl("segment_amin", segment_extremum<Reduction::amin>);
  m.impl("segment_max", segment_extremum_and_extra<Reduction::max>);
  m.impl("segment_min", segment_extremum_and_extra<Reduction::min>);
  m.impl("segment_argmax", segment_arg<Reduction::max>);
  m.impl("segment_argmin", segment_arg<Reduction::min>);
  m.impl("segment_any", segment_truth<Reduction::any>);
  m.impl("segment_all", segment_truth<Reduction::all>);
  m.impl("segment_logsumexp", segment_logsumexp);
  m.impl("segment_var", segment_spread<false>);
  m.impl("segment_std", segment_spread<true>);
  m.impl("_segment_logsumexp_wide", segment_logsumexp_wide);
  m.impl("_segment_moments", segment_moments);
  m.impl("_segment_amax_count", segment_extremum_and_extra<Reduction::amax_count>);
  m.impl("_segment_amin_count", segment_extremum_and_extra<Reduction::amin_count>);
  m.impl("_segment_prod_parts", segment_prod_parts);
}

}  // namespace

Tensor reduce_weighted(const Tensor& data, const RowWeights& weights, const Grouping& grouping, int64_t dim, ScalarType out,
                       const Scalar& fill) {
  Wanted wanted{Reduction::sum, out};
  wanted.weights = weights;
  return std::get<0>(reduce("segment_sum", data, grouping, dim, fill, wanted));
}

TORCH_LIBRARY_IMPL(fastops, CPU, m) { implement_reduce(m); }
TORCH_LIBRARY_IMPL(fastops, Meta, m) { implement_reduce(m); }
#ifdef FASTOPS_WITH_CUDA
TORCH_LIBRARY_IMPL(fastops, CUDA, m) { implement_reduce(m); }
#endif

TORCH_LIBRARY_IMPL(fastops, Autograd, m) {
  m.impl("segment_sum", linear_autograd<Reduction::sum>);
  m.impl("segment_mean", linear_autograd<Reduction::mean>);
  m.impl("segment_prod", prod_autograd);
  m.impl("segment_amax", extremum_autograd<Reduction::amax>);
  m.impl("segment_amin", extremum_autograd<Reduction::amin>);
  m.impl("segment_max", select_autograd<Reduction::max>);
  m.impl("segment_min", select_autograd<Reduction::min>);
  m.impl("segment_logsumexp", logsumexp_autograd);
  m.impl("segment_var", spread_autograd<false>);
  m.impl("segment_std", spread_autograd<true>);
  for (const char* whole : {"segment_argmax", "segment_argmin", "segment_any", "segment_all", "_segment_amax_count",
                            "_segment_amin_count", "_segment_prod_parts", "_segment_logsumexp_wide", "_segment_moments"}) {
    m.impl(whole, torch::CppFunction::makeFallthrough());  // results that have no derivative
  }
}

}  // namespace fastops::host
