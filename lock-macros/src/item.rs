//! The annotated function: parsing and reassembly. The body is not parsed, so an incomplete one
//! still expands.

use proc_macro2::{Delimiter, Group, Span, TokenStream, TokenTree};
use quote::{ToTokens, TokenStreamExt, quote_spanned};
use syn::ext::IdentExt;
use syn::parse::{ParseStream, Parser};
use syn::punctuated::Punctuated;
use syn::spanned::Spanned;
use syn::{
    Attribute, GenericArgument, Ident, Path, PathArguments, Result, ReturnType, Signature, Token,
    Type, TypeInfer, TypeParamBound, Visibility,
};

use crate::diagnostics::Errors;
use crate::paths::located;
use crate::tokens::idents;

pub(crate) struct Function {
    pub(crate) attrs: Vec<Attribute>,
    pub(crate) sig: Signature,
    pub(crate) shape: Shape,
    /// Everything before the body.
    head: TokenStream,
    braces: Group,
}

pub(crate) enum Shape {
    /// `async fn f() { .. }`
    AsyncFn,
    /// `fn f() -> impl Future<Output = T> { async move { .. } }`
    AsyncBlock(AsyncBlock),
    /// `fn f() -> Pin<Box<dyn Future<Output = T>>> { Box::pin(async move { .. }) }`, which is what
    /// `#[async_trait]` writes.
    Boxed {
        call: TokenStream,
        parens: Group,
        inner: AsyncBlock,
        /// `as _`
        cast: TokenStream,
    },
    Sync,
}

pub(crate) struct AsyncBlock {
    keywords: TokenStream,
    braces: Group,
}

impl Function {
    pub(crate) fn parse(item: TokenStream, errors: &mut Errors) -> Option<Self> {
        let item = ungrouped(item);
        match parse.parse2(item.clone()) {
            Ok((attrs, sig, body)) => {
                let Some(braces) = braces(body) else {
                    errors.push_over(&sig, "a method without a body has nothing to lock; put `#[distributed_lock]` on it in the `impl`");
                    return None;
                };
                let mut head: Vec<_> = item.into_iter().collect();
                head.pop();
                let shape =
                    if sig.asyncness.is_some() { Shape::AsyncFn } else { shape(braces.stream()) };
                Some(Self { attrs, sig, shape, head: head.into_iter().collect(), braces })
            }
            Err(error) => {
                errors.push_error(error);
                None
            }
        }
    }

    /// The inner attributes of the body, which must stay first, and its statements.
    pub(crate) fn body(&self) -> (TokenStream, TokenStream) {
        split_inner_attributes(self.inner_braces().stream())
    }

