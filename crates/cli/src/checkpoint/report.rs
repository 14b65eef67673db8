//! Values and tables that the subcommands share.

use accelerate_core::weight_files::shown;
use serde_json::Value;

pub(super) use crate::table::{Align, Table, age};

/// A value in one short line.
pub(super) fn short(value: &Value) -> String {
    shown(&value.to_string())
}
