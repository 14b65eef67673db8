//! Questions as menus at a terminal.

use std::io::{self, Write};

use accelerate_core::config::{Choice, Refused, are_numbers};
use anstyle::Style;
use inquire::{InquireError, Select, Text};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcsetattr};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use signal_hook::iterator::Signals;

use super::{Asked, Page, PromptError, Prompter, Reply, Typed, line_of, line_of_refused, typed};
use crate::{print_message, print_styled};

const KEYS_OF_LISTS: &str = "arrows, a number or letters to move, Enter to choose, ?: more, Esc to go back";
const KEYS_OF_TEXTS: &str = "Enter to go on, ?: more, Esc to go back";

/// Entries below every list, which only those see who type them.
const MORE: &str = "? more about this";
const BACK: &str = "back to the question before";

/// The exit code of a shell for a process that a signal has ended is this and the number of the signal.
const SIGNALLED: i32 = 128;

/// Asks at the terminal of this process.
#[derive(Debug)]
pub(super) struct Terminal(());

impl Terminal {
    /// Whatever ends the process while a menu is open, the terminal is left as it was.
    pub(super) fn new() -> Self {
        end_with_the_terminal();
        end_with_signals();
        Self(())
    }

    /// Gives the line that is chosen; `None` for the question before.
    fn choose(
        page: &Page<'_>,
        lines: &[String],
        refused: &[Refused],
        default: usize,
    ) -> Result<Option<usize>, PromptError> {
        show(page);
        for refused in refused {
            print_styled(&faint(&line_of_refused(refused)));
        }
        let entries: Vec<&str> = lines.iter().map(String::as_str).chain([MORE, BACK]).collect();
        let score = |typed: &str, _: &&str, _: &str, place: usize| score(&entries, typed, place);
        loop {
            let menu = Select::new(page.key, entries.clone())
                .with_starting_cursor(default)
                .with_reset_cursor(false)
                .with_scorer(&score)
                .with_help_message(KEYS_OF_LISTS);
            match answered(page, menu.raw_prompt())?.map(|chosen| chosen.index) {
                Some(place) if place < lines.len() => return Ok(Some(place)),
                Some(place) if place == lines.len() => print_message(page.more()),
                _ => return Ok(None),
            }
        }
    }
}

/// Does a menu show the entry at `place` to somebody who has typed this? The last two are [`MORE`] and [`BACK`].
fn score(entries: &[&str], typed: &str, place: usize) -> Option<i64> {
    let typed = typed.trim().to_lowercase();
    let entry = entries.get(place)?.to_lowercase();
    let num_lines = entries.len().saturating_sub(2);
    let is_shown = match typed.as_str() {
        "" => place < num_lines,
        "?" => place == num_lines,
        "back" => place == num_lines + 1,
        _ if place >= num_lines => false,
        typed => match entries.iter().take(num_lines).position(|line| starts_with_word(&line.to_lowercase(), typed)) {
            Some(meant) => place == meant,
            None => entry.contains(typed),
        },
    };
    is_shown.then_some(0)
}

/// `2. bf16: ...` is found by `2` and by `bf16`.
fn starts_with_word(line: &str, word: &str) -> bool {
    let (number, rest) = line.split_once(". ").unwrap_or(("", line));
    number == word || rest.split(": ").next() == Some(word)
}

/// Nobody can answer at a terminal that has gone, and whoever waits for keys there would ask it over and over. So the process
/// ends with it, even where the signal that tells of it is ignored. Nothing has been written then.
fn end_with_the_terminal() {
    std::thread::spawn(|| {
        let input = io::stdin();
        // Without events to wait for, only a hang-up or an error ends the waiting.
        let mut terminal = [PollFd::new(&input, PollFlags::empty())];
        loop {
            match poll(&mut terminal, None) {
                Ok(_) => std::process::exit(SIGNALLED + SIGHUP),
                Err(Errno::INTR) => {}
                Err(_) => return,
            }
        }
    });
}

