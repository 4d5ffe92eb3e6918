//! `key = "..", ttl = ".."`: the arguments of one attribute.

use proc_macro2::{Span, TokenStream};
use quote::{ToTokens, quote};
use syn::ext::IdentExt;
use syn::parse::{ParseStream, Parser};
use syn::{Error, Expr, ExprLit, Ident, LitStr, Path, Result, Token, token};

use crate::argument_names::{example, explain_unknown, known, meant};
use crate::diagnostics::Errors;
use crate::duration;
use crate::on_conflict::{self, Choice, OnConflict};
use crate::value::{self, Count, Keys, Pool, Renew, Time, Wait};

#[derive(Default)]
pub(crate) struct Args {
    pub(crate) keys: Option<Keys>,
    pub(crate) ttl: Option<Time>,
    pub(crate) wait: Option<Wait>,
    pub(crate) renew: Option<Renew>,
    pub(crate) max_hold: Option<Time>,
    pub(crate) min_hold: Option<Time>,
    pub(crate) lock_delay: Option<Time>,
    pub(crate) linger: Option<Time>,
    pub(crate) on_conflict: Option<OnConflict>,
    pub(crate) on_lost: Option<Choice>,
    pub(crate) release: Option<Choice>,
    pub(crate) on_error: Option<Expr>,
    pub(crate) pool: Option<Pool>,
    pub(crate) guard: Option<Ident>,
    pub(crate) when: Option<Expr>,
    pub(crate) reentrant: Option<bool>,
    pub(crate) retry_delay: Option<Time>,
    pub(crate) retry_count: Option<Count>,
    pub(crate) name: Option<LitStr>,
    pub(crate) crate_path: Option<Path>,
    /// Arguments that were written, even if their value is invalid.
    written: Vec<(&'static str, Span)>,
}

impl Args {
    /// Continues after the next comma when an argument is invalid.
    pub(crate) fn parse(tokens: TokenStream, errors: &mut Errors) -> Self {
        let mut args = Self::default();
        let all = |input: ParseStream<'_>| {
            while !input.is_empty() {
                if let Err(error) = args.argument(input, errors) {
                    errors.push_error(error);
                    skip_to_comma(input)?;
                }
                if !input.is_empty() && input.parse::<Token![,]>().is_err() {
                    errors.push(input.span(), "expected a `,` between arguments");
                    if !input.peek(Ident::peek_any) {
                        skip_to_comma(input)?;
                        input.parse::<Option<Token![,]>>()?;
                    }
                }
            }
            Ok(())
        };
        if let Err(error) = all.parse2(tokens) {
            errors.push_error(error);
        }
        args
    }

    pub(crate) fn written(&self, name: &str) -> Option<Span> {
        self.written.iter().find(|(written, _)| *written == name).map(|(_, span)| *span)
    }

    pub(crate) fn key_came_last(&self) -> bool {
        self.written
            .iter()
            .rfind(|(name, _)| matches!(*name, "key" | "keys"))
            .is_some_and(|(name, _)| *name == "key")
    }

