//! Checks the arguments against each other, the function and its parameters.

use std::time::Duration;

use quote::ToTokens;
use syn::ext::IdentExt;
use syn::{Expr, LitStr, Meta};

use crate::args::Args;
use crate::diagnostics::{Errors, Fault, closest, listed};
use crate::item::{Function, Shape};
use crate::literal_text::{self, braced};
use crate::on_conflict::OnConflict;
use crate::params::{Param, Params};
use crate::template::{Name, Slot, Template};
use crate::tokens::{strings, uses};
use crate::value::{Constant, Keys, Pool, Renew, Source, Time, Wait, renews};

const SHORTEST_TTL: Duration = Duration::from_millis(10);
const LONGEST_TTL: Duration = Duration::from_secs(7 * 24 * 60 * 60);
const LONGEST_DELAY: Duration = Duration::from_secs(60);
const SHORTEST_INTERVAL: Duration = Duration::from_millis(2);
/// What the validity of a lease loses to the rounding of stores.
const ROUNDING: Duration = Duration::from_millis(2);

pub(crate) fn check(args: &Args, function: &Function, params: &Params, errors: &mut Errors) {
    signature(function, errors);
    entry_point(args, function, errors);
    keys(args, function, params, errors);
    pool(args, params, errors);
    guard(args, params, errors);
    fallback(args, params, errors);
    times(args, errors);
    words(args, params, errors);
    tries(args, errors);
    linger(args, errors);
    reentrant(args, errors);
    twins(args, function, errors);
}

fn signature(function: &Function, errors: &mut Errors) {
    let sig = &function.sig;
    if let Some(constness) = sig.constness {
        errors.push(constness.span, "a `const fn` cannot wait for a lock; write `async fn`");
        return;
    }
    if let Some(abi) = &sig.abi {
        errors.push_over(
            abi,
            "an `extern` function has no lock of its own: another language cannot await it; lock in the function that it calls",
        );
        return;
    }
    if let Some(variadic) = &sig.variadic {
        errors.push_over(variadic, "a variadic function cannot be async");
        return;
    }
    if !matches!(function.shape, Shape::Sync) {
        return;
    }
    let mut message = "`#[distributed_lock]` needs an `async fn`, or a body that is one `async move { .. }` block or a `Box::pin` of one\n\
        help: where the function has to block, lock by hand: `let guard = handle.block_on(pool.lock(\"order:42\").acquire())?;`".to_owned();
    if function.mentions("block_on") {
        message.push_str(
            "\nhelp: if this is an `async fn` under `#[tokio::main]` or `#[tokio::test]`, lock another `async fn` that it calls: its own body installs the pool",
        );
    }
    errors.push(sig.fn_token.span, message);
}

/// The lock of `main`, or of a test, would be requested before its body can install a pool.
fn entry_point(args: &Args, function: &Function, errors: &mut Errors) {
    if let Some(Pool::Given(_)) = &args.pool {
        return;
    }
    for attr in &function.attrs {
        let path = attr.path();
        let is_of_runtime = path.segments.len() > 1
            && path
                .segments
                .last()
                .is_some_and(|last| last.ident == "main" || last.ident == "test");
        if is_of_runtime {
            let name = &function.sig.ident;
            let message = format!(
                "`{name}` would request its lock before its body can install a pool\n\
                help: lock another `async fn`, and call it from `{name}`; `pool = expression` takes a pool that is there before"
            );
            errors.push_over(attr, message);
        }
    }
}

fn keys(args: &Args, function: &Function, params: &Params, errors: &mut Errors) {
    if let (Some(key), Some(keys)) = (args.written("key"), args.written("keys")) {
        let both = "`key` and `keys` are both given; write all of them as `keys = [..]`";
        errors.push(if args.key_came_last() { key } else { keys }, both);
    } else if args.written("key").is_none() && args.written("keys").is_none() {
        let message = format!(
            "`key` is missing: it names what is locked\nhelp: write `{}`",
            suggestion(function, params)
        );
        errors.push(proc_macro2::Span::call_site(), message);
    }
    let Some(keys) = &args.keys else { return };
    for (literal, template) in keys.templates() {
        placeholders(literal, template, params, errors);
        if !template.is_partial {
            literal_text::check(literal, template, params, errors);
            reserved(literal, errors);
        }
    }
    for expression in keys.expressions() {
        placeholders_in_code(expression, params, errors);
    }
}

