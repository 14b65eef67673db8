//! The last lines of one rank, kept for the case that it fails.

use std::collections::VecDeque;

use crate::report::Stream;

const NUM_LINES: usize = 20;
/// A line longer than this is cut: the tail is for reading, the output itself has every byte.
const LINE_LIMIT_BYTES: usize = 2048;

/// The last lines of both streams in the order in which they were completed. Of a list of functions that were running
/// (a backtrace) only the number of lines is kept: the message stands before it, and would be pushed out.
#[derive(Debug, Default)]
pub(crate) struct Tail {
    entries: VecDeque<Entry>,
    unfinished: [Line; 2],
    /// For each stream, whether the line before belongs to such a list.
    is_in_backtrace: [bool; 2],
}

#[derive(Debug)]
enum Entry {
    Line(Line),
    /// So many lines of a backtrace.
    Backtrace(usize),
}

#[derive(Debug, Default, Clone)]
struct Line {
    bytes: Vec<u8>,
    is_cut: bool,
}

impl Tail {
    pub(crate) fn push(&mut self, stream: Stream, bytes: &[u8]) {
        for piece in bytes.split_inclusive(|&byte| byte == b'\n') {
            let line = &mut self.unfinished[stream as usize];
            match piece.strip_suffix(b"\n") {
                None => line.push(piece),
                Some(rest) => {
                    line.push(rest);
                    let line = std::mem::take(line);
                    self.keep(stream, line);
                }
            }
        }
    }

    /// The lines, oldest first, as text that is safe to print: control sequences are gone, and of a
    /// progress bar only its last state is left.
    pub(crate) fn lines(&self) -> Vec<String> {
        let unfinished = self.unfinished.iter().filter(|line| !line.bytes.is_empty()).map(Line::text);
        let mut all: Vec<_> = self.entries.iter().map(Entry::text).chain(unfinished).collect();
        // Blank lines around the message help nobody.
        while all.last().is_some_and(|line| line.is_empty()) {
            all.pop();
        }
        let num_too_many = all.len().saturating_sub(NUM_LINES);
        let first = all.iter().skip(num_too_many).position(|line| !line.is_empty()).unwrap_or(0);
        all.split_off(num_too_many + first)
    }

    fn keep(&mut self, stream: Stream, line: Line) {
        let is_in_backtrace = &mut self.is_in_backtrace[stream as usize];
        let is_frame = is_native_frame(&line.bytes) || (*is_in_backtrace && is_frame(&line.bytes));
        *is_in_backtrace = is_frame || begins_backtrace(&line.bytes);
        match self.entries.back_mut() {
            Some(Entry::Backtrace(number)) if is_frame => *number += 1,
            _ => {
                if self.entries.len() == NUM_LINES {
                    self.entries.pop_front();
                }
                self.entries.push_back(if is_frame { Entry::Backtrace(1) } else { Entry::Line(line) });
            }
        }
    }
}

/// The title of a backtrace of a program in Rust: of a panic, or of an error that has one.
fn begins_backtrace(line: &[u8]) -> bool {
    line.trim_ascii().eq_ignore_ascii_case(b"stack backtrace:")
}

/// A line below that title: `12: function`, `at file:line`, or the note on what is left out.
fn is_frame(line: &[u8]) -> bool {
    let line = line.trim_ascii_start();
    let num_digits = line.iter().take_while(|byte| byte.is_ascii_digit()).count();
    (num_digits > 0 && line[num_digits..].starts_with(b":"))
        || line.starts_with(b"at ")
        || line.starts_with(b"note: Some details are omitted")
}

/// A line of libtorch's, in an error from C++.
fn is_native_frame(line: &[u8]) -> bool {
    line.trim_ascii_start().starts_with(b"frame #")
}

impl Entry {
    fn text(&self) -> String {
        match self {
            Self::Line(line) => line.text(),
            Self::Backtrace(1) => "  ... (1 line of a backtrace)".to_owned(),
            Self::Backtrace(number) => format!("  ... ({number} lines of a backtrace)"),
        }
    }
}

impl Line {
    fn push(&mut self, piece: &[u8]) {
        self.bytes.extend_from_slice(piece);
        // A bar redraws itself after a carriage return; what stood there before is gone from the screen.
        // One at the very end may still become the end of a line.
        let redrawn = without_last_returns(&self.bytes).iter().rposition(|&byte| byte == b'\r');
        if let Some(at) = redrawn {
            self.bytes.drain(..=at);
            self.is_cut = false;
        }
        self.is_cut |= self.bytes.len() > LINE_LIMIT_BYTES;
        self.bytes.truncate(LINE_LIMIT_BYTES);
    }

    fn text(&self) -> String {
        let plain = without_control_sequences(&self.bytes);
        let mut text = String::from_utf8_lossy(&plain).trim_end().to_string();
        if self.is_cut {
            text.push_str(" ...");
        }
        text
    }
}

