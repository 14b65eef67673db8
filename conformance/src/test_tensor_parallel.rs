//! Tensor parallelism on processes, each with random numbers of its own: ranks that compute one model together draw the same ones. The
//! reference has no such script.

use accelerate::nn::{Checkpointed, Dropout, Embedding, LayerNorm, Linear, Module, ModuleFn, ParamStore};
use accelerate::optim::{Optimizer, Sgd};
use accelerate::tch::{self, Device, Kind, Tensor};
use accelerate::{Accelerator, Result, TorchTensorParallelPlugin, main_println};
use anyhow::{Context, ensure};

pub(crate) fn run() -> anyhow::Result<()> {
    let first = Accelerator::builder().cpu(true).build()?;
    let plan = serde_json::json!({ "up": "colwise", "down": "rowwise" });
    let plugin = TorchTensorParallelPlugin {
        tensor_parallel_degree: Some(first.num_processes()),
        parallelize_plan: plan.as_object().cloned(),
        ..Default::default()
    };
    let accelerator = Accelerator::builder().torch_tp_plugin(plugin).build_from(&first)?;
    ranks_drop_the_same_elements(&accelerator)?;
    ranks_that_draw_for_other_sizes_are_told(&accelerator)?;
    ranks_that_divide_tokens_drop_what_one_rank_drops(&first)?;
    main_println!(accelerator, "test_tensor_parallel: all checks passed");
    Ok(())
}

fn input() -> Tensor {
    Tensor::arange(24, (Kind::Float, Device::Cpu)).sin().view([6, 4])
}

/// Seeds differ, and rank 0 draws alone between two steps.
fn ranks_drop_the_same_elements(accelerator: &Accelerator) -> anyhow::Result<()> {
    let store = ParamStore::new(accelerator.device());
    let up = Linear::new(store.root() / "up", 4, 8, Default::default())?;
    let down = Linear::new(store.root() / "down", 8, 4, Default::default())?;
    let dropout = Dropout::new(store.root(), 0.5)?;
    let bias = down.bias.clone().context("the layer has a bias")?;
    let model = ModuleFn::new(&store, move |x: &Tensor| dropout.forward(&down.forward(&up.forward(x)?.f_tanh()?)?));
    let (model, mut optimizer) = accelerator.prepare((model, Sgd::new(&store, 0.1)?))?;
    tch::manual_seed(100 + accelerator.process_index() as i64);
    for _step in 0..3 {
        let output = model.forward(&input())?;
        ensure!(output.f_eq_tensor(&output.zeros_like())?.any().int64_value(&[]) == 1, "nothing was dropped");
        ensure!(are_same(accelerator, &output)?, "ranks have dropped other elements");
        accelerator.backward(&output.square().sum(Kind::Float))?;
        optimizer.step()?;
        optimizer.zero_grad()?;
        ensure!(
            are_same(accelerator, &bias.local().f_detach()?)?,
            "a parameter that all ranks have is another one on each"
        );
        if accelerator.is_main_process() {
            let _alone = Tensor::rand([3], (Kind::Float, Device::Cpu));
        }
    }
    Ok(())
}

/// A noise for each feature between the divided layers, of which the first rank has one more.
fn ranks_that_draw_for_other_sizes_are_told(accelerator: &Accelerator) -> anyhow::Result<()> {
    let features = 40 * accelerator.num_processes() as i64 + 1;
    let store = ParamStore::new(accelerator.device());
    let up = Linear::new(store.root() / "up", 4, features, Default::default())?;
    let down = Linear::new(store.root() / "down", features, 4, Default::default())?;
    let model = accelerator.prepare(ModuleFn::new(&store, move |x: &Tensor| {
        let inner = up.forward(x)?;
        down.forward(&inner.f_add(&inner.f_rand_like()?)?)
    }))?;
    let outcome = model.forward(&input());
    if accelerator.num_processes() == 1 {
        return Ok(outcome.map(drop)?);
    }
    let text = outcome.err().context("nobody was told that ranks have drawn different numbers")?.to_string();
    ensure!(text.contains("have drawn different random numbers"), "{text}");
    Ok(())
}

