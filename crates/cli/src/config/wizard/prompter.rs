//! Who asks: arrow-key menus at a terminal, or plain lines over a pipe.

mod lines;
mod terminal;

use std::io::{self, IsTerminal};

use accelerate_core::config::{Choice, Refused};

use lines::Lines;
use terminal::Terminal;

/// What is shown of a question.
#[derive(Clone, Copy, Debug)]
pub(super) struct Page<'a> {
    /// What a file calls it.
    pub(super) key: &'a str,
    /// What is asked.
    pub(super) text: &'a str,
    /// Why somebody should care.
    pub(super) why: &'a str,
    /// More for who wants to know; may be empty.
    pub(super) details: &'a str,
}

/// What somebody typed or chose.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Reply {
    /// An answer, which nobody has looked at yet. Empty for the default.
    Text(String),
    /// To the question before.
    Back,
}

#[derive(Debug, thiserror::Error)]
pub(super) enum PromptError {
    #[error("interrupted")]
    Interrupted,
    #[error(
        "nothing was written: the input ended at the question {key} ({text}); give a line for each question, or take all \
         defaults with --yes"
    )]
    EndOfInput { key: String, text: String },
    #[error("nothing was written: the question {key} cannot be asked")]
    Io { key: String, source: io::Error },
    #[error(
        "nothing was written: {attempts} answers in a row to the question {key} ({text}) were not taken; the reason for the last \
         one: {reason}"
    )]
    NotTaken { key: String, text: String, attempts: usize, reason: String },
    #[error(
        "nothing was written: after {most} lines the question {key} ({text}) is still open; give a line for each question, or take \
         all defaults with --yes"
    )]
    Endless { key: String, text: String, most: usize },
}

/// How many answers in a row may be wrong where nobody is there to learn from the reason.
const MOST_ATTEMPTS: usize = 3;

/// Answers in a row to one question that were not taken.
#[derive(Debug, Default)]
pub(super) struct Attempts(usize);

impl Attempts {
    /// Tells why an answer is not taken. Fails where the next one would be no better, because a program gives it.
    pub(super) fn refuse(&mut self, page: &Page<'_>, prompter: &dyn Prompter, reason: &str) -> Result<(), PromptError> {
        crate::print_message(&format!("Not taken: {reason}."));
        self.0 += 1;
        match prompter.is_somebody_there() || self.0 < MOST_ATTEMPTS {
            true => Ok(()),
            false => Err(page.not_taken(self.0, reason.to_owned())),
        }
    }
}

/// Asks one question.
pub(super) trait Prompter {
    /// For one of several words. Those that are refused are told of.
    fn select(&mut self, page: &Page<'_>, choices: &[Choice], refused: &[Refused], default: usize) -> Asked;

    /// For yes or no.
    fn confirm(&mut self, page: &Page<'_>, default: bool) -> Asked;

    /// For any text; without a default one is needed.
    fn text(&mut self, page: &Page<'_>, default: Option<&str>) -> Asked;

    /// Can somebody read why an answer was not taken, and give another one?
    fn is_somebody_there(&self) -> bool;
}

type Asked = Result<Reply, PromptError>;

/// Menus need a terminal at both ends, and one that can move its cursor.
pub(super) fn of_this_process() -> Box<dyn Prompter> {
    let can_move = std::env::var("TERM").is_ok_and(|term| term != "dumb");
    match can_move && io::stdin().is_terminal() && io::stderr().is_terminal() {
        true => Box::new(Terminal::new()),
        false => Box::new(Lines::new(io::stdin().lock(), io::stdin().is_terminal())),
    }
}

/// A choice as a line of a list.
fn line_of(choice: &Choice) -> String {
    match choice.label {
        "" => choice.value.clone(),
        label => format!("{}: {label}", choice.value),
    }
}

/// What cannot be chosen, and why.
fn line_of_refused(refused: &Refused) -> String {
    format!("Not available: {} ({})", refused.values.join(", "), refused.why)
}

/// What a typed text means, and who only wants to know more.
enum Typed {
    Reply(Reply),
    MoreWanted,
}

fn typed(text: &str) -> Typed {
    match text.trim() {
        "?" => Typed::MoreWanted,
        word if word.eq_ignore_ascii_case("back") => Typed::Reply(Reply::Back),
        text => Typed::Reply(Reply::Text(text.to_owned())),
    }
}

impl Page<'_> {
    fn not_taken(&self, attempts: usize, reason: String) -> PromptError {
        PromptError::NotTaken { key: self.key.to_owned(), text: self.text.to_owned(), attempts, reason }
    }

    fn more(&self) -> &str {
        if self.details.is_empty() { "There is no more to say about it." } else { self.details }
    }
}
