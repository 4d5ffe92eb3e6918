//! The names that the parameters bind.

use proc_macro2::Ident;
use syn::ext::IdentExt;
use syn::{Attribute, FnArg, Pat, ReceiverKind, Signature, Type};

pub(crate) struct Params {
    all: Vec<Param>,
    owned: Vec<OwnedName>,
}

/// The name of a value that may have a destructor.
pub(crate) struct OwnedName {
    pub(crate) name: Ident,
    /// The `cfg` attributes of its parameter.
    pub(crate) cfgs: Vec<Attribute>,
}

pub(crate) enum Param {
    /// The user's token `self`: a generated one would have a different hygiene inside `macro_rules!`.
    Receiver(Ident),
    /// `id: u64`, `mut id: u64`
    Plain(Ident),
    /// `Path(id): Path<u64>`, `_: u64`
    Pattern { pattern: Box<Pat>, names: Vec<Ident> },
}

impl Params {
    pub(crate) fn new(sig: &Signature) -> Self {
        let all = sig.inputs.iter().map(Param::new).collect::<Vec<_>>();
        let owned = sig.inputs.iter().zip(&all).filter(|(argument, _)| may_drop(argument));
        let owned = owned.flat_map(|(argument, param)| {
            let cfgs: Vec<Attribute> = cfgs(argument).cloned().collect();
            param
                .names()
                .iter()
                .map(move |name| OwnedName { name: name.clone(), cfgs: cfgs.clone() })
        });
        let owned = owned.collect();
        Self { all, owned }
    }

    /// The names of values that may have destructors.
    pub(crate) fn owned(&self) -> &[OwnedName] {
        &self.owned
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Param> {
        self.all.iter()
    }

    /// The parameter `name`, as the token in the function.
    pub(crate) fn find(&self, name: &str) -> Option<&Ident> {
        self.names().find(|bound| bound.unraw() == name)
    }

    /// The names with which a placeholder may start.
    pub(crate) fn names(&self) -> impl Iterator<Item = &Ident> {
        self.iter().flat_map(Param::names).filter(|name| !is_generated(name))
    }

    /// The same without `r#`, as a template has them.
    pub(crate) fn unraw_names(&self) -> Vec<String> {
        self.names().map(|name| name.unraw().to_string()).collect()
    }

    pub(crate) fn has_receiver(&self) -> bool {
        matches!(self.all.first(), Some(Param::Receiver(_)))
    }

    /// Whether `#[async_trait]` has replaced a pattern by a generated name.
    pub(crate) fn has_generated(&self) -> bool {
        self.iter().flat_map(Param::names).any(is_generated)
    }
}

impl Param {
    fn new(argument: &FnArg) -> Self {
        match argument {
            FnArg::Receiver(receiver) => {
                Self::Receiver(Ident::new("self", receiver.self_token.span))
            }
            FnArg::Typed(argument) => match &*argument.pat {
                Pat::Ident(plain) if plain.by_ref.is_none() && plain.subpat.is_none() => {
                    Self::Plain(plain.ident.clone())
                }
                pattern => {
                    let mut names = Vec::new();
                    bound(pattern, &mut names);
                    Self::Pattern { pattern: Box::new(pattern.clone()), names }
                }
            },
        }
    }

