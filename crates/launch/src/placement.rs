//! Which cores each rank of a machine is kept on, and what the machine says about them.

use std::collections::BTreeMap;
use std::fs;
use std::ops::{Range, RangeInclusive};
use std::path::Path;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::config::LaunchConfig;
use crate::machine::Machine;

/// The cores of each local rank: an equal share of those near its GPU, or of all that this process may use. With more ranks
/// than cores, ranks share cores in turn.
pub(crate) fn cores_of_ranks(config: &LaunchConfig, machine: &Machine) -> Vec<Vec<usize>> {
    let homes: Vec<_> = (0..config.num_local_processes()).map(|rank| home(config, machine, rank)).collect();
    let mut num_sharers: BTreeMap<&[usize], usize> = BTreeMap::new();
    homes.iter().for_each(|home| *num_sharers.entry(home).or_default() += 1);
    let mut next: BTreeMap<&[usize], usize> = BTreeMap::new();
    homes
        .iter()
        .map(|home| {
            let place = next.entry(home).or_default();
            *place += 1;
            home[share(home.len(), *place - 1, num_sharers[home.as_slice()])].to_vec()
        })
        .collect()
}

/// The cores that a rank shares with those that compute near them.
fn home(config: &LaunchConfig, machine: &Machine, local_rank: usize) -> Vec<usize> {
    let near: Vec<usize> = match gpu_of_rank(config, machine, local_rank).and_then(|gpu| machine.gpu_cores.get(gpu)) {
        Some(near) => machine.cores.iter().copied().filter(|core| near.contains(core)).collect(),
        None => Vec::new(),
    };
    if near.is_empty() { machine.cores.clone() } else { near }
}

/// The GPU of a rank, counted over all that the machine has. `None`: no GPU, or one that is not named by its number.
fn gpu_of_rank(config: &LaunchConfig, machine: &Machine, local_rank: usize) -> Option<usize> {
    if config.use_cpu || machine.gpu_cores.is_empty() {
        return None;
    }
    let said = config.environment.iter().find(|(name, _)| name == "CUDA_VISIBLE_DEVICES");
    let visible = match said {
        Some((_, value)) => Some(value.to_string_lossy().into_owned()),
        None => machine.cuda_visible_devices.clone(),
    };
    let Some(visible) = visible else { return Some(local_rank % machine.gpu_cores.len()) };
    let visible: Vec<&str> = visible.split(',').map(str::trim).collect();
    visible[local_rank % visible.len()].parse().ok()
}

/// The places in a list of cores that one of several ranks has, never none where there is a core.
fn share(num_cores: usize, place: usize, num_sharers: usize) -> Range<usize> {
    if num_cores < num_sharers {
        let core = place % num_cores.max(1);
        return core..(core + 1).min(num_cores);
    }
    let (each, rest) = (num_cores / num_sharers, num_cores % num_sharers);
    let begin = place * each + place.min(rest);
    begin..begin + each + usize::from(place < rest)
}

/// Numbers of cores as Linux writes them: `0-3,8`. Nothing where the text is no such list.
///
/// ```
/// use accelerate_launch::{core_list, core_numbers};
/// assert_eq!(core_numbers("0-2,7\n"), Some(vec![0, 1, 2, 7]));
/// assert_eq!(core_list(&[0, 1, 2, 7]), "0-2,7");
/// assert_eq!(core_numbers("all"), None);
/// ```
pub fn core_numbers(text: &str) -> Option<Vec<usize>> {
    let mut numbers = Vec::new();
    for entry in text.trim().split(',').filter(|entry| !entry.is_empty()) {
        let (first, last) = entry.split_once('-').unwrap_or((entry, entry));
        let range: RangeInclusive<usize> = first.trim().parse().ok()?..=last.trim().parse().ok()?;
        if *range.end() >= CpuSet::MAX_CPU {
            return None;
        }
        numbers.extend(range);
    }
    Some(numbers)
}

/// The other way round. The numbers are in order.
pub fn core_list(cores: &[usize]) -> String {
    let runs = cores.chunk_by(|one, next| one.checked_add(1) == Some(*next));
    let written = runs.filter_map(|run| match run {
        [] => None,
        [only] => Some(only.to_string()),
        [first, .., last] => Some(format!("{first}-{last}")),
    });
    written.collect::<Vec<_>>().join(",")
}

/// The cores that this process may use, in order.
pub(crate) fn cores_of_this_process() -> Vec<usize> {
    match sched_getaffinity(None) {
        Ok(set) => (0..CpuSet::MAX_CPU).filter(|&core| set.is_set(core)).collect(),
        Err(_) => (0..std::thread::available_parallelism().map_or(1, usize::from)).collect(),
    }
}

