//! Random numbers of the device.

use accelerate::nn::{Dropout, ParamStore};
use accelerate::set_seed;
use accelerate::tch::{Kind, Tensor};
use anyhow::{Result, ensure};
use torch_ext::Generator;

use crate::check::{Context, Found};

pub(crate) fn generators(context: &Context<'_>) -> Result<Found> {
    let draw = || Tensor::f_randn([1000], (Kind::Float, context.device));
    set_seed(42);
    let (first, second) = (draw()?, draw()?);
    set_seed(42);
    context.same("numbers after the same seed", &draw()?, &first)?;
    ensure!(!first.f_equal(&second)?, "the same numbers twice");
    let generator = Generator::default_for(context.device)?;
    ensure!(generator.initial_seed()? == 42, "the device's generator has not got the seed");
    let state = generator.state()?;
    let wanted = draw()?;
    generator.set_state(&state)?;
    context.same("numbers after a restored state", &draw()?, &wanted)?;
    let mean = first.f_mean(Kind::Double)?.f_double_value(&[])?;
    // Four standard deviations of the mean of 1000 numbers.
    context.close("the mean of normal numbers", mean, 0.0, 0.13)?;
    Found::figure(format!("mean {mean:.3}"))
}

pub(crate) fn dropout(context: &Context<'_>) -> Result<Found> {
    const COUNT: i64 = 1 << 16;
    let store = ParamStore::new(context.device);
    let dropout = Dropout::new(store.root(), 0.25)?;
    let ones = Tensor::f_ones([COUNT], (Kind::Float, context.device))?;
    set_seed(7);
    let dropped = dropout.forward(&ones)?;
    set_seed(7);
    context.same("what the same seed drops", &dropout.forward(&ones)?, &dropped)?;
    let kept = dropped.f_count_nonzero(0)?.f_double_value(&[])? / COUNT as f64;
    // Six standard deviations.
    context.close("the share that is kept", kept, 0.75, 0.011)?;
    context.close("what it is scaled to", dropped.f_max()?.f_double_value(&[])?, 1.0 / 0.75, 1e-6)?;
    store.eval();
    context.same("in evaluation", &dropout.forward(&ones)?, &ones)?;
    Found::figure(format!("{:.2} % kept", 100.0 * kept))
}
