//! The ranks of a job as a grid.

use crate::Result;
use crate::error::config::ConfigErrorKind;

/// Ranks in rows: a model is divided among the neighbours in a row, and the rows hold the same (PyTorch's `DeviceMesh` of
/// `dp_replicate` x `dp_shard`).
///
/// ```
/// use accelerate_core::mesh::Mesh;
/// let mesh = Mesh::new(6, 2)?;
/// assert_eq!((mesh.num_replicas(), mesh.shard_size()), (3, 2));
/// assert_eq!(mesh.shard_ranks(3), [2, 3]);
/// assert_eq!(mesh.replica_ranks(3), [1, 3, 5]);
/// assert!(Mesh::new(6, 4).is_err());
/// # Ok::<(), accelerate_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mesh {
    num_replicas: usize,
    shard_size: usize,
}

impl Mesh {
    /// `world_size` ranks in rows of `shard_size`.
    ///
    /// # Errors
    /// [`Error::is_config`](crate::Error::is_config): they do not fill whole rows.
    pub fn new(world_size: usize, shard_size: usize) -> Result<Self> {
        if shard_size == 0 || world_size == 0 || !world_size.is_multiple_of(shard_size) {
            return Err(ConfigErrorKind::IncompleteMesh { world_size, shard_size }.into());
        }
        Ok(Self { num_replicas: world_size / shard_size, shard_size })
    }

    /// How many ranks hold the same.
    pub fn num_replicas(&self) -> usize {
        self.num_replicas
    }

    /// Among how many ranks a model is divided.
    pub fn shard_size(&self) -> usize {
        self.shard_size
    }

    /// All ranks.
    pub fn world_size(&self) -> usize {
        self.num_replicas * self.shard_size
    }

    /// The ranks among which the model is divided that rank `rank` has a part of, in the order of the parts.
    pub fn shard_ranks(&self, rank: usize) -> Vec<usize> {
        let first = rank / self.shard_size * self.shard_size;
        (first..first + self.shard_size).collect()
    }

    /// The ranks that hold the same part as rank `rank`.
    pub fn replica_ranks(&self, rank: usize) -> Vec<usize> {
        (rank % self.shard_size..self.world_size()).step_by(self.shard_size).collect()
    }
}

/// One row: every rank has another part.
impl From<usize> for Mesh {
    fn from(world_size: usize) -> Self {
        Self { num_replicas: 1, shard_size: world_size.max(1) }
    }
}
