//! Key templates of routes: `"order:<id>"` with the names of path parameters.

use std::fmt::Display;
use std::panic;
use std::str::FromStr;

use crate::attribute::key_template::KeyWriter;
use crate::base::call_site::{Location, Site};
use crate::base::error::{ErrorKind, LockError};
use crate::base::key::Key;
use crate::base::options::LockOptions;

/// A key template whose placeholders are path parameters. It lives as long as the process, like the routes of a server.
#[derive(Clone, Debug)]
pub(super) struct PathTemplate {
    site: &'static Site,
    parts: Vec<TemplatePart>,
    /// Names in braces, which are literal text.
    braced: Vec<&'static str>,
    /// How the values of some parameters are read.
    types: Vec<(&'static str, ReadValue)>,
}

/// The text of a value, after it was read as a type. `None` if it is not of the type.
type ReadValue = fn(&str) -> Option<String>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TemplatePart {
    Text(&'static str),
    Parameter(&'static str),
}

impl PathTemplate {
    /// Parses `template`.
    ///
    /// # Panics
    /// If it is invalid.
    #[track_caller]
    pub(super) fn new(template: &'static str) -> Self {
        let parts = match parse(template) {
            Ok(parts) => parts,
            Err(fault) => panic!("the lock key `{template}` of a route is invalid: {fault}"),
        };
        let at = panic::Location::caller();
        let (file, line) = (at.file(), at.line());
        let location = Location { module: "route", function: template, file, line };
        let site = Site::new(location, template, LockOptions::new()).name(template);
        let braced = braced_names(&parts);
        Self { site: Box::leak(Box::new(site)), parts, braced, types: Vec::new() }
    }

    /// Reads the values of the parameter `name` as `T`.
    ///
    /// # Panics
    /// If the template has no such parameter.
    #[track_caller]
    pub(super) fn set_type<T: FromStr + Display>(&mut self, name: &'static str) {
        let has_it = self.parts.contains(&TemplatePart::Parameter(name));
        assert!(has_it, "the lock key `{}` has no parameter `<{name}>`", self.site.template());
        self.types.push((name, |value| Some(value.parse::<T>().ok()?.to_string())));
    }

    pub(super) fn site(&self) -> &'static Site {
        self.site
    }

    /// The key for these path parameters, which are names and values.
    pub(super) fn render<N, V>(&self, parameters: &[(N, V)]) -> Result<Key, LockError>
    where
        N: AsRef<str>,
        V: AsRef<str>,
    {
        let is_given = |name: &&str| parameters.iter().any(|(of, _)| of.as_ref() == *name);
        if let Some(name) = self.braced.iter().copied().find(is_given) {
            let cause = format!("the lock key of the route: {}", literal_braces(name));
            return Err(LockError::new(ErrorKind::Config, cause).remedy(write_brackets(name)));
        }
        let mut key = KeyWriter::new(self.site, "", self.parts.len());
        for (at, part) in self.parts.iter().enumerate() {
            match *part {
                TemplatePart::Text(text) => key.text(text),
                TemplatePart::Parameter(name) => {
                    let next = match self.parts.get(at + 1) {
                        Some(TemplatePart::Text(text)) => text.chars().next(),
                        _ => None,
                    };
                    let value = one_value(parameters, name)?;
                    match self.types.iter().find(|(of, _)| *of == name) {
                        None => key.part(name, value, next),
                        Some((_, read)) => {
                            let value = read(value).ok_or_else(|| of_another_type(name))?;
                            key.part(name, &value, next);
                        }
                    }
                }
            }
        }
        key.finish()
    }
}

fn one_value<'a>(
    parameters: &'a [(impl AsRef<str>, impl AsRef<str>)],
    name: &str,
) -> Result<&'a str, LockError> {
    let mut values = parameters.iter().filter(|(of, _)| of.as_ref() == name);
    let (_, value) = values.next().ok_or_else(|| missing(name))?;
    if values.next().is_some() {
        return Err(twice(name));
    }
    Ok(value.as_ref())
}

#[cold]
fn of_another_type(name: &str) -> LockError {
    let cause = format!("the path parameter `{name}` is not of the type that the lock key names");
    LockError::new(ErrorKind::InvalidKey, cause)
}

#[cold]
fn missing(name: &str) -> LockError {
    LockError::new(ErrorKind::Config, format!("the path has no parameter `{name}`")).remedy(format!(
        "write `{{{name}}}` in the path of the route, and put the lock on that route or resource, not on the whole application"
    ))
}

#[cold]
fn twice(name: &str) -> LockError {
    LockError::new(ErrorKind::Config, format!("the path has several parameters `{name}`"))
        .remedy("give each parameter of the route, and of the routers around it, a name of its own")
}

