//! Every collective goes through a [`Group`]: it knows the operation's name, number, shape and deadline.

mod call_board;
mod calls;
mod compare;
mod exchange;
mod explain;
mod journal;
mod members;
mod overlapped;
mod parts;
mod peer_call;
mod peer_calls;
mod peer_memory;
mod peer_process;
mod peer_reads;
mod peer_waits;
mod pending;
mod staging;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
mod transport;
mod watch;
mod wire;

use crate::error::{CollectiveError, Error, Result};
use crate::status;
use journal::Journal;
pub(crate) use members::Members;
use peer_call::PeerCall;
use peer_calls::PeerCalls;
pub(crate) use peer_process::PeerProcess;
pub(crate) use peer_reads::MOST_PENDING;
pub(crate) use pending::{PendingCollective, PendingReduceScatter};
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tch::{Device, Kind, Tensor};
use torch_ext::{GlooOptions, ProcessGroup, Store, scalar};
pub(crate) use transport::{NeededBy, PendingSum, ShardTransport};
pub(crate) use watch::Watch;

/// How values of several ranks become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReduceOp {
    /// Sum over ranks.
    Sum,
    /// Sum over ranks divided by the world size.
    Mean,
    /// Largest value.
    Max,
    /// Smallest value.
    Min,
}

impl ReduceOp {
    /// What the backend computes: it knows no means of all types.
    fn of_backend(self) -> torch_ext::ReduceOp {
        match self {
            ReduceOp::Sum | ReduceOp::Mean => torch_ext::ReduceOp::Sum,
            ReduceOp::Max => torch_ext::ReduceOp::Max,
            ReduceOp::Min => torch_ext::ReduceOp::Min,
        }
    }
}

/// Processes that work together. Cheap to clone; clones count operations together.
///
/// Every method that says "collective" has to be called by all ranks, in the same order, with the same
/// shapes and dtypes. Each call has the group's deadline: a rank that died, is stuck or makes another call
/// becomes an error on the others that names it ([`Error::is_timeout`](crate::Error::is_timeout),
/// [`Error::is_peer_failure`](crate::Error::is_peer_failure)), never a hang. A group of one process answers
/// at once.
///
/// ```
/// use accelerate::{ReduceOp, tch::Tensor, testing};
///
/// testing::ranks(2, Default::default(), |accelerator| {
///     let tensor = Tensor::from_slice(&[accelerator.process_index() as f32]);
///     accelerator.group().all_reduce(&tensor, ReduceOp::Sum)?;
///     assert_eq!(tensor, Tensor::from_slice(&[1.0f32]));
///     Ok(())
/// })?;
/// # Ok::<(), accelerate::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Group {
    inner: Arc<Inner>,
    /// Ranks compare their calls before they make them.
    compares_calls: bool,
    /// Says when calls of this process take long.
    watch: Option<Arc<Watch>>,
    /// The process of rank 0 of the run, with which the store ends.
    rank_0: Option<Arc<PeerProcess>>,
    /// A call has failed on this process, of this group or of one that was made from it: the others may be anywhere.
    is_out_of_step: Arc<AtomicBool>,
}

struct Inner {
    members: Members,
    /// The same on all ranks, and another one for each group.
    name: Arc<str>,
    /// Absent in a group of one.
    links: Option<Links>,
    sequence: AtomicU64,
}

struct Links {
    // Declared, and so dropped, before the store that the backend met in.
    process_group: Arc<ProcessGroup>,
    journal: Journal,
    timeout: Duration,
    /// How to connect the same ranks once more: as they are, or over Gloo in any case.
    store: Store,
    connect: Arc<Connect>,
    gloo: GlooOptions,
    num_forks: AtomicU64,
    /// Once a tensor of the CPU has travelled: the ranks, where all can read each other's memory.
    peer_calls: OnceLock<Option<PeerCalls>>,
}

/// Makes the backend of a group whose ranks meet in the store. Collective.
pub(crate) type Connect = dyn Fn(&Store, &Members) -> Result<ProcessGroup> + Send + Sync;

