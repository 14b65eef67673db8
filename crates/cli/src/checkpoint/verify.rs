//! `accelerate checkpoint verify`: whether every byte of a save is as it was written.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::error::Error;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use accelerate_core::checkpoint::{DESCRIPTION, STEM};
use accelerate_core::files::in_one_line;
use accelerate_core::names::counted;
use accelerate_core::weight_files::{
    Checksum, EXTENSION, Header, Index, SaveManifest, SavedFile, format_size, is_temporary_file_of, listed,
    sample_blocks, shown,
};
use anstyle::{AnsiColor, Style};
use clap::Args;
use serde::Serialize;

use super::check::{check_description, check_index};
use super::conversions::{self, Conversion, conversions_in};
use super::error::{CheckpointError, Fault, Problem, Verdict};
use super::files::{content_checksum, open, read_small};
use super::folder::{
    CHECKPOINTS, Save, bytes_on_disk, check_checksum, check_size, is_checkpoint, is_of_python, list, no_checkpoint,
    numbered_in,
};
use crate::progress::Progress;

/// A checksum is faster than most disks, so that more threads would only make the disk seek.
const MOST_THREADS: usize = 2;

/// Compare every byte of checkpoints and saved models with what was written.
///
/// FOLDER is a checkpoint of `save_state`, the output of `save_model`, or a project, of which all numbered checkpoints are
/// verified; of those, a save that was not completed is named, and only counts where no other was completed. The content of every file is compared with its hash in the manifest, and every weight file with the description:
/// element types, shapes, and that each element is in exactly one file. All faults are listed, not only the first.
///
/// Nothing is changed. A save that was interrupted after it counted is verified where its files are now; the next load or
/// save gives them their names.
#[derive(Debug, Args)]
#[command(after_long_help = "Examples:\n  \
    accelerate checkpoint verify runs/bert/checkpoints/checkpoint_3\n  \
    accelerate checkpoint verify runs/bert runs/gpt --json\n\n\
    Exit code: 0 if all is as it was saved, 1 if not or if a folder has nothing to verify (the others are verified all the \
    same), 2 for wrong flags. In a project, saves that were not completed \
    do not count where others were.")]
pub(crate) struct Arguments {
    /// Folders of checkpoints, of saved models, or of projects with numbered checkpoints.
    #[arg(value_name = "FOLDER", required = true, num_args = 1..)]
    folders: Vec<PathBuf>,

    /// Print JSON: for each folder what was read, its faults and foreign files.
    #[arg(long)]
    json: bool,
}

/// What came out for one folder.
#[derive(Debug, Default, Serialize)]
struct Report {
    folder: String,
    ok: bool,
    /// Whether a save was completed here. One that was not is never resumed from.
    completed: bool,
    /// Whether files wait under temporary names for the next load or save.
    interrupted: bool,
    num_files: u64,
    num_bytes: u64,
    num_tensors: u64,
    /// What the worst of the faults says.
    verdict: Option<Verdict>,
    faults: Vec<FaultText>,
    /// Why nothing of the folder could be verified.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    /// What saves left that were ended before they counted. The next save removes it.
    abandoned: Vec<String>,
    /// What no save has written.
    foreign: Vec<String>,
}

impl Report {
    /// Of a folder of which nothing could be verified.
    fn of_error(folder: &Path, error: &CheckpointError) -> Self {
        let causes = std::iter::successors(error.source(), |&cause| cause.source());
        let error = causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"));
        Self { folder: folder.display().to_string(), error: Some(error), ..Self::default() }
    }
}

#[derive(Debug, Serialize)]
struct FaultText {
    file: String,
    problem: String,
}

impl From<Fault> for FaultText {
    fn from(fault: Fault) -> Self {
        Self { problem: fault.problem.to_string(), file: fault.file }
    }
}

