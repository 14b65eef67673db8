//! What launchers and agents tell apart, put together to runs.

use accelerate_core::status::{LauncherName, RankStatus, RunInfo, RunPart};

/// The parts of each run, in the order in which the runs began: the launcher of agents first, and then by ranks.
pub(super) fn together<T>(parts: Vec<T>, info: impl Fn(&T) -> &RunInfo) -> Vec<Vec<T>> {
    let mut runs: Vec<(Option<u64>, Vec<T>)> = Vec::new();
    for part in parts {
        let id = launcher_id(&info(&part).part);
        match runs.iter_mut().find(|(other, _)| id.is_some() && *other == id) {
            Some((_, parts)) => parts.push(part),
            None => runs.push((id, vec![part])),
        }
    }
    let runs = runs.into_iter().map(|(_, mut parts)| {
        parts.sort_by_key(|part| (0 < info(part).num_local_processes, info(part).first_rank));
        parts
    });
    runs.collect()
}

/// What launchers of agents and their agents have in common.
fn launcher_id(part: &RunPart) -> Option<u64> {
    match part {
        RunPart::LauncherOfAgents { id, .. } => Some(*id),
        RunPart::Agent { launcher, .. } => Some(launcher.id),
        RunPart::Launcher | RunPart::Pause { .. } => None,
    }
}

/// Those of the runs that one of these processes belongs to: as a launcher, an agent, or a rank that `has_rank` looks for. Where no
/// process of this machine is meant, it may be the launcher on another one, whose number `accelerate status` shows.
pub(super) fn of_processes<T>(
    mut runs: Vec<Vec<T>>,
    process_ids: &[u32],
    info: impl Fn(&T) -> &RunInfo,
    has_rank: impl Fn(&T, u32) -> bool,
) -> Vec<Vec<T>> {
    let is_one = |process_id: u32| process_ids.contains(&process_id);
    let is_here = |part: &T| is_one(info(part).process_id) || process_ids.iter().any(|&id| has_rank(part, id));
    let is_elsewhere =
        |part: &T| matches!(&info(part).part, RunPart::Agent { launcher, .. } if is_one(launcher.process_id));
    match runs.iter().flatten().any(is_here) {
        true => runs.retain(|run| run.iter().any(is_here)),
        false => runs.retain(|run| run.iter().any(is_elsewhere)),
    }
    runs
}

/// Those of the runs of which agents of these launchers are here. Each attempt of a launcher has another number.
pub(super) fn of_launchers<T>(
    mut runs: Vec<Vec<T>>,
    launchers: &[LauncherName],
    info: impl Fn(&T) -> &RunInfo,
) -> Vec<Vec<T>> {
    let is_of = |launcher: &LauncherName| {
        launchers.iter().any(|one| (&one.host, one.process_id) == (&launcher.host, launcher.process_id))
    };
    runs.retain(|run| run.iter().filter_map(|part| launcher_of(info(part))).any(is_of));
    runs
}

/// Whose agent it is.
pub(super) fn launcher_of(info: &RunInfo) -> Option<&LauncherName> {
    match &info.part {
        RunPart::Agent { launcher, .. } => Some(launcher),
        _ => None,
    }
}

