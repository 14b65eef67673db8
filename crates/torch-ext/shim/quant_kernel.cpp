// Codes of 4 and 8 bits and what they stand for. Which operations round, and in which order, is that of bitsandbytes and of the
// libtorch operators that it calls; tests compare the bits.
#include "quant_kernel.h"
#include "share.h"
#include "vector_targets.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

namespace te {
namespace {

// Elements that a thread takes at once.
constexpr int64_t PIECE = 1 << 16;
// bitsandbytes divides no block by less.
constexpr float SMALLEST = 1e-38f;
// Adding and subtracting it rounds a small number to a whole one, half to even.
constexpr float ROUNDER = 12582912.0f;

template <Element E> TE_INLINE float read(const void *data, int64_t i) {
  if constexpr (E == Element::f32)
    return static_cast<const float *>(data)[i];
  else if constexpr (E == Element::bf16)
    return std::bit_cast<float>(uint32_t(static_cast<const uint16_t *>(data)[i]) << 16);
  else {
    // As c10::detail::fp16_ieee_to_fp32_value, which is not always inlined.
    const uint32_t w = uint32_t(static_cast<const uint16_t *>(data)[i]) << 16, sign = w & 0x80000000u, two = w + w;
    const float normal = std::bit_cast<float>((two >> 4) + (0xE0u << 23)) * 0x1.0p-112f;
    const float subnormal = std::bit_cast<float>((two >> 17) | (126u << 23)) - 0.5f;
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(two < (1u << 27) ? subnormal : normal));
  }
}

TE_INLINE uint16_t to_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
  return (bits & 0x7fffffffu) > 0x7f800000u ? uint16_t(0x7fc0) : uint16_t(rounded);
}

template <Element E> TE_INLINE void write(void *data, int64_t i, float value) {
  if constexpr (E == Element::f32)
    static_cast<float *>(data)[i] = value;
  else if constexpr (E == Element::bf16)
    static_cast<uint16_t *>(data)[i] = to_bf16(value);
  else
    static_cast<uint16_t *>(data)[i] = c10::detail::fp16_ieee_from_fp32_value(value);
}

// The largest size of some elements. What is not a number is larger than all numbers, as in torch.max.
template <Element E> TE_INLINE float largest(const void *data, int64_t begin, int64_t end) {
  uint32_t most = 0;
  for (int64_t i = begin; i < end; ++i)
    most = std::max(most, std::bit_cast<uint32_t>(read<E>(data, i)) & 0x7fffffffu);
  return std::bit_cast<float>(most);
}

// How many bounds lie below a number. None holds what is not a number.
TE_INLINE uint8_t interval(float value, const float *bounds) {
  uint32_t below = 0;
#pragma GCC unroll 15
  for (int j = 0; j < 15; ++j)
    below += !(value <= bounds[j]);
  return uint8_t(below);
}

template <Element E>
TE_INLINE void quantize_block(const void *source, int64_t begin, int64_t end, bool is_whole, const FourBitCode &code,
                              const uint8_t *pairs, uint8_t *packed, float *absmax) {
  alignas(64) uint8_t found[4096];
  float bounds[15];
  std::memcpy(bounds, code.bounds, sizeof bounds);
  const float most = largest<E>(source, begin, end);
  // A comparison with NaN is false, so NaN stays.
  const float divisor = most < SMALLEST ? SMALLEST : most, factor = 1.0f / divisor;
  // The last block, if it is not whole, is divided, and its scale is the divisor.
  *absmax = is_whole ? most : divisor;
  const int64_t count = end - begin;
  if (is_whole)
    for (int64_t i = 0; i < count; ++i)
      found[i] = interval(read<E>(source, begin + i) * factor, bounds);
  else
    for (int64_t i = 0; i < count; ++i)
      found[i] = interval(read<E>(source, begin + i) / divisor, bounds);
  if (count % 2 != 0)
    found[count] = interval(0.0f, bounds);
  uint8_t *out = packed + begin / 2;
  for (int64_t i = 0; i < (count + 1) / 2; ++i)
    out[i] = uint8_t(found[2 * i] << 4 | found[2 * i + 1]);
  if (pairs)
    for (int64_t i = 0; i < (count + 1) / 2; ++i)
      out[i] = pairs[out[i]];
}

