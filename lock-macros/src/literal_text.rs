//! The text beside the placeholders of a key: it must not be meant as a placeholder.

use std::ops::Range;

use syn::LitStr;
use syn::ext::IdentExt;

use crate::diagnostics::{Errors, Fault};
use crate::params::Params;
use crate::template::Template;
use crate::tokens::leading_name;

const LITERAL: &str = "is literal text in a key";

pub(crate) fn check(literal: &LitStr, template: &Template, params: &Params, errors: &mut Errors) {
    let text = Text { literal, value: literal.value(), template, params };
    text.braces(errors);
    text.signs(errors);
    text.segments(errors);
    text.arguments(errors);
}

/// `{id}`, `{ id }`, `{id:?}` or `{order.id}` in a text.
pub(crate) struct Braced<'a> {
    pub(crate) range: Range<usize>,
    pub(crate) name: &'a str,
    path: &'a str,
    is_tag: bool,
}

pub(crate) fn braced(text: &str) -> impl Iterator<Item = Braced<'_>> {
    text.match_indices('{').filter_map(|(at, _)| {
        let inside = text[at + 1..].trim_start();
        let name = leading_name(inside)?;
        let rest = inside[name.len()..].trim_start();
        if !rest.starts_with(['}', '.', ':', '[']) {
            return None;
        }
        let close = text[at..].find('}').map(|close| at + close + 1);
        let start = text.len() - inside.len();
        let path = &inside[..inside.find(['}', ':']).unwrap_or(name.len())];
        Some(Braced {
            range: at..close.unwrap_or(start + name.len()),
            name,
            path: path.trim_end(),
            is_tag: text[at + 1..].starts_with(name) && inside[name.len()..].starts_with('}'),
        })
    })
}

struct Text<'a> {
    literal: &'a LitStr,
    value: String,
    template: &'a Template,
    params: &'a Params,
}

