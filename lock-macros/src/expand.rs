//! Input:
//!
//! ```ignore
//! #[distributed_lock(key = "order:<order.id>", ttl = "5s")]
//! pub async fn pay(&self, order: Order) -> Result<Receipt, Error> { BODY }
//! ```
//!
//! Output, with `P` for `::lock_runtime::__private`:
//!
//! ```ignore
//! pub async fn pay(&self, order: Order) -> Result<Receipt, Error> {
//!     let __site = { static __SITE: P::Site = P::Site::new(..); &__SITE };
//!     let __call = P::Call::new(__site).key({
//!         let mut __key = P::KeyWriter::new(__site, 22);
//!         __key.text("order:");
//!         __key.part("order.id", &order.id, None);
//!         __key.finish()
//!     });
//!     let __error = match P::enter(__call).await {
//!         Ok(__entry) => match __entry.run(async move {
//!             if let Some(__anchor) = None::<Result<Receipt, Error>> { return __anchor; }
//!             { BODY }
//!         }).await {
//!             Ok(__output) => return __output,
//!             Err(__error) => __error,
//!         },
//!         Err(__error) => __error,
//!     };
//!     P::FromLockError::from_lock_error(__error)
//! }
//! ```

use proc_macro2::{Delimiter, Group, Ident, Literal, Span, TokenStream};
use quote::{ToTokens, quote, quote_spanned};
use syn::ext::IdentExt;
use syn::spanned::Spanned;
use syn::{Expr, Index, LitStr};

use crate::args::Args;
use crate::check::text;
use crate::item::{Function, nameable};
use crate::params::{Param, Params};
use crate::paths::{Runtime, located};
use crate::template::{Access, Part, Slot, Template};
use crate::value::{Constant, Count, Keys, OnConflict, OnLost, Pool, Renew, Source, Time, Wait};

/// Guessed length of a rendered placeholder.
const PART: usize = 16;

pub(crate) fn expand(args: &Args, function: &Function, params: &Params) -> TokenStream {
    let expansion = Expansion {
        args,
        function,
        params,
        runtime: Runtime::new(args.crate_path.as_ref()),
        span: located(function.body_span()),
    };
    function.with_body(expansion.body())
}

struct Expansion<'a> {
    args: &'a Args,
    function: &'a Function,
    params: &'a Params,
    runtime: Runtime<'a>,
    /// Of the skeleton.
    span: Span,
}

