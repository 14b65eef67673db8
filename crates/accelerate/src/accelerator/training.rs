//! The training step: accumulation, backward, clipping.

use super::models::for_each_engine;
use super::{Accelerator, HasParameters};
use crate::data::DataLoader;
use crate::error::{OptimError, Result};
use crate::nn::{Param, ParamStore};
use crate::optim::{self, ClipGradNorm, TotalNorm};
use crate::session::{Engine, PreparedOptimizer};
use accelerate_core::config::AutocastKwargs;
use accelerate_core::schedule::{ScheduledPass, ticks_per_step};
use smallvec::SmallVec;
use std::sync::Arc;
use tch::Tensor;
use torch_ext::{foreach, scalar};

impl Accelerator {
    /// Runs the backward pass of a scalar loss.
    ///
    /// The loss is scaled so that, at the optimizer step, gradients are the *mean* over the micro-batches of
    /// the accumulation window, also in a window that the data cut short, and over ranks. With fp16 they are
    /// also multiplied by the loss scale until the optimizer steps. Collective where gradients synchronise.
    ///
    /// # Errors
    /// libtorch's; those of hooks; a peer that is gone or does not take part, by rank.
    #[track_caller]
    pub fn backward(&self, loss: &Tensor) -> Result<()> {
        let _called = crate::status::here();
        let session = self.session();
        self.tell_of_undivided_sequences();
        let objects = session.objects();
        let scaling = session.gradient_state.begin_backward();
        if let Some(factor) = scaling.rescale_accumulated {
            for model in objects.models() {
                scale_gradients(&model.store, factor)?;
                model.engine.scale_unreduced(factor)?;
            }
        }
        let mut scaled =
            if scaling.loss_scale == 1.0 { loss.shallow_clone() } else { scalar::mul(loss, scaling.loss_scale)? };
        if let Some(scaler) = self.scaler() {
            scaled = scaler.scale(&scaled)?;
        }
        let entered = session.group.enter_backward();
        torch_ext::autograd::backward(&[&scaled], None, Default::default())
            .map_err(|error| session.group.explain_reducer(error))?;
        drop(entered);
        objects.optimizers().for_each(|optimizer| optimizer.gradients_made());
        objects.models().try_for_each(|model| {
            model.engine.after_backward()?;
            model.scaling.as_ref().map_or(Ok(()), |scaling| scaling.after_backward())
        })
    }

    /// Runs the work on one micro-batch. Within it, optimizers, schedulers and `zero_grad` act only on the
    /// last micro-batch of a window; on the others gradients stay on their rank.
    ///
    /// ```
    /// use accelerate::{Accelerator, nn::{Linear, ModuleFn, ParamStore}, optim::Sgd, tch::Tensor};
    ///
    /// let accelerator = Accelerator::builder().cpu(true).gradient_accumulation_steps(2).build()?;
    /// let store = ParamStore::new(accelerator.device());
    /// let linear = Linear::new(store.root(), 1, 1, Default::default())?;
    /// let optimizer = Sgd::new(&store, 0.1)?;
    /// let model = ModuleFn::new(&store, move |input: &Tensor| linear.forward(input));
    /// let (model, mut optimizer) = accelerator.prepare((model, optimizer))?;
    /// let mut synced = Vec::new();
    /// for _ in 0..4 {
    ///     accelerator.accumulate(&model, || {
    ///         let loss = model.forward(&Tensor::from_slice(&[1f32]))?.sum(None);
    ///         accelerator.backward(&loss)?;
    ///         synced.push(accelerator.sync_gradients());
    ///         optimizer.step()?;
    ///         optimizer.zero_grad()
    ///     })?;
    /// }
    /// assert_eq!(synced, [false, true, false, true]);
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of `body`; a model that was not prepared; a DeepSpeed configuration whose number of micro-batches only a loader
    /// can tell, and none was prepared.
    pub fn accumulate<T>(&self, models: &(impl HasParameters + ?Sized), body: impl FnOnce() -> Result<T>) -> Result<T> {
        for_each_engine(models, "accumulate", &mut |_| {})?;
        self.deep_speed().map_or(Ok(()), |deep_speed| deep_speed.check_steps())?;
        let decision = self.session().gradient_state.begin_micro_batch();
        // Whoever keeps gradients local around this, `no_sync` or `LocalSGD`, goes on doing so.
        if decision.reduce { body() } else { self.no_sync(models, body) }
    }

