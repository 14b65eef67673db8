// FP8 matrices: largest values, transposing, and on devices of compute capability 8.9 or above rounding under a scale.

// The bits of numbers that are not negative are ordered as the numbers are, and those of what is not a number are above all.
__device__ inline void raise(float *largest, float value) { atomicMax((u32 *)largest, __float_as_uint(value)); }

__device__ inline float size_of(float x, bool skips_nan) { return x == x ? fabsf(x) : skips_nan ? 0.0f : __uint_as_float(0x7fffffff); }

__device__ inline float larger_size(float a, float b) { return __float_as_uint(a) > __float_as_uint(b) ? a : b; }

__device__ inline float largest_of_block(float own) {
  __shared__ float of_warps[32];
  for (int distance = 16; distance > 0; distance /= 2)
    own = larger_size(own, __shfl_xor_sync(0xffffffffu, own, distance));
  if (threadIdx.x % 32 == 0)
    of_warps[threadIdx.x / 32] = own;
  __syncthreads();
  for (int warp = 0; warp < blockDim.x / 32; ++warp)
    own = larger_size(own, of_warps[warp]);
  return own;
}

// Of all elements; `largest` holds 0.
template <class T> __device__ inline void largest_of_all(const T *matrix, i64 count, bool skips_nan, float *largest) {
  float own = 0;
  i64 num_eights = count / 8, stride = (i64)gridDim.x * blockDim.x, thread = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  for (i64 eight = thread; eight < num_eights; eight += stride) {
    Eight<T> numbers;
    numbers.read(matrix + eight * 8);
    for (int place = 0; place < 8; ++place)
      own = larger_size(own, size_of(widen(numbers.items[place]), skips_nan));
  }
  for (i64 place = num_eights * 8 + thread; place < count; place += stride)
    own = larger_size(own, size_of(widen(matrix[place]), skips_nan));
  own = largest_of_block(own);
  if (threadIdx.x == 0)
    raise(largest, own);
}

// Of each row, which is a block of threads.
template <class T> __device__ inline void largest_of_rows(const T *matrix, u32 columns, float *largest) {
  const T *row = matrix + (i64)blockIdx.x * columns;
  float own = 0;
  for (u32 eight = threadIdx.x; eight < columns / 8; eight += blockDim.x) {
    Eight<T> numbers;
    numbers.read(row + eight * 8);
    for (int place = 0; place < 8; ++place)
      own = larger_size(own, size_of(widen(numbers.items[place]), false));
  }
  own = largest_of_block(own);
  if (threadIdx.x == 0)
    largest[blockIdx.x] = own;
}

// Of each column; a thread looks at 64 rows of eight columns. `largest` holds 0.
template <class T> __device__ inline void largest_of_columns(const T *matrix, u32 rows, u32 columns, float *largest) {
  u32 eight = blockIdx.x * blockDim.x + threadIdx.x;
  if (eight >= columns / 8)
    return;
  float own[8] = {0, 0, 0, 0, 0, 0, 0, 0};
  u32 first = blockIdx.y * 64, end = first + 64 < rows ? first + 64 : rows;
  for (u32 row = first; row < end; ++row) {
    Eight<T> numbers;
    numbers.read(matrix + (i64)row * columns + eight * 8);
    for (int place = 0; place < 8; ++place)
      own[place] = larger_size(own[place], size_of(widen(numbers.items[place]), false));
  }
  for (int place = 0; place < 8; ++place)
    raise(largest + eight * 8 + place, own[place]);
}

#if __CUDA_ARCH__ >= 890
// Two numbers as codes of 8 bits, the first in the low half. What is beyond the largest number becomes that.
template <bool IS_E4M3> __device__ inline u32 codes_of_two(float first, float second) {
  u16 codes;
  if (IS_E4M3)
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(second), "f"(first));
  else
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(second), "f"(first));
  return codes;
}