/// Connects the ranks over Gloo. No rank goes on before all have their connections: one that ended by then, with nothing left to
/// do, would break those that the others are still making.
pub(crate) fn connect_gloo(options: GlooOptions) -> Arc<Connect> {
    Arc::new(move |store: &Store, members: &Members| {
        let group = ProcessGroup::gloo(&store.prefix("gloo")?, members.rank(), members.world_size(), &options)?;
        group.barrier(None)?.wait(None)?;
        Ok(group)
    })
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Group")
            .field("rank", &self.members.rank())
            .field("world_size", &self.members.world_size())
            .field("sequence", &self.sequence)
            .finish()
    }
}

impl Group {
    /// A group of one.
    pub(crate) fn single_process() -> Self {
        Self::of("", Members::all(0, 1), None)
    }

    /// A group over the backend that `connect` makes; its ranks share `store`. Collective.
    ///
    /// `gloo` is how they connect for [`Group::side_group`], and holds the deadline of all collectives.
    pub(crate) fn new(connect: Arc<Connect>, store: &Store, gloo: GlooOptions, members: Members) -> Result<Self> {
        Self::named("", connect, store, gloo, members)
    }

    fn named(name: &str, connect: Arc<Connect>, store: &Store, gloo: GlooOptions, members: Members) -> Result<Self> {
        let process_group = connect(store, &members)?;
        let links = Links {
            process_group: Arc::new(process_group),
            journal: Journal::new(store, members.clone())?,
            timeout: gloo.timeout,
            store: store.clone(),
            connect,
            gloo,
            num_forks: AtomicU64::new(0),
            peer_calls: OnceLock::new(),
        };
        Ok(Self::of(name, members, Some(links)))
    }

    fn of(name: &str, members: Members, links: Option<Links>) -> Self {
        let inner = Inner { members, name: name.into(), links, sequence: AtomicU64::new(0) };
        let is_out_of_step = Arc::default();
        Self { inner: Arc::new(inner), compares_calls: false, watch: None, rank_0: None, is_out_of_step }
    }

    /// The same processes, connected once more: what becomes of one group does not touch the other. Collective.
    pub(crate) fn fork(&self) -> Result<Self> {
        self.connect_again("", self.inner.members.clone(), false, |links| {
            (Arc::clone(&links.connect), links.gloo.clone())
        })
    }

    /// The ranks `ranks` of this group, this one among them, connected once more among themselves: their ranks there are
    /// their places in the list. Collective over the whole group, where every rank names the subgroup that it is in.
    pub(crate) fn subgroup(&self, ranks: &[usize]) -> Result<Self> {
        let own = ranks.iter().position(|&rank| rank == self.rank());
        let own = own.ok_or_else(|| Error::other(format!("rank {} is not among ranks {ranks:?}", self.rank())))?;
        let members = self.inner.members.subgroup(ranks, own);
        let name = ranks.first().map_or_else(String::new, |first| format!("/of/{first}"));
        self.connect_again(&name, members, false, |links| (Arc::clone(&links.connect), links.gloo.clone()))
    }

    /// The same processes with connections of their own, over Gloo: for a thread in the background, whose collectives
    /// would otherwise come between those of the training loop in another order on every rank. Collective.
    pub(crate) fn side_group(&self) -> Result<Self> {
        self.connect_again("", self.inner.members.clone(), true, |links| {
            let options = GlooOptions { threads: 1, ..links.gloo.clone() };
            (connect_gloo(options.clone()), options)
        })
    }

    /// How often the group was connected once more, the same on all ranks.
    pub(crate) fn num_forks(&self) -> u64 {
        self.inner.links.as_ref().map_or(0, |links| links.num_forks.load(Ordering::Relaxed))
    }

