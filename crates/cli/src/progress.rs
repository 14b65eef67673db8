//! Bars over bytes on standard error, for work that takes longer than a moment.

use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use accelerate_core::weight_files::format_size;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};

/// Work that is done sooner shows nothing.
const MOMENT: Duration = Duration::from_millis(500);

/// A bar. Clones are the same one.
#[derive(Clone, Debug)]
pub(crate) struct Progress {
    bar: ProgressBar,
    /// Of one that is never shown, nothing.
    begun: Option<Instant>,
    is_shown: Arc<AtomicBool>,
}

impl Progress {
    /// Over so many bytes, with a word for what becomes of them. It is drawn at a terminal only.
    pub(crate) fn new(doing: &'static str, num_bytes: u64) -> Self {
        const TEMPLATE: &str = "{msg} [{bar:32}] {done} of {total} ({rate}/s, {eta} left)";
        type Key = fn(&ProgressState, &mut dyn Write);
        // Sizes look as they do everywhere else.
        let keys: [(&'static str, Key); 3] = [
            ("done", |state, out| write_size(out, state.pos())),
            ("total", |state, out| write_size(out, state.len().unwrap_or_default())),
            ("rate", |state, out| write_size(out, state.per_sec() as u64)),
        ];
        // Only a template that is wrong has another style.
        let style = ProgressStyle::with_template(TEMPLATE).unwrap_or_else(|_| ProgressStyle::default_bar());
        let style = keys.into_iter().fold(style, |style, (name, key)| style.with_key(name, key));
        let bar = ProgressBar::with_draw_target(Some(num_bytes), ProgressDrawTarget::hidden());
        let bar = bar.with_style(style).with_message(doing);
        Self { bar, begun: Some(Instant::now()), is_shown: Arc::default() }
    }

    /// One that nobody sees.
    pub(crate) fn hidden() -> Self {
        Self { bar: ProgressBar::hidden(), begun: None, is_shown: Arc::default() }
    }

    /// So many bytes are done.
    pub(crate) fn inc(&self, num_bytes: u64) {
        self.bar.inc(num_bytes);
        if is_due(self.begun.map(|begun| begun.elapsed())) && !self.is_shown.swap(true, Ordering::Relaxed) {
            self.bar.set_draw_target(ProgressDrawTarget::stderr());
        }
    }

    /// Takes it away.
    pub(crate) fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

fn write_size(out: &mut dyn Write, num_bytes: u64) {
    // It becomes a text, which takes it.
    let _ = out.write_str(&format_size(num_bytes));
}

fn is_due(elapsed: Option<Duration>) -> bool {
    elapsed.is_some_and(|elapsed| elapsed >= MOMENT)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use indicatif::TermLike;
    use rstest::rstest;
    use std::io;
    use std::sync::Mutex;

    #[rstest]
    #[case::hidden(None, false)]
    #[case::milliseconds(Some(Duration::from_millis(20)), false)]
    #[case::longer(Some(Duration::from_secs(1)), true)]
    fn a_bar_is_for_work_that_takes_longer_than_a_moment(#[case] elapsed: Option<Duration>, #[case] wanted: bool) {
        assert_eq!(is_due(elapsed), wanted);
    }

    /// A terminal that keeps all that is written on it.
    #[derive(Clone, Debug, Default)]
    struct Screen(Arc<Mutex<String>>);

    impl TermLike for Screen {
        fn width(&self) -> u16 {
            200
        }

        fn move_cursor_up(&self, _: usize) -> io::Result<()> {
            Ok(())
        }

        fn move_cursor_down(&self, _: usize) -> io::Result<()> {
            Ok(())
        }

        fn move_cursor_right(&self, _: usize) -> io::Result<()> {
            Ok(())
        }

        fn move_cursor_left(&self, _: usize) -> io::Result<()> {
            Ok(())
        }

        fn write_line(&self, text: &str) -> io::Result<()> {
            self.write_str(text)
        }

        fn write_str(&self, text: &str) -> io::Result<()> {
            self.0.lock().unwrap().push_str(text);
            Ok(())
        }

        fn clear_line(&self) -> io::Result<()> {
            Ok(())
        }

        fn flush(&self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_bar_shows_sizes_as_tables_do() {
        let screen = Screen::default();
        let progress = Progress::new("merging", 2_000_000);
        progress.bar.set_draw_target(ProgressDrawTarget::term_like(Box::new(screen.clone())));
        progress.inc(1_500_000);
        progress.bar.tick();
        let shown = screen.0.lock().unwrap().clone();
        assert!(shown.contains("merging [") && shown.contains("1.5 MB of 2 MB ("), "{shown}");
    }
}
