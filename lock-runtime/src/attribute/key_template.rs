//! Renders a key template with the arguments of one call.

use std::fmt::{self, Display, Write};

use crate::base::call_site::Site;
use crate::base::error::{ErrorKind, LockError};
use crate::base::key::Key;
use crate::base::key_rules::push_hex;
use crate::base::lock_name::LockName;

/// A value of a `<placeholder>` in a key template: everything that implements [`Display`].
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be part of a lock key",
    label = "this placeholder's value does not implement `Display`",
    note = "name a field or a method that does, for example `<order.id>`, or write `key = expression`"
)]
pub trait KeyPart {
    /// Writes the value's text to `out`.
    ///
    /// # Errors
    /// What the value's `Display` returns.
    fn write(&self, out: &mut dyn Write) -> fmt::Result;
}

#[diagnostic::do_not_recommend]
impl<T: Display + ?Sized> KeyPart for T {
    fn write(&self, out: &mut dyn Write) -> fmt::Result {
        write!(out, "{self}")
    }
}

/// The value of `key = <expression>`, and each one of `keys = <expression>`: everything that is `Into<Key>`.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a lock key",
    label = "a key is text: `&str`, `String` or `Key`",
    note = "name the value in a template, for example `key = \"order:<id>\"`, or build the text with `format!`"
)]
pub trait IntoKey {
    /// The key.
    fn into_key(self) -> Key;
}

#[diagnostic::do_not_recommend]
impl<T: Into<Key>> IntoKey for T {
    fn into_key(self) -> Key {
        self.into()
    }
}

/// Renders a key template with one call's arguments: `start`, then each placeholder's value and the text after it.
///
/// The types of the values are erased: an expansion has one call for a whole template. All values exist at once; where
/// that matters, an expansion uses a [`KeyWriter`].
///
/// # Errors
/// [`ErrorKind::InvalidKey`] if a value is empty or its `Display` fails.
pub fn template(
    site: &'static Site,
    start: &str,
    values: &[(&'static str, &dyn KeyPart, &str)],
) -> Result<Key, LockError> {
    let mut key = KeyWriter::new(site, start, values.len());
    for (placeholder, value, behind) in values {
        key.part(placeholder, *value, behind.chars().next());
        key.text(behind);
    }
    key.finish()
}

/// The key of `key = CONSTANT`, in a function with these parameters.
///
/// # Errors
/// [`ErrorKind::InvalidKey`] if it is empty, or names a parameter as a placeholder does: only a literal has placeholders, and all
/// calls would lock one key.
pub fn constant_key(value: impl IntoKey, parameters: &[&str]) -> Result<Key, LockError> {
    let key = value.into_key().checked()?;
    let text = key.as_str();
    let mut slots = text.match_indices('<').filter_map(|(at, _)| slot_of(&text[at..], parameters));
    match slots.next() {
        Some(slot) => Err(in_constant(text, slot)),
        None => Ok(key),
    }
}

/// The placeholder of one of `parameters` that `text` starts with, `<id>` or `<order.id>`.
fn slot_of<'a>(text: &'a str, parameters: &[&str]) -> Option<&'a str> {
    let is_slot = |name: &&str| {
        let after = text.strip_prefix('<').and_then(|text| text.strip_prefix(*name));
        after.is_some_and(|after| after.starts_with(['>', '.', '[']))
    };
    parameters.iter().find(|name| is_slot(name))?;
    text.get(..=text.find('>')?)
}

#[cold]
fn in_constant(text: &str, slot: &str) -> LockError {
    let message =
        format!("the constant has the text `{slot}`, and only a literal has placeholders");
    LockError::new(ErrorKind::InvalidKey, message)
        .remedy(format!("write `key = {text:?}` in the attribute"))
}

/// Estimated length of a rendered value.
const VALUE: usize = 16;

/// Renders the template of a [`Site`].
///
/// Rendering is injective: a value contains neither the character that follows it in the template, nor an escape sequence.
/// So `("a:b", "c")` and `("a", "b:c")` give two keys.
#[derive(Debug)]
pub struct KeyWriter {
    site: &'static Site,
    text: String,
    fault: Option<LockError>,
}