    fn connect_again(
        &self,
        name: &str,
        members: Members,
        is_in_background: bool,
        how: impl FnOnce(&Links) -> (Arc<Connect>, GlooOptions),
    ) -> Result<Self> {
        let Some(links) = &self.inner.links else { return Ok(Self::single_process()) };
        let number = links.num_forks.fetch_add(1, Ordering::Relaxed);
        if members.world_size() == 1 {
            return Ok(Self::of(name, members, None));
        }
        let fork = format!("fork/{number}{name}");
        let store = links.store.prefix(&fork)?;
        let (connect, gloo) = how(links);
        let group = Self::named(&format!("{}/{fork}", self.inner.name), connect, &store, gloo, members)?;
        let group = Self { inner: group.inner, ..self.clone() };
        group.add_to_watch(is_in_background);
        Ok(group)
    }

    /// Tells ranks that will miss this one in a collective why it makes none any more.
    pub(crate) fn leave(&self, reason: &str) -> Result<()> {
        match &self.inner.links {
            Some(links) => Ok(links.journal.leave(reason)?),
            None => Ok(()),
        }
    }

    /// The store in which the ranks met, for what they have to say outside of collectives; none in a group of one.
    pub(crate) fn store(&self) -> Option<&Store> {
        self.inner.links.as_ref().map(|links| &links.store)
    }

    /// This process's number in the group, from 0.
    pub fn rank(&self) -> usize {
        self.inner.members.rank()
    }

    /// Number of processes in the group.
    pub fn world_size(&self) -> usize {
        self.inner.members.world_size()
    }

    /// How long a collective waits for the slowest rank; `None` in a group of one.
    pub fn timeout(&self) -> Option<Duration> {
        self.inner.links.as_ref().map(|links| links.timeout)
    }

    /// How many calls of the group this process has made.
    #[cfg(test)]
    pub(crate) fn num_calls(&self) -> u64 {
        self.inner.sequence.load(Ordering::Relaxed)
    }

    /// The backend, for the engine that hands it to the reducer.
    pub(crate) fn process_group(&self) -> Option<&Arc<ProcessGroup>> {
        self.inner.links.as_ref().map(|links| &links.process_group)
    }

    /// Combines the tensor over all ranks, in place. Any shape; any float, integer or complex dtype, and `Bool`, whose sum says
    /// whether it is true on any rank. Collective.
    ///
    /// All ranks get the same bits, and those that Gloo would give: on one machine, where ranks read each other's memory in place
    /// of sending, they add in the order of its ring.
    ///
    /// # Errors
    /// [`ReduceOp::Mean`] of integers or `Bool` over several ranks, which these dtypes cannot hold; [`ReduceOp::Max`] and
    /// [`ReduceOp::Min`] of complex numbers, which have no order.
    #[track_caller]
    pub fn all_reduce(&self, tensor: &Tensor, op: ReduceOp) -> Result<()> {
        let _called = status::here();
        const OP: &str = "all_reduce";
        self.compare_call(OP, || format!("{} ({op:?})", shape_text(tensor)))?;
        if self.world_size() == 1 {
            return Ok(());
        }
        wire::check_reduction(OP, tensor, op)?;
        let mut reduced = tensor.f_detach()?;
        let dense = reduced.f_contiguous()?;
        let (sent, of_backend) = wire::reducible(&dense, op)?;
        let call = PeerCall::AllReduce { tensor: &sent, asked: op, op: of_backend, factor: None };
        let shape = || format!("{} ({op:?})", shape_text(tensor));
        self.run_uncompared(OP, &shape, &call, |group| group.all_reduce(&sent, of_backend, None))?;
        if sent.data_ptr() != reduced.data_ptr() {
            reduced.f_copy_(&sent.f_view_as(&reduced)?)?;
        }
        if op == ReduceOp::Mean {
            scalar::div_(&reduced, self.world_size() as f64)?;
        }
        Ok(())
    }

    /// Overwrites the tensor on every rank with that of rank `source`. Any dtype and shape. Collective.
    #[track_caller]
    pub fn broadcast(&self, tensor: &Tensor, source: usize) -> Result<()> {
        let _called = status::here();
        self.compare_call("broadcast", || format!("{} from rank {source}", shape_text(tensor)))?;
        self.check_rank("broadcast", source)?;
        let wire = wire::movable(tensor)?;
        let call = PeerCall::Broadcast { tensor: &wire, source };
        let shape = || format!("{} from rank {source}", shape_text(tensor));
        self.run_uncompared("broadcast", &shape, &call, |group| group.broadcast(&wire, source, None))?;
        wire::write_back(&wire, tensor)
    }

