// Sorting within segments, and what is counted in sorted segments: checks, allocation, choice of the kernel, derivative.
#include <torch/csrc/autograd/custom_function.h>

#include "host/calls.h"
#include "host/checks.h"

namespace fastops::host {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The values, undefined if they are not wanted, and the rows that they come from, or counts. `call`: what is known of it.
TensorPair sort(const char* op, bool with_values, const Tensor& data, const Grouping& grouping, int64_t dim, SortCall call) {
  check_dtype(op, "data", data.scalar_type(), false);
  const Shape shape = check_grouping(op, "data", data, grouping, dim);
  const SymInt positions = grouping.order ? grouping.order->sym_size(0) : shape.num_rows;
  const SymInt rows_out = call.wanted == Sorted::rows ? positions : shape.num_segments;
  Tensor values = with_values ? empty_resized(data, shape.dim, rows_out, data.scalar_type()) : Tensor();
  Tensor numbers = empty_resized(data, shape.dim, rows_out, at::kLong);
  if (data.is_meta()) return {values, numbers};

  const HeldGrouping held(grouping, shape);
  const Tensor rows = data.contiguous();
  call.dtype = *dtype_of(data.scalar_type());
  call.data = rows.const_data_ptr();
  call.values = with_values ? values.mutable_data_ptr() : nullptr;
  (call.wanted == Sorted::nunique ? call.counts : call.indices) = numbers.mutable_data_ptr<int64_t>();
  call.segments = held.view;
  call.outer = shape.outer.expect_int();
  call.inner = shape.inner.expect_int();
  FASTOPS_RUN(sort, data, call);
  return {values, numbers};
}

TensorPair segment_sort(const Tensor& data, FASTOPS_GROUPING, int64_t dim, bool descending) {
  SortCall call{};
  call.descending = descending;
  return sort("segment_sort", true, data, {offsets, order, index}, dim, call);
}

Tensor segment_argsort(const Tensor& data, FASTOPS_GROUPING, int64_t dim, bool descending) {
  SortCall call{};
  call.descending = descending;
  return std::get<1>(sort("segment_argsort", false, data, {offsets, order, index}, dim, call));
}

Tensor segment_nunique(const Tensor& data, FASTOPS_GROUPING, int64_t dim, int64_t fill) {
  SortCall call{};
  call.wanted = Sorted::nunique;
  call.fill = uint64_t(fill);
  return std::get<1>(sort("segment_nunique", false, data, {offsets, order, index}, dim, call));
}

TensorPair segment_mode(const Tensor& data, FASTOPS_GROUPING, int64_t dim, const OptionalScalar& fill) {
  const char* const op = "segment_mode";
  check_dtype(op, "data", data.scalar_type(), false);
  SortCall call{};
  call.wanted = Sorted::mode;
  call.fill = fill_bits(op, fill_for(fill, data.scalar_type()), data.scalar_type());
  return sort(op, true, data, {offsets, order, index}, dim, call);
}

// The derivative.

using SortSignature = TensorPair(const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&, int64_t, bool);

TensorPair call_sort(const Tensor& data, const Grouping& g, int64_t dim, bool descending) {
  FASTOPS_OPERATOR(SortSignature, op, "segment_sort");
  return op.call(data, g.offsets, g.order, g.index, dim, descending);
}

TensorPair call_mode(const Tensor& data, const Grouping& g, int64_t dim, const OptionalScalar& fill) {
  FASTOPS_OPERATOR(RowSelectionSignature, op, "segment_mode");
  return op.call(data, g.offsets, g.order, g.index, dim, fill);
}

// Each row is the origin of one value at most, so its gradient is that value's: nothing adds up, and the result is the same
// in every run. By an operator of our own, as Inductor (torch 2.13) reads what at::scatter writes too early in large graphs.
struct SortFunction : torch::autograd::Function<SortFunction> {
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* ctx, const Tensor& data, FASTOPS_GROUPING, int64_t dim, bool descending) {
    at::AutoDispatchBelowADInplaceOrView guard;
    const auto [values, indices] = call_sort(data, {offsets, order, index}, dim, descending);
    // Indices say it all, but a change of the segments is found out here as it is elsewhere.
    save_grouping(ctx, {indices}, {offsets, order, index});
    ctx->saved_data["dim"] = at::maybe_wrap_dim(dim, data.dim());
    ctx->saved_data["num_rows"] = data.sym_size(at::maybe_wrap_dim(dim, data.dim()));
    return {values, indices};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const Tensor indices = ctx->get_saved_variables()[0];
    const int64_t dim = ctx->saved_data["dim"].toInt();
    const Tensor rows = call_place(grads[0].unsqueeze(dim + 1), indices.unsqueeze(dim + 1), ctx->saved_data["num_rows"].toSymInt(), dim);
    return {rows, {}, {}, {}, {}, {}};
  }
};

TensorPair sort_autograd(const Tensor& data, FASTOPS_GROUPING, int64_t dim, bool descending) {
  if (wants_grad(data) && is_floating(data.scalar_type())) {
    const auto results = SortFunction::apply(data, offsets, order, index, dim, descending);
    return {results[0], results[1]};
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return call_sort(data, {offsets, order, index}, dim, descending);
}

void implement_sort(torch::Library& m) {
  m.impl("segment_sort", segment_sort);
  m.impl("segment_argsort", segment_argsort);
  m.impl("segment_nunique", segment_nunique);
  m.impl("segment_mode", segment_mode);
}

}  // namespace

TORCH_LIBRARY_IMPL(fastops, CPU, m) { implement_sort(m); }
TORCH_LIBRARY_IMPL(fastops, Meta, m) { implement_sort(m); }
#ifdef FASTOPS_WITH_CUDA
TORCH_LIBRARY_IMPL(fastops, CUDA, m) { implement_sort(m); }
#endif

TORCH_LIBRARY_IMPL(fastops, Autograd, m) {
  m.impl("segment_sort", sort_autograd);
  m.impl("segment_mode", select_row_autograd<call_mode>);
  for (const char* whole : {"segment_argsort", "segment_nunique"}) {
    m.impl(whole, torch::CppFunction::makeFallthrough());  // row numbers and counts have no derivative
  }
}

}  // namespace fastops::host
