//! A progress bar for another program's work: it shows how many bytes have appeared in a folder.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// Prints a line on standard error. Where nobody reads it, the work goes on.
pub(crate) fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Watches a folder until it is dropped.
#[derive(Debug)]
pub(crate) struct Watch {
    bar: ProgressBar,
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    /// Starts to show how many bytes are in `folder` and below.
    pub(crate) fn bytes_in(title: &str, folder: &Path) -> Watch {
        let bar = ProgressBar::new_spinner();
        bar.set_style(style("{spinner} {msg} {bytes} ({bytes_per_sec})"));
        bar.set_message(title.to_owned());
        let (stop, stopped) = channel();
        let thread = std::thread::spawn({
            let (bar, folder) = (bar.clone(), folder.to_path_buf());
            move || {
                while stopped.recv_timeout(Duration::from_millis(200)) == Err(RecvTimeoutError::Timeout) {
                    bar.set_position(bytes_below(&folder));
                }
            }
        });
        Watch { bar, stop: Some(stop), thread: Some(thread) }
    }

    /// Turns the spinner into a bar, once the total is known.
    pub(crate) fn set_total(&self, bytes: Option<u64>) {
        if let Some(bytes) = bytes {
            self.bar.set_style(style("{msg} [{bar:32}] {bytes}/{total_bytes} ({bytes_per_sec}, {eta} left)"));
            self.bar.set_length(bytes);
        }
    }

    /// Leaves a line that says that it is done.
    pub(crate) fn finish(self) {
        let message = self.bar.message();
        self.bar.finish_and_clear();
        say(&format!("{message}: done in {:.0} s", self.bar.elapsed().as_secs_f64()));
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.stop.take();
        if let Some(thread) = self.thread.take() {
            // The thread only reads a folder; that it ended is all that matters here.
            let _ = thread.join();
        }
        self.bar.finish_and_clear();
    }
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}

/// Files come and go while pip works, so what cannot be read counts as nothing.
fn bytes_below(folder: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(folder) else {
        return 0;
    };
    let size = |path: PathBuf| match fs::symlink_metadata(&path) {
        Ok(found) if found.is_dir() => bytes_below(&path),
        Ok(found) => found.len(),
        Err(_) => 0,
    };
    entries.flatten().map(|entry| size(entry.path())).sum()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_all_files_below_are_counted() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("inner")).unwrap();
        fs::write(folder.path().join("a"), "123").unwrap();
        fs::write(folder.path().join("inner/b"), "4567").unwrap();
        assert_eq!(bytes_below(folder.path()), 7);
        assert_eq!(bytes_below(&folder.path().join("absent")), 0);
    }
}