    /// Every rank's tensor, in rank order; shapes and dtypes are equal on all ranks. Collective.
    #[track_caller]
    pub fn all_gather(&self, tensor: &Tensor) -> Result<Vec<Tensor>> {
        let _called = status::here();
        let input = wire::movable(tensor)?;
        let outputs: Vec<Tensor> = (0..self.world_size()).map(|_| input.f_empty_like()).collect::<Result<_, _>>()?;
        if self.world_size() == 1 {
            return Ok(vec![tensor.f_detach_copy()?]);
        }
        let call = PeerCall::AllGather { input: &input, places: &outputs };
        self.run("all_gather", &|| shape_text(tensor), &call, |group| group.all_gather(&outputs, &input, None))?;
        outputs.iter().map(|output| wire::restore(output, tensor)).collect()
    }

    /// All ranks' tensors joined along dim 0 in rank order: `[n, ...]` becomes `[world_size * n, ...]`, a
    /// 0-d tensor becomes `[world_size]`. Shapes and dtypes are equal on all ranks. Collective.
    #[track_caller]
    pub fn all_gather_into_tensor(&self, tensor: &Tensor) -> Result<Tensor> {
        let _called = status::here();
        let rows = if tensor.dim() == 0 { tensor.f_reshape([1])? } else { tensor.f_detach()? };
        let mut shape = rows.size();
        shape[0] *= self.world_size() as i64;
        let output = Tensor::f_empty(shape.as_slice(), (rows.kind(), rows.device()))?;
        self.all_gather_into(&output, &rows)?;
        Ok(output)
    }

    /// The same into memory that is there: `output` is `[world_size * n, ...]`. Collective.
    pub(crate) fn all_gather_into(&self, output: &Tensor, rows: &Tensor) -> Result<()> {
        if self.world_size() == 1 {
            output.shallow_clone().f_copy_(rows)?;
            return Ok(());
        }
        let (input, flat) = (wire::movable(rows)?, wire::movable(output)?);
        let places = flat.f_view([self.world_size() as i64, input.numel() as i64])?.f_unbind(0)?;
        let call = PeerCall::AllGather { input: &input, places: &places };
        let start = |group: &ProcessGroup| group.all_gather_into_tensor(&flat, &input, None);
        self.run("all_gather_into_tensor", &|| shape_text(rows), &call, start)
    }

    /// Combines all ranks' `[world_size * n, ...]` tensors; this rank gets its `[n, ...]` shard. Dtypes are those of
    /// [`Group::all_reduce`]. Collective.
    ///
    /// # Errors
    /// A first dim that is not a multiple of the world size; those of [`Group::all_reduce`].
    #[track_caller]
    pub fn reduce_scatter_tensor(&self, tensor: &Tensor, op: ReduceOp) -> Result<Tensor> {
        let _called = status::here();
        const OP: &str = "reduce_scatter_tensor";
        let mut shape = tensor.size();
        let world_size = self.world_size() as i64;
        if shape.first().is_none_or(|rows| rows % world_size != 0) {
            return Err(CollectiveError::Indivisible {
                op: OP,
                shape: shape_text(tensor),
                world_size: self.world_size(),
            }
            .into());
        }
        shape[0] /= world_size;
        let rows = tensor.f_detach()?.f_contiguous()?;
        if world_size == 1 {
            return Ok(rows.f_detach_copy()?);
        }
        wire::check_reduction(OP, tensor, op)?;
        let shard = Tensor::f_empty(shape.as_slice(), (tensor.kind(), tensor.device()))?;
        let call = PeerCall::ReduceScatter { rows: &rows, shard: &shard, op };
        if self.run_by_peers(OP, &|| format!("{} ({op:?})", shape_text(tensor)), &call)? {
            return wire::mean(shard, op, self.world_size());
        }
        let pending = self.start_reduce_scatter(&rows, || Ok(rows.f_empty_like()?), op, "")?;
        pending.write_to(shard.f_view([-1])?)?;
        wire::mean(shard, op, self.world_size())
    }

