// The border of the kernels for weights of 4 and 8 bits: what they do not check, is checked here.
#include "common.h"
#include "quant_kernel.h"

#include <algorithm>
#include <limits>
#include <optional>

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <ATen/ops/_int_mm.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>

#ifdef __linux__
#include <sys/mman.h>
#endif

using namespace te;

namespace te {
namespace {

// What does not hold is a mistake of the caller.
void check(bool holds, const char *message) { TORCH_CHECK_VALUE(holds, message); }

Element element_of(at::ScalarType type) {
  switch (type) {
  case at::kFloat:
    return Element::f32;
  case at::kBFloat16:
    return Element::bf16;
  case at::kHalf:
    return Element::f16;
  default:
    check(false, "numbers are float32, bfloat16 or float16");
    return Element::f32;
  }
}

at::ScalarType type_of(int32_t element) {
  switch (static_cast<Element>(element)) {
  case Element::f32:
    return at::kFloat;
  case Element::bf16:
    return at::kBFloat16;
  case Element::f16:
    return at::kHalf;
  }
  check(false, "numbers are float32, bfloat16 or float16");
  return at::kFloat;
}

bool is_plain(const at::Tensor &tensor, at::ScalarType type) {
  return tensor.defined() && tensor.device().is_cpu() && tensor.scalar_type() == type && tensor.is_contiguous();
}

int64_t blocks_of(int64_t count, int64_t block_size) { return (count + block_size - 1) / block_size; }

// The parts of a weight of four bits, compared with each other.
FourBitBlocks blocks_of(const at::Tensor &packed, const at::Tensor &absmax, int64_t block_size, int64_t count,
                        const FourBitCode &code) {
  check(block_size >= 32 && block_size <= 4096 && block_size % 32 == 0, "a block has 32 to 4096 elements, in 32s");
  check(is_plain(packed, at::kByte) && packed.numel() == count / 2 + count % 2, "the codes have another length");
  check(is_plain(absmax, at::kFloat) && absmax.numel() == blocks_of(count, block_size), "the scales have another length");
  return {packed.const_data_ptr<uint8_t>(), absmax.const_data_ptr<float>(), block_size, &code};
}

// Numbers of a whole weight, or of some of its rows that begin with a block.
at::Tensor numbers_of(const FourBitBlocks &blocks, int64_t begin, int64_t rows, int64_t columns, at::ScalarType type) {
  at::Tensor out = at::empty({rows, columns}, at::TensorOptions(type));
  dequantize_4bit(blocks, begin * columns, (begin + rows) * columns, element_of(type), out.data_ptr());
  return out;
}

// Bytes of numbers that are made at once, so that a product finds them in the cache.
constexpr int64_t CHUNK_BYTES = 1 << 20;
// Rows of input up to which a product decodes while it multiplies. Of more, the numbers are made first, because the same product
// is faster then (4096 x 4096, one thread, 3.7 GHz EPYC 9004).
constexpr int64_t FEW = 4, FEW_BF16 = 14;

// input [m, columns] with a weight [rows, columns]. The bias is empty or has 32 bits; it is added before sums are rounded.
at::Tensor product_4bit(const FourBitBlocks &blocks, int64_t rows, int64_t columns, const at::Tensor &input,
                        const at::Tensor &bias) {
  const int64_t count = input.size(0);
  const at::ScalarType type = input.scalar_type();
  const bool is_aligned = columns % blocks.block_size == 0;
  const bool is_bf16 = is_aligned && type == at::kBFloat16;
  if (is_bf16 && count <= FEW_BF16) {
    at::Tensor out = at::empty({count, rows}, at::TensorOptions(at::kFloat));
    if (multiply_4bit_few_bf16(blocks, rows, columns, static_cast<const uint16_t *>(input.const_data_ptr()), count,
                               out.mutable_data_ptr<float>()))
      return (bias.defined() ? out.add_(bias) : out).to(type);
  }
  if (is_aligned && count <= FEW) {
    const at::Tensor numbers = input.to(at::kFloat).contiguous();
    at::Tensor out = at::empty({count, rows}, at::TensorOptions(at::kFloat));
    multiply_4bit_few(blocks, rows, columns, numbers.const_data_ptr<float>(), count, out.mutable_data_ptr<float>());
    return (bias.defined() ? out.add_(bias) : out).to(type);
  }
  if (is_bf16) {
    at::Tensor out = at::empty({count, rows}, at::TensorOptions(type));
    if (multiply_4bit_bf16(blocks, rows, columns, static_cast<const uint16_t *>(input.const_data_ptr()), count,
                           bias.defined() ? bias.const_data_ptr<float>() : nullptr,
                           static_cast<uint16_t *>(out.mutable_data_ptr())))
      return out;
  }
  // Few processors have a fast product of float16, and not all have one of bfloat16: libtorch's took 0.2 s for 64 rows and 4096 x 4096
  // on an EPYC 7003. In 32 bits it is no less exact.
  const bool is_wider = type == at::kHalf || (type == at::kBFloat16 && !has_bf16_products());
  const at::ScalarType computed = is_wider ? at::kFloat : type;
  // Weights are rounded to bfloat16 on all processors.
  const at::ScalarType rounded = type == at::kHalf ? at::kFloat : type;
  const auto weights = [&](int64_t begin, int64_t count) {
    return numbers_of(blocks, begin, count, columns, rounded).to(computed);
  };
  const at::Tensor numbers = input.to(computed), addend = bias.defined() ? bias.to(computed) : bias;
  const std::optional<at::Tensor> all = addend.defined() ? std::optional(addend) : std::nullopt;
  if (!is_aligned)
    return at::linear(numbers, weights(0, rows), all).to(type);
  at::Tensor out = at::empty({count, rows}, at::TensorOptions(computed));
  const int64_t turn = std::max<int64_t>(16, CHUNK_BYTES / (columns * int64_t(at::elementSize(computed))) / 16 * 16);
  for (int64_t row = 0; row < rows; row += turn) {
    const int64_t some = std::min(turn, rows - row);
    at::Tensor place = out.narrow(1, row, some);
    const at::Tensor weight = weights(row, some).t();
    if (addend.defined())
      at::addmm_out(place, addend.narrow(0, row, some), numbers, weight);
    else
      at::mm_out(place, numbers, weight);
  }
  return out.to(type);
}

} // namespace
} // namespace te

