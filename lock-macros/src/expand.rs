//! Input:
//!
//! ```text
//! #[distributed_lock(key = "order:<order.id>", ttl = "5s")]
//! pub async fn pay(&self, order: Order) -> Result<Receipt, Error> { BODY }
//! ```
//!
//! Output, with `P` for `::lock_runtime::__private`. Methods on a reference are called by path, because a
//! user's trait may have a method with that name for every type.
//!
//! ```text
//! pub async fn pay(&self, order: Order) -> Result<Receipt, Error> {
//!     let __error = match P::enter({
//!         let __site = { static __SITE: P::Site = P::Site::new(..); P::submit! { .. } &__SITE };
//!         let __call = P::Call::template(__site, "order:", &[("order.id", &&order.id, "")]);
//!         __call
//!     }).run(async move {
//!         if let Some(__anchor) = None::<Result<Receipt, Error>> { return __anchor; }
//!         let _ = &order;
//!         { BODY }
//!     }).await {
//!         Ok(__output) => return __output,
//!         Err(__error) => __error,
//!     };
//!     P::FromLockError::from_lock_error(__error)
//! }
//! ```
//!
//! Each token here is compiled once per annotated function: what has no type of the user is a call into the runtime.
//! No generated name is in scope in the body, where a language server would offer it.

use proc_macro2::{Delimiter, Group, Ident, Literal, Span, TokenStream};
use quote::{ToTokens, quote, quote_spanned};
use syn::Expr;
use syn::ext::IdentExt;
use syn::spanned::Spanned;

use crate::args::Args;
use crate::item::{Function, nameable};
use crate::on_conflict::OnConflict;
use crate::params::{OwnedName, Param, Params, cfgs};
use crate::paths::{Runtime, located};
use crate::tokens::uses;
use crate::value::{Count, Pool, Renew, Time, Wait};

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

pub(crate) struct Expansion<'a> {
    pub(crate) args: &'a Args,
    pub(crate) function: &'a Function,
    pub(crate) params: &'a Params,
    pub(crate) runtime: Runtime<'a>,
    /// The span of tokens that no argument has caused.
    pub(crate) span: Span,
}

