//! What differs between two environments, and the reasons for what may.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

pub(super) type Variables = BTreeMap<String, String>;
/// The environment of each rank. A process that has no rank is called `alone`.
pub(super) type Ranks = BTreeMap<String, Variables>;

const ALONE: &str = "alone";

/// One variable of one rank that is not the same on both sides.
#[derive(Clone, Copy, Debug)]
struct Difference<'a> {
    name: &'a str,
    theirs: Option<&'a str>,
    ours: Option<&'a str>,
    /// The reference starts one process that knows of no ranks, where several start here.
    is_several: bool,
    /// The launcher here cannot know that the program is in Python.
    is_executable: bool,
    /// The environment of the rank under the reference.
    rank: &'a Variables,
}

/// Why variables may differ.
struct Reason {
    names: &'static [&'static str],
    holds: fn(&Difference<'_>) -> bool,
    why: &'static str,
}

const RANK_VARIABLES: &[&str] = &[
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "ROLE_NAME",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "KMP_AFFINITY",
    "KMP_BLOCKTIME",
    "ACCELERATE_USE_CPU",
];

/// The first one that holds counts.
const REASONS: &[Reason] = &[
    Reason {
        names: RANK_VARIABLES,
        holds: |found| found.is_several,
        why: "without --multi_gpu the reference starts one process, whatever the number says; here as many as are asked for",
    },
    Reason {
        names: RANK_VARIABLES,
        holds: |found| found.is_executable && is_only_there(found) && !is_several_ranks(found.rank),
        why: "one process that is no program in Python runs as if started by hand; one that is Python is rank 0 of one",
    },
    Reason {
        names: &["TORCH_NCCL_ASYNC_ERROR_HANDLING", "KMP_AFFINITY", "KMP_BLOCKTIME", "PYTHONPATH"],
        holds: |found| found.is_executable,
        why: "changes how libraries behave, so only programs in Python get it",
    },
    Reason {
        names: &["MASTER_PORT"],
        holds: |found| is_number(found.theirs) && is_number(found.ours),
        why: "any free port",
    },
    Reason {
        names: &["OMP_NUM_THREADS"],
        holds: |found| found.theirs.is_some(),
        why: "several processes share the cores and one keeps its libraries' default; the reference says 1, or with --cpu \
              an even share of them",
    },
    Reason {
        names: &["ACCELERATE_CONFIG_DEFAULTS", "ACCELERATE_CONFIG_ORIGINS"],
        holds: is_only_here,
        why: "tells programs in Rust which settings were said, and where",
    },
    Reason {
        names: &["ACCELERATE_LAUNCH_ID"],
        holds: is_only_here,
        why: "by this the launcher finds processes of its own that have left their group",
    },
    Reason {
        names: &["ACCELERATE_STATUS"],
        holds: is_only_here,
        why: "in this place a program of this library tells what it is doing",
    },
    Reason {
        names: &["ACCELERATE_RANK_CORES"],
        holds: is_only_here,
        why: "tells programs in Rust that the launcher has chosen their cores already",
    },
    Reason {
        names: &["ACCELERATE_RUN_SECRET"],
        holds: is_only_here,
        why: "keeps strangers out of the rendezvous of programs in Rust",
    },
    Reason {
        names: &["PYTHONUNBUFFERED"],
        holds: is_only_here,
        why: "the reference's ranks run python -u; this says the same to modules and children, too",
    },
    Reason {
        names: &["TORCHELASTIC_USE_AGENT_STORE"],
        holds: |found| (found.theirs, found.ours) == (Some("True"), Some("False")),
        why: "no agent serves a store here, so rank 0 does",
    },
    Reason {
        names: &["TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE"],
        holds: is_only_there,
        why: "between torchrun's agent and its ranks; the launcher here shows the last lines of a rank that fails",
    },
    Reason {
        names: &["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"],
        holds: |found| is_only_here(found) && found.is_executable,
        why: "a program that is not Python is told the number, which its own goes before",
    },
    Reason {
        names: &["ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"],
        holds: |found| is_only_here(found) && found.ours == Some("false"),
        why: "the other way to shard must not be inherited",
    },
    Reason {
        names: &["ACCELERATE_DEEPSPEED_GRADIENT_ACCUMULATION_STEPS"],
        holds: is_only_here,
        why: "a name of its own for programs in Rust that only may train by a DeepSpeed configuration",
    },
    Reason {
        names: &["ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH", "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH"],
        holds: is_only_here,
        why: "the plugin in Python reads it, and the reference's launcher forgets the flag",
    },
    Reason {
        names: &["ACCELERATE_USE_CPU"],
        holds: |found| is_only_here(found) && found.ours == Some("true"),
        why: "use_cpu of a file counts for ranks, too, where the reference forgets it",
    },
    Reason {
        names: &["ACCELERATE_DYNAMO_BACKEND", "ACCELERATE_DYNAMO_USE_DYNAMIC", "ACCELERATE_DYNAMO_USE_FULLGRAPH"],
        holds: |found| is_only_here(found) && is_set(found.rank, "ACCELERATE_USE_DEEPSPEED"),
        why: "what is said of compilers counts with DeepSpeed, too, where the reference forgets it",
    },
    Reason {
        names: &["FSDP_VERSION"],
        holds: |found| is_only_here(found) && !is_set(found.rank, "ACCELERATE_USE_FSDP"),
        why: "what a file says of sharding reaches programs that switch sharding on by themselves",
    },
    Reason {
        names: &["WORLD_SIZE"],
        holds: |found| is_only_there(found) && found.theirs == Some("1") && !is_set(found.rank, "RANK"),
        why: "a process without a rank inherits no numbers of another launcher",
    },
    Reason {
        names: &["FSDP_SHARDING_STRATEGY"],
        holds: |found| found.theirs.is_some_and(|value| value.len() == 1) && found.ours.is_some(),
        why: "the name of a strategy in place of its number; both are read",
    },
    Reason {
        names: &["FSDP_SHARDING_STRATEGY", "FSDP_RESHARD_AFTER_FORWARD"],
        holds: |found| found.rank.get("FSDP_RESHARD_AFTER_FORWARD").is_some_and(|value| value.contains("shard")),
        why: "a strategy that version 1 names in reshard_after_forward counts; under the reference FULL_SHARD wins unasked",
    },
    Reason {
        names: &["FSDP_RESHARD_AFTER_FORWARD"],
        holds: |found| found.theirs.is_some() && found.ours.is_some_and(|value| value.eq_ignore_ascii_case("true")),
        why: "true in place of the name of a strategy",
    },
    Reason {
        names: &["ACCELERATE_GRADIENT_CLIPPING"],
        holds: |found| number(found.theirs).is_some() && number(found.theirs) == number(found.ours),
        why: "another way to write the same number",
    },
    Reason {
        names: &["ACCELERATE_MIXED_PRECISION", "FSDP_SHARDING_STRATEGY", "KMP_AFFINITY"],
        holds: |found| found.theirs.is_some() && found.ours.is_some(),
        why: "a variable that is set already goes before a default; the reference overwrites it",
    },
];

