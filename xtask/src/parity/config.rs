//! `cargo xtask parity config`: configuration files of all versions, read by both sides; those that are written here, read by
//! Python; and files with mistakes, whose lines and cures are known.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use accelerate_core::config::{ConfigFile, FileFormat, PartialRunConfig, RunConfig, Sources, settings};
use accelerate_core::settings::Setting;
use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::python::Environment;
use crate::{paths, process};

/// Compare what configuration files mean, in both directions.
#[derive(Debug, Args)]
pub(super) struct Config {}

/// Files that Python refuses, with words of its reason, and that are read here.
const REFUSED_BY_PYTHON: [(&str, &str); 1] = [("0_18_ipex.yaml", "unknown keys (['ipex_config'])")];

/// Files that are refused here, with words of the reason.
const REFUSED_HERE: [(&str, &str); 2] = [
    ("0_30_sagemaker.yaml", "Amazon SageMaker is not available"),
    ("0_30_megatron.yaml", "Megatron-LM is not available"),
];

/// What `parity/config.py read` prints.
#[derive(Debug, Deserialize)]
struct Answers {
    defaults: Map<String, Value>,
    files: BTreeMap<PathBuf, Answer>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Answer {
    Config(Map<String, Value>),
    Error(String),
}

pub(super) fn run(_: &Config) -> Result<()> {
    let environment = Environment::ensure()?;
    println!("reference: {}", environment.versions);
    let work = paths::target_folder().join("parity/config");
    if work.exists() {
        fs::remove_dir_all(&work).with_context(|| format!("could not remove {}", work.display()))?;
    }
    let [theirs, ours] = ["theirs", "ours"].map(|side| work.join(side));
    for folder in [&theirs, &ours] {
        fs::create_dir_all(folder).with_context(|| format!("could not create {}", folder.display()))?;
    }
    ask(&environment, "write", std::slice::from_ref(&theirs))?;
    let read = files_in(&cases_folder("read"))?.into_iter().chain(files_in(&theirs)?).collect::<Vec<_>>();
    ensure!(read.len() >= 40, "only {} files were compared", read.len());

    let mut tally = Tally::default();
    let written = compare_read(&environment, &read, &ours, &mut tally)?;
    compare_written(&environment, &written, &mut tally)?;
    compare_conversions(&environment, &written, &mut tally)?;
    for path in files_in(&cases_folder("errors"))? {
        tally.add("mistakes", &path, &check_mistakes(&path)?);
    }
    let outcome = if tally.num_failed == 0 { "ok" } else { "FAILED" };
    let counts = tally.counts.iter().map(|(what, count)| format!("{what}={count}")).collect::<Vec<_>>().join(" ");
    println!("parity=config {counts} failed={} {outcome}", tally.num_failed);
    if tally.num_failed > 0 {
        bail!("{} files mean something else", tally.num_failed);
    }
    Ok(())
}

/// What was compared, and how much of it was wrong.
#[derive(Debug, Default)]
struct Tally {
    counts: BTreeMap<&'static str, usize>,
    num_failed: usize,
}

impl Tally {
    fn add(&mut self, what: &'static str, path: &Path, problems: &[String]) {
        *self.counts.entry(what).or_default() += 1;
        self.num_failed += usize::from(!problems.is_empty());
        match problems {
            [] => println!("{what} {}: ok", name_of(path)),
            problems => println!("{what} {}: FAILED\n  {}", name_of(path), problems.join("\n  ")),
        }
    }
}

/// A file that was written here, and what it says.
type Written = (PathBuf, PartialRunConfig);

/// Reads every file on both sides, and writes what it says into two files.
fn compare_read(
    environment: &Environment,
    files: &[PathBuf],
    folder: &Path,
    tally: &mut Tally,
) -> Result<Vec<Written>> {
    let answers = answers(environment, files)?;
    let mut written = Vec::new();
    for (path, answer) in &answers.files {
        let text = fs::read_to_string(path).with_context(|| format!("could not read {}", path.display()))?;
        let said = ConfigFile::read(&text, path).map(ConfigFile::into_partial);
        tally.add("read", path, &compare(name_of(path), &said, answer, &answers.defaults));
        let Ok(said) = said else { continue };
        for (format, extension) in [(FileFormat::Yaml, "yaml"), (FileFormat::Json, "json")] {
            let copy = folder.join(format!("{}.{extension}", name_of(path).replace('.', "_")));
            fs::write(&copy, ConfigFile::write(&said, format))
                .with_context(|| format!("could not write {}", copy.display()))?;
            written.push((copy, said.in_file()));
        }
    }
    Ok(written)
}

/// Python reads what was written here.
fn compare_written(environment: &Environment, written: &[Written], tally: &mut Tally) -> Result<()> {
    let paths: Vec<_> = written.iter().map(|(path, _)| path.clone()).collect();
    let answers = answers(environment, &paths)?;
    for (path, said) in written {
        let answer = answers.files.get(path).context("Python left a file out")?;
        tally.add("written", path, &compare("", &Ok(said.clone()), answer, &answers.defaults));
    }
    Ok(())
}

/// Both sides convert files for FSDP to version 2.
fn compare_conversions(environment: &Environment, written: &[Written], tally: &mut Tally) -> Result<()> {
    let is_json = |path: &Path| path.extension().is_some_and(|extension| extension == "json");
    let is_for_fsdp = |(path, said): &&Written| is_json(path) && said.fsdp != Default::default();
    let of_fsdp: Vec<_> = written.iter().filter(is_for_fsdp).collect();
    let paths: Vec<_> = of_fsdp.iter().map(|(path, _)| path.clone()).collect();
    let theirs: BTreeMap<PathBuf, Map<String, Value>> =
        serde_json::from_str(&ask(environment, "to_fsdp2", &paths)?).context("Python's answer is no JSON")?;
    for (path, said) in of_fsdp {
        let theirs = theirs.get(path).context("Python left a file out")?;
        tally.add("to_fsdp2", path, &differences(&said.to_fsdp2()?.said, theirs, &Map::new()));
    }
    Ok(())
}

fn cases_folder(name: &str) -> PathBuf {
    paths::repository_root().join("parity/config").join(name)
}

fn files_in(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder).with_context(|| format!("could not read {}", folder.display()))?;
    let mut files = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    files.sort();
    Ok(files)
}

