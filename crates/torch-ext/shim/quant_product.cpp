// Products with weights of 4 bits, which are turned into numbers on the way and never lie in memory as such.
#include "panel_product.h"
#include "quant_kernel.h"
#include "share.h"
#include "vector_targets.h"

#include <bit>
#include <cstring>
#include <type_traits>
#include <vector>

namespace te {
namespace {

// Rows of weights that a thread takes at once.
constexpr int64_t TURN = 16;
// Rows of input that share a decoded block.
constexpr int64_t MOST_INPUTS = 4;

// The input of a product with few rows: elements with even numbers first, because the two halves of a byte come apart so.
void split_input(const float *input, int64_t count, float *even, float *odd) {
  for (int64_t i = 0; i < count / 2; ++i) {
    even[i] = input[2 * i];
    odd[i] = input[2 * i + 1];
  }
}

struct Few {
  FourBitBlocks blocks;
  int64_t rows, columns;
  // [inputs][columns / 2] each.
  const float *even, *odd;
  float *out;
};

// One row of weights with `N` rows of input, from `first` on.
template <int N> void multiply_row(const Few &p, int64_t row, int64_t first) {
  const int64_t half = p.columns / 2, block_bytes = p.blocks.block_size / 2;
  const uint8_t *packed = p.blocks.packed + row * half;
  const float *scale = p.blocks.absmax + row * p.columns / p.blocks.block_size, *values = p.blocks.code->values;
  float sums[N] = {};
  for (int64_t at = 0; at < half; at += block_bytes, ++scale) {
    float partial[N] = {};
    for (int64_t i = at; i < at + block_bytes; ++i) {
      const float even = values[packed[i] >> 4], odd = values[packed[i] & 15];
      for (int n = 0; n < N; ++n)
        partial[n] += even * p.even[(first + n) * half + i] + odd * p.odd[(first + n) * half + i];
    }
    for (int n = 0; n < N; ++n)
      sums[n] += partial[n] * *scale;
  }
  for (int n = 0; n < N; ++n)
    p.out[(first + n) * p.rows + row] = sums[n];
}

#ifdef TE_HAS_KERNEL

template <int N> TE_AVX2 void multiply_row_avx2(const Few &p, int64_t row, int64_t first) {
  const int64_t half = p.columns / 2, block_bytes = p.blocks.block_size / 2;
  const uint8_t *packed = p.blocks.packed + row * half;
  const float *scale = p.blocks.absmax + row * p.columns / p.blocks.block_size;
  // A permutation has room for eight numbers; the highest bit of a code chooses between two of them.
  const __m256 lower = _mm256_loadu_ps(p.blocks.code->values), upper = _mm256_loadu_ps(p.blocks.code->values + 8);
  const auto number = [=](__m256i codes) __attribute__((always_inline, target("avx2,fma,f16c"))) {
    const __m256 choice = _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28));
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(lower, codes), _mm256_permutevar8x32_ps(upper, codes), choice);
  };
  __m256 sums[N];
  for (int n = 0; n < N; ++n)
    sums[n] = _mm256_setzero_ps();
  for (int64_t at = 0; at < half; at += block_bytes, ++scale) {
    __m256 partial[N];
    for (int n = 0; n < N; ++n)
      partial[n] = _mm256_setzero_ps();
    for (int64_t i = at; i < at + block_bytes; i += 8) {
      const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(packed + i)));
      const __m256 even = number(_mm256_srli_epi32(bytes, 4)), odd = number(bytes);
      for (int n = 0; n < N; ++n) {
        partial[n] = _mm256_fmadd_ps(even, _mm256_loadu_ps(p.even + (first + n) * half + i), partial[n]);
        partial[n] = _mm256_fmadd_ps(odd, _mm256_loadu_ps(p.odd + (first + n) * half + i), partial[n]);
      }
    }
    for (int n = 0; n < N; ++n)
      sums[n] = _mm256_fmadd_ps(partial[n], _mm256_set1_ps(*scale), sums[n]);
  }
  for (int n = 0; n < N; ++n) {
    alignas(32) float lanes[8];
    _mm256_store_ps(lanes, sums[n]);
    p.out[(first + n) * p.rows + row] =
        ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
  }
}