const CASE: &str = "another case of letters, which Python reads alike";
const NAMES_IN_ANY_CASE: &[&str] = &["ACCELERATE_DYNAMO_BACKEND"];
const WORDS: [&str; 2] = ["true", "false"];

fn number(value: Option<&str>) -> Option<f64> {
    value?.parse().ok()
}

fn is_several_ranks(rank: &Variables) -> bool {
    rank.get("WORLD_SIZE").is_some_and(|size| size != "1")
}

fn is_number(value: Option<&str>) -> bool {
    value.is_some_and(|value| value.parse::<u16>().is_ok())
}

fn is_only_here(found: &Difference<'_>) -> bool {
    found.theirs.is_none()
}

fn is_only_there(found: &Difference<'_>) -> bool {
    found.ours.is_none()
}

fn is_set(rank: &Variables, name: &str) -> bool {
    rank.contains_key(name)
}

impl Difference<'_> {
    /// Why it may be, if it may.
    fn reason(&self) -> Option<&'static str> {
        if let (Some(theirs), Some(ours)) = (self.theirs, self.ours)
            && (is_truth(theirs, ours) || (NAMES_IN_ANY_CASE.contains(&self.name) && theirs.eq_ignore_ascii_case(ours)))
        {
            return Some(CASE);
        }
        REASONS.iter().find(|reason| reason.names.contains(&self.name) && (reason.holds)(self)).map(|reason| reason.why)
    }
}

