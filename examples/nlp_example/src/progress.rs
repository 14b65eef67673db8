//! How far the training is: a bar on a terminal, a line now and then in a file.

use indicatif::{ProgressBar, ProgressStyle};
use std::io::Write;
use std::time::{Duration, Instant};

/// In a file, a line at most this often: enough to see that it lives, few enough to read.
const PAUSE_BETWEEN_LINES: Duration = Duration::from_secs(5);

/// Shows steps done, loss and learning rate; only where it is told to, so that several processes share one
/// screen.
///
/// ```
/// use nlp_example::progress::Progress;
///
/// let mut progress = Progress::hidden();
/// progress.begin_epoch(1, 3);
/// progress.step(|| Ok::<_, ()>((0.69, 5e-4))).unwrap();
/// assert_eq!(progress.num_steps(), 1);
/// ```
#[derive(Debug)]
pub struct Progress {
    /// Hidden unless standard error is a terminal.
    bar: ProgressBar,
    /// Does this process show anything?
    shows: bool,
    num_steps: usize,
    total_steps: usize,
    epoch: (usize, usize),
    next_line_at: Instant,
}

impl Progress {
    /// Shows `total_steps` batches on standard error.
    pub fn new(total_steps: usize) -> Self {
        let template = "{prefix} {wide_bar} {pos}/{len} batches{msg}, {eta} left";
        // The template is constant; a mistake in it would only cost the looks.
        let style = ProgressStyle::with_template(template).unwrap_or(ProgressStyle::default_bar());
        Self {
            bar: ProgressBar::new(total_steps as u64).with_style(style),
            shows: true,
            num_steps: 0,
            total_steps,
            epoch: (0, 0),
            next_line_at: Instant::now() + PAUSE_BETWEEN_LINES,
        }
    }

    /// Shows nothing: for all processes but one of each machine.
    pub fn hidden() -> Self {
        Self { shows: false, bar: ProgressBar::hidden(), ..Self::new(0) }
    }

    /// So many batches were gone through before, by runs that this one goes on from.
    pub fn go_on_from(&mut self, num_steps: usize) {
        self.num_steps = num_steps;
        self.bar.set_position(num_steps as u64);
        self.bar.reset_eta();
    }

    /// Says which epoch the coming steps belong to, counted from 1.
    pub fn begin_epoch(&mut self, epoch: usize, num_epochs: usize) {
        self.epoch = (epoch, num_epochs);
        self.bar.set_prefix(format!("epoch {epoch}/{num_epochs}"));
    }

    /// Counts one batch. `loss_and_rate` is asked only when it will be shown, because reading a loss waits for
    /// the device.
    ///
    /// # Errors
    /// Those of `loss_and_rate`.
    pub fn step<E>(&mut self, loss_and_rate: impl FnOnce() -> Result<(f64, f64), E>) -> Result<(), E> {
        self.num_steps += 1;
        self.bar.inc(1);
        let line_is_due = self.shows && self.bar.is_hidden() && self.next_line_at <= Instant::now();
        // Ten batches are a fraction of a second, and less often looks stuck.
        let bar_is_due = !self.bar.is_hidden() && self.num_steps % 10 == 1;
        if line_is_due || bar_is_due {
            let (loss, rate) = loss_and_rate()?;
            let message = format!("loss {loss:.4}, learning rate {rate:.2e}");
            if line_is_due {
                let (epoch, num_epochs) = self.epoch;
                let (done, total) = (self.num_steps, self.total_steps);
                eprintln!("epoch {epoch}/{num_epochs}, {done}/{total} batches, {message}");
                self.next_line_at = Instant::now() + PAUSE_BETWEEN_LINES;
            }
            self.bar.set_message(format!(", {message}"));
        }
        Ok(())
    }

    /// Prints a line on standard output, above the bar if there is one. Training goes on where nobody reads it.
    pub fn print(&self, line: &str) {
        if self.shows {
            let _ = self.bar.suspend(|| writeln!(std::io::stdout(), "{line}"));
        }
    }

    /// Batches counted so far.
    pub fn num_steps(&self) -> usize {
        self.num_steps
    }

    /// Takes the bar off the screen.
    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }
}
