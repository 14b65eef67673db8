//! Outputs and gradients of one layer, to the bit.

use super::transcription::{Delayed, DelayedLinear, Results, dynamic_linear};
use super::{INPUTS, Middle, OUTPUTS, builder, in_8_bits, in_32_bits, same, wave};
use accelerate::nn::{Linear, Module, ModuleFn, ParamStore};
use accelerate::tch::{Device, Kind, Tensor};
use accelerate::{
    AORecipeKwargs, Accelerator, AmaxComputeAlgorithm, FP8Format, FP8RecipeKwargs, MixedPrecision, PreparedModel,
    Result, TERecipeKwargs,
};
use rstest::rstest;

const ROWS: i64 = 24;

/// One pass of the prepared model with an input and a gradient of this size.
fn pass(accelerator: &Accelerator, model: &PreparedModel<Middle>, x: &Tensor, gradient: &Tensor) -> Results {
    let x = x.detach().set_requires_grad(true);
    let middle = &model.middle;
    middle.weight.local().zero_grad();
    middle.bias.as_ref().unwrap().local().zero_grad();
    let output = model.forward(&x).unwrap();
    accelerator.backward(&(&output * gradient).sum(Kind::Float)).unwrap();
    Results {
        output: output.detach(),
        of_input: x.grad(),
        of_weight: middle.weight.grad().unwrap(),
        of_bias: middle.bias.as_ref().unwrap().grad().unwrap(),
    }
}

#[track_caller]
fn all_same(step: usize, found: &Results, wanted: &Results) {
    // Outputs of a model are 32 bits, and so is the gradient of an input that is.
    same(&format!("step {step}: output"), &found.output, &wanted.output.to_kind(Kind::Float));
    same(&format!("step {step}: input"), &found.of_input, &wanted.of_input.to_kind(Kind::Float));
    same(&format!("step {step}: weight"), &found.of_weight, &wanted.of_weight);
    same(&format!("step {step}: bias"), &found.of_bias, &wanted.of_bias);
}

fn prepared(recipe: FP8RecipeKwargs) -> (Accelerator, PreparedModel<Middle>) {
    let accelerator = builder(recipe).cpu(true).build().unwrap();
    let model = accelerator.prepare(Middle::new()).unwrap();
    assert_eq!(in_8_bits(model.params()), ["middle"]);
    (accelerator, model)
}

#[rstest]
fn dynamic_scaling_is_that_of_torchao(
    #[values("tensorwise", "rowwise", "rowwise_with_gw_hp")] recipe: &str,
    #[values(Kind::Float, Kind::BFloat16)] kind: Kind,
    #[values(1.0, 1e-3, 1e5, 0.0)] size: f64,
) {
    let kwargs = AORecipeKwargs { recipe_name: Some(recipe.parse().unwrap()), ..Default::default() };
    let kwargs = if kind == Kind::Float { in_32_bits(kwargs) } else { kwargs.into() };
    let (accelerator, model) = prepared(kwargs);
    let x = wave(&[ROWS, INPUTS], 0.1) * size;
    let gradient = wave(&[ROWS, OUTPUTS], 0.2) * size;
    let found = pass(&accelerator, &model, &x, &gradient);
    let (weight, bias) = (model.middle.weight.get().unwrap(), model.middle.bias.as_ref().unwrap().get().unwrap());
    all_same(0, &found, &dynamic_linear(recipe, kind, [&x, &weight, &bias, &gradient]));
}

const RECIPE: Delayed = Delayed { margin: 0, interval: 1, is_hybrid: true, length: 4, is_most_recent: true };

fn kwargs(recipe: Delayed) -> TERecipeKwargs {
    let algorithm = if recipe.is_most_recent { AmaxComputeAlgorithm::MostRecent } else { AmaxComputeAlgorithm::Max };
    TERecipeKwargs {
        margin: Some(recipe.margin as usize),
        interval: Some(recipe.interval),
        fp8_format: Some(if recipe.is_hybrid { FP8Format::Hybrid } else { FP8Format::E4M3 }),
        amax_history_len: Some(recipe.length),
        amax_compute_algo: Some(algorithm),
        use_autocast_during_eval: None,
    }
}

