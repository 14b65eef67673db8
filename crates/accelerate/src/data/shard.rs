//! The loader that `prepare` makes: this process's share of every batch, on its device.

use super::agreement::Exchange;
use super::batches::{Batches, Prepared};
use super::dataset::Dataset;
use super::loader::{DataLoader, Parts};
use super::operations::send_to_device;
use super::random;
use super::sampler::Order;
use super::schedule::Sharding;
use crate::TensorTree;
use crate::context::Context;
use crate::error::{DataError, Result};
use crate::gradient_state::GradientState;
use accelerate_core::config::DataLoaderConfiguration;
use std::fmt;
use std::sync::Arc;
use tch::Device;

/// A prepared loader (`DataLoaderShard` of the reference, `data_loader.py`): every process gets its own
/// batches, already on its device, and the accelerator knows where the loop stands.
///
/// Every process must iterate it, and all the same number of times: the beginning of a pass is collective
/// when rows are shuffled. All ranks use the order of rank 0, however they are seeded.
///
/// # Shares
///
/// With `b` the batch size and `P` the number of processes, a round takes `b * P` rows, `b` for each; with
/// `split_batches` it takes `b` rows, `b / P` for each. A last round without enough rows for that is
/// left out with `drop_last`, else filled up with rows from the start of the order. Filler rows do not count in
/// `Accelerator::gather_for_metrics`. Without `even_batches` there are no fillers: the last batch of some
/// processes is shorter, and some get none at all. Their loop ends one round earlier than that of the
/// others, so nothing collective may happen in that round, unless the loop runs inside
/// [`Accelerator::join_uneven_inputs`](crate::Accelerator::join_uneven_inputs).
///
/// # Epochs
///
/// The epoch moves on when a pass has been completed, that is, when the iterator has returned `None`. A
/// pass that was broken off does not count, and the next pass uses the same epoch, as in the reference. Set it with
/// [`DataLoaderShard::set_epoch`] to decide yourself.
///
/// # Loops
///
/// While its batches are being iterated, the loader is the active one: `end_of_dataloader` and the counted
/// rows are its own. The innermost loop wins, and a loop that is left, by `break`, `?` or a panic, is over.
/// `end_of_dataloader` is already true while the last batch is being worked on.
///
/// ```
/// use accelerate::data::{DataLoader, VecDataset};
/// use accelerate::testing;
///
/// let shares = testing::ranks(2, |accelerator| {
///     let loader = DataLoader::builder(VecDataset::new(vec![0i64, 1, 2, 3, 4])).batch_size(2).build()?;
///     let loader = accelerator.prepare(loader)?;
///     assert_eq!((loader.len(), loader.total_batch_size()), (2, Some(4)));
///     loader.iter()?.map(|batch| Ok(Vec::<i64>::try_from(&batch?)?)).collect::<accelerate::Result<Vec<_>>>()
/// })?;
/// assert_eq!(shares, [[[0, 1], [4, 0]], [[2, 3], [1, 2]]]); // the last round is filled up
/// # Ok::<(), accelerate::Error>(())
/// ```
pub struct DataLoaderShard<D: Dataset, B> {
    parts: Parts<D, B>,
    sharding: Sharding,
    pub(crate) gradient_state: GradientState,
    /// `None` when there is nobody to agree with.
    exchange: Option<Arc<dyn Exchange>>,
    /// `None` leaves batches where they are.
    device: Option<Device>,
    non_blocking: bool,
}

/// Where a prepared loader runs.
pub(crate) struct Place {
    pub(crate) rank: usize,
    pub(crate) num_processes: usize,
    pub(crate) gradient_state: GradientState,
    pub(crate) exchange: Option<Arc<dyn Exchange>>,
    pub(crate) device: Option<Device>,
}

impl<D: Dataset + 'static, B: Send + 'static> DataLoader<D, B> {
    /// This process's share of the loader, as the configuration says.
    ///
    /// Every process must call it. `device_placement` moves batches to the context's device.
    pub(crate) fn prepare_for(
        self,
        context: &Context,
        configuration: &DataLoaderConfiguration,
        device_placement: bool,
    ) -> Result<DataLoaderShard<D, B>> {
        let num_processes = context.group.world_size();
        let exchange: Arc<dyn Exchange> = Arc::new(context.clone());
        let place = Place {
            rank: context.group.rank(),
            num_processes,
            gradient_state: context.gradient_state.clone(),
            exchange: (num_processes > 1).then_some(exchange),
            device: device_placement.then_some(context.device),
        };
        self.prepare_at(place, configuration)
    }

    pub(crate) fn prepare_at(
        self,
        place: Place,
        configuration: &DataLoaderConfiguration,
    ) -> Result<DataLoaderShard<D, B>> {
        configuration.check()?;
        check_available(configuration)?;
        let sharding = if configuration.use_configured_sampler {
            Sharding { own_sampler: place.num_processes > 1, ..Sharding::whole() }
        } else {
            Sharding {
                rank: place.rank,
                num_processes: place.num_processes,
                split_batches: configuration.split_batches,
                even_batches: configuration.even_batches,
                own_sampler: false,
            }
        };
        let mut parts = self.into_parts();
        sharding.check(parts.batch_size())?;
        prepare_sampler(&mut parts.order, &sharding, configuration)?;
        Ok(DataLoaderShard {
            parts,
            sharding,
            gradient_state: place.gradient_state,
            exchange: place.exchange.filter(|_| !configuration.use_configured_sampler),
            device: place.device,
            non_blocking: configuration.non_blocking,
        })
    }
}

