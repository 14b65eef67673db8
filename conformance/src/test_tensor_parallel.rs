//! Tensor parallelism on processes, each with random numbers of its own: ranks that compute one model together draw the same ones. The
//! reference has no such script.

use accelerate::nn::{Dropout, Linear, ModuleFn, ParamStore};
use accelerate::optim::Sgd;
use accelerate::tch::{self, Device, Kind, Tensor};
use accelerate::{Accelerator, Result, TorchTensorParallelPlugin, main_println};
use anyhow::{Context, ensure};

pub(crate) fn run() -> anyhow::Result<()> {
    let first = Accelerator::builder().cpu(true).build()?;
    let plan = serde_json::json!({ "up": "colwise", "down": "rowwise" });
    let plugin = TorchTensorParallelPlugin {
        tensor_parallel_degree: Some(first.num_processes()),
        parallelize_plan: plan.as_object().cloned(),
    };
    let accelerator = Accelerator::builder().torch_tp_plugin(plugin).build_from(&first)?;
    ranks_drop_the_same_elements(&accelerator)?;
    ranks_that_draw_for_other_sizes_are_told(&accelerator)?;
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

fn are_same(accelerator: &Accelerator, tensor: &Tensor) -> Result<bool> {
    let all = accelerator.group().all_gather(tensor)?;
    Ok(all.iter().all(|other| *other == all[0]))
}