extern "C" {

void te_quant_set_widest_vectors(int32_t vectors) { set_widest_vectors(vectors); }

// Memory that is written for the first time costs a trap for each of its pages; large ones are few.
static void prefer_large_pages(const at::Tensor &memory) {
#ifdef __linux__
  constexpr uintptr_t LARGE = uintptr_t(2) << 20;
  const uintptr_t start = reinterpret_cast<uintptr_t>(memory.const_data_ptr());
  const uintptr_t first = (start + LARGE - 1) / LARGE * LARGE, last = (start + memory.nbytes()) / LARGE * LARGE;
  if (first < last)
    madvise(reinterpret_cast<void *>(first), last - first, MADV_HUGEPAGE);
#else
  (void)memory;
#endif
}

int32_t te_quantize_4bit(void *source, const FourBitCode *code, int64_t block_size, void **packed, void **absmax) {
  return guard([&] {
    const at::Tensor flat = tensor(source).detach().contiguous();
    const Element element = element_of(flat.scalar_type());
    check(flat.device().is_cpu(), "the tensor is not on the CPU");
    check(block_size >= 32 && block_size <= 4096 && block_size % 32 == 0, "a block has 32 to 4096 elements, in 32s");
    const int64_t count = flat.numel();
    at::Tensor codes = at::empty({count / 2 + count % 2, 1}, at::TensorOptions(at::kByte));
    at::Tensor scales = at::empty({blocks_of(count, block_size)}, at::TensorOptions(at::kFloat));
    prefer_large_pages(codes);
    quantize_4bit(flat.const_data_ptr(), element, count, block_size, *code, codes.mutable_data_ptr<uint8_t>(),
                  scales.mutable_data_ptr<float>());
    *packed = hand_over(std::move(codes));
    *absmax = hand_over(std::move(scales));
  });
}

int32_t te_dequantize_4bit(void *packed, void *absmax, const FourBitCode *code, int64_t block_size, const int64_t *shape,
                           size_t num_dims, int64_t count, int32_t element, void **result) {
  return guard([&] {
    const FourBitBlocks blocks = blocks_of(tensor(packed), tensor(absmax), block_size, count, *code);
    at::Tensor out = at::empty({count}, at::TensorOptions(type_of(element)));
    dequantize_4bit(blocks, 0, count, static_cast<Element>(element), out.data_ptr());
    *result = hand_over(out.view(at::IntArrayRef(shape, num_dims)));
  });
}

int32_t te_quantize_blockwise(void *source, void *table, int64_t block_size, void **codes, void **absmax) {
  return guard([&] {
    const at::Tensor &numbers = tensor(source), &values = tensor(table);
    check(is_plain(numbers, at::kFloat) && is_plain(values, at::kFloat) && values.numel() == 256,
          "numbers and a table of 256 are contiguous float32 on the CPU");
    check(block_size > 0, "a block has at least one element");
    at::Tensor out = at::empty(numbers.sizes(), at::TensorOptions(at::kByte));
    at::Tensor scales = at::empty({blocks_of(numbers.numel(), block_size)}, at::TensorOptions(at::kFloat));
    quantize_blockwise(numbers.const_data_ptr<float>(), numbers.numel(), block_size, values.const_data_ptr<float>(),
                       out.mutable_data_ptr<uint8_t>(), scales.mutable_data_ptr<float>());
    *codes = hand_over(std::move(out));
    *absmax = hand_over(std::move(scales));
  });
}

int32_t te_dequantize_blockwise(void *codes, void *absmax, void *table, int64_t block_size, double offset,
                                void **result) {
  return guard([&] {
    const at::Tensor &bytes = tensor(codes), &scales = tensor(absmax), &values = tensor(table);
    check(is_plain(bytes, at::kByte) && is_plain(scales, at::kFloat) && is_plain(values, at::kFloat),
          "codes are contiguous bytes on the CPU, scales and the table float32");
    check(block_size > 0 && values.numel() == 256 && scales.numel() == blocks_of(bytes.numel(), block_size),
          "the table has another length than 256, or the scales another than the codes");
    at::Tensor out = at::empty(bytes.sizes(), at::TensorOptions(at::kFloat));
    dequantize_blockwise(bytes.const_data_ptr<uint8_t>(), bytes.numel(), block_size, values.const_data_ptr<float>(),
                         scales.const_data_ptr<float>(), float(offset), out.mutable_data_ptr<float>());
    *result = hand_over(std::move(out));
  });
}

int32_t te_linear_4bit(void *input, void *packed, void *absmax, const FourBitCode *code, int64_t block_size, int64_t rows,
                       int64_t columns, void *bias, void **result) {
  return guard([&] {
    at::NoGradGuard no_grad;
    // The caller has said in which type to compute.
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const at::Tensor &numbers = tensor(input);
    element_of(numbers.scalar_type());
    check(rows >= 0 && columns > 0 && rows <= std::numeric_limits<int64_t>::max() / columns, "no such weight");
    check(numbers.device().is_cpu() && numbers.dim() >= 1 && numbers.size(-1) == columns, "the input does not fit");
    const FourBitBlocks blocks = blocks_of(tensor(packed), tensor(absmax), block_size, rows * columns, *code);
    at::Tensor addend;
    if (bias) {
      addend = tensor(bias).to(at::kFloat).contiguous();
      check(addend.device().is_cpu() && addend.numel() == rows, "the bias has one number for each row of the weight");
    }
    at::Tensor out = product_4bit(blocks, rows, columns, numbers.reshape({-1, columns}).contiguous(), addend);
    std::vector<int64_t> sizes(numbers.sizes().begin(), numbers.sizes().end());
    sizes.back() = rows;
    *result = hand_over(out.view(sizes));
  });
}

int32_t te_int8_vectorwise_quant(void *source, double threshold, void **codes, void **scales, void **outliers) {
  return guard([&] {
    const at::Tensor numbers = tensor(source).detach().contiguous();
    check(is_plain(numbers, at::kHalf) && numbers.dim() == 2 && numbers.size(1) > 0,
          "rows of numbers are a float16 matrix on the CPU");
    const int64_t rows = numbers.size(0), columns = numbers.size(1);
    at::Tensor out = at::empty({rows, columns}, at::TensorOptions(at::kChar));
    at::Tensor stats = at::empty({rows}, at::TensorOptions(at::kFloat));
    std::vector<uint8_t> is_outlier(size_t(columns), 0);
    quantize_rows(numbers.const_data_ptr(), rows, columns, float(threshold), out.mutable_data_ptr<int8_t>(),
                  stats.mutable_data_ptr<float>(), is_outlier.data());
    const int64_t count = std::count(is_outlier.begin(), is_outlier.end(), uint8_t(1));
    at::Tensor found = at::empty({count}, at::TensorOptions(at::kLong));
    int64_t *place = found.mutable_data_ptr<int64_t>();
    for (int64_t column = 0; column < columns; ++column)
      if (is_outlier[size_t(column)])
        *place++ = column;
    *codes = hand_over(std::move(out));
    *scales = hand_over(std::move(stats));
    *outliers = hand_over(std::move(found));
  });
}

int32_t te_int8_dequantize(void *codes, void *scales, int32_t element, void **result) {
  return guard([&] {
    const at::Tensor &bytes = tensor(codes), &stats = tensor(scales);
    check(is_plain(bytes, at::kChar) && bytes.dim() == 2 && is_plain(stats, at::kFloat) && stats.numel() == bytes.size(0),
          "codes are an int8 matrix on the CPU with a float32 scale for each row");
    at::Tensor out = at::empty(bytes.sizes(), at::TensorOptions(type_of(element)));
    dequantize_rows(bytes.const_data_ptr<int8_t>(), stats.const_data_ptr<float>(), bytes.size(1), 0, bytes.size(0),
                    static_cast<Element>(element), out.data_ptr());
    *result = hand_over(std::move(out));
  });
}

int32_t te_int8_scaled_mm(void *a, void *b, void *a_scales, void *b_scales, void *bias, int32_t element, void **result) {
  return guard([&] {
    const at::Tensor &left = tensor(a), &right = tensor(b), &rows = tensor(a_scales), &columns = tensor(b_scales);
    check(is_plain(left, at::kChar) && is_plain(right, at::kChar) && left.dim() == 2 && right.dim() == 2 &&
              left.size(1) == right.size(1),
          "two int8 matrices with the same number of columns, on the CPU");
    check(is_plain(rows, at::kFloat) && is_plain(columns, at::kFloat) && rows.numel() == left.size(0) &&
              columns.numel() == right.size(0),
          "a float32 scale for each row");
    // Sums of more products need not fit into 32 bits.
    check(left.size(1) <= std::numeric_limits<int32_t>::max() / (128 * 128), "at most 131071 columns");
    at::Tensor addend;
    if (bias) {
      addend = tensor(bias).to(at::kFloat).contiguous();
      check(addend.numel() == right.size(0), "one bias for each row of the weight");
    }
    at::Tensor sums = at::empty({left.size(0), right.size(0)}, at::TensorOptions(at::kInt));
    if (!multiply_int8(right.const_data_ptr<int8_t>(), right.size(0), right.size(1), left.const_data_ptr<int8_t>(),
                       left.size(0), sums.mutable_data_ptr<int32_t>()))
      sums = at::_int_mm(left, right.t()).contiguous();
    at::Tensor out = at::empty(sums.sizes(), at::TensorOptions(type_of(element)));
    finish_int8_product(sums.const_data_ptr<int32_t>(), rows.const_data_ptr<float>(), columns.const_data_ptr<float>(),
                        addend.defined() ? addend.const_data_ptr<float>() : nullptr, sums.size(0), sums.size(1),
                        static_cast<Element>(element), out.data_ptr());
    *result = hand_over(std::move(out));
  });
}
}
