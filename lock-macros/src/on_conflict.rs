//! Values of `on_conflict`, `on_lost` and `release`.

use proc_macro2::Span;
use syn::{Error, Expr, ExprField, ExprLit, ExprMethodCall, Ident, Lit, LitStr, Member, Result};

use crate::diagnostics::closest;
use crate::value::{makes_value, tokens};

pub(crate) enum OnConflict {
    Error,
    Skip,
    Fallback(Expr),
}

/// One of the values of an argument, by the name of its variant in the runtime.
#[derive(Clone, Copy)]
pub(crate) struct Choice {
    pub(crate) variant: &'static str,
    pub(crate) span: Span,
}

pub(crate) fn on_conflict(value: Expr) -> Result<OnConflict> {
    match &value {
        Expr::Lit(ExprLit { lit: Lit::Str(text), .. }) => match text.value().as_str() {
            "error" => Ok(OnConflict::Error),
            "skip" => Ok(OnConflict::Skip),
            other => Err(not_a_policy("on_conflict", text, other, &["error", "skip"])),
        },
        Expr::Path(path) => match path.path.get_ident().map(Ident::to_string).as_deref() {
            Some(policy @ ("error" | "skip")) => Err(unquoted("on_conflict", &value, policy)),
            Some("None") => Err(Error::new_spanned(
                &value,
                "`on_conflict` takes a function, not a value\nhelp: `on_conflict = \"skip\"` returns `None`, `Ok(None)` or `Ok(())`",
            )),
            _ => Ok(OnConflict::Fallback(value)),
        },
        Expr::Call(call) if makes_value(call) => Err(Error::new_spanned(
            &value,
            format!(
                "`on_conflict` takes a function, not a value\n\
                 help: write an async function with the same parameters that returns `{}`, and its name here: `{EXAMPLE}`",
                tokens(&value)
            ),
        )),
        Expr::Call(call) => Err(Error::new_spanned(
            &value,
            format!("name the fallback without calling it: `on_conflict = {}`", tokens(&call.func)),
        )),
        Expr::Field(ExprField { base, member: Member::Named(method), .. })
        | Expr::MethodCall(ExprMethodCall { receiver: base, method, .. })
            if is_self(base) =>
        {
            Err(Error::new_spanned(
                &value,
                format!("name the fallback by its path: `on_conflict = Self::{method}`"),
            ))
        }
        Expr::Closure(_) => Err(Error::new_spanned(
            &value,
            "`on_conflict` takes the path of a function with the same parameters, not a closure",
        )),
        _ => Err(Error::new_spanned(
            &value,
            "`on_conflict` takes `\"error\"`, `\"skip\"` or the path of a function with the same parameters",
        )),
    }
}

fn is_self(value: &Expr) -> bool {
    matches!(value, Expr::Path(path) if path.path.is_ident("self"))
}

const EXAMPLE: &str = "on_conflict = path::to::function";

pub(crate) fn on_lost(value: &Expr) -> Result<Choice> {
    choice("on_lost", value, [("cancel", "Cancel"), ("notify", "Notify")])
}

pub(crate) fn release(value: &Expr) -> Result<Choice> {
    choice("release", value, [("await", "Awaited"), ("background", "Background")])
}

fn choice(name: &str, value: &Expr, values: [(&str, &'static str); 2]) -> Result<Choice> {
    let [(first, _), (second, _)] = values;
    let wrong = || {
        let message = format!("`{name}` takes `\"{first}\"` or `\"{second}\"`");
        Err(Error::new_spanned(value, message))
    };
    match value {
        Expr::Lit(ExprLit { lit: Lit::Str(text), .. }) => {
            let written = text.value();
            match values.iter().find(|(value, _)| *value == written) {
                Some((_, variant)) => Ok(Choice { variant, span: text.span() }),
                None => Err(not_a_policy(name, text, &written, &[first, second])),
            }
        }
        Expr::Path(path) => {
            let written = path.path.get_ident().map(Ident::to_string);
            match values.iter().find(|(value, _)| Some(*value) == written.as_deref()) {
                Some((quoted, _)) => Err(unquoted(name, value, quoted)),
                None => wrong(),
            }
        }
        _ => wrong(),
    }
}

fn not_a_policy(name: &str, text: &LitStr, found: &str, policies: &[&str]) -> Error {
    let choices = policies.iter().map(|policy| format!("`\"{policy}\"`")).collect::<Vec<_>>();
    let mut message = format!("`{name}` has no policy `{found}`");
    match closest(found, policies.iter().copied()) {
        Some(policy) => message.push_str(&format!("\nhelp: did you mean `\"{policy}\"`?")),
        None => message.push_str(&format!("\nhelp: the policies are {}", choices.join(" and "))),
    }
    if name == "on_conflict" {
        message.push_str("\nhelp: a fallback function is named without quotes");
    }
    Error::new(text.span(), message)
}

fn unquoted(name: &str, value: &Expr, policy: &str) -> Error {
    Error::new_spanned(value, format!("write `{name} = \"{policy}\"`, with quotes"))
}
