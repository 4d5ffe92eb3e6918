//! The values of the arguments.

use std::time::Duration;

use proc_macro2::Span;
use syn::punctuated::Punctuated;
use syn::{
    Error, Expr, ExprBlock, ExprCall, ExprLit, ExprUnary, Ident, Lit, LitInt, LitStr, Path, Result,
    Stmt, Token, UnOp,
};

use crate::argument_names::example;
use crate::diagnostics::{Errors, closest};
use crate::duration;
use crate::template::Template;

pub(crate) enum Keys {
    One(Source),
    All(Vec<Source>),
    Computed(Expr),
}

pub(crate) enum Source {
    Template(LitStr, Template),
    Expression(Expr),
}

/// A duration: a constant, or an expression that is evaluated for each call.
pub(crate) enum Time {
    Constant(Constant),
    Expression(Expr),
}

#[derive(Clone, Copy)]
pub(crate) struct Constant {
    pub(crate) value: Duration,
    pub(crate) span: Span,
}

pub(crate) enum Wait {
    Forever(Span),
    For(Time),
}

pub(crate) enum Renew {
    Flag(bool, Span),
    Every(Time),
}

pub(crate) enum Pool {
    Named(LitStr),
    Given(Expr),
}

pub(crate) enum Count {
    Constant(LitInt),
    Expression(Expr),
}

impl Time {
    pub(crate) fn constant(&self) -> Option<Constant> {
        match self {
            Self::Constant(constant) => Some(*constant),
            Self::Expression(_) => None,
        }
    }
}

impl Keys {
    /// The templates and expressions in the attribute.
    pub(crate) fn sources(&self) -> &[Source] {
        match self {
            Self::One(source) => std::slice::from_ref(source),
            Self::All(sources) => sources,
            Self::Computed(_) => &[],
        }
    }

    pub(crate) fn templates(&self) -> impl Iterator<Item = (&LitStr, &Template)> {
        self.sources().iter().filter_map(|source| match source {
            Source::Template(literal, template) => Some((literal, template)),
            Source::Expression(_) => None,
        })
    }

    pub(crate) fn expressions(&self) -> impl Iterator<Item = &Expr> {
        let computed = match self {
            Self::Computed(expression) => Some(expression),
            Self::One(_) | Self::All(_) => None,
        };
        let of_sources = self.sources().iter().filter_map(|source| match source {
            Source::Expression(expression) => Some(expression),
            Source::Template(..) => None,
        });
        computed.into_iter().chain(of_sources)
    }
}

/// Removes parentheses, and the invisible groups around the values of `macro_rules!` fragments.
pub(crate) fn peel(value: Expr) -> Expr {
    match value {
        Expr::Group(group) => peel(*group.expr),
        Expr::Paren(paren) => peel(*paren.expr),
        other => other,
    }
}

pub(crate) fn key(value: Expr, errors: &mut Errors) -> Option<Keys> {
    if matches!(value, Expr::Array(_)) || list_of_texts(&value).is_some() {
        errors.push_over(&value, format!("several keys go into `keys`: `{}`", example("keys")));
        return None;
    }
    source("key", value, errors).map(Keys::One)
}

pub(crate) fn keys(value: Expr, errors: &mut Errors) -> Option<Keys> {
    if let Some(literal) = literal(&value) {
        let message = match literal {
            Lit::Str(text) => format!("a single key goes into `key`: `key = {}`", text.token()),
            _ => format!("`keys` takes a list: `{}`", example("keys")),
        };
        errors.push_over(&value, message);
        return None;
    }
    let elements = match list_of_texts(&value) {
        Some(elements) => elements,
        None => match &value {
            Expr::Array(array) => array.elems.clone(),
            _ => return Some(Keys::Computed(value)),
        },
    };
    if elements.is_empty() {
        errors.push_over(
            &value,
            format!("the list of keys is empty\nhelp: write `{}`", example("keys")),
        );
        return None;
    }
    let sources: Vec<_> =
        elements.into_iter().map(|element| source("keys", peel(element), errors)).collect();
    sources.into_iter().collect::<Option<_>>().map(Keys::All)
}