/// Keeps this process on these cores, and what it becomes or starts.
pub(crate) fn bind_this_process(cores: &[usize]) -> rustix::io::Result<()> {
    let mut set = CpuSet::new();
    cores.iter().filter(|&&core| core < CpuSet::MAX_CPU).for_each(|&core| set.set(core));
    sched_setaffinity(None, &set)
}

/// The driver has a folder for each GPU, named by its place on the bus, and the kernel says there which cores are near.
pub(crate) fn cores_near_gpus(driver: &Path, bus: &Path) -> Vec<Vec<usize>> {
    let Ok(entries) = fs::read_dir(driver) else { return Vec::new() };
    let mut places: Vec<String> = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect();
    places.iter_mut().for_each(|place| place.make_ascii_lowercase());
    places.sort_unstable();
    let near = |place: &String| {
        let list = fs::read_to_string(bus.join(place).join("local_cpulist")).unwrap_or_default();
        core_numbers(&list).unwrap_or_default()
    };
    places.iter().map(near).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::config::Program;
    use rstest::rstest;

    /// Two GPUs near the first four cores, one near the last four.
    fn machine(num_cores: usize) -> Machine {
        let near = |range: Range<usize>| range.collect::<Vec<_>>();
        Machine {
            cores: (0..num_cores).collect(),
            gpu_cores: vec![near(0..4), near(0..4), near(4..8)],
            cuda_visible_devices: None,
            ..Machine::probe()
        }
    }

    #[rstest]
    #[case::shares_of_all("", true, 2, 8, &["0-3", "4-7"])]
    #[case::an_odd_core_goes_to_the_first("", true, 3, 8, &["0-2", "3-5", "6-7"])]
    #[case::more_ranks_than_cores("", true, 3, 2, &["0", "1", "0"])]
    #[case::near_the_gpu("", false, 3, 8, &["0-1", "2-3", "4-7"])]
    #[case::chosen_gpus("CUDA_VISIBLE_DEVICES=2,0", false, 2, 8, &["4-7", "0-3"])]
    #[case::more_ranks_than_gpus("CUDA_VISIBLE_DEVICES=2", false, 2, 8, &["4-5", "6-7"])]
    #[case::by_another_name("CUDA_VISIBLE_DEVICES=GPU-1,GPU-2", false, 2, 8, &["0-3", "4-7"])]
    #[case::near_cores_that_are_not_ours("CUDA_VISIBLE_DEVICES=2", false, 1, 4, &["0-3"])]
    #[case::a_gpu_that_is_not_there("CUDA_VISIBLE_DEVICES=9", false, 1, 4, &["0-3"])]
    #[case::none("CUDA_VISIBLE_DEVICES=", false, 1, 4, &["0-3"])]
    fn each_rank_has_cores_of_its_own(
        #[case] variable: &str,
        #[case] use_cpu: bool,
        #[case] num_processes: usize,
        #[case] num_cores: usize,
        #[case] wanted: &[&str],
    ) {
        let environment = variable.split_once('=').map(|(name, value)| (name.into(), value.into()));
        let config = LaunchConfig {
            use_cpu,
            environment: environment.into_iter().collect(),
            ..LaunchConfig::new(Program::Executable("train".into()), num_processes)
        };
        let cores = cores_of_ranks(&config, &machine(num_cores));
        assert_eq!(cores.iter().map(|cores| core_list(cores)).collect::<Vec<_>>(), wanted);
    }

    #[rstest]
    #[case("", Some(vec![]))]
    #[case("3", Some(vec![3]))]
    #[case("0-1, 4-5\n", Some(vec![0, 1, 4, 5]))]
    #[case("5-4", Some(vec![]))]
    #[case("0-99999999999", None)]
    #[case("-", None)]
    #[case("a-b", None)]
    fn lists_of_cores_are_read(#[case] text: &str, #[case] wanted: Option<Vec<usize>>) {
        assert_eq!(core_numbers(text), wanted);
    }

    #[test]
    fn gpus_are_in_the_order_of_the_bus() {
        let folder = tempfile::tempdir().unwrap();
        let [driver, bus] = ["gpus", "devices"].map(|name| folder.path().join(name));
        for (place, cores) in [("0000:C1:00.0", Some("4-5\n")), ("0000:01:00.0", Some("0-1\n")), ("0000:D1:00.0", None)]
        {
            fs::create_dir_all(driver.join(place)).unwrap();
            let device = bus.join(place.to_lowercase());
            fs::create_dir_all(&device).unwrap();
            cores.into_iter().for_each(|cores| fs::write(device.join("local_cpulist"), cores).unwrap());
        }
        assert_eq!(cores_near_gpus(&driver, &bus), [vec![0, 1], vec![4, 5], vec![]]);
        assert_eq!(cores_near_gpus(&folder.path().join("none"), &bus), Vec::<Vec<usize>>::new());
    }
}
