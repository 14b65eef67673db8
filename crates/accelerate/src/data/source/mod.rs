//! Where the batches of a pass come from: rows that are counted, a stream, or rank 0.

pub(super) mod dispatch;
pub(super) mod recipe;
pub(super) mod rows;
pub(super) mod schedule;
pub(super) mod stream;

use super::agreement::Exchange;
use super::position::{DataLoaderState, LookAhead, PassStart};
use super::random;
use crate::error::Result;
use crate::session::LoaderPosition;
use accelerate_core::config::DataLoaderSettings;
use schedule::Sharding;
use std::ops::Range;
use std::sync::Arc;

/// What is done to a batch on the thread that made it.
pub(crate) type Finish<B> = Arc<dyn Fn(B) -> Result<B> + Send + Sync>;

/// What a pass is asked to be.
pub(crate) struct PassPlan<'a, B> {
    pub(crate) sharding: Sharding,
    /// The ranks whose batches are wanted.
    pub(crate) ranks: Range<usize>,
    /// `None` when there is nobody to agree with.
    pub(crate) exchange: Option<&'a dyn Exchange>,
    pub(crate) epoch: usize,
    /// In place of the seed of a seedable sampler: that of the run that is resumed.
    pub(crate) seed: Option<u64>,
    /// Where an earlier run stood in this epoch.
    pub(crate) resume: Option<&'a DataLoaderState>,
    /// Rounds to leave out at the start, after that.
    pub(crate) skip_batches: usize,
    pub(crate) finish: Option<Finish<B>>,
}

impl<B> PassPlan<'_, B> {
    /// From which random numbers the earlier run had begun the first round of this pass.
    fn look_ahead(&self) -> Option<&LookAhead> {
        self.resume.filter(|_| self.skip_batches == 0).map(|state| &state.look_ahead)
    }

    /// Draws the seed that PyTorch's loaders draw for their workers at the start of every pass, whether they have any or
    /// not, and on ranks that read nothing, too. So the default generator stays in step with that of a Python program.
    ///
    /// In a pass that is resumed nothing is drawn: the generator is where the checkpoint has put it.
    fn draw_seed_of_workers(&self) -> Result<()> {
        if !self.resume.is_some_and(DataLoaderState::is_within_pass) {
            random::draw_seed(None)?;
        }
        Ok(())
    }
}

/// One batch for each rank that was asked for.
pub(crate) struct Round<B> {
    /// `None` for a rank that gets nothing in this round.
    pub(crate) batches: Vec<Option<B>>,
    pub(crate) position: LoaderPosition,
    /// What has been handed out in this pass once this round is: rows of all ranks without fillers, or batches of a
    /// sampler that decides their sizes itself.
    pub(crate) delivered: u64,
    /// Where the stream stands then, if it can say.
    pub(crate) stream: Option<Vec<u8>>,
    /// From which random numbers the round after it has been begun.
    pub(crate) look_ahead: LookAhead,
}

/// A pass, round by round; over when it returns `None`.
pub(crate) trait Pass<B>: Send {
    fn next_round(&mut self) -> Option<Result<Round<B>>>;

    /// How many rounds are left, if that is known.
    fn num_left(&self) -> Option<usize>;
}

/// A pass that has just begun, and how it could be begun again.
pub(crate) struct Begun<B> {
    pub(crate) pass: Box<dyn Pass<B>>,
    pub(crate) start: Arc<PassStart>,
}

/// What passes are made of.
pub(crate) trait Source<B>: Send + Sync {
    /// Begins a pass. Collective when there is an exchange.
    fn begin(&self, plan: PassPlan<'_, B>) -> Result<Begun<B>>;

    /// Batches of a whole pass for the rank, if that is known.
    fn num_batches(&self, sharding: &Sharding) -> Option<usize>;

    /// Rows per batch as the user gave it; `None` where sizes vary.
    fn batch_size(&self) -> Option<usize>;

    fn num_rows(&self) -> Option<usize>;

    /// Goes to where the saved run stands when the pass of `state` is over, for a loop that does not resume this pass: a generator of
    /// the sampler has drawn its order then. Nothing for sources whose orders do not depend on earlier ones.
    fn pass_over(&self, _state: &DataLoaderState) -> Result<()> {
        Ok(())
    }

    /// Where the source stands between two passes.
    fn idle_state(&self) -> Result<DataLoaderState>;

    /// The same source, with what ranks must agree on made so that they can. `None` when it is that already.
    fn for_ranks(&self, sharding: &Sharding, configuration: &DataLoaderSettings) -> Result<Option<Arc<dyn Source<B>>>>;
}
