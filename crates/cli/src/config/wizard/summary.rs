//! What will be written, before it is written.

use accelerate_core::config::{
    ConfigFile, FileFormat, PartialRunConfig, RunConfig, is_in_files_of_reference, settings,
};

use crate::print_message;

/// Shows the file, and what is worth knowing of it.
pub(super) fn print(said: &PartialRunConfig, run: &RunConfig, num_gpus: usize) {
    print_message("\nThis is the configuration:\n");
    for line in ConfigFile::write(said, FileFormat::Yaml).lines() {
        print_message(&format!("  {line}"));
    }
    for warning in run.warnings(num_gpus) {
        print_message(&format!("Note: {warning}."));
    }
    let own: Vec<_> = settings()
        .filter(|setting| said.in_file().text(setting).is_some() && !is_in_files_of_reference(setting))
        .map(|setting| setting.key())
        .collect();
    if !own.is_empty() {
        print_message(&format!("Note: Python Accelerate does not read a file with {}.", own.join(", ")));
    }
}
