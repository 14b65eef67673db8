//! Estimates and plans for people, and as JSON.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use accelerate_core::mesh::Mesh;
use accelerate_core::plan::{
    ActivationBytes, AxisBytes, Collective, EstimateDtype, MemoryEstimate, MicroBatch, Phase, PhaseBytes, Plan,
    RankBytes, RankSpeed, StepTime, TransformerShape,
};
use accelerate_core::weight_files::format_size;
use anstyle::{AnsiColor, Style};
use serde::Serialize;

use super::source::{Model, Origin};

/// Letters of the longest bar.
const BAR_WIDTH: usize = 32;

/// What is known beside the parameters.
pub(super) struct Facts<'a> {
    pub(super) model: &'a Model,
    pub(super) activations: Option<&'a Activations>,
    pub(super) speed: Option<RankSpeed>,
    pub(super) available_bytes: Option<u64>,
}

/// What activations follow from.
#[derive(Serialize)]
pub(super) struct Activations {
    pub(super) shape: TransformerShape,
    pub(super) batch: MicroBatch,
}

impl Activations {
    pub(super) fn bytes(&self, element_bytes: u64) -> ActivationBytes {
        self.shape.activation_bytes(&self.batch, element_bytes)
    }

    pub(super) fn bytes_on(&self, mesh: &Mesh, element_bytes: u64) -> ActivationBytes {
        self.shape.activation_bytes_on(mesh, &self.batch, element_bytes)
    }

    /// For types that can be trained.
    fn in_type(&self, dtype: EstimateDtype) -> Option<ActivationBytes> {
        Some(self.bytes(dtype.float_type()?.element_bytes() as u64))
    }

    /// What the estimate is, and for which models.
    fn explanation(&self) -> String {
        let Self { shape, batch } = self;
        let checkpointing = if batch.activation_checkpointing { ", computed again in the backward pass" } else { "" };
        let family = match shape.is_of_the_formula() {
            true => String::new(),
            false => format!(
                " Its layers are those of BERT and GPT-2: {} may keep more (a gate in the MLP) or less (no dropout, attention \
                 that keeps no scores).",
                if shape.model_type.is_empty() { "this model" } else { &shape.model_type }
            ),
        };
        format!(
            "Activations are an estimate for {} x {} tokens (Korthikanti et al., 2022){checkpointing}, {} of it logits.{family}",
            batch.batch_size,
            batch.sequence_length,
            format_size(self.bytes(4).logits)
        )
    }
}

/// The reference's table, and what activations add to it.
pub(super) fn estimates(estimates: &[MemoryEstimate], facts: &Facts<'_>) -> String {
    let size = |bytes: u64| cell(format_size(bytes));
    let size_or_none = |bytes: Option<u64>| cell(bytes.map_or("N/A".to_owned(), format_size));
    let mut head = ["dtype", "largest layer", "total size", "training with Adam"].map(cell).to_vec();
    if facts.activations.is_some() {
        head.extend(["activations", "together"].map(cell));
    }
    let mut rows = vec![head];
    rows.extend(estimates.iter().map(|estimate| {
        let MemoryEstimate { dtype, largest_layer_bytes, total_bytes, training_bytes, .. } = estimate;
        let mut row = vec![cell(dtype), size(*largest_layer_bytes), size(*total_bytes), size_or_none(*training_bytes)];
        if let Some(activations) = facts.activations {
            let bytes = activations.in_type(*dtype).map(|bytes| bytes.total());
            let together = training_bytes.zip(bytes).map(|(training, own)| training.saturating_add(own));
            row.extend([size_or_none(bytes), size_or_none(together)]);
        }
        row
    }));
    let mut text = aligned(&rows).join("\n");
    if let Some(first) = estimates.first().filter(|first| !first.largest_layer.is_empty()) {
        let _ = write!(text, "\n\nThe largest layer is {}.", first.largest_layer);
        let _ = match facts.activations {
            Some(activations) => write!(text, "\n{}", activations.explanation()),
            None => write!(text, " Activations come on top."),
        };
    }
    text + "\n"
}

/// Where the model was found.
#[derive(Serialize)]
struct Place<'a> {
    origin: Origin,
    place: &'a str,
}

impl<'a> From<&'a Model> for Place<'a> {
    fn from(model: &'a Model) -> Self {
        Self { origin: model.origin, place: &model.place }
    }
}

#[derive(Serialize)]
struct Estimates<'a> {
    model: Place<'a>,
    estimates: Vec<Estimate>,
}

#[derive(Serialize)]
struct Estimate {
    #[serde(flatten)]
    estimate: MemoryEstimate,
    #[serde(skip_serializing_if = "Option::is_none")]
    activations: Option<ActivationBytes>,
}

pub(super) fn estimates_as_json(estimates: Vec<MemoryEstimate>, facts: &Facts<'_>) -> serde_json::Result<String> {
    let with_activations = |estimate: MemoryEstimate| {
        let activations = facts.activations.and_then(|known| known.in_type(estimate.dtype));
        Estimate { estimate, activations }
    };
    let estimates = estimates.into_iter().map(with_activations).collect();
    Ok(serde_json::to_string_pretty(&Estimates { model: facts.model.into(), estimates })? + "\n")
}