/// A folder before anything large is read.
#[derive(Debug)]
struct Target {
    folder: PathBuf,
    /// It is one of the numbered checkpoints of a project.
    is_of_project: bool,
    names: Vec<String>,
    saves: Vec<Save>,
    faults: Vec<Fault>,
}

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, Box<dyn Error>> {
    let Found { targets, conversions, errors } = Found::of(&arguments.folders);
    let saves = targets.iter().flat_map(|target| &target.saves);
    let bar = Progress::new("verifying", saves.fold(0, |sum, save| sum.saturating_add(save.num_bytes())));
    let counts = counting(&targets);
    // A run that goes on removes checkpoints that are too many, each with its folder as a whole.
    let is_left = |folder: &Path, is_of_project: bool, report: &Report| report.ok || !is_of_project || folder.exists();
    let verified = targets.into_iter().zip(counts).filter_map(|(target, counts)| {
        let (folder, is_of_project) = (target.folder.clone(), target.is_of_project);
        let report = target.verify(&bar);
        is_left(&folder, is_of_project, &report).then_some((report, counts))
    });
    let (mut reports, counts): (Vec<Report>, Vec<bool>) = verified.unzip();
    bar.finish();
    let is_ok = errors.is_empty() && reports.iter().zip(counts).all(|(report, counts)| report.ok || !counts);
    let text = match arguments.json {
        true => {
            reports.extend(errors.iter().map(|(folder, error)| Report::of_error(folder, error)));
            let report = serde_json::json!({ "folders": reports, "conversions": conversions });
            serde_json::to_string_pretty(&report)? + "\n"
        }
        false => reports.iter().map(described).collect::<String>() + &conversions::described(&conversions),
    };
    crate::print_coloured(&text)?;
    errors.iter().for_each(|(_, error)| crate::print_error("accelerate checkpoint", error, &error.to_string()));
    Ok(if is_ok { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// What the folders of a command line lead to.
#[derive(Debug, Default)]
struct Found {
    targets: Vec<Target>,
    conversions: Vec<Conversion>,
    /// Folders of which nothing can be verified. The others are, all the same.
    errors: Vec<(PathBuf, CheckpointError)>,
}

impl Found {
    fn of(folders: &[PathBuf]) -> Self {
        let mut found = Self::default();
        for folder in folders {
            match expand(folder) {
                Ok(within) => found.add(folder, within),
                Err(error) => found.errors.push((folder.clone(), error)),
            }
        }
        found
    }

    /// Takes up what a folder was expanded to.
    fn add(&mut self, folder: &Path, within: Vec<PathBuf>) {
        if within.iter().any(|found| found != folder) {
            self.conversions.extend(conversions_in(folder));
        }
        for found in within {
            // What a project has besides, such as its trained model, counts as it does alone.
            let is_of_project = found != *folder;
            match Target::read(found.clone()) {
                Ok(target) => self.targets.push(Target { is_of_project, ..target }),
                // A run removes the checkpoints that are too many.
                Err(_) if is_of_project && !found.exists() => {}
                Err(error) => self.errors.push((found, error)),
            }
        }
    }
}

/// For each target, whether the exit code depends on it. In a project, a save that was not completed is no damage where others
/// were: a run that is ended while it saves leaves one, and goes on from the others.
fn counting(targets: &[Target]) -> Vec<bool> {
    let parent = |target: &Target| target.folder.parent().map(Path::to_owned);
    let has_complete = |target: &Target| {
        targets.iter().any(|other| other.is_of_project && other.is_completed() && parent(other) == parent(target))
    };
    let counts = |target: &Target| target.is_completed() || !target.is_of_project || !has_complete(target);
    targets.iter().map(counts).collect()
}

/// The folder itself, if something is saved in it, and the checkpoints of a project.
fn expand(folder: &Path) -> Result<Vec<PathBuf>, CheckpointError> {
    let names = list(folder)?;
    let has_save = names.iter().any(|name| SaveManifest::stem(name).is_some());
    let numbered = numbered_in(folder);
    let is_saved = has_save || is_checkpoint(folder, &names);
    let own = is_saved.then(|| folder.to_owned());
    match (is_saved, numbered.is_empty()) {
        (false, true) => Err(no_checkpoint(folder, &names)),
        _ => Ok(own.into_iter().chain(numbered.into_iter().map(|(_, folder)| folder)).collect()),
    }
}

/// Is everything in a folder as its manifests say?
///
/// # Errors
/// No save was completed there, or it cannot be told, as something may not be read or is of a newer version.
pub(crate) fn is_as_saved(folder: &Path) -> Result<bool, Box<dyn Error>> {
    let (_, faults) = Target::read(folder.to_owned())?.check(&Progress::hidden());
    match faults.into_iter().min_by_key(|fault| fault.problem.verdict()) {
        None => Ok(true),
        Some(Fault { problem: Problem::NotCompleted, .. }) => {
            Err(CheckpointError::NotCompleted { folder: folder.to_owned() }.into())
        }
        Some(fault) if fault.problem.verdict() == Verdict::Damaged => Ok(false),
        Some(source) => Err(CheckpointError::Unusable { folder: folder.to_owned(), source }.into()),
    }
}

impl Target {
    fn read(folder: PathBuf) -> Result<Self, CheckpointError> {
        let names = list(&folder)?;
        let (mut saves, mut faults) = (Vec::new(), Vec::new());
        for stem in names.iter().filter_map(|name| SaveManifest::stem(name)) {
            match Save::read(&folder, stem) {
                Ok(save) => saves.extend(save),
                Err(fault) => faults.push(fault),
            }
        }
        if saves.is_empty() && faults.is_empty() {
            faults.push(Problem::NotCompleted.at(SaveManifest::file_name(STEM)));
        }
        Ok(Self { folder, is_of_project: false, names, saves, faults })
    }

    /// A manifest that cannot be read is of a save that was completed.
    fn is_completed(&self) -> bool {
        !self.saves.is_empty() || self.faults.iter().any(|fault| !matches!(fault.problem, Problem::NotCompleted))
    }

    fn verify(self, bar: &Progress) -> Report {
        let (report, faults) = self.check(bar);
        let (ok, verdict) = (faults.is_empty(), Verdict::of(&faults));
        Report { ok, verdict, faults: faults.into_iter().map(FaultText::from).collect(), ..report }
    }

    /// What is in the folder, and what is wrong with it.
    fn check(self, bar: &Progress) -> (Report, Vec<Fault>) {
        let mut report = Report { folder: self.folder.display().to_string(), ..Default::default() };
        self.list_others(&mut report);
        report.completed = self.is_completed();
        report.num_bytes = match self.saves.is_empty() {
            true => bytes_on_disk(&self.folder),
            false => self.saves.iter().fold(0, |sum: u64, save| sum.saturating_add(save.num_bytes())),
        };
        let mut faults = self.faults;
        for save in &self.saves {
            report.interrupted |= save.is_interrupted();
            report.num_files += save.manifest.files.len() as u64;
            let (mut found, headers) = check_contents(save, bar);
            let tensors = headers.values().map(|header| header.entries().len() as u64);
            report.num_tensors += tensors.sum::<u64>();
            found.extend(check_meaning(save, &headers));
            faults.extend(found);
        }
        (report, faults)
    }

    /// Names in the folder that belong to no save that counts.
    fn list_others(&self, report: &mut Report) {
        let manifests = || self.saves.iter().map(|save| &save.manifest);
        let files = manifests().flat_map(|manifest| &manifest.files);
        let of_files = files.flat_map(|file| [&file.name].into_iter().chain(&file.temporary_name));
        let own: HashSet<&String> = of_files.chain(manifests().flat_map(|manifest| &manifest.outdated)).collect();
        let stems = || self.names.iter().filter_map(|name| SaveManifest::stem(name)).chain([STEM]);
        for name in self.names.iter().filter(|name| SaveManifest::stem(name).is_none()) {
            if own.contains(name) {
                continue;
            }
            // They are verified on their own.
            if name == CHECKPOINTS && !numbered_in(&self.folder).is_empty() {
                continue;
            }
            let is_abandoned = stems().any(|stem| is_temporary_file_of(name, stem));
            let list = if is_abandoned { &mut report.abandoned } else { &mut report.foreign };
            list.push(name.clone());
        }
    }
}

/// Compares all files of a save with their checksums, on a few threads. Also gives the headers of its weights.
pub(super) fn check_contents(save: &Save, bar: &Progress) -> (Vec<Fault>, BTreeMap<String, Header>) {
    let files = &save.manifest.files;
    let next = AtomicUsize::new(0);
    let work = || {
        let (mut faults, mut headers) = (Vec::new(), Vec::new());
        while let Some(file) = files.get(next.fetch_add(1, Ordering::Relaxed)) {
            match check_content(save, file, bar) {
                Ok(Some(header)) => headers.push((file.name.clone(), header)),
                Ok(None) => {}
                Err(problem) => faults.push(problem.at(&file.name)),
            }
        }
        (faults, headers)
    };
    let (mut faults, mut headers) = (Vec::new(), BTreeMap::new());
    thread::scope(|scope| {
        let others: Vec<_> = (1..MOST_THREADS.min(files.len())).map(|_| scope.spawn(work)).collect();
        let own = work();
        // A thread that could not say what it found is a fault of this program; the files count as not verified.
        let lost = |_| (vec![Problem::NotVerified.at(SaveManifest::file_name(&save.stem))], Vec::new());
        for (found, read) in others.into_iter().map(|other| other.join().unwrap_or_else(lost)).chain([own]) {
            faults.extend(found);
            headers.extend(read);
        }
    });
    let places: HashMap<&str, usize> = files.iter().zip(0..).map(|(file, place)| (file.name.as_str(), place)).collect();
    faults.sort_by_cached_key(|fault| places.get(fault.file.as_str()));
    (faults, headers)
}

fn check_content(save: &Save, file: &SavedFile, bar: &Progress) -> Result<Option<Header>, Problem> {
    let (content, found_bytes) = open(&save.path_of(file))?;
    check_size(file, found_bytes)?;
    let found = content_checksum(&content, found_bytes, |read| bar.inc(read)).map_err(Problem::of)?;
    check_checksum(file, &found)?;
    if sample(&content, found_bytes).map_err(Problem::of)?.to_string() != file.sample {
        return Err(Problem::Sample);
    }
    if Path::new(&file.name).extension().is_none_or(|extension| extension != EXTENSION) {
        return Ok(None);
    }
    let (mut content, found_bytes) = open(&save.path_of(file))?;
    Header::read(&mut content, found_bytes).map(Some).map_err(Problem::Format)
}

/// The checksum of the blocks by which loading recognises the file.
pub(super) fn sample(file: &File, num_bytes: u64) -> io::Result<Checksum> {
    let mut checksum = Checksum::new();
    let mut block = Vec::new();
    for blocks in sample_blocks(num_bytes) {
        block.resize((blocks.end - blocks.start) as usize, 0);
        file.read_exact_at(&mut block, blocks.start)?;
        checksum.update(&block);
    }
    Ok(checksum)
}

/// Whether the files of a save belong together.
fn check_meaning(save: &Save, headers: &BTreeMap<String, Header>) -> Vec<Fault> {
    let mut faults = Vec::new();
    if save.stem == STEM {
        match save.read_description() {
            Ok(description) => faults.extend(check_description(&description, &save.manifest, headers)),
            // That its content has changed has been said.
            Err(Fault { problem: Problem::Format(error), .. }) => faults.push(Problem::Format(error).at(DESCRIPTION)),
            Err(fault) if save.file(DESCRIPTION).is_none() => faults.push(fault),
            Err(_) => {}
        }
    }
    let suffix = Index::file_name("");
    for file in save.manifest.files.iter().filter(|file| file.name.ends_with(&suffix)) {
        let Ok(json) = read_small(&save.path_of(file), Index::MAX_BYTES) else { continue };
        match Index::from_json(&String::from_utf8_lossy(&json)) {
            Ok(index) => faults.extend(check_index(&index, headers, &save.manifest)),
            Err(error) => faults.push(Problem::Format(error).at(&file.name)),
        }
    }
    faults
}

fn described(report: &Report) -> String {
    let (word, color) = match (report.verdict, report.completed) {
        (None, _) => ("ok".to_owned(), AnsiColor::Green),
        (Some(verdict), true) => (verdict.word().to_uppercase(), AnsiColor::Red),
        (_, false) => ("NOT COMPLETED".to_owned(), AnsiColor::Red),
    };
    let style: Style = color.on_default().bold();
    let Report { num_files, num_bytes, num_tensors, .. } = report;
    let (files, bytes, tensors) =
        (counted(*num_files, "file"), format_size(*num_bytes), counted(*num_tensors, "tensor"));
    let mut text = format!("{style}{word}{style:#} {}: {files}, {bytes}, {tensors}\n", in_one_line(&report.folder));
    for FaultText { file, problem } in &report.faults {
        text += &format!("  {}: {problem}\n", shown(file));
    }
    if report.interrupted {
        text += "  The save was interrupted after it counted, or is under way. The next load or save here gives its files \
                 their names.\n";
    }
    for (words, names) in [
        (
            "Of a save that is under way, or was ended before it counted (the next save removes them then)",
            &report.abandoned,
        ),
        ("Written by no save, and not looked at", &report.foreign),
    ] {
        if !names.is_empty() {
            text += &format!("  {words}: {}\n", listed(names, 600));
        }
    }
    if !report.ok && !report.completed && is_of_python(&report.foreign) {
        text += "  Python Accelerate wrote it. It can be verified once `accelerate checkpoint convert` has made one of this library \
                 of it.\n";
    } else if !report.ok && !report.completed {
        text += "  Nothing is resumed from it. It can be removed, unless a save into it is under way.\n";
    }
    text += match report.verdict.filter(|_| report.completed) {
        Some(Verdict::Damaged) => {
            "  Resume from another checkpoint, or copy the files again from where they are whole.\n"
        }
        Some(Verdict::NewerVersion) => "  It may be whole: verify it with the version that has written it.\n",
        Some(Verdict::NotReadable) => "  It may be whole: verify it as a user who may read all of it.\n",
        None => "",
    };
    text
}
