//! Judges what was seen on a machine. Pure: the same facts are the same list.

use accelerate_core::environment::check_num_threads;
use accelerate_core::files::ShownPath;
use accelerate_core::names::counted;
use accelerate_core::settings::shortened;
use accelerate_setup::{Origin, VERSION};
use serde::Serialize;

use super::facts::{ConfigSeen, DEFAULT_PORT, Facts, Version};

/// The oldest Rust, and the oldest major version of GCC and Clang that knows C++20 well enough for libtorch's headers.
const RUST_VERSION: &str = env!("CARGO_PKG_RUST_VERSION");
const OLDEST_COMPILER: u32 = 10;

/// The driver of CUDA 13.0, which libtorch is built for.
const OLDEST_DRIVER: u32 = 580;

const GIB: f64 = (1u64 << 30) as f64;

/// How good it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Verdict {
    Ok,
    /// It works, but slowly or not always.
    Warning,
    /// Building or training fails.
    Problem,
}

/// What was found about one thing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Check {
    pub(super) name: &'static str,
    pub(super) verdict: Verdict,
    pub(super) found: String,
    pub(super) cure: Option<String>,
}

/// Before it is known which check it is of.
struct Judged {
    verdict: Verdict,
    found: String,
    cure: Option<String>,
}

fn ok(found: impl Into<String>) -> Judged {
    Judged { verdict: Verdict::Ok, found: found.into(), cure: None }
}

fn warning(found: impl Into<String>, cure: impl Into<String>) -> Judged {
    Judged { verdict: Verdict::Warning, found: found.into(), cure: Some(cure.into()) }
}

fn problem(found: impl Into<String>, cure: impl Into<String>) -> Judged {
    Judged { verdict: Verdict::Problem, found: found.into(), cure: Some(cure.into()) }
}

/// One check after the other, in the order in which they matter to a beginner.
pub(super) fn checks(facts: &Facts) -> Vec<Check> {
    let judged = [
        ("libtorch", libtorch(facts)),
        ("C++ compiler", cpp(&facts.cpp)),
        ("rustc", rust("rustc", &facts.rustc)),
        ("cargo", rust("cargo", &facts.cargo)),
        ("configuration file", config(&facts.config)),
        ("GPU", gpu(facts.num_gpus, facts.driver.as_deref())),
        ("network", network(facts)),
        ("shared memory", shared_memory(facts.shared_memory_bytes)),
        ("memory of other processes", ptrace_scope(facts.ptrace_scope)),
        ("open files", open_files(facts.open_files)),
        ("cores", cores(facts.num_cores, facts.omp_num_threads.as_deref())),
        ("memory", memory(facts.available_bytes, facts.cgroup_limit_bytes)),
    ];
    let check = |(name, judged): (_, Judged)| {
        let Judged { verdict, found, cure } = judged;
        Check { name, verdict, found, cure }
    };
    judged.into_iter().map(check).collect()
}

fn libtorch(facts: &Facts) -> Judged {
    match &facts.libtorch {
        Ok(Some(found)) => {
            let text = format!("{VERSION} in {} ({})", found.folder.shown(), found.origin);
            if found.origin == Origin::Cache && facts.is_in_project {
                return warning(text, "This project does not name it: run `accelerate setup` here.");
            }
            ok(text)
        }
        Ok(None) => problem(format!("none, and {VERSION} is wanted"), "Run `accelerate setup`, which installs it."),
        Err(error) => problem("not usable", error.clone()),
    }
}

fn config(seen: &Result<Option<ConfigSeen>, String>) -> Judged {
    let seen = match seen {
        Ok(None) => return ok("there is no default one, so defaults hold"),
        Ok(Some(seen)) => seen,
        Err(error) => {
            return problem(
                error,
                "Every launch needs it: mend it, or move it away. `accelerate config` writes a new one.",
            );
        }
    };
    let path = shortened(&seen.path.shown());
    match (seen.errors.as_slice(), seen.num_warnings) {
        ([], 0) => ok(format!("{path}, which a launch takes")),
        ([], number) => {
            warning(format!("{path} has {}", counted(number, "warning")), "See `accelerate config validate`.")
        }
        ([first, ..], _) => problem(
            format!("{path} has {}; the first: {first}", counted(seen.errors.len(), "error")),
            "A launch refuses it. `accelerate config validate` shows all of them with their cures.",
        ),
    }
}

/// A program that does not answer now will not do so later.
const HANGS: &str = "A build would hang in the same way, so mend that first.";

