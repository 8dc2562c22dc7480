// Median, quantiles, the greatest and the least rows, the first and the last row.
#include <ATen/TensorOperators.h>
#include <ATen/ops/gather.h>
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

struct Selected {
  Selection selection;
  std::optional<SymInt> count = std::nullopt;  // the size of a dimension behind that of the segments; none: there is no such dimension
  bool largest = true, sorted = true;
  bool indices = true;
  Tensor q = {}, between = {}, shares = {};  // of quantiles, contiguous
  Interpolation interpolation = Interpolation::linear;
};

// (values, indices), `[*, S, *]` or `[*, S, count, *]`.
TensorPair select(const char* op, const Tensor& data, const Grouping& grouping, int64_t dim, const Scalar& fill, const Selected& wanted) {
  check_dtype(op, "data", data.scalar_type(), false);
  const Shape shape = check_grouping(op, "data", data, grouping, dim);
  SelectCall call{};
  call.fill = fill_bits(op, fill, data.scalar_type());
  c10::SmallVector<SymInt, 6> sizes(data.sym_sizes().begin(), data.sym_sizes().end());
  sizes[shape.dim] = shape.num_segments;
  if (wanted.count) sizes.insert(sizes.begin() + shape.dim + 1, *wanted.count);
  const Tensor values = at::empty_symint(sizes, data.options());
  const Tensor indices = wanted.indices ? at::empty_symint(sizes, data.options().dtype(at::kLong)) : Tensor();
  if (data.is_meta()) return {values, indices};

  const HeldGrouping held(grouping, shape);
  const Tensor rows = data.contiguous();
  call.selection = wanted.selection;
  call.dtype = *dtype_of(data.scalar_type());
  call.data = rows.const_data_ptr();
  call.count = wanted.count ? wanted.count->expect_int() : 1;
  call.largest = wanted.largest;
  call.sorted = wanted.sorted;
  call.values = values.mutable_data_ptr();
  call.indices = wanted.indices ? indices.mutable_data_ptr<int64_t>() : nullptr;
  if (wanted.q.defined()) {
    call.q = wanted.q.const_data_ptr<double>();
    call.interpolation = wanted.interpolation;
    call.between = wanted.between.mutable_data_ptr();
    call.shares = wanted.shares.defined() ? wanted.shares.mutable_data_ptr() : nullptr;
  }
  call.segments = held.view;
  call.outer = shape.outer.expect_int();
  call.inner = shape.inner.expect_int();
  if (data.is_cpu()) {
    with_huge_pages(values);
    if (wanted.indices) with_huge_pages(indices);
  }
  FASTOPS_RUN(select, data, call);
  return {values, indices};
}

TensorPair segment_topk(const Tensor& data, FASTOPS_GROUPING, SymInt k, int64_t dim, bool largest, bool sorted, const Scalar& fill) {
  TORCH_CHECK_VALUE(k >= 0, "segment_topk: k must be at least 0, but got ", k);
  return select("segment_topk", data, {offsets, order, index}, dim, fill, {Selection::top, std::move(k), largest, sorted});
}

TensorPair segment_median(const Tensor& data, FASTOPS_GROUPING, int64_t dim, const OptionalScalar& fill) {
  return select("segment_median", data, {offsets, order, index}, dim, fill_for(fill, data.scalar_type()), {Selection::median});
}

Tensor copy_ends(const Tensor& from, Tensor to, const Grouping& grouping, const Shape& shape, bool last, bool back, uint64_t fill) {
  if (from.is_meta()) return to;
  const HeldGrouping held(grouping, shape);
  const Tensor rows = from.contiguous();
  const EndCall call{last, back, *dtype_of(from.scalar_type()), rows.const_data_ptr(), to.mutable_data_ptr(),
                     fill, held.view, shape.outer.expect_int(), shape.inner.expect_int()};
  FASTOPS_RUN_WITHOUT_WORKSPACE(copy_ends, from, call);
  return to;
}

template <bool last>
Tensor segment_end(const Tensor& data, FASTOPS_GROUPING, int64_t dim, const Scalar& fill) {
  constexpr const char* op = last ? "segment_last" : "segment_first";
  const ScalarType type = data.scalar_type();
  check_dtype(op, "data", type, false);
  const Grouping grouping{offsets, order, index};
  const Shape shape = check_grouping(op, "data", data, grouping, dim);
  return copy_ends(data, empty_resized(data, shape.dim, shape.num_segments, type), grouping, shape, last, false, fill_bits(op, fill, type));
}

