//! What can be wrong with what a package says of itself.

#[derive(Debug, thiserror::Error)]
pub(crate) enum ExportedModelErrorKind {
    #[error("its description cannot be understood: {reason}; make the package again with `accelerate export-model`")]
    Unreadable { reason: String },
    #[error(
        "its description has version {found}, version {wanted} is wanted; make the package with the `accelerate export-model` \
         of the same release"
    )]
    Version { found: u32, wanted: u32 },
    #[error("its description names {name:?} twice; the package is damaged, make it again")]
    NameTwice { name: String },
    #[error(
        "its description has {alias:?} as another name of {of:?}, which is not there; the package is damaged, make it again"
    )]
    AliasOfNothing { alias: String, of: String },
    #[error(
        "its description leaves a size of {name:?} open, which only inputs may; the package is damaged, make it again"
    )]
    OpenShape { name: String },
    #[error(
        "its description has a gradient of parameter {position}, twice or of none, for there are {num_parameters}; the package is \
         damaged, make it again"
    )]
    Gradient { position: usize, num_parameters: usize },
}
