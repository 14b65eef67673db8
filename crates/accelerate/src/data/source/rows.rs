//! Batches of a dataset whose rows are counted, in the order of a sampler.

use super::recipe::{MakeRound, Recipe, WorkerOptions, Workers};
use super::schedule::{Schedule, Sharding, flatten};
use super::{Begun, Pass, PassPlan, Round, Source};
use crate::data::agreement;
use crate::data::dataset::Dataset;
use crate::data::position::{DataLoaderState, DefaultGeneratorGuard, LookAhead, OrderDigest, PassStart, RandomStates};
use crate::data::random::{self, SharedGenerator};
use crate::data::sampler::{BatchSampler, GeneratorSlot, Order, Sampler, SeedableRandomSampler, order_of, seed_of};
use crate::error::{DataError, Result};
use accelerate_core::config::DataLoaderSettings;
use std::sync::Arc;
use tch::Tensor;

/// A dataset, the order of its rows, and how batches are made of them. Clones share all of it.
pub(crate) struct RowSource<D: Dataset, B> {
    pub(crate) recipe: Arc<Recipe<D, B>>,
    pub(crate) order: Order,
    /// Draws the seed that PyTorch draws for its workers at the start of every pass.
    pub(crate) generator: Option<SharedGenerator>,
    pub(crate) workers: WorkerOptions,
}

impl<D: Dataset + 'static, B: Send + 'static> Source<B> for RowSource<D, B> {
    fn begin(&self, plan: PassPlan<'_, B>) -> Result<Begun<B>> {
        self.recipe.dataset.set_epoch(plan.epoch);
        let (schedule, start) = match plan.resume {
            Some(state) if state.is_within_pass() => self.resumed_schedule(&plan, state)?,
            Some(state) => {
                self.restore_sampler_generator(state)?;
                self.schedule(&plan, None)?
            }
            None => self.schedule(&plan, None)?,
        };
        let num_rounds = schedule.num_rounds(plan.ranks.start);
        let next_round = plan.skip_batches.min(num_rounds);
        let make = self.make_round(&schedule, &plan);
        let workers = if 0 < self.workers.num_workers && next_round < num_rounds {
            Some(Workers::start(&make, next_round, self.workers)?)
        } else {
            None
        };
        let (order, own_sampler) = (self.order.clone(), plan.sharding.own_sampler);
        let pass = RowPass { schedule, make, workers, order, own_sampler, next_round, num_rounds, completed: false };
        Ok(Begun { pass: Box::new(pass), start: Arc::new(start) })
    }

    fn num_batches(&self, sharding: &Sharding) -> Option<usize> {
        Some(match &self.order {
            Order::Rows { sampler, batch_size, drop_last } => {
                sharding.num_rounds_of_rows(*batch_size, *drop_last, sampler.len())
            }
            Order::Batches(sampler) => sharding.num_rounds_of_batches(&**sampler),
        })
    }

    fn batch_size(&self) -> Option<usize> {
        match &self.order {
            Order::Rows { batch_size, .. } => Some(*batch_size),
            Order::Batches(sampler) => sampler.batch_size(),
        }
    }

    fn num_rows(&self) -> Option<usize> {
        Some(self.recipe.dataset.len())
    }

    fn pass_over(&self, state: &DataLoaderState) -> Result<()> {
        if self.restore_sampler_generator(state)? && state.is_within_pass() {
            match &self.order {
                Order::Rows { sampler, .. } => drop(order_of(&**sampler, state.epoch)?),
                Order::Batches(sampler) => drop(sampler.batches(state.epoch)?),
            }
            self.order.pass_completed()?;
        }
        Ok(())
    }

    fn idle_state(&self) -> Result<DataLoaderState> {
        Ok(DataLoaderState {
            shuffle_seed: self.order.seedable_sampler().map(SeedableRandomSampler::seed),
            random: match self.sampler_generator() {
                Some(generator) => Some(RandomStates { default: None, sampler: Some(generator.state_bytes()?) }),
                None => None,
            },
            ..Default::default()
        })
    }