fn without_last_returns(bytes: &[u8]) -> &[u8] {
    let end = bytes.iter().rposition(|&byte| byte != b'\r').map_or(0, |last| last + 1);
    &bytes[..end]
}

/// Removes terminal control sequences (`ESC [ ... letter`, `ESC ] ... BEL`) and other control bytes but tabs.
pub(crate) fn without_control_sequences(bytes: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(bytes.len());
    let mut rest = bytes.iter().copied().peekable();
    while let Some(byte) = rest.next() {
        match byte {
            0x1b => match rest.next() {
                Some(b'[') => while rest.next().is_some_and(|byte| !(0x40..=0x7e).contains(&byte)) {},
                Some(b']') => while rest.next().is_some_and(|byte| byte != 0x07) {},
                _ => {}
            },
            b'\t' => plain.push(byte),
            0..0x20 | 0x7f => {}
            _ => plain.push(byte),
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    fn tail(pieces: &[&str]) -> Vec<String> {
        let mut tail = Tail::default();
        for piece in pieces {
            tail.push(Stream::Stderr, piece.as_bytes());
        }
        tail.lines()
    }

    #[rstest]
    #[case::whole_lines(&["a\nb\n"], &["a", "b"])]
    #[case::split_anywhere(&["a", "b\n", "", "c"], &["ab", "c"])]
    #[case::blank_edges_go(&["\n\na\n\nb\n\n"], &["a", "", "b"])]
    #[case::last_state_of_a_bar(&["\r 10%", "\r 20%", "\r100%\r\ndone\n"], &["100%", "done"])]
    #[case::colours_and_bells_go(&["\x1b[31mred\x1b[0m \x1b]0;title\x07x\x07\n"], &["red x"])]
    #[case::nothing(&[], &[])]
    fn what_is_kept(#[case] pieces: &[&str], #[case] expected: &[&str]) {
        assert_eq!(tail(pieces), expected);
    }

    /// As with `RUST_BACKTRACE=1`, and from libtorch. What looks like a frame elsewhere is a line like others.
    #[rstest]
    #[case::of_a_panic(
        "thread 'main' panicked at src/main.rs:2:5:\nno room\nstack backtrace:\n",
        "   0: __rustc::rust_begin_unwind\n             at /rustc/1/library/std/src/panicking.rs:689:5\n",
        "note: Some details are omitted, run with `RUST_BACKTRACE=full` for a verbose backtrace.\n",
        &["thread 'main' panicked at src/main.rs:2:5:", "no room", "stack backtrace:"],
        81
    )]
    #[case::of_an_error("Error: no room\n\nStack backtrace:\n", "   7: main\n  12: 0x55 - start\n", "",
        &["Error: no room", "", "Stack backtrace:"], 80)]
    #[case::of_libtorch("RuntimeError: shape '[2]' is invalid\n", "frame #0: c10::Error::Error(...) + 0x7d\n", "",
        &["RuntimeError: shape '[2]' is invalid"], 40)]
    fn a_message_is_not_pushed_out_by_the_backtrace_below_it(
        #[case] message: &str,
        #[case] frames: &str,
        #[case] end: &str,
        #[case] kept: &[&str],
        #[case] num_left_out: usize,
    ) {
        let lines = tail(&[message, &frames.repeat(40), end, "done\n1: a line of the program\nat last\n"]);
        let left_out = format!("  ... ({num_left_out} lines of a backtrace)");
        let after = [&*left_out, "done", "1: a line of the program", "at last"];
        let wanted: Vec<_> = kept.iter().copied().chain(after).collect();
        assert_eq!(lines, wanted);
    }

    #[test]
    fn what_is_not_text_is_replaced() {
        let mut tail = Tail::default();
        tail.push(Stream::Stdout, b"\xff\xfe!\n");
        assert_eq!(tail.lines(), ["\u{fffd}\u{fffd}!"]);
    }

    #[test]
    fn both_streams_in_order_of_completion() {
        let mut tail = Tail::default();
        tail.push(Stream::Stdout, b"out ");
        tail.push(Stream::Stderr, b"error\n");
        tail.push(Stream::Stdout, b"put\n");
        assert_eq!(tail.lines(), ["error", "out put"]);
    }

    #[test]
    fn memory_stays_small() {
        let many: String = (0..1000).map(|number| format!("{number}\n")).collect();
        let lines = tail(&[&many]);
        assert_eq!((lines.len(), lines[0].as_str(), lines[19].as_str()), (20, "980", "999"));

        let huge = "x".repeat(1 << 20);
        let lines = tail(&[&huge, &huge]);
        assert_eq!(lines[0].len(), LINE_LIMIT_BYTES + " ...".len());
    }
}