/// The same truth value: `True` and `true`, or `1` and `true`.
fn is_truth(theirs: &str, ours: &str) -> bool {
    let word = |value: &str| match value {
        "1" => "true".to_owned(),
        other => other.to_ascii_lowercase(),
    };
    word(theirs) == word(ours) && WORDS.contains(&word(ours).as_str())
}

/// Everything that has been found, for the table at the end.
#[derive(Debug, Default)]
pub(super) struct Differences {
    /// By reason and variable: an example, and how many launches have it.
    explained: BTreeMap<(&'static str, String), (String, BTreeSet<String>)>,
    /// By variable, values and launch.
    unexplained: BTreeSet<String>,
}

impl Differences {
    /// Compares the environments of all ranks of a launch, and says in a few words how it went.
    pub(super) fn compare(&mut self, case: &str, is_executable: bool, theirs: &Ranks, ours: &Ranks) -> String {
        let is_several = ours.len() > 1 && theirs.contains_key(ALONE);
        let before = self.unexplained.len();
        let pairs = self.pairs(case, theirs, ours);
        let (mut num_same, mut num_explained) = (0, 0);
        for (rank, here) in &pairs {
            let names: BTreeSet<_> = rank.keys().chain(here.keys()).collect();
            for name in names {
                let [theirs, ours] = [rank, here].map(|side| side.get(name).map(String::as_str));
                if theirs == ours {
                    num_same += 1;
                    continue;
                }
                let found = Difference { name, theirs, ours, is_several, is_executable, rank };
                num_explained += usize::from(self.note(case, &found));
            }
        }
        let num_unexplained = self.unexplained.len() - before;
        let verdict = if num_unexplained == 0 { "ok" } else { "FAILED" };
        format!(
            "ranks={} same={num_same} explained={num_explained} unexplained={num_unexplained} {verdict}",
            pairs.len()
        )
    }

    /// The environments that belong together. Where one side has a single process, whatever it is called, it is compared with
    /// the first one of the other side.
    fn pairs<'a>(&mut self, case: &str, theirs: &'a Ranks, ours: &'a Ranks) -> Vec<(&'a Variables, &'a Variables)> {
        let is_alone = theirs.contains_key(ALONE) || ours.contains_key(ALONE);
        let (there, here): (Vec<_>, Vec<_>) = (theirs.keys().collect(), ours.keys().collect());
        if there != here && !is_alone {
            self.unexplained.insert(format!("ranks {there:?} there, {here:?} here ({case})"));
        }
        match is_alone {
            true => theirs.values().zip(ours.values()).collect(),
            false => theirs.iter().filter_map(|(rank, variables)| Some((variables, ours.get(rank)?))).collect(),
        }
    }

    /// Keeps a difference for the table; does it have a reason?
    fn note(&mut self, case: &str, found: &Difference<'_>) -> bool {
        let values = format!("{} there, {} here", shown(found.theirs), shown(found.ours));
        let Some(why) = found.reason() else {
            self.unexplained.insert(format!("{}: {values} ({case})", found.name));
            return false;
        };
        let entry = self.explained.entry((why, found.name.to_owned())).or_insert((values, BTreeSet::new()));
        entry.1.insert(case.to_owned());
        true
    }

    pub(super) fn num_unexplained(&self) -> usize {
        self.unexplained.len()
    }

    /// Every variable that differs, by reason, with an example, and at the end what has no reason.
    pub(super) fn table(&self) -> String {
        let mut table = String::new();
        let mut last = "";
        for ((why, name), (example, cases)) in &self.explained {
            if *why != last {
                let _ = writeln!(table, "\n{why}:");
                last = why;
            }
            let _ = writeln!(table, "  {name:<50} {:>3} launches, such as: {example}", cases.len());
        }
        if !self.unexplained.is_empty() {
            let _ = writeln!(table, "\nwithout a reason:");
            self.unexplained.iter().for_each(|line| {
                let _ = writeln!(table, "  {line}");
            });
        }
        table.push('\n');
        table
    }
}

