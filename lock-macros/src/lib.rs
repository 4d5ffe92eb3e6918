//! The `#[distributed_lock]` attribute. Public API docs are in `lock-runtime`, which re-exports it; one
//! version of `lock-runtime` works with exactly one version of this crate.

mod args;
mod check;
mod diag;
mod duration;
mod expand;
mod item;
mod key;
#[cfg(test)]
mod noise;
mod params;
mod paths;
mod policy;
mod site;
mod template;
mod value;
mod vocabulary;

use proc_macro2::TokenStream;
use quote::quote;

use crate::args::Args;
use crate::diag::Errors;
use crate::item::Function;
use crate::params::Params;

// `lock-runtime` documents the attribute. Text of this crate would be repeated at the end of that page.
#[cfg_attr(doc, doc = "Runs an async function only while a distributed lock is held.")]
#[cfg_attr(not(doc), allow(missing_docs))]
#[proc_macro_attribute]
pub fn distributed_lock(
    args: proc_macro::TokenStream,
    item: proc_macro::TokenStream,
) -> proc_macro::TokenStream {
    attribute(args.into(), &item.into()).into()
}

fn attribute(args: TokenStream, item: &TokenStream) -> TokenStream {
    let mut errors = Errors::default();
    let args = Args::parse(args, &mut errors);
    let function = Function::parse(item.clone(), &mut errors);
    let mut quiet = TokenStream::new();
    if let Some(function) = function {
        let params = Params::new(&function.sig);
        check::check(&args, &function, &params, &mut errors);
        if errors.is_empty() {
            return expand::expand(&args, &function, &params);
        }
        // A parameter that only the key uses is no second mistake.
        quiet = quote!(#[allow(unused_variables)]);
    }
    // The item stays, so that its callers and the IDE do not lose it over a mistake in the attribute.
    let errors = errors.into_compile_errors();
    quote!(#errors #quiet #item)
}
