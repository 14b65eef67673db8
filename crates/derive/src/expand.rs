//! From the definition of a type to its implementation of the trait.

use crate::attribute::{self, Errors};
use crate::bounds;
use proc_macro2::TokenStream;
use quote::{format_ident, quote, quote_spanned};
use syn::spanned::Spanned;
use syn::{Data, DeriveInput, Error, Fields, Ident, Member, Type};

/// The implementation, or compile errors in its place.
pub(crate) fn derive(input: TokenStream) -> TokenStream {
    syn::parse2(input).and_then(implementation).unwrap_or_else(Error::into_compile_error)
}

/// A struct's fields, or those of one variant of an enum.
struct Shape {
    /// `Self`, or `Self::Variant`.
    constructor: TokenStream,
    fields: Vec<Field>,
}

struct Field {
    member: Member,
    /// What the field is called in the arms of a match. Not its own name, which might be that of another
    /// local variable.
    binding: Ident,
    ty: Type,
    skipped: bool,
}

fn implementation(mut input: DeriveInput) -> syn::Result<TokenStream> {
    let mut errors = Errors::default();
    attribute::refuse(&input.attrs, "a type", &mut errors);
    let shapes = shapes(&input, &mut errors)?;
    errors.into_result()?;

    let types = |skipped| {
        let fields = shapes.iter().flat_map(|shape| &shape.fields);
        fields.filter(move |field| field.skipped == skipped).map(|field| &field.ty)
    };
    let (mapped, cloned): (Vec<&Type>, Vec<&Type>) = (types(false).collect(), types(true).collect());
    bounds::add(&mut input.generics, &mapped, &cloned);

    let name = &input.ident;
    let (impl_generics, type_generics, where_clause) = input.generics.split_for_impl();
    let map = match_over(&shapes, Shape::map_arm);
    let visit = match_over(&shapes, Shape::visit_arm);
    let sending = sending(&shapes);
    Ok(quote! {
        #[automatically_derived]
        impl #impl_generics ::accelerate::TensorTree for #name #type_generics #where_clause {
            fn try_map_tensors(
                &self,
                __f: &mut dyn ::core::ops::FnMut(
                    &::accelerate::tch::Tensor,
                ) -> ::accelerate::Result<::accelerate::tch::Tensor>,
            ) -> ::accelerate::Result<Self> {
                #map
            }

            fn for_each_tensor(
                &self,
                __f: &mut dyn ::core::ops::FnMut(&::accelerate::tch::Tensor),
            ) {
                #visit
            }

            #sending
        }
    })
}

