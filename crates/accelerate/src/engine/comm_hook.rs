//! Communication hooks of the program's own: what becomes of a bucket of gradients between ranks.

use crate::error::{CollectiveError, Result, panic_text};
use crate::group::{Group, shape_text};
use accelerate_core::config::{Callback, DDPCommunicationHook};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use tch::Tensor;

/// A bucket of gradients as a [`CommHook`] sees it (`GradBucket` of `torch.distributed`).
///
/// The first backward pass has all gradients in one bucket and teaches the order in which they come; from the second one on,
/// buckets are about `bucket_cap_mb` large. With `find_unused_parameters` they are from the beginning.
///
/// The gradients are those of this rank alone. They are not divided by the number of ranks. As what this rank has accumulated
/// they are already the mean over the micro-batches of the window, and with fp16 they are multiplied by the loss scale. A rank
/// that is out of batches (`join_uneven_inputs`) takes part with zeros, or with what it has accumulated.
#[derive(Debug)]
pub struct GradBucket<'a> {
    /// All gradients of the bucket, `[num_elements]`, of the parameters' dtype or that of `comm_wrapper`. The hook may write to
    /// it.
    pub buffer: &'a Tensor,
    /// The same gradients one by one, each of its parameter's shape: views into `buffer`, in its order.
    pub gradients: &'a [Tensor],
    /// Which bucket of the backward pass it is, from 0; the same on all ranks.
    pub index: usize,
    /// Is it the last one?
    pub is_last: bool,
    /// The ranks whose gradients are to be combined, for the hook's own calls.
    pub group: &'a Group,
}

/// A function of a bucket of gradients, for `comm_hook` of
/// [`DistributedDataParallelKwargs`](crate::DistributedDataParallelKwargs). It takes the place of the average over ranks.
///
/// It is called in a [`backward`](crate::Accelerator::backward) that averages gradients, on the thread that called that, once for
/// each bucket, as soon as its gradients are there. All ranks call it for the same buckets in the same order, so it may make
/// collective calls on [`GradBucket::group`], and then every rank has to make the same ones. It runs without recording
/// gradients. On one process, and for a model that is prepared for evaluation, there is nothing to average, and it is not called.
///
/// What it returns are the gradients that the optimizer sees, on every rank the same if training is to go well: the *mean* over
/// ranks, flat as [`GradBucket::buffer`], of the same dtype and device. `None` leaves the mean of the buffer, as it then is, to
/// libtorch, which computes it while the backward pass goes on.
///
/// An error or a panic of the hook is the error of `backward` on that rank. The other ranks fail at the call in which they miss
/// it, at the latest when its deadline is over, and name the rank and its reason. Training cannot go on after that.
///
/// ```
/// use accelerate::nn::{Init, ModuleFn, ParamStore};
/// use accelerate::{Accelerator, CommHook, DistributedDataParallelKwargs, ReduceOp, tch::Tensor, testing};
///
/// // The mean of signs.
/// let hook = CommHook::new(|bucket| {
///     let signs = bucket.buffer.f_sign()?;
///     bucket.group.all_reduce(&signs, ReduceOp::Mean)?;
///     Ok(Some(signs))
/// });
/// let kwargs = DistributedDataParallelKwargs { comm_hook: Some(hook.into()), ..Default::default() };
/// let gradients = testing::ranks(2, Accelerator::builder().kwargs_handler(kwargs), |accelerator| {
///     let store = ParamStore::new(accelerator.device());
///     let weight = store.root().param("weight", ([2], Init::Ones))?;
///     let param = weight.clone();
///     let model = accelerator.prepare(ModuleFn::new(&store, move |x: &Tensor| Ok(param.get()? * x)))?;
///     let inputs = if accelerator.is_main_process() { [5f32, 0.5] } else { [-3.0, 0.25] };
///     accelerator.backward(&model.forward(&Tensor::from_slice(&inputs))?.sum(None))?;
///     Ok(weight.grad().map(|gradient| Vec::<f32>::try_from(gradient).unwrap()))
/// })?;
/// assert_eq!(gradients, [Some(vec![0.0, 1.0]), Some(vec![0.0, 1.0])]);
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Clone)]
pub struct CommHook(Arc<dyn Fn() -> Box<RunHook> + Send + Sync>);

