//! Checkpoints of runs in float16, whose gradients are scaled, or have been divided by the scale already.

use crate::error::Result;
use crate::nn::{Init, ModuleFn, ParamStore};
use crate::optim::{AcceleratedOptimizer, Sgd};
use crate::{Accelerator, GradScalerKwargs, MixedPrecision, PreparedModel};
use tch::{Kind, Tensor};

type Forward = Box<dyn Fn(&Tensor) -> Result<Tensor>>;
type Model = PreparedModel<ModuleFn<Forward, Tensor, Tensor>>;

struct Run {
    accelerator: Accelerator,
    store: ParamStore,
    model: Model,
    optimizer: AcceleratedOptimizer<Sgd>,
}

fn start() -> Result<Run> {
    let scaler = GradScalerKwargs { init_scale: Some(1024.0), ..Default::default() };
    let builder = Accelerator::builder().cpu(true).mixed_precision(MixedPrecision::Fp16).kwargs_handler(scaler);
    let accelerator = builder.build()?;
    let store = ParamStore::new(accelerator.device());
    let weight = store.root().param("weight", ([2], Init::Ones))?;
    let optimizer = Sgd::new(&store, 0.5)?;
    let forward: Forward = Box::new(move |x| Ok((x * weight.get()?).sum(Kind::Float)));
    let model = ModuleFn::new(&store, forward);
    let (model, optimizer) = accelerator.prepare((model, optimizer))?;
    Ok(Run { accelerator, store, model, optimizer })
}

impl Run {
    fn backward(&self, x: f32) -> Result<()> {
        self.accelerator.backward(&self.model.forward(&Tensor::from_slice(&[x, 2.0 * x]))?)
    }

    fn step(&mut self) -> Result<Vec<f32>> {
        self.optimizer.step()?;
        self.optimizer.zero_grad()?;
        Ok(Vec::try_from(self.store.parameters()[0].local())?)
    }
}

#[test]
fn what_was_done_to_gradients_before_a_state_is_loaded_does_not_count_for_those_after_it() {
    let folder = tempfile::tempdir().unwrap();
    let run = |disturbed: bool| -> Result<Vec<f32>> {
        let mut run = start()?;
        run.backward(0.25)?;
        run.step()?;
        run.accelerator.save_state(folder.path())?;
        if disturbed {
            run.backward(3.0)?;
            run.accelerator.clip_grad_norm_(&run.model, 1.0)?;
        }
        run.accelerator.load_state(folder.path())?;
        run.backward(0.125)?;
        run.accelerator.clip_grad_norm_(&run.model, 100.0)?;
        run.step()
    };
    let wanted = run(false).unwrap();
    assert_eq!(wanted, [1.0 - 0.125 - 0.0625, 1.0 - 0.25 - 0.125]);
    assert_eq!(run(true).unwrap(), wanted);
}

#[test]
fn gradients_that_wait_for_a_step_are_divided_by_the_scale_that_they_were_made_with() {
    let folder = tempfile::tempdir().unwrap();
    let mut first = start().unwrap();
    first.backward(0.25).unwrap();
    first.accelerator.save_state(folder.path()).unwrap();
    let wanted = first.step().unwrap();
    for clips in [false, true] {
        let mut second = start().unwrap();
        second.accelerator.load_state(folder.path()).unwrap();
        if clips {
            second.accelerator.clip_grad_norm_(&second.model, 100.0).unwrap();
        }
        assert_eq!(second.step().unwrap(), wanted, "{clips}");
    }
}

#[test]
fn gradients_that_have_been_divided_and_not_used_are_not_saved() {
    let folder = tempfile::tempdir().unwrap();
    let mut run = start().unwrap();
    run.backward(0.25).unwrap();
    run.accelerator.clip_grad_norm_(&run.model, 1.0).unwrap();
    let error = run.accelerator.save_state(folder.path()).unwrap_err();
    assert!(error.is_checkpoint() && error.to_string().contains("divided by the loss scale"), "{error}");
    run.step().unwrap();
    run.accelerator.save_state(folder.path()).unwrap();
}
