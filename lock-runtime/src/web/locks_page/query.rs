//! The fields of a form, in the query of a URL or in a body.

use std::borrow::Cow;

use percent_encoding::percent_decode_str;

/// What a request to the page asks for.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Query {
    /// The number of the pool on the page, from 0.
    pub(super) pool: Option<usize>,
    pub(super) key: Option<String>,
    /// The owner from which to take the lock.
    pub(super) owner: Option<String>,
    pub(super) pool_name: Option<String>,
}

impl Query {
    pub(super) fn parse(text: &str) -> Self {
        let mut query = Self::default();
        for pair in text.split('&') {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            match name {
                "pool" => query.pool = value.parse().ok(),
                "key" => query.key = Some(decode(value)),
                "pool_name" => query.pool_name = Some(decode(value)),
                "owner" => query.owner = Some(decode(value)),
                _ => {}
            }
        }
        query
    }
}

/// The text of a form's field.
fn decode(value: &str) -> String {
    let spaced = value.replace('+', " ");
    Cow::into_owned(percent_decode_str(&spaced).decode_utf8_lossy())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_of_a_form_are_decoded() {
        let query = Query::parse("pool=1&x&key=order%3A4+2%26%C3%A9&y=1");
        assert_eq!(query.pool, Some(1));
        assert_eq!(query.key.as_deref(), Some("order:4 2&é"));
        assert_eq!(Query::parse(""), Query::default());
    }
}
