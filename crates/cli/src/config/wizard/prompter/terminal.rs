//! Questions as menus at a terminal.

use std::io;

use accelerate_core::config::Choice;
use anstyle::Style;
use inquire::{InquireError, Select, Text};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

use super::{Page, PromptError, Prompter, Reply, Typed, line_of, typed};
use crate::print_message;

const KEYS_OF_LISTS: &str = "up and down to move, Enter to choose, letters to filter, Esc to go back";
const KEYS_OF_TEXTS: &str = "Enter to go on, a question mark for more, Esc to go back";

/// The exit code after the terminal has gone, as that of a signal that says so.
const HUNG_UP: i32 = 129;

/// Asks at the terminal of this process.
#[derive(Debug)]
pub(super) struct Terminal(());

impl Terminal {
    /// Nobody can answer at a terminal that has gone, and whoever waits for keys there would ask it over and over. So the
    /// process ends with it, even where the signal that tells of it is ignored. Nothing has been written then.
    pub(super) fn new() -> Self {
        std::thread::spawn(|| {
            let input = io::stdin();
            // Without events to wait for, only a hang-up or an error ends the waiting.
            let mut terminal = [PollFd::new(&input, PollFlags::empty())];
            loop {
                match poll(&mut terminal, None) {
                    Ok(_) => std::process::exit(HUNG_UP),
                    Err(Errno::INTR) => {}
                    Err(_) => return,
                }
            }
        });
        Self(())
    }

    fn choose(page: &Page<'_>, options: Vec<String>, default: usize) -> Result<Option<usize>, PromptError> {
        show(page);
        let menu = Select::new(page.key, options).with_starting_cursor(default).with_help_message(KEYS_OF_LISTS);
        Ok(answered(page, menu.raw_prompt())?.map(|chosen| chosen.index))
    }
}

impl Prompter for Terminal {
    fn select(&mut self, page: &Page<'_>, choices: &[Choice], default: usize) -> Result<Reply, PromptError> {
        let chosen = Self::choose(page, choices.iter().map(line_of).collect(), default)?;
        let choice = chosen.and_then(|place| choices.get(place));
        Ok(choice.map_or(Reply::Back, |choice| Reply::Text(choice.value.clone())))
    }

    fn confirm(&mut self, page: &Page<'_>, default: bool) -> Result<Reply, PromptError> {
        let answers = ["yes", "no"];
        let chosen = Self::choose(page, answers.map(str::to_owned).to_vec(), usize::from(!default))?;
        let answer = chosen.and_then(|place| answers.get(place));
        Ok(answer.map_or(Reply::Back, |answer| Reply::Text((*answer).to_owned())))
    }

    fn text(&mut self, page: &Page<'_>, default: Option<&str>) -> Result<Reply, PromptError> {
        show(page);
        loop {
            let mut field = Text::new(page.key).with_help_message(KEYS_OF_TEXTS);
            field = match default {
                Some(default) if !default.is_empty() => field.with_default(default),
                _ => field,
            };
            let Some(text) = answered(page, field.prompt())? else { return Ok(Reply::Back) };
            match typed(&text) {
                Typed::Reply(reply) => return Ok(reply),
                Typed::MoreWanted => print_message(page.more()),
            }
        }
    }
}

fn show(page: &Page<'_>) {
    let (bold, faint) = (Style::new().bold(), Style::new().dimmed());
    print_message(&format!("\n{bold}{}{bold:#}", page.text));
    print_message(&format!("{faint}{}{faint:#}", page.why));
}

/// What was answered; `None` for the question before.
fn answered<T>(page: &Page<'_>, answer: Result<T, InquireError>) -> Result<Option<T>, PromptError> {
    let source = match answer {
        Ok(answer) => return Ok(Some(answer)),
        Err(InquireError::OperationCanceled) => return Ok(None),
        Err(InquireError::OperationInterrupted) => return Err(PromptError::Interrupted),
        Err(InquireError::IO(source)) => source,
        Err(other) => io::Error::other(other.to_string()),
    };
    Err(PromptError::Io { key: page.key.to_owned(), source })
}
