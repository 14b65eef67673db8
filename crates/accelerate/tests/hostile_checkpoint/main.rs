//! Checkpoints that were made to do harm: refused in no time, in little memory, with an error that names the file, and nothing
//! of the run has changed.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
#![allow(unreachable_pub, reason = "cases and bounds are modules of several crates")]

mod described;
#[path = "../hostile/mod.rs"]
mod hostile;
mod listed;
mod run;
mod weights;

use accelerate::testing;
use hostile::{Outcome, outcome};
use run::{Saved, compressed, prepare, start};
use serde_json::json;
use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::Command;

const MANIFEST: &str = "checkpoint.manifest.json";
const DESCRIPTION: &str = "checkpoint.json";

/// What is done to a copy of a checkpoint, which file the error has to name, and what else it has to say.
struct Case {
    name: String,
    harm: Box<dyn Fn(&Saved)>,
    file: String,
    part: &'static str,
}

impl Case {
    fn new(name: impl Into<String>, file: &str, part: &'static str, harm: impl Fn(&Saved) + 'static) -> Self {
        Self { name: name.into(), harm: Box::new(harm), file: file.to_owned(), part }
    }
}

/// Loads each of them into a run, and counts them.
fn check_all(pristine: &Saved, cases: Vec<Case>) -> usize {
    let mut run = start();
    run.train().unwrap();
    run.train().unwrap();
    let before = run.state();
    let num_cases = cases.len();
    let check = |Case { name, harm, file, part }: Case| {
        let saved = pristine.copy();
        harm(&saved);
        let path = saved.path(&file);
        let mut is_typed = false;
        let load = || {
            run.accelerator.load_state(saved.folder()).inspect_err(|error| {
                is_typed = error.is_checkpoint() || error.is_weights() || error.is_config();
            })
        };
        let Outcome::Refused(message) = outcome(&name, &path, 0, load) else { panic!("{name}: it was loaded") };
        assert!(message.contains(part), "{name}: {message:?} lacks {part:?}");
        assert!(is_typed, "{name}: the error has no type: {message}");
        assert!(run.state() == before, "{name}: the run has changed, though {message}");
    };
    // All of them are looked at before the first that is wrong ends the test; each has said what is wrong.
    let is_wrong = |case: Case| catch_unwind(AssertUnwindSafe(|| check(case))).is_err();
    let num_wrong = cases.into_iter().filter_map(|case| is_wrong(case).then_some(())).count();
    assert_eq!(num_wrong, 0, "of {num_cases} cases");
    // The cases, and not the checkpoint, are what is wrong.
    run.accelerator.load_state(pristine.folder()).unwrap();
    assert!(run.state() != before);
    num_cases
}

#[test]
fn a_manifest_that_lies_is_refused() {
    let num_cases = check_all(&Saved::whole(), listed::cases());
    assert!(num_cases >= 35, "{num_cases}");
}

#[test]
fn a_description_that_lies_is_refused() {
    let num_cases = check_all(&Saved::whole(), described::cases());
    assert!(num_cases >= 55, "{num_cases}");
}

#[test]
fn a_description_that_lies_about_parts_is_refused() {
    let num_cases = check_all(&Saved::sharded(), described::cases_of_parts());
    assert!(num_cases >= 20, "{num_cases}");
}

#[test]
fn weights_that_lie_are_refused() {
    let num_cases = check_all(&Saved::sharded(), weights::cases());
    assert!(num_cases >= 15, "{num_cases}");
}

/// Hooks go on last, and what they go on from is read before anything has changed.
#[test]
fn a_hook_state_that_lies_is_refused_before_anything_has_changed() {
    let pristine = Saved::compressed();
    let load = |saved: &Saved| {
        testing::ranks(2, compressed(), |accelerator| {
            let mut run = prepare(accelerator)?;
            for _ in 0..3 {
                run.train()?;
            }
            let state = || {
                let mut state = run.state();
                // Ranks are threads here, and have one generator.
                state.remove("random");
                state
            };
            let before = state();
            let refused = run.accelerator.load_state(saved.folder()).err().map(|error| error.to_string());
            Ok((refused, state() == before))
        })
    };
    let lies = [("iteration", json!("many")), ("num_buckets", json!(99)), ("num_seeds", json!(-1))];
    for (key, lie) in lies {
        let saved = pristine.copy();
        saved.describe(|description| description["objects"]["comm_hook_1"]["values"]["model"][key] = lie.clone());
        let outcomes = load(&saved).unwrap();
        assert!(
            outcomes.iter().all(|(refused, is_unchanged)| refused.is_some() && *is_unchanged),
            "{key}: {outcomes:?}"
        );
    }
    assert_eq!(load(&pristine).unwrap(), [(None, false), (None, false)]);
}

