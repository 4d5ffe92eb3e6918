//! Code for the keys of one call.

use proc_macro2::{Ident, Literal, Span, TokenStream};
use quote::{ToTokens, quote_spanned};
use syn::ext::IdentExt;
use syn::spanned::Spanned;
use syn::{Expr, Index, LitStr};

use crate::expand::{Expansion, spanned};
use crate::paths::located;
use crate::template::{Access, Part, Slot, Template};
use crate::value::{Keys, Source};

impl Expansion<'_> {
    /// The call, with its keys.
    pub(crate) fn keyed(&self) -> TokenStream {
        let span = self.span;
        let runtime = self.runtime.at(span);
        match &self.args.keys {
            Some(Keys::One(Source::Template(literal, template))) if is_erasable(template) => {
                let (start, values) = self.values(literal, template);
                quote_spanned!(span=> #runtime::Call::template(__site, #start, &[#(#values),*]))
            }
            Some(Keys::One(source)) => {
                let key = self.source(source);
                quote_spanned!(span=> #runtime::Call::new(__site, #key))
            }
            Some(Keys::All(sources)) => {
                let keys = sources.iter().map(|source| self.source(source));
                quote_spanned!(span=> #runtime::Call::all(__site, [#(#keys),*]))
            }
            Some(Keys::Computed(keys)) => {
                let at_keys = self.runtime.at(keys.span());
                let keys = quote_spanned!(located(keys.span())=> #at_keys::keys(#keys));
                quote_spanned!(span=> #runtime::Call::all(__site, #keys))
            }
            None => TokenStream::new(),
        }
    }

    /// One key. It is a block where temporary values would live on beside those of the next key.
    fn source(&self, source: &Source) -> TokenStream {
        let span = self.span;
        let runtime = self.runtime.at(span);
        let (literal, template) = match source {
            Source::Template(literal, template) => (literal, template),
            Source::Expression(expression) => {
                let runtime = self.runtime.at(expression.span());
                let key = match self.constant_of(expression) {
                    Some(names) => quote_spanned! {located(expression.span())=>
                        #runtime::constant_key(#expression, &[#(#names),*])
                    },
                    None => {
                        quote_spanned!(located(expression.span())=> #runtime::key(#expression))
                    }
                };
                return quote_spanned!(span=> { let __key = #key; __key });
            }
        };
        if let Some(text) = template.literal() {
            let text = spanned(Literal::string(text), located(literal.span()));
            return quote_spanned!(span=> #runtime::literal(#text));
        }
        let (start, values) = self.values(literal, template);
        if is_erasable(template) {
            let key = quote_spanned!(span=> #runtime::template(__site, #start, &[#(#values),*]));
            return quote_spanned!(span=> { let __key = #key; __key });
        }
        let count = spanned(Literal::usize_unsuffixed(values.len()), span);
        quote_spanned! {span=>
            {
                let mut __key = #runtime::KeyWriter::new(__site, #start, #count);
                #(#runtime::KeyWriter::value #values;)*
                #runtime::KeyWriter::finish(__key)
            }
        }
    }

    /// The names of the parameters, if `expression` names a constant. Its text may look like a template with them.
    fn constant_of(&self, expression: &Expr) -> Option<Vec<String>> {
        let Expr::Path(path) = expression else { return None };
        let name = path.path.segments.last()?.ident.unraw().to_string();
        let is_constant = !name.contains(char::is_lowercase);
        is_constant.then(|| self.params.unraw_names())
    }

    /// The text at the start, and each placeholder with its value and the text after it.
    ///
    /// Only values have the span of the literal: a language server shows for the literal what they resolve to.
    fn values(&self, literal: &LitStr, template: &Template) -> (TokenStream, Vec<TokenStream>) {
        let text = |part: Option<&Part>| match part {
            Some(Part::Text(text)) => spanned(Literal::string(text), self.span),
            _ => spanned(Literal::string(""), self.span),
        };
        let start = text(template.parts.first());
        let writer = (!is_erasable(template)).then(|| quote_spanned!(self.span=> &mut __key,));
        let values = template.parts.iter().enumerate().filter_map(|(at, part)| {
            let Part::Slot(slot) = part else { return None };
            let source = spanned(Literal::string(&slot.source), self.span);
            let span = located(literal.span());
            let value = self.value(slot, span);
            // A field may be a `str`, which only a reference to it erases.
            let is_field = matches!(slot.tail.last(), Some(Access::Field(_) | Access::Position(_)));
            let value = match is_field && is_erasable(template) {
                true => quote_spanned!(span=> &&#value),
                false => quote_spanned!(span=> &#value),
            };
            let behind = text(template.parts.get(at + 1));
            Some(quote_spanned!(self.span=> (#writer #source, #value, #behind)))
        });
        (start, values.collect())
    }

    /// `order.id`, with the span of the literal.
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
}

/// Whether all values of `template` can be borrowed at the same time, and by a pointer without their size.
///
/// Methods may return guards of one mutex, or borrow a parameter mutably, and `[name]` or `[0]` may find a `str`. In that case
/// the values are written one after another.
fn is_erasable(template: &Template) -> bool {
    let is_lookup = |access: &Access| matches!(access, Access::Index(_) | Access::IndexBy(_));
    let mut methods = template.slots().filter(|slot| calls_method(slot));
    let is_exclusive = match (methods.next(), methods.next()) {
        (None, _) => false,
        (Some(method), None) => {
            let uses = |slot: &&Slot| slot.names().any(|name| name.text == method.root.text);
            template.slots().filter(uses).count() > 1
        }
        _ => true,
    };
    template.literal().is_none()
        && !is_exclusive
        && !template.slots().any(|slot| slot.tail.last().is_some_and(is_lookup))
}

fn calls_method(slot: &Slot) -> bool {
    slot.tail.iter().any(|access| matches!(access, Access::Method(_)))
}

/// An identifier for a field or method, raw if its name is a keyword.
fn member(name: &str, span: Span) -> Ident {
    match syn::parse_str::<Ident>(name) {
        // A keyword since the 2024 edition.
        Ok(_) if name != "gen" => Ident::new(name, span),
        _ => Ident::new_raw(name, span),
    }
}