/// The elements of `&["a", "b"]`, `vec!["a", "b"]` or `("a", "b")`. Without a text among them, the list is an expression.
fn list_of_texts(value: &Expr) -> Option<Punctuated<Expr, Token![,]>> {
    let elements = match value {
        Expr::Reference(reference) => match &*reference.expr {
            Expr::Array(array) => array.elems.clone(),
            _ => return None,
        },
        Expr::Tuple(tuple) => tuple.elems.clone(),
        Expr::Macro(call) if call.mac.path.is_ident("vec") => {
            call.mac.parse_body_with(Punctuated::parse_terminated).ok()?
        }
        _ => return None,
    };
    let is_text = |element: &Expr| matches!(literal(element), Some(Lit::Str(_)));
    elements.iter().any(is_text).then_some(elements)
}

fn source(name: &str, value: Expr, errors: &mut Errors) -> Option<Source> {
    let text = match literal(&value) {
        None => return Some(Source::Expression(value)),
        Some(Lit::Str(text)) => text.clone(),
        Some(other) => {
            let message =
                format!("a key is text, not {}\nhelp: write `{}`", kind(other), example(name));
            errors.push_over(&value, message);
            return None;
        }
    };
    let (template, faults) = Template::scan_all(&text.value());
    for fault in faults {
        errors.push_fault(&text, &fault);
    }
    Some(Source::Template(text, template))
}

pub(crate) fn time(name: &str, value: Expr, errors: &mut Errors) -> Option<Time> {
    let message = match literal(&value) {
        None => return Some(Time::Expression(value)),
        Some(_) if matches!(value, Expr::Unary(_)) => {
            format!("`{name}` cannot be negative\nhelp: write `{}`", example(name))
        }
        Some(Lit::Str(text)) => return constant(text, errors).map(Time::Constant),
        Some(number) if is_quotable(number) => {
            format!("`{name}` is text\nhelp: write `{name} = \"{}\"`", shown(number))
        }
        Some(Lit::Int(number)) => {
            let number = number.base10_digits();
            format!(
                "`{name}` needs a unit\nhelp: `{name} = \"{number}s\"` is seconds, `{name} = \"{number}ms\"` milliseconds"
            )
        }
        Some(other) => format!(
            "`{name}` takes a duration, not {}\nhelp: write `{}`",
            kind(other),
            example(name)
        ),
    };
    errors.push_over(&value, message);
    None
}

fn constant(text: &LitStr, errors: &mut Errors) -> Option<Constant> {
    match duration::parse(&text.value()) {
        Ok(value) => Some(Constant { value, span: text.span() }),
        Err(fault) => {
            errors.push_fault(text, &fault);
            None
        }
    }
}

/// Whether the token is a duration without quotes, such as `5m`.
fn is_quotable(literal: &Lit) -> bool {
    matches!(literal, Lit::Int(_)) && duration::parse(&shown(literal)).is_ok()
}

fn shown(literal: &Lit) -> String {
    quote::ToTokens::to_token_stream(literal).to_string()
}

pub(crate) fn wait(value: Expr, errors: &mut Errors) -> Option<Wait> {
    match literal(&value) {
        Some(Lit::Str(text)) if text.value() == "forever" => Some(Wait::Forever(text.span())),
        Some(Lit::Str(text)) if ENDLESS.contains(&text.value().as_str()) => {
            let message = format!(
                "`wait` has no value `{}`\nhelp: `wait = \"forever\"` has no limit, `wait = \"0s\"` is one attempt",
                text.value()
            );
            errors.push(text.span(), message);
            None
        }
        Some(Lit::Str(text)) if closest(&text.value(), ["forever"]).is_some() => {
            errors.push(text.span(), "did you mean `wait = \"forever\"`?");
            None
        }
        Some(Lit::Bool(flag)) => {
            let write = if flag.value { "wait = \"forever\"" } else { "wait = \"0s\"" };
            errors.push(
                flag.span(),
                format!("`wait` takes a duration, not a bool\nhelp: write `{write}`"),
            );
            None
        }
        _ => time("wait", value, errors).map(Wait::For),
    }
}

