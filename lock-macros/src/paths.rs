//! The paths and spans of generated code.

use proc_macro2::{Span, TokenStream};
use quote::{ToTokens, quote, quote_spanned};
use syn::Path;

/// The location of `span` with the hygiene of the macro. Every generated token has such a span: lints recognise it as
/// generated, and errors still point at the user's code.
pub(crate) fn located(span: Span) -> Span {
    span.resolved_at(Span::mixed_site())
}

/// The module of the runtime that expansions use.
pub(crate) struct Runtime<'a> {
    renamed: Option<&'a Path>,
}

impl<'a> Runtime<'a> {
    pub(crate) fn new(renamed: Option<&'a Path>) -> Self {
        Self { renamed }
    }

    /// Its path, with generated tokens at `span`.
    pub(crate) fn at(&self, span: Span) -> TokenStream {
        let span = located(span);
        let root = match self.renamed {
            Some(path) => path.to_token_stream(),
            None => quote_spanned!(span=> ::lock_runtime),
        };
        let private = quote_spanned!(span=> ::__private);
        quote!(#root #private)
    }
}
