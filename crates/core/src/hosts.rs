//! Which machines a run has, and how many processes each of them: `--hosts`, host files as Open MPI and DeepSpeed have them, and
//! DeepSpeed's filters.
//!
//! A name becomes a word of the command that logs in there, so only what can be a name or an address is taken.

mod filter;
mod hostfile;
mod machine_rank;
mod number;

pub use machine_rank::machine_rank;
pub use number::{MachineSource, NumMachines, UnusedNumber};

use std::collections::BTreeSet;
use std::net::Ipv6Addr;

use crate::Result;
use crate::environment::MAX_WORLD_SIZE;
use crate::error::hosts::HostsErrorKind as Kind;
use crate::settings::shortened_line;

/// The longest name that the domain name system has.
const MAX_NAME_BYTES: usize = 255;

/// A machine of a list, as the list says it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    /// A name or an address, perhaps behind the name of a user and an `@`.
    pub name: String,
    /// How many processes it gets, where the list says so.
    pub num_processes: Option<usize>,
    /// The GPUs that a filter has left, one for each process; `None` for all that there are.
    pub slots: Option<Vec<usize>>,
}

impl Host {
    /// Without the user before the `@`: what other machines know it by.
    ///
    /// ```
    /// let hosts = accelerate_core::hosts::Hosts::parse("me@node1:2")?;
    /// assert_eq!(hosts.list[0].address(), "node1");
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    pub fn address(&self) -> &str {
        self.name.rsplit_once('@').map_or(&self.name, |(_, address)| address)
    }
}

/// A list of machines, in the order of their ranks. Each is there once, and there is at least one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hosts {
    /// The machines.
    pub list: Vec<Host>,
}

impl Hosts {
    /// Reads what `--hosts` says: names with or without a number of processes, separated by commas. An IPv6 address that has a
    /// number, or whose last part could be one, stands in brackets.
    ///
    /// # Errors
    ///
    /// [`Error::is_config`](crate::Error::is_config): an entry is no host, its number is none of processes, it is there twice, or its end
    /// could be part of an address as well as a number of processes.
    ///
    /// ```
    /// use accelerate_core::hosts::Hosts;
    /// let hosts = Hosts::parse("a:4,[fe80::1]:2,b")?;
    /// let numbers: Vec<_> = hosts.list.iter().map(|host| (host.name.as_str(), host.num_processes)).collect();
    /// assert_eq!(numbers, [("a", Some(4)), ("fe80::1", Some(2)), ("b", None)]);
    /// assert!(Hosts::parse("-oProxyCommand=x").is_err());
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    pub fn parse(text: &str) -> Result<Self> {
        let list = text.split(',').map(|entry| host_and_number(entry.trim(), "--hosts"));
        Self::new(list.collect::<Result<_>>()?, "--hosts")
    }

    /// `place` is shown where something is wrong.
    fn new(list: Vec<Host>, place: &str) -> Result<Self> {
        if list.is_empty() {
            return Err(Kind::Empty { place: place.to_owned() }.into());
        }
        let mut known = BTreeSet::new();
        for host in &list {
            // Names of machines have no case.
            if !known.insert(host.address().to_ascii_lowercase()) {
                return Err(Kind::Twice { host: host.address().to_owned(), place: place.to_owned() }.into());
            }
        }
        Ok(Self { list })
    }

    /// By what the others reach each machine, any of which may come to run the main process: by its name in the list, and by the
    /// name of this machine where the list has a word such as localhost, which means another machine elsewhere.
    ///
    /// ```
    /// use accelerate_core::hosts::Hosts;
    /// assert_eq!(Hosts::parse("me@a:4,b")?.addresses("here"), ["a", "b"]);
    /// assert_eq!(Hosts::parse("localhost,b")?.addresses("here"), ["here", "b"]);
    /// assert_eq!(Hosts::parse("localhost")?.addresses("here"), ["127.0.0.1"]);
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    pub fn addresses(&self, this_machine: &str) -> Vec<String> {
        let is_elsewhere = self.list.iter().any(|host| !is_loopback(host.address()));
        let address = |host: &Host| match host.address() {
            address if !is_loopback(address) => address.to_owned(),
            _ if is_elsewhere => this_machine.to_owned(),
            _ => "127.0.0.1".to_owned(),
        };
        self.list.iter().map(address).collect()
    }