    fn argument(&mut self, input: ParseStream<'_>, errors: &mut Errors) -> Result<()> {
        let (name, span) = self.name(input)?;
        let earlier = self.written(name);
        self.written.push((name, span));
        expect_value(name, span, input)?;
        if name == "guard" && input.peek(Token![mut]) {
            return Err(Error::new(
                input.span(),
                "a guard is used by reference, without `mut`: `guard = lock`",
            ));
        }
        let value = input.parse().map(value::peel).map_err(|error| match input.is_empty() {
            true => Error::new(span, format!("the value of `{name}` ends too early")),
            false => error,
        })?;
        if matches!(name, "key" | "keys") && input.peek(Token![:]) {
            let message = format!("a key is text, with quotes\nhelp: write `{}`", example(name));
            return Err(Error::new(span, message));
        }
        if earlier.is_some() {
            return Err(Error::new(span, format!("`{name}` is given twice")));
        }
        match name {
            "key" => self.keys = value::key(value, errors),
            "keys" => self.keys = value::keys(value, errors),
            "ttl" => self.ttl = value::time(name, value, errors),
            "wait" => self.wait = value::wait(value, errors),
            "renew" => self.renew = value::renew(value, errors),
            "max_hold" => self.max_hold = value::time(name, value, errors),
            "min_hold" => self.min_hold = value::time(name, value, errors),
            "lock_delay" => self.lock_delay = value::time(name, value, errors),
            "linger" => self.linger = value::time(name, value, errors),
            "on_conflict" => self.on_conflict = Some(on_conflict::on_conflict(value)?),
            "on_lost" => self.on_lost = Some(on_conflict::on_lost(&value)?),
            "release" => self.release = Some(on_conflict::release(&value)?),
            "on_error" => self.on_error = Some(value::on_error(value)?),
            "pool" => self.pool = Some(value::pool(value)?),
            "guard" => self.guard = Some(value::guard(&value)?),
            "when" => self.when = Some(value::when(value)?),
            "reentrant" => self.reentrant = Some(value::reentrant(&value)?),
            "retry_delay" => self.retry_delay = value::time(name, value, errors),
            "retry_count" => self.retry_count = Some(value::retry_count(value)?),
            "name" => self.name = Some(value::name(&value)?),
            "crate" => self.crate_path = Some(value::crate_path(&value)?),
            other => return Err(Error::new(span, format!("`{other}` is not an argument"))),
        }
        Ok(())
    }

    /// Texts without a name; in a list they are reported together.
    fn unnamed(&mut self, first: &LitStr, input: ParseStream<'_>) -> Error {
        let texts = texts(input);
        if let Some(name) = known(&first.value())
            && input.peek(Token![=])
        {
            let message = format!("an argument has no quotes: `{}`", example(name));
            self.written.push((name, first.span()));
            return Error::new(first.span(), message);
        }
        let is_named = self.written("key").is_some() || self.written("keys").is_some();
        let (times, keys): (Vec<_>, Vec<_>) =
            texts.iter().partition(|text| duration::parse(&text.value()).is_ok());
        let quoted = |text: &&LitStr| text.token().to_string();
        let keys = keys.iter().map(quoted).collect::<Vec<_>>();
        let keys = match &*keys {
            [] => None,
            [key] => Some(("key", key.clone())),
            keys => Some(("keys", format!("[{}]", keys.join(", ")))),
        };
        let named_times = ["ttl", "wait"].into_iter().zip(times.iter().map(quoted));
        let has_keys = keys.is_some();
        let named: Vec<_> = keys.filter(|_| !is_named).into_iter().chain(named_times).collect();
        let message = match &*named {
            _ if is_named && has_keys => {
                format!("several keys are one list: `{}`", example("keys"))
            }
            [(name, value)] => {
                let message = format!("name this argument: `{name} = {value}`");
                let or = format!("\nhelp: or `wait = {value}`, how long to wait for the lock");
                if *name == "ttl" { message + &or } else { message }
            }
            named => {
                let named = named.iter().map(|(name, value)| format!("{name} = {value}"));
                format!("name these arguments: `{}`", named.collect::<Vec<_>>().join(", "))
            }
        };
        self.written.extend(named.into_iter().map(|(name, _)| (name, first.span())));
        Error::new(first.span(), message)
    }

    fn name(&mut self, input: ParseStream<'_>) -> Result<(&'static str, Span)> {
        if let Ok(text) = input.fork().parse::<LitStr>() {
            return Err(self.unnamed(&text, input));
        }
        let Ok(name) = input.call(Ident::parse_any) else {
            return Err(Error::new(
                input.span(),
                format!("expected an argument such as `{}`", example("key")),
            ));
        };
        let text = name.unraw().to_string();
        if let Some(known) = known(&text) {
            return Ok((known, name.span()));
        }
        let has_no_value = input.is_empty() || input.peek(Token![,]);
        if has_no_value && self.written("key").is_some() && meant(&text) == Some("key") {
            let message = format!(
                "`{text}` has no value\nhelp: a value of the key goes into its text: `<{text}>`"
            );
            return Err(Error::new(name.span(), message));
        }
        // Present under another name, so it is not also reported as missing.
        self.written.extend(meant(&text).map(|own| (own, name.span())));
        let mut value = None;
        if input.peek(Token![=]) {
            input.parse::<Token![=]>()?;
            value = input.parse::<Expr>().ok();
        }
        let write = |own: &'static str| match &value {
            Some(Expr::Lit(literal)) if accepts(own, literal) => {
                format!("{own} = {}", literal.to_token_stream())
            }
            _ => example(own).to_owned(),
        };
        Err(Error::new(name.span(), explain_unknown(&text, write)))
    }
}