Tensor segment_end_backward(const Tensor& grad, FASTOPS_GROUPING, SymInt num_rows, int64_t dim, bool last) {
  const char* op = last ? "segment_last" : "segment_first";
  check_dtype(op, "grad", grad.scalar_type(), true);
  const Grouping grouping{offsets, order, index};
  const Shape shape = check_grouping(op, "grad", grad, grouping, dim, num_rows);
  const Tensor out = empty_resized(grad, shape.dim, num_rows, grad.scalar_type());
  return copy_ends(grad, grad.is_meta() ? out : out.zero_(), grouping, shape, last, true, 0);
}

Interpolation interpolation_of(c10::string_view name) {
  constexpr std::pair<c10::string_view, Interpolation> kNames[] = {{"linear", Interpolation::linear}, {"lower", Interpolation::lower},
                                                                   {"higher", Interpolation::higher}, {"midpoint", Interpolation::midpoint},
                                                                   {"nearest", Interpolation::nearest}};
  for (const auto& [known, interpolation] : kNames) {
    if (name == known) return interpolation;
  }
  TORCH_CHECK_VALUE(false, "segment_quantile: interpolation must be one of linear, lower, higher, midpoint, nearest, but got ", name);
}

// (results `[Q, *, S, *]`, or `[*, S, *]` for a single number; the rows that count and what they count for, if wanted).
std::tuple<Tensor, Tensor, Tensor> quantile(const Tensor& data, const Grouping& grouping, const Tensor& q, int64_t dim,
                                            c10::string_view interpolation, const OptionalScalar& fill, bool for_derivative) {
  constexpr const char* op = "segment_quantile";
  const ScalarType type = data.scalar_type();
  check_dtype(op, "data", type, true);
  const Shape shape = check_grouping(op, "data", data, grouping, dim);
  check_dtype(op, "q", q.scalar_type(), true);
  check_same_device(op, "q", q, "data", data);
  TORCH_CHECK_VALUE(q.dim() <= 1, op, ": q must have at most 1 dimension, but got ", q.dim());
  Selected wanted{Selection::quantiles};
  wanted.interpolation = interpolation_of(interpolation);
  wanted.count = q.sym_numel() * (takes_two(wanted.interpolation) ? 2 : 1);
  wanted.indices = for_derivative;
  wanted.q = q.to(at::kDouble).contiguous();
  c10::SmallVector<SymInt, 6> sizes(data.sym_sizes().begin(), data.sym_sizes().end());
  sizes[shape.dim] = shape.num_segments;
  if (q.dim() == 1) sizes.insert(sizes.begin(), q.sym_size(0));
  wanted.between = at::empty_symint(sizes, data.options());
  if (for_derivative) {
    wanted.shares = at::empty_symint({shape.num_segments, *wanted.count}, data.options().dtype(computed_in(type)));
  }
  const Tensor indices = std::get<1>(select(op, data, grouping, dim, fill_for(fill, type), wanted));
  return {wanted.between, indices, wanted.shares};
}

Tensor segment_quantile(const Tensor& data, FASTOPS_GROUPING, const Tensor& q, int64_t dim, c10::string_view interpolation,
                        const OptionalScalar& fill) {
  return std::get<0>(quantile(data, {offsets, order, index}, q, dim, interpolation, fill, false));
}

std::tuple<Tensor, Tensor, Tensor> segment_quantile_rows(const Tensor& data, FASTOPS_GROUPING, const Tensor& q, int64_t dim,
                                                         c10::string_view interpolation, const OptionalScalar& fill) {
  return quantile(data, {offsets, order, index}, q, dim, interpolation, fill, true);
}