// Equal parts of [-1, 1] that are narrower than intervals: with the part that a number is in, one comparison finds its interval.
struct Cells {
  // The bound in a cell, or infinity.
  alignas(64) float bounds[32];
  // How many bounds are in the cells before.
  alignas(64) uint32_t before[32];
  alignas(64) uint32_t codes[16];
  // No cell has two bounds.
  bool is_usable = true;

  explicit Cells(const FourBitCode &code) {
    std::fill(bounds, bounds + 32, std::numeric_limits<float>::infinity());
    std::fill(before, before + 32, 0);
    std::copy(code.codes, code.codes + 16, codes);
    for (float bound : code.bounds) {
      // A product with 16 is exact, so this is how a vector finds the cell of a number, and a larger number has no lower cell.
      const int cell = std::clamp(int(bound * 16.0f + 16.0f), 0, 31);
      is_usable &= std::isinf(bounds[cell]) && std::abs(bound) <= 1.0f;
      bounds[cell] = bound;
      for (int later = cell + 1; later < 32; ++later)
        ++before[later];
    }
  }
};

// The bounds in the order in which a search by halves looks at them. Each comparison that holds gives -1, so that what it has found
// counts down from 0, and a permutation reads the lowest three bits of that.
struct Halves {
  float first, second[2];
  alignas(32) float third[8], fourth[8];

  explicit Halves(const FourBitCode &code) : first(code.bounds[7]), second{code.bounds[3], code.bounds[11]} {
    for (int found = 0; found < 8; ++found) {
      third[(8 - found) % 8] = code.bounds[found < 4 ? 4 * found + 1 : 1];
      fourth[(8 - found) % 8] = code.bounds[2 * found];
    }
  }
};

// Calls a function with a constant for what the elements are.
template <typename F> void with_element(Element element, F &&f) {
  switch (element) {
  case Element::f32:
    return f(std::integral_constant<Element, Element::f32>{});
  case Element::bf16:
    return f(std::integral_constant<Element, Element::bf16>{});
  case Element::f16:
    return f(std::integral_constant<Element, Element::f16>{});
  }
}

// Calls `work(first, last)` for runs of `count` things of `size` elements each, on several threads.
template <typename F> void in_runs(int64_t count, int64_t size, F work) {
  const int64_t run = std::max<int64_t>(1, PIECE / std::max<int64_t>(1, size));
  const int64_t runs = (count + run - 1) / run;
  share(size_t(runs), runs / 4, [=](size_t i) {
    const int64_t first = int64_t(i) * run;
    work(first, std::min(count, first + run));
  });
}

// The numbers of one block, as they are written. Tails and processors without wide vectors.
template <Element E>
TE_INLINE void dequantize_block(const FourBitBlocks &blocks, int64_t begin, int64_t end, void *out, int64_t at) {
  alignas(64) std::conditional_t<E == Element::f32, float, uint16_t> table[16];
  const float scale = blocks.absmax[begin / blocks.block_size];
  for (int i = 0; i < 16; ++i)
    write<E>(table, i, blocks.code->values[i] * scale);
  auto *place = static_cast<std::remove_reference_t<decltype(table[0])> *>(out) + at;
  const int64_t count = end - begin;
  const uint8_t *packed = blocks.packed + begin / 2;
  for (int64_t i = 0; i < count / 2; ++i) {
    place[2 * i] = table[packed[i] >> 4];
    place[2 * i + 1] = table[packed[i] & 15];
  }
  if (count % 2 != 0)
    place[count - 1] = table[packed[count / 2] >> 4];
}

#ifdef TE_HAS_KERNEL

template <Element E> TE_AVX512 __m512 sixteen_avx512(const void *data, int64_t i) {
  if constexpr (E == Element::f32)
    return _mm512_loadu_ps(static_cast<const float *>(data) + i);
  const __m256i words =
      _mm256_loadu_si256(reinterpret_cast<const __m256i *>(static_cast<const uint16_t *>(data) + i));
  if constexpr (E == Element::bf16)
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
  else
    return _mm512_cvtph_ps(words);
}

