// Products of many rows of input with a weight that is made into numbers, or put in order, piece by piece on the way.
//
// Both sides consist of units of 32 bits, which one instruction multiplies and adds up: two numbers of bfloat16, two words, or four bytes. A
// panel is some rows of the weight, of which so many units at a time lie in the order in which the product reads them: unit after
// unit, and of each unit all rows. Panel and sums stay in the second cache, and what is made of the weight never lies in memory.
#pragma once

#include "share.h"
#include "vector_targets.h"

#include <cstring>
#include <vector>

namespace te {

#ifdef TE_HAS_KERNEL

// Units of a panel at a time.
constexpr int64_t DEPTH = 256;
// Rows of input in registers: beside their sums there is room for one unit of each row of a panel.
constexpr int64_t TILE = 6;
// Rows of input for which a panel is filled once.
constexpr int64_t MOST_ROWS = 768;

// Sums in float32 of pairs of bfloat16.
struct SumsOfBf16 {
  static TE_AVX512_PRODUCTS inline __m512i add(__m512i sum, __m512i input, __m512i weight) {
    return (__m512i)_mm512_dpbf16_ps((__m512)sum, (__m512bh)input, (__m512bh)weight);
  }
};

// Sums of 32 bits of four products of an unsigned with a signed byte. Those that do not fit are wrapped, not limited.
struct SumsOfBytes {
  static TE_AVX512_PRODUCTS inline __m512i add(__m512i sum, __m512i input, __m512i weight) {
    return _mm512_dpbusd_epi32(sum, input, weight);
  }
};

// With 32 registers of 64 bytes, of which a tile has 24 sums and 4 weights.
template <typename Sums> struct ProductsInAvx512 {
  // Rows of a panel.
  static constexpr int64_t PANEL = 64;

  // Adds the products of `N` rows of input, unit by unit, to sums[N][PANEL].
  template <int N>
  static TE_AVX512_PRODUCTS void multiply_tile(const uint32_t *input, const uint32_t *panel, int64_t units,
                                               uint32_t *sums) {
    __m512i sum[N][4];
#pragma GCC unroll 6
    for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i)
        sum[n][i] = _mm512_loadu_si512(sums + n * PANEL + 16 * i);
    for (int64_t unit = 0; unit < units; ++unit, input += N, panel += PANEL) {
      __m512i weights[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i)
        weights[i] = _mm512_loadu_si512(panel + 16 * i);
#pragma GCC unroll 6
      for (int n = 0; n < N; ++n) {
        const __m512i all = _mm512_set1_epi32(int32_t(input[n]));
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i)
          sum[n][i] = Sums::add(sum[n][i], all, weights[i]);
      }
    }
#pragma GCC unroll 6
    for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i)
        _mm512_storeu_si512(sums + n * PANEL + 16 * i, sum[n][i]);
  }
};

using ProductsOfBf16 = ProductsInAvx512<SumsOfBf16>;
using ProductsOfBytes = ProductsInAvx512<SumsOfBytes>;

// Sums of 32 bits of two products of signed words, with 16 registers of 32 bytes, of which a tile has 12 sums and 2 weights.
struct ProductsOfWords {
  static constexpr int64_t PANEL = 16;

  template <int N>
  static TE_AVX2 void multiply_tile(const uint32_t *input, const uint32_t *panel, int64_t units, uint32_t *sums) {
    __m256i low[N], high[N];
#pragma GCC unroll 6
    for (int n = 0; n < N; ++n) {
      low[n] = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(sums + n * PANEL));
      high[n] = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(sums + n * PANEL + 8));
    }
    for (int64_t unit = 0; unit < units; ++unit, input += N, panel += PANEL) {
      const __m256i weights = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(panel));
      const __m256i others = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(panel + 8));
#pragma GCC unroll 6
      for (int n = 0; n < N; ++n) {
        const __m256i all = _mm256_set1_epi32(int32_t(input[n]));
        low[n] = _mm256_add_epi32(low[n], _mm256_madd_epi16(all, weights));
        high[n] = _mm256_add_epi32(high[n], _mm256_madd_epi16(all, others));
      }
    }