// What was selected back to its rows: values and indices `[*, S, R, *]`, the result `[*, N, *]`.
Tensor segment_place(const Tensor& values, const Tensor& indices, SymInt num_rows, int64_t dim) {
  check_dtype("segment_topk", "grad", values.scalar_type(), true);
  check_same_device("segment_topk", "indices", indices, "grad", values);
  TORCH_CHECK_VALUE(indices.sym_sizes() == values.sym_sizes() && indices.scalar_type() == at::kLong,
                    "segment_topk: indices must be int64 of the shape of grad, but got ", indices.sym_sizes());
  TORCH_CHECK_VALUE(dim >= 0 && dim + 1 < values.dim(), "segment_topk: grad must have a dimension behind dim ", dim, ", but got ",
                    values.dim());
  c10::SmallVector<SymInt, 6> sizes(values.sym_sizes().begin(), values.sym_sizes().end());
  sizes.erase(sizes.begin() + dim + 1);
  sizes[dim] = num_rows;
  if (values.is_meta()) return at::empty_symint(sizes, values.options());
  const Tensor out = at::zeros_symint(sizes, values.options());
  const Tensor from = values.contiguous(), rows = indices.contiguous();
  PlaceCall call{*dtype_of(values.scalar_type()), from.const_data_ptr(), rows.const_data_ptr<int64_t>(), out.mutable_data_ptr(),
                 values.size(dim), values.size(dim + 1), num_rows.expect_int(), 1, 1};
  for (int64_t d = 0; d < values.dim(); ++d) {
    if (d < dim) call.outer *= values.size(d);
    if (d > dim + 1) call.inner *= values.size(d);
  }
  FASTOPS_RUN_WITHOUT_WORKSPACE(place, values, call);
  return out;
}

// Calls through the dispatcher.

TensorPair call_topk(const Tensor& data, const Grouping& g, SymInt k, int64_t dim, bool largest, bool sorted, const Scalar& fill) {
  using Signature = TensorPair(const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&, SymInt, int64_t, bool, bool,
                               const Scalar&);
  FASTOPS_OPERATOR(Signature, op, "segment_topk");
  return op.call(data, g.offsets, g.order, g.index, std::move(k), dim, largest, sorted, fill);
}

TensorPair call_median(const Tensor& data, const Grouping& g, int64_t dim, const OptionalScalar& fill) {
  FASTOPS_OPERATOR(RowSelectionSignature, op, "segment_median");
  return op.call(data, g.offsets, g.order, g.index, dim, fill);
}

Tensor call_end_backward(const Tensor& grad, const Grouping& g, SymInt num_rows, int64_t dim, bool last) {
  using Signature = Tensor(const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&, SymInt, int64_t, bool);
  FASTOPS_OPERATOR(Signature, op, "_segment_end_backward");
  return op.call(grad, g.offsets, g.order, g.index, std::move(num_rows), dim, last);
}

Tensor call_end(const Tensor& data, const Grouping& g, int64_t dim, bool last, const Scalar& fill) {
  FASTOPS_OPERATOR(ExtremumSignature, first, "segment_first");
  FASTOPS_OPERATOR(ExtremumSignature, last_op, "segment_last");
  return (last ? last_op : first).call(data, g.offsets, g.order, g.index, dim, fill);
}

Tensor call_quantile(const Tensor& data, const Grouping& g, const Tensor& q, int64_t dim, c10::string_view interpolation,
                     const OptionalScalar& fill) {
  using Signature = Tensor(const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&, const Tensor&, int64_t,
                           c10::string_view, const OptionalScalar&);
  FASTOPS_OPERATOR(Signature, op, "segment_quantile");
  return op.call(data, g.offsets, g.order, g.index, q, dim, interpolation, fill);
}

std::tuple<Tensor, Tensor, Tensor> call_quantile_rows(const Tensor& data, const Grouping& g, const Tensor& q, int64_t dim,
                                                      c10::string_view interpolation, const OptionalScalar& fill) {
  using Signature = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&,
                                                       const Tensor&, int64_t, c10::string_view, const OptionalScalar&);
  FASTOPS_OPERATOR(Signature, op, "_segment_quantile");
  return op.call(data, g.offsets, g.order, g.index, q, dim, interpolation, fill);
}

// Derivatives.

struct TopkFunction : torch::autograd::Function<TopkFunction> {
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* ctx, const Tensor& data, FASTOPS_GROUPING, SymInt k, int64_t dim, bool largest, bool sorted,
                               const Scalar& fill) {
    return forward_select(ctx, data, {offsets, order, index}, dim,
                          [&] { return call_topk(data, {offsets, order, index}, std::move(k), dim, largest, sorted, fill); });
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const Tensor indices = ctx->get_saved_variables()[0];
    return {call_place(grads[0], indices, ctx->saved_data["num_rows"].toSymInt(), ctx->saved_data["dim"].toInt()),
            {}, {}, {}, {}, {}, {}, {}, {}};
  }
};

