// Running results within segments: checks, allocation, choice of the kernel, derivatives.
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include "host/calls.h"
#include "host/checks.h"

namespace fastops::host {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

const char* operation(Scan kind) {
  switch (kind) {
    case Scan::sum: return "segment_cumsum";
    case Scan::prod: return "segment_cumprod";
    case Scan::max: return "segment_cummax";
    case Scan::min: return "segment_cummin";
    default: return "segment_logcumsumexp";
  }
}

// (values, row numbers), the latter of extrema only.
TensorPair scan(Scan kind, const Tensor& data, const Tensor& factors, const Grouping& grouping, int64_t dim, bool exclusive, bool reverse) {
  const char* op = operation(kind);
  const ScalarType type = data.scalar_type();
  check_dtype(op, "data", type, kind == Scan::logsumexp || kind == Scan::linear);
  const Shape shape = check_grouping(op, "data", data, grouping, dim);
  if (factors.defined()) {
    check_same_device(op, "factors", factors, "data", data);
    TORCH_CHECK_TYPE(factors.scalar_type() == type, op, ": factors must have the dtype of data (", name_of(type),
                     "), but got ", name_of(factors.scalar_type()));
    TORCH_CHECK_VALUE(factors.sym_sizes() == data.sym_sizes(), op, ": factors must have the shape of data ", data.sym_sizes(),
                      ", but got ", factors.sym_sizes());
  }
  const bool counts = !is_floating(type) && (kind == Scan::sum || kind == Scan::prod);
  const bool has_rows = kind == Scan::max || kind == Scan::min;
  Tensor out = empty_resized(data, shape.dim, shape.num_rows, counts ? at::kLong : type);
  Tensor rows = has_rows ? empty_resized(data, shape.dim, shape.num_rows, at::kLong) : Tensor();
  if (data.is_meta()) return {out, rows};

  const HeldGrouping held(grouping, shape);
  // Kernels count 32 bits and more: what is narrower is rarely scanned, and they would be compiled for four types more.
  const ScalarType read = counts && type != at::kLong ? at::kInt : type;
  const Tensor given = data.to(read).contiguous(), by = factors.defined() ? factors.contiguous() : factors;
  const ScanCall call{kind,
                      *dtype_of(read),
                      given.const_data_ptr(),
                      by.defined() ? by.const_data_ptr() : nullptr,
                      out.mutable_data_ptr(),
                      has_rows ? rows.mutable_data_ptr<int64_t>() : nullptr,
                      exclusive,
                      reverse,
                      held.view,
                      shape.outer.expect_int(),
                      shape.inner.expect_int()};
  FASTOPS_RUN(scan, data, call);
  return {out, rows};
}

// Data as dtype= wants it scanned, and the type that integers must be converted to in the end. No kernel widens 16 bits.
std::tuple<Tensor, OptionalDtype> promote_scan(Scan kind, const Tensor& data, const OptionalDtype& dtype) {
  const auto [rows, out, final] = promote(operation(kind), data, dtype, false);
  return {is_floating(out) ? rows.to(out) : rows, final};
}

template <Scan kind>
Tensor segment_scan_promoted(const Tensor& data, FASTOPS_GROUPING, int64_t dim, OptionalDtype dtype, bool exclusive, bool reverse) {
  const auto [rows, final] = promote_scan(kind, data, dtype);
  const Tensor result = std::get<0>(scan(kind, rows, {}, {offsets, order, index}, dim, exclusive, reverse));
  return final ? result.to(*final) : result;
}

template <Scan kind>
TensorPair segment_scan_extremum(const Tensor& data, FASTOPS_GROUPING, int64_t dim, bool exclusive, bool reverse) {
  return scan(kind, data, {}, {offsets, order, index}, dim, exclusive, reverse);
}

Tensor segment_logcumsumexp(const Tensor& data, FASTOPS_GROUPING, int64_t dim, bool exclusive, bool reverse) {
  return std::get<0>(scan(Scan::logsumexp, data, {}, {offsets, order, index}, dim, exclusive, reverse));
}

// What is known before each row of y_i = data_i + factor_i * y_(i - 1).
Tensor segment_linear_scan(const Tensor& factors, const Tensor& data, FASTOPS_GROUPING, int64_t dim, bool reverse) {
  return std::get<0>(scan(Scan::linear, data, factors, {offsets, order, index}, dim, true, reverse));
}

// Derivatives. A row hands its gradient back to the rows before it, through the factors of those in between: with g of the
// results and f of the rows, both met in the other direction,
//     before(f, g) = what is known before each row of   h_i = g_i + f_i * h_(i + 1)
// which is _segment_linear_scan. It takes part in each of the derivatives, and is its own:
//     to g:  before(f, v) in the other direction;   to f:  that times the result.

struct LinearScanFunction : torch::autograd::Function<LinearScanFunction> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& factors, const Tensor& data, FASTOPS_GROUPING, int64_t dim, bool reverse) {
    at::AutoDispatchBelowADInplaceOrView guard;
    const Tensor result = call_linear_scan(factors, data, {offsets, order, index}, dim, reverse);
    save_grouping(ctx, {factors, result}, {offsets, order, index});
    ctx->saved_data["dim"] = dim;
    ctx->saved_data["reverse"] = reverse;
    return result;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto tensors = ctx->get_saved_variables();
    const Tensor back = call_linear_scan(tensors[0], grads[0], saved_grouping(tensors, 2), ctx->saved_data["dim"].toInt(),
                                         !ctx->saved_data["reverse"].toBool());
    return {back * tensors[1], back, {}, {}, {}, {}, {}};
  }
};

