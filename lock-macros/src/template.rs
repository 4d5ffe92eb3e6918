//! Key templates such as `"order:<order.id>"`: text and placeholders, with their byte ranges.

use std::ops::Range;

use crate::diagnostics::Fault;
use crate::tokens::leading_name;

pub(crate) struct Template {
    pub(crate) parts: Vec<Part>,
    /// Whether parts are missing, because they cannot be read.
    pub(crate) is_partial: bool,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Text(String),
    Slot(Slot),
}

/// `<order.lines[0].sku()>`
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Slot {
    /// The text between the brackets.
    pub(crate) source: String,
    pub(crate) root: Name,
    pub(crate) tail: Vec<Access>,
}

impl Slot {
    /// Where the placeholder is in the text, with its brackets.
    pub(crate) fn range(&self) -> Range<usize> {
        let start = self.root.range.start;
        start - 1..start + self.source.len() + 1
    }

    /// The parameters in it, such as `map` and `name` in `<map[name].id>`.
    pub(crate) fn names(&self) -> impl Iterator<Item = &Name> {
        let indices = self.tail.iter().filter_map(|access| match access {
            Access::IndexBy(name) => Some(name),
            _ => None,
        });
        std::iter::once(&self.root).chain(indices)
    }
}

/// The name of a parameter, without `r#`.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Name {
    pub(crate) text: String,
    pub(crate) range: Range<usize>,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// `.id`
    Field(String),
    /// `.0`
    Position(u32),
    /// `.id()`
    Method(String),
    /// `[0]`
    Index(u32),
    /// `[name]`
    IndexBy(Name),
}

impl Template {
    /// Parses `text` without errors.
    pub(crate) fn scan(text: &str) -> Result<Self, Vec<Fault>> {
        let (template, faults) = Self::scan_all(text);
        if faults.is_empty() { Ok(template) } else { Err(faults) }
    }

    /// Parses what can be read of `text`, and reports all errors in it.
    pub(crate) fn scan_all(text: &str) -> (Self, Vec<Fault>) {
        let mut scanner = Scanner { text, at: 0, parts: Vec::new(), faults: Vec::new() };
        scanner.run();
        if text.is_empty() {
            scanner.faults.push(
                Fault::new(0..0, "the key is empty").help("name what is locked: `\"order:<id>\"`"),
            );
        }
        let is_partial = !scanner.faults.is_empty();
        (Self { parts: scanner.parts, is_partial }, scanner.faults)
    }

    pub(crate) fn slots(&self) -> impl Iterator<Item = &Slot> {
        self.parts.iter().filter_map(|part| match part {
            Part::Slot(slot) => Some(slot),
            Part::Text(_) => None,
        })
    }

    /// The text, if it contains no placeholder.
    pub(crate) fn literal(&self) -> Option<&str> {
        match self.parts.as_slice() {
            [Part::Text(text)] => Some(text),
            _ => None,
        }
    }
}

struct Scanner<'a> {
    text: &'a str,
    at: usize,
    parts: Vec<Part>,
    faults: Vec<Fault>,
}

impl<'a> Scanner<'a> {
    fn run(&mut self) {
        while let Some(next) = self.rest().chars().next() {
            if self.rest().starts_with("<<") || self.rest().starts_with(">>") {
                self.push_text(next);
                self.at += 2;
            } else if next == '<' {
                self.slot();
            } else {
                if next == '>' {
                    let unmatched =
                        Fault::new(self.at..self.at + 1, "there is no `<` before this `>`");
                    self.faults.push(unmatched.help("write `>>` for a literal bracket"));
                }
                self.push_text(next);
                self.at += next.len_utf8();
            }
        }
    }

    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    fn push_text(&mut self, next: char) {
        if let Some(Part::Text(text)) = self.parts.last_mut() {
            text.push(next);
        } else {
            self.parts.push(Part::Text(next.into()));
        }
    }

    fn slot(&mut self) {
        let start = self.at;
        let inside = start + 1;
        let close = self.text[inside..].find(['<', '>']).map(|offset| inside + offset);
        let Some(close) = close.filter(|&at| self.text.as_bytes()[at] == b'>') else {
            self.faults.push(
                Fault::new(
                    start..close.unwrap_or(self.text.len()),
                    "this placeholder is not closed",
                )
                .help("write `<name>` for a value, `<<` for a literal bracket"),
            );
            self.at = close.unwrap_or(self.text.len());
            return;
        };
        match SlotParser::new(self.text, inside..close).slot() {
            Ok(slot) => self.parts.push(Part::Slot(slot)),
            Err(fault) => self.faults.push(fault),
        }
        self.at = close + 1;
        self.expect_separator(start);
    }

