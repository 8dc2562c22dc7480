// What a segment hands down to its rows: broadcast, and the derivatives of the reductions.
#include <ATen/TensorOperators.h>
#include <ATen/ops/clamp_min.h>
#include <ATen/ops/gather.h>
#include <ATen/ops/logical_and.h>
#include <ATen/ops/logical_or.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include "host/calls.h"
#include "host/checks.h"

namespace fastops::host {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Inputs {
  const Tensor& values;                       // [*, S, *] what is handed down
  Tensor data = {}, result = {}, extra = {};  // as RowMapCall wants them
  double correction = 0;
  RowWeights weights = {};
};

// `name` is the public operation that an error is about.
Tensor map_rows(const char* name, RowMap map, const Inputs& inputs, const Grouping& grouping, const SymInt& num_rows, int64_t dim,
                std::optional<ScalarType> out_type = std::nullopt) {
  const Tensor& values = inputs.values;
  const Shape shape = check_grouping(name, "values", values, grouping, dim, num_rows);
  const ScalarType type = out_type.value_or((inputs.data.defined() ? inputs.data : values).scalar_type());
  Tensor out = empty_resized(values, shape.dim, num_rows, type);
  if (values.is_meta()) return out;

  const HeldGrouping held(grouping, shape);
  const auto contiguous = [](const Tensor& tensor) { return tensor.defined() ? tensor.contiguous() : tensor; };
  const Tensor handed = values.contiguous(), data = contiguous(inputs.data), result = contiguous(inputs.result),
               extra = contiguous(inputs.extra);
  const auto pointer = [](const Tensor& tensor) { return tensor.defined() ? tensor.const_data_ptr() : nullptr; };
  const RowMapCall call{map,
                        *dtype_of(type),
                        pointer(data),
                        out.mutable_data_ptr(),
                        {pointer(handed), pointer(result), static_cast<const int64_t*>(pointer(extra)), inputs.correction, inputs.weights},
                        held.view,
                        shape.outer.expect_int(),
                        shape.inner.expect_int()};
  FASTOPS_RUN_WITHOUT_WORKSPACE(map_rows, values, call);
  return out;
}

Tensor segment_broadcast(const Tensor& values, FASTOPS_GROUPING, SymInt num_rows, int64_t dim) {
  check_dtype("segment_broadcast", "values", values.scalar_type(), false);
  return map_rows("segment_broadcast", RowMap::broadcast, {values}, {offsets, order, index}, num_rows, dim);
}

Tensor segment_mean_backward(const Tensor& grad, FASTOPS_GROUPING, SymInt num_rows, int64_t dim) {
  check_dtype("segment_mean", "grad", grad.scalar_type(), true);
  return map_rows("segment_mean", RowMap::mean, {grad}, {offsets, order, index}, num_rows, dim);
}

Tensor segment_select_backward(const Tensor& grad, const Tensor& indices, FASTOPS_GROUPING, SymInt num_rows, int64_t dim) {
  check_dtype("segment_max", "grad", grad.scalar_type(), true);
  TORCH_CHECK_VALUE(indices.sym_sizes() == grad.sym_sizes() && indices.scalar_type() == at::kLong,
                    "segment_max: indices must be int64 of the shape of grad, but got ", indices.sym_sizes());
  return map_rows("segment_max", RowMap::select, {grad, {}, {}, indices}, {offsets, order, index}, num_rows, dim);
}

// The arrays that go with values and data, for maps that read data.
void check_parts(const char* op, const Tensor& grad, const Tensor& data, const Tensor& result, ScalarType result_type,
                 const OptionalTensor& extra, int64_t dim, std::optional<ScalarType> grad_type = std::nullopt) {
  check_dtype(op, "grad", grad.scalar_type(), true);
  check_dim(op, "data", data, dim);
  TORCH_CHECK_TYPE(grad.scalar_type() == grad_type.value_or(data.scalar_type()) && result.scalar_type() == result_type &&
                       (!extra || extra->scalar_type() == at::kLong),
                   op, ": data must have the dtype of grad (", name_of(grad.scalar_type()), "), but got ", name_of(data.scalar_type()));
  TORCH_CHECK_VALUE(data.dim() == grad.dim() && result.sym_sizes() == grad.sym_sizes() &&
                        (!extra || extra->sym_sizes() == grad.sym_sizes()),
                    op, ": the saved tensors must have the shape of grad ", grad.sym_sizes(), ", but got ", result.sym_sizes());
  for (int64_t d = 0; d < grad.dim(); ++d) {
    TORCH_CHECK_VALUE(d == (dim < 0 ? dim + grad.dim() : dim) || data.sym_size(d) == grad.sym_size(d), op, ": data must have size ",
                      grad.sym_size(d), " in dim ", d, ", but got ", data.sym_size(d));
  }
}

Tensor segment_extremum_backward(const Tensor& grad, const Tensor& data, const Tensor& values, const Tensor& counts, FASTOPS_GROUPING,
                                 int64_t dim) {
  check_parts("segment_amax", grad, data, values, grad.scalar_type(), counts, dim);
  return map_rows("segment_amax", RowMap::extremum, {grad, data, values, counts}, {offsets, order, index}, data.sym_size(dim), dim);
}

Tensor segment_prod_backward(const Tensor& grad, const Tensor& data, const Tensor& product, const Tensor& zeros, FASTOPS_GROUPING,
                             int64_t dim) {
  check_parts("segment_prod", grad, data, product, at::kDouble, zeros, dim);
  return map_rows("segment_prod", RowMap::prod, {grad, data, product, zeros}, {offsets, order, index}, data.sym_size(dim), dim);
}

Tensor segment_logsumexp_backward(const Tensor& grad, const Tensor& data, const Tensor& result, FASTOPS_GROUPING, int64_t dim) {
  check_parts("segment_logsumexp", grad, data, result, computed_in(grad.scalar_type()), std::nullopt, dim);
  return map_rows("segment_logsumexp", RowMap::logsumexp, {grad, data, result}, {offsets, order, index}, data.sym_size(dim), dim);
}

Tensor segment_var_backward(const Tensor& grad, const Tensor& data, const Tensor& mean, FASTOPS_GROUPING, int64_t dim, double correction) {
  check_dtype("segment_var", "data", data.scalar_type(), true);
  check_parts("segment_var", grad, data, mean, computed_in(data.scalar_type()), std::nullopt, dim, computed_in(data.scalar_type()));
  return map_rows("segment_var", RowMap::variance, {grad, data, mean, {}, correction}, {offsets, order, index}, data.sym_size(dim), dim);
}

// Derivatives.

// Broadcast and the sum are each other's derivative, and so are the mean's and the mean.
template <bool mean>
struct BroadcastFunction : torch::autograd::Function<BroadcastFunction<mean>> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& values, FASTOPS_GROUPING, SymInt num_rows, int64_t dim) {
    at::AutoDispatchBelowADInplaceOrView guard;
    save_grouping(ctx, {}, {offsets, order, index});
    ctx->saved_data["dim"] = dim;
    return (mean ? call_mean_backward : call_broadcast)(values, {offsets, order, index}, std::move(num_rows), dim);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = saved_grouping(ctx->get_saved_variables(), 0);
    return {call_linear(mean ? Reduction::mean : Reduction::sum, grads[0], saved, ctx->saved_data["dim"].toInt(), std::nullopt, 0),
            {}, {}, {}, {}, {}};
  }
};