    fn names(&self) -> &[Ident] {
        match self {
            Self::Receiver(name) | Self::Plain(name) => std::slice::from_ref(name),
            Self::Pattern { names, .. } => names,
        }
    }
}

/// The `cfg` attributes of `argument`.
pub(crate) fn cfgs(argument: &FnArg) -> impl Iterator<Item = &Attribute> {
    attributes(argument).iter().filter(|attribute| attribute.path().is_ident("cfg"))
}

fn attributes(argument: &FnArg) -> &[Attribute] {
    match argument {
        FnArg::Receiver(receiver) => &receiver.attrs,
        FnArg::Typed(argument) => &argument.attrs,
    }
}

/// Whether `argument` is neither a reference nor of a primitive type. A `cfg_attr` may be a `cfg` that is not known here, so
/// such an argument does not count.
fn may_drop(argument: &FnArg) -> bool {
    const PRIMITIVES: [&str; 17] = [
        "u8", "u16", "u32", "u64", "u128", "usize", "i8", "i16", "i32", "i64", "i128", "isize",
        "f32", "f64", "bool", "char", "str",
    ];
    let ty: Option<&Type> = match argument {
        FnArg::Receiver(receiver) => match &receiver.kind {
            ReceiverKind::Reference(..) => return false,
            ReceiverKind::Typed(_, ty) => Some(ty),
            _ => None,
        },
        FnArg::Typed(argument) => Some(&argument.ty),
    };
    let is_primitive = match ty {
        Some(Type::Reference(_)) => return false,
        Some(Type::Path(path)) => PRIMITIVES.iter().any(|name| path.path.is_ident(name)),
        _ => false,
    };
    let is_conditional = |attribute: &Attribute| attribute.path().is_ident("cfg_attr");
    !is_primitive && !attributes(argument).iter().any(is_conditional)
}

/// `#[async_trait]` names a destructured parameter `__arg0`.
fn is_generated(name: &Ident) -> bool {
    let name = name.to_string();
    name.strip_prefix("__arg")
        .is_some_and(|rest| !rest.is_empty() && rest.bytes().all(|b| b.is_ascii_digit()))
}

fn bound(pattern: &Pat, names: &mut Vec<Ident>) {
    match pattern {
        Pat::Ident(pattern) => {
            names.push(pattern.ident.clone());
            if let Some((_, inner)) = &pattern.subpat {
                bound(inner, names);
            }
        }
        Pat::Paren(pattern) => bound(&pattern.pat, names),
        Pat::Reference(pattern) => bound(&pattern.pat, names),
        Pat::Type(pattern) => bound(&pattern.pat, names),
        Pat::Or(pattern) => pattern.cases.iter().take(1).for_each(|case| bound(case, names)),
        Pat::Slice(pattern) => pattern.elems.iter().for_each(|element| bound(element, names)),
        Pat::Tuple(pattern) => pattern.elems.iter().for_each(|element| bound(element, names)),
        Pat::TupleStruct(pattern) => pattern.elems.iter().for_each(|element| bound(element, names)),
        Pat::Struct(pattern) => pattern.fields.iter().for_each(|field| bound(&field.pat, names)),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(sig: &str) -> Vec<String> {
        let params = Params::new(&syn::parse_str(sig).unwrap());
        params.names().map(ToString::to_string).collect()
    }

    #[test]
    fn every_pattern_binds_its_names() {
        assert_eq!(names("fn f(&mut self, mut a: u8, _: u8)"), ["self", "a"]);
        assert_eq!(
            names("fn f((a, [b, .., c]): T, P { d, e: (f, _), .. }: P)"),
            ["a", "b", "c", "d", "f"]
        );
        assert_eq!(
            names("fn f(Path(id): Path<u64>, &(ref x): &u8, y @ Z(z): Z)"),
            ["id", "x", "y", "z"]
        );
        assert_eq!(names("fn f(self: Arc<Self>, r#type: u8)"), ["self", "r#type"]);
        assert_eq!(names("fn f(__arg0: u8, __argument: u8)"), ["__argument"]);
    }

    #[test]
    fn values_with_destructors_are_owned() {
        let owned = |sig: &str| {
            let params = Params::new(&syn::parse_str(sig).unwrap());
            let text = |owned: &OwnedName| match owned.cfgs.len() {
                0 => owned.name.to_string(),
                cfgs => format!("{} {cfgs}", owned.name),
            };
            params.owned().iter().map(text).collect::<Vec<_>>()
        };
        assert_eq!(
            owned("fn f(&self, a: &T, b: u64, c: T, #[cfg(x)] d: T, #[allow(x)] e: T)"),
            ["c", "d 1", "e"]
        );
        assert_eq!(owned("fn f(#[cfg_attr(x, cfg(y))] a: T, #[cfg(x)] #[cfg(y)] b: T)"), ["b 2"]);
        assert_eq!(owned("fn f(self, State(a): State<A>, (b, _): (B, C))"), ["self", "a", "b"]);
        assert_eq!(owned("fn f(self: &Self)"), [""; 0]);
        assert_eq!(owned("fn f(self: Arc<Self>, a: impl Fn())"), ["self", "a"]);
    }

    #[test]
    fn a_raw_name_is_found_without_its_prefix() {
        let params = Params::new(&syn::parse_str("fn f(r#type: u8)").unwrap());
        assert!(params.find("type").is_some());
        assert!(params.find("self").is_none());
        assert!(!params.has_receiver());
    }
}