    /// Without a separator, `("1", "23")` and `("12", "3")` would be the same key.
    fn expect_separator(&mut self, start: usize) {
        let rest = self.rest();
        let Some(next) = rest.chars().next() else { return };
        let slot = &self.text[start..self.at];
        if next == '<' && !rest.starts_with("<<") {
            let end = rest.find('>').map_or(self.text.len(), |offset| self.at + offset + 1);
            let second = &self.text[self.at..end];
            self.faults.push(
                Fault::new(start..end, "nothing separates these placeholders")
                    .help(format!("put a separator such as `:` between `{slot}` and `{second}`")),
            );
        } else if next.is_ascii_alphanumeric() || next == '%' {
            let message =
                format!("`{next}` directly after a placeholder could belong to its value");
            self.faults.push(
                Fault::new(self.at..self.at + 1, message)
                    .help(format!("put a separator such as `:` between `{slot}` and `{next}`")),
            );
        }
    }
}

/// Parser of the text between the brackets.
struct SlotParser<'a> {
    text: &'a str,
    range: Range<usize>,
    at: usize,
}

impl<'a> SlotParser<'a> {
    fn new(text: &'a str, range: Range<usize>) -> Self {
        Self { text, at: range.start, range }
    }

    fn slot(mut self) -> Result<Slot, Fault> {
        if self.range.is_empty() {
            let brackets = self.range.start - 1..self.range.end + 1;
            return Err(Fault::new(brackets, "this placeholder is empty")
                .help("write a parameter's name, or `<<>>` for literal brackets"));
        }
        let root = self.name()?;
        let mut tail = Vec::new();
        while let Some(next) = self.rest().chars().next() {
            match next {
                '.' => tail.push(self.member()?),
                '[' => tail.push(self.index()?),
                _ => return Err(self.unexpected()),
            }
        }
        Ok(Slot { source: self.text[self.range.clone()].to_owned(), root, tail })
    }

