//! The last lines of one rank, kept for the case that it fails.

use std::collections::VecDeque;

use crate::report::Stream;

const NUM_LINES: usize = 20;
/// A line longer than this is cut: the tail is for reading, the output itself has every byte.
const LINE_LIMIT_BYTES: usize = 2048;

/// The last lines of both streams in the order in which they were completed.
#[derive(Debug, Default)]
pub(crate) struct Tail {
    lines: VecDeque<Line>,
    unfinished: [Line; 2],
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
                    self.keep(line);
                }
            }
        }
    }

    /// The lines, oldest first, as text that is safe to print: control sequences are gone, and of a
    /// progress bar only its last state is left.
    pub(crate) fn lines(&self) -> Vec<String> {
        let unfinished = self.unfinished.iter().filter(|line| !line.bytes.is_empty());
        let mut all: Vec<_> = self.lines.iter().chain(unfinished).map(Line::text).collect();
        // Blank lines around the message help nobody.
        while all.last().is_some_and(|line| line.is_empty()) {
            all.pop();
        }
        let num_too_many = all.len().saturating_sub(NUM_LINES);
        let first = all.iter().skip(num_too_many).position(|line| !line.is_empty()).unwrap_or(0);
        all.split_off(num_too_many + first)
    }

    fn keep(&mut self, line: Line) {
        if self.lines.len() == NUM_LINES {
            self.lines.pop_front();
        }
        self.lines.push_back(line);
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