impl Expansion<'_> {
    fn body(&self) -> TokenStream {
        let (inner_attributes, statements) = self.function.body();
        let span = self.span;
        let runtime = self.runtime.at(span);
        let site = self.site();
        let call = self.call();
        let guard =
            self.args.guard.as_ref().map(|_| quote_spanned!(span=> let __guard = __entry.guard();));
        let body = self.locked(statements);
        let conflict = self.conflict();
        let error = self.error();
        let result = quote_spanned!(span=> ::core::result::Result);
        quote_spanned! {span=>
            #inner_attributes
            let __site = #site;
            #call
            let __error = match #runtime::enter(__call).await {
                #result::Ok(__entry) => {
                    #guard
                    match __entry.run(#body).await {
                        #result::Ok(__output) => return __output,
                        #result::Err(__error) => __error,
                    }
                }
                #result::Err(__error) => #conflict,
            };
            #error
        }
    }

    /// A block, because items are not hygienic: the body could name a `static` beside it.
    fn site(&self) -> TokenStream {
        let span = self.span;
        let runtime = self.runtime.at(span);
        let function = spanned(Literal::string(&self.function.sig.ident.unraw().to_string()), span);
        let template =
            spanned(Literal::string(&self.args.keys.as_ref().map(text).unwrap_or_default()), span);
        let options = self.options();
        let name = self.args.name.as_ref().map(|name| {
            let text = spanned(Literal::string(&name.value()), located(name.span()));
            quote_spanned!(span=> .name(#text))
        });
        quote_spanned! {span=>
            {
                static __SITE: #runtime::Site = #runtime::Site::new(
                    #runtime::Location {
                        module: ::core::module_path!(),
                        function: #function,
                        file: ::core::file!(),
                        line: ::core::line!(),
                    },
                    #template,
                    #options
                ) #name;
                &__SITE
            }
        }
    }

    /// What is known before the program runs.
    fn options(&self) -> TokenStream {
        let args = self.args;
        let runtime = self.runtime.at(self.span);
        let mut options = quote_spanned!(self.span=> #runtime::LockOptions::new());
        let mut set = |name: &str, span: Span, value: TokenStream| {
            let name = Ident::new(name, located(span));
            let value = quote_spanned!(located(span)=> (#value));
            options = quote_spanned!(located(span)=> #options.#name #value);
        };
        for (name, time) in self.times() {
            if let Some(constant) = time.constant() {
                set(name, constant.span, self.duration(constant));
            }
        }
        match &args.wait {
            Some(Wait::Forever(span)) => {
                let runtime = self.runtime.at(*span);
                set("wait", *span, quote_spanned!(located(*span)=> #runtime::Wait::Forever));
            }
            Some(Wait::For(Time::Constant(constant))) => {
                let runtime = self.runtime.at(constant.span);
                let duration = self.duration(*constant);
                set(
                    "wait",
                    constant.span,
                    quote_spanned!(located(constant.span)=> #runtime::Wait::For(#duration)),
                );
            }
            _ => {}
        }
        match &args.renew {
            Some(Renew::Flag(flag, span)) => {
                let runtime = self.runtime.at(*span);
                let policy = Ident::new(if *flag { "Third" } else { "Off" }, located(*span));
                set("renew", *span, quote_spanned!(located(*span)=> #runtime::Renew::#policy));
            }
            Some(Renew::Every(Time::Constant(constant))) => {
                let runtime = self.runtime.at(constant.span);
                let duration = self.duration(*constant);
                set(
                    "renew",
                    constant.span,
                    quote_spanned!(located(constant.span)=> #runtime::Renew::Every(#duration)),
                );
            }
            _ => {}
        }
        if let Some(on_lost) = args.on_lost {
            let (policy, span) = match on_lost {
                OnLost::Cancel(span) => ("Cancel", span),
                OnLost::Notify(span) => ("Notify", span),
            };
            let runtime = self.runtime.at(span);
            let policy = Ident::new(policy, located(span));
            set("on_lost", span, quote_spanned!(located(span)=> #runtime::OnLost::#policy));
        }
        if let Some(reentrant) = args.reentrant {
            set("reentrant", self.span, quote_spanned!(self.span=> #reentrant));
        }
        if let Some(Count::Constant(count)) = &args.retry_count {
            set("retry_count", count.span(), count.to_token_stream());
        }
        if args.guard.is_some() {
            set("fencing", self.span, quote_spanned!(self.span=> true));
        }
        options
    }

    /// The options that take a plain duration.
    fn times(&self) -> impl Iterator<Item = (&'static str, &Time)> {
        let args = self.args;
        [
            ("ttl", &args.ttl),
            ("max_hold", &args.max_hold),
            ("min_hold", &args.min_hold),
            ("retry_delay", &args.retry_delay),
        ]
        .into_iter()
        .filter_map(|(name, time)| time.as_ref().map(|time| (name, time)))
    }

    fn duration(&self, constant: Constant) -> TokenStream {
        let span = located(constant.span);
        let runtime = self.runtime.at(span);
        let millis = u64::try_from(constant.value.as_millis()).unwrap_or(u64::MAX);
        let millis = spanned(Literal::u64_suffixed(millis), span);
        quote_spanned!(span=> #runtime::Duration::from_millis(#millis))
    }

    /// Borrows the arguments, and is done with them before the first await.
    fn call(&self) -> TokenStream {
        let span = self.span;
        let runtime = self.runtime.at(span);
        let keys = self.keys();
        let settings = self.settings();
        let locked = quote_spanned!(span=> #runtime::Call::new(__site) #keys #settings);
        let Some(when) = &self.args.when else {
            return quote_spanned!(span=> let __call = #locked;);
        };
        quote_spanned! {span=>
            let __when: bool = #when;
            let __call = if __when { #locked } else { #runtime::Call::unlocked(__site) };
        }
    }

    fn keys(&self) -> TokenStream {
        let span = self.span;
        match &self.args.keys {
            Some(Keys::One(source)) => {
                let key = self.source(source);
                quote_spanned!(span=> .key(#key))
            }
            Some(Keys::All(sources)) => {
                let keys = sources.iter().map(|source| self.source(source));
                quote_spanned!(span=> .keys([#(#keys),*]))
            }
            Some(Keys::Computed(keys)) => {
                let runtime = self.runtime.at(keys.span());
                let keys = quote_spanned!(located(keys.span())=> #runtime::keys(#keys));
                quote_spanned!(span=> .keys(#keys))
            }
            None => TokenStream::new(),
        }
    }

    fn source(&self, source: &Source) -> TokenStream {
        match source {
            Source::Template(literal, template) => self.template(literal, template),
            Source::Expression(expression) => {
                let runtime = self.runtime.at(expression.span());
                quote_spanned!(located(expression.span())=> #runtime::key(#expression))
            }
        }
    }

    fn template(&self, literal: &LitStr, template: &Template) -> TokenStream {
        let span = located(literal.span());
        let runtime = self.runtime.at(span);
        if let Some(text) = template.literal() {
            let text = spanned(Literal::string(text), span);
            return quote_spanned!(span=> #runtime::literal(#text));
        }
        let capacity: usize = template
            .parts
            .iter()
            .map(|part| match part {
                Part::Text(text) => text.len(),
                Part::Slot(_) => PART,
            })
            .sum();
        let capacity = spanned(Literal::usize_unsuffixed(capacity), span);
        let mut writes = TokenStream::new();
        for (at, part) in template.parts.iter().enumerate() {
            writes.extend(match part {
                Part::Text(text) => {
                    let text = spanned(Literal::string(text), span);
                    quote_spanned!(span=> __key.text(#text);)
                }
                Part::Slot(slot) => self.part(slot, template.parts.get(at + 1), span),
            });
        }
        quote_spanned! {span=>
            {
                let mut __key = #runtime::KeyWriter::new(__site, #capacity);
                #writes
                __key.finish()
            }
        }
    }

    fn part(&self, slot: &Slot, next: Option<&Part>, span: Span) -> TokenStream {
        let source = spanned(Literal::string(&slot.source), span);
        let value = self.value(slot, span);
        let next = match next {
            Some(Part::Text(text)) => text.chars().next(),
            _ => None,
        };
        let next = match next {
            Some(next) => {
                let next = spanned(Literal::character(next), span);
                quote_spanned!(span=> ::core::option::Option::Some(#next))
            }
            None => quote_spanned!(span=> ::core::option::Option::None),
        };
        quote_spanned!(span=> __key.part(#source, &#value, #next);)
    }

    /// `order.id`, as if it were written where the literal is.
    fn value(&self, slot: &Slot, span: Span) -> TokenStream {
        let mut value = self.parameter(&slot.root.text, span).to_token_stream();
        for access in &slot.tail {
            value.extend(match access {
                Access::Field(name) => {
                    let name = member(name, span);
                    quote_spanned!(span=> .#name)
                }
                Access::Method(name) => {
                    let name = member(name, span);
                    quote_spanned!(span=> .#name())
                }
                Access::Position(index) => {
                    let index = Index { index: *index, span };
                    quote_spanned!(span=> .#index)
                }
                Access::Index(index) => {
                    let index = Index { index: *index, span };
                    quote_spanned!(span=> [#index])
                }
                Access::IndexBy(name) => {
                    let name = self.parameter(&name.text, span);
                    quote_spanned!(span=> [#name])
                }
            });
        }
        value
    }

    fn parameter(&self, name: &str, span: Span) -> Ident {
        match self.params.find(name) {
            Some(own) => {
                let mut own = own.clone();
                own.set_span(span.resolved_at(own.span()));
                own
            }
            None => Ident::new(name, span),
        }
    }

    /// What is evaluated per call.
    fn settings(&self) -> TokenStream {
        let args = self.args;
        let mut settings = TokenStream::new();
        let mut set = |name: &str, value: &Expr| {
            let span = located(value.span());
            let name = Ident::new(name, span);
            settings.extend(quote_spanned!(span=> .#name(#value)));
        };
        for (name, time) in self.times() {
            if let Time::Expression(value) = time {
                set(name, value);
            }
        }
        if let Some(Wait::For(Time::Expression(value))) = &args.wait {
            set("wait", value);
        }
        if let Some(Renew::Every(Time::Expression(value))) = &args.renew {
            set("renew", value);
        }
        if let Some(Count::Expression(value)) = &args.retry_count {
            set("retry_count", value);
        }
        match &args.pool {
            Some(Pool::Named(name)) => {
                let span = located(name.span());
                let name = spanned(Literal::string(&name.value()), span);
                settings.extend(quote_spanned!(span=> .pool_named(#name)));
            }
            Some(Pool::Given(pool)) => {
                settings.extend(quote_spanned!(located(pool.span())=> .pool(&(#pool))));
            }
            None => {}
        }
        settings
    }

    /// The user's body in an async block of the function's return type.
    ///
    /// The anchor makes a wrong early return an error of that return. The body has a block of its own,
    /// so that what it declares or imports cannot change the meaning of the anchor.
    fn locked(&self, statements: TokenStream) -> TokenStream {
        let span = self.span;
        let output = match self.function.output() {
            Some(output) => nameable(output).map(ToTokens::into_token_stream),
            None if self.function.sig.asyncness.is_some() => Some(quote_spanned!(span=> ())),
            None => None,
        };
        let anchor = output.map(|output| {
            let span = located(self.function.output_span());
            quote_spanned! {span=>
                if let ::core::option::Option::Some(__anchor) = ::core::option::Option::None::<#output> {
                    return __anchor;
                }
            }
        });
        let guard = self.args.guard.as_ref().map(|name| {
            let runtime = self.runtime.at(name.span());
            quote_spanned!(located(name.span())=> let #name: &#runtime::LockGuard = &__guard;)
        });
        let mut body = Group::new(Delimiter::Brace, statements);
        body.set_span(span);
        quote_spanned!(span=> async move { #anchor #guard #body })
    }

    /// The error that is left to report when the lock could not be had.
    fn conflict(&self) -> TokenStream {
        let span = match &self.args.on_conflict {
            None | Some(OnConflict::Error) => return quote_spanned!(self.span=> __error),
            // The return type is what does not fit, the argument what asks for it.
            Some(OnConflict::Skip(_)) => located(self.function.output_span()),
            Some(OnConflict::Fallback(path)) => located(path.span()),
        };
        let runtime = self.runtime.at(span);
        let instead = match &self.args.on_conflict {
            Some(OnConflict::Fallback(path)) => {
                let arguments = self.params.iter().filter_map(|param| match param {
                    Param::Receiver(name) | Param::Plain(name) => Some(name),
                    Param::Pattern { .. } => None,
                });
                quote_spanned!(span=> #path(#(#arguments),*).await)
            }
            _ => quote_spanned!(span=> #runtime::Skipped::skipped()),
        };
        quote_spanned! {span=>
            {
                if #runtime::LockError::is_conflict(&__error) {
                    return #instead;
                }
                __error
            }
        }
    }

    fn error(&self) -> TokenStream {
        if let Some(on_error) = &self.args.on_error {
            let span = located(on_error.span());
            let runtime = self.runtime.at(span);
            return quote_spanned!(span=> #runtime::on_error(#on_error, __error));
        }
        let span = located(self.function.output_span());
        let runtime = self.runtime.at(span);
        quote_spanned!(span=> #runtime::FromLockError::from_lock_error(__error))
    }
}

fn spanned(mut literal: Literal, span: Span) -> TokenStream {
    literal.set_span(span);
    quote!(#literal)
}

/// A field or method may be named like a keyword.
fn member(name: &str, span: Span) -> Ident {
    match syn::parse_str::<Ident>(name) {
        Ok(_) => Ident::new(name, span),
        Err(_) => Ident::new_raw(name, span),
    }
}