pub(crate) fn renew(value: Expr, errors: &mut Errors) -> Option<Renew> {
    match literal(&value) {
        Some(Lit::Bool(flag)) => Some(Renew::Flag(flag.value, flag.span())),
        Some(Lit::Str(text)) if matches!(text.value().as_str(), "true" | "false") => {
            errors.push(text.span(), format!("write `renew = {}`, without quotes", text.value()));
            None
        }
        Some(Lit::Str(text)) if renews(&text.value()).is_some() => {
            let flag = renews(&text.value()).unwrap_or_default();
            errors.push(text.span(), format!("write `renew = {flag}`, or an interval"));
            None
        }
        _ => time("renew", value, errors).map(Renew::Every),
    }
}

/// Words for a wait without a limit, or for none.
const ENDLESS: [&str; 7] = ["never", "infinite", "infinity", "inf", "unlimited", "always", "none"];

/// What a word such as `off` means for `renew`.
pub(crate) fn renews(word: &str) -> Option<bool> {
    match word {
        "on" | "auto" | "yes" | "always" => Some(true),
        "off" | "no" | "none" | "never" => Some(false),
        _ => None,
    }
}

pub(crate) fn on_error(value: Expr) -> Result<Expr> {
    match &value {
        Expr::Path(_) | Expr::Closure(_) => Ok(value),
        Expr::Block(block) if ends_in_a_closure(block) => Ok(value),
        Expr::Call(call) if makes_value(call) => Err(Error::new_spanned(
            &value,
            format!(
                "`on_error` takes a function, not a value\nhelp: write `on_error = |_| {}`",
                tokens(&value)
            ),
        )),
        Expr::Call(call) if matches!(*call.func, Expr::Path(_)) => Err(Error::new_spanned(
            &value,
            format!("name the function without calling it: `on_error = {}`", tokens(&call.func)),
        )),
        _ => Err(Error::new_spanned(
            &value,
            "`on_error` takes a function or a closure from `LockError` to the return type\n\
             help: write `on_error = path::to::function` or `on_error = |error| ...`",
        )),
    }
}

/// Whether `call` looks like a constructor, such as `Ok(0)` or `Default::default()`.
pub(crate) fn makes_value(call: &ExprCall) -> bool {
    let Expr::Path(function) = &*call.func else { return false };
    function.path.segments.last().is_some_and(|segment| {
        let name = segment.ident.to_string();
        name.starts_with(char::is_uppercase) || matches!(&*name, "default" | "new" | "from")
    })
}

fn ends_in_a_closure(block: &ExprBlock) -> bool {
    block.label.is_none()
        && matches!(block.block.stmts.last(), Some(Stmt::Expr(Expr::Closure(_), None)))
}

pub(crate) fn pool(value: Expr) -> Result<Pool> {
    match literal(&value) {
        None => Ok(Pool::Given(value)),
        Some(Lit::Str(name)) if name.value().is_empty() => {
            Err(Error::new(name.span(), "the pool's name is empty"))
        }
        Some(Lit::Str(name)) if name.value().contains("://") => Err(Error::new(
            name.span(),
            "`pool` takes the name of an installed pool, not a URL\n\
             help: the URL belongs in `lock_runtime::init(url)`, or in `LockPool::connect(url)` for a pool that is installed under a name",
        )),
        Some(Lit::Str(name)) => Ok(Pool::Named(name.clone())),
        Some(_) => Err(Error::new_spanned(
            &value,
            "`pool` takes the name of an installed pool or an expression\n\
             help: write `pool = \"name\"` or `pool = self.locks`",
        )),
    }
}

