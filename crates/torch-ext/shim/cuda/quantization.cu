// Weights of 4 and 8 bits.

// The numbers that four bits stand for.
struct Code {
  float values[16];
};

// Threads read them at the same time from banks of their own.
__device__ inline void share(float *table, const Code &code) {
  if (threadIdx.x < 16)
    table[threadIdx.x] = code.values[threadIdx.x];
  __syncthreads();
}

// `count` numbers, eight for each thread; a block has `eights_in_block` times eight of them.
template <class T>
__device__ inline void dequantize_4bit(const u8 *packed, const float *absmax, const Code &code, u32 eights_in_block, i64 count,
                                       T *numbers) {
  __shared__ float table[16];
  share(table, code);
  u32 num_eights = (u32)((count + 7) / 8);
  for (u32 eight = blockIdx.x * blockDim.x + threadIdx.x; eight < num_eights; eight += gridDim.x * blockDim.x) {
    float scale = absmax[eight / eights_in_block];
    i64 first = (i64)eight * 8;
    if (first + 8 <= count) {
      u32 codes = ((const u32 *)packed)[eight];
      Eight<T> own;
      for (int pair = 0; pair < 4; ++pair) {
        u32 byte = codes >> (8 * pair);
        narrow(table[(byte >> 4) & 15] * scale, own.items[2 * pair]);
        narrow(table[byte & 15] * scale, own.items[2 * pair + 1]);
      }
      own.write(numbers + first);
    } else {
      for (i64 place = first; place < count; ++place) {
        u32 byte = packed[place / 2];
        narrow(table[place % 2 == 0 ? byte >> 4 : byte & 15] * scale, numbers[place]);
      }
    }
  }
}

// `input [num_inputs, columns]` times the transposed weight `[rows, columns]`, plus `bias`, for at most MOST inputs: a warp makes one row of
// the weight into numbers and uses each for all inputs. `columns` is a multiple of 32.
template <class T, int MOST>
__device__ inline void linear_4bit(const T *input, const u8 *packed, const float *absmax, const Code &code, u32 chunks_in_block,
                                   u32 num_inputs, u32 rows, u32 columns, const T *bias, T *output) {
  __shared__ float table[16];
  share(table, code);
  u32 row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (row >= rows)
    return;
  u32 num_chunks = columns / 32;
  float sums[MOST];
  for (int item = 0; item < MOST; ++item)
    sums[item] = 0;
  for (u32 chunk = lane; chunk < num_chunks; chunk += 32) {
    i64 place = (i64)row * num_chunks + chunk;
    uint4 codes = ((const uint4 *)packed)[place];
    float scale = absmax[(u32)place / chunks_in_block];
    u32 words[4] = {codes.x, codes.y, codes.z, codes.w};
    float parts[MOST];
    for (int item = 0; item < MOST; ++item)
      parts[item] = 0;
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      float numbers[8];
      for (int pair = 0; pair < 4; ++pair) {
        u32 byte = words[word] >> (8 * pair);
        numbers[2 * pair] = table[(byte >> 4) & 15];
        numbers[2 * pair + 1] = table[byte & 15];
      }
#pragma unroll
      for (int item = 0; item < MOST; ++item) {
        // The last input again, where there are fewer: nobody looks at what comes of it.
        u32 from = item < num_inputs ? item : num_inputs - 1;
        Eight<T> own;
        own.read(input + (i64)from * columns + chunk * 32 + word * 8);
        for (int place = 0; place < 8; ++place)
          parts[item] = fmaf(numbers[place], widen(own.items[place]), parts[item]);
      }
    }
    for (int item = 0; item < MOST; ++item)
      sums[item] = fmaf(parts[item], scale, sums[item]);
  }
  for (int item = 0; item < MOST; ++item)
    for (int distance = 16; distance > 0; distance /= 2)
      sums[item] += __shfl_xor_sync(0xffffffffu, sums[item], distance);
  if (lane == 0)
    for (int item = 0; item < MOST; ++item)
      if (item < num_inputs)
        narrow(sums[item] + (bias ? widen(bias[row]) : 0.0f), output[(i64)item * rows + row]);
}

