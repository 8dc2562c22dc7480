// Every operator: the table of contents. Names that start with _ are internal; the others are the public operations.
// A grouping is three tensors: offsets [S + 1]; order (rows by segment) and index (segment of each row), given
// together when rows do not stand in order.
#include <torch/library.h>

TORCH_LIBRARY(fastops, m) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  const auto op = [&](const char* schema) { m.def(schema, tags); };

  // reduce.cpp
  op("segment_sum(Tensor data, Tensor offsets, Tensor? order, Tensor? index, int dim=0, ScalarType? dtype=None, Scalar fill_value=0) -> Tensor");
  op("segment_mean(Tensor data, Tensor offsets, Tensor? order, Tensor? index, int dim=0, ScalarType? dtype=None, Scalar fill_value=0) -> Tensor");
  op("segment_prod(Tensor data, Tensor offsets, Tensor? order, Tensor? index, int dim=0, ScalarType? dtype=None, Scalar fill_value=1) -> Tensor");
  op("segment_amax(Tensor data, Tensor offsets, Tensor? order, Tensor? index, int dim=0, Scalar fill_value=0) -> Tensor");
  op("segment_amin(Tensor data, Tensor offsets, Tensor? order, Tensor? index, int dim=0, Scalar fill_value=0) -> Tensor");
  op("segment_max(Tensor data, Tensor offsets, Tensor? order, Tensor? index, int dim=0, Scalar fill_value=0) -> (Tensor values, Tensor indices)");
  op("segment_min(Tensor data, Tensor offsets, Tensor? order, Tensor? index, int dim=0, Scalar fill_value=0) -> (Tensor values, Tensor indices)");
  op("segment_argmax(Tensor data, Tensor offsets, Tensor? order, Tensor? index, int dim=0, int fill_value=-1) -> Tensor");
  op("segment_argmin(Tensor data, Tensor offsets, Tensor? order, Tensor? index, int dim=0, int fill_value=-1) -> Tensor");
  op("segment_any(Tensor data, Tensor offsets, Tensor? order, Tensor? index, int dim=0, bool fill_value=False) -> Tensor");
  op("segment_all(Tensor data, Tensor offsets, Tensor? order, Tensor? index, int dim=0, bool fill_value=True) -> Tensor");
  op("segment_logsumexp(Tensor data, Tensor offsets, Tensor? order, Tensor? index, int dim=0, Scalar? fill_value=None) -> Tensor");
  op("segment_var(Tensor data, Tensor offsets, Tensor? order, Tensor? index, int dim=0, float correction=1, Scalar fill_value=0) -> Tensor");
  op("segment_std(Tensor data, Tensor offsets, Tensor? order, Tensor? index, int dim=0, float correction=1, Scalar fill_value=0) -> Tensor");
  op("_segment_logsumexp_wide(Tensor data, Tensor offsets, Tensor? order, Tensor? index, int dim, Scalar? fill_value) -> Tensor");
  op("_segment_moments(Tensor data, Tensor offsets, Tensor? order, Tensor? index, int dim, float correction, bool root, Scalar fill_value) -> (Tensor values, Tensor mean)");
  op("_segment_amax_count(Tensor data, Tensor offsets, Tensor? order, Tensor? index, int dim, Scalar fill_value) -> (Tensor values, Tensor counts)");
  op("_segment_amin_count(Tensor data, Tensor offsets, Tensor? order, Tensor? index, int dim, Scalar fill_value) -> (Tensor values, Tensor counts)");
  op("_segment_prod_parts(Tensor data, Tensor offsets, Tensor? order, Tensor? index, int dim) -> (Tensor product, Tensor zeros)");

  // move.cpp
  op("segment_broadcast(Tensor values, Tensor offsets, Tensor? order, Tensor? index, SymInt num_rows, int dim=0) -> Tensor");
  op("_segment_mean_backward(Tensor grad, Tensor offsets, Tensor? order, Tensor? index, SymInt num_rows, int dim) -> Tensor");
  op("_segment_select_backward(Tensor grad, Tensor indices, Tensor offsets, Tensor? order, Tensor? index, SymInt num_rows, int dim) -> Tensor");
  op("_segment_extremum_backward(Tensor grad, Tensor data, Tensor values, Tensor counts, Tensor offsets, Tensor? order, Tensor? index, int dim) -> Tensor");
  op("_segment_prod_backward(Tensor grad, Tensor data, Tensor product, Tensor zeros, Tensor offsets, Tensor? order, Tensor? index, int dim) -> Tensor");
  op("_segment_logsumexp_backward(Tensor grad, Tensor data, Tensor result, Tensor offsets, Tensor? order, Tensor? index, int dim) -> Tensor");
  op("_segment_var_backward(Tensor grad, Tensor data, Tensor mean, Tensor offsets, Tensor? order, Tensor? index, int dim, float correction) -> Tensor");

  // weighted.cpp
  op("_segment_weighted_sum(Tensor data, Tensor weight, Tensor offsets, Tensor? order, Tensor? index, int dim, bool wide, Scalar fill_value) -> Tensor");
  op("_segment_weighted_broadcast(Tensor values, Tensor weight, Tensor offsets, Tensor? order, Tensor? index, int dim, ScalarType dtype) -> Tensor");
  op("_segment_dot(Tensor values, Tensor data, Tensor offsets, Tensor? order, Tensor? index, int dim, int weight_dim) -> Tensor");

  // normalise.cpp
  op("segment_softmax(Tensor data, Tensor offsets, Tensor? order, Tensor? index, int dim=0) -> Tensor");
  op("segment_log_softmax(Tensor data, Tensor offsets, Tensor? order, Tensor? index, int dim=0) -> Tensor");
  op("_segment_softmax_backward(Tensor grad, Tensor result, Tensor offsets, Tensor? order, Tensor? index, int dim) -> Tensor");
  op("_segment_log_softmax_backward(Tensor grad, Tensor result, Tensor offsets, Tensor? order, Tensor? index, int dim) -> Tensor");

  // scan.cpp
  op("segment_cumsum(Tensor data, Tensor offsets, Tensor? order, Tensor? index, int dim=0, ScalarType? dtype=None, bool exclusive=False, bool reverse=False) -> Tensor");
  op("segment_cumprod(Tensor data, Tensor offsets, Tensor? order, Tensor? index, int dim=0, ScalarType? dtype=None, bool exclusive=False, bool reverse=False) -> Tensor");
  op("segment_cummax(Tensor data, Tensor offsets, Tensor? order, Tensor? index, int dim=0, bool exclusive=False, bool reverse=False) -> (Tensor values, Tensor indices)");
  op("segment_cummin(Tensor data, Tensor offsets, Tensor? order, Tensor? index, int dim=0, bool exclusive=False, bool reverse=False) -> (Tensor values, Tensor indices)");
  op("segment_logcumsumexp(Tensor data, Tensor offsets, Tensor? order, Tensor? index, int dim=0, bool exclusive=False, bool reverse=False) -> Tensor");
  op("_segment_linear_scan(Tensor factors, Tensor data, Tensor offsets, Tensor? order, Tensor? index, int dim, bool reverse) -> Tensor");

  // sort.cpp
  op("segment_sort(Tensor data, Tensor offsets, Tensor? order, Tensor? index, int dim=0, bool descending=False) -> (Tensor values, Tensor indices)");
  op("segment_argsort(Tensor data, Tensor offsets, Tensor? order, Tensor? index, int dim=0, bool descending=False) -> Tensor");
  op("segment_nunique(Tensor data, Tensor offsets, Tensor? order, Tensor? index, int dim=0, int fill_value=0) -> Tensor");
  op("segment_mode(Tensor data, Tensor offsets, Tensor? order, Tensor? index, int dim=0, Scalar? fill_value=None) -> (Tensor values, Tensor indices)");

  // select.cpp
  op("segment_topk(Tensor data, Tensor offsets, Tensor? order, Tensor? index, SymInt k, int dim=0, bool largest=True, bool sorted=True, Scalar fill_value=0) -> (Tensor values, Tensor indices)");
  op("segment_median(Tensor data, Tensor offsets, Tensor? order, Tensor? index, int dim=0, Scalar? fill_value=None) -> (Tensor values, Tensor indices)");
  op("segment_quantile(Tensor data, Tensor offsets, Tensor? order, Tensor? index, Tensor q, int dim=0, str interpolation='linear', Scalar? fill_value=None) -> Tensor");
  op("segment_first(Tensor data, Tensor offsets, Tensor? order, Tensor? index, int dim=0, Scalar fill_value=0) -> Tensor");
  op("segment_last(Tensor data, Tensor offsets, Tensor? order, Tensor? index, int dim=0, Scalar fill_value=0) -> Tensor");
  op("_segment_end_backward(Tensor grad, Tensor offsets, Tensor? order, Tensor? index, SymInt num_rows, int dim, bool last) -> Tensor");
  op("_segment_quantile(Tensor data, Tensor offsets, Tensor? order, Tensor? index, Tensor q, int dim, str interpolation, Scalar? fill_value) -> (Tensor values, Tensor indices, Tensor shares)");
  op("_segment_place(Tensor values, Tensor indices, SymInt num_rows, int dim) -> Tensor");

  // segments.cpp
  op("_check_offsets(Tensor offsets) -> Tensor");
  op("_index_bounds(Tensor index) -> Tensor");
  op("_group_index(Tensor index, SymInt num_segments, bool sorted) -> (Tensor offsets, Tensor order)");
}