template <int N> TE_AVX512 void multiply_row_avx512(const Few &p, int64_t row, int64_t first) {
  const int64_t half = p.columns / 2, block_bytes = p.blocks.block_size / 2;
  const uint8_t *packed = p.blocks.packed + row * half;
  const float *scale = p.blocks.absmax + row * p.columns / p.blocks.block_size;
  const __m512 values = _mm512_loadu_ps(p.blocks.code->values);
  __m512 sums[N];
  for (int n = 0; n < N; ++n)
    sums[n] = _mm512_setzero_ps();
  for (int64_t at = 0; at < half; at += block_bytes, ++scale) {
    __m512 partial[N];
    for (int n = 0; n < N; ++n)
      partial[n] = _mm512_setzero_ps();
    for (int64_t i = at; i < at + block_bytes; i += 16) {
      // Permutations look at the lowest four bits only.
      const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(packed + i)));
      const __m512 even = _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), values);
      const __m512 odd = _mm512_permutexvar_ps(bytes, values);
      for (int n = 0; n < N; ++n) {
        partial[n] = _mm512_fmadd_ps(even, _mm512_loadu_ps(p.even + (first + n) * half + i), partial[n]);
        partial[n] = _mm512_fmadd_ps(odd, _mm512_loadu_ps(p.odd + (first + n) * half + i), partial[n]);
      }
    }
    for (int n = 0; n < N; ++n)
      sums[n] = _mm512_fmadd_ps(partial[n], _mm512_set1_ps(*scale), sums[n]);
  }
  for (int n = 0; n < N; ++n)
    p.out[(first + n) * p.rows + row] = _mm512_reduce_add_ps(sums[n]);
}

#endif

template <int N> void multiply_rows(const Few &p, int64_t begin, int64_t end, int64_t first) {
#ifdef TE_HAS_KERNEL
  const int32_t widest = widest_vectors();
  if (widest >= 2 && processor_has_avx512()) {
    for (int64_t row = begin; row < end; ++row)
      multiply_row_avx512<N>(p, row, first);
    return;
  }
  if (widest >= 1 && processor_has_avx2()) {
    for (int64_t row = begin; row < end; ++row)
      multiply_row_avx2<N>(p, row, first);
    return;
  }
#endif
  for (int64_t row = begin; row < end; ++row)
    multiply_row<N>(p, row, first);
}

#ifdef TE_HAS_KERNEL

TE_INLINE uint16_t rounded(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return (bits & 0x7fffffffu) > 0x7f800000u ? uint16_t(0x7fc0)
                                             : uint16_t((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

// A few rows of bfloat16 with one row of weights. A word has four codes, and a permutation looks at the lowest of them (at five
// bits, and the table is there twice), so 64 bytes become 128 numbers by three shifts and four permutations. The numbers are those of
// the table, rounded to bfloat16; sums of a block are multiplied with its scale in 32 bits.
constexpr int64_t CHUNK = 128;

struct FewBf16 {
  FourBitBlocks blocks;
  int64_t rows, columns;
  // [inputs][chunks][4][32]: what the first, second, third and fourth codes of 32 words are multiplied with.
  const uint16_t *input;
  float *out;
};

// `G` rows of weights at once, which share what is read of the input.
template <int N, int G> TE_AVX512_BF16 void multiply_rows_bf16(const FewBf16 &p, int64_t row, int64_t first) {
  alignas(64) uint16_t words[32];
  alignas(64) int32_t places[16];
  const int64_t block_size = p.blocks.block_size, half = p.columns / 2, blocks_of_row = p.columns / block_size;
  for (int i = 0; i < 32; ++i)
    words[i] = rounded(p.blocks.code->values[i % 16]);
  for (int i = 0; i < 16; ++i)
    places[i] = int32_t(8 * i / block_size);
  const __m512i table = _mm512_load_si512(words), place = _mm512_load_si512(places);
  const __mmask16 present = __mmask16((1u << std::max<int64_t>(1, CHUNK / block_size)) - 1);
  const uint8_t *packed = p.blocks.packed + row * half;
  const float *scale = p.blocks.absmax + row * blocks_of_row;
  const uint16_t *input = p.input + first * p.columns;
  __m512 sums[N][G];
  for (int n = 0; n < N; ++n)
    for (int g = 0; g < G; ++g)
      sums[n][g] = _mm512_setzero_ps();
  for (int64_t at = 0; at < p.columns; at += CHUNK) {
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {
      const __m512i codes = _mm512_loadu_si512(packed + g * half + at / 2);
      const __m512i a = _mm512_permutexvar_epi16(codes, table);
      const __m512i b = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4), table);
      const __m512i c = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 8), table);
      const __m512i d = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 12), table);
      const float *scales_of_chunk = scale + g * blocks_of_row + at / block_size;
      const __m512 scales = _mm512_permutexvar_ps(place, _mm512_maskz_loadu_ps(present, scales_of_chunk));
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        const uint16_t *x = input + n * p.columns + at;
        __m512 partial = _mm512_dpbf16_ps(_mm512_setzero_ps(), (__m512bh)a, (__m512bh)_mm512_loadu_si512(x));
        partial = _mm512_dpbf16_ps(partial, (__m512bh)b, (__m512bh)_mm512_loadu_si512(x + 32));
        partial = _mm512_dpbf16_ps(partial, (__m512bh)c, (__m512bh)_mm512_loadu_si512(x + 64));
        partial = _mm512_dpbf16_ps(partial, (__m512bh)d, (__m512bh)_mm512_loadu_si512(x + 96));
        sums[n][g] = _mm512_fmadd_ps(partial, scales, sums[n][g]);
      }
    }
  }
  for (int n = 0; n < N; ++n)
    for (int g = 0; g < G; ++g)
      p.out[(first + n) * p.rows + row + g] = _mm512_reduce_add_ps(sums[n][g]);
}