    /// Input, the start of a body by `#[async_trait]`:
    ///
    /// ```ignore
    /// let id = id;
    /// ```
    ///
    /// Output. Without the second line, rustc would report a binding as unused that only the attribute uses:
    ///
    /// ```ignore
    /// let id = id;
    /// let _ = &id;
    /// ```
    pub(crate) fn with_used(
        &self,
        statements: TokenStream,
        names: impl FnOnce() -> Vec<String>,
    ) -> TokenStream {
        if !self.rebinds_parameters() {
            return statements;
        }
        let names = names();
        let tokens: Vec<TokenTree> = statements.into_iter().collect();
        let mut output = TokenStream::new();
        for (at, token) in tokens.iter().enumerate() {
            output.append(token.clone());
            let rebound = rebinding(&tokens[..=at]);
            if let Some(name) = rebound.filter(|name| names.iter().any(|used| name.unraw() == used))
            {
                let span = located(name.span());
                output.extend(quote_spanned!(span=> let _ = &#name;));
            }
        }
        output
    }

    /// Whether the body starts with `let id = id;` for each parameter, and so captures it as a whole.
    pub(crate) fn rebinds_parameters(&self) -> bool {
        matches!(self.shape, Shape::Boxed { .. })
    }

    /// The start of the body.
    pub(crate) fn body_span(&self) -> Span {
        self.inner_braces().span_open()
    }

    /// The braces around the statements that run as the body.
    fn inner_braces(&self) -> &Group {
        match &self.shape {
            Shape::AsyncFn | Shape::Sync => &self.braces,
            Shape::AsyncBlock(block) | Shape::Boxed { inner: block, .. } => &block.braces,
        }
    }

    /// The output type of the future.
    pub(crate) fn output(&self) -> Option<&Type> {
        match (&self.sig.output, &self.shape) {
            (ReturnType::Default, _) => None,
            (ReturnType::Type(_, output), Shape::AsyncFn | Shape::Sync) => Some(output),
            (ReturnType::Type(_, future), _) => future_output(future),
        }
    }

    pub(crate) fn output_span(&self) -> Span {
        self.output().map_or_else(|| self.sig.ident.span(), Spanned::span)
    }

    /// The same function with another body.
    pub(crate) fn with_body(&self, body: TokenStream) -> TokenStream {
        let block = match &self.shape {
            Shape::AsyncFn | Shape::Sync => body,
            Shape::AsyncBlock(block) => block.with_body(body),
            Shape::Boxed { call, parens, inner, cast } => {
                let mut block = call.clone();
                block.append(regroup(parens, inner.with_body(body)));
                block.extend(cast.clone());
                block
            }
        };
        let mut item = self.head.clone();
        item.append(regroup(&self.braces, block));
        item
    }

    /// Whether the body calls a function or method `name`, at any depth.
    pub(crate) fn mentions(&self, name: &str) -> bool {
        idents(self.braces.stream()).iter().any(|ident| ident == name)
    }
}

impl AsyncBlock {
    fn parse(tokens: TokenStream) -> Option<Self> {
        let mut tokens: Vec<_> = tokens.into_iter().collect();
        let braces = braces(tokens.pop()?.into())?;
        let keywords = tokens.iter().map(ToString::to_string).collect::<Vec<_>>();
        let matches = matches!(
            keywords.iter().map(String::as_str).collect::<Vec<_>>()[..],
            ["async"] | ["async", "move"]
        );
        matches.then(|| Self { keywords: tokens.into_iter().collect(), braces })
    }

    /// The new block moves what it uses: a body may use no argument where the key does.
    fn with_body(&self, body: TokenStream) -> TokenStream {
        let mut block = self.keywords.clone();
        if !idents(block.clone()).iter().any(|ident| ident == "move") {
            block.append(Ident::new("move", self.braces.span_open()));
        }
        block.append(regroup(&self.braces, body));
        block
    }
}

/// The return type with `_` for each `impl Trait`, so that it can be written in the body. `None` if
/// only `_` would be left.
pub(crate) fn nameable(output: &Type) -> Option<Type> {
    let mut output = output.clone();
    erase(&mut output);
    (!matches!(output, Type::Infer(_) | Type::Never(_))).then_some(output)
}

fn erase(output: &mut Type) {
    match output {
        Type::ImplTrait(opaque) => {
            *output = Type::Infer(TypeInfer {
                attrs: Vec::new(),
                underscore_token: Token![_](opaque.span()),
            });
        }
        Type::Array(array) => erase(&mut array.elem),
        Type::Group(group) => erase(&mut group.elem),
        Type::Paren(paren) => erase(&mut paren.elem),
        Type::Ptr(pointer) => erase(&mut pointer.elem),
        Type::Reference(reference) => erase(&mut reference.elem),
        Type::Slice(slice) => erase(&mut slice.elem),
        Type::Tuple(tuple) => tuple.elems.iter_mut().for_each(erase),
        Type::Path(path) => erase_in(&mut path.path),
        Type::TraitObject(object) => {
            for bound in &mut object.bounds {
                if let TypeParamBound::Trait(bound) = bound {
                    erase_in(&mut bound.path);
                }
            }
        }
        _ => {}
    }
}

fn erase_in(path: &mut Path) {
    for segment in &mut path.segments {
        let PathArguments::AngleBracketed(arguments) = &mut segment.arguments else { continue };
        for argument in &mut arguments.args {
            match argument {
                GenericArgument::Type(inner) => erase(inner),
                GenericArgument::AssocType(inner) => erase(&mut inner.ty),
                _ => {}
            }
        }
    }
}

type Parts = (Vec<Attribute>, Signature, TokenStream);

fn parse(input: ParseStream<'_>) -> Result<Parts> {
    let attrs = input.call(Attribute::parse_outer)?;
    input.parse::<Visibility>()?;
    if input.peek(Token![default]) {
        input.parse::<Token![default]>()?;
    }
    if let Some(kind) = other_item(&input.fork()) {
        let place = match kind.as_str() {
            "impl" | "trait" => "; put it on the methods that need the lock",
            _ => "",
        };
        return Err(input.error(format!(
            "`#[distributed_lock]` goes on an `async fn`, not on `{kind}`{place}"
        )));
    }
    Ok((attrs, input.parse()?, input.parse()?))
}

/// The keyword of an item that is not a function.
fn other_item(input: ParseStream<'_>) -> Option<String> {
    const KINDS: [&str; 12] = [
        "struct",
        "enum",
        "union",
        "trait",
        "impl",
        "mod",
        "type",
        "static",
        "use",
        "macro_rules",
        "let",
        "const",
    ];
    const PREFIXES: [&str; 3] = ["unsafe", "extern", "auto"];
    let first = input.call(Ident::parse_any).ok()?.to_string();
    if first == "const" {
        let next = input.call(Ident::parse_any).ok()?.to_string();
        let function = matches!(next.as_str(), "fn" | "async" | "unsafe" | "extern");
        return (!function).then_some(first);
    }
    if PREFIXES.contains(&first.as_str()) {
        return input
            .call(Ident::parse_any)
            .ok()
            .map(|next| next.to_string())
            .filter(|next| KINDS.contains(&&**next));
    }
    KINDS.contains(&first.as_str()).then_some(first)
}

/// Removes the invisible group around a `macro_rules!` fragment.
fn ungrouped(tokens: TokenStream) -> TokenStream {
    let mut trees = tokens.clone().into_iter();
    match (trees.next(), trees.next()) {
        (Some(TokenTree::Group(group)), None) if group.delimiter() == Delimiter::None => {
            ungrouped(group.stream())
        }
        _ => tokens,
    }
}

fn braces(body: TokenStream) -> Option<Group> {
    let mut trees = ungrouped(body).into_iter();
    match (trees.next(), trees.next()) {
        (Some(TokenTree::Group(group)), None) if group.delimiter() == Delimiter::Brace => {
            Some(group)
        }
        _ => None,
    }
}

fn shape(body: TokenStream) -> Shape {
    if let Some(block) = AsyncBlock::parse(body.clone()) {
        return Shape::AsyncBlock(block);
    }
    let mut call: Vec<_> = body.into_iter().collect();
    let is_cast = |token: &TokenTree| matches!(token, TokenTree::Ident(word) if word == "as");
    let cast = call.iter().position(is_cast).map(|at| call.split_off(at)).unwrap_or_default();
    let Some(TokenTree::Group(parens)) = call.pop() else { return Shape::Sync };
    let path: String = call.iter().map(ToString::to_string).collect();
    let boxes = matches!(
        path.trim_start_matches("::"),
        "Box::pin" | "std::boxed::Box::pin" | "alloc::boxed::Box::pin"
    );
    match AsyncBlock::parse(parens.stream()) {
        Some(inner) if boxes => Shape::Boxed {
            call: call.into_iter().collect(),
            parens,
            inner,
            cast: cast.into_iter().collect(),
        },
        _ => Shape::Sync,
    }
}

/// The `name` of the `let name = name;` or `let mut name = name;` that `tokens` end with.
fn rebinding(tokens: &[TokenTree]) -> Option<&Ident> {
    use TokenTree::{Ident, Punct};
    let [before @ .., Ident(new), Punct(is), Ident(old), Punct(end)] = tokens else { return None };
    let binds = match before {
        [.., Ident(word), Ident(mutable)] if mutable == "mut" => word == "let",
        [.., Ident(word)] => word == "let",
        _ => false,
    };
    (binds && is.as_char() == '=' && new == old && end.as_char() == ';').then_some(new)
}

fn regroup(like: &Group, stream: TokenStream) -> Group {
    let mut group = Group::new(like.delimiter(), stream);
    group.set_span(like.span());
    group
}

/// The `T` of `impl Future<Output = T>`, even inside a `Pin<Box<dyn ..>>`.
fn future_output(future: &Type) -> Option<&Type> {
    match future {
        Type::ImplTrait(opaque) => bound_output(&opaque.bounds),
        Type::TraitObject(object) => bound_output(&object.bounds),
        Type::Group(group) => future_output(&group.elem),
        Type::Paren(paren) => future_output(&paren.elem),
        Type::Path(path) => {
            let last = path.path.segments.last()?;
            let PathArguments::AngleBracketed(arguments) = &last.arguments else { return None };
            // The arguments of an alias may be the output.
            if last.ident != "Pin" && last.ident != "Box" {
                return None;
            }
            arguments.args.iter().find_map(|argument| match argument {
                GenericArgument::Type(inner) => future_output(inner),
                _ => None,
            })
        }
        _ => None,
    }
}

fn bound_output(bounds: &Punctuated<TypeParamBound, Token![+]>) -> Option<&Type> {
    bounds.iter().find_map(|bound| {
        let TypeParamBound::Trait(bound) = bound else { return None };
        let last = bound.path.segments.last()?;
        let PathArguments::AngleBracketed(arguments) = &last.arguments else { return None };
        if last.ident != "Future" {
            return None;
        }
        arguments.args.iter().find_map(|argument| match argument {
            GenericArgument::AssocType(assoc) if assoc.ident == "Output" => Some(&assoc.ty),
            _ => None,
        })
    })
}

fn split_inner_attributes(body: TokenStream) -> (TokenStream, TokenStream) {
    let split = |input: ParseStream<'_>| {
        let attrs = input.call(Attribute::parse_inner)?;
        Ok((attrs, input.parse::<TokenStream>()?))
    };
    match split.parse2(body.clone()) {
        Ok((attrs, rest)) => (attrs.iter().map(ToTokens::to_token_stream).collect(), rest),
        Err(_) => (TokenStream::new(), body),
    }
}