    /// Returns when every rank has called it. Collective.
    #[track_caller]
    pub fn barrier(&self) -> Result<()> {
        let _called = status::here();
        // An all-reduce of one number: Gloo's own barrier ignores a shorter deadline than the group's.
        self.run("barrier", &String::new, &PeerCall::Barrier, |group| group.barrier(None))
    }

    /// Overwrites many tensors with those of rank `source`, packed into few messages. Collective.
    pub(crate) fn broadcast_coalesced(&self, tensors: &[Tensor], source: usize) -> Result<()> {
        let Some(links) = &self.inner.links else { return Ok(()) };
        if tensors.is_empty() {
            return Ok(());
        }
        let shapes = || tensors.iter().map(shape_text).collect::<Vec<_>>().join(", ");
        self.compare_call("broadcast_coalesced", || format!("{} from rank {source}", shapes()))?;
        let wires = tensors.iter().map(wire::movable).collect::<Result<Vec<Tensor>>>()?;
        if !self.broadcast_by_peers(&wires, source)? {
            self.broadcast_packed(links, &wires, source)?;
        }
        wires.iter().zip(tensors).try_for_each(|(wire, tensor)| wire::write_back(wire, tensor))
    }

    /// Combines many tensors over all ranks, in place, packed into flat messages by dtype. Collective.
    ///
    /// [`ReduceOp::Mean`] needs floating dtypes.
    pub(crate) fn all_reduce_coalesced(&self, tensors: &[Tensor], op: ReduceOp) -> Result<()> {
        /// The size of PyTorch's gradient buckets: large messages, and little memory for copies.
        const BUFFER_BYTES: usize = 25 << 20;
        if self.world_size() == 1 || tensors.is_empty() {
            return Ok(());
        }
        let _no_grad = tch::no_grad_guard();
        let assignment = torch_ext::compute_bucket_assignment_by_size(tensors, &[BUFFER_BYTES])?;
        for bucket in 0..=assignment.iter().copied().max().unwrap_or(0) {
            let members: Vec<&Tensor> =
                tensors.iter().zip(&assignment).filter(|(_, own)| **own == bucket).map(|(tensor, _)| tensor).collect();
            let flat: Vec<Tensor> = members.iter().map(|tensor| tensor.f_reshape([-1])).collect::<Result<_, _>>()?;
            let buffer = Tensor::f_cat(&flat, 0)?;
            self.all_reduce(&buffer, op)?;
            let mut start = 0;
            for tensor in members {
                let elements = tensor.numel() as i64;
                tensor.shallow_clone().f_copy_(&buffer.f_narrow(0, start, elements)?.f_view_as(tensor)?)?;
                start += elements;
            }
        }
        Ok(())
    }

    /// Every rank's bytes, in rank order; lengths may differ. Collective (two operations).
    #[track_caller]
    pub fn all_gather_bytes(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        let _called = status::here();
        self.compare_call("all_gather_bytes", String::new)?;
        self.uncompared().gather_bytes(bytes)
    }

    fn gather_bytes(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        if self.world_size() == 1 {
            return Ok(vec![bytes.to_vec()]);
        }
        let lengths = self.all_gather_into_tensor(&Tensor::f_from_slice(&[bytes.len() as i64])?)?;
        let lengths = Vec::<i64>::try_from(&lengths)?;
        let longest = lengths.iter().copied().max().unwrap_or(0).max(1);
        let mut padded = bytes.to_vec();
        padded.resize(longest as usize, 0);
        let rows = self.all_gather(&Tensor::f_from_slice(&padded)?)?;
        rows.iter()
            .zip(lengths)
            .map(|(row, length)| {
                let mut bytes = Vec::<u8>::try_from(row)?;
                bytes.truncate(length as usize);
                Ok(bytes)
            })
            .collect()
    }