impl Text<'_> {
    /// `{id}` is the syntax of `format!`. A hash tag has the name of a parameter only where a placeholder has it too.
    fn braces(&self, errors: &mut Errors) {
        for braced in braced(&self.value) {
            // `${id}` and `#{id}` are reported by `signs`.
            let is_signed = self.value[..braced.range.start].ends_with(['#', '$']);
            let is_tag = braced.is_tag && self.interpolates(braced.name);
            if is_signed || is_tag || self.params.find(braced.name).is_none() {
                continue;
            }
            let path = braced.path;
            errors.push_fault(
                self.literal,
                &Fault::new(braced.range, "braces are literal text in a key")
                    .help(format!("`<{path}>` interpolates; a hash tag is `{{<{path}>}}`")),
            );
        }
    }

    /// `#id`, `$id` and `${id}` name a parameter in other libraries.
    fn signs(&self, errors: &mut Errors) {
        let text = &self.value;
        for (at, _) in text.match_indices(['#', '$']) {
            // As in `<r#match>`.
            if self.template.slots().any(|slot| slot.range().contains(&at)) {
                continue;
            }
            let inside = &text[at + 1..];
            let braced = inside.starts_with('{');
            let name_at = usize::from(braced);
            let name = &inside[name_at..];
            let path = &name[..name
                .find(|c: char| c != '_' && c != '.' && !c.is_alphanumeric())
                .unwrap_or(name.len())];
            let path = path.trim_end_matches('.');
            let root = path.split('.').next().unwrap_or_default();
            if self.params.find(root).is_none() || self.interpolates(path) {
                continue;
            }
            let end = at + 1 + name_at + path.len();
            let end = end + usize::from(braced && text[end..].starts_with('}'));
            self.refuse(at..end, path, errors);
        }
    }

    /// `/:id` and `[id]` are parameters in the routes of web frameworks.
    fn segments(&self, errors: &mut Errors) {
        let text = &self.value;
        for (at, sign) in text.match_indices([':', '[']) {
            let is_path = self.template.slots().any(|slot| slot.range().contains(&at));
            if is_path || (sign == ":" && !text[..at].ends_with('/')) {
                continue;
            }
            let Some(name) = leading_name(&text[at + 1..]) else { continue };
            let end = at + 1 + name.len();
            if sign == "[" && !text[end..].starts_with(']') {
                continue;
            }
            if self.params.find(name).is_none() || self.interpolates(name) {
                continue;
            }
            let end = end + usize::from(sign == "[");
            self.refuse(at..end, name, errors);
        }
    }

    /// `{}` and `%s` stand for the next argument.
    fn arguments(&self, errors: &mut Errors) {
        let names = || self.params.names().filter(|name| *name != "self").map(IdentExt::unraw);
        let missing = names().find(|name| !self.interpolates(&name.to_string()));
        let Some(name) = missing.or_else(|| names().next()) else { return };
        for sign in ["{}", "{:?}", "%s", "%d"] {
            for (at, _) in self.value.match_indices(sign) {
                // `50%discount` is a word.
                let rest = &self.value[at + sign.len()..];
                if sign.starts_with('%') && rest.starts_with(char::is_alphanumeric) {
                    continue;
                }
                self.refuse(at..at + sign.len(), &name.to_string(), errors);
            }
        }
    }

    /// Whether a placeholder has this path, or begins with this name.
    fn interpolates(&self, path: &str) -> bool {
        self.template.slots().any(|slot| slot.source == path || slot.root.text == path)
    }

    fn refuse(&self, range: Range<usize>, path: &str, errors: &mut Errors) {
        let message = format!("`{}` {LITERAL}", &self.value[range.clone()]);
        errors.push_fault(
            self.literal,
            &Fault::new(range, message).help(format!("`<{path}>` interpolates")),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is refused in `key`, for a function with `id`, `order` and `self`.
    fn refused(key: &str) -> Vec<String> {
        let literal: LitStr = syn::parse_str(&format!("{key:?}")).unwrap();
        let template = Template::scan(key).ok().unwrap();
        let params = Params::new(&syn::parse_str("fn f(&self, id: u64, order: Order)").unwrap());
        let mut errors = Errors::default();
        check(&literal, &template, &params, &mut errors);
        errors.messages()
    }

    #[test]
    fn placeholders_of_other_languages_are_refused_beside_ours() {
        for (key, help) in [
            ("t:{id}:<order.id>", "`<id>` interpolates; a hash tag is `{<id>}`"),
            ("t:{id}", "`<id>` interpolates; a hash tag is `{<id>}`"),
            ("t:{ id }", "`<id>` interpolates; a hash tag is `{<id>}`"),
            ("t:{id:?}:<id>", "`<id>` interpolates; a hash tag is `{<id>}`"),
            ("t:{order.id}:<order.tenant>", "`<order.id>` interpolates"),
            ("t:<order.id>:{}", "`<id>` interpolates"),
            ("t:<id>:{}", "`<order>` interpolates"),
            ("t:<id>:<order>:{:?}", "`<id>` interpolates"),
            ("t:<id>:%d", "`<order>` interpolates"),
            ("t:$id:<order.id>", "`<id>` interpolates"),
            ("t:#order.id:<order.tenant>", "`<order.id>` interpolates"),
            ("<<t:$id", "`<id>` interpolates"),
            ("t/:id", "`<id>` interpolates"),
            ("t:[id]:<order>", "`<id>` interpolates"),
        ] {
            let found = refused(key);
            assert_eq!(found.len(), 1, "{key}: {found:#?}");
            assert!(found[0].contains(help), "{key}: {found:#?}");
        }
    }

    #[test]
    fn other_text_is_text() {
        for key in [
            "{order}:<order.id>",
            "{order}:<order>",
            "{orders}:<id>",
            "{ida}:<order>",
            "{<id>}:a",
            "page#id=<id>",
            "page#5:<id>",
            "user:id",
            "user:id:<id>",
            "rows[0]:<id>",
            "rows[id]:<id>",
            "<order[id]>",
            "50%discount:<id>",
            "a%b:<id>",
            "a{b",
            "a}b",
            "<r#id>:#x",
        ] {
            assert_eq!(refused(key), [""; 0], "{key}");
        }
    }
}
