//! Checkpoints that are copied to the host while the device still has work, and written while the training goes on.

use accelerate::nn::Module as _;
use accelerate::optim::AdamW;
use accelerate::tch::{Kind, Tensor};
use accelerate::{Accelerator, set_seed};
use anyhow::Result;

use crate::check::{Context, Found};
use crate::models::{Classifier, ROWS, loss_of, on_cpu, tokens};

/// The second save and the third use the memory of those before.
const NUM_SAVES: usize = 3;

/// The state on the host, copied tensor by tensor.
type State = Vec<(String, Tensor)>;

fn state_of(accelerator: &Accelerator) -> Result<State> {
    let states = accelerator.state_dict()?;
    let tensors = states.into_iter().flat_map(|(object, state)| {
        state.tensors.into_iter().map(move |(name, tensor)| (format!("{object} {name}"), tensor))
    });
    tensors.map(|(name, tensor)| Ok((name, tensor.f_to_device(accelerate::tch::Device::Cpu)?))).collect()
}

/// The device has work in its queue before each call, which the copy has to wait for, and more of it directly afterwards, which
/// must not reach the copy.
pub(crate) fn pinned(context: &Context<'_>) -> Result<Found> {
    set_seed(5);
    let accelerator = context.accelerator()?;
    let model = Classifier::new(accelerator.device())?;
    let store = model.params().clone();
    let optimizer = AdamW::new(&store, 2e-3)?;
    let (model, mut optimizer) = accelerator.prepare((model, optimizer))?;
    let busy = Tensor::f_ones([2048, 2048], (Kind::Float, context.device))?;
    let mut step = |number: usize| -> Result<()> {
        let (tokens, labels) = tokens(number, 0, ROWS, accelerator.device())?;
        accelerator.backward(&loss_of(&model.forward(&tokens)?, &labels)?)?;
        optimizer.step()?;
        optimizer.zero_grad()?;
        Ok(())
    };
    let folder = |number: usize| context.folder.join(number.to_string());
    let mut wanted: Vec<State> = Vec::new();
    for number in 0..NUM_SAVES {
        step(number)?;
        wanted.push(state_of(&accelerator)?);
        if context.is_cuda() {
            for _ in 0..20 {
                let _ = busy.f_matmul(&busy)?;
            }
        }
        accelerator.save_state_async(folder(number))?;
        for param in store.parameters() {
            param.copy_(&param.local().f_detach()?.f_mul_scalar(0.5)?)?;
        }
        step(number)?;
    }
    accelerator.wait_for_save()?;
    let mut num_bytes = 0;
    for (number, wanted) in wanted.iter().enumerate() {
        accelerator.load_state(folder(number))?;
        for ((name, found), (_, wanted)) in state_of(&accelerator)?.iter().zip(wanted) {
            context.same(&format!("save {number}: {name}"), found, wanted)?;
            num_bytes += found.numel() * found.kind().elt_size_in_bytes();
        }
    }
    let parameters = on_cpu(&store)?.len();
    Found::figure(format!("{NUM_SAVES} saves of {parameters} parameters and their moments, {} KB", num_bytes / 1000))
}
