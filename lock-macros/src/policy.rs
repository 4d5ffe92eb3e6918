//! What happens when the lock is taken by somebody else, or lost.

use proc_macro2::Span;
use syn::{Error, Expr, ExprLit, Ident, Lit, LitStr, Result};

use crate::diag::closest;
use crate::value::tokens;

pub(crate) enum OnConflict {
    Error,
    Skip,
    Fallback(Expr),
}

#[derive(Clone, Copy)]
pub(crate) enum OnLost {
    Cancel(Span),
    Notify(Span),
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
            _ => Ok(OnConflict::Fallback(value)),
        },
        Expr::Call(call) => Err(Error::new_spanned(
            &value,
            format!("name the fallback without calling it: `on_conflict = {}`", tokens(&call.func)),
        )),
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

pub(crate) fn on_lost(value: &Expr) -> Result<OnLost> {
    match value {
        Expr::Lit(ExprLit { lit: Lit::Str(text), .. }) => match text.value().as_str() {
            "cancel" => Ok(OnLost::Cancel(text.span())),
            "notify" => Ok(OnLost::Notify(text.span())),
            other => Err(not_a_policy("on_lost", text, other, &["cancel", "notify"])),
        },
        Expr::Path(path) => match path.path.get_ident().map(Ident::to_string).as_deref() {
            Some(policy @ ("cancel" | "notify")) => Err(unquoted("on_lost", value, policy)),
            _ => Err(Error::new_spanned(value, "`on_lost` takes `\"cancel\"` or `\"notify\"`")),
        },
        _ => Err(Error::new_spanned(value, "`on_lost` takes `\"cancel\"` or `\"notify\"`")),
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
