//! Tables of definitions and what becomes of them.

use super::derive;
use proc_macro2::TokenStream;
use quote::quote;

/// Checks the implementation but for sending, which tests of the trait check with real values.
fn check(definition: TokenStream, header: TokenStream, map: TokenStream, visit: TokenStream) {
    let wanted = quote! {
        #[automatically_derived]
        #header {
            fn try_map_tensors(
                &self,
                __f: &mut dyn ::core::ops::FnMut(
                    &::accelerate::tch::Tensor,
                ) -> ::accelerate::Result<::accelerate::tch::Tensor>,
            ) -> ::accelerate::Result<Self> {
                match self { #map }
            }

            fn for_each_tensor(
                &self,
                __f: &mut dyn ::core::ops::FnMut(&::accelerate::tch::Tensor),
            ) {
                match self { #visit }
            }
        }
    };
    let (found, wanted) = (derive(definition).to_string(), wanted.to_string());
    let wanted = wanted.trim_end_matches('}').trim_end();
    assert_eq!(found.get(..wanted.len()), Some(wanted), "{found}");
}

/// Checks only what stands between `impl` and the brace.
fn check_header(definition: TokenStream, header: TokenStream) {
    let found = derive(definition).to_string();
    let header = header.to_string() + " {";
    assert!(found.contains(&header), "{header}\nis not in\n{found}");
}

/// Checks that nothing but compile errors comes out, with these messages.
fn check_errors(definition: TokenStream, messages: &[&str]) {
    let found = derive(definition).to_string();
    assert!(!found.contains("TensorTree for"), "no error in\n{found}");
    assert_eq!(found.matches("compile_error").count(), messages.len(), "{found}");
    for message in messages {
        assert!(found.contains(message), "{message}\nis not in\n{found}");
    }
}

#[test]
fn named_fields_are_mapped_in_order_and_skipped_ones_cloned() {
    check(
        quote! {
            struct Batch {
                ids: Tensor,
                #[tensor_tree(skip)]
                source: String,
                f: Option<Tensor>,
            }
        },
        quote!(impl ::accelerate::TensorTree for Batch),
        quote! {
            Self { ids: __field_0, source: __field_1, f: __field_2 } => ::core::result::Result::Ok(Self {
                ids: <Tensor as ::accelerate::TensorTree>::try_map_tensors(__field_0, __f)?,
                source: <String as ::core::clone::Clone>::clone(__field_1),
                f: <Option<Tensor> as ::accelerate::TensorTree>::try_map_tensors(__field_2, __f)?
            }),
        },
        quote! {
            Self { ids: __field_0, source: _, f: __field_2 } => {
                <Tensor as ::accelerate::TensorTree>::for_each_tensor(__field_0, __f);
                <Option<Tensor> as ::accelerate::TensorTree>::for_each_tensor(__field_2, __f);
            }
        },
    );
}

#[test]
fn tuple_and_unit_structs_use_the_same_form() {
    check(
        quote!(
            struct Pair(Tensor, #[tensor_tree(skip)] usize);
        ),
        quote!(impl ::accelerate::TensorTree for Pair),
        quote! {
            Self { 0: __field_0, 1: __field_1 } => ::core::result::Result::Ok(Self {
                0: <Tensor as ::accelerate::TensorTree>::try_map_tensors(__field_0, __f)?,
                1: <usize as ::core::clone::Clone>::clone(__field_1)
            }),
        },
        quote! {
            Self { 0: __field_0, 1: _ } => {
                <Tensor as ::accelerate::TensorTree>::for_each_tensor(__field_0, __f);
            }
        },
    );
    check(
        quote!(
            struct Nothing;
        ),
        quote!(impl ::accelerate::TensorTree for Nothing),
        quote!(Self {} => ::core::result::Result::Ok(Self {}),),
        quote!(Self {} => {}),
    );
}

#[test]
fn every_variant_is_an_arm() {
    check(
        quote! {
            enum Output {
                Logits(Tensor),
                Nothing,
            }
        },
        quote!(impl ::accelerate::TensorTree for Output),
        quote! {
            Self::Logits { 0: __field_0 } => ::core::result::Result::Ok(Self::Logits {
                0: <Tensor as ::accelerate::TensorTree>::try_map_tensors(__field_0, __f)?
            }),
            Self::Nothing {} => ::core::result::Result::Ok(Self::Nothing {}),
        },
        quote! {
            Self::Logits { 0: __field_0 } => {
                <Tensor as ::accelerate::TensorTree>::for_each_tensor(__field_0, __f);
            }
            Self::Nothing {} => {}
        },
    );
}

#[test]
fn an_enum_without_variants_matches_on_the_value() {
    let found = derive(quote!(
        enum Never {}
    ))
    .to_string();
    assert_eq!(found.matches(&quote!(match *self {}).to_string()).count(), 2, "{found}");
}

#[test]
fn parameters_get_the_bounds_that_their_fields_need() {
    check_header(
        quote! {
            struct Generic<'a, T: Debug, U, V, const N: usize> where V: Send {
                data: Vec<T>,
                more: Option<T>,
                #[tensor_tree(skip)]
                note: &'a U,
            }
        },
        quote! {
            impl<'a, T: Debug, U, V, const N: usize> ::accelerate::TensorTree for Generic<'a, T, U, V, N>
            where
                V: Send,
                T: ::accelerate::TensorTree,
                U: ::core::clone::Clone
        },
    );
}

#[test]
fn what_belongs_to_a_parameter_is_bounded_itself() {
    check_header(
        quote! {
            struct Held<M: Module> {
                output: M::Output,
                input: Option<<M as Module>::Input>,
            }
        },
        quote! {
            impl<M: Module> ::accelerate::TensorTree for Held<M>
            where
                M::Output: ::accelerate::TensorTree,
                <M as Module>::Input: ::accelerate::TensorTree
        },
    );
}

#[test]
fn a_type_with_the_name_of_a_parameter_elsewhere_is_not_that_parameter() {
    check_header(
        quote! {
            struct Elsewhere<T> {
                a: ::T,
                b: other::T,
                #[tensor_tree(skip)]
                c: fn(T) -> T,
            }
        },
        quote!(impl<T> ::accelerate::TensorTree for Elsewhere<T>),
    );
}

#[test]
fn a_union_is_refused() {
    check_errors(quote!(union Either { a: u32, b: f32 }), &["TensorTree cannot be derived for a union"]);
}

#[test]
fn unknown_and_misplaced_attributes_are_refused_all_at_once() {
    check_errors(
        quote! {
            #[tensor_tree(skip)]
            enum Output {
                #[tensor_tree(skip)]
                A(#[tensor_tree(ignore)] Tensor),
                B { #[tensor_tree] a: Tensor, #[tensor_tree()] b: Tensor },
                C(#[tensor_tree(skip = true, serde::skip)] Tensor),
                D(#[tensor_tree = "skip"] Tensor, #[tensor_tree(1)] Tensor),
            }
        },
        &[
            "has no meaning on a type",
            "has no meaning on a variant",
            "`ignore` is not known here; the only choice is `#[tensor_tree(skip)]`",
            "write `#[tensor_tree(skip)]`",
            "write `#[tensor_tree(skip)]`",
            "`skip` is not known here",
            "`serde::skip` is not known here",
            "write `#[tensor_tree(skip)]`",
            "expected",
        ],
    );
}

#[test]
fn other_attributes_are_left_alone() {
    check_header(
        quote! {
            #[serde(default)]
            struct Batch {
                #[serde(skip)]
                ids: Tensor,
            }
        },
        quote!(impl ::accelerate::TensorTree for Batch),
    );
}
