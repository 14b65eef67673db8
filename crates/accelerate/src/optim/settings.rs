//! What the builders of optimizers have in common.

/// Methods of a builder that set one field each: documentation, `name: type => field;`.
macro_rules! settings {
    ($($(#[$attribute:meta])* $name:ident: $type:ty => $($field:ident).+;)*) => {$(
        $(#[$attribute])*
        #[must_use]
        pub fn $name(mut self, $name: $type) -> Self {
            self.$($field).+ = $name;
            self
        }
    )*};
}
