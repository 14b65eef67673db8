//! Reading of `#[tensor_tree(...)]`.

use proc_macro2::Span;
use syn::spanned::Spanned;
use syn::{Attribute, Error, Field, Meta, Path, Token, punctuated::Punctuated};

/// Collects errors, so that a user sees all of them in one compilation.
#[derive(Default)]
pub(crate) struct Errors(Option<Error>);

impl Errors {
    pub(crate) fn push(&mut self, error: Error) {
        match &mut self.0 {
            Some(errors) => errors.combine(error),
            None => self.0 = Some(error),
        }
    }

    pub(crate) fn into_result(self) -> syn::Result<()> {
        self.0.map_or(Ok(()), Err)
    }
}

/// Whether the field is marked `#[tensor_tree(skip)]`.
pub(crate) fn is_skipped(field: &Field, errors: &mut Errors) -> bool {
    let mut skipped = false;
    for attribute in field.attrs.iter().filter(|attribute| is_ours(attribute)) {
        match arguments(attribute) {
            Ok(arguments) => {
                for argument in arguments {
                    if matches!(&argument, Meta::Path(path) if path.is_ident("skip")) {
                        skipped = true;
                    } else {
                        errors.push(unknown(argument.path(), argument.span()));
                    }
                }
            }
            Err(error) => errors.push(error),
        }
    }
    skipped
}

/// Reports `#[tensor_tree(...)]` where it means nothing: on the type itself or on a variant.
pub(crate) fn refuse(attributes: &[Attribute], place: &str, errors: &mut Errors) {
    for attribute in attributes.iter().filter(|attribute| is_ours(attribute)) {
        let message =
            format!("`#[tensor_tree(...)]` has no meaning on {place}; put it on a field that holds no tensors");
        errors.push(Error::new_spanned(attribute, message));
    }
}

fn is_ours(attribute: &Attribute) -> bool {
    attribute.path().is_ident("tensor_tree")
}

fn arguments(attribute: &Attribute) -> syn::Result<Punctuated<Meta, Token![,]>> {
    let Meta::List(list) = &attribute.meta else {
        return Err(Error::new_spanned(attribute, "write `#[tensor_tree(skip)]`"));
    };
    let arguments = list.parse_args_with(Punctuated::parse_terminated)?;
    if arguments.is_empty() {
        return Err(Error::new_spanned(attribute, "write `#[tensor_tree(skip)]`"));
    }
    Ok(arguments)
}

fn unknown(path: &Path, span: Span) -> Error {
    let segments: Vec<String> = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
    let name = segments.join("::");
    Error::new(span, format!("`{name}` is not known here; the only choice is `#[tensor_tree(skip)]`"))
}