#[derive(Serialize)]
struct PlanAndBytes<'a> {
    model: Place<'a>,
    plan: &'a Plan,
    axes: Vec<AxisBytes>,
    collectives: Vec<Collective>,
    bytes_per_rank: RankBytes,
    phases: BTreeMap<Phase, PhaseTotal>,
    peak_phase: Phase,
    peak_bytes: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    activations: Option<&'a Activations>,
    #[serde(skip_serializing_if = "Option::is_none")]
    speed: Option<RankSpeed>,
    #[serde(skip_serializing_if = "Option::is_none")]
    step_time: Option<StepTime>,
}

#[derive(Serialize)]
struct PhaseTotal {
    #[serde(flatten)]
    bytes: PhaseBytes,
    total: usize,
}

fn step_time(mesh: &Mesh, plan: &Plan, facts: &Facts<'_>) -> Option<StepTime> {
    Some(plan.step_time(&facts.activations?.batch.divided(mesh), facts.speed.as_ref()?))
}

pub(super) fn plan_as_json(mesh: &Mesh, plan: &Plan, facts: &Facts<'_>) -> serde_json::Result<String> {
    let bytes_per_rank = plan.bytes_per_rank();
    let phase = |&phase: &Phase| {
        let bytes = bytes_per_rank.in_phase(phase);
        (phase, PhaseTotal { bytes, total: bytes.total() })
    };
    let phases = Phase::ALL.iter().map(phase).collect();
    let (peak_phase, peak_bytes) = bytes_per_rank.peak();
    let all = PlanAndBytes {
        model: facts.model.into(),
        plan,
        axes: plan.bytes_per_axis(mesh),
        collectives: plan.collectives(),
        bytes_per_rank,
        phases,
        peak_phase,
        peak_bytes,
        activations: facts.activations,
        speed: facts.speed,
        step_time: step_time(mesh, plan, facts),
    };
    Ok(serde_json::to_string_pretty(&all)? + "\n")
}

/// One kind of memory: a column of the table, and a colour of the bars.
struct Component {
    name: &'static str,
    colour: AnsiColor,
    bytes_of: fn(&PhaseBytes) -> usize,
}

const COMPONENTS: [Component; 7] = [
    Component { name: "parameters", colour: AnsiColor::Blue, bytes_of: |bytes| bytes.parameters },
    Component { name: "gradients", colour: AnsiColor::Yellow, bytes_of: |bytes| bytes.gradients },
    Component { name: "optimizer state", colour: AnsiColor::Magenta, bytes_of: |bytes| bytes.optimizer_state },
    Component { name: "gathered units", colour: AnsiColor::Cyan, bytes_of: |bytes| bytes.gathered_units },
    Component { name: "buckets", colour: AnsiColor::Green, bytes_of: |bytes| bytes.buckets },
    Component { name: "NVMe blocks", colour: AnsiColor::Red, bytes_of: |bytes| bytes.nvme_blocks },
    Component { name: "activations", colour: AnsiColor::White, bytes_of: |bytes| bytes.activations },
];

/// The plan, in short or in full, and a table of what each rank has in each phase, with a bar for each.
pub(super) fn plan(mesh: &Mesh, plan: &Plan, is_verbose: bool, facts: &Facts<'_>) -> String {
    let bytes = plan.bytes_per_rank();
    let phases: Vec<PhaseBytes> = Phase::ALL.iter().map(|&phase| bytes.in_phase(phase)).collect();
    let present = |component: &&Component| phases.iter().any(|phase| (component.bytes_of)(phase) > 0);
    let components: Vec<&Component> = COMPONENTS.iter().filter(present).collect();
    let mut head = vec![cell("each rank")];
    head.extend(components.iter().map(|component| (component.name.to_owned(), component.colour.on_default())));
    head.push(cell("total"));
    let mut rows = vec![head];
    rows.extend(Phase::ALL.iter().zip(&phases).map(|(phase, bytes)| {
        let size = |bytes: usize| cell(if bytes == 0 { "-".to_owned() } else { format_size(bytes as u64) });
        let own = components.iter().map(|component| size((component.bytes_of)(bytes)));
        [cell(phase)].into_iter().chain(own).chain([size(bytes.total())]).collect()
    }));
    let (peak_phase, peak) = bytes.peak();
    let bars = phases.iter().map(|phase| bar(phase, peak));
    let lines = aligned(&rows).into_iter().zip([String::new()].into_iter().chain(bars));
    let mut text = if is_verbose { plan.to_string() } else { plan.summary().to_string() };
    let _ = write!(text, "{}", plan.along(mesh));
    for (line, bar) in lines {
        let _ = write!(text, "\n{}", format!("{line}  {bar}").trim_end());
    }
    let _ = write!(text, "\n\nAt most {} on each rank ({peak_phase}).", format_size(peak as u64));
    if facts.activations.is_none() {
        text += " Activations come on top.";
    }
    if let Some(left) = facts.available_bytes.and_then(|available| available.checked_sub(peak as u64)) {
        let whose = if facts.activations.is_none() { " For them" } else { "" };
        let _ = write!(text, "{whose} {} are left.", format_size(left));
    }
    if bytes.on_nvme > 0 {
        let _ = write!(text, " On NVMe: {} of each rank.", format_size(bytes.on_nvme as u64));
    }
    if let Some(activations) = facts.activations {
        let _ = write!(text, "\n{}", activations.explanation());
    }
    if let Some(time) = step_time(mesh, plan, facts) {
        let _ = write!(text, "\n\n{}", step(&time, plan.world_size, mesh.world_size()));
        if plan.bytes_per_axis(mesh).iter().any(|axis| axis.sent.is_none()) {
            text += "\nActivations that ranks send each other are not counted.";
        }
    }
    text + "\n"
}