/// In an expression, as in `concat!("order:", "<id>")`, a placeholder is text, and all ids would share one key. So is `{id}`
/// outside a macro. An expression that uses the parameter too may replace the text: `TEMPLATE.replace("<id>", &id)`.
fn placeholders_in_code(expression: &Expr, params: &Params, errors: &mut Errors) {
    let used = uses(expression.to_token_stream());
    let is_ignored = |name: &str| params.find(name).is_some() && used.iter().all(|it| it != name);
    for (literal, may_be_format) in &strings(expression.to_token_stream()) {
        let text = literal.value();
        let template = Template::scan(&text);
        let slots = template.iter().flat_map(Template::slots);
        let ignored = slots.filter(|slot| is_ignored(&slot.root.text));
        let mut ranges: Vec<_> = ignored.map(Slot::range).collect();
        if !may_be_format {
            let braced = braced(&text).filter(|braced| is_ignored(braced.name));
            ranges.extend(braced.map(|braced| braced.range));
        }
        for range in ranges {
            let message = format!("`{}` is literal text in an expression", &text[range.clone()]);
            let help = "write the key as one string literal, or build its text with `format!`";
            errors.push_fault(literal, &Fault::new(range, message).help(help));
        }
    }
}

/// Names beside the locks are also refused at run time.
fn reserved(literal: &LitStr, errors: &mut Errors) {
    const RESERVED: &str = "lock_runtime:";
    if let Some(at) = literal.value().find(RESERVED) {
        let fault = Fault::new(at..at + RESERVED.len(), format!("no key contains `{RESERVED}`"));
        errors.push_fault(
            literal,
            &fault.help("such names are reserved for what is kept beside the locks"),
        );
    }
}

/// `#[distributed_lock(key = "settle:<id>")]`
fn suggestion(function: &Function, params: &Params) -> String {
    let name = function.sig.ident.unraw();
    let parameter = params.iter().find_map(|param| match param {
        Param::Plain(plain) => params.find(&plain.unraw().to_string()),
        Param::Pattern { names, .. } => names.first(),
        Param::Receiver(_) => None,
    });
    match parameter {
        Some(parameter) => format!("#[distributed_lock(key = \"{name}:<{}>\")]", parameter.unraw()),
        None => format!("#[distributed_lock(key = \"{name}\")]"),
    }
}

fn placeholders(literal: &LitStr, template: &Template, params: &Params, errors: &mut Errors) {
    for slot in template.slots() {
        for name in slot.names() {
            if params.find(&name.text).is_none() {
                errors.push_fault(literal, &unknown(name, params));
            }
        }
    }
}

fn unknown(name: &Name, params: &Params) -> Fault {
    let range = name.range.clone();
    if name.text == "self" {
        let names = params.unraw_names();
        let fault = Fault::new(range, "this function has no `self`");
        return match names.is_empty() {
            true => fault,
            false => fault.help(format!("available: {}", listed(names.iter().map(String::as_str)))),
        };
    }
    let fault = Fault::new(range, format!("no parameter is named `{}`", name.text));
    if params.has_generated() {
        return fault.help(
            "`#[async_trait]` hides the names of a destructured parameter; \
             take it whole, as in `item: Json<Item>`, and destructure it in the body",
        );
    }
    let names = params.unraw_names();
    let names = || names.iter().map(String::as_str);
    let is_constant =
        name.text.contains(char::is_uppercase) && !name.text.contains(char::is_lowercase);
    if is_constant && !names().any(|own| own.eq_ignore_ascii_case(&name.text)) {
        return fault.help(format!(
            "a constant goes into an expression: `key = format!(\"..{{{}}}..\")`",
            name.text
        ));
    }
    match closest(&name.text, names()) {
        Some(meant) => fault.help(format!("did you mean `{meant}`?")),
        None if params.iter().next().is_none() => fault.help("the function has no parameters"),
        None if names().next().is_none() => fault.help("a key can use a parameter that has a name"),
        None => {
            let receiver = if params.has_receiver() {
                format!("; a field is written `<self.{}>`", name.text)
            } else {
                String::new()
            };
            fault.help(format!("available: {}{receiver}", listed(names())))
        }
    }
}