    fn rest(&self) -> &'a str {
        &self.text[self.at..self.range.end]
    }

    fn eat(&mut self, token: &str) -> bool {
        let found = self.rest().starts_with(token);
        if found {
            self.at += token.len();
        }
        found
    }

    fn member(&mut self) -> Result<Access, Fault> {
        self.at += 1;
        if let Some(position) = self.number()? {
            return Ok(Access::Position(position));
        }
        let name = self.name()?;
        if matches!(name.text.as_str(), "self" | "Self" | "super" | "crate" | "await") {
            let message = format!("`{}` is not a field", name.text);
            return Err(Fault::new(name.range, message));
        }
        if self.eat("()") {
            return Ok(Access::Method(name.text));
        }
        if self.rest().starts_with('(') {
            return Err(Fault::new(
                self.at..self.range.end,
                "a method in a key takes no arguments",
            )
            .help("write `key = expression` for anything more, such as `key = format!(..)`"));
        }
        Ok(Access::Field(name.text))
    }

    fn index(&mut self) -> Result<Access, Fault> {
        self.at += 1;
        let index = match self.number()? {
            Some(index) => Access::Index(index),
            None => Access::IndexBy(self.name()?),
        };
        if self.eat("]") { Ok(index) } else { Err(self.unexpected()) }
    }

    fn number(&mut self) -> Result<Option<u32>, Fault> {
        let digits = self.rest().bytes().take_while(u8::is_ascii_digit).count();
        if digits == 0 {
            return Ok(None);
        }
        let range = self.at..self.at + digits;
        self.at = range.end;
        match self.text[range.clone()].parse() {
            Ok(number) => Ok(Some(number)),
            Err(_) => Err(Fault::new(range, "this number is too large")),
        }
    }

    fn name(&mut self) -> Result<Name, Fault> {
        let start = self.at;
        self.eat("r#");
        let Some(name) = leading_name(self.rest()).filter(|name| *name != "_") else {
            return Err(self.unexpected());
        };
        let text = name.to_owned();
        self.at += text.len();
        Ok(Name { text, range: start..self.at })
    }

    fn unexpected(&self) -> Fault {
        let rest = self.rest();
        let Some(next) = rest.chars().next() else {
            return Fault::new(self.range.clone(), "this placeholder ends too early")
                .help("write a path such as `<order.id>`");
        };
        let range = self.at..self.at + next.len_utf8();
        let trimmed = self.text[self.range.clone()].trim();
        if next.is_whitespace() && !trimmed.contains(char::is_whitespace) {
            return Fault::new(range, "a placeholder contains no spaces")
                .help(format!("write `<{trimmed}>`, or `<<` and `>>` for literal brackets"));
        }
        let expression = "write `key = expression`, such as `key = format!(..)`";
        if next == ':' && !rest.starts_with("::") {
            return Fault::new(self.at..self.range.end, "a placeholder takes no format")
                .help(expression);
        }
        Fault::new(range, "a placeholder is a path such as `order.id`, not an expression")
            .help(expression)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hostile_input::hostile;

    fn message(text: &str) -> String {
        let faults = Template::scan(text).err().unwrap_or_default();
        faults.into_iter().map(|fault| fault.message).collect::<Vec<_>>().join("; ")
    }

    fn slot(text: &str) -> Slot {
        match Template::scan(text).map(|template| template.parts) {
            Ok(parts) => match parts.into_iter().next() {
                Some(Part::Slot(slot)) => slot,
                other => panic!("{other:?}"),
            },
            Err(faults) => panic!("{faults:?}"),
        }
    }

    #[test]
    fn text_and_placeholders_alternate() {
        let template = Template::scan("order:<order.id>:<self.tenant>").ok().unwrap();
        let shown: Vec<_> = template
            .parts
            .iter()
            .map(|part| match part {
                Part::Text(text) => text.clone(),
                Part::Slot(slot) => format!("<{}>", slot.source),
            })
            .collect();
        assert_eq!(shown, ["order:", "<order.id>", ":", "<self.tenant>"]);
        assert_eq!(template.slots().next().unwrap().root.range, 7..12);
    }

    #[test]
    fn every_access_is_parsed() {
        let access = slot("<order.lines[0][at].1.sku().r#type>").tail;
        let by = Name { text: "at".into(), range: 16..18 };
        assert_eq!(
            access,
            [
                Access::Field("lines".into()),
                Access::Index(0),
                Access::IndexBy(by),
                Access::Position(1),
                Access::Method("sku".into()),
                Access::Field("type".into()),
            ]
        );
        assert_eq!(slot("<r#type>").root.text, "type");
        assert_eq!(slot("<größe>").root.text, "größe");
    }

    #[test]
    fn doubled_brackets_are_text() {
        let template = Template::scan("a<<b>>{c}").ok().unwrap();
        assert_eq!(template.literal(), Some("a<b>{c}"));
        assert_eq!(slot("<id><<").root.text, "id");
    }

    #[test]
    fn ambiguous_templates_are_rejected() {
        assert!(message("<a><b>").contains("separates"));
        assert!(message("<a>x").contains("could belong"));
        assert!(message("<a>9").contains("could belong"));
        assert!(message("<a>%").contains("could belong"));
        for fine in ["<a>:<b>", "<a>-x", "<a>é", "{<a>}", "<a>_x", "x<a>"] {
            assert_eq!(message(fine), "", "{fine}");
        }
    }

    /// Each text has its fault between the marks `«` and `»`.
    #[test]
    fn each_error_has_its_own_message_and_place() {
        for (marked, words) in [
            ("«»", "key is empty"),
            ("a:«<>»", "placeholder is empty"),
            ("a«<b»", "not closed"),
            ("a«<b»<c>", "not closed"),
            ("ab«>»c", "no `<` before"),
            ("a:«<b><c>»:d", "separates"),
            ("a:<b>«x»y", "could belong"),
            ("<« »id>", "no spaces"),
            ("<id« »>", "no spaces"),
            ("<id«:?»>", "takes no format"),
            ("<a« »+ b>", "not an expression"),
            ("<a«+»b>", "not an expression"),
            ("<a«→»b>", "not an expression"),
            ("<A«:»:b>", "not an expression"),
            ("<«&»a>", "not an expression"),
            ("<«1»>", "not an expression"),
            ("<«_»>", "not an expression"),
            ("<a.f«(1)»>", "takes no arguments"),
            ("<«a.»>", "ends too early"),
            ("<«a[»>", "ends too early"),
            ("<«a[0»>", "ends too early"),
            ("<a.«await»>", "not a field"),
            ("<a.«99999999999»>", "too large"),
        ] {
            let (before, rest) = marked.split_once('«').unwrap();
            let (place, after) = rest.split_once('»').unwrap();
            let faults = Template::scan(&[before, place, after].concat()).err().unwrap();
            let [fault] = &faults[..] else { panic!("{marked}: {faults:?}") };
            assert!(fault.message.contains(words), "{marked}: {fault:?}");
            assert_eq!(fault.range, before.len()..before.len() + place.len(), "{marked}");
        }
    }

    #[test]
    fn all_errors_are_reported() {
        assert_eq!(Template::scan("<>:<a b>:>").err().unwrap_or_default().len(), 3);
    }

    #[test]
    fn no_text_causes_a_panic_or_an_invalid_range() {
        for text in hostile(b"<><>abr#.[]()0:{}_ \xc3\xa9%") {
            for fault in Template::scan(&text).err().into_iter().flatten() {
                assert!(text.get(fault.range.clone()).is_some(), "{text:?} {fault:?}");
            }
        }
    }
}
