// The Python module fastops._C. Importing it registers every operator of torch.ops.fastops (ops.cpp); the functions
// here only tell what was built.
#include <pybind11/pybind11.h>

#include "build_facts.h"  // written by python/fastops/_build.py
#include "cpu/capability.h"

namespace py = pybind11;

namespace fastops::host {
PyMethodDef* python_methods();  // python.cpp
}

namespace {

py::dict build_info() {
  py::dict info;
  info["version"] = FASTOPS_VERSION;
  info["torch_built"] = FASTOPS_TORCH_VERSION;
  info["torch_cuda"] = FASTOPS_TORCH_CUDA;
  info["cxx11_abi"] = FASTOPS_CXX11_ABI;
  info["python"] = FASTOPS_PYTHON;
  info["compiler"] = FASTOPS_COMPILER;
#ifdef FASTOPS_WITH_CUDA
  info["cuda"] = true;
#else
  info["cuda"] = false;
#endif
  info["cuda_reason"] = FASTOPS_CUDA_REASON;
  info["cuda_version"] = FASTOPS_CUDA_VERSION;
  info["architectures"] = FASTOPS_CUDA_ARCHITECTURES;
  return info;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Compiled part of fastops";
  m.def("build_info", &build_info, "What was fixed when this binary was built.");
  m.def("cpu_capability", &fastops::cpu::capability_name, "The instruction set that the CPU kernels use.");
  m.def("cpu_capability_note", &fastops::cpu::capability_note,
        "Why FASTOPS_CPU_CAPABILITY was not followed, or an empty string.");
  if (PyModule_AddFunctions(m.ptr(), fastops::host::python_methods()) != 0) throw py::error_already_set();
}
