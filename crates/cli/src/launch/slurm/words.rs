//! The command line of the launch within a job: this one, without what is about the job.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;

use clap::{Args, Command};

use super::ClusterFlags;

/// The words of this command line for the shell of a job, from the name of the command to the last argument of the program.
pub(super) fn launch_line(words: &[OsString], num_program_words: usize) -> String {
    let (flags, program) = flags_and_program(words, num_program_words, &[]);
    let command = command(words.first().map(OsString::as_os_str).unwrap_or_default());
    let start = [command.as_os_str(), OsStr::new("launch")];
    crate::shell_command(start.into_iter().chain(flags).chain(program.iter().map(OsString::as_os_str)))
}

/// What is found in `PATH` here is found there. A path is made absolute, because the job may start elsewhere.
fn command(name: &OsStr) -> OsString {
    match name.as_bytes().contains(&b'/') {
        true => std::path::absolute(name).map_or_else(|_| name.to_owned(), OsString::from),
        false => name.to_owned(),
    }
}

/// The flags that are not about the job, nor among `others`, which have a value; and the program with its arguments.
pub(super) fn flags_and_program<'a>(
    words: &'a [OsString],
    num_program_words: usize,
    others: &[&str],
) -> (Vec<&'a OsStr>, &'a [OsString]) {
    let (flags, program) = words.split_at(words.len().saturating_sub(num_program_words));
    let mut own = own_flags();
    let spellings = |flag: &&str| [(*flag).to_owned(), flag.replace('_', "-")];
    own.extend(others.iter().flat_map(spellings).map(|name| (name, true)));
    let mut rest = flags.iter().skip(2).map(OsString::as_os_str);
    let mut kept = Vec::new();
    while let Some(word) = rest.next() {
        let bytes = word.as_bytes();
        let name = bytes.split(|byte| *byte == b'=').next().unwrap_or_default();
        let name = name.strip_prefix(b"--").and_then(|name| std::str::from_utf8(name).ok());
        match name.and_then(|name| own.get(name)) {
            Some(true) if !bytes.contains(&b'=') => drop(rest.next()),
            Some(_) => {}
            None => kept.push(word),
        }
    }
    (kept, program)
}

/// The names of the flags about the job, and whether a value follows.
fn own_flags() -> BTreeMap<String, bool> {
    let command = ClusterFlags::augment_args(Command::new("job"));
    let flags = command.get_arguments().flat_map(|flag| {
        let names = flag.get_long_and_visible_aliases().unwrap_or_default();
        let names = names.into_iter().chain(flag.get_all_aliases().unwrap_or_default()).map(str::to_owned);
        let takes_value = flag.get_action().takes_values();
        names.map(move |name| (name, takes_value)).collect::<Vec<_>>()
    });
    flags.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case("accelerate launch --slurm --nodes 2 train", 1, "accelerate launch train")]
    #[case(
        "accelerate launch --slurm --nodes=2 --time 1:00 --cpu train --nodes 3",
        3,
        "accelerate launch --cpu train --nodes 3"
    )]
    #[case(
        "/x/accelerate launch --gpus-per-node 2 --gpus_per_node=2 -q -m train",
        1,
        "/x/accelerate launch -q -m train"
    )]
    #[case(
        "accelerate launch --sbatch --account=lab --sbatch=--qos=x --role a -- train --slurm",
        2,
        "accelerate launch --role a -- train --slurm"
    )]
    #[case(
        "accelerate launch --emit slurm --requeue --log_dir=--slurm train",
        1,
        "accelerate launch '--log_dir=--slurm' train"
    )]
    fn the_job_gets_what_is_not_about_it(#[case] words: &str, #[case] num_program_words: usize, #[case] wanted: &str) {
        let words: Vec<OsString> = words.split(' ').map(OsString::from).collect();
        assert_eq!(launch_line(&words, num_program_words), wanted);
    }

    #[test]
    fn words_are_quoted_for_the_shell() {
        let words = ["accelerate", "launch", "--slurm", "my program", "it's", "$HOME", "", "a\nb"].map(OsString::from);
        assert_eq!(launch_line(&words, 5), r#"accelerate launch 'my program' "it's" '$HOME' '' $'a\x0ab'"#);
    }
}
