//! What is done with a pass, and whose the memory of the recordings is: decisions, without tensors.

use crate::error::{NnError, Result};
use tch::{Device, Kind};

/// So many of the first passes are made both ways and compared.
pub(super) const NUM_COMPARED: usize = 3;

/// What a recording was made for. Shapes and types of the inputs, and where everything else is that it reads and writes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Key {
    pub(super) inputs: Vec<(Vec<i64>, Kind, Device)>,
    pub(super) autocast: Option<Kind>,
    /// Addresses of parameters and buffers, and which of them want gradients.
    pub(super) stored: Vec<(usize, bool)>,
}

/// How a forward pass is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pass {
    /// By the model itself.
    Eager,
    /// It is recorded, then compared.
    Record,
    /// By the model and by the recording.
    Compare,
    /// By the recording alone.
    Replay,
}

/// How a pass in training mode is made, from what was recorded, how often that was compared, and what there is now.
pub(super) fn pass(recorded: Option<(&Key, usize)>, now: &Key) -> Pass {
    match recorded {
        None => Pass::Record,
        // Inputs of another form, such as the last batch of an epoch: what is recorded stays for the others.
        Some((key, _)) if (&key.inputs, key.autocast) != (&now.inputs, now.autocast) => Pass::Eager,
        // The recording reads where nothing is any more.
        Some((key, _)) if key != now => Pass::Record,
        Some((_, num_compared)) if num_compared < NUM_COMPARED => Pass::Compare,
        Some(_) => Pass::Replay,
    }
}

/// Whose the memory of the recordings is. A forward pass takes it from the one before, and a backward pass uses it up: intermediate
/// results give their places to later ones.
#[derive(Debug, Default)]
pub(super) struct Turns {
    last: u64,
    is_used: bool,
}

impl Turns {
    /// A forward pass, whose number its backward pass brings along.
    pub(super) fn begin(&mut self) -> u64 {
        self.last += 1;
        self.is_used = false;
        self.last
    }

    /// The backward pass of a forward pass.
    pub(super) fn take(&mut self, turn: u64) -> Result<()> {
        if turn != self.last {
            return Err(NnError::GraphOverwritten.into());
        }
        if std::mem::replace(&mut self.is_used, true) {
            return Err(NnError::GraphUsed.into());
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn key(rows: i64, autocast: Option<Kind>, address: usize) -> Key {
        Key { inputs: vec![(vec![rows, 4], Kind::Float, Device::Cpu)], autocast, stored: vec![(address, true)] }
    }

    #[test]
    fn a_pass_follows_from_what_is_known() {
        let own = key(8, None, 64);
        for (recorded, wanted) in [
            (None, Pass::Record),
            (Some((own.clone(), 0)), Pass::Compare),
            (Some((own.clone(), NUM_COMPARED - 1)), Pass::Compare),
            (Some((own.clone(), NUM_COMPARED)), Pass::Replay),
            (Some((key(7, None, 64), NUM_COMPARED)), Pass::Eager),
            (Some((key(8, Some(Kind::BFloat16), 64), NUM_COMPARED)), Pass::Eager),
            (Some((key(8, None, 128), NUM_COMPARED)), Pass::Record),
            (Some((key(7, None, 128), NUM_COMPARED)), Pass::Eager),
        ] {
            let known = recorded.as_ref().map(|(key, num_compared)| (key, *num_compared));
            assert_eq!(pass(known, &own), wanted, "{recorded:?}");
        }
    }

    #[test]
    fn a_backward_pass_is_that_of_the_last_forward_pass_and_the_only_one() {
        let mut turns = Turns::default();
        let first = turns.begin();
        turns.take(first).unwrap();
        assert!(turns.take(first).unwrap_err().to_string().contains("a second backward pass"));
        let (second, third) = (turns.begin(), turns.begin());
        assert!(turns.take(second).unwrap_err().to_string().contains("after another forward pass"));
        turns.take(third).unwrap();
    }
}
