//! Bringing the output of several ranks onto one screen or into one file, a line at a time.
//!
//! Laws:
//! 1. No byte is lost or changed; only prefixes, line ends and, on a terminal, "clear this line" are added.
//! 2. A line is never cut by another rank's line. The exceptions are lines that somebody waits to see
//!    before they are finished: a prompt after a pause, a line of over 16 MiB.
//! 3. On a terminal the unfinished line of the local main process is *live*: a progress bar, or a prompt. It
//!    has no prefix, which would make it wrap, and stays the last line of the screen: lines of others are
//!    put above it. If it begins with a carriage return or a control sequence it is passed through as it comes.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::line_prefix::LinePrefix;
use crate::report::{Source, Stream};
use crate::tail::without_control_sequences;

/// Unfinished lines are shown after a pause of this length at a terminal, where a person may be asked something.
const PAUSE_AT_TERMINAL: Duration = Duration::from_millis(100);
/// In a file, whole lines matter more than early ones.
const PAUSE_IN_FILE: Duration = Duration::from_secs(1);
/// A longer unfinished line is data, not a prompt: it waits for its end.
const PROMPT_LIMIT_BYTES: usize = 4096;
/// No line is held back beyond this size.
const LINE_LIMIT_BYTES: usize = 16 << 20;
const CLEAR_LINE: &[u8] = b"\r\x1b[2K";
/// Cyan, yellow, green, magenta, blue, red: a rank keeps its colour.
const COLOURS: [u8; 6] = [36, 33, 32, 35, 34, 31];

/// What the two streams of the launcher end at, and how to show lines there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Screens {
    pub(crate) stdout: bool,
    pub(crate) stderr: bool,
    pub(crate) has_prefix: bool,
    pub(crate) has_colour: bool,
}

/// Bytes for the launcher's own streams, in the order in which they must be written.
pub(crate) type Pieces = Vec<(Stream, Vec<u8>)>;

#[derive(Debug)]
pub(crate) struct Mixer {
    screens: Screens,
    /// In the place of `[rank N]`.
    line_prefix: Option<LinePrefix>,
    lines: BTreeMap<Source, Unfinished>,
    /// The unfinished line that stands on each screen; both streams at a terminal share the first.
    open: [Option<Open>; 2],
}

/// Bytes that have arrived but are not shown yet.
#[derive(Debug, Default)]
struct Unfinished {
    bytes: Vec<u8>,
    show_at: Option<Instant>,
}

#[derive(Debug)]
struct Open {
    source: Source,
    is_live: bool,
    /// What is visible of a live line, so that it can be drawn again.
    visible: Vec<u8>,
}

impl Mixer {
    pub(crate) fn new(screens: Screens) -> Self {
        Self { screens, line_prefix: None, lines: BTreeMap::new(), open: [None, None] }
    }

    pub(crate) fn set_line_prefix(&mut self, line_prefix: LinePrefix) {
        self.line_prefix = Some(line_prefix);
    }

    pub(crate) fn output(&mut self, source: Source, bytes: &[u8], now: Instant) -> Pieces {
        let mut pieces = Pieces::new();
        let (whole, rest) = match bytes.iter().rposition(|&byte| byte == b'\n') {
            Some(at) => bytes.split_at(at + 1),
            None => (&[][..], bytes),
        };
        let was_live = self.open_line(source.stream).is_some_and(|open| open.source == source && open.is_live);
        if !whole.is_empty() {
            let mut lines = std::mem::take(&mut self.lines.entry(source).or_default().bytes);
            lines.extend_from_slice(whole);
            self.show_lines(source, &lines, &mut pieces);
        }
        let line = self.lines.entry(source).or_default();
        line.bytes.extend_from_slice(rest);
        line.show_at = None;
        if line.bytes.is_empty() {
            return pieces;
        }
        // A bar that lets a line pass comes back at once, whatever it begins with.
        if was_live || self.shows_at_once(source) || self.lines[&source].bytes.len() > LINE_LIMIT_BYTES {
            self.show_unfinished(source, &mut pieces);
        } else if let Some(line) = self.lines.get_mut(&source)
            && line.bytes.len() <= PROMPT_LIMIT_BYTES
        {
            line.show_at = Some(now + pause(&self.screens, source.stream));
        }
        pieces
    }

