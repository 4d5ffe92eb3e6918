//! What tokens contain, at any depth.

use proc_macro2::{Spacing, TokenStream, TokenTree};
use syn::ext::IdentExt;
use syn::{Lit, LitStr};

/// Macros with literals that are not format strings.
const UNFORMATTED: [&str; 3] = ["vec", "concat", "stringify"];

/// What may stand before a negated expression in parentheses: `if !(a)` calls no macro.
const KEYWORDS: [&str; 6] = ["if", "while", "match", "return", "in", "else"];

/// All identifiers, without `r#`.
pub(crate) fn idents(tokens: TokenStream) -> Vec<String> {
    let mut names = Vec::new();
    visit(tokens, Place::Code, &mut |token, _| {
        if let TokenTree::Ident(ident) = token {
            names.push(ident.unraw().to_string());
        }
    });
    names
}

/// The names that may be variables: identifiers that are no fields or methods, and captures of format strings.
pub(crate) fn uses(tokens: TokenStream) -> Vec<String> {
    let mut names = Vec::new();
    visit(tokens, Place::Code, &mut |token, place| match token {
        TokenTree::Ident(ident) if place != Place::Member => names.push(ident.unraw().to_string()),
        TokenTree::Literal(literal) if place == Place::Macro => {
            if let Lit::Str(text) = Lit::new(literal) {
                names.extend(captures(&text.value()));
            }
        }
        _ => {}
    });
    names
}

/// All string literals, and whether each may be a format string: it is an argument of a macro.
pub(crate) fn strings(tokens: TokenStream) -> Vec<(LitStr, bool)> {
    let mut literals = Vec::new();
    visit(tokens, Place::Code, &mut |token, place| {
        if let TokenTree::Literal(literal) = token
            && let Lit::Str(text) = Lit::new(literal)
        {
            literals.push((text, place == Place::Macro));
        }
    });
    literals
}

/// The names in `"{id}:{count:width$}"`.
fn captures(text: &str) -> Vec<String> {
    let mut names = Vec::new();
    let mut rest = text;
    while let Some(at) = rest.find('{') {
        rest = &rest[at + 1..];
        if let Some(literal) = rest.strip_prefix('{') {
            rest = literal;
            continue;
        }
        let inside = &rest[..rest.find('}').unwrap_or(rest.len())];
        names.extend(leading_name(inside.trim_start()).map(str::to_owned));
        for (dollar, _) in inside.match_indices('$') {
            let mut words = inside[..dollar].rsplit(|c| !unicode_ident::is_xid_continue(c));
            names.extend(words.next().and_then(leading_name).map(str::to_owned));
        }
    }
    names
}

/// The identifier at the start of `text`.
pub(crate) fn leading_name(text: &str) -> Option<&str> {
    let begins = |c: char| c == '_' || unicode_ident::is_xid_start(c);
    let name = &text[..text.find(|c| !unicode_ident::is_xid_continue(c)).unwrap_or(text.len())];
    name.starts_with(begins).then_some(name)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    Code,
    /// In the arguments of a macro.
    Macro,
    /// After a `.`.
    Member,
}

fn visit(tokens: TokenStream, place: Place, see: &mut impl FnMut(TokenTree, Place)) {
    // The two tokens before.
    let mut before = [None, None];
    for token in tokens {
        let this = token.clone();
        match token {
            TokenTree::Group(group) => {
                let inner = if calls_macro(&before) { Place::Macro } else { place };
                visit(group.stream(), inner, see);
            }
            token => see(token, if is_member(&before) { Place::Member } else { place }),
        }
        before = [before[1].take(), Some(this)];
    }
}

/// `order.` but not `0..`
fn is_member(before: &[Option<TokenTree>; 2]) -> bool {
    let [older, Some(TokenTree::Punct(dot))] = before else { return false };
    let is_range = matches!(
        older,
        Some(TokenTree::Punct(first)) if first.as_char() == '.' && first.spacing() == Spacing::Joint
    );
    dot.as_char() == '.' && !is_range
}

/// `format!`
fn calls_macro(before: &[Option<TokenTree>; 2]) -> bool {
    let [Some(TokenTree::Ident(name)), Some(TokenTree::Punct(sign))] = before else { return false };
    let name = name.to_string();
    sign.as_char() == '!' && !KEYWORDS.contains(&&*name) && !UNFORMATTED.contains(&&*name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_and_methods_are_no_uses() {
        let used = |text: &str| uses(text.parse().unwrap());
        assert_eq!(used("a.id + b.len()"), ["a", "b"]);
        assert_eq!(used("0..id"), ["id"]);
        assert_eq!(used("0..=id"), ["id"]);
        assert_eq!(used("r#type"), ["type"]);
    }

    #[test]
    fn captures_of_format_strings_are_uses() {
        let used = |text: &str| uses(text.parse().unwrap());
        assert_eq!(
            used(r#"format!("{id}:{kind_of:>width$.digits$}:{{no}}:{0}")"#),
            ["format", "id", "kind_of", "width", "digits"]
        );
        assert_eq!(used(r#"String::from("{id}")"#), ["String", "from"]);
        assert_eq!(used(r#"vec!["{id}"]"#), ["vec"]);
        assert_eq!(used(r#"if !("{id}" == x) {}"#), ["if", "x"]);
    }
}