// A whole block. Which operations round is what `quantize_block` has, and so are the codes.
template <Element E>
TE_AVX512 void quantize_whole_avx512(const void *source, int64_t begin, int64_t size, const FourBitCode &code,
                                     const Cells &cells, const uint8_t *pairs, uint8_t *packed, float *absmax) {
  const __m512i is_positive = _mm512_set1_epi32(0x7fffffff);
  __m512i most = _mm512_setzero_si512();
  for (int64_t i = 0; i < size; i += 16)
    most = _mm512_max_epu32(most,
                            _mm512_and_si512(_mm512_castps_si512(sixteen_avx512<E>(source, begin + i)), is_positive));
  const uint32_t bits = _mm512_reduce_max_epu32(most);
  // Infinities and what is not a number.
  if (bits >= 0x7f800000u)
    return quantize_block<E>(source, begin, begin + size, true, code, pairs, packed, absmax);
  *absmax = std::bit_cast<float>(bits);
  const __m512 factor = _mm512_set1_ps(1.0f / (*absmax < SMALLEST ? SMALLEST : *absmax));
  const __m512 low_bounds = _mm512_load_ps(cells.bounds), high_bounds = _mm512_load_ps(cells.bounds + 16);
  const __m512i low_before = _mm512_load_si512(cells.before), high_before = _mm512_load_si512(cells.before + 16);
  const __m512i codes = _mm512_load_si512(cells.codes);
  const __m512 sixteen = _mm512_set1_ps(16.0f);
  const __m512i zero = _mm512_setzero_si512(), last = _mm512_set1_epi32(31), one = _mm512_set1_epi32(1);
  // The first of two codes goes into the high half of a byte.
  const __m256i weights = _mm256_set1_epi16(0x0110);
  const auto codes_of = [&](int64_t i) __attribute__((always_inline, target("avx512f,avx512bw,avx512vl,avx512dq"))) {
    const __m512 values = _mm512_mul_ps(sixteen_avx512<E>(source, begin + i), factor);
    const __m512i at = _mm512_cvttps_epi32(_mm512_fmadd_ps(values, sixteen, sixteen));
    const __m512i cell = _mm512_min_epi32(_mm512_max_epi32(at, zero), last);
    const __m512i before = _mm512_permutex2var_epi32(low_before, cell, high_before);
    const __m512 bounds = _mm512_permutex2var_ps(low_bounds, cell, high_bounds);
    const __mmask16 is_above = _mm512_cmp_ps_mask(values, bounds, _CMP_NLE_UQ);
    const __m512i interval = _mm512_mask_add_epi32(before, is_above, before, one);
    return _mm512_cvtepi32_epi8(_mm512_permutexvar_epi32(interval, codes));
  };
  for (int64_t i = 0; i < size; i += 32) {
    const __m256i bytes = _mm256_set_m128i(codes_of(i + 16), codes_of(i));
    _mm_storeu_si128(reinterpret_cast<__m128i *>(packed + (begin + i) / 2),
                     _mm256_cvtepi16_epi8(_mm256_maddubs_epi16(bytes, weights)));
  }
}

template <Element E> TE_AVX2 __m256 eight_avx2(const void *data, int64_t i) {
  if constexpr (E == Element::f32)
    return _mm256_loadu_ps(static_cast<const float *>(data) + i);
  const __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i *>(static_cast<const uint16_t *>(data) + i));
  if constexpr (E == Element::bf16)
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16));
  else
    return _mm256_cvtph_ps(words);
}

// The bits of the largest magnitude of a whole block.
template <Element E> TE_AVX2 uint32_t largest_avx2(const void *source, int64_t begin, int64_t size) {
  const __m256i is_positive = _mm256_set1_epi32(0x7fffffff);
  __m256i most = _mm256_setzero_si256();
  for (int64_t i = 0; i < size; i += 8)
    most = _mm256_max_epi32(most, _mm256_and_si256(_mm256_castps_si256(eight_avx2<E>(source, begin + i)), is_positive));
  // The largest of all eight.
  __m128i four = _mm_max_epi32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1));
  return uint32_t(_mm_cvtsi128_si32(four));
}

