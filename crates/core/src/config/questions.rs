//! The questions of `accelerate config`, as data and decisions.
//!
//! A [`Questionnaire`] knows the machine; the [`Answers`] so far are all else that decides which question comes next. Key,
//! help, choices, default and what is a value come from the table of settings. An answer is taken only if the run that
//! comes of it, with defaults for all questions after it, is one that [`RunConfig::resolve`] accepts. So the file at the
//! end is always one that can be used.

mod known;
mod row;
mod table;

use super::{ConfigFile, RunConfig, Sources, settings};
use crate::Result;
use crate::environment::str_to_bool;
use crate::error::settings::SettingsErrorKind as Kind;
use crate::settings::{Setting, Standing, shortened};
use row::Row;

/// The longest answer, in bytes. No path or name is longer, and a file of such answers can be read again.
const MAX_ANSWER_BYTES: usize = 4096;

/// What this machine has, where questions and defaults go by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MachineFacts {
    /// Number of GPUs that programs can use.
    pub num_gpus: usize,
    /// Number of processor cores that programs can use.
    pub num_cores: usize,
}

/// The answers so far, in the order of the questions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Answers(Vec<Answer>);

#[derive(Clone, Debug, PartialEq, Eq)]
struct Answer {
    /// The place of the question in the table.
    row: usize,
    /// What the question is about: a path of a setting, or a name of its own.
    name: &'static str,
    text: String,
}

impl Answers {
    /// The same without the last answer, so that its question comes again; `None` if there is none.
    #[must_use]
    pub fn without_last(&self) -> Option<Self> {
        let (_, before) = self.0.split_last()?;
        Some(Self(before.to_vec()))
    }

    /// What was answered to the question of this [name](Question::name). An empty text is an answer, too.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|answer| answer.name == name).map(|answer| answer.text.as_str())
    }

    fn with(&self, row: usize, text: String) -> Self {
        let mut answers = self.0.clone();
        answers.push(Answer { row, name: table::ROWS[row].name(), text });
        Self(answers)
    }

    fn next_row(&self) -> usize {
        self.0.last().map_or(0, |last| last.row + 1)
    }
}

/// A question, ready to be shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Question {
    row: usize,
    /// The path of the setting that it is about, or a name of its own.
    pub name: &'static str,
    /// What a file calls the setting, with its section; else the name.
    pub key: String,
    /// What is asked.
    pub text: &'static str,
    /// Why it matters, in a sentence.
    pub why: &'static str,
    /// More about the setting; may be empty.
    pub details: String,
    /// What an answer looks like.
    pub form: Form,
}

/// What an answer looks like.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Form {
    /// Yes or no.
    Confirm {
        /// The answer of whoever just goes on.
        default: bool,
    },
    /// One of several words.
    Select {
        /// Those that would be taken.
        choices: Vec<Choice>,
        /// Those that exist and would not be taken.
        refused: Vec<Refused>,
        /// The place of the answer of whoever just goes on, among the choices.
        default: usize,
    },
    /// Any text that is a value.
    Text {
        /// The answer of whoever just goes on, which may be empty and then says nothing. `None`: an answer is needed.
        default: Option<String>,
    },
}

/// One of several words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The word.
    pub value: String,
    /// What it means, where the word alone does not tell; may be empty.
    pub label: &'static str,
}

/// Words that cannot be chosen for one reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// The words.
    pub values: Vec<String>,
    /// Why, and what to do instead.
    pub why: String,
}

/// Questions that are not asked because no answer to them could have an effect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Passed {
    /// What a file calls the settings, with their sections.
    pub keys: Vec<String>,
    /// Why they are not asked, and what to do instead.
    pub why: &'static str,
}

/// What comes after some answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Next {
    /// Questions before the next one that are not asked, with the reason.
    pub passed: Vec<Passed>,
    /// The next question; `None` when all have been answered.
    pub question: Option<Question>,
}

/// Which questions there are on a machine.
///
/// ```
/// use accelerate_core::config::{Answers, MachineFacts, Questionnaire};
/// let questionnaire = Questionnaire::new(MachineFacts { num_gpus: 0, num_cores: 8 });
/// let mut answers = Answers::default();
/// while let Some(question) = questionnaire.next(&answers).question {
///     let text = if question.name == "mixed_precision" { "bf16" } else { "" }; // an empty line is the default
///     answers = questionnaire.answer(&answers, &question, text)?;
/// }
/// let said: Vec<_> = questionnaire.settings(&answers).into_iter().map(|(setting, text)| (setting.path, text)).collect();
/// assert!(said.contains(&("mixed_precision", "bf16".to_owned())), "{said:?}");
/// # Ok::<(), accelerate_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Questionnaire {
    machine: MachineFacts,
}

