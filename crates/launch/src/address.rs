//! Whether this machine knows the name of the main process's machine. It is asked beside a launch, and never waited for: a
//! name server may take longer to answer than a program to train.

use std::io;
use std::net::{IpAddr, ToSocketAddrs};
use std::sync::mpsc::{Receiver, channel};
use std::thread;

use accelerate_core::files::in_one_line;

use crate::config::LaunchConfig;

/// A question under way.
#[derive(Debug)]
pub(crate) struct AddressLookup(Receiver<Option<String>>);

impl AddressLookup {
    /// Asks for what `--main_process_ip` names. Nothing is asked of an address, nor where only this machine takes part.
    pub(crate) fn begin(config: &LaunchConfig) -> Option<Self> {
        let name = config.main_process_ip.as_deref().filter(|name| name.parse::<IpAddr>().is_err())?;
        (config.num_machines > 1).then(|| Self::begin_with(name.to_owned(), resolve))
    }

    fn begin_with(name: String, resolve: impl FnOnce(&str) -> io::Result<()> + Send + 'static) -> Self {
        let (answer, question) = channel();
        // Without a thread nobody answers, and then nothing is said.
        let _ = thread::Builder::new().name("address".to_owned()).spawn(move || {
            let problem = resolve(&name).err().map(|error| {
                format!(
                    "the name {} of --main_process_ip has no address on this machine ({error}), so no process here finds \
                     the main one; give its address, or a name that `getent hosts` knows",
                    in_one_line(&name)
                )
            });
            // The launch may have ended.
            let _ = answer.send(problem);
        });
        Self(question)
    }

    /// What is wrong with the name, as far as it is known by now.
    pub(crate) fn problem(&self) -> Option<String> {
        self.0.try_recv().ok().flatten()
    }
}

fn resolve(name: &str) -> io::Result<()> {
    match (name, 0).to_socket_addrs()?.next() {
        Some(_) => Ok(()),
        None => Err(io::ErrorKind::NotFound.into()),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::config::Program;
    use rstest::rstest;

    #[rstest]
    #[case::one_machine(1, "node0", false)]
    #[case::name(2, "node0", true)]
    #[case::address(2, "10.0.0.1", false)]
    #[case::long_address(2, "fe80::1", false)]
    fn only_names_of_other_machines_are_asked_for(
        #[case] num_machines: usize,
        #[case] name: &str,
        #[case] is_asked: bool,
    ) {
        let config = LaunchConfig {
            num_machines,
            main_process_ip: Some(name.to_owned()),
            ..LaunchConfig::new(Program::Executable("true".into()), 2)
        };
        assert_eq!(AddressLookup::begin(&config).is_some(), is_asked);
    }

    #[test]
    fn an_answer_is_told_when_it_is_there_and_never_waited_for() {
        let (release, is_released) = channel::<()>();
        let lookup = AddressLookup::begin_with("node0".to_owned(), move |_| {
            is_released.recv().unwrap();
            Err(io::Error::other("unknown name"))
        });
        assert_eq!(lookup.problem(), None);
        release.send(()).unwrap();
        let problem = lookup.0.recv().unwrap().unwrap();
        assert!(problem.contains("node0 of --main_process_ip") && problem.contains("unknown name"), "{problem}");
        let known = AddressLookup::begin_with("node0".to_owned(), |_| Ok(()));
        assert_eq!(known.0.recv().unwrap(), None);
    }

    /// A name that no name server is asked for.
    #[test]
    fn what_is_no_name_has_no_address() {
        assert!(resolve("not a name").is_err());
        assert!(resolve("localhost").is_ok());
    }
}