/// A value as the table shows it: long ones are cut.
fn shown(value: Option<&str>) -> String {
    const MOST: usize = 30;
    match value {
        None => "not set".to_owned(),
        Some(value) if value.chars().count() > MOST => format!("{:?}...", value.chars().take(MOST).collect::<String>()),
        Some(value) => format!("{value:?}"),
    }
}

/// The names of variables that differ between two runs of one launcher, but for ports and files of a run.
pub(super) fn between_runs(first: &Ranks, second: &Ranks) -> BTreeSet<String> {
    const OF_A_RUN: [&str; 2] = ["MASTER_PORT", "TORCHELASTIC_ERROR_FILE"];
    let flat = |ranks: &Ranks| -> BTreeMap<(String, String), String> {
        let of_rank = |(rank, variables): (&String, &Variables)| {
            let rank = rank.clone();
            variables.clone().into_iter().map(move |(name, value)| ((rank.clone(), name), value))
        };
        ranks.iter().flat_map(of_rank).collect()
    };
    let (first, second) = (flat(first), flat(second));
    let keys: BTreeSet<_> = first.keys().chain(second.keys()).collect();
    let differ = keys.into_iter().filter(|key| first.get(*key) != second.get(*key)).map(|(_, name)| name.clone());
    differ.filter(|name| !OF_A_RUN.contains(&name.as_str())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranks(rank: &str, variables: &[(&str, &str)]) -> Ranks {
        let variables = variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        Ranks::from([(rank.to_owned(), variables)])
    }

    /// Differences with a reason, and without one.
    fn counts(theirs: &Ranks, ours: &Ranks) -> (usize, usize) {
        let mut differences = Differences::default();
        differences.compare("case", false, theirs, ours);
        (differences.explained.len(), differences.num_unexplained())
    }

    #[test]
    fn only_what_has_a_reason_may_differ() {
        let check = |theirs: &[(&str, &str)], ours: &[(&str, &str)], wanted: (usize, usize)| {
            assert_eq!(counts(&ranks("0", theirs), &ranks("0", ours)), wanted, "{theirs:?} {ours:?}");
        };
        check(&[("FSDP_VERSION", "1")], &[("FSDP_VERSION", "1")], (0, 0));
        check(&[("FSDP_VERSION", "1")], &[], (0, 1));
        check(&[], &[("FSDP_VERSION", "1")], (1, 0));
        check(&[("ACCELERATE_USE_FSDP", "true")], &[("ACCELERATE_USE_FSDP", "true"), ("FSDP_VERSION", "1")], (0, 1));
        check(&[("WORLD_SIZE", "1")], &[], (1, 0));
        check(&[("WORLD_SIZE", "2")], &[], (0, 1));
        check(&[("WORLD_SIZE", "1"), ("RANK", "0")], &[("RANK", "0")], (0, 1));
        check(&[("MASTER_PORT", "1")], &[("MASTER_PORT", "2")], (1, 0));
        check(&[("MASTER_PORT", "1")], &[], (0, 1));
        check(&[("A", "True"), ("B", "1")], &[("A", "true"), ("B", "true")], (2, 0));
        check(&[("A", "True")], &[("A", "false")], (0, 1));
        check(&[("A", "YES")], &[("A", "yes")], (0, 1));
    }

    #[test]
    fn other_ranks_are_a_difference() {
        assert_eq!(counts(&ranks("0", &[]), &ranks("1", &[])), (0, 1));
        assert_eq!(counts(&ranks("alone", &[]), &ranks("0", &[("RANK", "0")])), (0, 1));
        assert_eq!(counts(&ranks("0", &[("RANK", "0")]), &ranks("alone", &[])), (0, 1));
    }

    #[test]
    fn runs_of_one_launcher_differ_in_ports_only() {
        let first = ranks("0", &[("MASTER_PORT", "1"), ("A", "1")]);
        let second = ranks("0", &[("MASTER_PORT", "2"), ("A", "2")]);
        assert_eq!(between_runs(&first, &second), BTreeSet::from(["A".to_owned()]));
    }
}