/// How long a step takes at least, where so many groups of all these ranks have tokens of their own.
fn step(time: &StepTime, num_shares: usize, num_ranks: usize) -> String {
    let StepTime { num_tokens, compute_seconds, communication_seconds, sent_bytes, .. } = *time;
    let mut text = format!(
        "A step of {num_tokens} tokens on each rank computes for {}, at the rate of --flops",
        format_seconds(compute_seconds)
    );
    let bounds = communication_seconds.zip(time.overlapped_seconds).zip(time.not_overlapped_seconds);
    let _ = match bounds {
        _ if sent_bytes == 0 => write!(text, "; nothing is sent."),
        None => write!(text, ". Each rank sends {}: --bandwidth says how long that takes.", format_size(sent_bytes)),
        Some(((sending, overlapped), not_overlapped)) => {
            let per_second = |seconds: f64| format_count(num_tokens as f64 * num_shares as f64 / seconds);
            write!(
                text,
                ", and sends {} in {}.\n  {} if all of it travels while something is computed: {} tokens/s on {num_ranks} ranks\n  \
                 {} if nothing is computed meanwhile: {} tokens/s",
                format_size(sent_bytes),
                format_seconds(sending),
                format_seconds(overlapped),
                per_second(overlapped),
                format_seconds(not_overlapped),
                per_second(not_overlapped),
            )
        }
    };
    text
}

/// With three digits, in the largest unit of which there is one.
fn format_seconds(seconds: f64) -> String {
    const UNITS: [(&str, f64); 5] = [("d", 86_400.0), ("h", 3600.0), ("s", 1.0), ("ms", 1e-3), ("us", 1e-6)];
    let (unit, size) = UNITS.into_iter().find(|&(_, size)| seconds >= size).unwrap_or(("us", 1e-6));
    format!("{} {unit}", three_digits(seconds / size))
}

/// With three digits, in thousands or millions.
fn format_count(number: f64) -> String {
    const UNITS: [(&str, f64); 3] = [(" million", 1e6), (" thousand", 1e3), ("", 1.0)];
    let (unit, size) = UNITS.into_iter().find(|&(_, size)| number >= size).unwrap_or(("", 1.0));
    format!("{}{unit}", three_digits(number / size))
}

fn three_digits(number: f64) -> String {
    let decimals = if number >= 100.0 {
        0
    } else if number >= 10.0 {
        1
    } else {
        2
    };
    format!("{number:.decimals$}")
}

/// As long as the phase takes memory, the longest phase being `peak`.
fn bar(phase: &PhaseBytes, peak: usize) -> String {
    let (mut bar, mut bytes, mut drawn) = (String::new(), 0.0, 0);
    for Component { colour, bytes_of, .. } in &COMPONENTS {
        bytes += bytes_of(phase) as f64;
        // Ends are rounded, not lengths, so that rows of equal totals are of equal length.
        let end = (bytes / (peak.max(1) as f64) * BAR_WIDTH as f64).round() as usize;
        if drawn < end {
            let style = colour.on_default();
            let _ = write!(bar, "{style}{}{style:#}", "█".repeat(end - drawn));
        }
        drawn = drawn.max(end);
    }
    bar
}

/// What stands in one place of a table, and how.
type Cell = (String, Style);

fn cell(text: impl ToString) -> Cell {
    (text.to_string(), Style::new())
}

/// The rows as lines: the first column to the left, all others to the right.
fn aligned(rows: &[Vec<Cell>]) -> Vec<String> {
    let width = |column: usize| rows.iter().map(|row| row[column].0.len()).max().unwrap_or(0);
    let line = |row: &Vec<Cell>| {
        let cells = row.iter().enumerate().map(|(column, (text, style))| {
            let width = width(column);
            let text = if column == 0 { format!("{text:<width$}") } else { format!("{text:>width$}") };
            format!("{style}{text}{style:#}")
        });
        cells.collect::<Vec<_>>().join("  ")
    };
    rows.iter().map(line).collect()
}
