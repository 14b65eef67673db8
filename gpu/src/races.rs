//! A race: our steps and those of Python Accelerate, in turns, in one run and on one device.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::time::{Duration, Instant};

use accelerate::tch::{Device, Kind, Tensor};
use anyhow::{Context as _, Result, ensure};
use serde::de::DeserializeOwned;
use torch_ext::profiler::{Event, Profiler, ProfilerOptions};
use torch_ext::stream::synchronize;

use crate::check::{Context, Found, NO_PYTHON};

/// So many first steps are compared before anything is timed.
pub(crate) const NUM_ANSWERS: usize = 3;
const NUM_ROUNDS: usize = 5;
/// What one side's part of a round takes, about.
const ROUND: Duration = Duration::from_millis(700);
/// In a rehearsal, whose times are nobody's.
const REHEARSED_ROUND: Duration = Duration::from_millis(30);
const MOST_STEPS: usize = 500;
/// Steps that are recorded to see what the device does.
const NUM_RECORDED: usize = 5;

/// Our side. A step gives what its answer is made of, without waiting for the device.
pub(crate) type Step<'a> = Box<dyn FnMut() -> Result<Tensor> + 'a>;

/// Which race, and what makes it void.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Race {
    /// As `python/race.py` knows it.
    pub(crate) name: &'static str,
    /// What a step is called.
    pub(crate) unit: &'static str,
    /// How far answers may be apart, as a part of them.
    pub(crate) tolerance: f64,
    /// What both sides together take of a GPU's memory, about.
    pub(crate) gib: i64,
}

/// A rehearsal is tiny.
pub(crate) fn is_full(context: &Context<'_>) -> bool {
    context.is_cuda()
}

pub(crate) fn run<'a>(context: &Context<'_>, race: Race, ours: impl FnOnce() -> Result<Step<'a>>) -> Result<Found> {
    if context.is_cuda() {
        let gib = torch_ext::device::device_memory(context.device)?.total_bytes >> 30;
        if gib < race.gib {
            return Found::not_here(format!("both sides take {} GiB, and the GPU has {gib}", race.gib));
        }
    }
    let size = if is_full(context) { "full" } else { "tiny" };
    let Some(mut rival) = Rival::start(context, &["--race", race.name, "--size", size])? else {
        return Found::not_here(NO_PYTHON);
    };
    let mut step = ours()?;
    let own: Vec<f64> = (0..NUM_ANSWERS).map(|_| answer(&step()?)).collect::<Result<_>>()?;
    let theirs: Vec<f64> = rival.hear()?;
    let relative: Vec<f64> = own.iter().zip(&theirs).map(|(own, theirs)| own / theirs).collect();
    ensure!(theirs.len() == NUM_ANSWERS, "Python gave {} answers", theirs.len());
    context.all_close("the answer of step", &relative, &[1.0; NUM_ANSWERS], race.tolerance)?;

    let device = context.device;
    let first = timed(device, 2, &mut step)?;
    let round = if context.is_cuda() { ROUND } else { REHEARSED_ROUND };
    let num_steps = ((round.as_secs_f64() / first.max(1e-9)) as usize).clamp(2, MOST_STEPS);
    let _: f64 = rival.ask(num_steps)?;
    let mut rounds = Vec::new();
    for _ in 0..NUM_ROUNDS {
        rounds.push((timed(device, num_steps, &mut step)?, rival.ask::<f64>(num_steps)? / num_steps as f64));
    }
    let result = Outcome::of(&rounds);
    if !context.is_cuda() {
        return Found::figure(format!("REHEARSAL, tiny, no figure of a GPU: ratio {:.2}", result.ratio));
    }
    let busy = (busy_seconds(device, &mut step)?, rival.ask::<f64>(format!("busy {NUM_RECORDED}"))?);
    Found::figure(result.text(race.unit, busy))
}

/// A single number as it is; else the mean square.
fn answer(result: &Tensor) -> Result<f64> {
    let result = result.f_detach()?.f_to_kind(Kind::Double)?;
    let number = if result.numel() == 1 { result } else { result.f_square()?.f_mean(Kind::Double)? };
    Ok(number.f_reshape([1])?.f_double_value(&[0])?)
}

/// Seconds for one of so many steps, until the device has done them.
fn timed(device: Device, num_steps: usize, step: &mut Step<'_>) -> Result<f64> {
    synchronize(device)?;
    let start = Instant::now();
    for _ in 0..num_steps {
        drop(step()?);
    }
    synchronize(device)?;
    Ok(start.elapsed().as_secs_f64() / num_steps as f64)
}

