//! What is in a new project. The files are in `templates`: what all projects share, and what each of them trains.

use clap::ValueEnum;

use super::library::{BUILD_SCRIPT, Source};

/// What a new project trains.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Template {
    /// Words are classified: which name people, which places?
    Nlp,
    /// Images are classified by a small convolutional network
    Cv,
    /// A small transformer learns to predict text, letter by letter
    Lm,
}

/// A file of the new project.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct File {
    pub(super) path: &'static str,
    pub(super) text: String,
}

impl Template {
    /// All files of the project `name`.
    pub(super) fn files(self, name: &str, source: &Source, is_in_workspace: bool) -> Vec<File> {
        // Cargo would take the project for a member of the workspace around it, which does not know of it.
        let workspace = if is_in_workspace { "\n[workspace]\n" } else { "" };
        let values = [
            ("{{name}}", name),
            ("{{crate}}", &name.replace('-', "_")),
            ("{{purpose}}", self.purpose()),
            ("{{rust_version}}", env!("CARGO_PKG_RUST_VERSION")),
            ("{{source}}", &source.in_manifest()),
            ("{{workspace}}", workspace),
        ];
        let filled = |text: &str| values.iter().fold(text.to_owned(), |text, (mark, value)| text.replace(mark, value));
        let (model, data) = self.own();
        [
            ("Cargo.toml", include_str!("../../templates/common/manifest.toml")),
            ("build.rs", BUILD_SCRIPT),
            ("rustfmt.toml", include_str!("../../templates/common/rustfmt.toml")),
            (".gitignore", include_str!("../../templates/common/gitignore")),
            ("README.md", include_str!("../../templates/common/readme.md")),
            ("src/main.rs", include_str!("../../templates/common/src/main.rs")),
            ("src/lib.rs", include_str!("../../templates/common/src/lib.rs")),
            ("src/model.rs", model),
            ("src/data.rs", data),
            ("tests/training.rs", include_str!("../../templates/common/tests/training.rs")),
        ]
        .map(|(path, text)| File { path, text: filled(text) })
        .to_vec()
    }

    /// Model and data.
    fn own(self) -> (&'static str, &'static str) {
        match self {
            Template::Nlp => {
                (include_str!("../../templates/nlp/model.rs"), include_str!("../../templates/nlp/data.rs"))
            }
            Template::Cv => (include_str!("../../templates/cv/model.rs"), include_str!("../../templates/cv/data.rs")),
            Template::Lm => (include_str!("../../templates/lm/model.rs"), include_str!("../../templates/lm/data.rs")),
        }
    }

    fn purpose(self) -> &'static str {
        match self {
            Template::Nlp => "Learns which words of a sentence name people, and which name places.",
            Template::Cv => "Learns to tell noisy patterns apart.",
            Template::Lm => "Learns to predict the next letter of a text.",
        }
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    fn no_mark_is_left_in_a_project(#[values(Template::Nlp, Template::Cv, Template::Lm)] template: Template) {
        for file in template.files("my-demo", &Source::Named { path: "clone".into() }, true) {
            assert!(!file.text.contains("{{"), "{}:\n{}", file.path, file.text);
            assert!(file.text.ends_with('\n') && !file.text.contains("\n\n\n"), "{}", file.path);
        }
    }

    #[rstest]
    #[case(Source::BuiltFrom { path: "clone".into() }, false, "path = \"clone\"")]
    #[case(Source::Named { path: "a \"clone\"".into() }, true, "path = \"a \\\"clone\\\"\"")]
    fn the_manifest_names_the_library(#[case] source: Source, #[case] is_in_workspace: bool, #[case] want: &str) {
        let files = Template::Nlp.files("my-demo", &source, is_in_workspace);
        let manifest = &files[0].text;
        assert!(manifest.contains("name = \"my-demo\"") && manifest.contains(want), "{manifest}");
        assert_eq!(manifest.contains("\n[workspace]\n"), is_in_workspace, "{manifest}");
        assert!(files.iter().any(|file| file.path == "src/main.rs" && file.text.contains("my_demo::train")));
    }
}
