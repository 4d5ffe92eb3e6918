//! Finds locks that calls nest in opposite orders, before they deadlock.

use std::cmp::Ordering;
use std::collections::HashMap;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::{Arc, Weak};

use crate::api::reentrancy;
use crate::base::call_site::{LockLabel, Site};
use crate::base::key::Key;
use crate::base::lock_order::LockOrder;
use crate::base::mutex::{Mutex, MutexGuard};
use crate::base::order_graph::OrderGraph;
use crate::base::policy::Policy;
use crate::base::process::OfProcess;
use crate::base::template_shape::TemplateShape;
use crate::exec::events;
use crate::lease::lease::Lease;
use crate::lock::core::PoolCore;

/// Locks that calls nest in opposite orders, from [`lock_order_inversions`].
///
/// `Display` has all stacks, each with the outermost lock first.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LockOrderInversion {
    /// At least two. Each has the locks that a task held, outermost first, followed by the lock that it requested. The
    /// first stack is the most recent one. Each further stack is the first one that requested its last lock under the last
    /// lock of the stack before it. The last lock of the last stack is held in the first stack.
    pub stacks: Vec<Vec<LockedAt>>,
}

/// A lock in a stack of a [`LockOrderInversion`]. `Display` writes it as `orders::settle (src/orders.rs:12)`.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LockedAt {
    /// The key as written in the program.
    pub template: &'static str,
    /// The annotated function, or its `name`. `None` for the programmatic API.
    pub name: Option<String>,
    /// The file of the attribute, or of the call of [`template`](crate::LockRequest::template).
    pub file: &'static str,
    /// The line in the file.
    pub line: u32,
    /// The name of the pool, or `unnamed`.
    pub pool: String,
}

/// All inversions so far, in order of detection; see [`LockOrder`]. Each is listed once, however often it happens.
#[must_use]
pub fn lock_order_inversions() -> Vec<LockOrderInversion> {
    checker().inversions.iter().map(|inversion| (**inversion).clone()).collect()
}

/// Checks a call that may wait for `keys`, before it requests them.
///
/// # Panics
/// If this call closes a cycle, or has closed one before, and the pool has [`LockOrder::Panic`].
pub(super) fn check(core: &Arc<PoolCore>, label: &LockLabel, keys: &[Key], policy: &Policy) {
    // One attempt waits for no holder, so it is not part of a deadlock.
    if core.config.lock_order == LockOrder::Off || !policy.waits() {
        return;
    }
    let held = reentrancy::held_by_task();
    if !held.is_empty() {
        check_under(&held, core, label, keys);
    }
}

#[cold]
fn check_under(
    held: &[(Arc<PoolCore>, Arc<Lease>)],
    core: &Arc<PoolCore>,
    label: &LockLabel,
    keys: &[Key],
) {
    let Some(requested) = NestedLock::new(core, label, keys) else { return };
    let held = held
        .iter()
        .filter_map(|(core, lease)| NestedLock::new(core, &lease.spec.label, &lease.spec.keys));
    let held: Vec<_> = held.collect();
    let mut found = Vec::new();
    {
        let mut checker = checker();
        for outer in &held {
            for (from, to) in edges(outer, &requested) {
                found.extend(checker.add(from, to, &held, &requested));
            }
        }
    }
    let Some(first) = found.first() else { return };
    for FoundInversion { inversion, .. } in found.iter().filter(|found| found.is_new) {
        let stacks = &inversion.stacks;
        let (stack, opposite) = (shown(&stacks[..1]), shown_opposite(stacks));
        events::lock_order_inversion(label, core.name(), stack, opposite);
    }
    // A second panic would abort the program.
    if core.config.lock_order == LockOrder::Panic && !std::thread::panicking() {
        panic!("{}", first.inversion);
    }
}

fn checker() -> MutexGuard<'static, OrderChecker> {
    static CHECKER: OfProcess<Mutex<OrderChecker>> = OfProcess::new();
    CHECKER.get_or_init(Mutex::default).lock()
}

/// The nestings of this process. Bounded by the number of call sites, whatever keys they have.
#[derive(Default)]
struct OrderChecker {
    graph: OrderGraph<LockClass, LockStack>,
    /// Keyed by the edge that completed each: its next call is the same inversion.
    by_edge: HashMap<(LockClass, LockClass), Arc<LockOrderInversion>>,
    inversions: Vec<Arc<LockOrderInversion>>,
}

/// An inversion that a call completes.
struct FoundInversion {
    inversion: Arc<LockOrderInversion>,
    /// False if it is listed already.
    is_new: bool,
}

type LockStack = Arc<[LockedAt]>;

