// Automatic mixed precision: what runs in float32 under torch.autocast, as the torch namesakes do. Everything else takes
// the dtype that it is given.
#include <ATen/autocast_mode.h>

#include "host/calls.h"
#include "host/checks.h"

namespace fastops::host {
namespace {

template <c10::DeviceType device>
struct WithoutAutocast {
  c10::impl::ExcludeDispatchKeyGuard guard{at::autocast::get_autocast_dispatch_key_from_device_type(device)};
};

template <c10::DeviceType device>
Tensor in_float(const Tensor& data) {
  return at::autocast::cached_cast(at::kFloat, data, device);
}

template <c10::DeviceType device, bool log>
Tensor softmax_autocast(const Tensor& data, FASTOPS_GROUPING, int64_t dim) {
  const WithoutAutocast<device> without;
  return call_softmax(log, in_float<device>(data), {offsets, order, index}, dim);
}

template <c10::DeviceType device>
Tensor logsumexp_autocast(const Tensor& data, FASTOPS_GROUPING, int64_t dim, const std::optional<at::Scalar>& fill) {
  const WithoutAutocast<device> without;
  return call_logsumexp(in_float<device>(data), {offsets, order, index}, dim, fill, false);
}

// dtype= of what would be of 16 bits is float32.
OptionalDtype float_unless(const OptionalDtype& dtype, const Tensor& data) {
  const bool is_short = data.scalar_type() == at::kHalf || data.scalar_type() == at::kBFloat16;
  return !dtype && is_short ? OptionalDtype(at::kFloat) : dtype;
}

// The kernels read 16-bit data and return float32: no copy in float32 is made.
template <c10::DeviceType device, Reduction reduction>
Tensor linear_autocast(const Tensor& data, FASTOPS_GROUPING, int64_t dim, OptionalDtype dtype, const at::Scalar& fill) {
  const WithoutAutocast<device> without;
  return call_linear(reduction, data, {offsets, order, index}, dim, float_unless(dtype, data), fill);
}

template <c10::DeviceType device>
Tensor weighted_sum_autocast(const Tensor& data, const Tensor& weight, FASTOPS_GROUPING, int64_t dim, bool, const at::Scalar& fill) {
  const WithoutAutocast<device> without;
  return call_weighted_sum(data, weight, {offsets, order, index}, dim, true, fill);
}

template <c10::DeviceType device, Scan kind>
Tensor cumulative_autocast(const Tensor& data, FASTOPS_GROUPING, int64_t dim, OptionalDtype dtype, bool exclusive, bool reverse) {
  const WithoutAutocast<device> without;
  return call_cumulative(kind, data, {offsets, order, index}, dim, exclusive, reverse, float_unless(dtype, data));
}

template <c10::DeviceType device>
void implement_autocast(torch::Library& m) {
  m.impl("segment_softmax", softmax_autocast<device, false>);
  m.impl("segment_log_softmax", softmax_autocast<device, true>);
  m.impl("segment_logsumexp", logsumexp_autocast<device>);
  m.impl("segment_prod", linear_autocast<device, Reduction::prod>);
  if (device == at::kCUDA) {  // torch.sum, cumsum and cumprod are on this list only
    m.impl("segment_cumsum", cumulative_autocast<device, Scan::sum>);
    m.impl("segment_cumprod", cumulative_autocast<device, Scan::prod>);
    m.impl("segment_sum", linear_autocast<device, Reduction::sum>);
    m.impl("_segment_weighted_sum", weighted_sum_autocast<device>);
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(fastops, AutocastCPU, m) { implement_autocast<at::kCPU>(m); }
TORCH_LIBRARY_IMPL(fastops, AutocastCUDA, m) { implement_autocast<at::kCUDA>(m); }

}  // namespace fastops::host
