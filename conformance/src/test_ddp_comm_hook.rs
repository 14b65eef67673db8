//! `test_ddp_comm_hook.py`: what gradients are after a communication hook.
//!
//! The reference compares with plain averages to 1e-2, where all entries are smaller, and never takes a step in which
//! PowerSGD compresses. Here entries are around 1, PowerSGD compresses from the third step on, and each hook has to leave
//! its trace.

use accelerate::nn::{Init, ModuleFn, ParamStore};
use accelerate::optim::Sgd;
use accelerate::tch::{Kind, Tensor};
use accelerate::{Accelerator, DDPCommunicationHookType as Hook, DistributedDataParallelKwargs, main_println};
use anyhow::{Result, ensure};
use serde_json::json;

/// The one parameter is a square matrix, so that the hooks that compress tensors and those that compress buckets see the
/// same; of this side four columns still save half.
const SIDE: i64 = 30;
/// Steps with plain averages.
const START: usize = 2;

pub(crate) fn run() -> Result<()> {
    let accelerator = Accelerator::builder().cpu(true).build()?;
    for hook in [Hook::No, Hook::Fp16, Hook::Bf16, Hook::PowerSgd, Hook::BatchedPowerSgd] {
        for wrapper in [Hook::No, Hook::Fp16, Hook::Bf16] {
            test_ddp_comm_hook(&accelerator, hook, wrapper)?;
        }
    }
    test_error_feedback(&accelerator, Hook::PowerSgd)?;
    test_error_feedback(&accelerator, Hook::BatchedPowerSgd)?;
    main_println!(accelerator, "test_ddp_comm_hook: all checks passed");
    Ok(())
}

/// Each rank's loss has a gradient of rank 1, in rows of its own and with columns of its own: those of two ranks are
/// orthogonal, so that half precision does not mix them up.
fn local_gradient(rank: usize) -> Result<Tensor> {
    let entries = |salt: usize| -> Vec<f32> {
        let entry = |index: usize| 0.5 + ((index * 37 + salt) % 101) as f32 / 101.0;
        (0..SIDE as usize).map(|index| if index % 4 == rank { entry(index) } else { 0.0 }).collect()
    };
    Ok(Tensor::f_from_slice(&entries(11))?.f_outer(&Tensor::f_from_slice(&entries(53))?)?)
}

fn mean_gradient(accelerator: &Accelerator) -> Result<Tensor> {
    let mut sum = Tensor::f_zeros([SIDE, SIDE], (Kind::Float, accelerate::tch::Device::Cpu))?;
    for rank in 0..accelerator.num_processes() {
        sum = sum.f_add(&local_gradient(rank)?)?;
    }
    Ok(sum.f_div_scalar(accelerator.num_processes() as f64)?)
}

/// The gradients that steps with a hook leave in the parameter, the same on all ranks.
fn gradients(accelerator: &Accelerator, kwargs: DistributedDataParallelKwargs, steps: usize) -> Result<Vec<Tensor>> {
    let configured = Accelerator::builder().kwargs_handler(kwargs).build_from(accelerator)?;
    let store = ParamStore::new(configured.device());
    let param = store.root().param("p", ([SIDE, SIDE], Init::Zeros))?;
    let optimizer = Sgd::new(&store, 0.1)?;
    let model = ModuleFn::new(&store, {
        let param = param.clone();
        move |x: &Tensor| Ok(param.get()?.f_mul(x)?)
    });
    let (model, mut optimizer) = configured.prepare((model, optimizer))?;
    let input = local_gradient(configured.process_index())?;
    let mut gradients = Vec::new();
    for step in 0..steps {
        configured.backward(&model.forward(&input)?.f_sum(Kind::Float)?)?;
        let gradient = param.grad().map_or_else(|| Err(anyhow::anyhow!("no gradient")), |grad| Ok(grad.copy()))?;
        let everywhere = configured.gather(&gradient.f_unsqueeze(0)?)?;
        ensure!(
            everywhere.f_sub(&gradient)?.f_abs()?.f_max()?.f_double_value(&[])? == 0.0,
            "ranks differ in step {step}"
        );
        gradients.push(gradient);
        optimizer.zero_grad()?;
    }
    Ok(gradients)
}

