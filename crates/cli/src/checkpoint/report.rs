//! Values and bars that the subcommands share.

use accelerate_core::weight_files::shown;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::Value;

pub(super) use crate::table::{Align, Table, age};

/// A value in one short line.
pub(super) fn short(value: &Value) -> String {
    shown(&value.to_string())
}

/// A bar over so many bytes on standard error, which is drawn at a terminal only.
pub(super) fn progress_bar(num_bytes: u64) -> ProgressBar {
    const TEMPLATE: &str = "{bar:40} {bytes}/{total_bytes} {bytes_per_sec} {eta}";
    let bar = ProgressBar::new(num_bytes);
    match ProgressStyle::with_template(TEMPLATE) {
        Ok(style) => bar.with_style(style),
        // Only a template that is wrong has another style.
        Err(_) => bar,
    }
}