/// Whether the ranks of this machine, which are gone, may be started again by a launcher of which nothing is here: of what that
/// decides, they know how often it may, and how they have ended.
pub(super) fn may_start_again<'a>(mut parts: impl Iterator<Item = (&'a RunInfo, Vec<RankStatus>)>) -> bool {
    parts.all(|(info, ranks)| {
        let have_succeeded = ranks.iter().all(|rank| rank.ended == Some(Ok(0)));
        launcher_of(info).is_some() && info.restart_count < info.max_restarts && !have_succeeded
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    fn info(process_id: u32, ranks: (usize, usize), part: RunPart) -> RunInfo {
        RunInfo {
            version: "1".to_owned(),
            process_id,
            command: vec!["train".to_owned()],
            num_processes: 8,
            first_rank: ranks.0,
            num_local_processes: ranks.1,
            started: 0,
            restart_count: 0,
            max_restarts: 0,
            part,
        }
    }

    /// The agent of process 1 on a machine, and of the launcher with this number.
    fn agent(process_id: u32, first_rank: usize, id: u64) -> RunInfo {
        let launcher = LauncherName { host: "head".to_owned(), process_id: 1, id };
        info(process_id, (first_rank, 2), RunPart::Agent { machine: "a".to_owned(), launcher })
    }

    fn launcher_of_agents(process_id: u32, id: u64) -> RunInfo {
        info(process_id, (0, 0), RunPart::LauncherOfAgents { id, machines: vec!["a".to_owned()], num_machines: 1 })
    }

    /// Two launchers of agents have the same number of a process, on two machines: process 1 here has the agents 11 and 12,
    /// and process 1 elsewhere the agent 21. Process 31 is an ordinary launcher, and 41 waits.
    fn found() -> Vec<Vec<RunInfo>> {
        let pause = RunPart::Pause { until: 0, cause: String::new() };
        let parts = vec![
            agent(12, 2, 7),
            agent(21, 0, 9),
            launcher_of_agents(1, 7),
            info(31, (0, 2), RunPart::Launcher),
            agent(11, 0, 7),
            info(41, (0, 0), pause),
        ];
        together(parts, |info| info)
    }

    fn numbers(runs: &[Vec<RunInfo>]) -> Vec<Vec<u32>> {
        runs.iter().map(|run| run.iter().map(|part| part.process_id).collect()).collect()
    }

    #[test]
    fn agents_belong_to_the_launcher_of_their_number_and_not_to_another_of_the_same_process_number() {
        assert_eq!(numbers(&found()), [vec![1, 11, 12], vec![21], vec![31], vec![41]]);
    }

    #[rstest]
    #[case::the_launcher(1, &[1, 11, 12])]
    #[case::an_agent(12, &[1, 11, 12])]
    #[case::an_agent_alone(21, &[21])]
    #[case::a_rank(77, &[31])]
    #[case::in_a_pause(41, &[41])]
    #[case::nobody(5, &[])]
    fn each_process_leads_to_its_run(#[case] process_id: u32, #[case] wanted: &[u32]) {
        // A rank of process 31 has number 77.
        let has_rank = |info: &RunInfo, process_id| process_id == 77 && info.process_id == 31;
        let runs = of_processes(found(), &[process_id], |info| info, has_rank);
        // No process is in two of these runs.
        assert_eq!((numbers(&runs).concat().as_slice(), runs.len() < 2), (wanted, true));
    }

    #[test]
    fn a_launcher_elsewhere_is_known_again_by_its_machine_and_its_process() {
        let launcher = |host: &str, process_id| LauncherName { host: host.to_owned(), process_id, id: 77 };
        let found = |launchers: &[LauncherName]| numbers(&of_launchers(found(), launchers, |info| info));
        assert_eq!(found(&[launcher("head", 1)]), [vec![1, 11, 12], vec![21]]);
        assert!(found(&[launcher("other", 1), launcher("head", 31)]).is_empty() && found(&[]).is_empty());
    }

    #[rstest]
    #[case::after_a_failure(agent(21, 0, 9), (0, 2), &[Some(Ok(0)), Some(Err(15))], true)]
    #[case::nobody_has_seen_how(agent(21, 0, 9), (1, 2), &[None, Some(Ok(0))], true)]
    #[case::for_the_last_time(agent(21, 0, 9), (2, 2), &[Some(Err(15)), Some(Err(15))], false)]
    #[case::after_success(agent(21, 0, 9), (0, 2), &[Some(Ok(0)), Some(Ok(0))], false)]
    #[case::of_a_launcher_here(info(31, (0, 2), RunPart::Launcher), (0, 2), &[Some(Ok(3)), None], false)]
    fn a_run_whose_launcher_is_elsewhere_may_go_on(
        #[case] info: RunInfo,
        #[case] (restart_count, max_restarts): (usize, usize),
        #[case] ended: &[Option<Result<i32, i32>>],
        #[case] wanted: bool,
    ) {
        let info = RunInfo { restart_count, max_restarts, ..info };
        let ranks = ended.iter().map(|&ended| RankStatus { ended, ..Default::default() }).collect();
        assert_eq!(may_start_again([(&info, ranks)].into_iter()), wanted);
    }

    #[test]
    fn a_launcher_elsewhere_is_meant_where_nobody_here_is() {
        let elsewhere = together(vec![agent(21, 0, 9), info(31, (0, 2), RunPart::Launcher)], |info| info);
        assert_eq!(numbers(&of_processes(elsewhere, &[1], |info| info, |_, _| false)), [[21]]);
    }
}
