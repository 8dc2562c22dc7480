// Segment sums in a C++ program without Python. It opens the library of fastops, which registers the operators, and calls one
// through PyTorch's dispatcher, as TorchScript and AOTInductor do:
//
//     cmake -S examples/cpp -B build/cpp -DCMAKE_PREFIX_PATH=$(python -c "import torch; print(torch.utils.cmake_prefix_path)")
//     cmake --build build/cpp
//     build/cpp/segment_sum $(python -c "import fastops; print(fastops.library_path())")
#include <ATen/ATen.h>
#include <ATen/DynamicLibrary.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <iostream>

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: segment_sum <path of the library, fastops.library_path() in Python>\n";
    return 2;
  }
  static const at::DynamicLibrary library(argv[1], nullptr, true);  // to the end of the program: what it registers stays

  // data, offsets, order and index (of rows that do not stand in order), dim, dtype, fill_value: see csrc/ops.cpp.
  using Sum = at::Tensor(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, const std::optional<at::Tensor>&,
                         int64_t, std::optional<at::ScalarType>, const at::Scalar&);
  const auto sum = c10::Dispatcher::singleton().findSchemaOrThrow("fastops::segment_sum", "").typed<Sum>();

  const at::Tensor data = at::tensor({3., 1., 4., 1., 5., 9., 2.}).requires_grad_();
  const at::Tensor offsets = at::tensor({0, 3, 3, 7}, at::kLong);
  const at::Tensor result = sum.call(data, offsets, {}, {}, 0, {}, 0);
  result.square().sum().backward();
  std::cout << result << '\n' << data.grad() << '\n';
}