template <bool mean>
Tensor broadcast_autograd(const Tensor& values, FASTOPS_GROUPING, SymInt num_rows, int64_t dim) {
  if (wants_grad(values)) return BroadcastFunction<mean>::apply(values, offsets, order, index, std::move(num_rows), dim);
  at::AutoDispatchBelowADInplaceOrView guard;
  return (mean ? call_mean_backward : call_broadcast)(values, {offsets, order, index}, std::move(num_rows), dim);
}

// Linear in grad: back goes the entry that was selected.
struct SelectBackwardFunction : torch::autograd::Function<SelectBackwardFunction> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& grad, const Tensor& indices, FASTOPS_GROUPING, SymInt num_rows,
                        int64_t dim) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({indices});
    ctx->saved_data["dim"] = dim;
    return call_select_backward(grad, indices, {offsets, order, index}, std::move(num_rows), dim);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const Tensor indices = ctx->get_saved_variables()[0];
    const int64_t dim = ctx->saved_data["dim"].toInt();
    Tensor back;
    if (grads[0].sym_size(dim) == 0) {  // no rows, nothing to gather from
      back = at::zeros_symint(indices.sym_sizes(), grads[0].options());
    } else {
      back = at::where(indices < 0, at::zeros({}, grads[0].options()), grads[0].gather(dim, indices.clamp_min(0)));
    }
    return {back, {}, {}, {}, {}, {}, {}};
  }
};

