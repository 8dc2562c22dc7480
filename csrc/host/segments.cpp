// Grouping: checks of offsets and index, and the stable counting sort behind an unsorted index.
#include <ATen/ops/aminmax.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>

#include "host/checks.h"

namespace fastops::host {
namespace {

// [position of the first offset below the one before it or below 0, else -1; last offset].
Tensor check_offsets_cpu(const Tensor& offsets) {
  check_index_tensor("Segments", "offsets", offsets);
  const Tensor flat = offsets.contiguous();
  const IndexArray at = array_of(flat);
  int64_t before = 0, bad = -1;
  for (int64_t i = 0, n = flat.size(0); i < n && bad < 0; ++i) {
    const int64_t now = at[i];
    if (now < before || (i == 0 && now != 0)) bad = i;
    before = now;
  }
  Tensor found = at::empty({2}, at::kLong);
  found.mutable_data_ptr<int64_t>()[0] = bad;
  found.mutable_data_ptr<int64_t>()[1] = flat.size(0) > 0 ? at[flat.size(0) - 1] : 0;
  return found;
}

// [smallest, largest, 1 if ascending] of index; (0, -1, 1) of an empty one.
Tensor index_bounds_cpu(const Tensor& index) {
  check_index_tensor("Segments", "index", index);
  const Tensor flat = index.contiguous();
  const IndexArray at = array_of(flat);
  const int64_t n = flat.size(0);
  int64_t low = 0, high = -1, ascending = 1;
  if (n > 0) {
    const auto scan = [&](const auto* ids) {
      auto smallest = ids[0], largest = ids[0];
      bool sorted = true;
      for (int64_t i = 1; i < n; ++i) {
        smallest = ids[i] < smallest ? ids[i] : smallest;
        largest = ids[i] > largest ? ids[i] : largest;
        sorted &= ids[i] >= ids[i - 1];
      }
      low = smallest, high = largest, ascending = sorted;
    };
    if (at.wide) {
      scan(static_cast<const int64_t*>(at.data));
    } else {
      scan(static_cast<const int32_t*>(at.data));
    }
  }
  Tensor found = at::empty({3}, at::kLong);
  int64_t* to = found.mutable_data_ptr<int64_t>();
  to[0] = low, to[1] = high, to[2] = ascending;
  return found;
}

#ifdef FASTOPS_WITH_CUDA
// A few of torch's own operators and one copy to the host, the synchronisation that checking costs.
Tensor check_offsets_cuda(const Tensor& offsets) {
  check_index_tensor("Segments", "offsets", offsets);
  if (offsets.size(0) == 0) return check_offsets_cpu(at::empty({0}, at::kLong));
  const Tensor flat = offsets.to(at::kLong);
  const Tensor before = at::cat({at::zeros({1}, flat.options()), flat.slice(0, 0, -1)});
  Tensor bad = flat < before;
  bad.select(0, 0).logical_or_(flat.select(0, 0) != 0);
  const Tensor first = at::where(bad.any(), bad.to(at::kByte).argmax(), at::full({}, -1, flat.options()));
  return at::stack({first, flat.select(0, -1)}).cpu();
}

Tensor index_bounds_cuda(const Tensor& index) {
  check_index_tensor("Segments", "index", index);
  if (index.size(0) == 0) return index_bounds_cpu(at::empty({0}, at::kLong));
  const auto [low, high] = at::aminmax(index);
  const Tensor ascending = (index.slice(0, 1) >= index.slice(0, 0, -1)).all();
  return at::stack({low.to(at::kLong), high.to(at::kLong), ascending.to(at::kLong)}).cpu();
}
#endif

std::tuple<Tensor, Tensor> group_index(const Tensor& index, SymInt num_segments, bool sorted) {
  check_index_tensor("Segments.from_index", "index", index);
  TORCH_CHECK_VALUE(num_segments >= 0, "Segments.from_index: num_segments must be at least 0, but got ", num_segments);
  Tensor offsets = at::empty_symint({num_segments + 1}, index.options());
  Tensor order = at::empty_symint({sorted ? SymInt(0) : index.sym_size(0)}, index.options());
  if (index.is_meta()) return {offsets, order};
  const Tensor flat = index.contiguous();
  const GroupCall call{array_of(flat), offsets.mutable_data_ptr(), sorted ? nullptr : order.mutable_data_ptr(),
                       num_segments.expect_int(), flat.size(0)};
  FASTOPS_RUN(group, index, call);
  return {offsets, order};
}

Tensor found_meta(const Tensor&, int64_t n) { return at::empty({n}, at::kLong); }

}  // namespace

TORCH_LIBRARY_IMPL(fastops, CPU, m) {
  m.impl("_check_offsets", check_offsets_cpu);
  m.impl("_index_bounds", index_bounds_cpu);
  m.impl("_group_index", group_index);
}
TORCH_LIBRARY_IMPL(fastops, Meta, m) {
  m.impl("_check_offsets", [](const Tensor& offsets) { return found_meta(offsets, 2); });
  m.impl("_index_bounds", [](const Tensor& index) { return found_meta(index, 3); });
  m.impl("_group_index", group_index);
}
#ifdef FASTOPS_WITH_CUDA
TORCH_LIBRARY_IMPL(fastops, CUDA, m) {
  m.impl("_check_offsets", check_offsets_cuda);
  m.impl("_index_bounds", index_bounds_cuda);
  m.impl("_group_index", group_index);
}
#endif

}  // namespace fastops::host