/// What is known when a row decides something.
#[derive(Clone, Debug)]
struct Known {
    answers: Answers,
    machine: MachineFacts,
}

impl Questionnaire {
    /// The questions for files that are used on a machine like this one.
    pub const fn new(machine: MachineFacts) -> Self {
        Self { machine }
    }

    /// What comes after these answers.
    pub fn next(&self, answers: &Answers) -> Next {
        let known = self.known(answers);
        let mut passed: Vec<Passed> = Vec::new();
        for (place, row) in table::ROWS.iter().enumerate().skip(answers.next_row()) {
            if !(row.asked)(&known) {
                continue;
            }
            if let Some(why) = self.why_passed(row, &known) {
                match passed.last_mut().filter(|last| last.why == why) {
                    Some(last) => last.keys.push(row.key()),
                    None => passed.push(Passed { keys: vec![row.key()], why }),
                }
                continue;
            }
            let form = self.form(place, row, answers);
            if row.is_always_asked || !is_decided(&form) {
                return Next { passed, question: Some(question(place, row, form)) };
            }
        }
        Next { passed, question: None }
    }

    /// The answers with one more: `text` to `question`, which must be the [next](Self::next) one. An empty text is the
    /// default. A choice may also be given by its place, counted from 1.
    ///
    /// # Errors
    ///
    /// [`Error::is_config`](crate::Error::is_config): no answer although one is needed; a text that is no value; a value
    /// that contradicts the answers before it, or that is refused, with what to do instead.
    pub fn answer(&self, answers: &Answers, question: &Question, text: &str) -> Result<Answers> {
        let row = &table::ROWS[question.row];
        let wrong = |wanted: String| {
            let (key, found) = (question.key.clone(), shortened(text));
            crate::Error::from(Kind::Answer { key, found, wanted })
        };
        let text = text.trim();
        if text.len() > MAX_ANSWER_BYTES || text.chars().any(char::is_control) {
            return Err(wrong(format!("at most {MAX_ANSWER_BYTES} bytes, and without control characters")));
        }
        let value = match (&question.form, text) {
            (Form::Text { default: None }, "") => {
                return Err(wrong(format!("said: there is no default; it is such as {}", row.example)));
            }
            (form, "") => form.default(),
            (Form::Confirm { .. }, text) => match str_to_bool(text) {
                Some(answer) => answer.to_string(),
                None => return Err(wrong("yes or no".to_owned())),
            },
            (Form::Select { choices, refused, .. }, text) => match chosen(choices, refused, text) {
                Some(value) => value.to_owned(),
                None => return Err(wrong(one_of(choices))),
            },
            (Form::Text { .. }, text) => text.to_owned(),
        };
        if let Some(setting) = row.setting().filter(|setting| !value.is_empty() && !setting.is_value(&value)) {
            return Err(wrong(setting.wanted_for(&value)));
        }
        let known = self.known(answers);
        if let Some(why) = (row.refuses)(&known, &value) {
            let (name, found, origin) = (question.key.clone(), value, "your answer".to_owned());
            return Err(Kind::Refused { name, found, origin, why }.into());
        }
        if !value.is_empty() {
            (row.check)(&known, &value).map_err(wrong)?;
        }
        let answers = answers.with(question.row, value);
        self.resolve(&self.completed(&answers))?;
        Ok(answers)
    }

    /// What the answers say.
    pub fn settings(&self, answers: &Answers) -> Vec<(&'static Setting, String)> {
        let known = self.known(answers);
        let implied = [
            ("distributed_type", known.distributed_type()),
            ("use_cpu", known.is_on_several_cpus().then(|| "true".to_owned())),
        ];
        let implied = implied.into_iter().filter_map(|(path, text)| Some((path, text?)));
        let is_written = |answer: &&Answer| !answer.text.is_empty() && answer.name != known::AXES;
        let answered = answers.0.iter().filter(is_written);
        let all = answered.map(|answer| (answer.name, answer.text.clone())).chain(implied);
        let mut said: Vec<_> = all.filter_map(|(path, text)| Some((row::setting_at(path)?, text))).collect();
        // In the order of the table, as everywhere.
        said.sort_by_key(|(said, _)| settings().position(|setting| setting.path == said.path));
        said
    }

    /// The run that a file with these answers configures.
    ///
    /// # Errors
    ///
    /// [`Error::is_config`](crate::Error::is_config): as [`RunConfig::resolve`].
    pub fn resolve(&self, answers: &Answers) -> Result<RunConfig> {
        let file = ConfigFile::of_answers(&self.settings(answers));
        let is_for_python = self.known(answers).is_for_python();
        let run = RunConfig::resolve(Sources { file: Some(file), is_for_python, ..Default::default() })?;
        if !is_for_python && run.deepspeed.hf_ds_config.is_none() {
            // Nothing is read, because no file is named.
            run.check_deepspeed(run.cluster.num_processes.unwrap_or(1), &|_| Ok(String::new()))?;
        }
        Ok(run)
    }

