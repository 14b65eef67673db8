//! How exactly is computed, and where: float32, TF32, autocast, bfloat16, and float16 with its scaler.

use accelerate::nn::{Init, Linear, LinearConfig, ModuleFn, ParamStore};
use accelerate::optim::Sgd;
use accelerate::tch::{Kind, Tensor};
use accelerate::{
    AORecipeKwargs, Accelerator, AcceleratorBuilder, AutocastKwargs, FP8RecipeKwargs, Float8LinearRecipeName,
    GradScalerKwargs, MixedPrecision, TERecipeKwargs,
};
use anyhow::{Context as _, Result, ensure};
use std::time::Instant;
use torch_ext::Autocast;
use torch_ext::device::{MatmulPrecision, set_float32_matmul_precision};
use torch_ext::stream::synchronize;

use crate::check::{Context, Found};
use crate::models::{train, wave};

/// How far a product of two 512 x 512 matrices is from that in double, as a part of the largest sum of its terms without their signs.
fn error_of_product(context: &Context<'_>) -> Result<f64> {
    let left = wave(&[512, 512], 0.3)?.f_to_device(context.device)?;
    let right = wave(&[512, 512], 0.7)?.f_to_device(context.device)?;
    let [wide_left, wide_right] = [left.f_to_kind(Kind::Double)?, right.f_to_kind(Kind::Double)?];
    let exact = wide_left.f_matmul(&wide_right)?;
    let terms = wide_left.f_abs()?.f_matmul(&wide_right.f_abs()?)?;
    let found = left.f_matmul(&right)?.f_to_kind(Kind::Double)?;
    let difference = found.f_sub(&exact)?.f_abs()?.f_max()?.f_double_value(&[])?;
    Ok(difference / terms.f_max()?.f_double_value(&[])?)
}

/// Each of 512 products in float32 is rounded by 6e-8 of its size, whose signs differ. TF32 keeps 10 bits of each factor: 5e-4.
pub(crate) fn float32_tf32(context: &Context<'_>) -> Result<Found> {
    let exact = error_of_product(context)?;
    context.close("the error of a product in float32", exact, 0.0, 1e-6)?;
    if !context.is_cuda() {
        return Found::figure(format!("float32 {exact:.1e}; no TF32 on a CPU"));
    }
    set_float32_matmul_precision(MatmulPrecision::High)?;
    let rounded = error_of_product(context)?;
    set_float32_matmul_precision(MatmulPrecision::Highest)?;
    ensure!(rounded > 2e-6 && rounded < 1e-3, "the error of a product in TF32 is {rounded:e}, which is none of TF32");
    context.close("the error once float32 is asked for again", error_of_product(context)?, 0.0, 1e-6)?;
    Found::figure(format!("float32 {exact:.1e}, TF32 {rounded:.1e}"))
}

type Operator = fn(&Tensor) -> Result<Tensor, accelerate::tch::TchError>;

/// Operators, and whether autocast gives their results in its own kind: on CUDA by PyTorch's lists, of which the CPU's are a part.
/// `None` says that the kind of the input stays.
const OPERATORS: &[(&str, Operator, Option<bool>, bool)] = &[
    ("matmul", |x| x.f_matmul(x), Some(true), true),
    ("linear", |x| x.f_linear(x, None::<&Tensor>), Some(true), true),
    ("addmm", |x| x.f_addmm(x, x), Some(true), true),
    ("relu", Tensor::f_relu, None, true),
    ("add", |x| x.f_add(x), None, true),
    ("softmax", |x| x.f_softmax(-1, None), Some(false), false),
    ("log", |x| x.f_abs()?.f_add_scalar(1.0)?.f_log(), Some(false), false),
    ("sum", |x| x.f_sum(None), Some(false), false),
    ("mse_loss", |x| x.f_mse_loss(x, accelerate::tch::Reduction::Mean), Some(false), true),
    ("bmm", |x| x.f_unsqueeze(0)?.f_bmm(&x.f_unsqueeze(0)?), Some(true), true),
    ("conv1d", |x| x.f_unsqueeze(0)?.f_conv1d(&x.f_unsqueeze(2)?, None::<&Tensor>, [1], [0], [1], 1), Some(true), true),
    ("attention", attention, Some(true), true),
    ("gelu", |x| x.f_gelu("none"), None, true),
    ("exp", Tensor::f_exp, Some(false), false),
    ("cumsum", |x| x.f_cumsum(0, None), Some(false), false),
    ("layer_norm", |x| x.f_layer_norm([8], None::<&Tensor>, None::<&Tensor>, 1e-5, true), Some(false), false),
];

fn attention(x: &Tensor) -> Result<Tensor, accelerate::tch::TchError> {
    let x = x.f_view([1, 1, 8, 8])?;
    Tensor::f_scaled_dot_product_attention(&x, &x, &x, None::<&Tensor>, 0.0, false, None, false)
}

