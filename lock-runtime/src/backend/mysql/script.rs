//! Texts of statements, and values in them.
//!
//! Every value is a number or hexadecimal digits, so none depends on quotes, escapes or character sets of a session.

use std::fmt::Write;

use crate::base::key::Key;

/// A text with named gaps: `:name`.
#[derive(Debug)]
pub(crate) struct Template(Vec<Piece>);

#[derive(Debug)]
struct Piece {
    text: String,
    /// The name of the value that follows the text.
    gap: Option<String>,
}

impl Template {
    pub(crate) fn parse(text: &str) -> Self {
        let mut pieces = Vec::new();
        let mut parts = text.split(':');
        let mut before = parts.next().unwrap_or_default().to_owned();
        for part in parts {
            let end = part.find(|it: char| it != '_' && !it.is_ascii_lowercase());
            let (name, rest) = part.split_at(end.unwrap_or(part.len()));
            let text = std::mem::replace(&mut before, rest.to_owned());
            pieces.push(Piece { text, gap: Some(name.to_owned()) });
        }
        pieces.push(Piece { text: before, gap: None });
        Self(pieces)
    }
}

/// A value for a gap.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Literal<'a> {
    Bytes(&'a [u8]),
    Number(i64),
    /// Part of a statement.
    Text(&'a str),
}

/// Statements that are sent together. The server runs them in order, up to the first that fails.
#[derive(Debug, Default)]
pub(crate) struct SqlScript(String);

impl SqlScript {
    /// A script of one statement, or of those in one template.
    pub(crate) fn of(template: &Template, values: &[(&str, Literal<'_>)]) -> Self {
        Self::default().then(template, values)
    }

    pub(crate) fn verbatim(statement: &str) -> Self {
        Self(statement.to_owned())
    }

    /// The script with another statement appended.
    #[must_use]
    pub(crate) fn then(mut self, template: &Template, values: &[(&str, Literal<'_>)]) -> Self {
        self.add(template, values);
        self
    }

    pub(crate) fn add(&mut self, template: &Template, values: &[(&str, Literal<'_>)]) {
        if !self.0.is_empty() {
            self.0.push_str(";\n");
        }
        for piece in &template.0 {
            self.0.push_str(&piece.text);
            let Some(gap) = &piece.gap else { continue };
            match values.iter().find(|(name, _)| name == gap) {
                Some((_, Literal::Bytes(bytes))) => push_bytes(&mut self.0, &[bytes]),
                Some((_, Literal::Number(number))) => drop(write!(self.0, "{number}")),
                Some((_, Literal::Text(text))) => self.0.push_str(text),
                None => self.0.push_str("NULL"),
            }
        }
    }

    pub(crate) fn text(&self) -> &str {
        &self.0
    }
}

/// Writes `parts`, one after another, as one literal of bytes.
pub(crate) fn push_bytes(text: &mut String, parts: &[&[u8]]) {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    text.push_str("x'");
    for byte in parts.iter().flat_map(|part| part.iter()) {
        text.push(char::from(DIGITS[usize::from(byte >> 4)]));
        text.push(char::from(DIGITS[usize::from(byte & 15)]));
    }
    text.push('\'');
}

/// Literals of bytes, separated by commas.
#[derive(Debug, Default)]
pub(crate) struct ByteList(String);

impl ByteList {
    /// The keys.
    pub(crate) fn of_keys<'a>(keys: impl IntoIterator<Item = &'a Key>) -> Self {
        let mut list = Self::default();
        for key in keys {
            list.push(&[key.as_str().as_bytes()]);
        }
        list
    }

    /// Adds `parts`, one after another, as one literal.
    pub(crate) fn push(&mut self, parts: &[&[u8]]) {
        if !self.0.is_empty() {
            self.0.push(',');
        }
        push_bytes(&mut self.0, parts);
    }

    pub(crate) fn as_literal(&self) -> Literal<'_> {
        // A list without elements is not valid SQL.
        Literal::Text(if self.0.is_empty() { "NULL" } else { &self.0 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_numbers_and_hexadecimal_digits() {
        let template = Template::parse("SELECT :bytes, :number, :list, :missing");
        let mut list = ByteList::default();
        list.push(&[b"a'", b"\\"]);
        list.push(&[b""]);
        let script = SqlScript::of(
            &template,
            &[
                ("bytes", Literal::Bytes(b"\"\0")),
                ("number", Literal::Number(-1)),
                ("list", list.as_literal()),
            ],
        );
        assert_eq!(script.text(), "SELECT x'2200', -1, x'61275c',x'', NULL");
        let script = script.then(&Template::parse("DO 1"), &[]);
        assert!(script.text().ends_with(";\nDO 1"));
    }
}