/// How long kernels and copies of one step keep the device at work.
fn busy_seconds(device: Device, step: &mut Step<'_>) -> Result<f64> {
    let options = ProfilerOptions { cpu: false, cuda: true, ..Default::default() };
    let profiler = Profiler::start(&options)?;
    for _ in 0..NUM_RECORDED {
        drop(step()?);
    }
    synchronize(device)?;
    let events = profiler.stop()?.events()?;
    let nanoseconds = union(events.iter().filter(|event| event.is_on_device && !event.is_user_annotation));
    ensure!(nanoseconds > 0, "the recording of {NUM_RECORDED} steps has no work of the device");
    Ok(nanoseconds as f64 / 1e9 / NUM_RECORDED as f64)
}

/// Nanoseconds in which anything of it ran.
fn union<'a>(events: impl Iterator<Item = &'a Event>) -> u64 {
    let mut spans: Vec<(u64, u64)> = events.map(|event| (event.start_ns, event.end_ns)).collect();
    spans.sort_unstable();
    let (mut busy, mut end) = (0, 0);
    for (start, stop) in spans {
        busy += stop.saturating_sub(start.max(end));
        end = end.max(stop);
    }
    busy
}

/// Seconds for a step of both sides, and their ratios.
#[derive(Debug)]
struct Outcome {
    ours: f64,
    theirs: f64,
    ratio: f64,
    least: f64,
    most: f64,
}

impl Outcome {
    fn of(rounds: &[(f64, f64)]) -> Self {
        let median = |mut values: Vec<f64>| {
            values.sort_by(f64::total_cmp);
            values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
        };
        let ratios: Vec<f64> = rounds.iter().map(|(ours, theirs)| ours / theirs).collect();
        Self {
            ours: median(rounds.iter().map(|(ours, _)| *ours).collect()),
            theirs: median(rounds.iter().map(|(_, theirs)| *theirs).collect()),
            least: ratios.iter().copied().fold(f64::INFINITY, f64::min),
            most: ratios.iter().copied().fold(0.0, f64::max),
            ratio: median(ratios),
        }
    }

    fn text(&self, unit: &str, (ours, theirs): (f64, f64)) -> String {
        let idle = |busy: f64, step: f64| (100.0 * (1.0 - busy / step)).clamp(0.0, 100.0);
        format!(
            "ratio {:.2} ({:.2} to {:.2}): {:.0} us a {unit} here, {:.0} in Python; GPU idle {:.0} % here, {:.0} % there",
            self.ratio,
            self.least,
            self.most,
            1e6 * self.ours,
            1e6 * self.theirs,
            idle(ours, self.ours),
            idle(theirs, self.theirs),
        )
    }
}

/// The other side, in a process that waits for orders. It ends with this value, and by itself once nobody can give it orders.
struct Rival {
    process: Child,
    orders: ChildStdin,
    said: BufReader<ChildStdout>,
}

impl Rival {
    /// `None` without a Python that could run it.
    fn start(context: &Context<'_>, arguments: &[&str]) -> Result<Option<Self>> {
        let Some(mut command) = context.python_command("race.py", arguments)? else { return Ok(None) };
        let mut process =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().context("Python did not start")?;
        let orders = process.stdin.take().context("no way to Python")?;
        let said = BufReader::new(process.stdout.take().context("no way from Python")?);
        Ok(Some(Self { process, orders, said }))
    }

    fn ask<T: DeserializeOwned>(&mut self, order: impl std::fmt::Display) -> Result<T> {
        writeln!(self.orders, "{order}").context("Python takes no orders any more")?;
        self.hear()
    }

    /// What it says next, past what packages print.
    fn hear<T: DeserializeOwned>(&mut self) -> Result<T> {
        for line in (&mut self.said).lines() {
            if let Some(text) = line?.strip_prefix("race=") {
                return serde_json::from_str(text).with_context(|| format!("Python said {text:?}"));
            }
        }
        anyhow::bail!("Python ended before it had answered")
    }
}

impl Drop for Rival {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ratio_is_that_of_rounds_and_not_of_medians() {
        let outcome = Outcome::of(&[(1.0, 2.0), (3.0, 4.0), (2.0, 8.0)]);
        let found = (outcome.ours, outcome.theirs, outcome.ratio, outcome.least, outcome.most);
        assert_eq!(found, (2.0, 4.0, 0.5, 0.25, 0.75));
        let text = outcome.text("step", (1.0, 5.0));
        assert!(text.contains("ratio 0.50 (0.25 to 0.75)") && text.ends_with("idle 50 % here, 0 % there"), "{text}");
    }

    #[test]
    fn work_at_the_same_time_counts_once() {
        let event = |start_ns, end_ns| Event { start_ns, end_ns, ..Default::default() };
        for (spans, wanted) in [
            (&[][..], 0),
            (&[(0, 10), (20, 25)], 15),
            (&[(20, 25), (0, 10), (5, 22)], 25),
            (&[(0, 100), (10, 20)], 100),
        ] {
            let events: Vec<Event> = spans.iter().map(|(start, end)| event(*start, *end)).collect();
            assert_eq!(union(events.iter()), wanted, "{spans:?}");
        }
    }
}