// The codes of a whole block whose numbers are multiplied by `scale`, as `quantize_whole_avx512`.
template <Element E>
TE_AVX2 void codes_avx2(const void *source, int64_t begin, int64_t size, const FourBitCode &code, const Halves &halves,
                        float scale, uint8_t *packed) {
  const __m256 factor = _mm256_set1_ps(scale);
  const __m256 first = _mm256_set1_ps(halves.first);
  const __m256 below = _mm256_set1_ps(halves.second[0]), above = _mm256_set1_ps(halves.second[1]);
  const __m256 third = _mm256_load_ps(halves.third), fourth = _mm256_load_ps(halves.fourth);
  const __m256i codes = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i *>(code.codes)));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  // The first of two codes goes into the high half of a byte.
  const __m256i weights = _mm256_set1_epi16(0x0110);
  // How many bounds lie below each number, counted down from 0.
  const auto interval_of = [&](int64_t i) __attribute__((always_inline, target("avx2,fma,f16c"))) {
    const __m256 values = _mm256_mul_ps(eight_avx2<E>(source, begin + i), factor);
    const __m256 is_above = _mm256_cmp_ps(values, first, _CMP_NLE_UQ);
    __m256 more = _mm256_cmp_ps(values, _mm256_blendv_ps(below, above, is_above), _CMP_NLE_UQ);
    __m256i found = _mm256_castps_si256(is_above);
    found = _mm256_add_epi32(_mm256_add_epi32(found, found), _mm256_castps_si256(more));
    more = _mm256_cmp_ps(values, _mm256_permutevar8x32_ps(third, found), _CMP_NLE_UQ);
    found = _mm256_add_epi32(_mm256_add_epi32(found, found), _mm256_castps_si256(more));
    more = _mm256_cmp_ps(values, _mm256_permutevar8x32_ps(fourth, found), _CMP_NLE_UQ);
    found = _mm256_add_epi32(_mm256_add_epi32(found, found), _mm256_castps_si256(more));
    return found;
  };
  for (int64_t i = 0; i < size; i += 32) {
    const __m256i low = _mm256_packs_epi32(interval_of(i), interval_of(i + 8));
    const __m256i high = _mm256_packs_epi32(interval_of(i + 16), interval_of(i + 24));
    const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
    const __m256i found = _mm256_shuffle_epi8(codes, _mm256_abs_epi8(bytes));
    const __m256i joined = _mm256_maddubs_epi16(found, weights);
    const __m256i halved = _mm256_permute4x64_epi64(_mm256_packus_epi16(joined, joined), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i *>(packed + (begin + i) / 2), _mm256_castsi256_si128(halved));
  }
}

// Whole blocks, a few at a time: to find the largest number of one and to divide by it takes long, and is done for some while others
// are under way.
template <Element E>
TE_AVX2 void quantize_blocks_avx2(const void *source, int64_t first, int64_t last, int64_t size, const FourBitCode &code,
                                  const Halves &halves, const uint8_t *pairs, uint8_t *packed, float *absmax) {
  constexpr int64_t AT_ONCE = 8;
  for (; first < last; first += AT_ONCE) {
    const int64_t end = std::min(last, first + AT_ONCE);
    float scales[AT_ONCE];
    for (int64_t block = first; block < end; ++block) {
      absmax[block] = std::bit_cast<float>(largest_avx2<E>(source, block * size, size));
      scales[block - first] = 1.0f / (absmax[block] < SMALLEST ? SMALLEST : absmax[block]);
    }
    for (int64_t block = first; block < end; ++block) {
      const int64_t begin = block * size;
      // Memory that is needed next but one is on its way meanwhile: the processor by itself stops at the end of each page.
      const char *ahead = static_cast<const char *>(source) + (begin + 2 * AT_ONCE * size) * bytes_of(E);
      for (int64_t i = 0; i < size * bytes_of(E); i += 64)
        __builtin_prefetch(ahead + i);
      // Infinities and what is not a number.
      if (std::bit_cast<uint32_t>(absmax[block]) >= 0x7f800000u)
        quantize_block<E>(source, begin, begin + size, true, code, pairs, packed, absmax + block);
      else
        codes_avx2<E>(source, begin, size, code, halves, scales[block - first], packed);
    }
  }
}

