// Asking for memory ahead of time.
#pragma once

#include <cstdint>

namespace te {

// Floats of a cache line.
constexpr int64_t LINE = 16;

// The processor's own look-ahead stops at every page. Asking a kilobyte ahead makes a pass over four large tensors an
// eighth faster (2.5 GHz Xeon, one thread); further ahead gains no more. Addresses behind the end do no harm.
inline void prefetch(const float *address) { __builtin_prefetch(address + 256, 0, 3); }

} // namespace te
