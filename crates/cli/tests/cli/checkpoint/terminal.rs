//! What the commands show at a terminal.

use rstest::rstest;
use serde_json::json;

use super::folders::{Tensor, Values, write_checkpoint};
use super::project;
use crate::support::accelerate;
use crate::terminal::at_terminal_of;

/// Lines that a terminal breaks are no table, and a bar for milliseconds is a flicker.
#[rstest]
#[case("ls", 70)]
#[case("ls", 40)]
#[case("ls checkpoints/checkpoint_2 --tensors", 50)]
#[case("diff checkpoints/checkpoint_2 other", 50)]
#[case("verify checkpoints/checkpoint_2 other", 100)]
fn at_a_terminal_there_are_whole_lines_and_no_bar(#[case] line: &str, #[case] columns: u16) {
    let project = project();
    let other = [Tensor::f32("model", "weight", &[1.0])];
    write_checkpoint(&project.path().join("other"), 1, &other, &Values::from([("scheduler", json!({ "a": 1 }))]));
    let mut command = accelerate();
    command.arg("checkpoint").args(line.split(' ')).current_dir(project.path());
    let (screen, _) = at_terminal_of(command, columns);
    let plain = anstream::adapter::strip_str(&screen).to_string();
    assert!(!screen.contains('\r') && !screen.contains("\u{1b}[2K"), "{screen:?}");
    let is_row = |line: &&str| !line.contains("; accumulation step ");
    assert!(plain.lines().filter(is_row).all(|line| line.chars().count() <= columns.into()), "{plain}");
    assert!(plain.lines().count() > 1, "{plain}");
}