    /// Makes random orders something that ranks can agree on, as `prepare_data_loader` of the reference does.
    fn for_ranks(&self, sharding: &Sharding, configuration: &DataLoaderSettings) -> Result<Option<Arc<dyn Source<B>>>> {
        let dispatch = configuration.dispatch_batches == Some(true);
        let order = match configuration.use_seedable_sampler {
            true => self.seedable_order(configuration.data_seed)?,
            false => {
                // A process that reads alone goes on drawing from the default generator in every pass.
                match self.order.generator() {
                    Some(generator) if sharding.num_processes > 1 && !dispatch => generator.fill()?,
                    _ => {}
                }
                None
            }
        };
        // The reference's dispatcher takes the generator from the loader, also on one process, but not from its sampler.
        let generator = self.generator.clone().filter(|_| !dispatch);
        if order.is_none() && generator.is_some() == self.generator.is_some() {
            return Ok(None);
        }
        let (recipe, order) = (Arc::clone(&self.recipe), order.unwrap_or_else(|| self.order.clone()));
        Ok(Some(Arc::new(Self { recipe, order, generator, workers: self.workers })))
    }
}

impl<D: Dataset + 'static, B: Send + 'static> RowSource<D, B> {
    /// The batches of the pass that begins now. Collective when there is an exchange.
    ///
    /// Draws from generators in the order of the reference: the state of rank 0 arrives, the loader draws
    /// its seed for workers (`_BaseDataLoaderIter.__init__` of PyTorch, whether it has workers or not), and
    /// then the sampler draws. So the default generator stays in step with that of a Python program.
    ///
    /// With `resumed`, the sampler's own generator begins in that state.
    fn schedule(&self, plan: &PassPlan<'_, B>, resumed: Option<&[u8]>) -> Result<(Schedule, PassStart)> {
        let rank = plan.sharding.rank;
        if let (Some(exchange), Some(generator)) = (plan.exchange, self.sampler_generator()) {
            agreement::agree_on_generator(exchange, &generator, self.order.len(), rank)?;
        }
        let default = match self.order.is_settled() || self.order.generator().is_some() {
            true => None,
            false => Some(random::default_state()?),
        };
        random::draw_seed(self.generator.as_ref())?;
        let drawing = self.order.begin_drawing(resumed)?;
        let random = RandomStates { default, sampler: drawing.state.clone() };
        let random = (random != RandomStates::default()).then_some(random);
        let (schedule, digest, seed) = match &self.order {
            Order::Rows { sampler, batch_size, drop_last } => {
                let reseeded =
                    self.order.seedable_sampler().zip(plan.seed).map(|(sampler, seed)| sampler.with_seed(seed));
                let sampler: &dyn Sampler = reseeded.as_ref().map_or(&**sampler, |sampler| sampler);
                let (order, seed) = match plan.exchange {
                    Some(exchange) => agreement::agreed_indices(exchange, sampler, plan.epoch, rank)?,
                    None => (order_of(sampler, plan.epoch)?, seed_of(sampler)),
                };
                let schedule = Schedule::of_rows(&plan.sharding, *batch_size, *drop_last, order.clone());
                (schedule, OrderDigest::of_rows(order), seed)
            }
            Order::Batches(sampler) => {
                let mut batches = sampler.batches(plan.epoch)?;
                if let Some(exchange) = plan.exchange {
                    batches = agreement::agreed_batches(exchange, batches)?;
                }
                let digest = OrderDigest::of_batches(&batches);
                (schedule_of_batches(&**sampler, batches, &plan.sharding)?, digest, None)
            }
        };
        Ok((schedule, PassStart { random, seed, digest: Some(digest) }))
    }

    /// The rest of a pass that another run began: the same order is drawn again, from the same random numbers.
    fn resumed_schedule(&self, plan: &PassPlan<'_, B>, state: &DataLoaderState) -> Result<(Schedule, PassStart)> {
        let (mut schedule, start) = {
            // The default generator is where the checkpoint of the whole run has put it, and stays there.
            let random = state.random.as_ref();
            let _as_before = DefaultGeneratorGuard::enter(random.and_then(|random| random.default.as_deref()))?;
            self.schedule(plan, random.and_then(|random| random.sampler.as_deref()))?
        };
        state.check_order(start.digest.as_ref())?;
        schedule.start_after(state.rows_delivered)?;
        Ok((schedule, start))
    }

