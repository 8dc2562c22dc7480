// What every operation checks and looks up, once for all devices: CPU, CUDA and meta tensors meet the same words.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#ifdef __linux__
#include <sys/mman.h>

#include <cstdlib>
#endif

#ifdef FASTOPS_WITH_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include "build_facts.h"  // written by python/fastops/_build.py
#endif

#include "cpu/capability.h"
#include "kernels.h"

namespace fastops::host {

using at::ScalarType;
using at::Tensor;
using c10::SymInt;
using OptionalTensor = std::optional<Tensor>;
using OptionalScalar = std::optional<at::Scalar>;

// The tensors of a grouping, as operators take them.
struct Grouping {
  const Tensor& offsets;
  const OptionalTensor& order;
  const OptionalTensor& index;
};

// And as parameters.
#define FASTOPS_GROUPING const Tensor &offsets, const OptionalTensor &order, const OptionalTensor &index

// Where the rows are.
struct Shape {
  int64_t dim;
  SymInt num_rows, num_segments;
  SymInt outer, inner;
};

// The type that elements are computed in.
inline ScalarType computed_in(ScalarType type) { return type == at::kHalf || type == at::kBFloat16 ? at::kFloat : type; }

inline const char* name_of(ScalarType type) {
  switch (type) {
    case at::kHalf: return "float16";
    case at::kBFloat16: return "bfloat16";
    case at::kFloat: return "float32";
    case at::kDouble: return "float64";
    case at::kByte: return "uint8";
    case at::kChar: return "int8";
    case at::kShort: return "int16";
    case at::kInt: return "int32";
    case at::kLong: return "int64";
    case at::kBool: return "bool";
    case at::kComplexHalf: return "complex32";
    case at::kComplexFloat: return "complex64";
    case at::kComplexDouble: return "complex128";
    default: return c10::toString(type);
  }
}

inline std::optional<DType> dtype_of(ScalarType type) {
  switch (type) {
    case at::kHalf: return DType::f16;
    case at::kBFloat16: return DType::bf16;
    case at::kFloat: return DType::f32;
    case at::kDouble: return DType::f64;
    case at::kByte: return DType::u8;
    case at::kChar: return DType::i8;
    case at::kShort: return DType::i16;
    case at::kInt: return DType::i32;
    case at::kLong: return DType::i64;
    case at::kBool: return DType::b8;
    default: return std::nullopt;
  }
}

inline bool is_floating(ScalarType type) {
  return type == at::kHalf || type == at::kBFloat16 || type == at::kFloat || type == at::kDouble;
}

inline constexpr const char* kFloatingNames = "float16, bfloat16, float32, float64";
inline constexpr const char* kAllNames = "float16, bfloat16, float32, float64, uint8, int8, int16, int32, int64, bool";

inline void check_dtype(const char* op, const char* argument, ScalarType type, bool floating_only, const char* remedy = "") {
  TORCH_CHECK_TYPE(floating_only ? is_floating(type) : dtype_of(type).has_value(), op, ": ", argument, " must be one of ",
                   floating_only ? kFloatingNames : kAllNames, ", but got ", name_of(type), remedy);
}

// dtype= of sum, mean, prod and their running forms: as torch does, data is converted first. 16-bit data into float32 may be
// one step of the kernel; whole numbers are added up and multiplied in int64, from which narrower results follow, since all
// wrap round alike.
struct Promotion {
  Tensor data;
  ScalarType out;      // of the kernel
  std::optional<ScalarType> final;  // of the result, if it must be converted once more
};

inline Promotion promote(const char* op, const Tensor& data, const std::optional<ScalarType>& dtype, bool floating_only) {
  const ScalarType from = data.scalar_type();
  check_dtype(op, "data", from, floating_only && !dtype, floating_only && dtype_of(from) ? "; pass dtype=torch.float32" : "");
  if (dtype) check_dtype(op, "dtype", *dtype, floating_only);
  if (!dtype || *dtype == from) {
    if (is_floating(from)) return {data, from, std::nullopt};
    return {data, at::kLong, dtype && *dtype != at::kLong ? dtype : std::nullopt};
  }
  if (!is_floating(*dtype) && *dtype != at::kBool && !is_floating(from)) {
    return {data, at::kLong, *dtype != at::kLong ? dtype : std::nullopt};
  }
  if (*dtype == at::kFloat && (from == at::kHalf || from == at::kBFloat16)) return {data, at::kFloat, std::nullopt};
  return promote(op, data.to(*dtype), *dtype, floating_only);
}

inline void check_same_device(const char* op, const char* argument, const Tensor& tensor, const char* other, const Tensor& like) {
  TORCH_CHECK(tensor.device() == like.device(), op, ": ", argument, " must be on the device of ", other, " (", like.device(),
              "), but got ", tensor.device(), "; move one of them with .to(device)");
}

inline int64_t check_dim(const char* op, const char* argument, const Tensor& data, int64_t dim) {
  const int64_t rank = data.dim();
  TORCH_CHECK_VALUE(rank > 0, op, ": ", argument, " must have at least 1 dimension, but got 0");
  TORCH_CHECK_INDEX(dim >= -rank && dim < rank, op, ": dim must be in [", -rank, ", ", rank - 1, "], but got ", dim);
  return dim < 0 ? dim + rank : dim;
}

inline void check_index_tensor(const char* op, const char* argument, const Tensor& tensor) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == at::kInt || tensor.scalar_type() == at::kLong, op, ": ", argument,
                   " must be int32 or int64, but got ", name_of(tensor.scalar_type()));
  TORCH_CHECK_VALUE(tensor.dim() == 1, op, ": ", argument, " must have 1 dimension, but got ", tensor.dim());
}