Tensor select_backward_autograd(const Tensor& grad, const Tensor& indices, FASTOPS_GROUPING, SymInt num_rows, int64_t dim) {
  if (wants_grad(grad)) return SelectBackwardFunction::apply(grad, indices, offsets, order, index, std::move(num_rows), dim);
  at::AutoDispatchBelowADInplaceOrView guard;
  return call_select_backward(grad, indices, {offsets, order, index}, std::move(num_rows), dim);
}

// Linear in grad, constant in data: back goes the mean over the rows that tie.
struct ExtremumBackwardFunction : torch::autograd::Function<ExtremumBackwardFunction> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& grad, const Tensor& data, const Tensor& values, const Tensor& counts,
                        FASTOPS_GROUPING, int64_t dim) {
    at::AutoDispatchBelowADInplaceOrView guard;
    save_grouping(ctx, {data, values, counts}, {offsets, order, index});
    ctx->saved_data["dim"] = dim;
    return call_extremum_backward(grad, data, values, counts, {offsets, order, index}, dim);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto tensors = ctx->get_saved_variables();
    const auto saved = saved_grouping(tensors, 3);
    const int64_t dim = ctx->saved_data["dim"].toInt();
    const Tensor &data = tensors[0], &counts = tensors[2];
    const Tensor best = call_broadcast(tensors[1], saved, data.sym_size(dim), dim);
    const Tensor ties = (data == best).logical_or((data != data).logical_and(best != best));
    const Tensor total = call_sum(at::where(ties, grads[0], at::zeros({}, grads[0].options())), saved, dim);
    return {total / counts.clamp_min(1).to(total.scalar_type()), {}, {}, {}, {}, {}, {}, {}};
  }
};

Tensor extremum_backward_autograd(const Tensor& grad, const Tensor& data, const Tensor& values, const Tensor& counts,
                                  FASTOPS_GROUPING, int64_t dim) {
  if (wants_grad(grad)) return ExtremumBackwardFunction::apply(grad, data, values, counts, offsets, order, index, dim);
  at::AutoDispatchBelowADInplaceOrView guard;
  return call_extremum_backward(grad, data, values, counts, {offsets, order, index}, dim);
}