pub(crate) fn autocast(context: &Context<'_>) -> Result<Found> {
    let (mut num_rows, mut wrong) = (0, Vec::new());
    for kind in [Kind::BFloat16, Kind::Half] {
        let cast = Autocast { device: context.device, kind, enabled: true, cache_enabled: true };
        for input in [Kind::Float, kind] {
            let x = wave(&[8, 8], 0.1)?.f_to_device(context.device)?.f_to_kind(input)?;
            for (name, operator, rule, on_cpu) in OPERATORS.iter().filter(|(.., on_cpu)| *on_cpu || context.is_cuda()) {
                let wanted = match rule {
                    Some(true) => kind,
                    Some(false) => Kind::Float,
                    None => input,
                };
                let found = cast.run(|| operator(&x))??.f_kind()?;
                if found != wanted {
                    wrong.push(format!("{name} of {input:?} in {kind:?}: {found:?}, not {wanted:?} ({on_cpu})"));
                }
                num_rows += 1;
            }
        }
    }
    let num_right = num_rows - wrong.len();
    context.close(
        &format!("results with the right dtype; others are {wrong:?}"),
        num_right as f64,
        num_rows as f64,
        0.0,
    )?;
    // The accelerator's own switch, on and off.
    let accelerator = context.builder().mixed_precision(MixedPrecision::Bf16).build()?;
    let x = wave(&[8, 8], 0.1)?.f_to_device(context.device)?;
    let product = || Ok(x.f_matmul(&x)?.f_kind()?);
    let off = AutocastKwargs { enabled: Some(false), ..Default::default() };
    ensure!(accelerator.autocast(None, product)? == Kind::BFloat16, "the accelerator's autocast is off");
    ensure!(accelerator.autocast(off, product)? == Kind::Float, "the accelerator's autocast cannot be switched off");
    // Two kinds, and of each inputs of both.
    let wanted = 4 * OPERATORS.iter().filter(|(.., on_cpu)| *on_cpu || context.is_cuda()).count();
    ensure!(num_rows == wanted, "{num_rows} results of {wanted}");
    Found::figure(format!("{num_rows} rows"))
}

/// bfloat16 keeps 8 bits, 4e-3 of a number; losses are means over 128 tokens, so a tenth of that is what they move by and
/// 2e-2 of a loss around 6 leaves room for 20 steps.
pub(crate) fn bf16(context: &Context<'_>) -> Result<Found> {
    let plain = train(&context.accelerator()?, 20, None)?;
    let accelerator = context.builder().mixed_precision(MixedPrecision::Bf16).build()?;
    let rounded = train(&accelerator, 20, None)?;
    ensure!(rounded.losses != plain.losses, "bfloat16 has the losses of float32 to the bit, so it was not in use");
    ensure!(rounded.losses.last() < rounded.losses.first(), "the loss did not fall: {:?}", rounded.losses);
    let difference = context.all_close("loss of step", &rounded.losses, &plain.losses, 2e-2)?;
    Found::figure(format!("losses within {difference:.1e} of float32"))
}

/// A GPU adds up in another order, and with fewer bits in the forward pass, than the CPU, which multiplies what the codes mean. So a
/// code differs here and there, by an eighth of a number among 48; losses around 5 move less than in bfloat16 without FP8, whose
/// bound this is.
pub(crate) fn fp8(context: &Context<'_>) -> Result<Found> {
    let ao = |recipe| FP8RecipeKwargs::from(AORecipeKwargs { recipe_name: Some(recipe), ..Default::default() });
    let recipes = [
        ("tensorwise", ao(Float8LinearRecipeName::Tensorwise)),
        ("rowwise", ao(Float8LinearRecipeName::Rowwise)),
        ("rowwise_with_gw_hp", ao(Float8LinearRecipeName::RowwiseWithGwHp)),
        ("delayed", TERecipeKwargs::default().into()),
    ];
    let bf16 = train(&context.builder().mixed_precision(MixedPrecision::Bf16).build()?, 20, None)?;
    let mut figures = Vec::new();
    for (name, recipe) in recipes {
        let fp8 = |builder: AcceleratorBuilder| {
            builder.mixed_precision(MixedPrecision::Fp8).kwargs_handler(recipe.clone()).build()
        };
        let accelerator = match fp8(context.builder()) {
            Ok(accelerator) => accelerator,
            Err(error) if context.is_cuda() && error.is_config() && error.to_string().contains("8.9") => {
                return Found::not_here("this GPU cannot multiply FP8 numbers, as the error says");
            }
            Err(error) => return Err(error.into()),
        };
        let found = train(&accelerator, 20, None)?;
        let wanted = train(&fp8(Accelerator::builder().cpu(true))?, 20, None)?;
        ensure!(found.losses != bf16.losses, "{name} has the losses of bfloat16 to the bit, so it was not in use");
        ensure!(found.losses.last() < found.losses.first(), "{name}: the loss did not fall: {:?}", found.losses);
        let difference = context.all_close(&format!("{name}: loss of step"), &found.losses, &wanted.losses, 2e-2)?;
        figures.push(format!("{name} {difference:.1e}"));
    }
    Found::figure(format!("losses within {}", figures.join(", ")))
}

