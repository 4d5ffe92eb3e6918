//! The `static` of an annotated function: its location, template and constant options.

use proc_macro2::{Ident, Literal, Span, TokenStream};
use quote::{ToTokens, quote_spanned};
use syn::ext::IdentExt;

use crate::check::text;
use crate::expand::{Expansion, spanned};
use crate::on_conflict::Choice;
use crate::paths::located;
use crate::value::{Constant, Count, Pool, Renew, Time, Wait};

impl Expansion<'_> {
    /// In a block of its own: items are not hygienic, so the body could use a `static` in the same block.
    pub(crate) fn site(&self) -> TokenStream {
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
        let has_expression =
            self.args.keys.as_ref().is_some_and(|keys| keys.expressions().next().is_some());
        let computed = has_expression.then(|| quote_spanned!(span=> .computed_key()));
        let pool = match &self.args.pool {
            Some(Pool::Named(name)) => {
                let name = spanned(Literal::string(&name.value()), located(name.span()));
                Some(quote_spanned!(span=> .pool(#name)))
            }
            Some(Pool::Given(_)) => Some(quote_spanned!(span=> .computed_pool())),
            None => None,
        };
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
                ) #name #computed #pool;
                #runtime::submit! { #runtime::RegisteredSite(&__SITE) }
                &__SITE
            }
        }
    }

    /// The options with constant values.
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
                let policy = Ident::new(if *flag { "Auto" } else { "Off" }, located(*span));
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
        for (name, choice, of) in
            [("on_lost", args.on_lost, "OnLost"), ("release", args.release, "ReleaseMode")]
        {
            let Some(Choice { variant, span }) = choice else { continue };
            let runtime = self.runtime.at(span);
            let (of, variant) = (Ident::new(of, located(span)), Ident::new(variant, located(span)));
            set(name, span, quote_spanned!(located(span)=> #runtime::#of::#variant));
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
    pub(crate) fn times(&self) -> impl Iterator<Item = (&'static str, &Time)> {
        let args = self.args;
        [
            ("ttl", &args.ttl),
            ("max_hold", &args.max_hold),
            ("min_hold", &args.min_hold),
            ("lock_delay", &args.lock_delay),
            ("linger", &args.linger),
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
}
