//! Maps in as few entries as say the same.

use super::{DeviceMap, MapDevice};
use std::collections::{BTreeMap, BTreeSet};

/// Writes modules whose entries are all on one device as one entry (`clean_device_map` of the reference). Entries come out in
/// the order in which the first of each module stood.
///
/// ```
/// use accelerate_core::device_map::{DeviceMap, MapDevice::{Accelerator, Cpu}, clean_device_map};
/// let map: DeviceMap = [("a", Cpu), ("b.c", Accelerator(0)), ("b.d", Accelerator(0))].into_iter().collect();
/// assert_eq!(clean_device_map(&map), [("a", Cpu), ("b", Accelerator(0))].into_iter().collect());
/// ```
pub fn clean_device_map(map: &DeviceMap) -> DeviceMap {
    let order: Vec<&str> = map.iter().map(|(path, _)| path).collect();
    let mut entries: BTreeMap<String, MapDevice> = map.iter().map(|(path, device)| (path.to_owned(), device)).collect();
    let mut open = vec![String::new()];
    while let Some(module) = open.pop() {
        merge(&mut entries, &module);
        open.extend(children(&entries, &module));
    }
    let is_of = |path: &str, module: &str| {
        module.is_empty() || path.strip_prefix(module).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    };
    let place = |module: &str| order.iter().position(|path| is_of(path, module));
    let mut cleaned: Vec<(String, MapDevice)> = entries.into_iter().collect();
    cleaned.sort_by_cached_key(|(module, _)| place(module));
    cleaned.into_iter().collect()
}

fn prefix_of(module: &str) -> String {
    if module.is_empty() { String::new() } else { format!("{module}.") }
}

fn under<'a>(
    entries: &'a BTreeMap<String, MapDevice>,
    prefix: &'a str,
) -> impl Iterator<Item = (&'a String, MapDevice)> {
    let from_there = entries.range(prefix.to_owned()..).map(|(path, &device)| (path, device));
    from_there.take_while(move |(path, _)| path.starts_with(prefix))
}

/// Makes one entry of those under a module, if they are all on one device.
fn merge(entries: &mut BTreeMap<String, MapDevice>, module: &str) {
    let prefix = prefix_of(module);
    let devices: BTreeSet<MapDevice> = under(entries, &prefix).map(|(_, device)| device).collect();
    let paths: Vec<String> = under(entries, &prefix).map(|(path, _)| path.clone()).collect();
    let Some(&device) = devices.first().filter(|_| devices.len() == 1 && paths.len() > 1) else { return };
    for path in &paths {
        entries.remove(path);
    }
    entries.insert(module.to_owned(), device);
}

/// The modules directly in a module that have entries.
fn children(entries: &BTreeMap<String, MapDevice>, module: &str) -> BTreeSet<String> {
    let prefix = prefix_of(module);
    let child = |path: &String| {
        let rest = path.get(prefix.len()..).filter(|rest| !rest.is_empty())?;
        let end = rest.find('.').unwrap_or(rest.len());
        Some(path[..prefix.len() + end].to_owned())
    };
    under(entries, &prefix).filter_map(|(path, _)| child(path)).collect()
}