#pragma GCC unroll 6
    for (int n = 0; n < N; ++n) {
      _mm256_storeu_si256(reinterpret_cast<__m256i *>(sums + n * PANEL), low[n]);
      _mm256_storeu_si256(reinterpret_cast<__m256i *>(sums + n * PANEL + 8), high[n]);
    }
  }
};

template <typename Products>
void multiply_tile(int64_t inputs, const uint32_t *input, const uint32_t *panel, int64_t units, uint32_t *sums) {
  switch (inputs) {
  case 1:
    return Products::template multiply_tile<1>(input, panel, units, sums);
  case 2:
    return Products::template multiply_tile<2>(input, panel, units, sums);
  case 3:
    return Products::template multiply_tile<3>(input, panel, units, sums);
  case 4:
    return Products::template multiply_tile<4>(input, panel, units, sums);
  case 5:
    return Products::template multiply_tile<5>(input, panel, units, sums);
  default:
    return Products::template multiply_tile<6>(input, panel, units, sums);
  }
}

// A product of `inputs` rows with `rows` of a weight, all of `units`.
struct PanelProduct {
  int64_t rows, units, inputs;
  // [inputs][units], at any address. The bits of `flip` are turned over in each unit.
  const void *input;
  uint32_t flip;
};

// Some rows of the input in the order in which tiles read it: of each part of the units and each tile of rows, unit by unit, one of
// each row.
inline std::vector<uint32_t> in_tiles(const PanelProduct &p, int64_t from, int64_t count) {
  std::vector<uint32_t> tiles(size_t(count * p.units));
  uint32_t *out = tiles.data();
  for (int64_t begin = 0; begin < p.units; begin += DEPTH) {
    const int64_t units = std::min(DEPTH, p.units - begin);
    for (int64_t first = 0; first < count; first += TILE) {
      const int64_t inputs = std::min(TILE, count - first);
      for (int64_t n = 0; n < inputs; ++n) {
        const char *row = static_cast<const char *>(p.input) + 4 * ((from + first + n) * p.units + begin);
        for (int64_t unit = 0; unit < units; ++unit) {
          uint32_t bits;
          std::memcpy(&bits, row + 4 * unit, sizeof bits);
          out[unit * inputs + n] = bits ^ p.flip;
        }
      }
      out += units * inputs;
    }
  }
  return tiles;
}

// `fill(row, kept, begin, depth, panel)` writes units [begin, begin + depth) of `kept` rows from `row` on to
// panel[depth][PANEL];
// `start(row, kept, sums)` writes what sums begin with, where that is not zero, and `finish(input, row, kept, sums)` takes them.
template <typename Products, typename Fill, typename Start, typename Finish>
void multiply_panels(const PanelProduct &p, Fill fill, Start start, Finish finish) {
  constexpr int64_t PANEL = Products::PANEL;
  const int64_t panels = (p.rows + PANEL - 1) / PANEL;
  for (int64_t from = 0; from < p.inputs; from += MOST_ROWS) {
    const int64_t count = std::min(MOST_ROWS, p.inputs - from);
    const std::vector<uint32_t> tiles = in_tiles(p, from, count);
    const uint32_t *all = tiles.data();
    share(size_t(panels), panels, [=](size_t turn) {
      thread_local std::vector<uint32_t> weights(size_t(PANEL * DEPTH)), sums;
      sums.assign(size_t(count * PANEL), 0);
      const int64_t row = int64_t(turn) * PANEL, kept = std::min(PANEL, p.rows - row);
      for (int64_t n = 0; n < count; ++n)
        start(row, kept, sums.data() + n * PANEL);
      const uint32_t *tile = all;
      for (int64_t begin = 0; begin < p.units; begin += DEPTH) {
        const int64_t depth = std::min(DEPTH, p.units - begin);
        fill(row, kept, begin, depth, weights.data());
        for (int64_t first = 0; first < count; first += TILE) {
          const int64_t inputs = std::min(TILE, count - first);
          multiply_tile<Products>(inputs, tile, weights.data(), depth, sums.data() + first * PANEL);
          tile += inputs * depth;
        }
      }
      for (int64_t n = 0; n < count; ++n)
        finish(from + n, row, kept, sums.data() + n * PANEL);
    });
  }
}

#endif

} // namespace te
