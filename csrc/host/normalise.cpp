// Softmax within segments and its logarithm: checks, allocation, choice of the kernel, derivatives.
#include <ATen/TensorOperators.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include "host/calls.h"
#include "host/checks.h"

namespace fastops::host {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// `grad` undefined: forward.
Tensor normalise(const char* op, Normalise kind, const Tensor& data, const Tensor& grad, const Grouping& grouping, int64_t dim) {
  check_dtype(op, "data", data.scalar_type(), true);
  if (grad.defined()) {
    check_same_device(op, "grad", grad, "data", data);
    TORCH_CHECK_TYPE(grad.scalar_type() == data.scalar_type(), op, ": grad must have the dtype of the result (",
                     name_of(data.scalar_type()), "), but got ", name_of(grad.scalar_type()));
    TORCH_CHECK_VALUE(grad.sym_sizes() == data.sym_sizes(), op, ": grad must have the shape of the result ", data.sym_sizes(),
                      ", but got ", grad.sym_sizes());
  }
  const Shape shape = check_grouping(op, "data", data, grouping, dim);
  Tensor out = empty_resized(data, shape.dim, shape.num_rows, data.scalar_type());
  if (data.is_meta()) return out;

  const HeldGrouping held(grouping, shape);
  const Tensor rows = data.contiguous(), grads = grad.defined() ? grad.contiguous() : grad;
  const NormaliseCall call{kind,
                           *dtype_of(data.scalar_type()),
                           rows.const_data_ptr(),
                           grads.defined() ? grads.const_data_ptr() : nullptr,
                           out.mutable_data_ptr(),
                           held.view,
                           shape.outer.expect_int(),
                           shape.inner.expect_int()};
  FASTOPS_RUN(normalise, data, call);
  return out;
}

template <bool log>
Tensor segment_softmax(const Tensor& data, FASTOPS_GROUPING, int64_t dim) {
  return normalise(log ? "segment_log_softmax" : "segment_softmax", log ? Normalise::log_softmax : Normalise::softmax, data, {},
                   {offsets, order, index}, dim);
}

template <bool log>
Tensor segment_softmax_backward(const Tensor& grad, const Tensor& result, FASTOPS_GROUPING, int64_t dim) {
  return normalise(log ? "segment_log_softmax" : "segment_softmax",
                   log ? Normalise::log_softmax_backward : Normalise::softmax_backward, result, grad, {offsets, order, index}, dim);
}

// Derivatives.

template <bool log>
struct SoftmaxFunction : torch::autograd::Function<SoftmaxFunction<log>> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& data, FASTOPS_GROUPING, int64_t dim) {
    at::AutoDispatchBelowADInplaceOrView guard;
    const Tensor result = call_softmax(log, data, {offsets, order, index}, dim);
    save_grouping(ctx, {result}, {offsets, order, index});
    ctx->saved_data["dim"] = dim;
    return result;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto tensors = ctx->get_saved_variables();
    return {call_softmax_backward(log, grads[0], tensors[0], saved_grouping(tensors, 1), ctx->saved_data["dim"].toInt()),
            {}, {}, {}, {}};
  }
};

template <bool log>
Tensor softmax_autograd(const Tensor& data, FASTOPS_GROUPING, int64_t dim) {
  if (wants_grad(data) && is_floating(data.scalar_type())) return SoftmaxFunction<log>::apply(data, offsets, order, index, dim);
  at::AutoDispatchBelowADInplaceOrView guard;
  return call_softmax(log, data, {offsets, order, index}, dim);
}

// With y the softmax, g the gradient, and v coming from above:
//     dx = y (g - sum(y g))
//     to g:  y (v - sum(y v)), the same of v
//     to y:  v (g - sum(y g)) - g sum(y v)
// With y the logarithm:
//     dx = g - exp(y) sum(g)
//     to g:  v - sum(exp(y) v)
//     to y:  - v exp(y) sum(g)
// and 0 in a segment whose rows are all -inf.
template <bool log>
struct SoftmaxBackwardFunction : torch::autograd::Function<SoftmaxBackwardFunction<log>> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& grad, const Tensor& result, FASTOPS_GROUPING, int64_t dim) {
    at::AutoDispatchBelowADInplaceOrView guard;
    save_grouping(ctx, {grad, result}, {offsets, order, index});
    ctx->saved_data["dim"] = dim;
    return call_softmax_backward(log, grad, result, {offsets, order, index}, dim);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto tensors = ctx->get_saved_variables();
    const auto saved = saved_grouping(tensors, 2);
    const int64_t dim = ctx->saved_data["dim"].toInt();
    // In the type that is computed in: products of 16-bit numbers leave their range where the result does not.
    const ScalarType type = tensors[1].scalar_type(), wide = computed_in(type);
    const Tensor g = tensors[0].to(wide), y = tensors[1].to(wide);
    const auto down = [&](const Tensor& values) { return call_broadcast(values, saved, y.sym_size(dim), dim); };
    const auto total = [&](const Tensor& rows) { return down(call_sum(rows, saved, dim)); };
    // Rows that are no function of g: those of no segment and, for the logarithm, of segments that are all -inf.
    const Tensor top = call_extremum(true, y.detach(), saved, dim, 0);
    const Tensor kept = down(top != -std::numeric_limits<double>::infinity());
    const Tensor v = at::where(kept, grads[0].to(wide), at::zeros({}, y.options()));
    if (!log) {
      return {call_softmax_backward(false, v, y, saved, dim).to(type), (v * (g - total(y * g)) - g * total(y * v)).to(type),
              {}, {}, {}, {}};
    }
    const Tensor power = y.exp();
    return {(v - total(power * v)).to(type), (-v * power * total(g)).to(type), {}, {}, {}, {}};
  }
};

template <bool log>
Tensor softmax_backward_autograd(const Tensor& grad, const Tensor& result, FASTOPS_GROUPING, int64_t dim) {
  if (wants_grad(grad) || wants_grad(result)) {
    return SoftmaxBackwardFunction<log>::apply(grad, result, offsets, order, index, dim);
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return call_softmax_backward(log, grad, result, {offsets, order, index}, dim);
}

void implement_normalise(torch::Library& m) {
  m.impl("segment_softmax", segment_softmax<false>);
  m.impl("segment_log_softmax", segment_softmax<true>);
  m.impl("_segment_softmax_backward", segment_softmax_backward<false>);
  m.impl("_segment_log_softmax_backward", segment_softmax_backward<true>);
}

}  // namespace

TORCH_LIBRARY_IMPL(fastops, CPU, m) { implement_normalise(m); }
TORCH_LIBRARY_IMPL(fastops, Meta, m) { implement_normalise(m); }
#ifdef FASTOPS_WITH_CUDA
TORCH_LIBRARY_IMPL(fastops, CUDA, m) { implement_normalise(m); }
#endif

TORCH_LIBRARY_IMPL(fastops, Autograd, m) {
  m.impl("segment_softmax", softmax_autograd<false>);
  m.impl("segment_log_softmax", softmax_autograd<true>);
  m.impl("_segment_softmax_backward", softmax_backward_autograd<false>);
  m.impl("_segment_log_softmax_backward", softmax_backward_autograd<true>);
}

}  // namespace fastops::host
