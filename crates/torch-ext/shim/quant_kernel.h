// Weights of 4 and 8 bits on the CPU: codes of blocks or rows, the numbers that they stand for, and products with them.
//
// The methods are those of bitsandbytes, to the bit: "QLoRA" (Dettmers and others, 2023, arXiv 2305.14314) for 4 bits,
// "LLM.int8()" (2022, arXiv 2208.07339) for 8 bits, "8-bit Optimizers via Block-wise Quantization" (2021, arXiv 2110.02861) for
// the scales of scales. Nothing here checks its arguments: quantization.cpp has done that.
#pragma once

#include <cstdint>

namespace te {

// What codes are made from and turned into. The numbers are part of the border (src/quantization.rs).
enum class Element : int32_t { f32 = 0, bf16 = 1, f16 = 2 };

inline int64_t bytes_of(Element element) { return element == Element::f32 ? 4 : 2; }

// The sixteen numbers that four bits stand for, and how to find the nearest.
struct FourBitCode {
  float values[16];
  // Where one number ends and the next begins, in rising order, and the code of each interval.
  float bounds[15];
  uint8_t codes[16];
};

// Four-bit codes of a flat list of numbers: the first of two in the high half of a byte, and one scale for each block.
struct FourBitBlocks {
  const uint8_t *packed;
  const float *absmax;
  int64_t block_size; // a multiple of 32
  const FourBitCode *code;
};

// The widest instructions that are used, for tests: 0 for portable code, 1 for AVX2, 2 for AVX-512, 3 for all there are.
void set_widest_vectors(int32_t vectors);

// Codes and scales of `count` elements. The last byte of an odd count is filled up with the code of zero.
void quantize_4bit(const void *source, Element element, int64_t count, int64_t block_size, const FourBitCode &code,
                   uint8_t *packed, float *absmax);

// Elements [begin, end), where `begin` is the beginning of a block. `out` is where `begin` goes.
void dequantize_4bit(const FourBitBlocks &blocks, int64_t begin, int64_t end, Element element, void *out);

// Eight-bit codes by a table of 256 rising numbers.
void quantize_blockwise(const float *source, int64_t count, int64_t block_size, const float *table, uint8_t *codes,
                        float *absmax);
void dequantize_blockwise(const uint8_t *codes, int64_t count, int64_t block_size, const float *table,
                          const float *absmax, float offset, float *out);

// Rows of half-precision numbers as signed bytes: scale = max |x|, code = round(x * 127 / scale). With a threshold above 0,
// elements of at least that size count as zero, their columns are marked, and have the code 0 in all rows.
void quantize_rows(const void *source, int64_t rows, int64_t columns, float threshold, int8_t *codes, float *scales,
                   uint8_t *is_outlier);
// Rows [begin, end) as numbers: code * (scale / 127).
void dequantize_rows(const int8_t *codes, const float *scales, int64_t columns, int64_t begin, int64_t end,
                     Element element, void *out);
// Sums of products of codes as numbers: sum * (row_scale * column_scale) / 127^2, plus the bias where there is one.
void finish_int8_product(const int32_t *sums, const float *row_scales, const float *column_scales, const float *bias,
                         int64_t rows, int64_t columns, Element element, void *out);

// out[m][n] = input[m] . weight[n], in 32-bit floats, for few rows of input. `columns` is a multiple of the block size.
void multiply_4bit_few(const FourBitBlocks &blocks, int64_t rows, int64_t columns, const float *input,
                       int64_t num_inputs, float *out);

// Has this processor products of bfloat16?
bool has_bf16_products();

// The same of rows of bfloat16, with the sixteen numbers rounded to bfloat16. False, with nothing done, for a number of columns
// that is no multiple of 128, and on a processor without products of bfloat16.
bool multiply_4bit_few_bf16(const FourBitBlocks &blocks, int64_t rows, int64_t columns, const uint16_t *input,
                            int64_t num_inputs, float *out);

// The same in bfloat16 for any number of rows, with weights that are rounded as `dequantize_4bit` rounds them, and sums in 32
// bits that begin with the bias, if there is one. False, with nothing done, on a processor without products of bfloat16.
bool multiply_4bit_bf16(const FourBitBlocks &blocks, int64_t rows, int64_t columns, const uint16_t *input,
                        int64_t num_inputs, const float *bias, uint16_t *out);

// sums[m][n] = input[m] . weight[n] of signed bytes, exactly as long as the sum fits into 32 bits. False, with nothing done, on a
// processor that has neither AVX2 nor products of bytes.
bool multiply_int8(const int8_t *weight, int64_t rows, int64_t columns, const int8_t *input, int64_t num_inputs,
                   int32_t *sums);

} // namespace te