Tensor linear_scan_autograd(const Tensor& factors, const Tensor& data, FASTOPS_GROUPING, int64_t dim, bool reverse) {
  if (wants_grad(factors) || wants_grad(data)) return LinearScanFunction::apply(factors, data, offsets, order, index, dim, reverse);
  at::AutoDispatchBelowADInplaceOrView guard;
  return call_linear_scan(factors, data, {offsets, order, index}, dim, reverse);
}

// What the rows that come after a row hand back to what is known at it: of its own gradient, too, unless that is
// exclusive.
Tensor handed_back(const Tensor& factors, const Tensor& grad, const Grouping& grouping, int64_t dim, bool exclusive, bool reverse) {
  if (exclusive) return call_linear_scan(factors, grad, grouping, dim, !reverse);
  return grad + call_linear_scan(factors, factors * grad, grouping, dim, !reverse);
}

// Saved by all of them.
void save_scan(AutogradContext* ctx, std::initializer_list<Tensor> tensors, const Grouping& grouping, int64_t dim, bool exclusive,
               bool reverse) {
  save_grouping(ctx, tensors, grouping);
  ctx->saved_data["dim"] = dim;
  ctx->saved_data["exclusive"] = exclusive;
  ctx->saved_data["reverse"] = reverse;
}

struct SavedScan {
  variable_list tensors;
  SavedGrouping grouping;
  int64_t dim;
  bool exclusive, reverse;
  SavedScan(AutogradContext* ctx, size_t before)
      : tensors(ctx->get_saved_variables()),
        grouping(saved_grouping(tensors, before)),
        dim(ctx->saved_data["dim"].toInt()),
        exclusive(ctx->saved_data["exclusive"].toBool()),
        reverse(ctx->saved_data["reverse"].toBool()) {}
};

// The sum of what comes after.
struct CumsumFunction : torch::autograd::Function<CumsumFunction> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& data, FASTOPS_GROUPING, int64_t dim, bool exclusive, bool reverse) {
    at::AutoDispatchBelowADInplaceOrView guard;
    save_scan(ctx, {}, {offsets, order, index}, dim, exclusive, reverse);
    return call_cumulative(Scan::sum, data, {offsets, order, index}, dim, exclusive, reverse);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const SavedScan saved(ctx, 0);
    return {call_cumulative(Scan::sum, grads[0], saved.grouping, saved.dim, saved.exclusive, !saved.reverse), {}, {}, {}, {}, {}, {}};
  }
};

