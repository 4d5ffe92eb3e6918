//! What tokens contain, at any depth.

use proc_macro2::{TokenStream, TokenTree};
use syn::ext::IdentExt;
use syn::{Lit, LitStr};

/// All identifiers, without `r#`.
pub(crate) fn idents(tokens: TokenStream) -> Vec<String> {
    let mut names = Vec::new();
    visit(tokens, &mut |token| {
        if let TokenTree::Ident(ident) = token {
            names.push(ident.unraw().to_string());
        }
    });
    names
}

/// All string literals.
pub(crate) fn strings(tokens: TokenStream) -> Vec<LitStr> {
    let mut literals = Vec::new();
    visit(tokens, &mut |token| {
        if let TokenTree::Literal(literal) = token
            && let Lit::Str(text) = Lit::new(literal)
        {
            literals.push(text);
        }
    });
    literals
}

fn visit(tokens: TokenStream, see: &mut impl FnMut(TokenTree)) {
    for token in tokens {
        match token {
            TokenTree::Group(group) => visit(group.stream(), see),
            token => see(token),
        }
    }
}