TensorPair topk_autograd(const Tensor& data, FASTOPS_GROUPING, SymInt k, int64_t dim, bool largest, bool sorted, const Scalar& fill) {
  if (wants_grad(data) && is_floating(data.scalar_type())) {
    const auto results = TopkFunction::apply(data, offsets, order, index, std::move(k), dim, largest, sorted, fill);
    return {results[0], results[1]};
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return call_topk(data, {offsets, order, index}, std::move(k), dim, largest, sorted, fill);
}

template <bool last>
struct EndFunction : torch::autograd::Function<EndFunction<last>> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& data, FASTOPS_GROUPING, int64_t dim, const Scalar& fill) {
    at::AutoDispatchBelowADInplaceOrView guard;
    const Tensor ends = call_end(data, {offsets, order, index}, dim, last, fill);
    save_grouping(ctx, {}, {offsets, order, index});
    ctx->saved_data["dim"] = dim;
    ctx->saved_data["num_rows"] = data.sym_size(dim);
    return ends;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = saved_grouping(ctx->get_saved_variables(), 0);
    return {call_end_backward(grads[0], saved, ctx->saved_data["num_rows"].toSymInt(), ctx->saved_data["dim"].toInt(), last),
            {}, {}, {}, {}, {}};
  }
};

template <bool last>
Tensor end_autograd(const Tensor& data, FASTOPS_GROUPING, int64_t dim, const Scalar& fill) {
  if (wants_grad(data) && is_floating(data.scalar_type())) return EndFunction<last>::apply(data, offsets, order, index, dim, fill);
  at::AutoDispatchBelowADInplaceOrView guard;
  return call_end(data, {offsets, order, index}, dim, last, fill);
}

struct EndBackwardFunction : torch::autograd::Function<EndBackwardFunction> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& grad, FASTOPS_GROUPING, SymInt num_rows, int64_t dim, bool last) {
    at::AutoDispatchBelowADInplaceOrView guard;
    save_grouping(ctx, {}, {offsets, order, index});
    ctx->saved_data["dim"] = dim;
    ctx->saved_data["last"] = last;
    return call_end_backward(grad, {offsets, order, index}, std::move(num_rows), dim, last);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = saved_grouping(ctx->get_saved_variables(), 0);
    return {call_end(grads[0], saved, ctx->saved_data["dim"].toInt(), ctx->saved_data["last"].toBool(), 0), {}, {}, {}, {}, {}, {}};
  }
};

Tensor end_backward_autograd(const Tensor& grad, FASTOPS_GROUPING, SymInt num_rows, int64_t dim, bool last) {
  if (wants_grad(grad)) return EndBackwardFunction::apply(grad, offsets, order, index, std::move(num_rows), dim, last);
  at::AutoDispatchBelowADInplaceOrView guard;
  return call_end_backward(grad, {offsets, order, index}, std::move(num_rows), dim, last);
}

// Two dimensions as one. Not flatten, which a vmap over gradients (is_grads_batched) does not know.
Tensor join(const Tensor& tensor, int64_t dim) {
  c10::SmallVector<SymInt, 6> sizes(tensor.sym_sizes().begin(), tensor.sym_sizes().end());
  sizes[dim] *= sizes[dim + 1];
  sizes.erase(sizes.begin() + dim + 1);
  return tensor.reshape_symint(sizes);
}

