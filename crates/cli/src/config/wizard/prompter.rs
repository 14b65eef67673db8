//! Who asks: arrow-key menus at a terminal, or plain lines over a pipe.

mod lines;
mod terminal;

use std::io::{self, IsTerminal};

use accelerate_core::config::Choice;

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
}

/// Asks one question.
pub(super) trait Prompter {
    /// For one of several words.
    fn select(&mut self, page: &Page<'_>, choices: &[Choice], default: usize) -> Result<Reply, PromptError>;

    /// For yes or no.
    fn confirm(&mut self, page: &Page<'_>, default: bool) -> Result<Reply, PromptError>;

    /// For any text; without a default one is needed.
    fn text(&mut self, page: &Page<'_>, default: Option<&str>) -> Result<Reply, PromptError>;
}

/// Menus need a terminal at both ends, and one that can move its cursor.
pub(super) fn of_this_process() -> Box<dyn Prompter> {
    let can_move = std::env::var("TERM").is_ok_and(|term| term != "dumb");
    match can_move && io::stdin().is_terminal() && io::stderr().is_terminal() {
        true => Box::new(Terminal::new()),
        false => Box::new(Lines::new(io::stdin().lock())),
    }
}

/// A choice as a line of a list.
fn line_of(choice: &Choice) -> String {
    let label = match (choice.label, &choice.refusal) {
        (_, Some(_)) => " (not available)".to_owned(),
        ("", None) => String::new(),
        (label, None) => format!(": {label}"),
    };
    format!("{}{label}", choice.value)
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
    fn more(&self) -> &str {
        if self.details.is_empty() { "There is no more to say about it." } else { self.details }
    }
}