    /// The same rows in an order of a seed and the epoch; `None` where the sampler does not permute all rows.
    fn seedable_order(&self, data_seed: Option<u64>) -> Result<Option<Order>> {
        let Some(random) = self.order.random_sampler() else { return Ok(None) };
        let seed = match data_seed {
            Some(seed) => seed,
            None => random::default_seed()?,
        };
        let mut order = self.order.clone();
        if let Order::Rows { sampler, .. } = &mut order {
            *sampler = Arc::new(random.to_seedable(seed));
        }
        Ok(Some(order))
    }

    /// Puts the generator of the sampler where the saved run had it. `false` if the sampler has no generator of its own, or the state has
    /// none for it.
    fn restore_sampler_generator(&self, state: &DataLoaderState) -> Result<bool> {
        let saved = state.random.as_ref().and_then(|random| random.sampler.as_deref());
        let (Some(generator), Some(saved)) = (self.sampler_generator(), saved) else { return Ok(false) };
        generator.set_state(&Tensor::f_from_slice(saved)?)?;
        Ok(true)
    }

    fn sampler_generator(&self) -> Option<SharedGenerator> {
        self.order.generator().and_then(GeneratorSlot::get)
    }

    fn make_round(&self, schedule: &Schedule, plan: &PassPlan<'_, B>) -> Arc<MakeRound<Vec<Option<B>>>> {
        let (recipe, schedule) = (Arc::clone(&self.recipe), schedule.clone());
        let (ranks, finish) = (plan.ranks.clone(), plan.finish.clone());
        Arc::new(move |round| {
            if round >= schedule.num_rounds(ranks.start) {
                return None;
            }
            let make = |rank| {
                let Some(rows) = schedule.batch(round, rank) else { return Ok(None) };
                let batch = recipe.make(&rows)?;
                match &finish {
                    Some(finish) => finish(batch).map(Some),
                    None => Ok(Some(batch)),
                }
            };
            Some(ranks.clone().map(make).collect())
        })
    }
}

fn schedule_of_batches(sampler: &dyn BatchSampler, batches: Vec<Vec<usize>>, sharding: &Sharding) -> Result<Schedule> {
    if let Some(position) = batches.iter().position(Vec::is_empty) {
        return Err(DataError::EmptySamplerBatch { position }.into());
    }
    match sampler.batch_size() {
        Some(batch_size) => {
            let order = flatten(batches, batch_size)?.into();
            Ok(Schedule::of_rows(sharding, batch_size, sampler.drop_last(), order))
        }
        None => Ok(Schedule::of_batches(sharding, sampler.drop_last(), batches.into())),
    }
}

struct RowPass<B> {
    schedule: Schedule,
    make: Arc<MakeRound<Vec<Option<B>>>>,
    workers: Option<Workers<Vec<Option<B>>>>,
    order: Order,
    own_sampler: bool,
    next_round: usize,
    num_rounds: usize,
    completed: bool,
}

impl<B: Send + 'static> Pass<B> for RowPass<B> {
    fn next_round(&mut self) -> Option<Result<Round<B>>> {
        if self.next_round == self.num_rounds {
            if std::mem::replace(&mut self.completed, true) {
                return None;
            }
            self.workers = None;
            return self.order.pass_completed().err().map(Err);
        }
        let round = self.next_round;
        self.next_round += 1;
        let made = match &self.workers {
            Some(workers) => workers.receive(round),
            None => (self.make)(round).unwrap_or_else(|| Err(DataError::WorkerGone { round }.into())),
        };
        Some(made.map(|batches| {
            let mut position = self.schedule.position(round);
            if self.own_sampler {
                // Which rows the other ranks have is not known here.
                position.counted_rows.clear();
            }
            Round {
                batches,
                position,
                delivered: self.schedule.delivered_after(round),
                stream: None,
                look_ahead: LookAhead::default(),
            }
        }))
    }

    fn num_left(&self) -> Option<usize> {
        Some(self.num_rounds - self.next_round)
    }
}
