//! Questions as plain lines: over a pipe, or at a terminal that cannot move its cursor.

use std::io::{self, BufRead, Read};

use accelerate_core::config::{Choice, are_numbers};

use super::{Page, PromptError, Prompter, Reply, Typed, line_of, typed};
use crate::print_message;

/// A longer line is no answer. The bound keeps a stream without line ends from filling the memory.
const MAX_LINE_BYTES: u64 = 1 << 16;

/// Reads one line for each question.
#[derive(Debug)]
pub(super) struct Lines<R> {
    input: R,
}

impl<R: BufRead> Lines<R> {
    pub(super) fn new(input: R) -> Self {
        Self { input }
    }

    fn ask(&mut self, page: &Page<'_>, choices: &[String], default: Option<&str>) -> Result<Reply, PromptError> {
        print_message(&format!("\n{}: {}", page.key, page.text));
        print_message(&format!("  {}", page.why));
        for choice in choices {
            print_message(&format!("  {choice}"));
        }
        loop {
            match default {
                Some(default) => print_message(&format!("[{default}]")),
                None => print_message("[no default]"),
            }
            match typed(&self.line(page)?) {
                Typed::Reply(reply) => return Ok(reply),
                Typed::MoreWanted => print_message(page.more()),
            }
        }
    }

    /// The next line that is text. An end of input in the middle of a line ends the line.
    fn line(&mut self, page: &Page<'_>) -> Result<String, PromptError> {
        loop {
            let mut line = Vec::new();
            let read = (&mut self.input).take(MAX_LINE_BYTES).read_until(b'\n', &mut line);
            read.map_err(|source| failed(page, source))?;
            if line.is_empty() {
                return Err(PromptError::EndOfInput { key: page.key.to_owned(), text: page.text.to_owned() });
            }
            if line.len() as u64 == MAX_LINE_BYTES && !line.ends_with(b"\n") {
                let cause = format!("its answer has more than {MAX_LINE_BYTES} bytes");
                return Err(failed(page, io::Error::new(io::ErrorKind::InvalidData, cause)));
            }
            match String::from_utf8(line) {
                Ok(text) => return Ok(text),
                Err(_) => print_message("Not taken: the answer is no text (UTF-8)."),
            }
        }
    }
}

fn failed(page: &Page<'_>, source: io::Error) -> PromptError {
    PromptError::Io { key: page.key.to_owned(), source }
}

impl<R: BufRead> Prompter for Lines<R> {
    fn select(&mut self, page: &Page<'_>, choices: &[Choice], default: usize) -> Result<Reply, PromptError> {
        // Numbers in front of numbers would only confuse.
        let numbered = choices.iter().enumerate().map(|(place, choice)| match are_numbers(choices) {
            true => line_of(choice),
            false => format!("{}. {}", place + 1, line_of(choice)),
        });
        let default = choices.get(default).map(|choice| choice.value.as_str());
        self.ask(page, &numbered.collect::<Vec<_>>(), default)
    }

    fn confirm(&mut self, page: &Page<'_>, default: bool) -> Result<Reply, PromptError> {
        self.ask(page, &[], Some(if default { "YES/no" } else { "yes/NO" }))
    }

    fn text(&mut self, page: &Page<'_>, default: Option<&str>) -> Result<Reply, PromptError> {
        self.ask(page, &[], default)
    }
}