    /// Nothing was read for a while, so no source has paused: unfinished lines wait anew.
    pub(crate) fn wait_anew(&mut self, now: Instant) {
        for (source, line) in &mut self.lines {
            line.show_at = line.show_at.map(|_| now + pause(&self.screens, source.stream));
        }
    }

    /// Ends the line of a source that ended without doing so.
    pub(crate) fn closed(&mut self, source: Source) -> Pieces {
        let mut pieces = Pieces::new();
        let line = self.lines.remove(&source).unwrap_or_default();
        if !line.bytes.is_empty() {
            let mut bytes = line.bytes;
            bytes.push(b'\n');
            self.show_lines(source, &bytes, &mut pieces);
        } else if let Some(open) = self.open_line(source.stream)
            && open.source == source
        {
            // A bar that has cleared itself leaves an empty line that needs no end.
            if !open.is_live || !without_control_sequences(&open.visible).is_empty() {
                push(&mut pieces, source.stream, b"\n");
            }
            *self.open_slot(source.stream) = None;
        }
        pieces
    }

    /// A line of the launcher's own, on standard error.
    pub(crate) fn message(&mut self, text: &str) -> Pieces {
        let mut pieces = Pieces::new();
        let hidden = self.hide_open_line(Stream::Stderr, None, &mut pieces);
        push(&mut pieces, Stream::Stderr, text.as_bytes());
        push(&mut pieces, Stream::Stderr, b"\n");
        self.draw_again(hidden, &mut pieces);
        pieces
    }

    pub(crate) fn wakes_at(&self) -> Option<Instant> {
        self.lines.values().filter_map(|line| line.show_at).min()
    }

    pub(crate) fn wake(&mut self, now: Instant) -> Pieces {
        let mut pieces = Pieces::new();
        let due: Vec<_> = self
            .lines
            .iter_mut()
            .filter(|(_, line)| line.show_at.is_some_and(|at| at <= now))
            .map(|(source, line)| {
                line.show_at = None;
                *source
            })
            .collect();
        for source in due {
            // Nothing but a whole line may come between a bar and the bottom of the screen.
            if !self.open_line(source.stream).is_some_and(|open| open.is_live && open.source != source) {
                self.show_unfinished(source, &mut pieces);
            }
        }
        pieces
    }

    /// `lines` ends with a line end.
    fn show_lines(&mut self, source: Source, lines: &[u8], pieces: &mut Pieces) {
        let stream = source.stream;
        let hidden = self.hide_open_line(stream, Some(source), pieces);
        let mut continues = self.open_line(stream).is_some_and(|open| open.source == source);
        if continues {
            *self.open_slot(stream) = None;
        }
        let mut block = Vec::with_capacity(lines.len() + 64);
        for line in lines.split_inclusive(|&byte| byte == b'\n') {
            if !continues && !self.draws_itself(source, line) {
                self.push_prefix(source, &mut block);
            }
            block.extend_from_slice(line);
            continues = false;
        }
        push(pieces, stream, &block);
        self.draw_again(hidden, pieces);
    }

    fn show_unfinished(&mut self, source: Source, pieces: &mut Pieces) {
        let stream = source.stream;
        let bytes = std::mem::take(&mut self.lines.entry(source).or_default().bytes);
        if self.open_line(stream).is_none_or(|open| open.source != source) {
            if let Some(other) = self.open_slot(stream).take() {
                push(pieces, other.source.stream, b"\n");
            }
            let is_live = self.has_bar(source);
            if !is_live {
                let mut prefix = Vec::new();
                self.push_prefix(source, &mut prefix);
                push(pieces, stream, &prefix);
            }
            *self.open_slot(stream) = Some(Open { source, is_live, visible: Vec::new() });
        }
        if let Some(open) = self.open_slot(stream) {
            open.visible.extend_from_slice(&bytes);
            // What stood before the last carriage return has been drawn over.
            if let Some(at) = open.visible.iter().rposition(|&byte| byte == b'\r')
                && at + 1 < open.visible.len()
            {
                open.visible.drain(..=at);
            }
            if open.visible.len() > PROMPT_LIMIT_BYTES {
                open.visible.clear();
            }
        }
        push(pieces, stream, &bytes);
    }