template <int N> void multiply_rows_bf16(const FewBf16 &p, int64_t begin, int64_t end, int64_t first) {
  for (; begin + 4 <= end; begin += 4)
    multiply_rows_bf16<N, 4>(p, begin, first);
  for (; begin < end; ++begin)
    multiply_rows_bf16<N, 1>(p, begin, first);
}

// Sixteen rows of sixteen bytes as sixteen columns.
TE_AVX512 inline void transpose(const uint8_t *packed, int64_t stride, int64_t rows, __m128i *out) {
  __m128i a[16], b[16];
  for (int i = 0; i < 16; ++i)
    a[i] = _mm_loadu_si128(reinterpret_cast<const __m128i *>(packed + std::min<int64_t>(i, rows - 1) * stride));
  // Interleaving halves of the list four times moves each row to its column.
  for (int stage = 0; stage < 2; ++stage) {
    for (int i = 0; i < 8; ++i) {
      b[2 * i] = _mm_unpacklo_epi8(a[i], a[i + 8]);
      b[2 * i + 1] = _mm_unpackhi_epi8(a[i], a[i + 8]);
    }
    for (int i = 0; i < 8; ++i) {
      a[2 * i] = _mm_unpacklo_epi8(b[i], b[i + 8]);
      a[2 * i + 1] = _mm_unpackhi_epi8(b[i], b[i + 8]);
    }
  }
  for (int i = 0; i < 16; ++i)
    out[i] = a[i];
}

constexpr int64_t PANEL = ProductsOfBf16::PANEL;

// Columns [begin, begin + depth) of a panel's rows as numbers: out[pair][row][2].
TE_AVX512_BF16 void fill_panel(const FourBitBlocks &blocks, int64_t columns, int64_t row, int64_t rows, int64_t begin,
                               int64_t depth, uint32_t *out) {
  const int64_t half = columns / 2, blocks_of_row = columns / blocks.block_size;
  const __m512 values = _mm512_loadu_ps(blocks.code->values);
  // Sixteen numbers with even places in front of sixteen with odd ones become pairs.
  alignas(64) uint16_t order[32];
  for (int i = 0; i < 16; ++i)
    order[2 * i] = uint16_t(i), order[2 * i + 1] = uint16_t(16 + i);
  const __m512i pairs = _mm512_load_si512(order);
  for (int64_t part = 0; part < PANEL; part += 16) {
    // Rows behind the last are copies of it, and their sums are not kept.
    const int64_t first = std::min(row + part, row + rows - 1), count = row + rows - first;
    const uint8_t *packed = blocks.packed + first * half + begin / 2;
    const float *absmax = blocks.absmax + first * blocks_of_row;
    __m512 scale = _mm512_setzero_ps();
    for (int64_t at = 0; at < depth; at += 32) {
      if (at == 0 || (begin + at) % blocks.block_size == 0) {
        alignas(64) float scales[16];
        const int64_t block = (begin + at) / blocks.block_size;
        for (int i = 0; i < 16; ++i)
          scales[i] = absmax[std::min<int64_t>(i, count - 1) * blocks_of_row + block];
        scale = _mm512_load_ps(scales);
      }
      __m128i turned[16];
      transpose(packed + at / 2, half, count, turned);
      for (int i = 0; i < 16; ++i) {
        const __m512i bytes = _mm512_cvtepu8_epi32(turned[i]);
        const __m512 even = _mm512_mul_ps(_mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), values), scale);
        const __m512 odd = _mm512_mul_ps(_mm512_permutexvar_ps(bytes, values), scale);
        const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(odd, even);
        _mm512_storeu_si512(out + (at / 2 + i) * PANEL + part, _mm512_permutexvar_epi16(pairs, both));
      }
    }
  }
}

