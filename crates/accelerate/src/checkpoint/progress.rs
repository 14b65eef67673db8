//! How far a save is, on the terminal of whoever waits for it.
//!
//! Nothing is drawn while the training goes on beside a save: the terminal belongs to the program then, which may have a bar of
//! its own there. A program that waits draws nothing, so that its bar lends its line to this one, and has it back afterwards.

use indicatif::{ProgressBar, ProgressStyle};
use std::io::{IsTerminal, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::Duration;

/// Who has waited for so long wants to know why.
const SHOWN_AFTER: Duration = Duration::from_secs(1);
/// Often enough to be seen moving.
const PERIOD: Duration = Duration::from_millis(100);
/// To the beginning of the line, which becomes empty.
const CLEAR_LINE: &[u8] = b"\r\x1b[2K";

/// How many bytes have been written. Clones count together.
#[derive(Clone, Debug, Default)]
pub(crate) struct NumWritten(Arc<AtomicU64>);

impl NumWritten {
    pub(super) fn add(&self, num_bytes: usize) {
        self.0.fetch_add(num_bytes as u64, Ordering::Relaxed);
    }

    pub(super) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// What one process writes of a save, and how much of it is written.
#[derive(Clone, Debug)]
pub(crate) struct SaveProgress {
    /// What is saved.
    pub(super) name: String,
    /// Of the files of this process.
    pub(super) total_bytes: u64,
    pub(super) written: NumWritten,
    /// The main process shows its part, which is about as large as that of any other.
    pub(super) is_main_process: bool,
}

impl SaveProgress {
    /// Does the work, and shows how far the save is if that takes long.
    pub(crate) fn shown_while<T>(&self, work: impl FnOnce() -> T) -> T {
        if !is_shown(self.is_main_process, std::io::stderr().is_terminal()) {
            return work();
        }
        thread::scope(|scope| {
            // Closed when the work is done, and when it panics.
            let (_working, done) = mpsc::channel();
            let show = move || self.show(&done);
            // Not a reason to save nothing.
            let _ = thread::Builder::new().name("progress".to_owned()).spawn_scoped(scope, show);
            work()
        })
    }

    fn show(&self, done: &Receiver<()>) {
        let mut bar = None;
        watch(done, SHOWN_AFTER, PERIOD, || {
            let bar = bar.get_or_insert_with(|| Bar::new(&self.name, self.total_bytes));
            let written = self.written.get();
            bar.0.set_style(style(template(written, self.total_bytes)));
            bar.0.set_position(written);
        });
    }
}

fn is_shown(is_main_process: bool, is_terminal: bool) -> bool {
    is_main_process && is_terminal
}

/// What is shown.
fn template(written: u64, total: u64) -> &'static str {
    match written < total {
        true => "saving {msg} [{bar:24}] {decimal_bytes} of {decimal_total_bytes}, {decimal_bytes_per_sec}",
        false => "saving {msg}: {decimal_bytes} written, waiting for the disk and other processes",
    }
}

fn style(template: &str) -> ProgressStyle {
    // The templates are constant; a mistake in one would only cost the looks.
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}

/// Draws again and again until the work is done; a first time only if it takes longer than `after`.
fn watch(done: &Receiver<()>, after: Duration, period: Duration, mut draw: impl FnMut()) {
    let mut pause = after;
    while done.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
        draw();
        pause = period;
    }
}

/// A bar in the line where the cursor is, which is empty afterwards.
struct Bar(ProgressBar);

impl Bar {
    fn new(name: &str, total_bytes: u64) -> Self {
        // A bar of the program's own may be there. Where nobody reads it, nobody misses it.
        let _ = std::io::stderr().write_all(CLEAR_LINE);
        Self(ProgressBar::new(total_bytes).with_message(name.to_owned()))
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case::main_process_at_a_terminal(true, true, true)]
    #[case::main_process_into_a_file(true, false, false)]
    #[case::another_process(false, true, false)]
    fn the_main_process_shows_it_at_a_terminal(
        #[case] is_main_process: bool,
        #[case] is_terminal: bool,
        #[case] wanted: bool,
    ) {
        assert_eq!(is_shown(is_main_process, is_terminal), wanted);
    }

    #[rstest]
    #[case::begun(0, 10, false)]
    #[case::almost(9, 10, false)]
    #[case::written(10, 10, true)]
    #[case::nothing_to_write(0, 0, true)]
    fn it_says_what_is_waited_for(#[case] written: u64, #[case] total: u64, #[case] is_written: bool) {
        let template = template(written, total);
        assert_eq!(template.contains("waiting for the disk"), is_written);
        assert_eq!(template.contains("{bar"), !is_written);
        ProgressStyle::with_template(template).unwrap();
    }

    #[test]
    fn what_is_done_in_time_is_not_shown() {
        let (working, done) = mpsc::channel();
        drop(working);
        watch(&done, Duration::MAX, Duration::ZERO, || unreachable!());
    }

    #[test]
    fn what_takes_longer_is_shown_until_it_is_done() {
        let (working, done) = mpsc::channel::<()>();
        let (mut working, mut num_drawn) = (Some(working), 0);
        watch(&done, Duration::ZERO, Duration::ZERO, || {
            num_drawn += 1;
            working.take_if(|_| num_drawn == 3);
        });
        assert_eq!(num_drawn, 3);
    }
}