fn parse(template: &'static str) -> Result<Vec<TemplatePart>, String> {
    let mut parts = Vec::new();
    let mut rest = template;
    while let Some(at) = rest.find(['<', '>']) {
        let (text, brackets) = rest.split_at(at);
        if !text.is_empty() {
            parts.push(TemplatePart::Text(text));
        }
        if let Some(bracket) = ["<<", ">>"].into_iter().find(|it| brackets.starts_with(it)) {
            parts.push(TemplatePart::Text(&bracket[1..]));
            rest = &brackets[2..];
            continue;
        }
        let Some(inside) = brackets.strip_prefix('<') else {
            return Err("there is no `<` before a `>`; write `>>` for a literal bracket".to_owned());
        };
        let (name, behind) = inside
            .split_once('>')
            .ok_or("a placeholder is not closed; write `<name>`, or `<<` for a literal bracket")?;
        let is_name = |c: char| c == '_' || c.is_alphanumeric();
        if name.is_empty() || !name.chars().all(is_name) {
            return Err(format!("`<{name}>` is not the name of a path parameter; write `<id>`"));
        }
        let next = behind.chars().next();
        let touches = |c: char| c.is_ascii_alphanumeric() || matches!(c, '<' | '%');
        if next.is_some_and(touches) && !behind.starts_with("<<") {
            return Err(format!(
                "nothing separates `<{name}>` from what follows; write `:` between"
            ));
        }
        parts.push(TemplatePart::Parameter(name));
        rest = behind;
    }
    if !rest.is_empty() {
        parts.push(TemplatePart::Text(rest));
    }
    if parts.is_empty() {
        return Err("it is empty; name what is locked: `order:<id>`".to_owned());
    }
    // One lock for all requests of a route may be meant, with a hash tag in front.
    if !parts.iter().any(|part| matches!(part, TemplatePart::Parameter(_))) {
        let tag = template.strip_prefix('{').and_then(|rest| rest.split_once('}'));
        let behind_tag = tag.map_or(template, |(_, rest)| rest);
        let name = braced_names(&[TemplatePart::Text(behind_tag)]).into_iter().next();
        let name = if template.contains("{}") { Some("") } else { name };
        if let Some(name) = name {
            return Err(format!("{}; {}", literal_braces(name), write_brackets(name)));
        }
    }
    Ok(parts)
}

/// The names in braces, as in the path of a route.
fn braced_names(parts: &[TemplatePart]) -> Vec<&'static str> {
    let texts = parts.iter().filter_map(|part| match part {
        TemplatePart::Text(text) => Some(*text),
        TemplatePart::Parameter(_) => None,
    });
    let inside =
        texts.flat_map(|text| text.split('{').skip(1)).filter_map(|rest| rest.split_once('}'));
    let is_name =
        |name: &&str| !name.is_empty() && name.chars().all(|c| c == '_' || c.is_alphanumeric());
    // In actix `{id:[0-9]+}`, in axum `{*rest}`.
    let name = |(inside, _): (&'static str, _)| {
        inside.split(':').next().unwrap_or(inside).trim_start_matches('*')
    };
    inside.map(name).filter(is_name).collect()
}

#[cold]
fn literal_braces(name: &str) -> String {
    format!("`{{{name}}}` is literal text, so all requests would have the same lock")
}

#[cold]
fn write_brackets(name: &str) -> String {
    let name = if name.is_empty() { "id" } else { name };
    format!("write `<{name}>` for the path parameter, or `{{<{name}>}}` for a hash tag")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_rendered_like_arguments() {
        let template = PathTemplate::new("<<order>>:<tenant>:<id>");
        let render = |id| template.render(&[("id", id), ("tenant", "t:1")]);
        assert_eq!(render("7").unwrap().as_str(), "<order>:t%3A1:7");
        assert_eq!(render("").unwrap_err().kind(), ErrorKind::InvalidKey);
        let error = template.render::<&str, &str>(&[]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(error.to_string().contains("no parameter `tenant`"), "{error}");
    }

    /// The parameter of a router around the route, for example.
    #[test]
    fn a_parameter_of_the_same_name_is_an_error() {
        let template = PathTemplate::new("order:<id>");
        let error = template.render(&[("id", "1"), ("id", "7")]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(error.to_string().contains("several parameters `id`"), "{error}");
    }

    #[test]
    fn a_parameter_in_braces_is_an_error_and_a_hash_tag_is_not() {
        let template = PathTemplate::new("{orders}:<tenant>:{id}");
        let error = template.render(&[("tenant", "t"), ("id", "7")]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(error.to_string().contains("write `<id>`"), "{error}");
        let template = PathTemplate::new("{orders}:{<tenant>}:<id>");
        let key = template.render(&[("tenant", "t"), ("id", "7")]).unwrap();
        assert_eq!(key.as_str(), "{orders}:{t}:7");
    }

    #[test]
    fn values_of_a_type_are_rendered_in_one_way() {
        let mut template = PathTemplate::new("order:<id>");
        template.set_type::<u64>("id");
        for id in ["42", "042", "+42"] {
            assert_eq!(template.render(&[("id", id)]).unwrap().as_str(), "order:42");
        }
        let error = template.render(&[("id", "x")]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidKey);
    }

    #[test]
    #[should_panic(expected = "the lock key `order:<id>` has no parameter `<order>`")]
    fn a_type_is_that_of_a_parameter() {
        PathTemplate::new("order:<id>").set_type::<u64>("order");
    }

    #[test]
    fn invalid_templates_say_what_to_write() {
        for (template, words) in [
            ("", "is empty"),
            ("a>b", "no `<` before"),
            ("a<b", "not closed"),
            ("a:<>", "not the name"),
            ("a:<order.id>", "not the name"),
            ("<a><b>", "nothing separates"),
            ("<a>x", "nothing separates"),
            ("order:{id}", "write `<id>`"),
            ("order:{}", "write `<id>`"),
            ("é:{id}", "write `<id>`"),
            ("xid{id}", "write `<id>`"),
            ("{orders}:{order}", "write `<order>`"),
            ("files:{*rest}", "write `<rest>`"),
            ("order:{id:[0-9]+}", "write `<id>`"),
        ] {
            let fault = parse(template).unwrap_err();
            assert!(fault.contains(words), "{template}: {fault}");
        }
        for template in ["plain", "{app}:report"] {
            assert_eq!(parse(template), Ok(vec![TemplatePart::Text(template)]));
        }
    }
}