/// Refuses what cannot be honoured yet; never ignores it.
fn check_available(configuration: &DataLoaderConfiguration) -> Result<()> {
    if configuration.dispatch_batches == Some(true) {
        let cure = "leave it out to let every process read its own rows";
        let setting = "DataLoaderConfiguration.dispatch_batches";
        return Err(DataError::NotAvailable { setting, value: "true", cure }.into());
    }
    if configuration.use_stateful_dataloader {
        let cure = "save the epoch and the number of batches seen, and resume with skip_first_batches";
        let setting = "DataLoaderConfiguration.use_stateful_dataloader";
        return Err(DataError::NotAvailable { setting, value: "true", cure }.into());
    }
    Ok(())
}

/// Makes random orders something that ranks can agree on, as `prepare_data_loader` of the reference does.
fn prepare_sampler(order: &mut Order, sharding: &Sharding, configuration: &DataLoaderConfiguration) -> Result<()> {
    let random = order.random_sampler().filter(|_| configuration.use_seedable_sampler);
    let Some(random) = random else {
        // A single process goes on drawing from the default generator in every pass.
        return match order.generator() {
            Some(generator) if sharding.num_processes > 1 => generator.fill(),
            _ => Ok(()),
        };
    };
    let seed = match configuration.data_seed {
        Some(seed) => seed,
        None => random::default_seed()?,
    };
    let seedable = random.to_seedable(seed);
    if let Order::Rows { sampler, .. } = order {
        *sampler = Arc::new(seedable);
    }
    Ok(())
}

impl<D: Dataset, B> DataLoaderShard<D, B> {
    /// How a pass that begins now is shared: `Accelerator::join_uneven_inputs` may override `even_batches`.
    fn sharding(&self) -> Sharding {
        let even_batches = self.gradient_state.even_batches().filter(|_| !self.sharding.own_sampler);
        Sharding { even_batches: even_batches.unwrap_or(self.sharding.even_batches), ..self.sharding }
    }
}

impl<D: Dataset + 'static, B: TensorTree + Send + 'static> DataLoaderShard<D, B> {
    /// Begins a pass. Collective when rows are shuffled: all ranks get the order of rank 0.
    ///
    /// # Errors
    ///
    /// When the sampler or a collective fails, or threads cannot be started.
    pub fn iter(&self) -> Result<Batches<D, B>> {
        let epoch = self.parts.epoch();
        let sharding = self.sharding();
        let schedule = self.parts.schedule(&sharding, self.exchange.as_deref(), epoch)?;
        let (device, non_blocking) = (self.device, self.non_blocking);
        let prepared = Prepared {
            place: Box::new(move |batch| match device {
                Some(device) => send_to_device(batch, device, non_blocking),
                None => Ok(batch),
            }),
            guard: self.gradient_state.begin_loader(),
        };
        Batches::start(self.parts.clone(), sharding, schedule, epoch, Some(prepared))
    }
}

impl<D: Dataset + 'static, B: Send + 'static> DataLoaderShard<D, B> {
    /// Number of batches that this process gets in a pass.
    pub fn len(&self) -> usize {
        self.parts.len(&self.sharding())
    }

    /// Does this process get no batches?
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Rows that all processes together get in a full round; `None` for a batch sampler whose batches vary
    /// in size.
    pub fn total_batch_size(&self) -> Option<usize> {
        let batch_size = self.parts.batch_size()?;
        Some(self.sharding.by_rows(batch_size, false).total_batch_size())
    }

    /// Rows of the whole dataset.
    pub fn total_dataset_length(&self) -> usize {
        self.dataset().len()
    }

    /// The dataset.
    pub fn dataset(&self) -> &D {
        &self.parts.recipe.dataset
    }

    /// Sets the epoch of the next pass, which the seedable sampler, samplers of the user's own and datasets may depend
    /// on. Without it, epochs count completed passes from 0.
    pub fn set_epoch(&self, epoch: usize) {
        self.parts.set_epoch(epoch);
    }

    /// The epoch of the next pass (`iteration` of the reference).
    pub fn epoch(&self) -> usize {
        self.parts.epoch()
    }
}

impl<D: Dataset + 'static, B: Send + 'static> super::SkipFirstBatches for DataLoaderShard<D, B> {
    fn skipping(&self, num_batches: usize) -> Self {
        Self {
            parts: self.parts.skipping(num_batches),
            sharding: self.sharding,
            gradient_state: self.gradient_state.clone(),
            exchange: self.exchange.clone(),
            device: self.device,
            non_blocking: self.non_blocking,
        }
    }
}

impl<D: Dataset, B> fmt::Debug for DataLoaderShard<D, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("DataLoaderShard");
        debug.field("sharding", &self.sharding).field("device", &self.device);
        self.parts.debug(&mut debug)
    }
}
