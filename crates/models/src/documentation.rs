//! The chapter of the book about models as documentation tests, which the main crate cannot have: it does not know of models.

#[doc = include_str!("../../../docs/src/models.md")]
struct Models;