// As a floating number, and as an integer: integers fill with integers, since 0.5 or NaN have no meaning there.
inline std::pair<double, int64_t> fill_as(const char* op, const at::Scalar& fill, ScalarType type) {
  TORCH_CHECK_TYPE(!fill.isComplex(), op, ": fill_value must be a real number, but got a complex one");
  const double number = fill.toDouble();
  if (is_floating(type)) return {number, 0};
  int64_t integer = 0;
  if (fill.isFloatingPoint()) {
    TORCH_CHECK_VALUE(number == std::trunc(number) && std::abs(number) < 9.2e18, op, ": fill_value must be an integer for ",
                      name_of(type), " results, but got ", number);
    integer = int64_t(number);
  } else {
    integer = fill.toLong();
  }
  return {number, type == at::kBool ? integer != 0 : integer};
}

// The fill value of floating data where none is given is NaN, that of integers 0.
inline at::Scalar fill_for(const OptionalScalar& fill, ScalarType type) {
  if (fill) return *fill;
  return is_floating(type) ? at::Scalar(std::numeric_limits<double>::quiet_NaN()) : at::Scalar(0);
}

// The bits of an element that is the fill value.
inline uint64_t fill_bits(const char* op, const at::Scalar& fill, ScalarType type) {
  const auto [number, integer] = fill_as(op, fill, type);
  switch (type) {
    case at::kHalf: return to_half(float(number)).bits;
    case at::kBFloat16: return to_bfloat16(float(number)).bits;
    case at::kFloat: return bit_cast<uint32_t>(float(number));
    case at::kDouble: return bit_cast<uint64_t>(number);
    default: return uint64_t(integer);
  }
}

inline IndexArray array_of(const Tensor& tensor) { return {tensor.const_data_ptr(), tensor.scalar_type() == at::kLong}; }

// Whether something holds of sizes. Of those that are found in the data of a graph it is taken for true, and asked when that runs.
inline bool holds(const c10::SymBool& condition) { return condition.expect_true(__FILE__, __LINE__); }