/// A bare lower-case name can only be a parameter; the name of an installed pool is quoted.
fn pool(args: &Args, params: &Params, errors: &mut Errors) {
    let Some(Pool::Given(Expr::Path(path))) = &args.pool else { return };
    let Some(name) = path.path.get_ident() else { return };
    let name = name.unraw().to_string();
    let is_lower_case = !name.contains(char::is_uppercase);
    if is_lower_case && params.find(&name).is_none() {
        errors.push_over(
            path,
            format!(
                "no parameter is named `{name}`\nhelp: a pool that is installed under this name is written `pool = \"{name}\"`"
            ),
        );
    }
}

fn guard(args: &Args, params: &Params, errors: &mut Errors) {
    let Some(guard) = &args.guard else { return };
    if args.when.is_some() {
        errors.push(
            guard.span(),
            "a body that runs without the lock has no guard; use `guard` or `when`, not both",
        );
    }
    if params.find(&guard.unraw().to_string()).is_some() {
        errors.push(
            guard.span(),
            format!("`guard = {guard}` would hide the parameter `{guard}`; choose another name"),
        );
    }
}

fn fallback(args: &Args, params: &Params, errors: &mut Errors) {
    let Some(OnConflict::Fallback(path)) = &args.on_conflict else { return };
    let message = "a fallback is called with the same arguments, so each parameter needs a name; destructure it in the body";
    for param in params.iter() {
        if let Param::Pattern { pattern, .. } = param {
            errors.push_over(pattern, message);
        }
    }
    // `#[async_trait]` has moved the pattern into the body.
    if params.has_generated() {
        errors.push_over(path, message);
    }
}

/// Whether every pool refuses this interval, also one with a `drift_factor` of zero: the rule of `Ttl::longest_interval` in the
/// runtime.
fn is_renewed_too_late(every: Duration, ttl: Duration, args: &Args) -> bool {
    if ttl < SHORTEST_TTL {
        return false;
    }
    let margin = match &args.max_hold {
        None => cancel_margin(ttl),
        Some(Time::Constant(max_hold)) => cancel_margin(max_hold.value.min(ttl)),
        Some(Time::Expression(_)) => cancel_margin(Duration::ZERO),
    };
    let confirmed = ttl.saturating_sub(ROUNDING + margin);
    every > confirmed.saturating_mul(2) / 3
}

/// How long before the end of its validity a body is cancelled.
fn cancel_margin(hold: Duration) -> Duration {
    (hold / 10).clamp(Duration::from_millis(1), Duration::from_millis(500))
}