/// Whether `value` is one of the argument `name`.
fn accepts(name: &str, value: &ExprLit) -> bool {
    let mut errors = Errors::default();
    let name = Ident::new(name, Span::call_site());
    let parse = |input: ParseStream<'_>| Args::default().argument(input, &mut errors);
    parse.parse2(quote!(#name = #value)).is_ok() && errors.is_empty()
}

/// Consumes the texts of `"a", "b"`.
fn texts(input: ParseStream<'_>) -> Vec<LitStr> {
    let mut texts: Vec<LitStr> = input.parse().into_iter().collect();
    while input.peek(Token![,]) && input.peek2(LitStr) {
        let next = input.parse::<Token![,]>().and_then(|_| input.parse());
        texts.extend(next);
    }
    texts
}

fn expect_value(name: &str, span: Span, input: ParseStream<'_>) -> Result<()> {
    let write = example(name);
    let message = if input.peek(Token![=]) && !input.peek(Token![==]) {
        input.parse::<Token![=]>()?;
        if !input.is_empty() && !input.peek(Token![,]) {
            return Ok(());
        }
        format!("the value of `{name}` is missing\nhelp: write `{write}`")
    } else if input.is_empty() || input.peek(Token![,]) {
        format!("`{name}` needs a value\nhelp: write `{write}`")
    } else if input.peek(token::Paren) && name != "keys" {
        format!("`{name}` is not a list\nhelp: write `{write}`")
    } else {
        format!("expected a `=` after `{name}`\nhelp: write `{write}`")
    };
    Err(Error::new(span, message))
}

fn skip_to_comma(input: ParseStream<'_>) -> Result<()> {
    while !input.is_empty() && !input.peek(Token![,]) {
        input.parse::<proc_macro2::TokenTree>()?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::argument_names::ARGUMENTS;

    fn messages(text: &str) -> Vec<String> {
        let mut errors = Errors::default();
        Args::parse(text.parse().unwrap(), &mut errors);
        errors.messages()
    }

    #[test]
    fn every_argument_is_parsed() {
        let text = r#"key = "a:<id>", ttl = "5s", wait = "forever", renew = "1s", max_hold = "1m", min_hold = "1s", lock_delay = "1s",
            linger = "1s", on_conflict = "skip", on_lost = "notify", release = "background", on_error = |e| Err(e), pool = self.locks, guard = lock,
            when = a > b, reentrant = true, retry_delay = "1ms", retry_count = 3, name = "n", crate = a::b,"#;
        assert_eq!(messages(text), [""; 0]);
        for (name, _) in ARGUMENTS {
            // Both together are an error of a later check.
            assert!(name == "keys" || text.contains(&format!("{name} = ")), "{name}");
        }
    }

    #[test]
    fn parsing_continues_after_an_error() {
        let found = messages(
            r#"key = "a", ttl, wait = , renew("1s"), max_hold "1s", colour = a::<B, C>(), ttl = 5"#,
        );
        assert_eq!(found.len(), 6, "{found:#?}");
        assert!(found[0].starts_with("`ttl` needs a value"));
        assert!(found[1].starts_with("the value of `wait` is missing"));
        assert!(found[2].starts_with("`renew` is not a list"));
        assert!(found[3].starts_with("expected a `=` after `max_hold`"));
        assert!(found[4].starts_with("unknown argument `colour`"));
        assert!(found[5].starts_with("`ttl` is given twice"));
    }

    #[test]
    fn texts_without_a_name_are_named_by_what_they_are() {
        for (text, help) in [
            (r#""o:<id>", "5s""#, r#"name these arguments: `key = "o:<id>", ttl = "5s"`"#),
            (r#""a", "b", "5s", "1s""#, r#"`keys = ["a", "b"], ttl = "5s", wait = "1s"`"#),
            (
                r#"key = "o:<id>", "5s""#,
                "name this argument: `ttl = \"5s\"`\nhelp: or `wait = \"5s\"`",
            ),
            (r#"key = "o:<id>", "b""#, "several keys are one list"),
            (r#"key = "a", "wait" = "1s""#, r#"an argument has no quotes: `wait = "3s"`"#),
        ] {
            let found = messages(text);
            assert!(found[0].contains(help), "{text}: {found:#?}");
        }
    }

    #[test]
    fn a_value_that_fits_is_kept_under_the_name_of_its_argument() {
        for (text, write) in [
            (r#"max_wait = "5s""#, r#"write `wait = "5s"`"#),
            (r#"max_wait = 5"#, r#"write `wait = "3s"`"#),
            (r#"leaseTime = "1 min""#, r#"write `ttl = "30s"`"#),
            (r#"tries = 7"#, "write `retry_count = 7`"),
            (r#"resource = "order:<id>""#, r#"write `key = "order:<id>"`"#),
            (r#"client = "orders""#, r#"write `pool = "orders"`"#),
            (r#"watchdog = "10s""#, r#"write `renew = "10s"`"#),
            (r#"on_busy = "ignore""#, r#"write `on_conflict = "skip"`"#),
        ] {
            let found = messages(&format!("key = \"a\", {text}"));
            assert!(found.iter().any(|message| message.contains(write)), "{text}: {found:#?}");
        }
    }

    #[test]
    fn two_wrong_values_are_two_errors() {
        assert_eq!(messages(r#"key = "<>", ttl = "5x""#).len(), 2);
    }

    #[test]
    fn keys_in_another_form_are_one_error() {
        for (text, help) in [
            (r#""a", "b""#, "name this argument: `keys = [\"a\", \"b\"]`"),
            (r#""a", ttl = "5s""#, "name this argument: `key = \"a\"`"),
            (r#"keys("a", "b")"#, "expected a `=` after `keys`"),
            (r#"key = "a", "b""#, "several keys are one list"),
            (r#"key = ("a", "b")"#, "several keys go into `keys`"),
            (r#"key = vec!["a", "b"]"#, "several keys go into `keys`"),
            (r#"key = order:<id>, ttl = "5s""#, "a key is text, with quotes"),
            (r#"key = "order", id"#, "`id` has no value"),
            (r#"key = "a", guard = mut lock"#, "without `mut`"),
        ] {
            let found = messages(text);
            assert_eq!(found.len(), 1, "{text}: {found:#?}");
            assert!(found[0].contains(help), "{text}: {found:#?}");
        }
        for list in [r#"&["a:<x>", K]"#, r#"vec!["a:<x>", "b"]"#, r#"("a:<x>", "b")"#] {
            let tokens = format!("keys = {list}").parse().unwrap();
            let args = Args::parse(tokens, &mut Errors::default());
            assert!(matches!(args.keys, Some(Keys::All(_))), "{list}");
        }
        for list in ["&[a, b]", "vec![a, b]", r#"vec!["a"; 2]"#, "list"] {
            let tokens = format!("keys = {list}").parse().unwrap();
            let args = Args::parse(tokens, &mut Errors::default());
            assert!(matches!(args.keys, Some(Keys::Computed(_))), "{list}");
        }
    }

    #[test]
    fn a_missing_comma_is_reported() {
        let found = messages(r#"key = "a" ttl = "5s", wait = 5"#);
        assert_eq!(found[0], "expected a `,` between arguments");
        assert_eq!(found.len(), 2);
    }
}
