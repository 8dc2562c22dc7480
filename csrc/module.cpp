// The Python module fastops._C. Importing it registers every operator of torch.ops.fastops (ops.cpp); the functions
// here only tell what was built.
#include <pybind11/pybind11.h>

#if !defined(_WIN32)
#include <dlfcn.h>
#endif

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

// The file of the library that is in use. A copy that was loaded before goes by the same name, and is taken instead of the one
// beside this module. Empty where the system does not tell.
std::string library_in_use() {
#if !defined(_WIN32)
  Dl_info info;
  if (dladdr(reinterpret_cast<const void*>(&fastops::cpu::capability_name), &info) != 0 && info.dli_fname) return info.dli_fname;
#endif
  return "";
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Compiled part of fastops";
  m.def("build_info", &build_info, "What was fixed when this binary was built.");
  m.def("library_in_use", &library_in_use, "The file that the operators come from, or an empty string.");
  m.def("cpu_capability", &fastops::cpu::capability_name, "The instruction set that the CPU kernels use.");
  m.def("cpu_capability_note", &fastops::cpu::capability_note,
        "Why FASTOPS_CPU_CAPABILITY was not followed, or an empty string.");
  if (PyModule_AddFunctions(m.ptr(), fastops::host::python_methods()) != 0) throw py::error_already_set();
}
