//! A comparison for people.

use std::fmt::Write as _;

use accelerate_core::files::in_one_line;
use accelerate_core::names::counted;
use accelerate_core::weight_files::shown;
use anstyle::{AnsiColor, Style};
use serde_json::Value;

use super::super::report::{Align, Table, short};
use super::super::values::ValueDifference;
use super::{Comparison, ObjectComparison, Side, TensorDifference};

/// Lines of each list; --json has all.
const MOST_LINES: usize = 40;

pub(super) fn comparison(comparison: &Comparison) -> String {
    let Comparison { a, b, num_processes, .. } = comparison;
    let mut text = format!("A: {} ({})\n", in_one_line(a), counted(num_processes[0], "process"));
    let _ = writeln!(text, "B: {} ({})\n", in_one_line(b), counted(num_processes[1], "process"));
    text.push_str(&values("accumulation", &comparison.accumulation));
    for (name, compared) in &comparison.objects {
        text.push_str(&object(&shown(name), compared));
    }
    let (words, color) = match comparison.equal {
        true => ("The checkpoints are equal.", AnsiColor::Green),
        false => ("The checkpoints differ.", AnsiColor::Red),
    };
    let style = color.on_default().bold();
    let _ = writeln!(text, "\n{style}{words}{style:#}");
    text
}

fn object(name: &str, compared: &ObjectComparison) -> String {
    if let Some(side) = compared.only_in {
        return format!("{name}: {}\n", only_in(side));
    }
    if compared.is_equal() {
        let tensors = counted(compared.num_tensors, "tensor");
        return format!(
            "{name}: equal{}\n",
            if compared.num_tensors == 0 { String::new() } else { format!(", {tensors}") }
        );
    }
    let mut text = String::new();
    if !compared.tensors.is_empty() {
        let (found, of) = (compared.tensors.len(), counted(compared.num_tensors, "tensor"));
        let _ = writeln!(text, "{name}: {found} of {of} differ");
        text.push_str(&tensors(compared));
    }
    text.push_str(&values(name, &compared.values));
    text
}

fn tensors(compared: &ObjectComparison) -> String {
    let mut table = Table::new(&[
        ("tensor", Align::Left),
        ("different", Align::Right),
        ("elements", Align::Right),
        ("largest absolute", Align::Right),
        ("largest relative", Align::Right),
        ("", Align::Left),
    ]);
    for (name, difference) in compared.tensors.iter().take(MOST_LINES) {
        let number = |number: Option<f64>| number.map_or_else(|| "-".to_owned(), |number| format!("{number:.3e}"));
        let cells = match difference {
            TensorDifference::Numbers(found) => [
                found.num_different.to_string(),
                found.num_elements.to_string(),
                number(found.max_absolute),
                number(found.max_relative),
                match found.num_not_finite {
                    0 => String::new(),
                    others => format!("{others} with NaN or infinity"),
                },
            ],
            other => [String::new(), String::new(), String::new(), String::new(), words(other)],
        };
        table.push(Style::new(), [shown(name)].into_iter().chain(cells).collect());
    }
    table.text("  ") + &rest(compared.tensors.len())
}

fn words(difference: &TensorDifference) -> String {
    match difference {
        TensorDifference::OnlyIn(side) => only_in(*side).to_owned(),
        TensorDifference::Dtypes([a, b]) => format!("{a} in A, {b} in B"),
        TensorDifference::Shapes([a, b]) => format!("shape {a:?} in A, {b:?} in B"),
        TensorDifference::OtherPieces => {
            "in blocks of other elements, which cannot be compared; save both on the same number of processes"
                .to_owned()
        }
        TensorDifference::Numbers(_) => String::new(),
    }
}

fn values(name: &str, found: &[ValueDifference]) -> String {
    if found.is_empty() {
        return String::new();
    }
    let verb = if found.len() == 1 { "differs" } else { "differ" };
    let mut text = format!("{name}: {} {verb}\n", counted(found.len(), "value"));
    let mut table = Table::new(&[("value", Align::Left), ("A", Align::Left), ("B", Align::Left)]);
    let side = |value: &Option<Value>| value.as_ref().map_or_else(|| "-".to_owned(), short);
    for ValueDifference { path, a, b } in found.iter().take(MOST_LINES) {
        let path = if path.is_empty() { "(all)" } else { path };
        table.push(Style::new(), vec![path.to_owned(), side(a), side(b)]);
    }
    text.push_str(&table.text("  "));
    text + &rest(found.len())
}

fn rest(found: usize) -> String {
    match found.checked_sub(MOST_LINES) {
        None | Some(0) => String::new(),
        Some(rest) => format!("  and {rest} more, which --json shows\n"),
    }
}

fn only_in(side: Side) -> &'static str {
    match side {
        Side::A => "only in A",
        Side::B => "only in B",
    }
}