fn times(args: &Args, errors: &mut Errors) {
    let ttl = args.ttl.as_ref().and_then(Time::constant);
    let max_hold = args.max_hold.as_ref().and_then(Time::constant);
    let min_hold = args.min_hold.as_ref().and_then(Time::constant);
    if let Some(Constant { value, span }) = ttl {
        if value.is_zero() {
            errors.push(span, "a `ttl` of zero is over before the body starts");
        } else if value < SHORTEST_TTL {
            errors.push(span, "`ttl` is at least `\"10ms\"`: less is too short for a network");
        } else if value > LONGEST_TTL {
            errors.push(
                span,
                "`ttl` is at most `\"7d\"`: it is how long a crashed holder blocks others\n\
                 help: the lease is renewed while the body runs, so a short `ttl` does not limit it",
            );
        }
    }
    if let Some(Renew::Every(Time::Constant(every))) = &args.renew {
        if every.value.is_zero() {
            errors.push(
                every.span,
                "a lease cannot be renewed every `0s`\nhelp: `renew = false` turns renewal off",
            );
        } else if every.value < SHORTEST_INTERVAL {
            errors.push(
                every.span,
                "`renew` is at least `\"2ms\"`: renewals cannot be more frequent\nhelp: `renew = true` renews after a third of the `ttl`",
            );
        } else if let Some(ttl) = ttl.filter(|ttl| every.value > ttl.value / 2) {
            let message = format!(
                "`renew` is more than half of the `ttl`, {:?}: it leaves no time for a second try if the first one fails\nhelp: `renew = true` renews after a third of it",
                ttl.value
            );
            errors.push(every.span, message);
        } else if let Some(ttl) =
            ttl.filter(|ttl| is_renewed_too_late(every.value, ttl.value, args))
        {
            let message = format!(
                "`renew` leaves no time to confirm a renewal before a body is cancelled, with a `ttl` of {:?}\nhelp: `renew = true` renews after a third of it",
                ttl.value
            );
            errors.push(every.span, message);
        }
    }
    if let Some(max) = max_hold.filter(|max| max.value < SHORTEST_TTL) {
        errors.push(
            max.span,
            "`max_hold` is at least `\"10ms\"`: anything less is over before the body starts",
        );
    } else if let (Some(max), Some(min)) = (max_hold, min_hold)
        && min.value > max.value
    {
        errors.push(min.span, "`min_hold` is longer than `max_hold`");
    }
    if let Some(min) = min_hold.filter(|min| min.value > LONGEST_TTL) {
        errors.push(min.span, "`min_hold` is at most `\"7d\"`: the lock stays taken for that time");
    }
    let lock_delay = args.lock_delay.as_ref().and_then(Time::constant);
    if let Some(delay) = lock_delay.filter(|delay| delay.value > LONGEST_DELAY) {
        errors.push(
            delay.span,
            "`lock_delay` is at most `\"1m\"`: it is how long late writes of a lost holder may take",
        );
    }
    if let (Some(max), Some(ttl), Some(Renew::Flag(false, _))) = (max_hold, ttl, &args.renew)
        && max.value > ttl.value
    {
        errors.push(
            max.span,
            "without renewal the hold ends with its `ttl`, before `max_hold`\n\
             help: leave `max_hold` out, or `renew = false`",
        );
    }
    if let Some(delay) = args.retry_delay.as_ref().and_then(Time::constant) {
        if delay.value.is_zero() {
            errors.push(delay.span, "a `retry_delay` of zero would flood the store");
        } else if delay.value > LONGEST_TTL {
            errors.push(delay.span, "`retry_delay` is at most `\"7d\"`");
        }
    }
}

/// A bare word that is no parameter, such as `wait = forever`.
fn words(args: &Args, params: &Params, errors: &mut Errors) {
    let word = |value: &Expr| match value {
        Expr::Path(path) => path.path.get_ident().map(ToString::to_string),
        _ => None,
    };
    let unbound = |value: &Expr| word(value).filter(|word| params.find(word).is_none());
    if let Some(Wait::For(Time::Expression(value))) = &args.wait
        && unbound(value).is_some_and(|word| word == "forever")
    {
        errors.push_over(value, "write `wait = \"forever\"`, with quotes");
    }
    if let Some(Renew::Every(Time::Expression(value))) = &args.renew
        && let Some(flag) = unbound(value).and_then(|word| renews(&word))
    {
        errors.push_over(value, format!("write `renew = {flag}`, or an interval"));
    }
}

/// A wait of zero is one attempt.
fn tries(args: &Args, errors: &mut Errors) {
    let Some(Wait::For(Time::Constant(wait))) = &args.wait else { return };
    if !wait.value.is_zero() {
        return;
    }
    for name in ["retry_delay", "retry_count"] {
        if let Some(span) = args.written(name) {
            let message = format!(
                "`wait = \"0s\"` is one attempt, and `{name}` is about retries\nhelp: leave `{name}` out, or set a longer `wait`"
            );
            errors.push(span, message);
        }
    }
}

/// A lock that lingers has one lease for several holds.
fn linger(args: &Args, errors: &mut Errors) {
    let Some(Time::Constant(linger)) = &args.linger else { return };
    if linger.value > LONGEST_DELAY {
        errors.push(
            linger.span,
            "`linger` is at most `\"1m\"`: it is how long a process keeps a lock that it does not use",
        );
    }
    let min_hold = args.min_hold.as_ref().and_then(Time::constant);
    for (name, is_excluded) in [
        ("keys", true),
        ("max_hold", true),
        ("min_hold", min_hold.is_some_and(|min| !min.value.is_zero())),
        ("renew", matches!(args.renew, Some(Renew::Flag(false, _)))),
    ] {
        if let Some(span) = args.written(name).filter(|_| is_excluded && !linger.value.is_zero()) {
            let message = format!(
                "`{name}` and `linger` exclude each other: a lock that lingers has one key, and one lease for several holds\nhelp: leave one of them out"
            );
            errors.push(span, message);
        }
    }
}