fn cpp(version: &Version) -> Judged {
    const INSTALL: &str = "Install g++ 10 or newer (Debian, Ubuntu: `apt install g++`; Fedora: `dnf install gcc-c++`), or \
                           name one in CXX.";
    match version {
        Err(error) => problem(error, HANGS),
        Ok(None) => problem("none by the name of CXX or `c++`", INSTALL),
        Ok(Some(text)) => match numbers(text).first() {
            Some(major) if *major < OLDEST_COMPILER => problem(text, INSTALL),
            _ => ok(text),
        },
    }
}

fn rust(name: &str, version: &Version) -> Judged {
    match version {
        Err(error) => problem(error, HANGS),
        Ok(None) => problem(
            "not found on the search path",
            format!("Install Rust, which brings {name}, from https://rustup.rs"),
        ),
        Ok(Some(text)) if numbers(text) < numbers(RUST_VERSION) => {
            problem(text, format!("{RUST_VERSION} or newer is wanted: `rustup update stable`."))
        }
        Ok(Some(text)) => ok(text),
    }
}

/// The first version in a text: `g++ (Debian 12.2.0-14) 12.2.0` has 12, 2, 0.
fn numbers(text: &str) -> Vec<u32> {
    let is_version = |word: &&str| word.starts_with(|letter: char| letter.is_ascii_digit()) && word.contains('.');
    let words = text.split(|letter: char| letter.is_whitespace() || "()-+~".contains(letter));
    let version = words.clone().find(is_version).unwrap_or_default();
    version.split('.').map_while(|part| part.parse().ok()).collect()
}

fn gpu(num_gpus: usize, driver: Option<&str>) -> Judged {
    const UPDATE: &str = "libtorch is built for CUDA 13.0, which needs NVIDIA's driver 580 or newer: update it.";
    let major = driver.and_then(|text| numbers(text).first().copied());
    match (num_gpus, driver) {
        (0, None) => ok("none; training runs on CPUs"),
        (0, Some(driver)) => warning(
            format!("driver {driver}, but no GPU is visible"),
            "Look at CUDA_VISIBLE_DEVICES and at `nvidia-smi`.",
        ),
        (_, None) => warning(
            format!("{num_gpus} visible, but the driver's version is unknown"),
            "Look at `nvidia-smi`; where it fails, install NVIDIA's driver.",
        ),
        (_, Some(driver)) => {
            let text = format!("{num_gpus} visible, driver {driver}");
            if major.is_some_and(|major| major < OLDEST_DRIVER) { warning(text, UPDATE) } else { ok(text) }
        }
    }
}

fn network(facts: &Facts) -> Judged {
    match (&facts.loopback, facts.default_port_is_free) {
        (Err(error), _) => problem(
            format!("no connection to 127.0.0.1: {error}"),
            "Ranks of one machine meet there. Bring the interface up (`ip link set lo up`), or let the firewall or sandbox \
             allow it.",
        ),
        (Ok(()), true) => ok(format!("connects to 127.0.0.1; port {DEFAULT_PORT} is free")),
        (Ok(()), false) => ok(format!(
            "connects to 127.0.0.1; port {DEFAULT_PORT}, which several machines meet at, is taken: say --main_process_port \
             for them"
        )),
    }
}

fn shared_memory(bytes: Option<u64>) -> Judged {
    match bytes {
        None => warning("no /dev/shm", "NCCL needs it on GPUs; mount a tmpfs there."),
        Some(bytes) if bytes < 256 << 20 => warning(
            format!("/dev/shm holds {} MiB", bytes >> 20),
            "NCCL needs more on several GPUs: start the container with `--shm-size 1g`, or mount a larger tmpfs there.",
        ),
        Some(bytes) => ok(format!("/dev/shm holds {:.1} GiB", bytes as f64 / GIB)),
    }
}

fn ptrace_scope(scope: Option<u32>) -> Judged {
    match scope {
        None => ok("ranks may read each other's (no Yama)"),
        Some(scope @ (0 | 1)) => ok(format!("ranks may read each other's (ptrace_scope {scope})")),
        Some(scope) => warning(
            format!("ranks may not read each other's (ptrace_scope {scope})"),
            "Sharded training on CPUs is slower without: `sysctl kernel.yama.ptrace_scope=1` allows it.",
        ),
    }
}

