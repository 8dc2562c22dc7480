#include "cpu/capability.h"

#include <cstdlib>
#include <string>

namespace fastops::cpu {
namespace {

const char* const kNames[] = {"default", "avx2", "avx512"};

// The best that this processor has and this build holds.
Capability detect() {
#if defined(FASTOPS_ONLY_CAPABILITY)
  return static_cast<Capability>(FASTOPS_ONLY_CAPABILITY);
#elif FASTOPS_X86
  // The builtin also asks whether the operating system saves the wide registers.
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                        __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
  if (!has_avx2) return Capability::kDefault;
#if !defined(__clang__) || __clang_major__ >= 15
  if (!__builtin_cpu_supports("f16c")) return Capability::kDefault;
#endif  // older clang has no name for it; every processor with AVX2 and FMA has F16C
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return has_avx512 ? Capability::kAvx512 : Capability::kAvx2;
#else
  return Capability::kDefault;
#endif
}

struct Choice {
  Capability used = detect();
  std::string note;

  Choice() {
    const char* wanted = std::getenv("FASTOPS_CPU_CAPABILITY");
    if (wanted == nullptr || *wanted == '\0') return;
    for (int i = 0; i < 3; ++i) {
      if (std::strcmp(wanted, kNames[i]) != 0) continue;
      if (i <= static_cast<int>(used)) {
        used = static_cast<Capability>(i);
      } else {
        note = std::string("FASTOPS_CPU_CAPABILITY=") + wanted + " is not followed: this processor and build offer " +
               kNames[static_cast<int>(used)];
      }
      return;
    }
    note = std::string("FASTOPS_CPU_CAPABILITY must be default, avx2 or avx512, but got ") + wanted + "; using " +
           kNames[static_cast<int>(used)];
  }
};

const Choice& choice() {
  static const Choice made;
  return made;
}

}  // namespace

Capability capability() {
  return choice().used;
}

const char* capability_name() {
  return kNames[static_cast<int>(capability())];
}

const char* capability_note() {
  return choice().note.c_str();
}

}  // namespace fastops::cpu
