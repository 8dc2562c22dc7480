// A short way from Python into the most used operators. torch.ops parses arguments by schema, which takes longer than
// all the rest of a tiny call; these take (data, offsets, order, index, dim) as they are, with default options.
#include <ATen/PythonTorchFunctionTLS.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include "host/calls.h"

namespace fastops::host {
namespace {

struct WithoutGil {
  PyThreadState* state = PyEval_SaveThread();
  ~WithoutGil() { PyEval_RestoreThread(state); }
};

// NotImplemented where somebody wants to see the call in Python: subclasses of Tensor and torch function modes.
template <Tensor (*call)(const Tensor&, const Grouping&, int64_t)>
PyObject* direct(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (count != 5 || !THPVariable_CheckExact(args[0]) || !THPVariable_CheckExact(args[1]) ||
      at::impl::torch_function_mode_enabled()) {
    Py_RETURN_NOTIMPLEMENTED;
  }
  const Tensor &data = THPVariable_Unpack(args[0]), &offsets = THPVariable_Unpack(args[1]);
  const auto optional = [](PyObject* object) {
    return THPVariable_Check(object) ? OptionalTensor(THPVariable_Unpack(object)) : std::nullopt;
  };
  const OptionalTensor order = optional(args[2]), index = optional(args[3]);
  const int64_t dim = PyLong_AsLongLong(args[4]);
  if (dim == -1 && PyErr_Occurred()) return nullptr;
  Tensor result;
  {
    const WithoutGil released;
    result = call(data, {offsets, order, index}, dim);
  }
  return THPVariable_Wrap(std::move(result));
  END_HANDLE_TH_ERRORS
}

template <Reduction reduction>
Tensor reduce_with_defaults(const Tensor& data, const Grouping& grouping, int64_t dim) {
  return call_linear(reduction, data, grouping, dim, std::nullopt, reduction == Reduction::prod ? 1 : 0);
}

template <bool largest>
Tensor extremum_with_defaults(const Tensor& data, const Grouping& grouping, int64_t dim) {
  return call_extremum(largest, data, grouping, dim, 0);
}

template <Tensor (*call)(const Tensor&, const Grouping&, int64_t)>
PyMethodDef method(const char* name) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(direct<call>)), METH_FASTCALL,
          "(data, offsets, order, index, dim) with default options, or NotImplemented"};
}

}  // namespace

PyMethodDef* python_methods() {
  static PyMethodDef methods[] = {
      method<reduce_with_defaults<Reduction::sum>>("segment_sum"),
      method<reduce_with_defaults<Reduction::mean>>("segment_mean"),
      method<reduce_with_defaults<Reduction::prod>>("segment_prod"),
      method<extremum_with_defaults<true>>("segment_amax"),
      method<extremum_with_defaults<false>>("segment_amin"),
      {nullptr, nullptr, 0, nullptr},
  };
  return methods;
}

}  // namespace fastops::host