fn open_files(limit: Option<u64>) -> Judged {
    match limit {
        Some(limit) if limit < 1024 => warning(
            format!("at most {limit} for each process"),
            "Connections of many ranks and files of large data sets need more: `ulimit -n 4096`.",
        ),
        Some(u64::MAX) => ok("no limit"),
        Some(limit) => ok(format!("at most {limit} for each process")),
        None => ok("the limit is unknown"),
    }
}

fn cores(num_cores: usize, omp_num_threads: Option<&str>) -> Judged {
    let cores = format!("{num_cores} usable");
    let Some(threads) = omp_num_threads else { return ok(format!("{cores}; OMP_NUM_THREADS is not set")) };
    let text = format!("{cores}; OMP_NUM_THREADS={threads}");
    if check_num_threads(threads, num_cores, num_cores).is_some() {
        return warning(text, "Nobody can mean that, so a launch replaces it: unset OMP_NUM_THREADS.");
    }
    if threads.trim().parse().is_ok_and(|threads: usize| threads > num_cores) {
        return warning(text, "More threads than cores wait for each other: unset OMP_NUM_THREADS, or lower it.");
    }
    ok(text)
}

fn memory(available: Option<u64>, limit: Option<u64>) -> Judged {
    let usable = available.into_iter().chain(limit).min();
    let Some(usable) = usable else { return ok("unknown") };
    let gib = |bytes: u64| format!("{:.1} GiB", bytes as f64 / GIB);
    let of_group = limit.map_or_else(String::new, |bytes| format!(", and this container may have {}", gib(bytes)));
    let text = format!("{} available{of_group}", available.map_or_else(|| "unknown".to_owned(), gib));
    if usable < 3 << 30 {
        return warning(
            text,
            "Building libtorch's bindings takes up to 3 GiB: build with `cargo build -j 1`, or free some.",
        );
    }
    ok(text)
}

#[cfg(test)]
mod tests {
    use super::Verdict::{Ok as Fine, Problem, Warning};
    use super::*;
    use accelerate_setup::Libtorch;
    use rstest::rstest;

    fn good() -> Facts {
        let libtorch = Libtorch { folder: "cache/libtorch".into(), origin: Origin::Linked };
        Facts {
            libtorch: Ok(Some(libtorch)),
            is_in_project: true,
            config: Ok(None),
            cpp: Ok(Some("g++ (Debian 12.2.0-14) 12.2.0".into())),
            rustc: Ok(Some("rustc 1.91.0 (abc 2026-01-01)".into())),
            cargo: Ok(Some("cargo 2.0.0".into())),
            num_gpus: 0,
            driver: None,
            loopback: Ok(()),
            default_port_is_free: true,
            shared_memory_bytes: Some(1 << 30),
            ptrace_scope: Some(1),
            open_files: Some(1024),
            num_cores: 4,
            omp_num_threads: None,
            available_bytes: Some(8 << 30),
            cgroup_limit_bytes: None,
        }
    }

    #[test]
    fn a_good_machine_has_nothing_to_cure() {
        for check in checks(&good()) {
            assert_eq!((check.verdict, &check.cure), (Fine, &None), "{check:?}");
        }
    }

    fn seen(errors: &[&str], num_warnings: usize) -> Result<Option<ConfigSeen>, String> {
        let errors = errors.iter().map(ToString::to_string).collect();
        Ok(Some(ConfigSeen { path: "default_config.yaml".into(), errors, num_warnings }))
    }

    fn from_cache(facts: &mut Facts) {
        facts.libtorch = Ok(Some(Libtorch { folder: "cache".into(), origin: Origin::Cache }));
    }