    /// Runs `body` without averaging gradients over ranks; they accumulate on each rank.
    ///
    /// # Errors
    /// Those of `body`; a model that was not prepared.
    pub fn no_sync<T>(&self, models: &(impl HasParameters + ?Sized), body: impl FnOnce() -> Result<T>) -> Result<T> {
        let mut unsynchronised = Unsynchronised::default();
        for_each_engine(models, "no_sync", &mut |engine| {
            let sync = engine.set_gradient_sync(false);
            unsynchronised.before.push((engine.clone(), sync));
        })?;
        body()
    }

    /// Makes the next backward pass average gradients, although its forward pass ran under [`Accelerator::no_sync`]. The passes
    /// after it do as they would have done: the reference's context manager ends there.
    ///
    /// # Errors
    /// A model that was not prepared; a peer that is gone.
    #[track_caller]
    pub fn trigger_sync_in_backward(&self, model: &(impl HasParameters + ?Sized)) -> Result<()> {
        let _called = crate::status::here();
        let mut outcome = Ok(());
        for_each_engine(model, "trigger_sync_in_backward", &mut |engine| {
            if outcome.is_ok() {
                outcome = engine.trigger_sync_in_backward();
            }
        })?;
        outcome
    }

    /// Is this the micro-batch at whose end gradients are synchronised and optimizers step?
    pub fn sync_gradients(&self) -> bool {
        self.session().gradient_state.sync_gradients()
    }

    /// Overrides where gradients are synchronised, for loops that do not use [`Accelerator::accumulate`].
    pub fn set_sync_gradients(&self, sync: bool) {
        self.session().gradient_state.set_sync_gradients(sync);
    }

    /// Is the innermost prepared loader that is being iterated at its last batch?
    pub fn end_of_dataloader(&self) -> bool {
        self.session().gradient_state.end_of_dataloader()
    }

    /// Number of micro-batches of an accumulation window.
    pub fn gradient_accumulation_steps(&self) -> usize {
        self.session().gradient_state.num_steps()
    }

    /// Changes the number of micro-batches of coming windows.
    pub fn set_gradient_accumulation_steps(&self, steps: usize) -> Result<()> {
        self.session().gradient_state.set_num_steps(steps)?;
        if let Some(deep_speed) = self.deep_speed() {
            deep_speed.steps_are_said();
        }
        Ok(())
    }