/// The hook of one model.
type RunHook = dyn FnMut(&GradBucket<'_>) -> Result<Option<Tensor>> + Send;

impl CommHook {
    /// A hook that keeps nothing from bucket to bucket.
    pub fn new(hook: impl Fn(&GradBucket<'_>) -> Result<Option<Tensor>> + Send + Sync + 'static) -> Self {
        Self::with_state(|| (), move |(), bucket| hook(bucket))
    }

    /// A hook with a state, such as what compression has lost so far. `state` makes one for each model that is prepared. (In
    /// PyTorch the state is an argument of `register_comm_hook`.)
    ///
    /// ```
    /// use accelerate::{CommHook, ReduceOp, tch::{Kind, Tensor}};
    /// use std::collections::HashMap;
    ///
    /// // Sends 16 bits, and adds what they leave out to the next gradient of the same bucket.
    /// let hook = CommHook::with_state(HashMap::<usize, Tensor>::new, |lost, bucket| {
    ///     let mut exact = bucket.buffer.shallow_clone();
    ///     // After the first pass buckets have other sizes.
    ///     if let Some(lost) = lost.get(&bucket.index).filter(|lost| lost.size() == exact.size()) {
    ///         exact = exact.f_add(lost)?;
    ///     }
    ///     let sent = exact.f_to_kind(Kind::BFloat16)?;
    ///     lost.insert(bucket.index, exact.f_sub(&sent)?);
    ///     bucket.group.all_reduce(&sent, ReduceOp::Mean)?;
    ///     Ok(Some(sent.f_to_kind(exact.kind())?))
    /// });
    /// # let _ = hook;
    /// ```
    pub fn with_state<S: Send + 'static>(
        state: impl Fn() -> S + Send + Sync + 'static,
        hook: impl Fn(&mut S, &GradBucket<'_>) -> Result<Option<Tensor>> + Send + Sync + 'static,
    ) -> Self {
        let hook = Arc::new(hook);
        Self(Arc::new(move || {
            let (mut state, hook) = (state(), Arc::clone(&hook));
            Box::new(move |bucket| hook(&mut state, bucket))
        }))
    }

    /// The hook for one model of the ranks of `group`.
    pub(super) fn begin(
        &self,
        group: &Group,
    ) -> impl FnMut(&torch_ext::GradBucket<'_>) -> Result<Option<Tensor>> + Send + use<> {
        let (mut hook, group) = ((self.0)(), group.clone());
        move |bucket| {
            let &torch_ext::GradBucket { buffer, gradients, index, is_last } = bucket;
            let bucket = GradBucket { buffer, gradients, index, is_last, group: &group };
            let outcome = run(&mut *hook, &bucket);
            if let Err(error) = &outcome {
                // Where the store is gone as well, others find out by the connection.
                let _ = group.leave(&error.to_string());
            }
            outcome
        }
    }
}

/// Calls the hook and looks at what it returns. A panic must not cross libtorch's frames, so it becomes an error here.
fn run(hook: &mut RunHook, bucket: &GradBucket<'_>) -> Result<Option<Tensor>> {
    let index = bucket.index;
    let reduced = match catch_unwind(AssertUnwindSafe(|| tch::no_grad(|| hook(bucket)))) {
        Ok(reduced) => reduced.map_err(|error| error.context(format!("the communication hook, at bucket {index}")))?,
        Err(panic) => {
            return Err(CollectiveError::HookPanicked { index, text: panic_text(&*panic).to_owned() }.into());
        }
    };
    let describe = |tensor: &Tensor| format!("{} on {:?}", shape_text(tensor), tensor.device());
    match reduced.as_ref().map(describe).filter(|found| *found != describe(bucket.buffer)) {
        Some(found) => Err(CollectiveError::HookResult { index, found, wanted: describe(bucket.buffer) }.into()),
        None => Ok(reduced),
    }
}

impl From<CommHook> for DDPCommunicationHook {
    fn from(hook: CommHook) -> Self {
        Self::Function(Callback::new(hook))
    }
}

impl fmt::Debug for CommHook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CommHook")
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::accelerator::Accelerator;
    use crate::error::Error;
    use crate::group::ReduceOp;
    use crate::nn::{Init, ModuleFn, ParamStore};
    use crate::testing;
    use accelerate_core::config::DistributedDataParallelKwargs;
    use std::sync::Barrier;
    use std::time::Duration;
    use torch_ext::Store;

    /// The hook of rank 1 fails, and its process stays.
    fn backward(store: &Store, rank: usize, end: &Barrier) -> Error {
        let hook = CommHook::new(|bucket| match bucket.group.rank() {
            1 => Err(Error::other("out of ideas")),
            _ => bucket.group.all_reduce(bucket.buffer, ReduceOp::Mean).map(|()| Some(bucket.buffer.shallow_clone())),
        });
        let kwargs = DistributedDataParallelKwargs { comm_hook: Some(hook.into()), ..Default::default() };
        let group = testing::join_with_deadline(store, rank, 2, Duration::from_secs(2)).unwrap();
        let accelerator = Accelerator::builder().kwargs_handler(kwargs).build_in_group(group).unwrap();
        let store = ParamStore::new(accelerator.device());
        let weight = store.root().param("weight", ([2], Init::Ones)).unwrap();
        let model = ModuleFn::new(&store, move |x: &Tensor| Ok(weight.get()? * x));
        let model = accelerator.prepare(model).unwrap();
        let loss = model.forward(&Tensor::from_slice(&[1f32, 2.0])).unwrap().sum(None);
        let error = accelerator.backward(&loss).unwrap_err();
        end.wait();
        error
    }

    #[test]
    fn ranks_that_wait_for_a_hook_that_has_failed_do_so_until_the_deadline() {
        let (store, end) = (Store::hash().unwrap(), Barrier::new(2));
        let (store, end) = (&store, &end);
        let rank = move |rank| backward(store, rank, end);
        let errors: Vec<Error> = std::thread::scope(|scope| {
            let threads = [0, 1].map(|number| scope.spawn(move || rank(number)));
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let texts: Vec<String> = errors.iter().map(Error::to_string).collect();
        assert!(errors[0].is_timeout() && texts[0].contains("rank 1 has left: "), "{}", texts[0]);
        assert!(texts.iter().all(|text| text.contains("out of ideas")), "{texts:?}");
    }
}