    #[rstest]
    #[case("libtorch", Problem, "accelerate setup", |facts: &mut Facts| facts.libtorch = Ok(None))]
    #[case("libtorch", Problem, "unset it", |facts: &mut Facts| facts.libtorch = Err("2.10 is wrong; unset it".into()))]
    #[case("libtorch", Warning, "run `accelerate setup` here", from_cache)]
    #[case("libtorch", Fine, "", |facts: &mut Facts| { from_cache(facts); facts.is_in_project = false; })]
    #[case("C++ compiler", Problem, "apt install g++", |facts: &mut Facts| facts.cpp = Ok(None))]
    #[case("C++ compiler", Problem, "g++ 10", |facts: &mut Facts| facts.cpp = Ok(Some("c++ (GCC) 9.5.0".into())))]
    #[case("C++ compiler", Fine, "", |facts: &mut Facts| facts.cpp = Ok(Some("Debian clang version 14.0.6".into())))]
    #[case("C++ compiler", Problem, "would hang", |facts: &mut Facts| facts.cpp = Err("it hangs".into()))]
    #[case("cargo", Problem, "would hang", |facts: &mut Facts| facts.cargo = Err("it hangs".into()))]
    #[case("configuration file", Fine, "", |facts: &mut Facts| facts.config = seen(&[], 0))]
    #[case("configuration file", Warning, "config validate", |facts: &mut Facts| facts.config = seen(&[], 2))]
    #[case("configuration file", Problem, "shows all", |facts: &mut Facts| facts.config = seen(&["line 1", "x"], 2))]
    #[case("configuration file", Problem, "move it away", |facts: &mut Facts| facts.config = Err("a pipe".into()))]
    #[case("rustc", Problem, "rustup update", |facts: &mut Facts| facts.rustc = Ok(Some("rustc 1.90.9 (abc)".into())))]
    #[case("rustc", Fine, "", |facts: &mut Facts| facts.rustc = Ok(Some("rustc 1.100.0-nightly (abc)".into())))]
    #[case("cargo", Problem, "rustup.rs", |facts: &mut Facts| facts.cargo = Ok(None))]
    #[case("GPU", Fine, "", |facts: &mut Facts| { facts.num_gpus = 2; facts.driver = Some("580.65.06".into()); })]
    #[case("GPU", Warning, "580", |facts: &mut Facts| { facts.num_gpus = 2; facts.driver = Some("535.1".into()); })]
    #[case("GPU", Warning, "nvidia-smi", |facts: &mut Facts| facts.num_gpus = 1)]
    #[case("GPU", Warning, "CUDA_VISIBLE_DEVICES", |facts: &mut Facts| facts.driver = Some("580.1".into()))]
    #[case("network", Problem, "ip link set lo up", |facts: &mut Facts| facts.loopback = Err("refused".into()))]
    #[case("network", Fine, "", |facts: &mut Facts| facts.default_port_is_free = false)]
    #[case("shared memory", Warning, "--shm-size", |facts: &mut Facts| facts.shared_memory_bytes = Some(64 << 20))]
    #[case("shared memory", Warning, "tmpfs", |facts: &mut Facts| facts.shared_memory_bytes = None)]
    #[case("memory of other processes", Warning, "ptrace_scope=1", |facts: &mut Facts| facts.ptrace_scope = Some(2))]
    #[case("memory of other processes", Fine, "", |facts: &mut Facts| facts.ptrace_scope = None)]
    #[case("open files", Warning, "ulimit", |facts: &mut Facts| facts.open_files = Some(256))]
    #[case("open files", Fine, "", |facts: &mut Facts| facts.open_files = Some(u64::MAX))]
    #[case("cores", Warning, "unset", |facts: &mut Facts| facts.omp_num_threads = Some("many".into()))]
    #[case("cores", Warning, "unset", |facts: &mut Facts| facts.omp_num_threads = Some("0".into()))]
    #[case("cores", Warning, "wait for each other", |facts: &mut Facts| facts.omp_num_threads = Some("5".into()))]
    #[case("cores", Fine, "", |facts: &mut Facts| facts.omp_num_threads = Some("4".into()))]
    #[case("memory", Warning, "-j 1", |facts: &mut Facts| facts.cgroup_limit_bytes = Some(2 << 30))]
    #[case("memory", Fine, "", |facts: &mut Facts| facts.available_bytes = None)]
    fn what_is_wrong_is_named_with_its_cure(
        #[case] name: &str,
        #[case] verdict: Verdict,
        #[case] words_of_cure: &str,
        #[case] change: fn(&mut Facts),
    ) {
        let mut facts = good();
        change(&mut facts);
        for check in checks(&facts) {
            let (wanted, words) = if check.name == name { (verdict, words_of_cure) } else { (Fine, "") };
            assert_eq!(check.verdict, wanted, "{check:?}");
            assert!(check.cure.clone().unwrap_or_default().contains(words), "{check:?}");
        }
    }

    #[rstest]
    #[case("g++ (Debian 12.2.0-14) 12.2.0", &[12, 2, 0])]
    #[case("Apple clang version 17.0.0 (clang-1700)", &[17, 0, 0])]
    #[case("rustc 1.91.0-beta.3 (x)", &[1, 91, 0])]
    #[case("no version", &[])]
    fn versions_are_found_in_what_programs_say(#[case] text: &str, #[case] want: &[u32]) {
        assert_eq!(numbers(text), want);
    }
}