/// How a value travels to another process. Nothing is known about skipped fields, so with one of them the trait's own
/// answer stands, which is an error that names the type.
fn sending(shapes: &[Shape]) -> TokenStream {
    if shapes.is_empty() || shapes.iter().flat_map(|shape| &shape.fields).any(|field| field.skipped) {
        return TokenStream::new();
    }
    let pack = shapes.iter().enumerate().map(|(number, shape)| shape.pack_arm(number as u32));
    let unpack = shapes.iter().enumerate().map(|(number, shape)| shape.unpack_arm(number as u32));
    quote! {
        fn pack(&self, __parcel: &mut ::accelerate::Parcel) -> ::accelerate::Result<()> {
            match self { #(#pack)* }
        }

        fn unpack(__parcel: &mut ::accelerate::Parcel) -> ::accelerate::Result<Self> {
            match __parcel.take::<::core::primitive::u32>()? {
                #(#unpack)*
                __number => ::core::result::Result::Err(__parcel.unknown_variant(__number)),
            }
        }
    }
}

fn shapes(input: &DeriveInput, errors: &mut Errors) -> syn::Result<Vec<Shape>> {
    match &input.data {
        Data::Struct(data) => Ok(vec![Shape::new(quote!(Self), &data.fields, errors)]),
        Data::Enum(data) => Ok(data
            .variants
            .iter()
            .map(|variant| {
                attribute::refuse(&variant.attrs, "a variant", errors);
                let name = &variant.ident;
                Shape::new(quote!(Self::#name), &variant.fields, errors)
            })
            .collect()),
        Data::Union(data) => Err(Error::new(
            data.union_token.span(),
            "TensorTree cannot be derived for a union, because nothing says which of its fields is in use; \
             use an enum",
        )),
    }
}

impl Shape {
    fn new(constructor: TokenStream, fields: &Fields, errors: &mut Errors) -> Self {
        let fields = fields
            .members()
            .zip(fields)
            .enumerate()
            .map(|(number, (member, field))| Field {
                member,
                binding: format_ident!("__field_{number}"),
                ty: field.ty.clone(),
                skipped: attribute::is_skipped(field, errors),
            })
            .collect();
        Self { constructor, fields }
    }

    /// Takes the value apart and puts it together again from mapped and cloned fields. Members are written
    /// as `name: value`, which tuples understand too (`0: value`).
    fn map_arm(&self) -> TokenStream {
        let Self { constructor, fields } = self;
        let pattern = fields.iter().map(|Field { member, binding, .. }| quote!(#member: #binding));
        let values = fields.iter().map(|Field { member, binding, ty, skipped }| {
            // Spanned as the field's type, so that a missing implementation is reported there.
            let value = if *skipped {
                quote_spanned!(ty.span()=> <#ty as ::core::clone::Clone>::clone(#binding))
            } else {
                quote_spanned! {ty.span()=>
                    <#ty as ::accelerate::TensorTree>::try_map_tensors(#binding, __f)?
                }
            };
            quote!(#member: #value)
        });
        quote! {
            #constructor { #(#pattern),* } => ::core::result::Result::Ok(#constructor { #(#values),* }),
        }
    }

    fn pack_arm(&self, number: u32) -> TokenStream {
        let Self { constructor, fields } = self;
        let pattern = fields.iter().map(|Field { member, binding, .. }| quote!(#member: #binding));
        let packs = fields.iter().map(|Field { binding, ty, .. }| {
            quote_spanned! {ty.span()=>
                <#ty as ::accelerate::TensorTree>::pack(#binding, __parcel)?;
            }
        });
        quote! {
            #constructor { #(#pattern),* } => {
                __parcel.put(&#number)?;
                #(#packs)*
                ::core::result::Result::Ok(())
            }
        }
    }

    fn unpack_arm(&self, number: u32) -> TokenStream {
        let Self { constructor, fields } = self;
        let values = fields.iter().map(|Field { member, ty, .. }| {
            quote_spanned!(ty.span()=> #member: <#ty as ::accelerate::TensorTree>::unpack(__parcel)?)
        });
        quote! {
            #number => ::core::result::Result::Ok(#constructor { #(#values),* }),
        }
    }

    fn visit_arm(&self) -> TokenStream {
        let Self { constructor, fields } = self;
        let pattern = fields.iter().map(|Field { member, binding, skipped, .. }| match skipped {
            true => quote!(#member: _),
            false => quote!(#member: #binding),
        });
        let visits = fields.iter().filter(|field| !field.skipped).map(|Field { binding, ty, .. }| {
            quote_spanned! {ty.span()=>
                <#ty as ::accelerate::TensorTree>::for_each_tensor(#binding, __f);
            }
        });
        quote! {
            #constructor { #(#pattern),* } => { #(#visits)* }
        }
    }
}

fn match_over(shapes: &[Shape], arm: impl Fn(&Shape) -> TokenStream) -> TokenStream {
    if shapes.is_empty() {
        // A reference to an enum without variants has a value to match on, the enum has none.
        return quote!(match *self {});
    }
    let arms = shapes.iter().map(arm);
    quote!(match self { #(#arms)* })
}

#[cfg(test)]
mod tests;