impl Expansion<'_> {
    fn body(&self) -> TokenStream {
        let (inner_attributes, statements) = self.function.body();
        let span = self.span;
        let body = self.locked(self.function.with_used(statements, || self.used_names()));
        let failed = self.run(&body);
        let error = self.error();
        let outcome = match self.conversion() {
            Some(conversion) => quote_spanned! {span=>
                let (__convert, __error) = (#conversion, #failed);
            },
            None => quote_spanned!(span=> let __error = #failed;),
        };
        quote_spanned! {span=>
            #inner_attributes
            #outcome
            #error
        }
    }

    /// An expression that acquires the lock and runs `body`. Its value is the error.
    fn run(&self, body: &TokenStream) -> TokenStream {
        let span = self.span;
        let runtime = self.runtime.at(span);
        let call = self.call();
        let conflict = self.conflict();
        let result = quote_spanned!(span=> ::core::result::Result);
        match (&self.args.guard, &self.args.on_conflict) {
            // What is in scope in the body has the name `guard`: the entry, beside it the guard, and the reference to the
            // guard.
            (Some(guard), _) => quote_spanned! {span=>
                match #runtime::enter(#call).await {
                    #result::Ok(#guard) => {
                        let #guard = #runtime::Entry::with_guard(#guard);
                        match #runtime::Entry::run(#guard.0, #body).await {
                            #result::Ok(__output) => return __output,
                            #result::Err(__error) => __error,
                        }
                    }
                    #result::Err(__error) => #conflict,
                }
            },
            // The fallback takes the arguments before the body has moved them.
            (None, Some(OnConflict::Fallback(_))) => quote_spanned! {span=>
                match #runtime::Entering::run(
                    match #runtime::enter(#call).await {
                        #result::Ok(__entry) => #runtime::Entering::entered(__entry),
                        #result::Err(__error) => #runtime::Entering::refused(#conflict),
                    },
                    #body
                ).await {
                    #result::Ok(__output) => return __output,
                    #result::Err(__error) => __error,
                }
            },
            // Acquire and body in one future: one await less to compile per function.
            (None, _) => quote_spanned! {span=>
                match #runtime::enter(#call).run(#body).await {
                    #result::Ok(__output) => return __output,
                    #result::Err(__error) => #conflict,
                }
            },
        }
    }

    /// A block that builds the call. It borrows the arguments only until the first await.
    ///
    /// Temporary values of the keys end before the settings are evaluated, and those of each setting before the next one. They
    /// may be guards of one mutex.
    fn call(&self) -> TokenStream {
        let span = self.span;
        let runtime = self.runtime.at(span);
        let site = self.site();
        let keyed = self.keyed();
        let settings = self.settings();
        let call = quote_spanned!(span=> let __call = #keyed; #settings);
        let call = match &self.args.when {
            None => call,
            Some(when) => {
                let when = quote_spanned!(located(when.span())=> let __when: bool = #when;);
                quote_spanned! {span=>
                    #when
                    let __call = if __when {
                        #call
                        __call
                    } else {
                        #runtime::Call::unlocked(__site)
                    };
                }
            }
        };
        quote_spanned! {span=>
            {
                let __site = #site;
                #call
                __call
            }
        }
    }

    /// The names that the attribute uses: the parameters in the templates, and all names in expressions.
    fn used_names(&self) -> Vec<String> {
        let mut expressions = self.settings();
        self.args.when.to_tokens(&mut expressions);
        self.args.on_error.to_tokens(&mut expressions);
        let mut names = Vec::new();
        if let Some(keys) = &self.args.keys {
            let slots = keys.templates().flat_map(|(_, template)| template.slots());
            names.extend(slots.map(|slot| slot.root.text.clone()));
            keys.expressions().for_each(|expression| expression.to_tokens(&mut expressions));
        }
        names.extend(uses(expressions));
        names
    }

    /// The settings that are evaluated for each call.
    fn settings(&self) -> TokenStream {
        let args = self.args;
        let mut settings = TokenStream::new();
        let mut set = |name: &str, value: &Expr| {
            let span = located(value.span());
            let name = Ident::new(name, span);
            settings.extend(quote_spanned!(span=> let __call = __call.#name(#value);));
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
                settings.extend(quote_spanned!(span=> let __call = __call.pool_named(#name);));
            }
            Some(Pool::Given(pool)) => {
                let span = located(pool.span());
                settings.extend(quote_spanned!(span=> let __call = __call.pool(&(#pool));));
            }
            None => {}
        }
        settings
    }

    /// The user's body in an async block of the function's return type.
    ///
    /// With the anchor, rustc reports a wrong early return at that return. The body has a block of its own,
    /// so that its declarations and imports cannot change the meaning of the anchor.
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
            // A variable of its own, so that an error about its borrow has its name.
            quote_spanned! {located(name.span())=>
                let #name = #name.1;
                let #name: &#runtime::LockGuard = &#name;
            }
        });
        let captured = self.captured(&statements);
        let mut body = Group::new(Delimiter::Brace, statements);
        body.set_span(span);
        quote_spanned!(span=> async move { #anchor #guard #captured #body })
    }

    /// Moves the parameters that the body uses into its block as a whole, so that they drop before the release. A block that
    /// uses one field captures that field only.
    fn captured(&self, statements: &TokenStream) -> TokenStream {
        let mut captured = TokenStream::new();
        if self.function.rebinds_parameters() || self.params.owned().is_empty() {
            return captured;
        }
        let used = uses(statements.clone());
        // A closure there borrows what it uses for as long as the body runs.
        let borrowed = uses(self.args.on_error.to_token_stream());
        for OwnedName { name, cfgs } in self.params.owned() {
            let is = |other: &String| name.unraw() == other;
            if used.iter().any(is) && !borrowed.iter().any(is) {
                let span = located(name.span());
                captured.extend(quote_spanned!(span=> #(#cfgs)* let _ = &#name;));
            }
        }
        captured
    }

    /// The error to return if the lock was not acquired, after `on_conflict`.
    fn conflict(&self) -> TokenStream {
        let span = match &self.args.on_conflict {
            None | Some(OnConflict::Error) => return quote_spanned!(self.span=> __error),
            // A type error points at the return type for `"skip"`, at the path for a fallback.
            Some(OnConflict::Skip) => located(self.function.output_span()),
            Some(OnConflict::Fallback(path)) => located(path.span()),
        };
        let runtime = self.runtime.at(span);
        let alternative = match &self.args.on_conflict {
            Some(OnConflict::Fallback(path)) => {
                let inputs = self.function.sig.inputs.iter();
                let arguments = inputs.zip(self.params.iter()).filter_map(|(input, param)| {
                    let (Param::Receiver(name) | Param::Plain(name)) = param else { return None };
                    let cfgs = cfgs(input);
                    Some(quote!(#(#cfgs)* #name))
                });
                quote_spanned!(span=> #path(#(#arguments),*).await)
            }
            _ => quote_spanned!(span=> #runtime::Skipped::skipped()),
        };
        quote_spanned! {span=>
            {
                if #runtime::LockError::is_conflict(&__error) {
                    return #alternative;
                }
                __error
            }
        }
    }

    /// The closure of an `on_error` that is a block. The block is evaluated before the body takes the arguments.
    fn conversion(&self) -> Option<TokenStream> {
        let block = self.args.on_error.as_ref().filter(|it| matches!(it, Expr::Block(_)))?;
        let span = located(block.span());
        let runtime = self.runtime.at(span);
        Some(quote_spanned!(span=> #runtime::conversion(#block)))
    }

    fn error(&self) -> TokenStream {
        if let Some(on_error) = &self.args.on_error {
            let span = located(on_error.span());
            let runtime = self.runtime.at(span);
            return match on_error {
                Expr::Block(_) => quote_spanned!(span=> #runtime::on_error(__convert, __error)),
                _ => quote_spanned!(span=> #runtime::on_error(#on_error, __error)),
            };
        }
        let span = located(self.function.output_span());
        let runtime = self.runtime.at(span);
        quote_spanned!(span=> #runtime::FromLockError::from_lock_error(__error))
    }
}

pub(crate) fn spanned(mut literal: Literal, span: Span) -> TokenStream {
    literal.set_span(span);
    quote!(#literal)
}

#[cfg(test)]
mod tests;
