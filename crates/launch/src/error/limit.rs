//! Limits of a user and of disks, which look like faults of what meets them.

use std::ffi::OsStr;
use std::io;

use accelerate_core::files::ShownPath;
use rustix::io::Errno;

/// What a user may have so many of.
#[derive(Clone, Copy, Debug)]
pub(super) enum Limit {
    OpenFiles,
    Processes,
}

impl Limit {
    /// The one that this is about, if it is.
    pub(super) fn of(error: &io::Error) -> Option<Self> {
        match Errno::from_raw_os_error(error.raw_os_error()?) {
            Errno::MFILE | Errno::NFILE => Some(Self::OpenFiles),
            Errno::AGAIN => Some(Self::Processes),
            _ => None,
        }
    }

    pub(super) fn what(self) -> &'static str {
        match self {
            Self::OpenFiles => "open files",
            Self::Processes => "processes",
        }
    }

    /// What shows and raises it.
    pub(super) fn command(self) -> &'static str {
        match self {
            Self::OpenFiles => "ulimit -n",
            Self::Processes => "ulimit -u",
        }
    }
}

/// What names the folder for the output.
pub(super) const LOG_DIR: &str = "--log_dir";
/// What does so where nothing else does.
pub(crate) const TEMPORARY: &str = "TMPDIR";

/// What helps where the output cannot be kept: another folder, which `name` has to say.
pub(super) fn log_cure(error: &io::Error, name: &str) -> String {
    let name = if name == LOG_DIR { name.to_owned() } else { format!("{name} or {LOG_DIR}") };
    match (error.kind(), Limit::of(error)) {
        (io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded, _) => {
            format!("there is no space left: free some, or name a folder for {name} where there is")
        }
        (_, Some(Limit::OpenFiles)) => "start fewer processes, or raise the limit of open files (ulimit -n)".to_owned(),
        _ => format!("name a folder for {name} in which this user may make files"),
    }
}

/// Why the folder is where it is, by what the variable says.
pub(super) fn temporary_place(said: Option<&OsStr>) -> String {
    match said {
        Some(folder) => format!("because {TEMPORARY} is {}", folder.shown()),
        None => format!("because {TEMPORARY} is not set"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;
    use rstest::rstest;

    fn os(errno: Errno) -> io::Error {
        io::Error::from_raw_os_error(errno.raw_os_error())
    }

    /// Neither another program nor another port would help.
    #[rstest]
    #[case::machines(
        Error::not_connected(vec!["a".to_owned()], "ssh", String::new(), os(Errno::MFILE)),
        "a could not be connected to, because this user may have no more open files; start fewer processes, or raise the limit \
         (ulimit -n)"
    )]
    #[case::a_port(
        Error::port(29500, os(Errno::MFILE)),
        "looking whether the port is free failed, because this user may"
    )]
    #[case::a_thread(
        Error::system("starting a thread", os(Errno::AGAIN)),
        "starting a thread failed, because this user may have no more processes"
    )]
    #[case::something_else(Error::system("starting a thread", os(Errno::NOMEM)), "starting a thread failed")]
    #[case::no_command(
        Error::not_connected(vec!["a".to_owned()], "ssh", String::new(), os(Errno::NOENT)), "the command ssh cannot be run here, by which a"
    )]
    fn a_limit_of_this_user_is_told_as_such(#[case] error: Error, #[case] words: &str) {
        assert!(error.to_string().starts_with(words), "{error}");
    }

    #[rstest]
    #[case(Errno::NOSPC, "there is no space left: free some, or name a folder for NAME where there is")]
    #[case(Errno::DQUOT, "there is no space left")]
    #[case(Errno::MFILE, "ulimit -n")]
    #[case(Errno::ACCESS, "name a folder for NAME in which this user may make files")]
    fn what_helps_where_output_cannot_be_kept_depends_on_the_cause(#[case] errno: Errno, #[case] words: &str) {
        let text = Error::log_unwritable("logs", os(errno)).to_string();
        assert!(text.contains(&words.replace("NAME", "--log_dir")), "{text}");
        let text = Error::temporary_unwritable("logs", os(errno)).to_string();
        assert!(text.contains(&words.replace("NAME", "TMPDIR or --log_dir")), "{text}");
    }

    #[test]
    fn where_temporary_files_are_is_told_with_who_says_so() {
        assert_eq!(temporary_place(Some("/nowhere".as_ref())), "because TMPDIR is /nowhere");
        assert_eq!(temporary_place(None), "because TMPDIR is not set");
    }
}