impl KeyWriter {
    /// A key that starts with the text `start`, with room for `values` values.
    #[must_use]
    pub fn new(site: &'static Site, start: &str, values: usize) -> Self {
        let mut text = String::with_capacity(site.template().len() + VALUE * values);
        text.push_str(start);
        Self { site, text, fault: None }
    }

    /// Appends an argument's value, escaped, and the text of the template after it.
    pub fn value<T: KeyPart + ?Sized>(
        &mut self,
        placeholder: &'static str,
        value: &T,
        behind: &str,
    ) {
        self.part(placeholder, value, behind.chars().next());
        self.text(behind);
    }

    /// Appends text of the template as it is.
    pub(crate) fn text(&mut self, text: &str) {
        self.text.push_str(text);
    }

    /// Appends an argument's value, escaped; `next` is the character that follows the placeholder in the template.
    pub(crate) fn part<T: KeyPart + ?Sized>(
        &mut self,
        placeholder: &'static str,
        value: &T,
        next: Option<char>,
    ) {
        let before = self.text.len();
        let written = value.write(&mut Escape { out: &mut self.text, next });
        if written.is_err() {
            self.fault(placeholder, "could not be written: its Display failed");
        } else if self.text.len() == before {
            self.fault(placeholder, "is empty");
        }
    }

    /// The finished key.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidKey`] if a value was empty or its `Display` failed.
    pub fn finish(self) -> Result<Key, LockError> {
        match self.fault {
            Some(fault) => Err(fault),
            None => Key::from(self.text).checked(),
        }
    }

    #[cold]
    fn fault(&mut self, placeholder: &'static str, what: &str) {
        let template = self.site.template();
        self.fault.get_or_insert_with(|| {
            LockError::new(ErrorKind::InvalidKey, format!("`<{placeholder}>` in the lock key {what}"))
                .at(LockName::Template(template))
                .remedy("calls without a value there would all wait for each other; check the argument before the call")
        });
    }
}

/// Percent-encodes what would make two values give the same key, and what is unreadable in a log.
struct Escape<'a> {
    out: &'a mut String,
    next: Option<char>,
}

impl Escape<'_> {
    fn must_escape(&self, c: char) -> bool {
        matches!(c, '%' | ':' | '{' | '}' | '[' | ']' | '<' | '>')
            || c.is_control()
            || c.is_whitespace()
            || Some(c) == self.next
    }
}

impl Write for Escape<'_> {
    fn write_str(&mut self, value: &str) -> fmt::Result {
        let mut rest = value;
        while let Some((at, c)) = rest.char_indices().find(|&(_, c)| self.must_escape(c)) {
            self.out.push_str(&rest[..at]);
            for byte in c.encode_utf8(&mut [0; 4]).bytes() {
                self.out.push('%');
                push_hex(self.out, byte);
            }
            rest = &rest[at + c.len_utf8()..];
        }
        self.out.push_str(rest);
        Ok(())
    }
}

/// The text of a placeholder, for keys that an expression composes.
///
/// A key template encodes its values. A key with a value that is not encoded is another key, and the two do not exclude each
/// other. With `Encoded`, they are the same:
///
/// ```
/// use lock_runtime::{Encoded, LockError, distributed_lock};
///
/// #[distributed_lock(key = "account:<id>")]
/// async fn close(id: &str) -> Result<(), LockError> { Ok(()) }
///
/// #[distributed_lock(keys = ids.iter().map(|id| format!("account:{}", Encoded::new(id))))]
/// async fn merge(ids: &[&str]) -> Result<(), LockError> { Ok(()) }
///
/// assert_eq!(format!("account:{}", Encoded::new("a b")), "account:a%20b");
/// ```
///
/// It refuses no value, while an empty value in a template is [`ErrorKind::InvalidKey`].
#[derive(Clone, Copy, Debug)]
pub struct Encoded<T> {
    value: T,
    next: Option<char>,
}

impl<T: Display> Encoded<T> {
    /// The value of a placeholder that is followed by a `:` or by the end of the template.
    pub const fn new(value: T) -> Self {
        Self { value, next: None }
    }