// The product of the rows before, times what the rows after hand back: no division, so zeros do no harm.
struct CumprodFunction : torch::autograd::Function<CumprodFunction> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& data, FASTOPS_GROUPING, int64_t dim, bool exclusive, bool reverse) {
    at::AutoDispatchBelowADInplaceOrView guard;
    save_scan(ctx, {data}, {offsets, order, index}, dim, exclusive, reverse);
    return call_cumulative(Scan::prod, data, {offsets, order, index}, dim, exclusive, reverse);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const SavedScan saved(ctx, 1);
    const ScalarType type = saved.tensors[0].scalar_type(), wide = computed_in(type);
    const Tensor data = without_others(saved.tensors[0].to(wide), saved.grouping, saved.dim, 0), grad = grads[0].to(wide);
    const Tensor before = call_cumulative(Scan::prod, data, saved.grouping, saved.dim, true, saved.reverse);
    const Tensor back = handed_back(data, grad, saved.grouping, saved.dim, saved.exclusive, saved.reverse);
    return {(before * back).to(type), {}, {}, {}, {}, {}, {}};
  }
};

template <Scan kind>
Tensor promoted_autograd(const Tensor& data, FASTOPS_GROUPING, int64_t dim, OptionalDtype dtype, bool exclusive, bool reverse) {
  if (wants_grad(data)) {
    const auto [rows, final] = promote_scan(kind, data, dtype);
    if (is_floating(rows.scalar_type())) {
      using Function = std::conditional_t<kind == Scan::sum, CumsumFunction, CumprodFunction>;
      return Function::apply(rows, offsets, order, index, dim, exclusive, reverse);
    }
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return call_cumulative(kind, data, {offsets, order, index}, dim, exclusive, reverse, dtype);
}

// To the row that was returned. A row that is returned at itself begins a run of rows that return it.
template <Scan kind>
struct CumulativeExtremumFunction : torch::autograd::Function<CumulativeExtremumFunction<kind>> {
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* ctx, const Tensor& data, FASTOPS_GROUPING, int64_t dim, bool exclusive, bool reverse) {
    at::AutoDispatchBelowADInplaceOrView guard;
    const Grouping grouping{offsets, order, index};
    const auto [values, rows] = call_cumulative_extremum(kind == Scan::max, data, grouping, dim, exclusive, reverse);
    const Tensor own = exclusive ? std::get<1>(call_cumulative_extremum(kind == Scan::max, data, grouping, dim, false, reverse)) : rows;
    save_scan(ctx, {own}, grouping, at::maybe_wrap_dim(dim, data.dim()), exclusive, reverse);
    return {values, rows};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const SavedScan saved(ctx, 1);
    const Tensor& rows = saved.tensors[0];
    Tensor number = at::arange(rows.sym_size(saved.dim), rows.options());
    for (int64_t d = saved.dim + 1; d < rows.dim(); ++d) number = number.unsqueeze(-1);
    const ScalarType type = grads[0].scalar_type(), wide = computed_in(type);
    const auto options = rows.options().dtype(wide);
    const Tensor goes_on = at::where(rows != number, at::ones({}, options), at::zeros({}, options));
    const Tensor back = handed_back(goes_on, grads[0].to(wide), saved.grouping, saved.dim, saved.exclusive, saved.reverse);
    return {((1 - goes_on) * back).to(type), {}, {}, {}, {}, {}, {}};
  }
};