/// Forward and backward of four square layers, milliseconds. Rows and columns are as many as FP8 is made for.
pub(crate) fn fp8_speed(context: &Context<'_>) -> Result<Found> {
    const WIDTH: i64 = 8192;
    const NUM_TIMED: usize = 10;
    if !context.is_cuda() {
        return Found::not_here("it is about a GPU's time");
    }
    let millis = |builder: AcceleratorBuilder| -> Result<f64> {
        let accelerator = builder.build()?;
        let store = ParamStore::new(context.device);
        let plain = LinearConfig { bias: false, ..Default::default() };
        let layer = |index: usize| Linear::new(store.root() / index, WIDTH, WIDTH, plain);
        let layers = (0..4).map(layer).collect::<accelerate::Result<Vec<_>>>()?;
        let model = ModuleFn::new(&store, move |x: &Tensor| {
            layers.iter().try_fold(x.shallow_clone(), |x, layer| layer.forward(&x))
        });
        let model = accelerator.prepare(model)?;
        let input =
            wave(&[1, WIDTH], 0.3)?.f_expand([WIDTH, WIDTH], false)?.f_to_device(context.device)?.f_contiguous()?;
        let step = || -> Result<()> {
            let loss = model.forward(&input)?.f_to_kind(Kind::Float)?.f_square()?.f_mean(Kind::Float)?;
            Ok(accelerator.backward(&loss)?)
        };
        for _ in 0..3 {
            step()?;
        }
        synchronize(context.device)?;
        let start = Instant::now();
        for _ in 0..NUM_TIMED {
            step()?;
        }
        synchronize(context.device)?;
        Ok(1e3 * start.elapsed().as_secs_f64() / NUM_TIMED as f64)
    };
    let plain = millis(context.builder().mixed_precision(MixedPrecision::Bf16))?;
    let mut figures = vec![format!("bf16 {plain:.1} ms")];
    let ao = |recipe| FP8RecipeKwargs::from(AORecipeKwargs { recipe_name: Some(recipe), ..Default::default() });
    for (name, recipe) in [
        ("tensorwise", ao(Float8LinearRecipeName::Tensorwise)),
        ("rowwise", ao(Float8LinearRecipeName::Rowwise)),
        ("delayed", TERecipeKwargs::default().into()),
    ] {
        let builder = context.builder().mixed_precision(MixedPrecision::Fp8).kwargs_handler(recipe);
        figures.push(format!("{name} {:.1}", millis(builder)?));
    }
    Found::figure(format!("4 layers, 8192 x 8192 x 8192: {}", figures.join(", ")))
}

pub(crate) fn fp16_scaler(context: &Context<'_>) -> Result<Found> {
    const INITIAL: f64 = 1024.0;
    let kwargs = GradScalerKwargs { init_scale: Some(INITIAL), growth_interval: Some(2), ..Default::default() };
    let accelerator = context.builder().mixed_precision(MixedPrecision::Fp16).kwargs_handler(kwargs).build()?;
    let store = ParamStore::new(accelerator.device());
    let weight = store.root().param("weight", ([4], Init::Ones))?;
    let optimizer = Sgd::new(&store, 0.25)?;
    let model = ModuleFn::new(&store, {
        let weight = weight.clone();
        move |x: &Tensor| Ok(weight.get()?.f_mul(x)?)
    });
    let (model, mut optimizer) = accelerator.prepare((model, optimizer))?;
    let x = Tensor::f_ones([4], (Kind::Float, accelerator.device()))?;
    // Good and bad steps, the scale that each backward pass has, and the weight after each step.
    let rows = [
        (true, INITIAL, 0.75),
        (false, INITIAL, 0.75),
        (true, INITIAL / 2.0, 0.5),
        (true, INITIAL / 2.0, 0.25),
        (false, INITIAL, 0.25),
        (false, INITIAL / 2.0, 0.25),
        (true, INITIAL / 4.0, 0.0),
    ];
    for (step, (is_good, scale, value)) in rows.into_iter().enumerate() {
        let loss = model.forward(&x)?.f_sum(Kind::Float)?;
        accelerator.backward(&loss.f_mul_scalar(if is_good { 1.0 } else { f64::INFINITY })?)?;
        let gradient = weight.grad().context("no gradient")?.f_double_value(&[0])?;
        let wanted = if is_good { scale } else { f64::INFINITY };
        ensure!(gradient == wanted, "step {step}: the gradient is scaled by {gradient}, not {wanted}");
        optimizer.step()?;
        ensure!(optimizer.step_was_skipped() != is_good, "step {step}: skipped is {}", !is_good);
        optimizer.zero_grad()?;
        context.close(&format!("the weight after step {step}"), weight.get()?.f_double_value(&[0])?, value, 1e-6)?;
    }
    let trained = train(&accelerator, 12, None)?;
    ensure!(trained.losses.last() < trained.losses.first(), "the loss did not fall: {:?}", trained.losses);
    Found::figure("3 of 7 steps skipped, scale 1024 to 256")
}