fn name_of(path: &Path) -> &str {
    path.file_name().and_then(|name| name.to_str()).unwrap_or_default()
}

fn ask(environment: &Environment, what: &str, paths: &[PathBuf]) -> Result<String> {
    let script = paths::repository_root().join("parity/config.py");
    process::read(environment.command().arg(script).arg(what).args(paths))
}

fn answers(environment: &Environment, paths: &[PathBuf]) -> Result<Answers> {
    serde_json::from_str(&ask(environment, "read", paths)?).context("Python's answer is no JSON")
}

/// How the meanings of a file differ.
fn compare(
    name: &str,
    ours: &accelerate_core::Result<PartialRunConfig>,
    theirs: &Answer,
    defaults: &Map<String, Value>,
) -> Vec<String> {
    let refused = |list: &[(&str, &'static str)]| list.iter().find(|(file, _)| *file == name).map(|(_, why)| *why);
    match (ours, theirs, refused(&REFUSED_HERE), refused(&REFUSED_BY_PYTHON)) {
        (Err(error), _, Some(why), _) if error.to_string().contains(why) => Vec::new(),
        (Err(error), ..) => vec![format!("refused here: {error}")],
        (Ok(_), _, Some(why), _) => vec![format!("not refused here with {why:?}")],
        (Ok(_), Answer::Error(error), None, Some(why)) if error.contains(why) => Vec::new(),
        (Ok(_), Answer::Error(error), ..) => vec![format!("refused by Python: {error}")],
        (Ok(_), Answer::Config(_), None, Some(why)) => vec![format!("not refused by Python with {why:?}")],
        (Ok(said), Answer::Config(config), None, None) => differences(said, config, defaults),
    }
}

fn differences(said: &PartialRunConfig, config: &Map<String, Value>, defaults: &Map<String, Value>) -> Vec<String> {
    let mut problems = Vec::new();
    let mut known = Vec::new();
    for (section, key, value) in flat(config) {
        let Some(setting) = settings().find(|setting| setting.section == section && setting.has_key(key)) else {
            // Sections of others, without keys.
            if !value.as_object().is_some_and(Map::is_empty) {
                problems.push(format!("{section} {key} {value} is unknown here"));
            }
            continue;
        };
        known.push(setting.path);
        let (ours, theirs) = (said.text(setting), text(setting, value));
        // Python fills in what nobody has said, and the number of processes of a type that stands for one.
        let is_filled = section.is_empty() && (defaults.get(key) == Some(value) || key == "num_processes");
        if ours != theirs && !(ours.is_none() && is_filled) {
            problems.push(format!("{}: {ours:?} here, {theirs:?} in Python", setting.path));
        }
    }
    for setting in settings().filter(|setting| !known.contains(&setting.path)) {
        if let Some(text) = said.text(setting).filter(|text| setting.default().as_ref() != Some(text)) {
            problems.push(format!("{}: {text:?} here, nothing in Python", setting.path));
        }
    }
    problems
}

/// Sections, keys and values. Words that Python reads are those of `launch` in any case.
fn flat(config: &Map<String, Value>) -> impl Iterator<Item = (&str, &str, &Value)> {
    config.iter().flat_map(|(key, value)| match value {
        Value::Object(section) if !section.is_empty() => {
            section.iter().map(|(inner, value)| (key.as_str(), inner.as_str(), value)).collect::<Vec<_>>()
        }
        value => vec![("", key.as_str(), value)],
    })
}

/// What a value of Python says of the setting, spelled as here.
fn text(setting: &'static Setting, value: &Value) -> Option<String> {
    let text = match value {
        Value::Null => return None,
        Value::String(text) => text.clone(),
        Value::Array(items) => items.iter().map(|item| item.as_str().unwrap_or_default()).collect::<Vec<_>>().join(","),
        value => value.to_string(),
    };
    let spelled = PartialRunConfig::of_texts(&[(setting, text.clone())]).text(setting);
    // A word that is no value stays what it is, so that it is told.
    if text.is_empty() { None } else { spelled.or(Some(text)) }
}

/// What comes after this on a line is in the message of its mistake.
const EXPECTED: &str = "# expect:";

/// The mistakes that a file says it has are those that are found, each with its line and a column.
fn check_mistakes(path: &Path) -> Result<Vec<String>> {
    let text = fs::read_to_string(path).with_context(|| format!("could not read {}", path.display()))?;
    let (file, errors) = ConfigFile::read_all(&text, path);
    let (of_settings, _) = RunConfig::problems(Sources { file: Some(file), ..Default::default() });
    let mut errors: Vec<_> = errors.iter().chain(&of_settings).map(ToString::to_string).collect();
    let mut problems = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let Some((_, words)) = line.split_once(EXPECTED) else { continue };
        let place = format!("{}:{}:", path.display(), index + 1);
        let is_meant = |error: &String| error.contains(words.trim()) && names_a_character(error, &place, line);
        match errors.iter().position(is_meant) {
            Some(found) => drop(errors.remove(found)),
            None => problems.push(format!("no error names line {} and says {:?}", index + 1, words.trim())),
        }
    }
    problems.extend(errors.into_iter().map(|error| format!("nobody expected: {error}")));
    Ok(problems)
}

/// Is there a column after the place of the line, and a character of the mistake in that column? Syntax errors are noticed
/// behind the last one.
fn names_a_character(error: &str, place: &str, line: &str) -> bool {
    let Some((_, rest)) = error.split_once(place) else { return false };
    let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
    let Some(before) = digits.parse::<usize>().ok().and_then(|column| column.checked_sub(1)) else { return false };
    before >= line.chars().count() || line.chars().nth(before).is_some_and(|character| character != ' ')
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn every_planted_mistake_is_found_with_its_line_and_cure() {
        let files = files_in(&cases_folder("errors")).unwrap();
        assert!(files.len() >= 12, "{}", files.len());
        for path in files {
            let text = fs::read_to_string(&path).unwrap();
            assert!(text.contains(EXPECTED), "{}", path.display());
            assert_eq!(check_mistakes(&path).unwrap(), [""; 0], "{}", path.display());
        }
    }

    #[test]
    fn files_of_old_versions_are_read() {
        let files = files_in(&cases_folder("read")).unwrap();
        assert!(files.len() >= 40, "{}", files.len());
        for path in files {
            let text = fs::read_to_string(&path).unwrap();
            let is_refused = REFUSED_HERE.iter().any(|(name, _)| *name == name_of(&path));
            let read = ConfigFile::read(&text, &path);
            assert_eq!(read.is_err(), is_refused, "{read:?}");
        }
    }

    #[test]
    fn values_that_differ_are_named() {
        let file = ConfigFile::read("num_processes: 2\nmixed_precision: bf16\n", "run.yaml".as_ref()).unwrap();
        let config = |text: &str| serde_json::from_str::<Map<String, Value>>(text).unwrap();
        let defaults = config(r#"{"use_cpu": false}"#);
        let said = file.into_partial();
        let same = config(r#"{"num_processes": 2, "mixed_precision": "bf16", "use_cpu": false, "fsdp_config": {}}"#);
        assert_eq!(differences(&said, &same, &defaults), [""; 0]);
        for (theirs, words) in [
            (r#"{"num_processes": 3, "mixed_precision": "bf16"}"#, "num_processes: Some(\"2\") here, Some(\"3\")"),
            (r#"{"num_processes": 2}"#, "mixed_precision: \"bf16\" here, nothing in Python"),
            (r#"{"num_processes": 2, "mixed_precision": "bf16", "use_cpu": true}"#, "use_cpu: None here"),
            (r#"{"num_processes": 2, "mixed_precision": "bf16", "new": 1}"#, "new 1 is unknown here"),
        ] {
            let found = differences(&said, &config(theirs), &defaults);
            assert!(found.len() == 1 && found[0].contains(words), "{found:?}");
        }
    }
}
