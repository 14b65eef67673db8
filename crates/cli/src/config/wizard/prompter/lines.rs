//! Questions as plain lines: over a pipe, or at a terminal that cannot move its cursor.

use std::io::{self, BufRead, Read};

use accelerate_core::config::{Choice, Refused, are_numbers};

use super::{Asked, MOST_ATTEMPTS, Page, PromptError, Prompter, Typed, line_of, line_of_refused, typed};
use crate::print_message;

/// A longer line is no answer. The bound keeps a stream without line ends from filling the memory.
const MAX_LINE_BYTES: u64 = 1 << 16;

/// A conversation has fewer lines. The bound ends one in which a program goes back and forth.
const MOST_LINES: usize = 1000;

/// Reads one line for each question.
#[derive(Debug)]
pub(super) struct Lines<R> {
    input: R,
    is_somebody_there: bool,
    num_lines: usize,
}

impl<R: BufRead> Lines<R> {
    pub(super) fn new(input: R, is_somebody_there: bool) -> Self {
        Self { input, is_somebody_there, num_lines: 0 }
    }

    fn ask(&mut self, page: &Page<'_>, choices: &[String], default: Option<&str>) -> Asked {
        print_message(&format!("\n{}: {}", page.key, page.text));
        print_message(&format!("  {}", page.why));
        for choice in choices {
            print_message(&format!("  {choice}"));
        }
        let mut num_asked = 0;
        loop {
            match default {
                Some(default) => print_message(&format!("[{default}]")),
                None => print_message("[no default]"),
            }
            let reason = match self.line(page)?.map(|line| typed(&line)) {
                Some(Typed::Reply(reply)) => return Ok(reply),
                Some(Typed::MoreWanted) => {
                    print_message(page.more());
                    "a question mark asks for help, and is no answer"
                }
                None => {
                    print_message("Not taken: the answer is no text (UTF-8).");
                    "it is no text (UTF-8)"
                }
            };
            num_asked += 1;
            if num_asked > MOST_ATTEMPTS && !self.is_somebody_there {
                return Err(page.not_taken(num_asked, reason.to_owned()));
            }
        }
    }

    /// The next line, if it is text. An end of input in the middle of a line ends the line.
    fn line(&mut self, page: &Page<'_>) -> Result<Option<String>, PromptError> {
        self.num_lines += 1;
        if self.num_lines > MOST_LINES && !self.is_somebody_there {
            let (key, text) = (page.key.to_owned(), page.text.to_owned());
            return Err(PromptError::Endless { key, text, most: MOST_LINES });
        }
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
        Ok(String::from_utf8(line).ok())
    }
}

fn failed(page: &Page<'_>, source: io::Error) -> PromptError {
    PromptError::Io { key: page.key.to_owned(), source }
}

impl<R: BufRead> Prompter for Lines<R> {
    fn select(&mut self, page: &Page<'_>, choices: &[Choice], refused: &[Refused], default: usize) -> Asked {
        // Numbers in front of numbers would only confuse.
        let numbered = choices.iter().enumerate().map(|(place, choice)| match are_numbers(choices) {
            true => line_of(choice),
            false => format!("{}. {}", place + 1, line_of(choice)),
        });
        let default = choices.get(default).map(|choice| choice.value.as_str());
        let lines = numbered.chain(refused.iter().map(line_of_refused));
        self.ask(page, &lines.collect::<Vec<_>>(), default)
    }

    fn confirm(&mut self, page: &Page<'_>, default: bool) -> Asked {
        self.ask(page, &[], Some(if default { "YES/no" } else { "yes/NO" }))
    }

    fn text(&mut self, page: &Page<'_>, default: Option<&str>) -> Asked {
        self.ask(page, &[], default)
    }

    fn is_somebody_there(&self) -> bool {
        self.is_somebody_there
    }
}
