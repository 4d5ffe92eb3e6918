//! Code for the keys of one call.

use proc_macro2::{Ident, Literal, Span, TokenStream};
use quote::{ToTokens, quote_spanned};
use syn::spanned::Spanned;
use syn::{Index, LitStr};

use crate::expand::{Expansion, spanned};
use crate::paths::located;
use crate::template::{Access, Part, Slot, Template};
use crate::value::{Keys, Source};

/// Estimated length of a rendered placeholder.
const PART: usize = 16;

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

    pub(crate) fn keys(&self) -> TokenStream {
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
                    quote_spanned!(span=> #runtime::KeyWriter::text(&mut __key, #text);)
                }
                Part::Slot(slot) => self.part(slot, template.parts.get(at + 1), span),
            });
        }
        quote_spanned! {span=>
            {
                let mut __key = #runtime::KeyWriter::new(__site, #capacity);
                #writes
                #runtime::KeyWriter::finish(__key)
            }
        }
    }

    fn part(&self, slot: &Slot, next: Option<&Part>, span: Span) -> TokenStream {
        let runtime = self.runtime.at(span);
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
        quote_spanned!(span=> #runtime::KeyWriter::part(&mut __key, #source, &#value, #next);)
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