fn kwargs(comm_hook: Hook, comm_wrapper: Hook, rank: usize) -> Result<DistributedDataParallelKwargs> {
    let compresses = matches!(comm_hook, Hook::PowerSgd | Hook::BatchedPowerSgd);
    let options = json!({"matrix_approximation_rank": rank, "start_powerSGD_iter": START});
    let comm_state_option = if compresses { serde_json::from_value(options)? } else { Default::default() };
    Ok(DistributedDataParallelKwargs {
        comm_hook: Some(comm_hook.into()),
        comm_wrapper: Some(comm_wrapper),
        comm_state_option,
        ..Default::default()
    })
}

fn largest_difference(a: &Tensor, b: &Tensor) -> Result<f64> {
    Ok(a.f_sub(b)?.f_abs()?.f_max()?.f_double_value(&[])?)
}

/// Is every entry a number of this kind, although the tensor is float32?
fn is_representable(tensor: &Tensor, kind: Kind) -> Result<bool> {
    Ok(tensor.f_to_kind(kind)?.f_to_kind(Kind::Float)?.f_equal(tensor)?)
}

/// The mean has as many independent columns as there are ranks, so compression to as many loses nothing.
fn test_ddp_comm_hook(accelerator: &Accelerator, hook: Hook, wrapper: Hook) -> Result<()> {
    let what = format!("comm_hook {hook}, comm_wrapper {wrapper}");
    let mean = mean_gradient(accelerator)?;
    let cast = match (hook, wrapper) {
        // A wrapper is around a hook, so without one there is nothing to wrap.
        (Hook::No, _) => None,
        (_, Hook::Bf16) | (Hook::Bf16, Hook::No) => Some((Kind::BFloat16, 4e-2)),
        (_, Hook::Fp16) | (Hook::Fp16, Hook::No) => Some((Kind::Half, 6e-3)),
        _ => None,
    };
    let tolerance = cast.map_or(2e-5, |(_, tolerance)| tolerance);
    let kwargs = kwargs(hook, wrapper, accelerator.num_processes())?;
    for (step, gradient) in gradients(accelerator, kwargs, START + 4)?.iter().enumerate() {
        let difference = largest_difference(gradient, &mean)?;
        ensure!(difference <= tolerance, "{what}: {difference} from the mean in step {step}");
        // One process sends nothing.
        if accelerator.num_processes() > 1 {
            let as_half = is_representable(gradient, Kind::Half)?;
            let as_bfloat16 = is_representable(gradient, Kind::BFloat16)?;
            let holds = match cast {
                None => !as_half && !as_bfloat16,
                Some((Kind::Half, _)) => as_half && !as_bfloat16,
                // Numbers of this size that bfloat16 has, float16 has, too.
                Some(_) => as_bfloat16,
            };
            ensure!(holds, "{what}, step {step}: float16's numbers {as_half}, bfloat16's {as_bfloat16}");
        }
    }
    Ok(())
}

/// One column is too few, so single steps are wrong, but what one leaves out the next ones make up for.
fn test_error_feedback(accelerator: &Accelerator, hook: Hook) -> Result<()> {
    let mean = mean_gradient(accelerator)?;
    let gradients = gradients(accelerator, kwargs(hook, Hook::No, 1)?, START + 32)?;
    let (plain, compressed) = gradients.split_at(START);
    for gradient in plain {
        ensure!(largest_difference(gradient, &mean)? < 1e-5, "{hook}: compresses before start_powerSGD_iter");
    }
    let mut sum = mean.f_zeros_like()?;
    for gradient in compressed {
        sum = sum.f_add(gradient)?;
    }
    let first = largest_difference(&compressed[0], &mean)?;
    let average = largest_difference(&sum.f_div_scalar(compressed.len() as f64)?, &mean)?;
    if accelerator.num_processes() > 1 {
        ensure!(first > 1e-2, "{hook}: one column is all of the mean; nothing was compressed");
    }
    ensure!(average <= first / 4.0 + 1e-5, "{hook}: single steps are {first} from the mean, their average {average}");
    Ok(())
}