// The gradient of a product is g * E_k, E_k the product of all rows but k. With v coming from above,
//     to g:   sum over k of v_k E_k
//     to x_k: g * sum over i != k of v_i E_ik, E_ik the product of all rows but i and k
// which are the coefficients of the product of the dual numbers x_i + e v_i, all of them or all but k. With P the
// product of the rows that are not zero, R the sum of v / x over them, and V the sum of v over the zeros:
//     zeros   to g    to x_k, x_k not zero     to x_k = 0
//     0       P R     g P (R - v_k/x_k) / x_k
//     1       P V     g P V / x_k              g P R
//     2       0       0                        g P (V - v_k)
struct ProductBackwardFunction : torch::autograd::Function<ProductBackwardFunction> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& grad, const Tensor& data, const Tensor& product, const Tensor& zeros,
                        FASTOPS_GROUPING, int64_t dim) {
    at::AutoDispatchBelowADInplaceOrView guard;
    save_grouping(ctx, {grad, data, product, zeros}, {offsets, order, index});
    ctx->saved_data["dim"] = dim;
    return call_prod_backward(grad, data, product, zeros, {offsets, order, index}, dim);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto tensors = ctx->get_saved_variables();
    const auto saved = saved_grouping(tensors, 4);
    const int64_t dim = ctx->saved_data["dim"].toInt();
    const ScalarType type = tensors[1].scalar_type();
    const Tensor v = grads[0].to(at::kDouble), g = tensors[0].to(at::kDouble), x = tensors[1].to(at::kDouble);
    const Tensor &zeros = tensors[3], none = at::zeros({}, v.options());
    const auto down = [&](const Tensor& values) { return call_broadcast(values, saved, x.sym_size(dim), dim); };

    const Tensor is_zero = x == 0;
    const Tensor safe = at::where(is_zero, none + 1, x);
    // The saved product is a number to autograd, which is to see what it depends on where it takes a derivative of all this.
    const bool further = wants_grad(x);
    const Tensor product = further ? call_linear(Reduction::prod, safe, saved, dim, std::nullopt, 1) : tensors[2];
    const Tensor ratio = at::where(is_zero, none, v / safe);
    const Tensor v_zero = at::where(is_zero, v, none);
    const Tensor r = call_sum(ratio, saved, dim), v_sum = call_sum(v_zero, saved, dim);
    const Tensor to_grad = further ? call_sum(v * call_prod_backward(at::ones_like(g), x, tensors[2], zeros, saved, dim), saved, dim)
                                   : at::where(zeros == 0, product * r, at::where(zeros == 1, product * v_sum, none));

    const Tensor count = down(zeros), share = down(g * product), row_r = down(r), row_v = down(v_sum);
    const Tensor nonzero = at::where(count == 0, share * (row_r - ratio) / safe, at::where(count == 1, share * row_v / safe, none));
    const Tensor zero = at::where(count == 1, share * row_r, at::where(count == 2, share * (row_v - v), none));
    return {to_grad.to(type), at::where(is_zero, zero, nonzero).to(type), {}, {}, {}, {}, {}, {}};
  }
};

Tensor prod_backward_autograd(const Tensor& grad, const Tensor& data, const Tensor& product, const Tensor& zeros, FASTOPS_GROUPING,
                              int64_t dim) {
  if (wants_grad(grad) || wants_grad(data)) {
    return ProductBackwardFunction::apply(grad, data, product, zeros, offsets, order, index, dim);
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return call_prod_backward(grad, data, product, zeros, {offsets, order, index}, dim);
}

// With p the softmax of data, the gradient is p times what is handed down, g. With v coming from above,
//     to g:   sum(v p)
//     to x:   p (v g - sum(v g p)), the derivative of softmax applied to v g
struct LogSumExpBackwardFunction : torch::autograd::Function<LogSumExpBackwardFunction> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& grad, const Tensor& data, const Tensor& result, FASTOPS_GROUPING,
                        int64_t dim) {
    at::AutoDispatchBelowADInplaceOrView guard;
    save_grouping(ctx, {grad, data}, {offsets, order, index});
    ctx->saved_data["dim"] = dim;
    return call_logsumexp_backward(grad, data, result, {offsets, order, index}, dim);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto tensors = ctx->get_saved_variables();
    const auto saved = saved_grouping(tensors, 2);
    const int64_t dim = ctx->saved_data["dim"].toInt();
    const ScalarType type = tensors[1].scalar_type(), wide = computed_in(type);
    const Tensor share = call_softmax(false, tensors[1].to(wide), saved, dim), v = grads[0].to(wide);
    const Tensor handed = call_broadcast(tensors[0].to(wide), saved, share.sym_size(dim), dim);
    return {call_sum(v * share, saved, dim).to(type), call_softmax_backward(false, v * handed, share, saved, dim).to(type),
            {}, {}, {}, {}, {}};
  }
};