// To the rows around a quantile, by their shares. A row may be that of several: what it receives is added in the type that is
// computed in, and rounded once.
struct QuantileFunction : torch::autograd::Function<QuantileFunction> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& data, FASTOPS_GROUPING, const Tensor& q, int64_t dim,
                        c10::string_view interpolation, const OptionalScalar& fill) {
    at::AutoDispatchBelowADInplaceOrView guard;
    const auto [values, indices, shares] = call_quantile_rows(data, {offsets, order, index}, q, dim, interpolation, fill);
    save_grouping(ctx, {indices, shares}, {offsets, order, index});
    dim = at::maybe_wrap_dim(dim, data.dim());
    ctx->saved_data["dim"] = dim;
    ctx->saved_data["num_rows"] = data.sym_size(dim);
    ctx->saved_data["single"] = q.dim() == 0;
    ctx->saved_data["two"] = takes_two(interpolation_of(interpolation));
    return values;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto tensors = ctx->get_saved_variables();
    const int64_t dim = ctx->saved_data["dim"].toInt();
    // [*, S, Q, 1, *] by [S, Q, 1 or 2, 1...]
    Tensor grad = (ctx->saved_data["single"].toBool() ? grads[0].unsqueeze(dim + 1) : grads[0].movedim(0, dim + 1)).unsqueeze(dim + 2);
    const int64_t rows = ctx->saved_data["two"].toBool() ? 2 : 1;
    Tensor shares = tensors[1].reshape_symint({tensors[1].sym_size(0), tensors[1].sym_size(1) / rows, rows});
    for (int64_t d = dim + 3; d < grad.dim(); ++d) shares = shares.unsqueeze(-1);
    const Tensor back = call_place(join(grad * shares, dim + 1), tensors[0], ctx->saved_data["num_rows"].toSymInt(), dim);
    return {back.to(grads[0].scalar_type()), {}, {}, {}, {}, {}, {}, {}};
  }
};

Tensor quantile_autograd(const Tensor& data, FASTOPS_GROUPING, const Tensor& q, int64_t dim, c10::string_view interpolation,
                         const OptionalScalar& fill) {
  if (wants_grad(data) && is_floating(data.scalar_type())) {
    return QuantileFunction::apply(data, offsets, order, index, q, dim, interpolation, fill);
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return call_quantile(data, {offsets, order, index}, q, dim, interpolation, fill);
}

// Linear in values: back go the entries of the rows.
struct PlaceFunction : torch::autograd::Function<PlaceFunction> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& values, const Tensor& indices, SymInt num_rows, int64_t dim) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({indices});
    ctx->saved_data["dim"] = dim;
    return call_place(values, indices, std::move(num_rows), dim);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const Tensor indices = ctx->get_saved_variables()[0];
    const int64_t dim = ctx->saved_data["dim"].toInt();
    Tensor back;
    if (grads[0].sym_size(dim) == 0 || indices.sym_numel() == 0) {  // nothing to gather, or nothing to gather from
      back = at::zeros_symint(indices.sym_sizes(), grads[0].options());
    } else {
      const Tensor rows = join(indices, dim), zero = at::zeros({}, grads[0].options());
      back = at::where(rows < 0, zero, grads[0].gather(dim, rows.clamp_min(0))).reshape_symint(indices.sym_sizes());
    }
    return {back, {}, {}, {}};
  }
};

Tensor place_autograd(const Tensor& values, const Tensor& indices, SymInt num_rows, int64_t dim) {
  if (wants_grad(values)) return PlaceFunction::apply(values, indices, std::move(num_rows), dim);
  at::AutoDispatchBelowADInplaceOrView guard;
  return call_place(values, indices, std::move(num_rows), dim);
}

void implement_select(torch::Library& m) {
  m.impl("segment_topk", segment_topk);
  m.impl("segment_median", segment_median);
  m.impl("segment_quantile", segment_quantile);
  m.impl("segment_first", segment_end<false>);
  m.impl("segment_last", segment_end<true>);
  m.impl("_segment_end_backward", segment_end_backward);
  m.impl("_segment_quantile", segment_quantile_rows);
  m.impl("_segment_place", segment_place);
}

}  // namespace

TORCH_LIBRARY_IMPL(fastops, CPU, m) { implement_select(m); }
TORCH_LIBRARY_IMPL(fastops, Meta, m) { implement_select(m); }
#ifdef FASTOPS_WITH_CUDA
TORCH_LIBRARY_IMPL(fastops, CUDA, m) { implement_select(m); }
#endif

TORCH_LIBRARY_IMPL(fastops, Autograd, m) {
  m.impl("segment_topk", topk_autograd);
  m.impl("segment_median", select_row_autograd<call_median>);
  m.impl("segment_quantile", quantile_autograd);
  m.impl("segment_first", end_autograd<false>);
  m.impl("segment_last", end_autograd<true>);
  m.impl("_segment_end_backward", end_backward_autograd);
  m.impl("_segment_place", place_autograd);
  m.impl("_segment_quantile", torch::CppFunction::makeFallthrough());  // results that have no derivative
}

}  // namespace fastops::host
