//! `accelerate config` without a subcommand: asks questions, shows the file that comes of the answers, and writes it.
//!
//! Which question comes next, and which answers are taken, `accelerate_core` decides ([`Questionnaire`]). Here somebody is
//! asked, and may go back. Nothing is written before the last question has been answered.

mod destination;
mod prompter;
mod summary;

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;

use accelerate_core::config::{
    Answers, ConfigFile, FileFormat, Form, MachineFacts, Next, PartialRunConfig, Question, Questionnaire,
};
use accelerate_core::files::ShownPath;
use accelerate_launch::num_visible_gpus;
use clap::Args;

use crate::config_file::{self, ConfigFileError, Existing};
use crate::print_message;
use destination::Destination;
use prompter::{Attempts, Page, PromptError, Prompter, Reply};

#[derive(Debug, Args)]
pub(super) struct WizardArguments {
    /// The file to write: JSON if its name ends in .json, and YAML otherwise. Without it, the default one is proposed.
    #[arg(long = "config_file", alias = "config-file", value_name = "FILE")]
    config_file: Option<PathBuf>,

    /// Take the default of every question without asking.
    #[arg(short, long)]
    yes: bool,

    /// Replace the file if it exists.
    #[arg(long)]
    overwrite: bool,
}

/// As shells have it after Ctrl-C.
const INTERRUPTED: u8 = 130;

/// Asks, or takes all defaults, and writes the file.
pub(super) fn run(arguments: &WizardArguments) -> Result<ExitCode, Box<dyn Error>> {
    let questionnaire = Questionnaire::new(machine_facts());
    let path = match arguments.yes {
        true => without_asking(&questionnaire, arguments)?,
        false => match asking(&questionnaire, arguments, prompter::of_this_process().as_mut()) {
            Err(error) if error.is_interrupt() => {
                print_message("accelerate config: interrupted; nothing was written");
                return Ok(ExitCode::from(INTERRUPTED));
            }
            written => written?,
        },
    };
    print_message(&format!("accelerate config: the configuration is in {}", path.shown()));
    Ok(ExitCode::SUCCESS)
}

#[derive(Debug, thiserror::Error)]
enum WizardError {
    #[error(transparent)]
    Prompt(#[from] PromptError),
    #[error(transparent)]
    File(#[from] ConfigFileError),
    #[error(transparent)]
    Settings(#[from] accelerate_core::Error),
}

impl WizardError {
    fn is_interrupt(&self) -> bool {
        matches!(self, Self::Prompt(PromptError::Interrupted))
    }
}

fn asking(
    questionnaire: &Questionnaire,
    arguments: &WizardArguments,
    prompter: &mut dyn Prompter,
) -> Result<PathBuf, WizardError> {
    print_message(
        "Enter takes the default. A question mark tells more, and the word back goes to the question before, as Esc does.",
    );
    print_message("Nothing is written before the end.");
    let mut answers = Answers::default();
    loop {
        answers = converse(questionnaire, answers, prompter)?;
        let said = PartialRunConfig::of_texts(&questionnaire.settings(&answers));
        summary::print(&said, &questionnaire.resolve(&answers)?, machine_facts().num_gpus);
        match destination::write(&said, arguments, prompter)? {
            Destination::Written(path) => return Ok(path),
            Destination::Back => answers = answers.without_last().unwrap_or_default(),
        }
    }
}

fn without_asking(questionnaire: &Questionnaire, arguments: &WizardArguments) -> Result<PathBuf, WizardError> {
    let mut answers = Answers::default();
    while let Some(question) = questionnaire.next(&answers).question {
        answers = questionnaire.answer(&answers, &question, "")?;
    }
    let path = match &arguments.config_file {
        Some(path) => path.clone(),
        None => config_file::default_path(&config_file::variable)?,
    };
    let said = PartialRunConfig::of_texts(&questionnaire.settings(&answers));
    let existing =
        if arguments.overwrite { Existing::Replace } else { Existing::Keep("add --overwrite to replace it") };
    config_file::write(&path, &ConfigFile::write(&said, FileFormat::of_path(&path)), existing)?;
    Ok(path)
}

/// Asks until every question has an answer that is taken.
fn converse(
    questionnaire: &Questionnaire,
    mut answers: Answers,
    prompter: &mut dyn Prompter,
) -> Result<Answers, PromptError> {
    let mut attempts = Attempts::default();
    loop {
        let Next { passed, question } = questionnaire.next(&answers);
        for passed in passed {
            let verb = if passed.keys.len() == 1 { "is" } else { "are" };
            print_message(&format!("({} {verb} not asked: {})", passed.keys.join(", "), passed.why));
        }
        let Some(question) = question else { return Ok(answers) };
        match ask(prompter, &question)? {
            Reply::Back => match answers.without_last() {
                Some(before) => answers = before,
                None => attempts.refuse(&page(&question), prompter, "this is the first question")?,
            },
            Reply::Text(text) => match questionnaire.answer(&answers, &question, &text) {
                Ok(more) => (answers, attempts) = (more, Attempts::default()),
                Err(reason) => attempts.refuse(&page(&question), prompter, &reason.to_string())?,
            },
        }
    }
}

fn ask(prompter: &mut dyn Prompter, question: &Question) -> Result<Reply, PromptError> {
    let page = page(question);
    match &question.form {
        Form::Confirm { default } => prompter.confirm(&page, *default),
        Form::Select { choices, refused, default } => prompter.select(&page, choices, refused, *default),
        Form::Text { default } => prompter.text(&page, default.as_deref()),
    }
}

fn page(question: &Question) -> Page<'_> {
    let Question { key, text, why, details, .. } = question;
    Page { key, text, why, details }
}

fn machine_facts() -> MachineFacts {
    let visible = config_file::variable("CUDA_VISIBLE_DEVICES");
    MachineFacts {
        num_gpus: num_visible_gpus("/dev".as_ref(), visible.as_deref()),
        num_cores: std::thread::available_parallelism().map_or(1, usize::from),
    }
}