Tensor logsumexp_backward_autograd(const Tensor& grad, const Tensor& data, const Tensor& result, FASTOPS_GROUPING, int64_t dim) {
  if (wants_grad(grad) || wants_grad(data)) {
    return LogSumExpBackwardFunction::apply(grad, data, result, offsets, order, index, dim);
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return call_logsumexp_backward(grad, data, result, {offsets, order, index}, dim);
}

// The gradient is c g (x - mean), c = 2 / (length - correction), g handed down. With v coming from above,
//     to g:   c sum(v (x - mean))
//     to x:   c (v g - mean(v g))
struct VarBackwardFunction : torch::autograd::Function<VarBackwardFunction> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& grad, const Tensor& data, const Tensor& mean, FASTOPS_GROUPING, int64_t dim,
                        double correction) {
    at::AutoDispatchBelowADInplaceOrView guard;
    save_grouping(ctx, {grad, data}, {offsets, order, index});
    ctx->saved_data["dim"] = dim;
    ctx->saved_data["correction"] = correction;
    return call_var_backward(grad, data, mean, {offsets, order, index}, dim, correction);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto tensors = ctx->get_saved_variables();
    const auto saved = saved_grouping(tensors, 2);
    const int64_t dim = at::maybe_wrap_dim(ctx->saved_data["dim"].toInt(), tensors[1].dim());
    const Tensor& g = tensors[0];
    const Tensor x = tensors[1].to(g.scalar_type()), none = at::zeros({}, g.options());
    const auto down = [&](const Tensor& values) { return call_broadcast(values, saved, x.sym_size(dim), dim); };
    const auto mean = [&](const Tensor& rows) { return call_linear(Reduction::mean, rows, saved, dim, std::nullopt, 0); };

    Tensor divisor = saved.offsets.diff().to(at::kDouble) - ctx->saved_data["correction"].toDouble();
    for (int64_t d = dim + 1; d < x.dim(); ++d) divisor = divisor.unsqueeze(-1);
    const Tensor is_defined = (divisor > 0).expand_symint(g.sym_sizes());
    const Tensor factor = (2 / at::where(divisor > 0, divisor, at::ones({}, divisor.options()))).to(g.scalar_type());
    const Tensor v = at::where(down(is_defined), grads[0].to(g.scalar_type()), none);  // nothing from rows of no segment either
    const Tensor scaled = v * down(at::where(is_defined, g * factor, none));
    return {at::where(is_defined, factor * call_sum(v * (x - down(mean(x))), saved, dim), none),
            (scaled - down(mean(scaled))).to(tensors[1].scalar_type()), {}, {}, {}, {}, {}, {}};
  }
};

Tensor var_backward_autograd(const Tensor& grad, const Tensor& data, const Tensor& mean, FASTOPS_GROUPING, int64_t dim,
                             double correction) {
  if (wants_grad(grad) || wants_grad(data)) {
    return VarBackwardFunction::apply(grad, data, mean, offsets, order, index, dim, correction);
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return call_var_backward(grad, data, mean, {offsets, order, index}, dim, correction);
}

void implement_move(torch::Library& m) {
  m.impl("segment_broadcast", segment_broadcast);
  m.impl("_segment_mean_backward", segment_mean_backward);
  m.impl("_segment_select_backward", segment_select_backward);
  m.impl("_segment_extremum_backward", segment_extremum_backward);
  m.impl("_segment_prod_backward", segment_prod_backward);
  m.impl("_segment_logsumexp_backward", segment_logsumexp_backward);
  m.impl("_segment_var_backward", segment_var_backward);
}

}  // namespace

Tensor broadcast_weighted(const Tensor& values, const RowWeights& weights, const Grouping& grouping, const SymInt& num_rows, int64_t dim,
                          ScalarType out) {
  return map_rows("segment_sum", RowMap::weighted, {values, {}, {}, {}, 0, weights}, grouping, num_rows, dim, out);
}

TORCH_LIBRARY_IMPL(fastops, CPU, m) { implement_move(m); }
TORCH_LIBRARY_IMPL(fastops, Meta, m) { implement_move(m); }
#ifdef FASTOPS_WITH_CUDA
TORCH_LIBRARY_IMPL(fastops, CUDA, m) { implement_move(m); }
#endif

TORCH_LIBRARY_IMPL(fastops, Autograd, m) {
  m.impl("segment_broadcast", broadcast_autograd<false>);
  m.impl("_segment_mean_backward", broadcast_autograd<true>);
  m.impl("_segment_select_backward", select_backward_autograd);
  m.impl("_segment_extremum_backward", extremum_backward_autograd);
  m.impl("_segment_prod_backward", prod_backward_autograd);
  m.impl("_segment_logsumexp_backward", logsumexp_backward_autograd);
  m.impl("_segment_var_backward", var_backward_autograd);
}

}  // namespace fastops::host