/// A reentrant call that passes through an outer lock has no lease of its own.
fn reentrant(args: &Args, errors: &mut Errors) {
    if args.reentrant != Some(true) {
        return;
    }
    let is_set = |time: &Option<Time>| {
        time.as_ref().and_then(Time::constant).is_some_and(|time| !time.value.is_zero())
    };
    // Computed values are checked at run time.
    let renews =
        !matches!(args.renew, Some(Renew::Flag(false, _) | Renew::Every(Time::Constant(_))));
    for (name, is_excluded) in [
        ("max_hold", args.max_hold.is_some()),
        ("min_hold", is_set(&args.min_hold)),
        ("lock_delay", is_set(&args.lock_delay)),
        ("renew", !renews),
    ] {
        if let Some(span) = args.written(name).filter(|_| is_excluded) {
            let message = format!(
                "`{name}` and `reentrant` exclude each other: a call that passes through the lock around it has no lease of its own\nhelp: set `{name}` on the outermost function, or lock in one that is not `reentrant`"
            );
            errors.push(span, message);
        }
    }
}

/// A second attribute with the same key would wait for the first. With other keys in the same pool, two functions
/// that nest them in opposite orders would deadlock; `keys` acquires them in one order.
fn twins(args: &Args, function: &Function, errors: &mut Errors) {
    let Some(own) = args.keys.as_ref().map(text) else { return };
    for attr in &function.attrs {
        let Meta::List(list) = &attr.meta else { continue };
        if list.path.segments.last().is_none_or(|last| last.ident != "distributed_lock") {
            continue;
        }
        let twin = Args::parse(list.tokens.clone(), &mut Errors::default());
        if pool_text(&twin) != pool_text(args) {
            continue;
        }
        let Some(other) = twin.keys.as_ref().map(text) else { continue };
        let message = if other == own {
            format!("this function is already locked by `{own}`; it would wait for itself")
        } else {
            format!(
                "this function is already locked by `{own}`\nhelp: one attribute takes several keys, without deadlocks: `keys = [\"..\", \"..\"]`"
            )
        };
        errors.push_over(attr, message);
    }
}

/// The pool as written in the attribute.
fn pool_text(args: &Args) -> String {
    match &args.pool {
        None => "default".to_owned(),
        Some(Pool::Named(name)) => name.value(),
        Some(Pool::Given(expression)) => format!("= {}", expression.to_token_stream()),
    }
}

/// The keys as written in the attribute.
pub(crate) fn text(keys: &Keys) -> String {
    let written = |source: &Source| match source {
        Source::Template(literal, _) => literal.value(),
        Source::Expression(expression) => expression.to_token_stream().to_string(),
    };
    match keys {
        Keys::Computed(expression) => expression.to_token_stream().to_string(),
        _ => keys.sources().iter().map(written).collect::<Vec<_>>().join(", "),
    }
}

#[cfg(test)]
mod tests {
    /// Of a ttl of some milliseconds, rounding and the margin of the cancellation are a large share.
    #[test]
    fn an_interval_that_every_pool_refuses_is_an_error() {
        let is_refused = |args: &str| {
            let args = format!("key = \"a\", {args}").parse().unwrap();
            let item = "async fn load(limit: Duration) {}".parse().unwrap();
            let output = crate::attribute(args, &item).to_string();
            output.contains("leaves no time to confirm a renewal")
        };
        for (args, expected) in [
            (r#"ttl = "10ms", renew = "5ms""#, true),
            (r#"ttl = "10ms", renew = "4ms""#, false),
            (r#"ttl = "12ms", renew = "6ms""#, true),
            (r#"ttl = "12ms", renew = "5ms""#, false),
            (r#"ttl = "12ms", renew = "6ms", max_hold = "10ms""#, false),
            (r#"ttl = "12ms", renew = "6ms", max_hold = "1s""#, true),
            (r#"ttl = "12ms", renew = "6ms", max_hold = limit"#, false),
            (r#"ttl = "20ms", renew = "10ms""#, false),
            (r#"ttl = "30s", renew = "15s""#, false),
            (r#"renew = "5ms""#, false),
            (r#"ttl = limit, renew = "5ms""#, false),
        ] {
            assert_eq!(is_refused(args), expected, "{args}");
        }
    }
}