    /// How many steps a schedule has to have so that it ends with a training loop of so many passes over the loader: what to give
    /// a schedule that is made before both are prepared. It counts as a prepared scheduler moves, so accumulation, the number of
    /// processes, split batches and the [`SchedulerUnit`](crate::SchedulerUnit) are in it.
    ///
    /// ```
    /// use accelerate::data::{DataLoader, VecDataset};
    /// use accelerate::testing;
    ///
    /// let builder = accelerate::Accelerator::builder().gradient_accumulation_steps(4);
    /// let steps = testing::ranks(2, builder, |accelerator| {
    ///     let loader = DataLoader::builder(VecDataset::new(vec![0i64; 80])).batch_size(2).build()?;
    ///     Ok(accelerator.num_training_steps(&loader, 3))
    /// })?;
    /// // 20 batches for each process, so 5 steps of the optimizer in each pass, by each of which the schedule moves by 2.
    /// assert_eq!(steps, [3 * 5 * 2; 2]);
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    pub fn num_training_steps<B: Send + 'static>(&self, loader: &DataLoader<B>, num_epochs: usize) -> usize {
        let (config, num_processes) = (self.config(), self.mesh().num_shares());
        let steps_with_optimizer = config.accelerator.step_scheduler_with_optimizer;
        let ticks_per_step = ticks_per_step(
            num_processes,
            config.dataloader.split_batches,
            steps_with_optimizer,
            config.accelerator.scheduler_unit,
        );
        let plugin = self.session().gradient_state.plugin();
        let pass = ScheduledPass {
            num_batches: loader.num_batches_when_prepared(num_processes, &config.dataloader),
            gradient_accumulation_steps: if steps_with_optimizer { plugin.num_steps } else { 1 },
            num_processes,
            ticks_per_step,
            adjust_scheduler: steps_with_optimizer && plugin.adjust_scheduler == Some(true),
        };
        pass.num_training_steps(num_epochs, plugin.sync_with_dataloader)
    }

    /// Runs `body` in the run's mixed precision, for computations outside of prepared models. `kwargs` are settings for this
    /// block alone, such as `enabled: false`; `None` stands for those of the run.
    ///
    /// ```
    /// use accelerate::{Accelerator, AutocastKwargs, MixedPrecision, tch::{Device, Kind, Tensor}};
    ///
    /// let accelerator = Accelerator::builder().cpu(true).mixed_precision(MixedPrecision::Bf16).build()?;
    /// let x = Tensor::ones([2, 2], (Kind::Float, Device::Cpu));
    /// assert_eq!(accelerator.autocast(None, || Ok(x.f_matmul(&x)?))?.kind(), Kind::BFloat16);
    /// let off = AutocastKwargs { enabled: Some(false), ..Default::default() };
    /// assert_eq!(accelerator.autocast(off, || Ok(x.f_matmul(&x)?))?.kind(), Kind::Float);
    /// # Ok::<(), accelerate::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of `body`.
    pub fn autocast<T>(
        &self,
        kwargs: impl Into<Option<AutocastKwargs>>,
        body: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        match kwargs.into() {
            Some(kwargs) => self.precision().autocast_with(&kwargs.into(), body)?,
            None => self.precision().autocast(body)?,
        }
    }

    /// Divides all gradients by the loss scale of fp16, once per step; nothing in other precisions. Collective where ranks have
    /// not reduced gradients of a sharded model yet, as all that looks at gradients.
    #[track_caller]
    pub fn unscale_gradients(&self) -> Result<()> {
        let _called = crate::status::here();
        self.session().complete_gradients()?;
        self.unscale_where(|_| true)
    }

    /// Other optimizers' gradients stay scaled: theirs may still be accumulating.
    fn unscale_where(&self, concerns: impl Fn(&dyn PreparedOptimizer) -> bool) -> Result<()> {
        let objects = self.session().objects();
        objects.optimizers().filter(|optimizer| concerns(&**optimizer)).try_for_each(|optimizer| optimizer.unscale())
    }

    /// Scales gradients so that their norm is at most a largest one, and returns the norm before (0-d, float). `clipping` is
    /// the largest 2-norm, or a [`ClipGradNorm`] for norms of another order.
    ///
    /// To be called where [`Accelerator::sync_gradients`] is true, when gradients are complete. Collective for a sharded model.
    ///
    /// # Errors
    /// The optimizer has stepped since the last backward pass; those of [`optim::clip_grad_norm_`](crate::optim::clip_grad_norm_).
    #[track_caller]
    pub fn clip_grad_norm_<P: HasParameters + ?Sized>(
        &self,
        parameters: &P,
        clipping: impl Into<ClipGradNorm>,
    ) -> Result<TotalNorm> {
        let _called = crate::status::here();
        let params = parameters.trainable_parameters();
        self.check_before_step("clip_grad_norm_", &params)?;
        self.session().complete_gradients()?;
        self.unscale_where(|optimizer| optimizer.trains_any_of(&params))?;
        optim::clip_grad_norm_(&params, clipping)
    }

    /// Limits every element of the gradients to `-clip_value..=clip_value`. Collective where ranks have not reduced gradients of
    /// a sharded model yet.
    #[track_caller]
    pub fn clip_grad_value_<P: HasParameters + ?Sized>(&self, parameters: &P, clip_value: f64) -> Result<()> {
        let _called = crate::status::here();
        let params = parameters.trainable_parameters();
        self.check_before_step("clip_grad_value_", &params)?;
        self.session().complete_gradients()?;
        self.unscale_where(|optimizer| optimizer.trains_any_of(&params))?;
        optim::clip_grad_value_(&params, clip_value)
    }

    /// Gradients are of use before the step. One optimizer of several that has not stepped yet is enough.
    fn check_before_step(&self, call: &'static str, params: &[Param]) -> Result<()> {
        let objects = self.session().objects();
        let mut concerned = objects.optimizers().filter(|optimizer| optimizer.trains_any_of(params)).peekable();
        match concerned.peek().map(|first| first.name()) {
            Some(optimizer) if concerned.all(|optimizer| optimizer.are_gradients_used()) => {
                Err(OptimError::ClippedAfterStep { call, optimizer }.into())
            }
            _ => Ok(()),
        }
    }

    /// Did the last step of any prepared optimizer leave the parameters alone because of an overflow?
    pub fn optimizer_step_was_skipped(&self) -> bool {
        self.session().objects().optimizers().any(|optimizer| optimizer.step_was_skipped())
    }
}

/// Engines that do not reduce gradients, until this is dropped: also by a panic, after which ranks would drift apart.
#[derive(Default)]
struct Unsynchronised {
    before: SmallVec<[(Arc<dyn Engine>, bool); 4]>,
}

impl Drop for Unsynchronised {
    fn drop(&mut self) {
        // The other way round: one model may be there twice.
        for (engine, sync) in self.before.drain(..).rev() {
            engine.set_gradient_sync(sync);
        }
    }
}

fn scale_gradients(store: &ParamStore, factor: f64) -> Result<()> {
    for grads in optim::gradients(&store.trainable_parameters())? {
        foreach::mul_scalar_(&grads.tensors, factor)?;
    }
    Ok(())
}
