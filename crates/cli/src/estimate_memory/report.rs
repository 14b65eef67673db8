//! Estimates and plans for people, and as JSON.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use accelerate_core::plan::{Collective, MemoryEstimate, Phase, PhaseBytes, Plan, RankBytes};
use accelerate_core::weight_files::format_size;
use anstyle::{AnsiColor, Style};
use serde::Serialize;

/// Letters of the longest bar.
const BAR_WIDTH: usize = 32;

/// The reference's table.
pub(super) fn estimates(estimates: &[MemoryEstimate]) -> String {
    let size = |bytes: u64| cell(format_size(bytes));
    let mut rows = vec![["dtype", "largest layer", "total size", "training with Adam"].map(cell).to_vec()];
    rows.extend(estimates.iter().map(|estimate| {
        let training = estimate.training_bytes.map_or("N/A".to_owned(), format_size);
        let MemoryEstimate { dtype, largest_layer_bytes, total_bytes, .. } = estimate;
        vec![cell(dtype), size(*largest_layer_bytes), size(*total_bytes), cell(training)]
    }));
    let mut text = aligned(&rows).join("\n");
    if let Some(first) = estimates.first().filter(|first| !first.largest_layer.is_empty()) {
        let _ = write!(text, "\n\nThe largest layer is {}. Activations come on top.", first.largest_layer);
    }
    text + "\n"
}

#[derive(Serialize)]
struct Estimates<'a> {
    estimates: &'a [MemoryEstimate],
}

pub(super) fn estimates_as_json(estimates: &[MemoryEstimate]) -> serde_json::Result<String> {
    Ok(serde_json::to_string_pretty(&Estimates { estimates })? + "\n")
}

#[derive(Serialize)]
struct PlanAndBytes<'a> {
    plan: &'a Plan,
    collectives: Vec<Collective>,
    bytes_per_rank: RankBytes,
    phases: BTreeMap<Phase, PhaseTotal>,
    peak_phase: Phase,
    peak_bytes: usize,
}

#[derive(Serialize)]
struct PhaseTotal {
    #[serde(flatten)]
    bytes: PhaseBytes,
    total: usize,
}

pub(super) fn plan_as_json(plan: &Plan) -> serde_json::Result<String> {
    let bytes_per_rank = plan.bytes_per_rank();
    let phase = |&phase: &Phase| {
        let bytes = bytes_per_rank.in_phase(phase);
        (phase, PhaseTotal { bytes, total: bytes.total() })
    };
    let phases = Phase::ALL.iter().map(phase).collect();
    let (peak_phase, peak_bytes) = bytes_per_rank.peak();
    let all = PlanAndBytes { plan, collectives: plan.collectives(), bytes_per_rank, phases, peak_phase, peak_bytes };
    Ok(serde_json::to_string_pretty(&all)? + "\n")
}

/// One kind of memory: a column of the table, and a colour of the bars.
struct Component {
    name: &'static str,
    colour: AnsiColor,
    bytes_of: fn(&PhaseBytes) -> usize,
}

const COMPONENTS: [Component; 6] = [
    Component { name: "parameters", colour: AnsiColor::Blue, bytes_of: |bytes| bytes.parameters },
    Component { name: "gradients", colour: AnsiColor::Yellow, bytes_of: |bytes| bytes.gradients },
    Component { name: "optimizer state", colour: AnsiColor::Magenta, bytes_of: |bytes| bytes.optimizer_state },
    Component { name: "gathered units", colour: AnsiColor::Cyan, bytes_of: |bytes| bytes.gathered_units },
    Component { name: "buckets", colour: AnsiColor::Green, bytes_of: |bytes| bytes.buckets },
    Component { name: "NVMe blocks", colour: AnsiColor::Red, bytes_of: |bytes| bytes.nvme_blocks },
];

/// The plan, in short or in full, and a table of what each rank has in each phase, with a bar for each.
pub(super) fn plan(plan: &Plan, is_verbose: bool, available_bytes: Option<u64>) -> String {
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
    for (line, bar) in lines {
        let _ = write!(text, "\n{}", format!("{line}  {bar}").trim_end());
    }
    let _ =
        write!(text, "\n\nAt most {} on each rank ({peak_phase}). Activations come on top.", format_size(peak as u64));
    if let Some(left) = available_bytes.and_then(|available| available.checked_sub(peak as u64)) {
        let _ = write!(text, " For them {} are left.", format_size(left));
    }
    if bytes.on_nvme > 0 {
        let _ = write!(text, " On NVMe: {} of each rank.", format_size(bytes.on_nvme as u64));
    }
    text + "\n"
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
