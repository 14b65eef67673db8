//! Which type parameters need which bounds.

use quote::{ToTokens, quote};
use std::collections::BTreeSet;
use syn::visit::{self, Visit};
use syn::{Generics, Ident, Type, TypePath, WherePredicate, parse_quote};

/// Adds to `generics` what the fields need: `TensorTree` for parameters in `mapped` field types, `Clone` for
/// those in `cloned` ones.
///
/// Parameters are bounded, not whole field types: a bound on the type of a field that contains the type
/// being defined would refer to itself.
pub(crate) fn add(generics: &mut Generics, mapped: &[&Type], cloned: &[&Type]) {
    let parameters: BTreeSet<Ident> = generics.type_params().map(|parameter| parameter.ident.clone()).collect();
    let mut predicates: Vec<WherePredicate> = Vec::new();
    for (types, bound) in [(mapped, quote!(::accelerate::TensorTree)), (cloned, quote!(::core::clone::Clone))] {
        let mut uses = Uses { parameters: &parameters, found: Vec::new() };
        types.iter().for_each(|ty| uses.visit_type(ty));
        predicates.extend(uses.found.iter().map(|used| -> WherePredicate { parse_quote!(#used: #bound) }));
    }
    if !predicates.is_empty() {
        generics.make_where_clause().predicates.extend(predicates);
    }
}

/// The uses of type parameters inside types: `T` itself, or something of it such as `T::Output`.
struct Uses<'a> {
    parameters: &'a BTreeSet<Ident>,
    found: Vec<TypePath>,
}

impl<'ast> Visit<'ast> for Uses<'_> {
    fn visit_type_path(&mut self, used: &'ast TypePath) {
        let of_parameter = match &used.qself {
            // <T as Trait>::Name needs its own bound; T does not.
            Some(of) => self.mentions_parameter(&of.ty),
            None => used
                .path
                .segments
                .first()
                .is_some_and(|first| used.path.leading_colon.is_none() && self.parameters.contains(&first.ident)),
        };
        if of_parameter {
            let known = |found: &TypePath| found.to_token_stream().to_string() == used.to_token_stream().to_string();
            if !self.found.iter().any(known) {
                self.found.push(used.clone());
            }
            return;
        }
        visit::visit_type_path(self, used);
    }

    /// The types in a function pointer are not values inside the field.
    fn visit_type_bare_fn(&mut self, _: &'ast syn::TypeBareFn) {}
}

impl Uses<'_> {
    fn mentions_parameter(&self, ty: &Type) -> bool {
        let mut inner = Uses { parameters: self.parameters, found: Vec::new() };
        inner.visit_type(ty);
        !inner.found.is_empty()
    }
}
