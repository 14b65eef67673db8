//! The configuration as a table.

use super::{PartialRunConfig, RunConfig, settings};
use crate::settings::Origin;
use std::fmt;

/// A line for each setting that has a value: its path, the value and where that came from. Settings that somebody has said
/// come first. What only a launcher reads is shown where somebody has said it: a program does not know the rest. With `{:#}`
/// settings with their defaults are left out.
impl fmt::Display for RunConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let said = PartialRunConfig::from(self.clone());
        let rows: Vec<_> = settings()
            .filter(|setting| {
                self.origin(setting.path) != &Origin::Default || !(f.alternate() || setting.declaration.is_for_launcher)
            })
            .filter_map(|setting| Some((setting.path, said.text(setting)?, self.origin(setting.path))))
            .collect();
        let width = |column: fn(&(&str, String, &Origin)) -> usize| rows.iter().map(column).max().unwrap_or(0);
        let (paths, values) = (width(|row| row.0.len()), width(|row| row.1.chars().count()).min(40));
        let (first, second): (Vec<_>, Vec<_>) = rows.iter().partition(|row| *row.2 != Origin::Default);
        for (path, value, origin) in first.into_iter().chain(second) {
            writeln!(f, "{path:paths$}  {value:values$}  {origin}")?;
        }
        Ok(())
    }
}