// Checks a grouping against the tensor that goes with it: `data` with a row for each of num_rows along dim, or
// `values` with one for each segment.
inline Shape check_grouping(const char* op, const char* argument, const Tensor& tensor, const Grouping& grouping, int64_t dim,
                            const std::optional<SymInt>& num_rows = std::nullopt) {
  const auto& [offsets, order, index] = grouping;
  check_same_device(op, "offsets", offsets, argument, tensor);
  if (order) check_same_device(op, "order", *order, argument, tensor);
  if (index) check_same_device(op, "index", *index, argument, tensor);
  dim = check_dim(op, argument, tensor, dim);
  check_index_tensor(op, "offsets", offsets);
  TORCH_CHECK_VALUE(holds(offsets.sym_size(0).sym_ge(1)), op, ": offsets must have at least 1 entry, but got 0");
  TORCH_CHECK_VALUE(order.has_value() == index.has_value(), op, ": index must be given exactly when order is, but got ",
                    order ? "order" : "index", " alone");

  Shape shape{dim, num_rows ? *num_rows : tensor.sym_size(dim), offsets.sym_size(0) - 1, 1, 1};
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (d < dim) shape.outer *= tensor.sym_size(d);
    if (d > dim) shape.inner *= tensor.sym_size(d);
  }
  if (num_rows) {
    TORCH_CHECK_VALUE(holds(num_rows->sym_ge(0)), op, ": num_rows must be at least 0, but got ", *num_rows);
    TORCH_CHECK_VALUE(holds(tensor.sym_size(dim).sym_eq(shape.num_segments)), op, ": ", argument, " must have ", shape.num_segments,
                      " rows along dim ", dim, ", one for each segment, but got ", tensor.sym_size(dim));
  }
  if (order) {
    check_index_tensor(op, "order", *order);
    check_index_tensor(op, "index", *index);
    TORCH_CHECK_TYPE(order->scalar_type() == offsets.scalar_type() && index->scalar_type() == offsets.scalar_type(), op,
                     ": order and index must have the dtype of offsets (", name_of(offsets.scalar_type()), "), but got ",
                     name_of(order->scalar_type()), " and ", name_of(index->scalar_type()));
    TORCH_CHECK_VALUE(holds(index->sym_size(0).sym_eq(shape.num_rows)), op, ": ", argument, " must have ", index->sym_size(0),
                      " rows along dim ", dim, ", as the segments do, but got ", shape.num_rows);
    TORCH_CHECK_VALUE(holds(order->sym_size(0).sym_le(shape.num_rows)), op, ": order must have at most ", shape.num_rows,
                      " entries, but got ", order->sym_size(0));
  } else if (offsets.device().is_cpu() && !offsets.is_meta() && !offsets.unsafeGetTensorImpl()->is_python_dispatch()) {
    // On the CPU the last offset can be read for nothing; on CUDA that would wait for the device.
    const int64_t covered = array_of(offsets)[(offsets.size(0) - 1) * offsets.stride(0)];
    if (num_rows) {
      TORCH_CHECK_VALUE(shape.num_rows == covered, op, ": num_rows must be ", covered, ", the last of offsets, but got ",
                        shape.num_rows);
    } else {
      TORCH_CHECK_VALUE(shape.num_rows == covered, op, ": ", argument, " must have ", covered, " rows along dim ", dim,
                        ", as the segments do, but got ", shape.num_rows);
    }
  }
  return shape;
}

// Fresh memory comes in pages of 4 KiB, and the first touch of each costs more than filling it. For a large result the
// kernel is asked for pages of 2 MiB, as NumPy does for its arrays (from the same size on): a quarter of the time, unless
// memory is so full or fragmented that the kernel has to make room. FASTOPS_HUGE_PAGES=0 leaves it alone.
inline Tensor with_huge_pages([[maybe_unused]] const Tensor& tensor) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr size_t kFrom = size_t(1) << 22, kPage = size_t(1) << 21;
  static const bool wanted = [] {
    const char* value = std::getenv("FASTOPS_HUGE_PAGES");
    return value == nullptr || std::strcmp(value, "0") != 0;
  }();
  const size_t bytes = tensor.nbytes();
  if (bytes >= kFrom && wanted) {
    const auto begin = (reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) + kPage - 1) / kPage * kPage;
    const auto end = (reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) + bytes) / kPage * kPage;
    if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // a wish: it may fail
  }
#endif
  return tensor;
}

// An uninitialised tensor of the shape and device of `like`, but with another size along dim.
inline Tensor empty_resized(const Tensor& like, int64_t dim, const SymInt& size, ScalarType type) {
  if (like.is_cpu() && !like.is_meta()) {  // a tiny call would spend a tenth of its time on the dispatcher's way there
    c10::SmallVector<int64_t, 6> sizes(like.sizes().begin(), like.sizes().end());
    sizes[dim] = size.expect_int();
    return with_huge_pages(at::detail::empty_cpu(sizes, type));
  }
  c10::SmallVector<SymInt, 6> sizes(like.sym_sizes().begin(), like.sym_sizes().end());
  sizes[dim] = size;
  return at::empty_symint(sizes, like.options().dtype(type));
}

// The contiguous tensors of a grouping, and kernels' view of them; keeps them alive.
struct HeldGrouping {
  Tensor offsets, order, index;
  SegmentsView view;