/// What is done to one file of a checkpoint, without the manifest knowing.
type Harm = (&'static str, fn(&Path), &'static str);

const HARMS: [Harm; 12] = [
    ("cut by a byte", |path| resize(path, -1), "were saved"),
    ("cut in half", |path| resize(path, -(fs::metadata(path).unwrap().len() as i64 / 2)), "were saved"),
    ("emptied", |path| fs::write(path, "").unwrap(), "were saved"),
    ("a byte longer", |path| resize(path, 1), "were saved"),
    ("a terabyte longer", |path| resize(path, 1 << 40), "were saved"),
    ("its first bit flipped", |path| flip(path, 0), "its content has changed"),
    (
        "a bit in the middle flipped",
        |path| flip(path, fs::metadata(path).unwrap().len() / 2),
        "its content has changed",
    ),
    ("its last bit flipped", |path| flip(path, fs::metadata(path).unwrap().len() - 1), "its content has changed"),
    ("removed", |path| fs::remove_file(path).unwrap(), "No such file"),
    ("renamed", |path| fs::rename(path, path.with_extension("old")).unwrap(), "No such file"),
    ("a link to itself", |path| link(path, path.file_name().unwrap().as_ref()), "symbolic links"),
    ("a link to nowhere", |path| link(path, Path::new("nowhere")), "No such file"),
];

/// What is put in the place of a file.
const PLACES: [Harm; 3] = [
    ("a folder", |path| fs::create_dir(path).unwrap(), ""),
    ("a pipe", |path| assert!(Command::new("mkfifo").arg(path).status().unwrap().success()), ""),
    ("a device", |path| symlink("/dev/zero", path).unwrap(), ""),
];

fn resize(path: &Path, by: i64) {
    let file = File::options().write(true).open(path).unwrap();
    file.set_len(file.metadata().unwrap().len().saturating_add_signed(by)).unwrap();
}

fn flip(path: &Path, at: u64) {
    let mut bytes = fs::read(path).unwrap();
    bytes[at as usize] ^= 1;
    fs::write(path, bytes).unwrap();
}

fn link(path: &Path, to: &Path) {
    fs::remove_file(path).unwrap();
    symlink(to, path).unwrap();
}

#[test]
fn a_file_that_is_not_as_it_was_saved_is_named() {
    for pristine in [Saved::whole(), Saved::sharded()] {
        let mut cases = Vec::new();
        for file in pristine.names().into_iter().filter(|name| name != MANIFEST) {
            for (what, harm, part) in HARMS {
                let own = file.clone();
                cases.push(Case::new(format!("{file} {what}"), &file, part, move |saved| harm(&saved.path(&own))));
            }
            for (what, put, part) in PLACES {
                let own = file.clone();
                cases.push(Case::new(format!("{what} in the place of {file}"), &file, part, move |saved| {
                    fs::remove_file(saved.path(&own)).unwrap();
                    put(&saved.path(&own));
                }));
            }
            let own = file.clone();
            // Whichever of the two is looked at first is named.
            cases.push(Case::new(format!("{file} exchanged for another"), "", "were saved", move |saved| {
                let other = saved.names().into_iter().find(|name| *name != own && name != MANIFEST).unwrap();
                fs::rename(saved.path(&own), saved.path("aside")).unwrap();
                fs::rename(saved.path(&other), saved.path(&own)).unwrap();
                fs::rename(saved.path("aside"), saved.path(&other)).unwrap();
            }));
        }
        let num_cases = check_all(&pristine, cases);
        assert!(num_cases >= 60, "{num_cases}");
    }
}

/// How many places of each file get a flipped bit.
const FLIPS: usize = 400;

/// Whatever a flipped bit makes of the manifest or of a description that is sealed anew: an error, or what the files say.
#[test]
fn no_flipped_bit_makes_a_reader_panic() {
    let pristine = Saved::sharded();
    let run = start();
    for file in [MANIFEST, DESCRIPTION] {
        let saved = pristine.copy();
        let (whole, manifest) = (fs::read(saved.path(file)).unwrap(), fs::read(saved.path(MANIFEST)).unwrap());
        for position in (0..whole.len()).step_by(whole.len() / FLIPS) {
            let mut bytes = whole.clone();
            bytes[position] ^= 1 << (position % 8);
            fs::write(saved.path(MANIFEST), &manifest).unwrap();
            fs::write(saved.path(file), &bytes).unwrap();
            if file != MANIFEST {
                saved.seal(file);
            }
            if let Err(error) = run.accelerator.load_state(saved.folder()) {
                let message = error.to_string();
                let is_typed = error.is_checkpoint() || error.is_weights() || error.is_config();
                assert!(is_typed && message.len() < 2048, "a flip at {position} of {file}: {message}");
            }
        }
    }
}
