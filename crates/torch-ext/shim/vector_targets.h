// Loops that are compiled for several processors: the body is written once, as an inline function, and the compiler makes a
// version of it for each set of instructions. Which one runs is chosen by the processor that the program finds.
#pragma once

#include "avx2.h"

namespace te {

#define TE_INLINE inline __attribute__((always_inline))

#ifdef TE_HAS_KERNEL

#define TE_AVX2 __attribute__((target("avx2,fma,f16c")))
#define TE_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c,prefer-vector-width=512")))
#define TE_AVX512_BF16                                                                                                 \
  __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c,prefer-vector-width=512")))
// For products of bfloat16 and of bytes. A processor may have one of them, so nothing else of the two may be in such a function.
#define TE_AVX512_PRODUCTS                                                                                             \
  __attribute__((                                                                                                      \
      target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni,avx2,fma,f16c,prefer-vector-width=512")))

inline bool processor_has_avx512() {
  static const bool has = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  return has;
}

inline bool processor_has_avx512_bf16() {
  static const bool has = processor_has_avx512() && __builtin_cpu_supports("avx512bf16");
  return has;
}

inline bool processor_has_avx512_vnni() {
  static const bool has = processor_has_avx512() && __builtin_cpu_supports("avx512vnni");
  return has;
}

// The widest instructions that a test asks for: 0 for portable code, 1 for AVX2, 2 for AVX-512, 3 with products of bfloat16 and
// of bytes.
int32_t widest_vectors();

// Calls the version of a body for this processor. Bodies are function objects that are always inlined.
template <typename Body, typename... Arguments> TE_AVX2 void run_avx2(const Body &body, Arguments... arguments) {
  body(arguments...);
}
template <typename Body, typename... Arguments> TE_AVX512 void run_avx512(const Body &body, Arguments... arguments) {
  body(arguments...);
}
template <typename Body, typename... Arguments> void run_vectorised(const Body &body, Arguments... arguments) {
  const int32_t widest = widest_vectors();
  if (widest >= 2 && processor_has_avx512())
    return run_avx512(body, arguments...);
  if (widest >= 1 && processor_has_avx2())
    return run_avx2(body, arguments...);
  body(arguments...);
}

#else

template <typename Body, typename... Arguments> void run_vectorised(const Body &body, Arguments... arguments) {
  body(arguments...);
}

#endif

} // namespace te