#define FOR_TYPE(T, name)                                                                                                             \
  extern "C" __global__ void dequantize_4bit_##name(const u8 *packed, const float *absmax, Code code, u32 eights_in_block,            \
                                                    i64 count, T *numbers) {                                                          \
    dequantize_4bit<T>(packed, absmax, code, eights_in_block, count, numbers);                                                        \
  }                                                                                                                                   \
  FOR_INPUTS(T, name, 1) FOR_INPUTS(T, name, 2) FOR_INPUTS(T, name, 4) FOR_INPUTS(T, name, 8)                                         \
  extern "C" __global__ void int8_scale_##name(const int *sums, u32 sums_width, const float *a_scales, const float *b_scales,         \
                                               const float *bias, u32 rows, u32 columns, T *numbers) {                                \
    i64 count = (i64)rows * columns;                                                                                                  \
    for (i64 place = blockIdx.x * (i64)blockDim.x + threadIdx.x; place < count; place += (i64)gridDim.x * blockDim.x) {               \
      u32 row = (u32)(place / columns), column = (u32)(place % columns);                                                              \
      float scale = a_scales[row] * b_scales[column];                                                                                 \
      float number = (float)sums[(i64)row * sums_width + column] * scale * (float)(1.0 / (127.0 * 127.0));                            \
      narrow(bias ? number + bias[column] : number, numbers[place]);                                                                  \
    }                                                                                                                                 \
  }

#define FOR_INPUTS(T, name, MOST)                                                                                                     \
  extern "C" __global__ void linear_4bit_##name##_##MOST(const T *input, const u8 *packed, const float *absmax, Code code,            \
                                                         u32 chunks_in_block, u32 num_inputs, u32 rows, u32 columns, const T *bias,   \
                                                         T *output) {                                                                 \
    linear_4bit<T, MOST>(input, packed, absmax, code, chunks_in_block, num_inputs, rows, columns, bias, output);                      \
  }

FOR_TYPE(float, float32)
FOR_TYPE(Bf16, bfloat16)
FOR_TYPE(Half, float16)

extern "C" __global__ void dequantize_blockwise(const u8 *codes, const float *absmax, const float *table, u32 block_size, float offset,
                                                u32 count, float *numbers) {
  u32 place = blockIdx.x * blockDim.x + threadIdx.x;
  if (place < count)
    numbers[place] = table[codes[place]] * absmax[place / block_size] + offset;
}

// What is not a number is larger than all others.
__device__ inline float larger(float a, float b) { return b > a || b != b ? b : a; }

// The scale of each row, which is a block of threads, and the columns that have an outlier.
extern "C" __global__ void int8_row_scales(const Half *rows, u32 columns, float threshold, float *scales, u8 *is_outlier_column) {
  __shared__ float largest[32];
  const Half *row = rows + (i64)blockIdx.x * columns;
  float own = 0;
  for (u32 column = threadIdx.x; column < columns; column += blockDim.x) {
    float size = fabsf(widen(row[column]));
    if (threshold > 0 && size >= threshold)
      is_outlier_column[column] = 1;
    else
      own = larger(own, size);
  }
  for (int distance = 16; distance > 0; distance /= 2)
    own = larger(own, __shfl_xor_sync(0xffffffffu, own, distance));
  if (threadIdx.x % 32 == 0)
    largest[threadIdx.x / 32] = own;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int warp = 1; warp < blockDim.x / 32; ++warp)
      own = larger(own, largest[warp]);
    scales[blockIdx.x] = own;
  }
}

extern "C" __global__ void int8_row_codes(const Half *rows, u32 columns, const float *scales, const u8 *is_outlier_column, i8 *codes) {
  const Half *row = rows + (i64)blockIdx.x * columns;
  float factor = (1.0f / scales[blockIdx.x]) * 127.0f;
  if (!(factor > 0 && factor <= 3.402823466e38f))
    factor = 0;
  for (u32 column = threadIdx.x; column < columns; column += blockDim.x) {
    float number = is_outlier_column[column] ? 0.0f : widen(row[column]);
    codes[(i64)blockIdx.x * columns + column] = (i8)(int)rintf(number * factor);
  }
}