  HeldGrouping(const Grouping& grouping, const Shape& shape) : offsets(grouping.offsets.contiguous()) {
    view.offsets = array_of(offsets);
    view.num_segments = shape.num_segments.expect_int();
    view.num_rows = view.num_positions = shape.num_rows.expect_int();
    if (grouping.order) {
      order = grouping.order->contiguous();
      index = grouping.index->contiguous();
      view.index = array_of(index);
      // Without entries (all rows left out) order has no memory, but it must not look as if it were not given.
      view.order = order.size(0) > 0 ? array_of(order) : view.index;
      view.num_positions = order.size(0);
    }
  }
};

// Checks, allocation and kernel of a sum whose rows have weights (reduce.cpp), and of what its derivative hands down
// (move.cpp).
Tensor reduce_weighted(const Tensor& data, const RowWeights& weights, const Grouping&, int64_t dim, ScalarType out, const at::Scalar& fill);
Tensor broadcast_weighted(const Tensor& values, const RowWeights& weights, const Grouping&, const SymInt& num_rows, int64_t dim,
                          ScalarType out);

inline cpu::Pool pool() {
  return {at::get_num_threads(), [](int64_t tasks, void (*body)(void*, int64_t), void* context) {
            if (tasks == 1) return body(context, 0);
            at::parallel_for(0, tasks, 1, [&](int64_t begin, int64_t end) {
              for (int64_t task = begin; task < end; ++task) body(context, task);
            });
          }};
}

#ifdef FASTOPS_WITH_CUDA
inline std::string capability_of(int device) {
  int major = 0, minor = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  return std::to_string(major) + "." + std::to_string(minor);
}

// Runs launch(stream) on the device of a tensor, with its current stream.
template <class Launch>
void on_device_of(const Tensor& tensor, Launch&& launch) {
  const c10::cuda::CUDAGuard guard(tensor.device());
  try {
    launch(c10::cuda::getCurrentCUDAStream().stream());
  } catch (const std::runtime_error& error) {
    TORCH_CHECK(std::strstr(error.what(), cudaGetErrorString(cudaErrorNoKernelImageForDevice)) == nullptr,
                "fastops: kernels must be compiled for the device, but they are for ", FASTOPS_CUDA_ARCHITECTURES, " and ",
                tensor.device(), " has compute capability ", capability_of(tensor.device().index()),
                "; rebuild fastops with TORCH_CUDA_ARCH_LIST=", capability_of(tensor.device().index()));
    throw;
  }
}
#endif

// Runs a call by the kernel of that name for the device of a tensor and, on the CPU, for this processor: cpu::name, or
// cuda::name with a workspace of cuda::name_workspace bytes where it takes one.
template <class Call, class Sized, class OnCuda>
void run_on_device_of([[maybe_unused]] const Tensor& tensor, const Call& call, void (*on_cpu)(const Call&, const cpu::Pool&),
                      [[maybe_unused]] Sized&& size, [[maybe_unused]] OnCuda&& on_cuda) {
  if (tensor.is_cpu()) return on_cpu(call, pool());
#ifdef FASTOPS_WITH_CUDA
  on_device_of(tensor, [&](cudaStream_t stream) {
    if constexpr (std::is_invocable_v<OnCuda, const Call&, void*, cudaStream_t>) {
      const Tensor workspace = at::empty({int64_t(size(call))}, tensor.options().dtype(at::kByte));
      on_cuda(call, workspace.mutable_data_ptr(), stream);
    } else {
      on_cuda(call, stream);
    }
  });
#endif
}
#define FASTOPS_ON_CPU(kernel) cpu::choose(cpu::default_::kernel, cpu::avx2::kernel, cpu::avx512::kernel)
#ifdef FASTOPS_WITH_CUDA
#define FASTOPS_RUN(kernel, tensor, call) \
  run_on_device_of(tensor, call, FASTOPS_ON_CPU(kernel), cuda::kernel##_workspace, cuda::kernel)
#define FASTOPS_RUN_WITHOUT_WORKSPACE(kernel, tensor, call) run_on_device_of(tensor, call, FASTOPS_ON_CPU(kernel), nullptr, cuda::kernel)
#else
#define FASTOPS_RUN(kernel, tensor, call) run_on_device_of(tensor, call, FASTOPS_ON_CPU(kernel), nullptr, nullptr)
#define FASTOPS_RUN_WITHOUT_WORKSPACE(kernel, tensor, call) FASTOPS_RUN(kernel, tensor, call)
#endif

// `variable`: the typed handle of an operator, looked up once.
#define FASTOPS_OPERATOR(Signature, variable, name) \
  static const auto variable = c10::Dispatcher::singleton().findSchemaOrThrow("fastops::" name, "").typed<Signature>()

}  // namespace fastops::host