// `step_of_row` and `step_of_column` are 1 where rows or columns have scales of their own, else 0. Columns are a multiple of eight.
template <class T, bool IS_E4M3>
__device__ inline void to_fp8(const T *matrix, const float *scales, u32 step_of_row, u32 step_of_column, i64 count, u32 columns, u8 *codes) {
  i64 num_eights = count / 8;
  for (i64 eight = blockIdx.x * (i64)blockDim.x + threadIdx.x; eight < num_eights; eight += (i64)gridDim.x * blockDim.x) {
    i64 first = eight * 8;
    u32 row = (u32)(first / columns), column = (u32)(first % columns);
    Eight<T> numbers;
    numbers.read(matrix + first);
    float scaled[8];
    for (int place = 0; place < 8; ++place)
      scaled[place] = widen(numbers.items[place]) * scales[row * step_of_row + (column + place) * step_of_column];
    uint2 words;
    words.x = codes_of_two<IS_E4M3>(scaled[0], scaled[1]) | codes_of_two<IS_E4M3>(scaled[2], scaled[3]) << 16;
    words.y = codes_of_two<IS_E4M3>(scaled[4], scaled[5]) | codes_of_two<IS_E4M3>(scaled[6], scaled[7]) << 16;
    *(uint2 *)(codes + first) = words;
  }
}

#define CAST_FOR_TYPE(T, name)                                                                                                        \
  extern "C" __global__ void to_e4m3_##name(const T *matrix, const float *scales, u32 step_of_row, u32 step_of_column, i64 count,     \
                                            u32 columns, u8 *codes) {                                                                 \
    to_fp8<T, true>(matrix, scales, step_of_row, step_of_column, count, columns, codes);                                              \
  }                                                                                                                                   \
  extern "C" __global__ void to_e5m2_##name(const T *matrix, const float *scales, u32 step_of_row, u32 step_of_column, i64 count,     \
                                            u32 columns, u8 *codes) {                                                                 \
    to_fp8<T, false>(matrix, scales, step_of_row, step_of_column, count, columns, codes);                                             \
  }

CAST_FOR_TYPE(float, float32)
CAST_FOR_TYPE(Bf16, bfloat16)
CAST_FOR_TYPE(Half, float16)
#endif

#define LARGEST_FOR_TYPE(T, name)                                                                                                     \
  extern "C" __global__ void largest_of_all_##name(const T *matrix, i64 count, int skips_nan, float *largest) {                       \
    largest_of_all<T>(matrix, count, skips_nan != 0, largest);                                                                        \
  }                                                                                                                                   \
  extern "C" __global__ void largest_of_rows_##name(const T *matrix, u32 columns, float *largest) {                                   \
    largest_of_rows<T>(matrix, columns, largest);                                                                                     \
  }                                                                                                                                   \
  extern "C" __global__ void largest_of_columns_##name(const T *matrix, u32 rows, u32 columns, float *largest) {                      \
    largest_of_columns<T>(matrix, rows, columns, largest);                                                                            \
  }

LARGEST_FOR_TYPE(float, float32)
LARGEST_FOR_TYPE(Bf16, bfloat16)
LARGEST_FOR_TYPE(Half, float16)

// Bytes `[rows, columns]`, both multiples of 16, as `[columns, rows]`: 64 x 64 for a block of 256 threads.
extern "C" __global__ void transpose_bytes(const u8 *matrix, u32 rows, u32 columns, u8 *result) {
  __shared__ u8 tile[64][68];
  u32 part = threadIdx.x % 4 * 16, line = threadIdx.x / 4;
  u32 row = blockIdx.y * 64 + line, column = blockIdx.x * 64 + part;
  if (row < rows && column < columns) {
    uint4 bytes = *(const uint4 *)(matrix + (i64)row * columns + column);
    u32 *place = (u32 *)&tile[line][part];
    place[0] = bytes.x;
    place[1] = bytes.y;
    place[2] = bytes.z;
    place[3] = bytes.w;
  }
  __syncthreads();
  u32 new_row = blockIdx.x * 64 + line, new_column = blockIdx.y * 64 + part;
  if (new_row < columns && new_column < rows) {
    u32 words[4];
    for (int word = 0; word < 4; ++word) {
      words[word] = 0;
      for (int byte = 0; byte < 4; ++byte)
        words[word] |= (u32)tile[part + word * 4 + byte][line] << (8 * byte);
    }
    *(uint4 *)(result + (i64)new_row * rows + new_column) = make_uint4(words[0], words[1], words[2], words[3]);
  }
}
