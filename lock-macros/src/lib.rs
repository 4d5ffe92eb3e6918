//! The `#[distributed_lock]` attribute. Its documentation is in `lock-runtime`, which re-exports it. One
//! version of `lock-runtime` works with exactly one version of this crate.

mod args;
mod argument_names;
mod check;
mod diagnostics;
mod duration;
mod expand;
#[cfg(test)]
mod hostile_input;
mod item;
mod key;
mod literal_text;
mod on_conflict;
mod params;
mod paths;
mod site;
mod template;
mod tokens;
mod value;

use proc_macro2::TokenStream;
use quote::quote;

use crate::args::Args;
use crate::diagnostics::Errors;
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
        // A parameter that only the key uses is not reported as unused.
        quiet = quote!(#[allow(unused_variables)]);
    }
    // The item is emitted too, so that its callers and the IDE still see it.
    let errors = errors.into_compile_errors();
    quote!(#errors #quiet #item)
}
