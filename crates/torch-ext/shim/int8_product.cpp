// Products of matrices of signed bytes.
#include "panel_product.h"
#include "quant_kernel.h"

namespace te {

#ifdef TE_HAS_KERNEL

namespace {

constexpr int64_t PANEL = ProductsOfBytes::PANEL;

// Sixteen rows of up to sixteen units, as columns: out[unit][PANEL].
TE_AVX512 void transpose(const int8_t *weight, int64_t stride, int64_t rows, int64_t units, uint32_t *out) {
  const __mmask16 present = __mmask16((1u << units) - 1);
  __m512i a[16], b[16];
  // Rows behind the last are copies of it, and their sums are not kept.
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i)
    a[i] = _mm512_maskz_loadu_epi32(present, weight + std::min<int64_t>(i, rows - 1) * stride);
  // Pairs of rows, fours of rows, and then the four quarters of all of them.
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    b[2 * i] = _mm512_unpacklo_epi32(a[2 * i], a[2 * i + 1]);
    b[2 * i + 1] = _mm512_unpackhi_epi32(a[2 * i], a[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512i low = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88), high = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xdd);
    const __m512i low2 = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x88);
    const __m512i high2 = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xdd);
    b[i] = _mm512_shuffle_i32x4(low, low2, 0x88);
    b[i + 8] = _mm512_shuffle_i32x4(low, low2, 0xdd);
    b[i + 4] = _mm512_shuffle_i32x4(high, high2, 0x88);
    b[i + 12] = _mm512_shuffle_i32x4(high, high2, 0xdd);
  }
  for (int64_t i = 0; i < units; ++i)
    _mm512_storeu_si512(out + i * PANEL, b[i]);
}

void fill_panel(const int8_t *weight, int64_t columns, int64_t row, int64_t kept, int64_t begin, int64_t depth,
                uint32_t *panel) {
  for (int64_t part = 0; part < PANEL; part += 16) {
    const int64_t first = std::min(row + part, row + kept - 1), rows = row + kept - first;
    for (int64_t unit = 0; unit < depth; unit += 16)
      transpose(weight + first * columns + 4 * (begin + unit), columns, rows, std::min<int64_t>(16, depth - unit),
                panel + unit * PANEL + part);
  }
}

// What 128 more in each byte of the input adds to the sum of a row.
TE_AVX512 int32_t excess(const int8_t *row, int64_t columns) {
  int32_t sum = 0;
  for (int64_t i = 0; i < columns; ++i)
    sum += row[i];
  return 128 * sum;
}

// Adds the products of all rows of a weight, four bytes at a time.
void multiply_bytes(const int8_t *weight, int64_t rows, int64_t columns, const int8_t *input, int64_t num_inputs,
                    int32_t *sums) {
  // The instruction takes one side without signs. Turning the sign over adds 128, which sums begin without.
  std::vector<int32_t> first_sums(static_cast<size_t>(rows));
  for (int64_t row = 0; row < rows; ++row)
    first_sums[size_t(row)] = -excess(weight + row * columns, columns);
  const int32_t *first = first_sums.data();
  const auto fill = [=](int64_t row, int64_t kept, int64_t begin, int64_t depth, uint32_t *panel) {
    fill_panel(weight, columns, row, kept, begin, depth, panel);
  };
  const auto start = [=](int64_t row, int64_t kept, uint32_t *out) {
    std::memcpy(out, first + row, size_t(kept) * sizeof(int32_t));
  };
  const auto finish = [=](int64_t n, int64_t row, int64_t kept, const uint32_t *found) {
    std::memcpy(sums + n * rows + row, found, size_t(kept) * sizeof(int32_t));
  };
  multiply_panels<ProductsOfBytes>({rows, columns / 4, num_inputs, input, 0x80808080u}, fill, start, finish);
}

// Eight rows of eight units, each two bytes as words, as columns: out[unit][stride].
TE_AVX2 void transpose_words(const int8_t *weight, int64_t columns, uint32_t *out, int64_t stride) {
  __m256i a[8], b[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i)
    a[i] = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i *>(weight + i * columns)));
  // Pairs of rows, fours of rows, and then the two halves of all of them.
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    b[i] = _mm256_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm256_unpackhi_epi32(a[i], a[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    a[i] = _mm256_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm256_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm256_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm256_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m256i first = _mm256_permute2x128_si256(a[i], a[i + 4], 0x20);
    const __m256i second = _mm256_permute2x128_si256(a[i], a[i + 4], 0x31);
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(out + i * stride), first);
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(out + (i + 4) * stride), second);
  }
}

// The bytes at `2 * unit` and behind it as words; behind the end of a row there are zeros.
uint32_t words_of(const int8_t *row, int64_t columns, int64_t unit) {
  const auto word = [=](int64_t i) { return uint32_t(uint16_t(int16_t(i < columns ? row[i] : 0))); };
  return word(2 * unit) | word(2 * unit + 1) << 16;
}

// The same on a processor that has no products of bytes, for any number of columns: bytes as words, two at a time.
void multiply_words(const int8_t *weight, int64_t rows, int64_t columns, const int8_t *input, int64_t num_inputs,
                    int32_t *sums) {
  constexpr int64_t WIDTH = ProductsOfWords::PANEL;
  const int64_t units = (columns + 1) / 2;
  std::vector<uint32_t> words(size_t(num_inputs * units));
  for (int64_t n = 0; n < num_inputs; ++n)
    for (int64_t unit = 0; unit < units; ++unit)
      words[size_t(n * units + unit)] = words_of(input + n * columns, columns, unit);
  const auto fill = [=](int64_t row, int64_t kept, int64_t begin, int64_t depth, uint32_t *panel) {
    // What fills eight rows and eight units is turned over at once. Rows behind the last are not written, and their sums not kept.
    const int64_t whole_rows = kept / 8 * 8, whole_units = std::min(depth, columns / 2 - begin) / 8 * 8;
    for (int64_t i = 0; i < whole_rows; i += 8)
      for (int64_t unit = 0; unit < whole_units; unit += 8)
        transpose_words(weight + (row + i) * columns + 2 * (begin + unit), columns, panel + unit * WIDTH + i, WIDTH);
    for (int64_t i = 0; i < kept; ++i)
      for (int64_t unit = i < whole_rows ? whole_units : 0; unit < depth; ++unit)
        panel[unit * WIDTH + i] = words_of(weight + (row + i) * columns, columns, begin + unit);
  };
  const auto start = [](int64_t, int64_t, uint32_t *) {};
  const auto finish = [=](int64_t n, int64_t row, int64_t kept, const uint32_t *found) {
    std::memcpy(sums + n * rows + row, found, size_t(kept) * sizeof(int32_t));
  };
  multiply_panels<ProductsOfWords>({rows, units, num_inputs, words.data(), 0}, fill, start, finish);
}

} // namespace

bool multiply_int8(const int8_t *weight, int64_t rows, int64_t columns, const int8_t *input, int64_t num_inputs,
                   int32_t *sums) {
  const int32_t widest = widest_vectors();
  if (columns % 4 == 0 && widest >= 3 && processor_has_avx512_vnni())
    multiply_bytes(weight, rows, columns, input, num_inputs, sums);
  else if (widest >= 1 && processor_has_avx2())
    multiply_words(weight, rows, columns, input, num_inputs, sums);
  else
    return false;
  return true;
}

#else

bool multiply_int8(const int8_t *, int64_t, int64_t, const int8_t *, int64_t, int32_t *) { return false; }

#endif

} // namespace te