    /// Gives every machine its number of processes. Machines without one share evenly what is left of `num_processes`, or get
    /// `per_machine` each where nobody has said how many processes there are in all.
    ///
    /// # Errors
    ///
    /// [`Error::is_config`](crate::Error::is_config): the numbers contradict each other, or there are too many.
    ///
    /// ```
    /// use accelerate_core::hosts::Hosts;
    /// assert_eq!(Hosts::parse("a:4,b,c")?.num_processes(Some(10), 8)?, [4, 3, 3]);
    /// assert_eq!(Hosts::parse("a:4,b,c")?.num_processes(None, 8)?, [4, 8, 8]);
    /// assert!(Hosts::parse("a:4,b:2")?.num_processes(Some(8), 1).is_err());
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    pub fn num_processes(&self, num_processes: Option<usize>, per_machine: usize) -> Result<Vec<usize>> {
        let said = self.list.iter().filter_map(|host| host.num_processes).fold(0_usize, usize::saturating_add);
        let num_open = self.list.iter().filter(|host| host.num_processes.is_none()).count();
        let each = match num_processes {
            None => per_machine,
            Some(wanted) => {
                let rest = wanted.checked_sub(said);
                let fits = |rest: usize| match num_open {
                    0 => rest == 0,
                    _ => rest > 0 && rest.is_multiple_of(num_open),
                };
                match rest.filter(|rest| fits(*rest)) {
                    Some(rest) => rest.checked_div(num_open).unwrap_or(0),
                    None => return Err(Kind::Total { wanted, said, num_open }.into()),
                }
            }
        };
        let numbers: Vec<usize> = self.list.iter().map(|host| host.num_processes.unwrap_or(each)).collect();
        let total = numbers.iter().copied().fold(0_usize, usize::saturating_add);
        if total > MAX_WORLD_SIZE {
            return Err(Kind::TooMany { total, most: MAX_WORLD_SIZE }.into());
        }
        Ok(numbers)
    }
}

/// Is this a name or an address of this machine itself?
///
/// ```
/// use accelerate_core::hosts::is_loopback;
/// assert!(is_loopback("localhost") && is_loopback("127.0.0.1") && is_loopback("::1") && !is_loopback("10.0.0.1"));
/// ```
pub fn is_loopback(address: &str) -> bool {
    address == "localhost" || address.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// `a`, `a:4`, `[fd78::1]:4` or `fd78::1`.
fn host_and_number(entry: &str, place: &str) -> Result<Host> {
    let (user, address) = entry.rsplit_once('@').map_or((None, entry), |(user, address)| (Some(user), address));
    let (name, number) = match entry.rsplit_once(':') {
        _ if is_ipv6(address) => {
            check_meaning(user, address, place)?;
            (entry, None)
        }
        Some((name, number)) if !number.ends_with(']') => (name, Some(number)),
        _ => (entry, None),
    };
    let num_processes = number.map(|number| count(number, entry, place)).transpose()?;
    Ok(Host { name: checked_name(name, place)?, num_processes, slots: None })
}

/// The end of an address may look like a number of processes, where what stands before it is an address as well.
fn check_meaning(user: Option<&str>, text: &str, place: &str) -> Result<()> {
    let shorter = text.rsplit_once(':').filter(|(shorter, number)| {
        is_ipv6(shorter) && number.bytes().all(|byte| byte.is_ascii_digit()) && number.parse() != Ok(0)
    });
    let Some((shorter, number)) = shorter else { return Ok(()) };
    let user = user.map(|user| format!("{user}@")).unwrap_or_default();
    let (entry, place) = (shortened_line(&format!("{user}{text}")), place.to_owned());
    let ways = shortened_line(&format!("{user}[{shorter}]:{number} or {user}[{text}]"));
    Err(Kind::TwoMeanings { entry, address: shorter.to_owned(), number: number.to_owned(), ways, place }.into())
}

/// An address that needs no brackets, because no number follows it.
fn is_ipv6(text: &str) -> bool {
    let without_zone = text.split('%').next().unwrap_or_default();
    without_zone.parse::<Ipv6Addr>().is_ok()
}

fn count(text: &str, entry: &str, place: &str) -> Result<usize> {
    let number = text.parse().ok().filter(|number| (1..=MAX_WORLD_SIZE).contains(number));
    let wrong = || Kind::Count { entry: shortened_line(entry), place: place.to_owned(), most: MAX_WORLD_SIZE };
    number.ok_or_else(|| wrong().into())
}

/// A name that is a word and no option.
fn checked_name(text: &str, place: &str) -> Result<String> {
    let (user, host) = text.rsplit_once('@').map_or((None, text), |(user, host)| (Some(user), host));
    let bare = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).filter(|bare| is_ipv6(bare));
    let host = bare.unwrap_or(host);
    let is_word = |word: &str| {
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        !word.is_empty() && !word.starts_with('-') && word.bytes().all(is_plain)
    };
    let has_zone_that_is_a_word = || host.split_once('%').is_none_or(|(_, zone)| is_word(zone));
    let is_host = is_word(host) || is_ipv6(host) && has_zone_that_is_a_word();
    if text.len() > MAX_NAME_BYTES || !is_host || !user.is_none_or(is_word) {
        return Err(Kind::Name { name: shortened_line(text), place: place.to_owned() }.into());
    }
    Ok(user.map_or_else(|| host.to_owned(), |user| format!("{user}@{host}")))
}
