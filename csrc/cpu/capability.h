// Which instruction set the CPU kernels use.
//
// Host code includes this header for capability() and choose(). A kernel file includes it FIRST: the build compiles
// each cpu/x.cpp once per instruction set as a translation unit that defines FASTOPS_CAPABILITY (0 default, 1 avx2,
// 2 avx512), and this header turns that into a target region, which stays open to the end of the translation unit,
// and a namespace for the definitions. No compiler flag differs between the copies.
//
// Promise of a kernel file: whatever it defines or instantiates has internal linkage, lies in FASTOPS_CPU_NAMESPACE, is
// a template over something that does, or is FASTOPS_HD (always inlined). Otherwise the linker keeps one copy for all
// instruction sets, perhaps the one that this processor cannot run. A test disassembles the binary and looks.
#pragma once

// The standard headers come before the target region, so that their inline functions, which the linker merges with
// those of other translation units, are compiled for the baseline. A kernel needs others rarely; add them here.
#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#if (defined(__x86_64__) || defined(__i386__)) && (defined(__GNUC__) || defined(__clang__)) && !defined(_MSC_VER)
#define FASTOPS_X86 1
#else
#define FASTOPS_X86 0
#endif

#if FASTOPS_X86
#include <immintrin.h>
#endif

#ifndef FASTOPS_CAPABILITY
#define FASTOPS_CAPABILITY 0
#endif

#if FASTOPS_CAPABILITY == 0
#define FASTOPS_CPU_NAMESPACE fastops::cpu::default_
#elif FASTOPS_CAPABILITY == 1 && FASTOPS_X86
#define FASTOPS_CPU_NAMESPACE fastops::cpu::avx2
#elif FASTOPS_CAPABILITY == 2 && FASTOPS_X86
#define FASTOPS_CPU_NAMESPACE fastops::cpu::avx512
#else
#error "FASTOPS_CAPABILITY must be 0, or 1 or 2 on x86 with GCC or clang"
#endif

#if FASTOPS_CAPABILITY > 0
#define FASTOPS_HAS_F16C 1
#endif

// GCC's and clang's vector extension (__attribute__((vector_size)), __builtin_shuffle and so on) is there.
#if (defined(__GNUC__) || defined(__clang__)) && !defined(_MSC_VER)
#define FASTOPS_VECTOR_EXTENSION 1
#else
#define FASTOPS_VECTOR_EXTENSION 0
#endif

#if defined(_WIN32)
#define FASTOPS_EXPORT __declspec(dllexport)
#else
#define FASTOPS_EXPORT __attribute__((visibility("default")))
#endif

namespace fastops::cpu {

enum class Capability : int { kDefault = 0, kAvx2 = 1, kAvx512 = 2 };

// What the processor offers, lowered by the environment variable FASTOPS_CPU_CAPABILITY (default, avx2, avx512), which is
// read once. A value that is unknown or that the processor lacks never raises it.
Capability capability();
// This and the next are called from the Python module, which is linked with the library.
FASTOPS_EXPORT const char* capability_name();
// Why FASTOPS_CPU_CAPABILITY was not followed; empty where it was, or where it is not set.
FASTOPS_EXPORT const char* capability_note();

// The copy of a kernel for this processor: choose(default_::reduce, avx2::reduce, avx512::reduce)(arguments).
// Off x86 only the first exists; the others are declared and, this being inlined, never referred to.
template <typename Function>
#if defined(_MSC_VER)
__forceinline
#else
inline __attribute__((always_inline))
#endif
Function* choose(Function* plain, [[maybe_unused]] Function* with_avx2, [[maybe_unused]] Function* with_avx512) {
#if defined(FASTOPS_ONLY_CAPABILITY)  // a development build, which compiles one copy
  return FASTOPS_ONLY_CAPABILITY == 2 ? with_avx512 : FASTOPS_ONLY_CAPABILITY == 1 ? with_avx2 : plain;
#elif FASTOPS_X86
  const Capability used = capability();
  if (used == Capability::kAvx512) return with_avx512;
  if (used == Capability::kAvx2) return with_avx2;
#endif
  return plain;
}

constexpr int kVectorBytes = FASTOPS_CAPABILITY == 2 ? 64 : FASTOPS_CAPABILITY == 1 ? 32 : 16;

}  // namespace fastops::cpu

// The target region: last in this header, open to the end of the translation unit, where the build's generated file
// closes it for clang. (The pragmas take literals only.)
#if FASTOPS_CAPABILITY == 1
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,bmi,bmi2"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,bmi,bmi2")
#endif
#elif FASTOPS_CAPABILITY == 2
#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx2,fma,f16c,bmi,bmi2,avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,bmi,bmi2,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#endif
#endif
