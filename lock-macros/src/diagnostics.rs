//! Collects errors and formats them.

use std::ops::Range;

use proc_macro2::{Span, TokenStream};
use quote::ToTokens;
use syn::{Error, LitStr};

/// All errors of one use of the attribute.
#[derive(Default)]
pub(crate) struct Errors(Vec<Error>);

impl Errors {
    pub(crate) fn push(&mut self, span: Span, message: impl std::fmt::Display) {
        self.0.push(Error::new(span, message));
    }

    /// Marks all of `tokens`, even if their spans cannot be joined.
    pub(crate) fn push_over(&mut self, tokens: impl ToTokens, message: impl std::fmt::Display) {
        self.0.push(Error::new_spanned(tokens, message));
    }

    pub(crate) fn push_error(&mut self, error: Error) {
        self.0.push(error);
    }

    pub(crate) fn push_fault(&mut self, literal: &LitStr, fault: &Fault) {
        let span = subspan(literal, &fault.range).unwrap_or(literal.span());
        self.push(span, fault.draw(&literal.value()));
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    #[cfg(test)]
    pub(crate) fn messages(self) -> Vec<String> {
        self.0.iter().map(Error::to_string).collect()
    }

    pub(crate) fn into_compile_errors(self) -> TokenStream {
        self.0.into_iter().flat_map(Error::into_compile_error).collect()
    }
}

/// An error in a range of a string literal.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    pub(crate) range: Range<usize>,
    pub(crate) message: String,
    pub(crate) help: Option<String>,
}

impl Fault {
    pub(crate) fn new(range: Range<usize>, message: impl Into<String>) -> Self {
        Self { range, message: message.into(), help: None }
    }

    #[must_use]
    pub(crate) fn help(self, help: impl Into<String>) -> Self {
        Self { help: Some(help.into()), ..self }
    }

    /// The message with the range underlined. Stable rustc has no span for a part of a literal.
    fn draw(&self, text: &str) -> String {
        let width = |range| text.get(range).map_or(0, |part: &str| part.escape_debug().count());
        let before = " ".repeat(width(0..self.range.start));
        let marks = "^".repeat(width(self.range.clone()).max(1));
        let shown = text.escape_debug();
        let mut drawn = format!("{}\n\n  \"{shown}\"\n   {before}{marks}", self.message);
        if let Some(help) = &self.help {
            drawn.push_str("\nhelp: ");
            drawn.push_str(help);
        }
        drawn
    }
}

/// The span of the range, if the compiler provides one and the literal has no escapes.
fn subspan(literal: &LitStr, range: &Range<usize>) -> Option<Span> {
    let token = literal.token();
    let plain = token.to_string().len() == literal.value().len() + 2;
    if !plain || range.is_empty() {
        return None;
    }
    token.subspan(range.start + 1..range.end + 1)
}

/// The candidate that `word` probably means.
pub(crate) fn closest<'a>(
    word: &str,
    candidates: impl IntoIterator<Item = &'a str>,
) -> Option<&'a str> {
    let allowed = word.chars().count().div_ceil(3);
    candidates
        .into_iter()
        .map(|candidate| (distance(word, candidate), candidate))
        .filter(|(distance, _)| *distance <= allowed)
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}

/// Levenshtein distance, with a swap of neighbours as one step.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut older: Vec<usize> = Vec::new();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    let mut last = None;
    for (i, x) in a.chars().enumerate() {
        let mut next = vec![i + 1];
        for (j, &y) in b.iter().enumerate() {
            let mut best = (row[j] + usize::from(x != y)).min(row[j + 1] + 1).min(next[j] + 1);
            if j > 0 && last == Some(y) && b[j - 1] == x {
                best = best.min(older[j - 1] + 1);
            }
            next.push(best);
        }
        older = std::mem::replace(&mut row, next);
        last = Some(x);
    }
    row[b.len()]
}

/// `` `a`, `b`, `c` ``
pub(crate) fn listed<'a>(names: impl IntoIterator<Item = &'a str>) -> String {
    names.into_iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_typo_is_recognised() {
        let names = ["ttl", "wait", "on_conflict", "key", "keys"];
        assert_eq!(closest("tll", names), Some("ttl"));
        assert_eq!(closest("tlt", names), Some("ttl"));
        assert_eq!(closest("onconflict", names), Some("on_conflict"));
        assert_eq!(closest("wiat", names), Some("wait"));
        assert_eq!(closest("kex", names), Some("key"));
    }

    #[test]
    fn another_word_is_not_a_typo() {
        assert_eq!(closest("colour", ["ttl", "wait"]), None);
        assert_eq!(closest("", ["ttl"]), None);
        assert_eq!(closest("ab", []), None);
    }

    #[test]
    fn a_swap_is_one_step() {
        assert_eq!(distance("wiat", "wait"), 1);
        assert_eq!(distance("", "abc"), 3);
        assert_eq!(distance("kitten", "sitting"), 3);
    }

    #[test]
    fn the_caret_is_below_the_range() {
        let drawn = Fault::new(7..10, "no `idd`").help("try `id`").draw("order:<idd>");
        let expected = "no `idd`\n\n  \"order:<idd>\"\n          ^^^\nhelp: try `id`";
        assert_eq!(drawn, expected);
    }

    #[test]
    fn the_caret_accounts_for_escapes() {
        let drawn = Fault::new(2..3, "bad").draw("\n\nx");
        assert_eq!(drawn, "bad\n\n  \"\\n\\nx\"\n       ^");
    }
}