template <Scan kind>
TensorPair cumulative_extremum_autograd(const Tensor& data, FASTOPS_GROUPING, int64_t dim, bool exclusive, bool reverse) {
  if (wants_grad(data) && is_floating(data.scalar_type()) && data.dim() > 0) {
    check_dim(operation(kind), "data", data, dim);
    const auto results = CumulativeExtremumFunction<kind>::apply(data, offsets, order, index, dim, exclusive, reverse);
    return {results[0], results[1]};
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return call_cumulative_extremum(kind == Scan::max, data, {offsets, order, index}, dim, exclusive, reverse);
}

// With y the result at a row and b the one before it, a row has the share exp(x - y) in y, and b the share exp(b - y): no
// power is above 1.
struct LogcumsumexpFunction : torch::autograd::Function<LogcumsumexpFunction> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& data, FASTOPS_GROUPING, int64_t dim, bool exclusive, bool reverse) {
    at::AutoDispatchBelowADInplaceOrView guard;
    const Tensor result = call_logcumsumexp(data, {offsets, order, index}, dim, exclusive, reverse);
    const bool is_rounded = computed_in(data.scalar_type()) != data.scalar_type();  // then of no use to the derivative
    save_scan(ctx, {data, is_rounded ? Tensor() : result}, {offsets, order, index}, dim, exclusive, reverse);
    return result;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const SavedScan saved(ctx, 2);
    const auto& tensors = saved.tensors;
    const ScalarType type = tensors[0].scalar_type(), wide = computed_in(type);
    const double nothing = -std::numeric_limits<double>::infinity();
    const Tensor x = without_others(tensors[0].to(wide), saved.grouping, saved.dim, nothing), grad = grads[0].to(wide);
    const auto known = [&](bool exclusive) {  // the result that was returned, unless it was rounded
      if (exclusive == saved.exclusive && type == wide) return tensors[1];
      return call_logcumsumexp(x, saved.grouping, saved.dim, exclusive, saved.reverse);
    };
    const Tensor y = known(false), before = known(true);
    const Tensor none = at::zeros({}, x.options());
    const auto share = [&](const Tensor& part) {  // 0 of nothing, where all is -inf
      const Tensor is_some = part != nothing;
      return at::where(is_some, (at::where(is_some, part, none) - at::where(is_some, y, none)).exp(), none);
    };
    const Tensor all = at::ones({}, x.options());  // of an infinity, whatever comes after
    const Tensor back = handed_back(at::where(before == std::numeric_limits<double>::infinity(), all, share(before)), grad, saved.grouping, saved.dim, saved.exclusive, saved.reverse);
    return {(share(x) * back).to(type), {}, {}, {}, {}, {}, {}};
  }
};

Tensor logcumsumexp_autograd(const Tensor& data, FASTOPS_GROUPING, int64_t dim, bool exclusive, bool reverse) {
  if (wants_grad(data) && is_floating(data.scalar_type())) {
    return LogcumsumexpFunction::apply(data, offsets, order, index, dim, exclusive, reverse);
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return call_logcumsumexp(data, {offsets, order, index}, dim, exclusive, reverse);
}

void implement_scan(torch::Library& m) {
  m.impl("segment_cumsum", segment_scan_promoted<Scan::sum>);
  m.impl("segment_cumprod", segment_scan_promoted<Scan::prod>);
  m.impl("segment_cummax", segment_scan_extremum<Scan::max>);
  m.impl("segment_cummin", segment_scan_extremum<Scan::min>);
  m.impl("segment_logcumsumexp", segment_logcumsumexp);
  m.impl("_segment_linear_scan", segment_linear_scan);
}

}  // namespace

TORCH_LIBRARY_IMPL(fastops, CPU, m) { implement_scan(m); }
TORCH_LIBRARY_IMPL(fastops, Meta, m) { implement_scan(m); }
#ifdef FASTOPS_WITH_CUDA
TORCH_LIBRARY_IMPL(fastops, CUDA, m) { implement_scan(m); }
#endif

TORCH_LIBRARY_IMPL(fastops, Autograd, m) {
  m.impl("segment_cumsum", promoted_autograd<Scan::sum>);
  m.impl("segment_cumprod", promoted_autograd<Scan::prod>);
  m.impl("segment_cummax", cumulative_extremum_autograd<Scan::max>);
  m.impl("segment_cummin", cumulative_extremum_autograd<Scan::min>);
  m.impl("segment_logcumsumexp", logcumsumexp_autograd);
  m.impl("_segment_linear_scan", linear_scan_autograd);
}

}  // namespace fastops::host