pub(crate) fn guard(value: &Expr) -> Result<Ident> {
    let is_new = |name: &&Ident| !["self", "Self", "crate", "super"].iter().any(|it| *name == it);
    let not_new =
        || Error::new_spanned(value, "`guard` takes a new name for the body: `guard = lock`");
    match value {
        Expr::Path(path) => path.path.get_ident().filter(is_new).cloned().ok_or_else(not_new),
        Expr::Infer(_) => {
            Err(Error::new_spanned(value, "a guard named `_` cannot be used; leave `guard` out"))
        }
        Expr::Lit(ExprLit { lit: Lit::Str(text), .. }) => {
            let name = text.value();
            let name = if syn::parse_str::<Ident>(&name).is_ok() { &name } else { "lock" };
            Err(Error::new(
                text.span(),
                format!("write the guard's name without quotes: `guard = {name}`"),
            ))
        }
        _ => Err(not_new()),
    }
}

pub(crate) fn when(value: Expr) -> Result<Expr> {
    match literal(&value) {
        None | Some(Lit::Bool(_)) => Ok(value),
        Some(Lit::Str(text)) => Err(Error::new(
            text.span(),
            format!("write the condition without quotes: `when = {}`", text.value()),
        )),
        Some(other) => Err(Error::new_spanned(
            &value,
            format!("`when` takes a condition, not {}", kind(other)),
        )),
    }
}

pub(crate) fn reentrant(value: &Expr) -> Result<bool> {
    match literal(value) {
        Some(Lit::Bool(flag)) => Ok(flag.value),
        _ => Err(Error::new_spanned(value, "`reentrant` takes `true` or `false`")),
    }
}

pub(crate) fn retry_count(value: Expr) -> Result<Count> {
    match literal(&value) {
        None => Ok(Count::Expression(value)),
        Some(Lit::Int(number)) if !matches!(value, Expr::Unary(_)) => {
            match number.base10_parse::<u32>() {
                Ok(_) if number.suffix().is_empty() || number.suffix() == "u32" => {
                    Ok(Count::Constant(number.clone()))
                }
                _ => Err(Error::new(number.span(), "`retry_count` is a `u32`")),
            }
        }
        Some(_) => Err(Error::new_spanned(
            &value,
            "`retry_count` takes a whole number, such as `retry_count = 10`",
        )),
    }
}

pub(crate) fn name(value: &Expr) -> Result<LitStr> {
    match literal(value) {
        Some(Lit::Str(text)) if text.value().trim().is_empty() => Err(Error::new(
            text.span(),
            "the name is empty; leave `name` out for `module::function`",
        )),
        Some(Lit::Str(text)) => Ok(text.clone()),
        _ => Err(Error::new_spanned(
            value,
            "`name` takes a string literal: it labels the function in events\n\
             help: what is locked goes into `key`",
        )),
    }
}

pub(crate) fn crate_path(value: &Expr) -> Result<Path> {
    let message = "`crate` takes the path of the lock-runtime crate";
    match value {
        Expr::Path(path) if path.qself.is_none() => Ok(path.path.clone()),
        Expr::Lit(ExprLit { lit: Lit::Str(text), .. }) => {
            text.parse_with(Path::parse_mod_style).map_err(|_| Error::new(text.span(), message))
        }
        _ => Err(Error::new_spanned(value, message)),
    }
}

/// The literal in `value`, even after a minus.
fn literal(value: &Expr) -> Option<&Lit> {
    match value {
        Expr::Lit(literal) => Some(&literal.lit),
        Expr::Unary(ExprUnary { op: UnOp::Neg(_), expr, .. }) => literal(expr),
        _ => None,
    }
}

fn kind(literal: &Lit) -> &'static str {
    match literal {
        Lit::Str(_) => "a string",
        Lit::ByteStr(_) | Lit::CStr(_) => "bytes",
        Lit::Byte(_) | Lit::Int(_) | Lit::Float(_) => "a number",
        Lit::Char(_) => "a character",
        Lit::Bool(_) => "a bool",
        _ => "this literal",
    }
}

pub(crate) fn tokens(value: &Expr) -> String {
    quote::ToTokens::to_token_stream(value).to_string().replace(" :: ", "::")
}
