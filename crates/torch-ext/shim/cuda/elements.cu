// What kernels for CUDA devices share: element types. All files of this folder are one program, this one first. It is compiled when it is
// first needed (NVRTC), so a build needs no CUDA compiler. Products and sums are rounded one by one (`--fmad=false`), as libtorch's
// operators round them, unless fmaf says otherwise.

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;

struct Bf16 {
  u16 bits;
};
struct Half {
  u16 bits;
};

__device__ inline float widen(float x) { return x; }
__device__ inline float widen(Bf16 x) { return __uint_as_float((u32)x.bits << 16); }
__device__ inline float widen(Half x) {
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x.bits));
  return wide;
}

__device__ inline void narrow(float x, float &result) { result = x; }
__device__ inline void narrow(float x, Bf16 &result) {
  u32 bits = __float_as_uint(x);
  // To the nearest, of two the even one; what is not a number stays that.
  result.bits = x != x ? 0x7fc0 : (u16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
__device__ inline void narrow(float x, Half &result) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(x)); }

// Eight elements that lie behind each other, read and written 16 bytes at a time. Their address has to be a multiple of that.
template <class T> struct Eight {
  union {
    T items[8];
    uint4 words[sizeof(T) / 2];
  };
  __device__ Eight() {}
  __device__ void read(const T *place) {
    for (int word = 0; word < sizeof(T) / 2; ++word)
      words[word] = ((const uint4 *)place)[word];
  }
  __device__ void write(T *place) const {
    for (int word = 0; word < sizeof(T) / 2; ++word)
      ((uint4 *)place)[word] = words[word];
  }
};