// Sixteen scaled numbers fit into a register, so a byte of codes is two permutations away from its numbers, and no number is
// multiplied twice.
template <Element E>
TE_AVX512 void dequantize_whole_avx512(const FourBitBlocks &blocks, int64_t block, char *out) {
  const __m512 scaled =
      _mm512_mul_ps(_mm512_loadu_ps(blocks.code->values), _mm512_set1_ps(blocks.absmax[block]));
  const uint8_t *packed = blocks.packed + block * blocks.block_size / 2;
  [[maybe_unused]] __m512i words = _mm512_setzero_si512();
  if constexpr (E == Element::f16)
    words = _mm512_broadcast_i64x4(_mm512_cvtps_ph(scaled, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  if constexpr (E == Element::bf16) {
    alignas(64) float numbers[16];
    alignas(32) uint16_t rounded[16];
    _mm512_store_ps(numbers, scaled);
    for (int i = 0; i < 16; ++i)
      rounded[i] = to_bf16(numbers[i]);
    words = _mm512_broadcast_i64x4(_mm256_load_si256(reinterpret_cast<const __m256i *>(rounded)));
  }
  [[maybe_unused]] const __m512i low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  [[maybe_unused]] const __m512i high = _mm512_set_epi32(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8);
  for (int64_t i = 0; i < blocks.block_size; i += 32, packed += 16) {
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(packed)));
    const __m512i firsts = _mm512_srli_epi32(bytes, 4);
    if constexpr (E == Element::f32) {
      // Permutations look at the lowest four bits only.
      const __m512 even = _mm512_permutexvar_ps(firsts, scaled), odd = _mm512_permutexvar_ps(bytes, scaled);
      _mm512_storeu_ps(out + 4 * i, _mm512_permutex2var_ps(even, low, odd));
      _mm512_storeu_ps(out + 4 * i + 64, _mm512_permutex2var_ps(even, high, odd));
    } else {
      // They look at five bits here, and the table is there twice.
      const __m512i both = _mm512_or_si512(firsts, _mm512_slli_epi32(bytes, 16));
      _mm512_storeu_si512(out + 2 * i, _mm512_permutexvar_epi16(both, words));
    }
  }
}

// The low and the high bytes of sixteen numbers of 16 bits are a register each.
template <Element E> TE_AVX2 void dequantize_whole_avx2(const FourBitBlocks &blocks, int64_t block, char *out) {
  if constexpr (E == Element::f32) {
    dequantize_block<E>(blocks, block * blocks.block_size, (block + 1) * blocks.block_size, out, 0);
  } else {
    alignas(16) uint8_t low_bytes[16], high_bytes[16];
    for (int i = 0; i < 16; ++i) {
      uint16_t number;
      write<E>(&number, 0, blocks.code->values[i] * blocks.absmax[block]);
      low_bytes[i] = uint8_t(number), high_bytes[i] = uint8_t(number >> 8);
    }
    const __m128i low = _mm_load_si128(reinterpret_cast<const __m128i *>(low_bytes));
    const __m128i high = _mm_load_si128(reinterpret_cast<const __m128i *>(high_bytes));
    const __m128i mask = _mm_set1_epi8(15);
    const uint8_t *packed = blocks.packed + block * blocks.block_size / 2;
    __m128i *place = reinterpret_cast<__m128i *>(out);
    for (int64_t i = 0; i < blocks.block_size; i += 32, packed += 16, place += 4) {
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i *>(packed));
      const __m128i firsts = _mm_and_si128(_mm_srli_epi16(bytes, 4), mask), seconds = _mm_and_si128(bytes, mask);
      const __m128i a = _mm_unpacklo_epi8(firsts, seconds), b = _mm_unpackhi_epi8(firsts, seconds);
      const __m128i a_low = _mm_shuffle_epi8(low, a), a_high = _mm_shuffle_epi8(high, a);
      const __m128i b_low = _mm_shuffle_epi8(low, b), b_high = _mm_shuffle_epi8(high, b);
      _mm_storeu_si128(place, _mm_unpacklo_epi8(a_low, a_high));
      _mm_storeu_si128(place + 1, _mm_unpackhi_epi8(a_low, a_high));
      _mm_storeu_si128(place + 2, _mm_unpacklo_epi8(b_low, b_high));
      _mm_storeu_si128(place + 3, _mm_unpackhi_epi8(b_low, b_high));
    }
  }
}

#endif

template <Element E> void dequantize_whole(const FourBitBlocks &blocks, int64_t block, char *out) {
#ifdef TE_HAS_KERNEL
  const int32_t widest = widest_vectors();
  if (widest >= 2 && processor_has_avx512())
    return dequantize_whole_avx512<E>(blocks, block, out);
  if (widest >= 1 && processor_has_avx2())
    return dequantize_whole_avx2<E>(blocks, block, out);
#endif
  dequantize_block<E>(blocks, block * blocks.block_size, (block + 1) * blocks.block_size, out, 0);
}

std::atomic<int32_t> &widest() {
  static std::atomic<int32_t> widest{3};
  return widest;
}

} // namespace

