//! The loader that `prepare` makes: this process's share of every batch, on its device.

use super::agreement::{self, Exchange};
use super::batches::{Batches, Prepared};
use super::loader::{DataLoader, Iterable, MapStyle, Parts};
use super::operations::{SendToDeviceOptions, send_to_device};
use super::position::DataLoaderState;
use super::share::Shares;
use super::source::dispatch::{self, DispatchLink};
use super::source::schedule::Sharding;
use super::source::{Begun, Finish};
use crate::TensorTree;
use crate::error::{DataError, Result};
use crate::messages;
use crate::session::{GradientState, Object, Session, Stateful};
use accelerate_core::config::DataLoaderSettings;
use accelerate_core::names::RngType;
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use tch::{Device, Tensor};
use torch_ext::device::pin_memory;

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
/// [`Accelerator::join_uneven_inputs`](crate::Accelerator::join_uneven_inputs). This holds for streams that every process reads
/// as well, which the reference fills up all the same.
///
/// With `dispatch_batches` (the default for streams that are moved to a device) rank 0 alone reads, `b * P` rows or with
/// `split_batches` `b` rows a round, and sends each rank its own: `DataLoaderDispatcher` of the reference. All ranks
/// get equally many then; a round that cannot be cut so is filled up from the first one.
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
/// let shares = testing::ranks(2, Default::default(), |accelerator| {
///     let loader = DataLoader::builder(VecDataset::new(vec![0i64, 1, 2, 3, 4])).batch_size(2).build()?;
///     let loader = accelerator.prepare(loader)?;
///     assert_eq!((loader.len(), loader.total_batch_size()), (2, Some(4)));
///     loader.iter()?.map(|batch| Ok(Vec::<i64>::try_from(&batch?)?)).collect::<accelerate::Result<Vec<_>>>()
/// })?;
/// assert_eq!(shares, [[[0, 1], [4, 0]], [[2, 3], [1, 2]]]); // the last round is filled up
/// # Ok::<(), accelerate::Error>(())
/// ```
pub struct DataLoaderShard<B, K = MapStyle> {
    parts: Parts<B>,
    sharding: Sharding,
    shares: Shares,
    pub(crate) gradient_state: GradientState,
    /// `None` when there is nobody to agree with.
    exchange: Option<Arc<dyn Exchange>>,
    /// How rank 0's batches get here; `None` when every process reads its own.
    dispatch: Option<Arc<DispatchLink>>,
    /// `None` leaves batches where they are.
    device: Option<Device>,
    non_blocking: bool,
    rng_types: Vec<RngType>,
    /// What the session knows it by: as long as this loader, one that skips batches of it, or a pass of either lives.
    registered: Option<Arc<dyn Stateful>>,
    kind: PhantomData<fn() -> K>,
}

/// What a run says of its loaders.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LoaderSettings<'a> {
    pub(crate) configuration: &'a DataLoaderSettings,
    /// Do batches move to the device?
    pub(crate) device_placement: bool,
    /// Random number streams that ranks take over from rank 0 when a pass begins.
    pub(crate) rng_types: &'a [RngType],
}

/// Where a prepared loader runs.
pub(crate) struct Place {
    /// This process's share of the rows.
    pub(crate) share: usize,
    pub(crate) shares: Shares,
    pub(crate) gradient_state: GradientState,
    pub(crate) exchange: Option<Arc<dyn Exchange>>,
    pub(crate) dispatch: Option<Arc<DispatchLink>>,
    pub(crate) device: Option<Device>,
    pub(crate) rng_types: Vec<RngType>,
}

/// Which of the two kinds of loader it is, for what depends on it: [`MapStyle`] or [`Iterable`].
///
/// ```
/// use accelerate::data::{DataLoader, DataLoaderShard, LoaderKind, VecDataset};
/// use accelerate::{Accelerator, tch::Tensor};
///
/// /// Works with loaders of both kinds.
/// fn count<K: LoaderKind>(loader: &DataLoaderShard<Tensor, K>) -> accelerate::Result<usize> {
///     Ok(loader.iter()?.count())
/// }
/// let accelerator = Accelerator::builder().cpu(true).build()?;
/// let loader = accelerator.prepare(DataLoader::builder(VecDataset::new(vec![1i64, 2])).build()?)?;
/// assert_eq!(count(&loader)?, 2);
/// # Ok::<(), accelerate::Error>(())
/// ```
pub trait LoaderKind: 'static {
    #[doc(hidden)]
    const IS_STREAM: bool;
}

impl LoaderKind for MapStyle {
    const IS_STREAM: bool = false;
}

impl LoaderKind for Iterable {
    const IS_STREAM: bool = true;
}