    /// The value of a placeholder that is followed by `next`, which a template encodes in this value too.
    ///
    /// ```
    /// use lock_runtime::Encoded;
    ///
    /// // As in `"range:<from>-<to>"`.
    /// let key = |from: &str, to: &str| format!("range:{}-{}", Encoded::new(from).before('-'), Encoded::new(to));
    /// assert_eq!(key("a-b", "c-d"), "range:a%2Db-c-d");
    /// ```
    #[must_use]
    pub const fn before(mut self, next: char) -> Self {
        self.next = Some(next);
        self
    }
}

impl<T: Display> Display for Encoded<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = String::new();
        write!(Escape { out: &mut text, next: self.next }, "{}", self.value)?;
        f.write_str(&text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::call_site::Location;
    use crate::base::options::LockOptions;

    static SITE: Site = Site::new(
        Location { module: "m", function: "f", file: file!(), line: 1 },
        "order:<a>:<b>",
        LockOptions::new(),
    );

    fn render(a: &str, b: &str) -> Result<Key, LockError> {
        template(&SITE, "order:", &[("a", &a, ":"), ("b", &b, "")])
    }

    #[test]
    fn plain_values_stay_readable() {
        let id = "550e8400-e29b-41d4-a716-446655440000";
        assert_eq!(render("7", id).unwrap().as_str(), format!("order:7:{id}"));
    }

    #[test]
    fn separators_in_values_do_not_move_the_border() {
        assert_ne!(render("a:b", "c").unwrap(), render("a", "b:c").unwrap());
        assert_ne!(render("a%3Ab", "c").unwrap(), render("a:b", "c").unwrap());
        assert_eq!(render("a b", "{c}\n").unwrap().as_str(), "order:a%20b:%7Bc%7D%0A");
    }

    #[test]
    fn an_empty_value_is_an_error_that_names_the_placeholder() {
        let error = render("1", "").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidKey);
        assert!(error.to_string().contains("`<b>`"), "{error}");
        assert_eq!(error.template(), Some("order:<a>:<b>"));
    }

    #[test]
    fn long_keys_are_hashed_and_stay_different() {
        let (one, two) = ("ä".repeat(600) + "1", "ä".repeat(600) + "2");
        let (one, two) = (render("1", &one).unwrap(), render("1", &two).unwrap());
        assert!(one.as_str().len() <= 512);
        assert_ne!(one, two);
        // A value in the form of a hashed key gives another key.
        let forged = one.as_str().strip_prefix("order:1:").unwrap();
        assert_ne!(render("1", forged).unwrap(), one);
    }

    #[test]
    fn a_constant_has_no_placeholders() {
        assert_eq!(constant_key("order:all", &["id"]).unwrap().as_str(), "order:all");
        assert_eq!(constant_key("order:<all>", &["id"]).unwrap().as_str(), "order:<all>");
        assert_eq!(constant_key("<identity>:<id", &["id"]).unwrap().as_str(), "<identity>:<id");
        for (text, slot) in
            [("order:<id>", "<id>"), ("<a>:<id.0>", "<id.0>"), ("<identity>:<id[1]>", "<id[1]>")]
        {
            let error = constant_key(text, &["other", "id"]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidKey);
            for part in [&format!("the text `{slot}`"), &format!("write `key = {text:?}`")] {
                assert!(error.to_string().contains(part), "{error}");
            }
        }
    }

    #[test]
    fn an_encoded_value_is_that_of_the_template() {
        for (a, b) in [("7", "8"), ("a b", "x:y"), ("a:b", "{c}%\n"), ("ü/1", "<z>[0]-")] {
            let text = format!("order:{}:{}", Encoded::new(a).before(':'), Encoded::new(&b));
            assert_eq!(Key::from(text), render(a, b).unwrap());
        }
    }

    #[test]
    fn a_key_that_is_written_value_by_value_is_that_of_the_template() {
        let mut key = KeyWriter::new(&SITE, "order:", 2);
        key.value("a", "x:y", ":");
        key.value("b", &7, "");
        assert_eq!(key.finish().unwrap(), render("x:y", "7").unwrap());
    }
}