/// A menu reads single keys and hides the cursor. A shell would have to live with that after a signal.
fn end_with_signals() {
    let before = tcgetattr(io::stdin()).ok();
    let Ok(mut signals) = Signals::new([SIGHUP, SIGINT, SIGQUIT, SIGTERM]) else { return };
    std::thread::spawn(move || {
        if let Some(signal) = signals.forever().next() {
            // Held until the process has ended: a menu that is being drawn meanwhile would hide the cursor again.
            let mut screen = io::stderr().lock();
            restore(&mut screen, before.as_ref());
            std::process::exit(SIGNALLED + signal);
        }
    });
}

/// Where the terminal has gone, too, nobody is left to miss anything.
fn restore(screen: &mut impl Write, before: Option<&Termios>) {
    const SHOW_CURSOR: &[u8] = b"\x1b[?25h\r\n";
    let _ = screen.write_all(SHOW_CURSOR);
    // Last, because the thread that asks sets the modes of a menu before it waits for the screen.
    if let Some(before) = before {
        let _ = tcsetattr(io::stdin(), OptionalActions::Now, before);
    }
}

impl Prompter for Terminal {
    fn select(&mut self, page: &Page<'_>, choices: &[Choice], refused: &[Refused], default: usize) -> Asked {
        // Numbers in front of numbers would only confuse.
        let line = |(place, choice): (usize, &Choice)| match are_numbers(choices) {
            true => line_of(choice),
            false => format!("{}. {}", place + 1, line_of(choice)),
        };
        let lines: Vec<_> = choices.iter().enumerate().map(line).collect();
        let choice = Self::choose(page, &lines, refused, default)?.and_then(|place| choices.get(place));
        Ok(choice.map_or(Reply::Back, |choice| Reply::Text(choice.value.clone())))
    }

    fn confirm(&mut self, page: &Page<'_>, default: bool) -> Asked {
        let answers = ["yes", "no"];
        let chosen = Self::choose(page, &answers.map(str::to_owned), &[], usize::from(!default))?;
        let answer = chosen.and_then(|place| answers.get(place));
        Ok(answer.map_or(Reply::Back, |answer| Reply::Text((*answer).to_owned())))
    }

    fn text(&mut self, page: &Page<'_>, default: Option<&str>) -> Asked {
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

    fn is_somebody_there(&self) -> bool {
        true
    }
}

fn faint(text: &str) -> String {
    let faint = Style::new().dimmed();
    format!("{faint}{text}{faint:#}")
}

fn show(page: &Page<'_>) {
    let bold = Style::new().bold();
    print_styled(&format!("\n{bold}{}{bold:#}", page.text));
    print_styled(&faint(page.why));
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

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    const WORDS: [&str; 6] = ["1. no", "2. fp16", "3. bf16: 8 bits of precision", "4. not", MORE, BACK];
    const NUMBERS: [&str; 5] = ["1", "2: gradients", "0", MORE, BACK];

    /// The entries that are left when something was typed.
    #[rstest]
    #[case::nothing(&WORDS, "", &[0, 1, 2, 3])]
    #[case::a_number(&WORDS, "3", &[2])]
    #[case::a_number_that_is_no_place(&WORDS, "16", &[1, 2])]
    #[case::a_word(&WORDS, "no", &[0])]
    #[case::in_capitals(&WORDS, "BF16", &[2])]
    #[case::a_part(&WORDS, "bits", &[2])]
    #[case::help(&WORDS, " ? ", &[4])]
    #[case::back(&WORDS, "back", &[5])]
    #[case::words_that_are_numbers(&NUMBERS, "2", &[1])]
    #[case::not_a_place(&NUMBERS, "0", &[2])]
    #[case::nonsense(&WORDS, "xyz", &[])]
    fn what_is_typed_finds(#[case] entries: &[&str], #[case] typed: &str, #[case] wanted: &[usize]) {
        let left: Vec<_> = (0..entries.len()).filter(|place| score(entries, typed, *place).is_some()).collect();
        assert_eq!(left, wanted);
    }
}