impl<B: Send + 'static, K: LoaderKind> DataLoader<B, K> {
    /// This process's share of the loader, as the configuration says.
    ///
    /// Every process must call it. Collective when batches are dispatched. Registers the loader with the session.
    pub(crate) fn prepare_for(
        self,
        session: &Session,
        settings: LoaderSettings<'_>,
        shares: Shares,
    ) -> Result<DataLoaderShard<B, K>> {
        let num_processes = session.group.world_size();
        let LoaderSettings { configuration, device_placement, rng_types } = settings;
        let dispatch = configuration.dispatch_batches.unwrap_or(K::IS_STREAM && device_placement);
        if dispatch && !device_placement {
            return Err(DataError::DispatchWithoutDevice.into());
        }
        let link = match dispatch && num_processes > 1 && !configuration.use_configured_sampler {
            true => Some(Arc::new(DispatchLink::new(session.group.side_group()?, shares.clone()))),
            false => None,
        };
        let exchange: Arc<dyn Exchange> = Arc::new(session.clone());
        let place = Place {
            share: shares.of_rank(session.group.rank()),
            shares,
            gradient_state: session.gradient_state.clone(),
            exchange: (num_processes > 1).then_some(exchange),
            dispatch: link,
            device: device_placement.then_some(session.device),
            rng_types: rng_types.to_vec(),
        };
        let mut loader = self.prepare_at(place, configuration)?;
        let registered: Arc<dyn Stateful> = Arc::new(loader.parts.clone());
        session.register(Object::DataLoader(Arc::downgrade(&registered)));
        loader.registered = Some(registered);
        Ok(loader)
    }

    pub(crate) fn prepare_at(self, place: Place, configuration: &DataLoaderSettings) -> Result<DataLoaderShard<B, K>> {
        configuration.check()?;
        let sharding = sharding(configuration, (place.share, place.shares.len()), place.dispatch.is_some());
        let mut parts = self.into_parts();
        sharding.check(parts.source.batch_size())?;
        if let Some(source) = parts.source.for_ranks(&sharding, configuration)? {
            parts.source = source;
        }
        Ok(DataLoaderShard {
            parts,
            sharding,
            shares: place.shares,
            gradient_state: place.gradient_state,
            exchange: place.exchange.filter(|_| !configuration.use_configured_sampler),
            dispatch: place.dispatch,
            device: place.device,
            non_blocking: configuration.non_blocking,
            rng_types: place.rng_types,
            registered: None,
            kind: PhantomData,
        })
    }
}

/// One share of so many, as the configuration says.
fn sharding(configuration: &DataLoaderSettings, (share, num_shares): (usize, usize), dispatch: bool) -> Sharding {
    if configuration.use_configured_sampler {
        return Sharding { own_sampler: num_shares > 1, ..Sharding::whole() };
    }
    Sharding {
        rank: share,
        num_processes: num_shares,
        split_batches: configuration.split_batches,
        even_batches: configuration.even_batches,
        dispatch,
        own_sampler: false,
    }
}

impl<B: Send + 'static> DataLoader<B> {
    /// How many batches the first process, which never gets fewer than others, will get in a pass of the prepared loader.
    pub(crate) fn num_batches_when_prepared(&self, num_processes: usize, configuration: &DataLoaderSettings) -> usize {
        let dispatch = num_processes > 1 && configuration.dispatch_batches == Some(true);
        self.num_batches(&sharding(configuration, (0, num_processes), dispatch))
    }
}

impl<B, K> DataLoaderShard<B, K> {
    /// Where batches are sent, and how; `None` where they stay.
    pub(super) fn sent(&self) -> Option<(Device, SendToDeviceOptions)> {
        Some((self.device?, SendToDeviceOptions { non_blocking: self.non_blocking }))
    }

    /// How a pass that begins now is shared: `Accelerator::join_uneven_inputs` may override `even_batches`.
    fn sharding(&self) -> Sharding {
        let even_batches = self.gradient_state.even_batches().filter(|_| !self.sharding.own_sampler);
        Sharding { even_batches: even_batches.unwrap_or(self.sharding.even_batches), ..self.sharding }
    }
}

