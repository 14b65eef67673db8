//! Generated images: stripes across, stripes down and chequers, all with noise.

use accelerate::prelude::*;

/// How many kinds of images there are.
pub const NUM_PATTERNS: i64 = 3;

/// Height and width of an image.
const SIZE: i64 = 12;

/// Images `[count, 1, SIZE, SIZE]`, and which pattern each of them shows.
pub fn examples(count: i64) -> accelerate::Result<TensorDataset<(Tensor, Tensor)>> {
    let cpu = Device::Cpu;
    // 0 0 1 1 0 0 1 1 ...
    let stripe = Tensor::arange(SIZE, (Kind::Int64, cpu)).divide_scalar_mode(2, "floor").remainder(2);
    let across = stripe.view([SIZE, 1]).expand([SIZE, SIZE], false);
    let down = stripe.view([1, SIZE]).expand([SIZE, SIZE], false);
    let chequers = across.not_equal_tensor(&down).to_kind(Kind::Int64);
    let patterns = Tensor::stack(&[across, down, chequers], 0).unsqueeze(1).to_kind(Kind::Float);

    let labels = Tensor::randint(NUM_PATTERNS, [count], (Kind::Int64, cpu));
    let noise = Tensor::randn([count, 1, SIZE, SIZE], (Kind::Float, cpu)) * 0.5;
    TensorDataset::new((patterns.index_select(0, &labels) + noise, labels))
}