impl OrderChecker {
    /// Adds an edge. Returns the inversion that it completes, or has completed before.
    fn add(
        &mut self,
        from: LockClass,
        to: LockClass,
        held: &[NestedLock<'_>],
        requested: &NestedLock<'_>,
    ) -> Option<FoundInversion> {
        if self.graph.knows(&from, &to) {
            let inversion = self.by_edge.get(&(from, to))?.clone();
            return Some(FoundInversion { inversion, is_new: false });
        }
        self.graph.retain(|class| class.pool.exists());
        self.by_edge.retain(|(from, to), _| from.pool.exists() && to.pool.exists());
        let stack: LockStack = held.iter().chain([requested]).map(NestedLock::shown).collect();
        let stacks: Vec<_> =
            self.graph.add(from.clone(), to.clone(), stack).iter().map(|it| it.to_vec()).collect();
        if stacks.is_empty() {
            return None;
        }
        let inversion = LockOrderInversion { stacks };
        // Pools without a name come and go.
        let listed = self.inversions.iter().find(|listed| ***listed == inversion).cloned();
        let is_new = listed.is_none();
        let inversion = listed.unwrap_or_else(|| Arc::new(inversion));
        if is_new {
            self.inversions.push(inversion.clone());
        }
        self.by_edge.insert((from, to), inversion.clone());
        Some(FoundInversion { inversion, is_new })
    }
}

/// A lock that is held or requested, with its classes.
struct NestedLock<'a> {
    pool: PoolIdentity,
    classes: Vec<KeyClass>,
    /// Sorted.
    keys: &'a [Key],
    core: &'a PoolCore,
    template: &'static str,
    /// `None` for the programmatic API.
    site: Option<&'static Site>,
    /// File and line.
    at: (&'static str, u32),
}

impl<'a> NestedLock<'a> {
    /// `None` for a request without a template: nothing tells which other locks have keys of its kind.
    fn new(core: &'a Arc<PoolCore>, label: &LockLabel, keys: &'a [Key]) -> Option<Self> {
        let (classes, template, site, at) = match *label {
            LockLabel::Site(site) => {
                let at = site.location();
                (KeyClass::of_site(site), site.template(), Some(site), (at.file, at.line))
            }
            LockLabel::Template(template, at) => {
                (KeyClass::of_template(template), template, None, (at.file(), at.line()))
            }
            LockLabel::Key(..) => return None,
        };
        Some(Self { pool: PoolIdentity::of(core), classes, keys, core, template, site, at })
    }

    fn shown(&self) -> LockedAt {
        let (template, (file, line)) = (self.template, self.at);
        let name = self.site.map(ToString::to_string);
        LockedAt { template, name, file, line, pool: self.core.name().to_string() }
    }

    fn class(&self, keys: &KeyClass, part: ClassPart) -> LockClass {
        LockClass { pool: self.pool.clone(), keys: keys.clone(), part }
    }
}

/// The edges from the classes of `held` to those of `requested`.
fn edges(held: &NestedLock<'_>, requested: &NestedLock<'_>) -> Vec<(LockClass, LockClass)> {
    let mut edges = Vec::new();
    for outer in &held.classes {
        for inner in &requested.classes {
            let are_in_both = || {
                held.pool == requested.pool
                    && held.classes.contains(inner)
                    && requested.classes.contains(outer)
            };
            if outer != inner && are_in_both() {
                // Two locks of the same kinds of keys: their keys would tell the order.
                continue;
            }
            if outer != inner || held.pool != requested.pool {
                let whole = |of: &NestedLock<'_>, keys| of.class(keys, ClassPart::Whole);
                edges.push((whole(held, outer), whole(requested, inner)));
            } else if let Some((from, to)) = directions(held, requested) {
                edges.push((held.class(outer, from), requested.class(inner, to)));
            }
        }
    }
    edges
}

/// For two locks of one class. If their keys have the same order everywhere, they cannot deadlock.
fn directions(held: &NestedLock<'_>, requested: &NestedLock<'_>) -> Option<(ClassPart, ClassPart)> {
    if held.classes.len() != 1 || requested.classes.len() != 1 {
        return None;
    }
    let is_below = |one: &NestedLock<'_>, other: &NestedLock<'_>| {
        let is_below_all = |key: &Key| {
            other.keys.iter().all(|other| by_number(key.as_str(), other.as_str()).is_lt())
        };
        one.keys.iter().all(is_below_all)
    };
    if is_below(held, requested) {
        Some((ClassPart::Lower, ClassPart::Upper))
    } else if is_below(requested, held) {
        Some((ClassPart::Upper, ClassPart::Lower))
    } else {
        None
    }
}

/// Compares keys as text, but the numbers within them as numbers: programs sort numbers before they lock.
fn by_number(one: &str, other: &str) -> Ordering {
    let (mut one, mut other) = (one.as_bytes(), other.as_bytes());
    while let (Some(a), Some(b)) = (one.first(), other.first()) {
        let order = if a.is_ascii_digit() && b.is_ascii_digit() {
            let (a, b) = (take_number(&mut one), take_number(&mut other));
            a.len().cmp(&b.len()).then_with(|| a.cmp(b))
        } else {
            let order = a.cmp(b);
            (one, other) = (&one[1..], &other[1..]);
            order
        };
        if order.is_ne() {
            return order;
        }
    }
    one.len().cmp(&other.len())
}

/// Takes the digits at the start of `text`. Returns them without leading zeros.
fn take_number<'a>(text: &mut &'a [u8]) -> &'a [u8] {
    let end = text.iter().position(|byte| !byte.is_ascii_digit()).unwrap_or(text.len());
    let (number, rest) = text.split_at(end);
    *text = rest;
    let zeros = number.iter().take_while(|byte| **byte == b'0').count();
    &number[zeros..]
}

