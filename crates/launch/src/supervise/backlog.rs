//! Output that nobody takes. It holds up the ranks that print it, and neither signals nor deadlines.

use std::io;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};

use super::signals::{Event, Signals, suspend_this_process};
use super::timespec;
use crate::report::{Backlog, Reporter};

/// Ranks that are told to end may still print this much: one that waits for room does not save.
const LAST_WORDS_BYTES: usize = 16 << 20;
/// After a request to stop, output of which nobody takes anything for this long is left.
const PATIENCE: Duration = Duration::from_secs(1);

/// Is so much not written that nothing more is to be read?
pub(crate) fn is_full(reporter: &dyn Reporter, is_stopping: bool) -> bool {
    let most = if is_stopping { LAST_WORDS_BYTES } else { 0 };
    reporter.backlog().is_some_and(|backlog| backlog.num_bytes > most)
}

/// Waits until everything is written; once this process has been told to stop, only as long as somebody takes something. Returns
/// the signal that has told it.
pub(crate) fn hand_over(
    reporter: &mut dyn Reporter,
    signals: &mut Signals,
    mut stopped_by: Option<i32>,
) -> io::Result<Option<i32>> {
    let mut taken_at = Instant::now();
    while let Some(Backlog { room, .. }) = reporter.backlog() {
        let leave_at = stopped_by.map(|_| taken_at + PATIENCE);
        let timeout = leave_at.map(|at| timespec(at.saturating_duration_since(Instant::now())));
        let mut polled = [
            PollFd::from_borrowed_fd(signals.descriptor(), PollFlags::IN),
            PollFd::from_borrowed_fd(room, PollFlags::OUT),
        ];
        let [has_signal, has_room] = match poll(&mut polled, timeout.as_ref()) {
            Ok(_) => polled.map(|found| !found.revents().is_empty()),
            // By a signal.
            Err(_) => [true, false],
        };
        if has_room {
            reporter.resume()?;
            taken_at = Instant::now();
        } else if leave_at.is_some_and(|at| at <= Instant::now()) {
            reporter.abandon();
            break;
        }
        for event in if has_signal { signals.pending() } else { Vec::new() } {
            match event {
                Event::Stop(_) | Event::Typed(_) if stopped_by.is_some() => {
                    reporter.abandon();
                    return Ok(stopped_by);
                }
                Event::Stop(signal) | Event::Typed(signal) => {
                    (stopped_by, taken_at) = (Some(signal.as_raw()), Instant::now());
                }
                Event::Suspend => {
                    suspend_this_process();
                    taken_at = Instant::now();
                }
                Event::ChildEnded | Event::User(_) | Event::WindowChanged => {}
            }
        }
    }
    Ok(stopped_by)
}