    /// The unfinished line of `source` goes on, or is a bar. (A carriage return at its end may still become
    /// part of a line end.)
    fn shows_at_once(&self, source: Source) -> bool {
        let bytes = &self.lines[&source].bytes;
        let goes_on = self.open_line(source.stream).is_some_and(|open| open.source == source);
        let is_redrawn = bytes.split_last().is_some_and(|(_, rest)| rest.contains(&b'\r'));
        goes_on || self.has_bar(source) && is_redrawn || self.draws_itself(source, bytes)
    }

    /// Moves the cursor by itself from the start of the line on; a prefix would be drawn over.
    fn draws_itself(&self, source: Source, line: &[u8]) -> bool {
        let begins_by_moving =
            line.starts_with(b"\r") && line != b"\r\n" || line.starts_with(b"\x1b[") && !is_colour(line);
        self.has_bar(source) && begins_by_moving
    }

    /// Only one rank can have the last line of the screen; by convention the local main process draws.
    fn has_bar(&self, source: Source) -> bool {
        source.local_rank == 0 && is_terminal(&self.screens, source.stream)
    }

    /// Makes room for a line of `newcomer`. A live line is returned, to be drawn again below it.
    fn hide_open_line(&mut self, stream: Stream, newcomer: Option<Source>, pieces: &mut Pieces) -> Option<Open> {
        let open = self.open_slot(stream).take_if(|open| Some(open.source) != newcomer)?;
        if open.is_live {
            push(pieces, open.source.stream, CLEAR_LINE);
            Some(open)
        } else {
            push(pieces, open.source.stream, b"\n");
            None
        }
    }

    fn draw_again(&mut self, hidden: Option<Open>, pieces: &mut Pieces) {
        if let Some(open) = hidden {
            let stream = open.source.stream;
            push(pieces, stream, &open.visible);
            *self.open_slot(stream) = Some(open);
        }
    }

    fn open_slot(&mut self, stream: Stream) -> &mut Option<Open> {
        &mut self.open[screen_of(&self.screens, stream)]
    }

    fn open_line(&self, stream: Stream) -> Option<&Open> {
        self.open[screen_of(&self.screens, stream)].as_ref()
    }

    fn push_prefix(&self, source: Source, block: &mut Vec<u8>) {
        if !self.screens.has_prefix {
            return;
        }
        let rank = source.rank;
        if let Some(line_prefix) = &self.line_prefix {
            block.extend_from_slice(line_prefix.of(source).as_bytes());
        } else if self.screens.has_colour && is_terminal(&self.screens, source.stream) {
            let colour = COLOURS[rank % COLOURS.len()];
            block.extend_from_slice(format!("\x1b[{colour}m[rank {rank}]\x1b[0m ").as_bytes());
        } else {
            block.extend_from_slice(format!("[rank {rank}] ").as_bytes());
        }
    }
}

fn pause(screens: &Screens, stream: Stream) -> Duration {
    if is_terminal(screens, stream) { PAUSE_AT_TERMINAL } else { PAUSE_IN_FILE }
}

fn is_terminal(screens: &Screens, stream: Stream) -> bool {
    match stream {
        Stream::Stdout => screens.stdout,
        Stream::Stderr => screens.stderr,
    }
}

/// Two streams at a terminal share its one cursor.
fn screen_of(screens: &Screens, stream: Stream) -> usize {
    if screens.stdout && screens.stderr { 0 } else { stream as usize }
}

/// A sequence that only sets colours: `ESC [ digits ; digits m`.
fn is_colour(line: &[u8]) -> bool {
    let end = line.iter().skip(2).find(|byte| !(byte.is_ascii_digit() || **byte == b';'));
    end == Some(&b'm')
}

fn push(pieces: &mut Pieces, stream: Stream, bytes: &[u8]) {
    match pieces.last_mut() {
        _ if bytes.is_empty() => {}
        Some((last, collected)) if *last == stream => collected.extend_from_slice(bytes),
        _ => pieces.push((stream, bytes.to_vec())),
    }
}

#[cfg(test)]
#[path = "mixer_tests.rs"]
mod tests;
