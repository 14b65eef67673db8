//! DeepSpeed's filters: `node1@node2:0,2` names machines, and of a machine with numbers only these slots.

use std::collections::BTreeSet;

use super::{Host, Hosts};
use crate::Result;
use crate::error::hosts::HostsErrorKind as Kind;
use crate::settings::shortened_line;

/// One part of a filter: a machine, and which of its slots in order; `None` for all of them.
type Part<'a> = (&'a Host, Option<Vec<usize>>);

impl Hosts {
    /// The machines and slots that `filter` names, in the order of the list.
    ///
    /// # Errors
    ///
    /// [`Error::is_config`](crate::Error::is_config): the filter names what the list does not have.
    ///
    /// ```
    /// use accelerate_core::hosts::Hosts;
    /// let hosts = Hosts::parse("a:4,b:4")?.included("b:0,2")?;
    /// assert_eq!((hosts.list.len(), hosts.list[0].slots.as_deref()), (1, Some(&[0, 2][..])));
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    pub fn included(&self, filter: &str) -> Result<Self> {
        let parts = self.parts(filter)?;
        let kept = self.list.iter().filter_map(|host| {
            let (_, slots) = parts.iter().find(|(named, _)| *named == host)?;
            Some(match slots {
                None => host.clone(),
                Some(slots) => with_slots(host, slots.clone()),
            })
        });
        Self::new(kept.collect(), &shown(filter))
    }

    /// The machines and slots that `filter` does not name.
    ///
    /// # Errors
    ///
    /// As of [`included`](Self::included), and where nothing is left.
    ///
    /// ```
    /// use accelerate_core::hosts::Hosts;
    /// let hosts = Hosts::parse("a:4,b:4")?.excluded("b:0,2@a")?;
    /// assert_eq!((hosts.list[0].name.as_str(), hosts.list[0].slots.as_deref()), ("b", Some(&[1, 3][..])));
    /// # Ok::<(), accelerate_core::Error>(())
    /// ```
    pub fn excluded(&self, filter: &str) -> Result<Self> {
        let parts = self.parts(filter)?;
        let kept = self.list.iter().filter_map(|host| match parts.iter().find(|(named, _)| *named == host) {
            None => Some(host.clone()),
            Some((_, None)) => None,
            Some((_, Some(slots))) => {
                let left: Vec<_> = (0..num_slots(host)).filter(|slot| slots.binary_search(slot).is_err()).collect();
                (!left.is_empty()).then(|| with_slots(host, left))
            }
        });
        Self::new(kept.collect(), &shown(filter))
    }

    fn parts(&self, filter: &str) -> Result<Vec<Part<'_>>> {
        let mut parts: Vec<Part<'_>> = Vec::new();
        for part in filter.split('@') {
            let wrong = |why: &'static str| Kind::Filter { part: shown(part), filter: shown(filter), why };
            let (name, slots) = part.split_once(':').map_or((part, None), |(name, slots)| (name, Some(slots)));
            let host = self.list.iter().find(|host| host.name == name.trim());
            let host = host.ok_or_else(|| wrong("the list of hosts has no such machine"))?;
            if parts.iter().any(|(named, _)| *named == host) {
                return Err(wrong("it names a machine a second time").into());
            }
            let slots = slots.map(|slots| slots.split(',').map(|slot| slot.trim().parse().ok()).collect());
            let slots: Option<Vec<usize>> = match slots {
                None => None,
                Some(Some(slots)) => Some(BTreeSet::<usize>::into_iter(slots).collect()),
                Some(None) => return Err(wrong("slots are numbers separated by commas").into()),
            };
            if slots.iter().flatten().any(|slot| *slot >= num_slots(host)) {
                return Err(wrong("the list of hosts says fewer slots for it, which are counted from 0").into());
            }
            parts.push((host, slots));
        }
        Ok(parts)
    }
}

/// As DeepSpeed does, a machine without a number is taken to have one slot.
fn num_slots(host: &Host) -> usize {
    host.num_processes.unwrap_or(1)
}

fn with_slots(host: &Host, slots: Vec<usize>) -> Host {
    Host { num_processes: Some(slots.len()), slots: Some(slots), ..host.clone() }
}

fn shown(filter: &str) -> String {
    shortened_line(filter)
}