    fn known(&self, answers: &Answers) -> Known {
        Known { answers: answers.clone(), machine: self.machine }
    }

    /// Why no answer could have an effect, if that is so.
    fn why_passed(&self, row: &Row, known: &Known) -> Option<&'static str> {
        match row.setting()?.standing_for(known.is_for_python()) {
            Standing::Refused(why) | Standing::WithoutEffect(why) if !row.is_always_asked => Some(why),
            _ => None,
        }
    }

    /// The answers with defaults to all questions that are left, and examples where an answer is needed.
    fn completed(&self, answers: &Answers) -> Answers {
        let mut completed = answers.clone();
        for (place, row) in table::ROWS.iter().enumerate().skip(answers.next_row()) {
            let known = self.known(&completed);
            if (row.asked)(&known) && self.why_passed(row, &known).is_none() {
                let text = row.default_text(&known).unwrap_or_else(|| row.example.to_owned());
                completed = completed.with(place, text);
            }
        }
        completed
    }

    fn form(&self, place: usize, row: &Row, answers: &Answers) -> Form {
        let known = self.known(answers);
        let default = row.default_text(&known);
        let words = row.words_now(&known);
        if words.is_empty() {
            return Form::Text { default };
        }
        let refusal = |value: &str| {
            let by_resolving = || {
                let candidate = self.completed(&answers.with(place, value.to_owned()));
                self.resolve(&candidate).err().map(|error| error.why())
            };
            (row.refuses)(&known, value).map(str::to_owned).or_else(by_resolving)
        };
        let (mut choices, mut refused) = (Vec::new(), Vec::<Refused>::new());
        for (value, label) in words {
            let value = value.to_owned();
            match refusal(&value) {
                None => choices.push(Choice { value, label }),
                Some(why) => match refused.iter_mut().find(|other| other.why == why) {
                    Some(other) => other.values.push(value),
                    None => refused.push(Refused { values: vec![value], why }),
                },
            }
        }
        let is_default = |choice: &Choice| Some(&choice.value) == default.as_ref();
        let default = choices.iter().position(is_default).unwrap_or_default();
        match choices.iter().map(|choice| choice.value.as_str()).eq(["true", "false"]) {
            true => Form::Confirm { default: default == 0 },
            false => Form::Select { choices, refused, default },
        }
    }
}

fn question(place: usize, row: &Row, form: Form) -> Question {
    let details = row.setting().map(|setting| format!("{}\n\n{}", setting.help(), setting.details()));
    let details = details.unwrap_or_default().trim_end().to_owned();
    Question { row: place, name: row.name(), key: row.key(), text: row.text, why: row.why, details, form }
}

impl Form {
    /// The text of the answer of whoever just goes on.
    pub fn default(&self) -> String {
        match self {
            Self::Confirm { default } => default.to_string(),
            Self::Select { choices, default, .. } => {
                choices.get(*default).map(|choice| choice.value.clone()).unwrap_or_default()
            }
            Self::Text { default } => default.clone().unwrap_or_default(),
        }
    }
}

/// Is there only one answer that would be taken?
fn is_decided(form: &Form) -> bool {
    matches!(form, Form::Select { choices, .. } if choices.len() < 2)
}

/// What a text means: a word, also one that is refused, else the choice at a place.
fn chosen<'a>(choices: &'a [Choice], refused: &'a [Refused], text: &str) -> Option<&'a str> {
    let words = choices.iter().map(|choice| &choice.value).chain(refused.iter().flat_map(|refused| &refused.values));
    let by_place = || choices.get(text.parse::<usize>().ok()?.checked_sub(1)?).filter(|_| !are_numbers(choices));
    let mut words = words.map(String::as_str);
    words.find(|word| word.eq_ignore_ascii_case(text)).or_else(|| Some(by_place()?.value.as_str()))
}

fn one_of(choices: &[Choice]) -> String {
    let words: Vec<_> = choices.iter().map(|choice| choice.value.as_str()).collect();
    let place = if are_numbers(choices) { "" } else { ", or its number in the list" };
    format!("one of {}{place}", words.join(", "))
}

/// Are the words themselves numbers, so that places would be confusing?
///
/// ```
/// use accelerate_core::config::{Choice, are_numbers};
/// let choice = |value: &str| Choice { value: value.to_owned(), label: "" };
/// assert!(are_numbers(&[choice("0"), choice("1")]) && !are_numbers(&[choice("no"), choice("1")]));
/// ```
pub fn are_numbers(choices: &[Choice]) -> bool {
    choices.iter().all(|choice| choice.value.parse::<u64>().is_ok())
}