impl<B: Send + 'static, K> DataLoaderShard<B, K> {
    /// Begins a pass. Collective when rows are shuffled (all ranks get the order of rank 0), when batches are
    /// dispatched, and with `rng_types` other than "generator".
    ///
    /// # Errors
    ///
    /// When the sampler or a collective fails, threads cannot be started, or the order is another than that of the
    /// run that is resumed.
    #[track_caller]
    pub fn iter(&self) -> Result<Batches<B, K>>
    where
        B: TensorTree,
    {
        let _called = crate::status::here();
        let (resume, epoch) = (self.parts.resume()?, self.parts.progress.epoch());
        let num_resumed = resume.as_ref().map_or(0, |state| state.rows_delivered);
        if num_resumed > 0 && self.parts.skip_batches > 0 && self.sharding().rank == 0 {
            let num_skipped = self.parts.skip_batches;
            messages::warning!(
                "the loader goes on behind the {num_resumed} rows of this pass that its state has, and skip_first_batches leaves \
                 out {num_skipped} batches behind these; where load_state is called, a loader goes on without it"
            );
        }
        if let Some(exchange) = &self.exchange {
            agreement::synchronize_rng_states(&**exchange, &self.rng_types, self.device)?;
        }
        let mut plan = self.parts.plan(self.sharding(), resume.as_ref(), self.pinning());
        let Begun { pass, start } = match &self.dispatch {
            Some(link) => dispatch::begin(link, &*self.parts.source, plan)?,
            None => {
                plan.exchange = self.exchange.as_deref();
                self.parts.source.begin(plan)?
            }
        };
        self.parts.progress.begin(epoch, start, resume);
        let sent = self.sent();
        let prepared = Prepared {
            place: Box::new(move |batch| match sent {
                Some((device, options)) => send_to_device(batch, device, options),
                None => Ok(batch),
            }),
            guard: self.gradient_state.begin_loader(self.parts.source.num_batches(&self.sharding())),
            shares: self.shares.clone(),
            _registered: self.registered.clone(),
        };
        Ok(Batches::new(pass, &self.parts, epoch, Some(prepared)))
    }

    /// Batches bound for a GPU are made in pinned memory, from which copies need not wait for each other.
    pub(super) fn pinning(&self) -> Option<Finish<B>>
    where
        B: TensorTree,
    {
        self.device.filter(|device| device.is_cuda() && self.non_blocking)?;
        let pinned = |tensor: &Tensor| match tensor.device() {
            Device::Cpu => Ok(pin_memory(tensor)?),
            _ => Ok(tensor.shallow_clone()),
        };
        Some(Arc::new(move |batch: B| batch.try_map_tensors(&mut |tensor| pinned(tensor))))
    }
}

impl<B: Send + 'static, K> DataLoaderShard<B, K> {
    /// Rows that all processes together get in a full round; `None` for a batch sampler whose batches vary
    /// in size.
    pub fn total_batch_size(&self) -> Option<usize> {
        let batch_size = self.parts.source.batch_size()?;
        Some(self.sharding.by_rows(batch_size, false).total_batch_size())
    }

    /// The device that batches are sent to; `None` leaves them where they are
    /// ([`AcceleratorBuilder::device_placement`](crate::AcceleratorBuilder::device_placement)).
    pub fn device(&self) -> Option<Device> {
        self.device
    }

    /// Sets the epoch of the next pass, which the seedable sampler, samplers of the user's own and datasets may depend
    /// on. Without it, epochs count completed passes from 0.
    pub fn set_epoch(&self, epoch: usize) {
        self.parts.progress.set_epoch(epoch);
    }

    /// The epoch of the next pass (`iteration` of the reference).
    pub fn epoch(&self) -> usize {
        self.parts.progress.epoch()
    }

    /// Where the loader stands: inside of a loop, after the batch that was handed out last. Save that of the main
    /// process (with `use_configured_sampler` that of every process); it is good for any number of processes.
    ///
    /// # Errors
    ///
    /// When a generator's state cannot be read.
    pub fn state_dict(&self) -> Result<DataLoaderState> {
        self.parts.state()
    }

    /// Lets the next pass go on where the state was saved, and the passes after it as in that run; also on another
    /// number of processes or with another batch size. Every process must call it with the same state.
    ///
    /// The pass fails at its beginning if the order of its rows is not that of the saved run: another dataset,
    /// sampler or batch sampler.
    pub fn load_state_dict(&self, state: DataLoaderState) {
        self.parts.progress.load(state);
    }
}

impl<B: Send + 'static> DataLoaderShard<B> {
    /// Number of batches that this process gets in a pass.
    pub fn len(&self) -> usize {
        self.parts.num_batches(&self.sharding()).unwrap_or(0)
    }

    /// Does this process get no batches?
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Rows of the whole dataset.
    pub fn total_dataset_length(&self) -> usize {
        self.parts.source.num_rows().unwrap_or(0)
    }
}

impl<B: Send + 'static, K> super::SkipFirstBatches for DataLoaderShard<B, K> {
    fn skipping(&self, num_batches: usize) -> Self {
        Self {
            parts: self.parts.skipping(num_batches),
            sharding: self.sharding,
            shares: self.shares.clone(),
            gradient_state: self.gradient_state.clone(),
            exchange: self.exchange.clone(),
            dispatch: self.dispatch.clone(),
            device: self.device,
            non_blocking: self.non_blocking,
            rng_types: self.rng_types.clone(),
            registered: self.registered.clone(),
            kind: PhantomData,
        }
    }
}

impl<B, K> fmt::Debug for DataLoaderShard<B, K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("DataLoaderShard");
        debug.field("sharding", &self.sharding).field("device", &self.device);
        self.parts.debug(&mut debug)
    }
}
