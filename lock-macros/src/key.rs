//! Code for the keys of one call.

use proc_macro2::{Ident, Literal, Span, TokenStream};
use quote::{ToTokens, quote_spanned};
use syn::Index;
use syn::spanned::Spanned;

use crate::expand::{Expansion, spanned};
use crate::paths::located;
use crate::template::{Access, Part, Slot, Template};
use crate::value::{Keys, Source};

impl Expansion<'_> {
    /// The parameters in the key.
    pub(crate) fn key_roots(&self) -> Vec<&str> {
        let sources = match &self.args.keys {
            Some(Keys::One(source)) => std::slice::from_ref(source),
            Some(Keys::All(sources)) => sources,
            Some(Keys::Computed(_)) | None => &[],
        };
        let templates = sources.iter().filter_map(|source| match source {
            Source::Template(_, template) => Some(template),
            Source::Expression(_) => None,
        });
        templates.flat_map(Template::slots).map(|slot| slot.root.text.as_str()).collect()
    }

    /// The call, with its keys.
    pub(crate) fn keyed(&self) -> TokenStream {
        let span = self.span;
        let runtime = self.runtime.at(span);
        match &self.args.keys {
            Some(Keys::One(Source::Template(literal, template)))
                if template.literal().is_none() =>
            {
                let span = located(literal.span());
                let runtime = self.runtime.at(span);
                let template = self.template(template, span);
                quote_spanned!(span=> #runtime::Call::template(__site, #template))
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

    fn source(&self, source: &Source) -> TokenStream {
        match source {
            Source::Template(literal, template) => {
                let span = located(literal.span());
                let runtime = self.runtime.at(span);
                if let Some(text) = template.literal() {
                    let text = spanned(Literal::string(text), span);
                    return quote_spanned!(span=> #runtime::literal(#text));
                }
                let template = self.template(template, span);
                quote_spanned!(span=> #runtime::template(__site, #template))
            }
            Source::Expression(expression) => {
                let runtime = self.runtime.at(expression.span());
                quote_spanned!(located(expression.span())=> #runtime::key(#expression))
            }
        }
    }

    /// The text at the start, and the placeholders with their values and the text behind each.
    fn template(&self, template: &Template, span: Span) -> TokenStream {
        let text = |part: Option<&Part>| match part {
            Some(Part::Text(text)) => spanned(Literal::string(text), span),
            _ => spanned(Literal::string(""), span),
        };
        let start = text(template.parts.first());
        let mut values = TokenStream::new();
        for (at, part) in template.parts.iter().enumerate() {
            let Part::Slot(slot) = part else { continue };
            let source = spanned(Literal::string(&slot.source), span);
            let value = self.value(slot, span);
            let behind = text(template.parts.get(at + 1));
            values.extend(quote_spanned!(span=> (#source, &#value, #behind),));
        }
        quote_spanned!(span=> #start, &[#values])
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

/// An identifier for a field or method, raw if its name is a keyword.
fn member(name: &str, span: Span) -> Ident {
    match syn::parse_str::<Ident>(name) {
        Ok(_) => Ident::new(name, span),
        Err(_) => Ident::new_raw(name, span),
    }
}