/// With and without activations that are computed again.
fn ranks_that_divide_tokens_drop_what_one_rank_drops(first: &Accelerator) -> anyhow::Result<()> {
    let plan = serde_json::json!({
        "embed": "embedding_rowwise", "drop": "sequence_parallel", "block.norm": "sequence_parallel", "block.up": "colwise",
        "block.down": "rowwise", "block.dropout": "sequence_parallel", "head": "colwise_gather_output",
    });
    let plugin = TorchTensorParallelPlugin {
        tensor_parallel_degree: Some(first.num_processes()),
        parallelize_plan: plan.as_object().cloned(),
        ..Default::default()
    };
    let accelerator = Accelerator::builder().torch_tp_plugin(plugin).build_from(first)?;
    for checkpoints in [false, true] {
        let (store, module) = model_of_tokens(checkpoints)?;
        let mut optimizer = Sgd::new(&store, 0.1)?;
        let wanted = three_steps(
            &store,
            |tokens| module.forward(tokens),
            |loss| {
                loss.f_backward()?;
                optimizer.step()?;
                optimizer.zero_grad()
            },
        )?;
        let (store, module) = model_of_tokens(checkpoints)?;
        let (model, mut optimizer) = accelerator.prepare((module, Sgd::new(&store, 0.1)?))?;
        let found = three_steps(
            &store,
            |tokens| model.forward(tokens),
            |loss| {
                accelerator.backward(loss)?;
                optimizer.step()?;
                optimizer.zero_grad()
            },
        )?;
        for (place, (found, wanted)) in found.iter().zip(&wanted).enumerate() {
            let largest = found.f_sub(wanted)?.f_abs()?.f_max()?.double_value(&[]);
            // Processors add up products in other orders, and round at the last digits of what is large.
            let size = wanted.f_abs()?.f_max()?.double_value(&[]).max(1.0);
            ensure!(largest < 1e-5 * size, "value {place} differs by {largest:e} (recomputed: {checkpoints})");
        }
    }
    Ok(())
}

fn model_of_tokens(checkpoints: bool) -> Result<(ParamStore, impl Module<Input = Tensor, Output = Tensor>)> {
    let store = ParamStore::new(Device::Cpu);
    let root = store.root();
    let embed = Embedding::new(&root / "embed", 11, 8, Default::default())?;
    let drop = Dropout::new(&root / "drop", 0.4)?;
    let block = Checkpointed::new(&root / "block", |path| {
        let norm = LayerNorm::new(path / "norm", [8], Default::default())?;
        let up = Linear::new(path / "up", 8, 8, Default::default())?;
        let down = Linear::new(path / "down", 8, 8, Default::default())?;
        Ok((norm, up, down, Dropout::new(path / "dropout", 0.4)?))
    })?;
    let head = Linear::new(&root / "head", 8, 11, Default::default())?;
    for (index, param) in store.parameters().iter().enumerate() {
        let values = Tensor::arange(param.numel() as i64, (Kind::Float, Device::Cpu)) * 0.7 + index as f64;
        param.copy_(&values.sin().reshape(param.shape()))?;
    }
    if checkpoints {
        store.gradient_checkpointing_enable(Default::default())?;
    }
    let module = ModuleFn::new(&store, move |tokens: &Tensor| {
        let x = drop.forward(&embed.forward(tokens)?)?;
        let x = block.call(&[&x], |(norm, up, down, dropout), inputs| {
            let inner = up.forward(&norm.forward(&inputs[0])?)?.f_tanh()?;
            Ok(dropout.forward(&down.forward(&inner)?)?.f_add(&inputs[0])?)
        })?;
        head.forward(&x)
    });
    Ok((store, module))
}

/// Outputs, and parameters after the last step. Seven tokens divide evenly among no more than one rank.
fn three_steps(
    store: &ParamStore,
    forward: impl Fn(&Tensor) -> Result<Tensor>,
    mut step: impl FnMut(&Tensor) -> Result<()>,
) -> Result<Vec<Tensor>> {
    let tokens = (Tensor::arange(14, (Kind::Int64, Device::Cpu)) * 3).remainder(11).view([2, 7]);
    tch::manual_seed(5);
    let mut found = Vec::new();
    for _step in 0..3 {
        let output = forward(&tokens)?;
        step(&output.f_square()?.f_mean(Kind::Float)?)?;
        found.push(output.f_detach_copy()?);
    }
    found.extend(store.state_dict()?.iter().map(|(_, tensor)| tensor.copy()));
    Ok(found)
}

fn are_same(accelerator: &Accelerator, tensor: &Tensor) -> Result<bool> {
    let all = accelerator.group().all_gather(tensor)?;
    Ok(all.iter().all(|other| *other == all[0]))
}
