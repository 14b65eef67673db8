//! Ranks for tests and examples: several accelerators in one process, connected by Gloo.

use crate::accelerator::{Accelerator, AcceleratorBuilder};
use crate::error::{Error, Result, panic_text};
use crate::group::{Group, Members, connect_gloo};
use std::time::Duration;
use torch_ext::{GlooInterface, GlooOptions, Store};

/// Runs `body` on `world_size` ranks, each on a thread of its own and with an accelerator that `builder` makes, and returns the
/// results in rank order.
///
/// The ranks are real: each has its own Gloo group over the loopback, and collectives move bytes. What
/// they share is what threads share: libtorch's default random generator above all. A rank that fails or
/// panics ends the call with an error that names it; collectives have a deadline of a minute. No variable has to be set, and
/// several tests of one process may do this at the same time.
///
/// ```
/// use accelerate::testing;
///
/// let indices = testing::ranks(3, Default::default(), |accelerator| Ok(accelerator.process_index()))?;
/// assert_eq!(indices, [0, 1, 2]);
/// # Ok::<(), accelerate::Error>(())
/// ```
pub fn ranks<T: Send>(
    world_size: usize,
    builder: AcceleratorBuilder,
    body: impl Fn(Accelerator) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let store = Store::hash()?;
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..world_size)
            .map(|rank| {
                let (store, builder, body) = (&store, builder.clone(), &body);
                scope.spawn(move || body(builder.build_in_group(join(store, rank, world_size)?)?))
            })
            .collect();
        let mut first_error = None;
        let mut results = Vec::with_capacity(world_size);
        for (rank, thread) in threads.into_iter().enumerate() {
            let outcome =
                thread.join().unwrap_or_else(|panic| Err(Error::other(format!("panicked: {}", panic_text(&*panic)))));
            match outcome {
                Ok(value) => results.push(value),
                // The rank that lost its peers is rarely the one that failed first.
                Err(error) if first_error.as_ref().is_none_or(Error::is_peer_failure) => {
                    first_error = Some(error.context(format!("rank {rank}")));
                }
                Err(_) => {}
            }
        }
        first_error.map_or(Ok(results), Err)
    })
}

fn join(store: &Store, rank: usize, world_size: usize) -> Result<Group> {
    join_with_deadline(store, rank, world_size, Duration::from_secs(60))
}

/// One rank's end of a group whose collectives have this deadline. Collective.
pub(crate) fn join_with_deadline(store: &Store, rank: usize, world_size: usize, timeout: Duration) -> Result<Group> {
    let options =
        GlooOptions { timeout, interface: GlooInterface::Address("127.0.0.1".to_owned()), ..GlooOptions::default() };
    Group::new(connect_gloo(options.clone()), store, options, Members::all(rank, world_size))
}
