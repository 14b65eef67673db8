//! One pass over a loader's batches.

use super::loader::{MapStyle, Parts};
use super::position::Progress;
use super::share::Shares;
use super::source::{Pass, Round};
use crate::error::{DataError, Result};
use crate::session::{LoaderGuard, Stateful};
use std::fmt;
use std::iter::FusedIterator;
use std::marker::PhantomData;
use std::sync::Arc;

/// The batches of one pass, from [`DataLoader::iter`](crate::data::DataLoader::iter) or
/// [`DataLoaderShard::iter`](crate::data::DataLoaderShard::iter).
///
/// After an error a pass over counted rows goes on with the next batch if it is asked for it; a stream is over, and so is a pass
/// whose loader has been given another place by `load_state` or `load_state_dict`, which is an error. The
/// pass counts as completed, and the loader's epoch moves on, when the iterator returns `None`; a pass that is broken
/// off does not count, and the next one starts with the same epoch (as in the reference, `data_loader.py`,
/// `DataLoaderShard.__iter__`).
///
/// ```
/// use accelerate::data::{DataLoader, VecDataset};
///
/// let loader = DataLoader::builder(VecDataset::new(vec![1i64, 2, 3])).batch_size(2).build()?;
/// let mut batches = loader.iter()?;
/// assert_eq!(batches.len(), 2);
/// assert_eq!(batches.next().unwrap()?.size(), [2]);
/// assert_eq!(batches.len(), 1);
/// # Ok::<(), accelerate::Error>(())
/// ```
pub struct Batches<B, K = MapStyle> {
    pass: Box<dyn Pass<B>>,
    progress: Arc<Progress>,
    epoch: usize,
    num_loads: u64,
    prepared: Option<Prepared<B>>,
    completed: bool,
    kind: PhantomData<fn() -> K>,
}

/// What a prepared loader does to each batch on its way out.
pub(crate) struct Prepared<B> {
    pub(crate) place: Box<dyn Fn(B) -> Result<B> + Send>,
    pub(crate) guard: LoaderGuard,
    pub(crate) shares: Shares,
    /// The session knows of the loader as long as a pass over it goes on.
    pub(crate) _registered: Option<Arc<dyn Stateful>>,
}

impl<B: Send + 'static, K> Batches<B, K> {
    pub(crate) fn new(pass: Box<dyn Pass<B>>, parts: &Parts<B>, epoch: usize, prepared: Option<Prepared<B>>) -> Self {
        let progress = Arc::clone(&parts.progress);
        let num_loads = progress.num_loads();
        Self { pass, progress, epoch, num_loads, prepared, completed: false, kind: PhantomData }
    }

    /// The batch of this process; `None` when only other processes have one.
    fn hand_out(&self, round: Round<B>) -> Result<Option<B>> {
        let Some(batch) = round.batches.into_iter().next().flatten() else {
            return Ok(None);
        };
        let mut num_counted = 0;
        let batch = match &self.prepared {
            Some(prepared) => {
                let batch = (prepared.place)(batch)?;
                num_counted = round.position.counted_rows.iter().flatten().filter(|counts| **counts).count() as u64;
                prepared.guard.publish(prepared.shares.for_all_ranks(round.position));
                batch
            }
            None => batch,
        };
        let num_delivered = self.progress.moved(round.delivered, round.stream, round.look_ahead);
        if let Some(prepared) = &self.prepared {
            // What is delivered may be counted in batches; the rows of some loaders are not known.
            prepared.guard.handed_out(if num_counted > 0 { num_counted } else { num_delivered });
        }
        Ok(Some(batch))
    }

    /// Ends the pass: the loop is no longer active, and the epoch is over.
    fn complete(&mut self) {
        self.completed = true;
        self.prepared = None;
        self.progress.finish_epoch(self.epoch);
    }
}

impl<B: Send + 'static, K> Iterator for Batches<B, K> {
    type Item = Result<B>;

    fn next(&mut self) -> Option<Self::Item> {
        if !self.completed && self.progress.num_loads() != self.num_loads {
            (self.completed, self.prepared) = (true, None);
            return Some(Err(DataError::LoadedMeanwhile.into()));
        }
        while !self.completed {
            match self.pass.next_round() {
                Some(Ok(round)) => match self.hand_out(round) {
                    Ok(Some(batch)) => return Some(Ok(batch)),
                    Ok(None) => {}
                    Err(error) => return Some(Err(error)),
                },
                Some(Err(error)) => return Some(Err(error)),
                None => self.complete(),
            }
        }
        None
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        match (self.completed, self.pass.num_left()) {
            (true, _) => (0, Some(0)),
            (false, Some(left)) => (left, Some(left)),
            (false, None) => (0, None),
        }
    }
}

impl<B: Send + 'static> ExactSizeIterator for Batches<B> {}
impl<B: Send + 'static, K> FusedIterator for Batches<B, K> {}

impl<B, K> fmt::Debug for Batches<B, K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Batches")
            .field("epoch", &self.epoch)
            .field("num_left", &self.pass.num_left())
            .finish_non_exhaustive()
    }
}