#endif

// Calls `work(count, begin, end, first)` for rows [begin, end) of weights and `count` rows of input from `first` on, a constant of at
// most MOST_INPUTS, until all have met all.
template <typename F> void in_turns(int64_t rows, int64_t columns, int64_t num_inputs, F work) {
  share(size_t((rows + TURN - 1) / TURN), rows * columns >> 20, [=](size_t turn) {
    const int64_t begin = int64_t(turn) * TURN, end = std::min(rows, begin + TURN);
    int64_t first = 0;
    for (; first + MOST_INPUTS <= num_inputs; first += MOST_INPUTS)
      work(std::integral_constant<int, int(MOST_INPUTS)>{}, begin, end, first);
    switch (num_inputs - first) {
    case 3:
      return work(std::integral_constant<int, 3>{}, begin, end, first);
    case 2:
      return work(std::integral_constant<int, 2>{}, begin, end, first);
    case 1:
      return work(std::integral_constant<int, 1>{}, begin, end, first);
    default:
      return;
    }
  });
}

} // namespace

void multiply_4bit_few(const FourBitBlocks &blocks, int64_t rows, int64_t columns, const float *input,
                       int64_t num_inputs, float *out) {
  const int64_t half = columns / 2;
  std::vector<float> split(size_t(num_inputs * columns));
  float *even = split.data(), *odd = even + num_inputs * half;
  for (int64_t n = 0; n < num_inputs; ++n)
    split_input(input + n * columns, columns, even + n * half, odd + n * half);
  const Few p{blocks, rows, columns, even, odd, out};
  in_turns(rows, columns, num_inputs, [=](auto count, int64_t begin, int64_t end, int64_t first) {
    multiply_rows<count()>(p, begin, end, first);
  });
}

bool has_bf16_products() {
#ifdef TE_HAS_KERNEL
  return widest_vectors() >= 3 && processor_has_avx512_bf16();
#else
  return false;
#endif
}

bool multiply_4bit_few_bf16(const FourBitBlocks &blocks, int64_t rows, int64_t columns, const uint16_t *input,
                            int64_t num_inputs, float *out) {
#ifdef TE_HAS_KERNEL
  if (columns % CHUNK != 0 || !has_bf16_products())
    return false;
  std::vector<uint16_t> arranged(size_t(num_inputs * columns));
  // The codes of the four numbers that two bytes stand for, from the lowest bits up.
  constexpr int ORDER[4] = {1, 0, 3, 2};
  for (int64_t at = 0; at < num_inputs * columns; at += CHUNK)
    for (int code = 0; code < 4; ++code)
      for (int i = 0; i < 32; ++i)
        arranged[size_t(at + 32 * code + i)] = input[at + 4 * i + ORDER[code]];
  const FewBf16 p{blocks, rows, columns, arranged.data(), out};
  in_turns(rows, columns, num_inputs, [=](auto count, int64_t begin, int64_t end, int64_t first) {
    multiply_rows_bf16<count()>(p, begin, end, first);
  });
  return true;
#else
  return false;
#endif
}

bool multiply_4bit_bf16(const FourBitBlocks &blocks, int64_t rows, int64_t columns, const uint16_t *input,
                        int64_t num_inputs, const float *bias, uint16_t *out) {
#ifdef TE_HAS_KERNEL
  if (!has_bf16_products())
    return false;
  const auto fill = [=](int64_t row, int64_t kept, int64_t begin, int64_t depth, uint32_t *panel) {
    fill_panel(blocks, columns, row, kept, 2 * begin, 2 * depth, panel);
  };
  const auto start = [=](int64_t row, int64_t kept, uint32_t *sums) {
    if (bias)
      std::memcpy(sums, bias + row, size_t(kept) * sizeof(float));
  };
  const auto finish = [=](int64_t n, int64_t row, int64_t kept, const uint32_t *sums) {
    for (int64_t i = 0; i < kept; ++i)
      out[n * rows + row + i] = rounded(std::bit_cast<float>(sums[i]));
  };
  multiply_panels<ProductsOfBf16>({rows, columns / 2, num_inputs, input, 0}, fill, start, finish);
  return true;
#else
  return false;
#endif
}

} // namespace te