    /// Rank `source`'s bytes. Collective (two operations).
    #[track_caller]
    pub fn broadcast_bytes(&self, bytes: &[u8], source: usize) -> Result<Vec<u8>> {
        let _called = status::here();
        if self.world_size() == 1 {
            return Ok(bytes.to_vec());
        }
        self.compare_call("broadcast_bytes", || format!("rank {source}"))?;
        let group = self.uncompared();
        let length = Tensor::f_from_slice(&[bytes.len() as i64])?;
        group.broadcast(&length, source)?;
        let length = i64::try_from(&length)?;
        let buffer = if self.rank() == source {
            Tensor::f_from_slice(bytes)?
        } else {
            Tensor::f_zeros([length], (Kind::Uint8, Device::Cpu))?
        };
        if length > 0 {
            group.broadcast(&buffer, source)?;
        }
        Ok(Vec::try_from(&buffer)?)
    }

    /// Sends rank `r` the bytes `parts[r]`, `Uint8` of any length; every rank gets its own. `parts` is `None` on
    /// every rank but `source`. Over Gloo only. Collective.
    pub(crate) fn scatter_bytes(&self, parts: Option<&[Tensor]>, source: usize) -> Result<Tensor> {
        const OP: &str = "scatter_bytes";
        self.check_rank(OP, source)?;
        let Some(links) = &self.inner.links else {
            return Ok(parts.and_then(|parts| parts.first()).map_or_else(Tensor::new, Tensor::shallow_clone));
        };
        self.compare_call(OP, || format!("rank {source}"))?;
        let (sequence, group) = (self.next_sequence(), &links.process_group);
        let explain = |error| self.explain(links, OP, sequence, String::new(), error);
        // Messages of one round must not be taken for those of the next.
        let tag = (sequence % (1 << 20)) as i32;
        let Some(parts) = parts else {
            let length = Tensor::f_from_slice(&[0i64])?;
            group.recv(&length, Some(source), tag).and_then(|work| work.wait(None)).map_err(explain)?;
            let part = Tensor::f_empty([i64::try_from(&length)?], (Kind::Uint8, Device::Cpu))?;
            if 0 < part.numel() {
                group.recv(&part, Some(source), tag).and_then(|work| work.wait(None)).map_err(explain)?;
            }
            return Ok(part);
        };
        let mut in_flight = Vec::with_capacity(2 * parts.len());
        for (rank, part) in parts.iter().enumerate().filter(|(rank, _)| *rank != source) {
            let length = Tensor::f_from_slice(&[part.numel() as i64])?;
            in_flight.push((group.send(&length, rank, tag).map_err(explain)?, length));
            if 0 < part.numel() {
                in_flight.push((group.send(part, rank, tag).map_err(explain)?, part.shallow_clone()));
            }
        }
        in_flight.into_iter().try_for_each(|(work, _kept_until_sent)| work.wait(None)).map_err(explain)?;
        Ok(parts.get(source).map_or_else(Tensor::new, Tensor::shallow_clone))
    }

    fn check_rank(&self, op: &'static str, rank: usize) -> Result<()> {
        if rank < self.world_size() {
            return Ok(());
        }
        Err(CollectiveError::NoSuchRank { op, rank, world_size: self.world_size() }.into())
    }

    /// Has a call failed on this process, so that the other ranks may be anywhere, and nothing is to be waited for any more?
    pub(crate) fn is_out_of_step(&self) -> bool {
        self.is_out_of_step.load(Ordering::Relaxed)
    }

    /// The same group, which knows the process of rank 0, as do all groups that are made from it.
    pub(crate) fn with_rank_0(self, rank_0: Option<PeerProcess>) -> Self {
        Self { rank_0: rank_0.map(Arc::new), ..self }
    }
}

/// The same group, not one of the same ranks.
impl PartialEq for Group {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }
}

impl Eq for Group {}

/// A tensor's shape and dtype in running text: `[2, 3] Float`.
pub(crate) fn shape_text(tensor: &Tensor) -> String {
    format!("{:?} {:?}", tensor.size(), tensor.kind())
}