/// Sizes rise and fall, so that values overflow under old scales, and scales rise again when histories forget.
#[rstest]
#[case::most_recent(RECIPE)]
#[case::largest(Delayed { is_most_recent: false, ..RECIPE })]
#[case::one_format(Delayed { is_hybrid: false, ..RECIPE })]
#[case::margin(Delayed { margin: 2, ..RECIPE })]
#[case::interval(Delayed { interval: 3, is_most_recent: false, ..RECIPE })]
#[case::no_memory(Delayed { length: 1, ..RECIPE })]
fn delayed_scaling_is_that_of_transformer_engine(
    #[case] recipe: Delayed,
    #[values(Kind::Float, Kind::BFloat16)] kind: Kind,
) {
    let given: FP8RecipeKwargs = kwargs(recipe).into();
    let (accelerator, model) = prepared(if kind == Kind::Float { in_32_bits(given) } else { given });
    let mut wanted = DelayedLinear::new(recipe);
    let (weight, bias) = (model.middle.weight.get().unwrap(), model.middle.bias.as_ref().unwrap().get().unwrap());
    for (step, size) in [1.0, 700.0, 3.0, 0.01, 0.02, 0.01, 0.5, 0.0, 1e5, 1.0].into_iter().enumerate() {
        let (x, gradient) = (wave(&[ROWS, INPUTS], step as f64) * size, wave(&[ROWS, OUTPUTS], 0.5) * size);
        let found = pass(&accelerator, &model, &x, &gradient);
        all_same(step, &found, &wanted.pass(kind, [&x, &weight, &bias, &gradient]));
        // A tensor of zeros is like a layer that was not used: TransformerEngine's kernel passes over it.
        if size > 0.0 {
            wanted.update();
            continue;
        }
        wanted.histories[1].clone_from(&{
            let mut weight_only = wanted.clone();
            weight_only.update();
            weight_only.histories[1].clone()
        });
    }
}

#[test]
fn evaluation_is_in_8_bits_only_where_that_is_asked_for() {
    let x = wave(&[ROWS, INPUTS], 0.3);
    let outputs = |during_eval| {
        let recipe = TERecipeKwargs { use_autocast_during_eval: Some(during_eval), ..Default::default() };
        let (_accelerator, model) = prepared(in_32_bits(recipe));
        let training = model.forward(&x).unwrap();
        model.params().eval();
        let dense =
            x.linear(&model.middle.weight.get().unwrap(), model.middle.bias.as_ref().map(|it| it.get().unwrap()));
        let evaluation = tch::no_grad(|| model.forward(&x).unwrap());
        (evaluation == training, evaluation == dense)
    };
    assert_eq!(outputs(false), (false, true));
    assert_eq!(outputs(true), (true, false));
}

/// The first and the last layer, and those with a size that 16 does not divide, compute as before.
#[test]
fn layers_that_take_no_part_are_left_alone() -> Result<()> {
    let accelerator = Accelerator::builder().cpu(true).mixed_precision(MixedPrecision::Fp8).build()?;
    let store = ParamStore::new(Device::Cpu);
    let sizes = [16, 32, 48, 40, 32, 32, 16];
    let layers: Vec<Linear> = sizes
        .windows(2)
        .enumerate()
        .map(|(number, sizes)| Linear::new(store.root() / number, sizes[0], sizes[1], Default::default()))
        .collect::<Result<_>>()?;
    let model = ModuleFn::new(&store, move |x: &Tensor| {
        layers.iter().try_fold(x.shallow_clone(), |x, layer| Ok(layer.forward(&x)?.relu()))
    });
    let model = accelerator.prepare(model)?;
    assert_eq!(in_8_bits(&store), ["1", "4"]);
    // 3 dims, and an error that names the layer.
    let output = model.forward(&wave(&[2, 3, 16], 0.0))?;
    assert_eq!((output.size(), output.kind()), (vec![2, 3, 16], Kind::Float));
    // An accelerator without FP8 gives the layers their own product again.
    let plain = Accelerator::builder().cpu(true).build()?;
    plain.prepare(model.into_inner())?;
    assert_eq!(in_8_bits(&store), [""; 0]);
    Ok(())
}

#[test]
fn an_input_that_does_not_fit_names_the_layer() {
    for recipe in [FP8RecipeKwargs::from(AORecipeKwargs::default()), TERecipeKwargs::default().into()] {
        let (_accelerator, model) = prepared(recipe);
        let error = model.forward(&wave(&[2, 7], 0.0)).unwrap_err().to_string();
        assert!(error.contains("the layer middle computes in FP8") && error.contains("[.., 32]"), "{error}");
        assert_eq!(model.forward(&wave(&[0, INPUTS], 0.0)).unwrap().size(), [0, OUTPUTS]);
    }
}