int32_t widest_vectors() { return widest().load(std::memory_order_relaxed); }
void set_widest_vectors(int32_t vectors) { widest().store(vectors, std::memory_order_relaxed); }

void quantize_4bit(const void *source, Element element, int64_t count, int64_t block_size, const FourBitCode &code,
                   uint8_t *packed, float *absmax) {
  // Intervals become codes two at a time, where they are not the same.
  uint8_t pairs[256];
  bool is_sorted = true;
  for (int i = 0; i < 256; ++i) {
    pairs[i] = uint8_t(code.codes[i >> 4] << 4 | code.codes[i & 15]);
    is_sorted &= pairs[i] == i;
  }
  const uint8_t *table = is_sorted ? nullptr : pairs;
  const Cells cells(code);
  const Halves halves(code);
  with_element(element, [&](auto constant) {
    constexpr Element E = constant();
    in_runs((count + block_size - 1) / block_size, block_size, [=, &code, &cells, &halves](int64_t first, int64_t last) {
#ifdef TE_HAS_KERNEL
      const int32_t widest = widest_vectors();
      const int64_t last_whole = std::min(last, count / block_size);
      if (cells.is_usable && widest >= 2 && processor_has_avx512())
        for (; first < last_whole; ++first)
          quantize_whole_avx512<E>(source, first * block_size, block_size, code, cells, table, packed, absmax + first);
      else if (widest >= 1 && processor_has_avx2() && first < last_whole) {
        quantize_blocks_avx2<E>(source, first, last_whole, block_size, code, halves, table, packed, absmax);
        first = last_whole;
      }
#endif
      run_vectorised(
          [&](int64_t first, int64_t last) __attribute__((always_inline)) {
            for (int64_t block = first; block < last; ++block) {
              const int64_t begin = block * block_size, end = std::min(count, begin + block_size);
              quantize_block<E>(source, begin, end, end - begin == block_size, code, table, packed, absmax + block);
            }
          },
          first, last);
    });
  });
}

void dequantize_4bit(const FourBitBlocks &blocks, int64_t begin, int64_t end, Element element, void *out) {
  const int64_t size = blocks.block_size, first_block = begin / size;
  with_element(element, [&](auto constant) {
    constexpr Element E = constant();
    char *place = static_cast<char *>(out);
    in_runs((end - begin) / size, size, [=](int64_t first, int64_t last) {
      for (int64_t block = first; block < last; ++block)
        dequantize_whole<E>(blocks, first_block + block, place + block * size * bytes_of(E));
    });
    const int64_t rest = begin + (end - begin) / size * size;
    if (rest < end)
      dequantize_block<E>(blocks, rest, end, out, rest - begin);
  });
}

void quantize_blockwise(const float *source, int64_t count, int64_t block_size, const float *table, uint8_t *codes,
                        float *absmax) {
  // bitsandbytes rounds a number in [-1, 1] to one of 65536 and asks for the code nearest to that, or the lower of two.
  constexpr float STEPS = 65535.0f;
  float middles[255];
  for (int i = 0; i < 255; ++i)
    middles[i] = 0.5f * (table[i] + table[i + 1]);
  for (int64_t begin = 0, block = 0; begin < count; begin += block_size, ++block) {
    const int64_t end = std::min(count, begin + block_size);
    const float most = absmax[block] = largest<Element::f32>(source, begin, end), factor = 1.0f / most;
    for (int64_t i = begin; i < end; ++i) {
      if (!(most > 0.0f)) {
        codes[i] = 0;
        continue;
      }
      const float value = std::min(std::max(source[i] * factor, -1.0f), 1.0f);
      const float step = float(uint16_t((value + 1.0f) * 0.5f * STEPS + 0.5f));
      const float rounded = -1.0f + 2.0f * step / STEPS;
      codes[i] = uint8_t(std::lower_bound(middles, middles + 255, rounded) - middles);
    }
  }
}

void dequantize_blockwise(const uint8_t *codes, int64_t count, int64_t block_size, const float *table,
                          const float *absmax, float offset, float *out) {
  in_runs((count + block_size - 1) / block_size, block_size, [=](int64_t first, int64_t last) {
    run_vectorised(
        [=](int64_t first, int64_t last) __attribute__((always_inline)) {
          for (int64_t block = first; block < last; ++block) {
            const int64_t begin = block * block_size, end = std::min(count, begin + block_size);
            const float scale = absmax[block];
            for (int64_t i = begin; i < end; ++i)
              out[i] = table[codes[i]] * scale + offset;
          }
        },
        first, last);
  });
}