/// Locks that count as one in the order: those of one kind of keys in one pool.
#[derive(Clone, PartialEq, Eq, Hash)]
struct LockClass {
    pool: PoolIdentity,
    keys: KeyClass,
    part: ClassPart,
}

/// Two locks of one class, held together, are nodes of their own: the one with the lower key, and the one with the upper key.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum ClassPart {
    Whole,
    Lower,
    Upper,
}

#[derive(Clone, PartialEq, Eq, Hash)]
enum KeyClass {
    Template(TemplateShape),
    /// An expression gives the key: the function at this file and line.
    Computed(&'static str, u32),
}

impl KeyClass {
    fn of_site(site: &'static Site) -> Vec<Self> {
        if site.is_computed() {
            let at = site.location();
            return vec![Self::Computed(at.file, at.line)];
        }
        Self::of_template(site.template())
    }

    fn of_template(template: &'static str) -> Vec<Self> {
        TemplateShape::all_in(template).into_iter().map(Self::Template).collect()
    }
}

/// Pools with the same name count as one: the tests of a program have a pool each.
#[derive(Clone)]
enum PoolIdentity {
    Named(Arc<str>),
    /// The address stays taken as long as this exists.
    Unnamed(Weak<PoolCore>),
}

impl PoolIdentity {
    fn of(core: &Arc<PoolCore>) -> Self {
        match core.given_name() {
            Some(name) => Self::Named(name.clone()),
            None => Self::Unnamed(Arc::downgrade(core)),
        }
    }

    fn exists(&self) -> bool {
        match self {
            Self::Named(_) => true,
            Self::Unnamed(pool) => pool.strong_count() > 0,
        }
    }
}

impl PartialEq for PoolIdentity {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Named(one), Self::Named(other)) => one == other,
            (Self::Unnamed(one), Self::Unnamed(other)) => one.ptr_eq(other),
            _ => false,
        }
    }
}

impl Eq for PoolIdentity {}

impl Hash for PoolIdentity {
    fn hash<H: Hasher>(&self, state: &mut H) {
        match self {
            Self::Named(name) => name.hash(state),
            Self::Unnamed(pool) => pool.as_ptr().hash(state),
        }
    }
}

/// Stacks, separated by `; `, of locks, separated by ` > `.
fn shown(stacks: &[Vec<LockedAt>]) -> String {
    let stack = |locks: &Vec<LockedAt>| {
        locks.iter().map(ToString::to_string).collect::<Vec<_>>().join(" > ")
    };
    stacks.iter().map(stack).collect::<Vec<_>>().join("; ")
}

/// The stacks after the first one. Two keys of one template have the same stack in both orders.
fn shown_opposite(stacks: &[Vec<LockedAt>]) -> String {
    let mut text = shown(&stacks[1..]);
    if stacks[1..].iter().all(|stack| *stack == stacks[0]) {
        text += " with the keys in the opposite order";
    }
    text
}

impl fmt::Display for LockedAt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = self.name.as_deref().unwrap_or(self.template);
        write!(f, "{what} ({}:{})", self.file, self.line)
    }
}

impl fmt::Display for LockOrderInversion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (first, others) = (shown(&self.stacks[..1]), shown_opposite(&self.stacks));
        write!(f, "locks are nested in opposite orders: {first}; {others}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_in_keys_are_compared_as_numbers() {
        let ascending =
            [("order:9", "order:10"), ("a:2:x", "a:10:b"), ("a", "a:1"), ("a:1", "b:0")];
        for (one, other) in ascending {
            assert_eq!(by_number(one, other), Ordering::Less, "{one} {other}");
            assert_eq!(by_number(other, one), Ordering::Greater, "{other} {one}");
        }
        assert_eq!(by_number("order:007", "order:7"), Ordering::Equal);
    }
}