void quantize_rows(const void *source, int64_t rows, int64_t columns, float threshold, int8_t *codes, float *scales,
                   uint8_t *is_outlier) {
  const float limit = threshold > 0 ? threshold : std::numeric_limits<float>::infinity();
  const auto body = [=](int64_t row) __attribute__((always_inline)) {
    const uint16_t *numbers = static_cast<const uint16_t *>(source) + row * columns;
    int8_t *out = codes + row * columns;
    uint32_t most = 0;
    for (int64_t i = 0; i < columns; ++i) {
      const float size = std::fabs(read<Element::f16>(numbers, i));
      const bool is_out = threshold > 0 && size >= limit;
      most = std::max(most, is_out ? 0u : std::bit_cast<uint32_t>(size));
    }
    scales[row] = std::bit_cast<float>(most);
    // libtorch divides a number by a tensor as a product with the reciprocal. A row of zeros has the code 0.
    const float factor = most == 0 ? 0.0f : (1.0f / scales[row]) * 127.0f;
    for (int64_t i = 0; i < columns; ++i) {
      const float number = read<Element::f16>(numbers, i);
      const bool is_out = threshold > 0 && std::fabs(number) >= limit;
      const float code = (number * factor + ROUNDER) - ROUNDER;
      // Only what is not a number is beyond these limits.
      out[i] = !is_out && code >= -128.0f && code <= 127.0f ? int8_t(code) : int8_t(0);
    }
  };
  in_runs(rows, columns, [=](int64_t first, int64_t last) {
    run_vectorised(
        [=](int64_t first, int64_t last) __attribute__((always_inline)) {
          for (int64_t row = first; row < last; ++row)
            body(row);
        },
        first, last);
  });
  if (!(threshold > 0))
    return;
  const auto mark = [=](int64_t row) __attribute__((always_inline)) {
    const uint16_t *numbers = static_cast<const uint16_t *>(source) + row * columns;
    for (int64_t i = 0; i < columns; ++i)
      is_outlier[i] |= uint8_t(std::fabs(read<Element::f16>(numbers, i)) >= limit);
  };
  std::fill(is_outlier, is_outlier + columns, uint8_t(0));
  for (int64_t row = 0; row < rows; ++row)
    run_vectorised(mark, row);
  if (std::find(is_outlier, is_outlier + columns, 1) == is_outlier + columns)
    return;
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t i = 0; i < columns; ++i)
      codes[row * columns + i] = is_outlier[i] ? int8_t(0) : codes[row * columns + i];
}

void dequantize_rows(const int8_t *codes, const float *scales, int64_t columns, int64_t begin, int64_t end,
                     Element element, void *out) {
  with_element(element, [&](auto constant) {
    constexpr Element E = constant();
    in_runs(end - begin, columns, [=](int64_t first, int64_t last) {
      run_vectorised(
          [=](int64_t first, int64_t last) __attribute__((always_inline)) {
            for (int64_t row = first; row < last; ++row) {
              const float factor = scales[begin + row] * (1.0f / 127.0f);
              for (int64_t i = 0; i < columns; ++i)
                write<E>(out, row * columns + i, float(codes[(begin + row) * columns + i]) * factor);
            }
          },
          first, last);
    });
  });
}

void finish_int8_product(const int32_t *sums, const float *row_scales, const float *column_scales, const float *bias,
                         int64_t rows, int64_t columns, Element element, void *out) {
  // bitsandbytes has a digit too few on the CPU, 6.200124e-05, which makes its results larger by 2 parts in 100,000.
  constexpr float FACTOR = 1.0f / (127.0f * 127.0f);
  with_element(element, [&](auto constant) {
    constexpr Element E = constant();
    in_runs(rows, columns, [=](int64_t first, int64_t last) {
      run_vectorised(
          [=](int64_t first, int64_t last) __attribute__((always_inline)) {
            for (int64_t row = first; row < last; ++row) {
              const float scale = row_scales[row];
              for (int64_t i = 0; i < columns; ++i) {
                const float product = float(sums[row * columns + i]) * (scale * column_scales[i]) * FACTOR;
                write<E>(out, row * columns + i, bias ? product + bias[i] : product);
              }
            }
          },
          first, last);
    });
  });
}

} // namespace te
