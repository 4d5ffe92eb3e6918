//! Which locks were requested under which, as a graph; finds cycles as they arise.

use std::collections::{HashMap, HashSet, VecDeque};
use std::hash::Hash;

/// A directed graph of lock classes `C`: an edge leads from a held class to one that was requested under it.
///
/// An edge keeps the nesting `N` that added it, and never changes. The size is bounded by the square of the number of
/// classes.
#[derive(Debug)]
pub(crate) struct OrderGraph<C, N> {
    edges: HashMap<C, HashMap<C, N>>,
}

impl<C, N> Default for OrderGraph<C, N> {
    fn default() -> Self {
        Self { edges: HashMap::new() }
    }
}

impl<C: Clone + Eq + Hash, N: Clone> OrderGraph<C, N> {
    pub(crate) fn knows(&self, held: &C, requested: &C) -> bool {
        self.edges.get(held).is_some_and(|edges| edges.contains_key(requested))
    }

    /// Adds that `requested` was requested under `held`. If this edge closes a cycle, returns the nestings of the shortest
    /// one. The new nesting is first, followed by those on the way from `requested` back to `held`. Empty otherwise, and
    /// for an edge that is known.
    pub(crate) fn add(&mut self, held: C, requested: C, nesting: N) -> Vec<N> {
        if held == requested || self.knows(&held, &requested) {
            return Vec::new();
        }
        let mut cycle = self.way(&requested, &held);
        if !cycle.is_empty() {
            cycle.insert(0, nesting.clone());
        }
        self.edges.entry(held).or_default().insert(requested, nesting);
        cycle
    }

    /// Removes the classes that are not kept, with their edges.
    pub(crate) fn retain(&mut self, is_kept: impl Fn(&C) -> bool) {
        self.edges.retain(|held, edges| {
            edges.retain(|requested, _| is_kept(requested));
            is_kept(held) && !edges.is_empty()
        });
    }

    /// The nestings of a shortest way; empty if there is none.
    fn way(&self, from: &C, to: &C) -> Vec<N> {
        let mut came_from = HashMap::<&C, (&C, &N)>::new();
        let (mut seen, mut queue) = (HashSet::from([from]), VecDeque::from([from]));
        while let Some(at) = queue.pop_front() {
            if at == to {
                break;
            }
            for (next, nesting) in self.edges.get(at).into_iter().flatten() {
                if seen.insert(next) {
                    came_from.insert(next, (at, nesting));
                    queue.push_back(next);
                }
            }
        }
        let (mut way, mut at) = (Vec::new(), to);
        while let Some((before, nesting)) = came_from.get(at) {
            way.push((*nesting).clone());
            at = before;
        }
        way.reverse();
        way
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Adds edges as `"ab"`: b under a. The nesting of an edge is its text.
    fn graph(edges: &[&'static str]) -> OrderGraph<u8, &'static str> {
        let mut graph = OrderGraph::default();
        for edge in edges {
            assert_eq!(add(&mut graph, edge), [""; 0], "{edge} closes no cycle");
        }
        graph
    }

    fn add(graph: &mut OrderGraph<u8, &'static str>, edge: &'static str) -> Vec<&'static str> {
        let [held, requested] = *edge.as_bytes() else { panic!("{edge}") };
        graph.add(held, requested, edge)
    }

    #[test]
    fn opposite_edges_are_a_cycle_with_both_nestings() {
        let mut graph = graph(&["ab"]);
        assert_eq!(add(&mut graph, "ba"), ["ba", "ab"]);
    }

    #[test]
    fn a_longer_cycle_is_found_in_its_order() {
        let mut graph = graph(&["ab", "bc", "cd", "xa", "dy"]);
        assert_eq!(add(&mut graph, "da"), ["da", "ab", "bc", "cd"]);
    }

    #[test]
    fn the_shortest_cycle_counts() {
        let mut graph = graph(&["ab", "bc", "cd", "ad"]);
        assert_eq!(add(&mut graph, "da"), ["da", "ad"]);
    }

    #[test]
    fn an_edge_is_reported_once() {
        let mut graph = graph(&["ab"]);
        assert_eq!(add(&mut graph, "ba").len(), 2);
        for known in ["ab", "ba"] {
            assert_eq!(add(&mut graph, known), [""; 0]);
        }
    }

    #[test]
    fn one_order_everywhere_is_no_cycle() {
        drop(graph(&["ab", "ac", "bc", "bd", "cd", "ad", "aa"]));
    }

    #[test]
    fn removed_classes_close_no_cycle() {
        let mut graph = graph(&["ab", "bc"]);
        graph.retain(|class| *class != b'b');
        assert_eq!(add(&mut graph, "ca"), [""; 0]);
        assert!(graph.knows(&b'c', &b'a') && !graph.knows(&b'a', &b'b'));
        assert_eq!(graph.edges.len(), 1, "{graph:?}");
    }

    /// Against the definition: an edge closes a cycle if its start was reachable from its end.
    #[test]
    fn cycles_are_those_of_a_search_without_short_cuts() {
        let reachable = |edges: &[(u8, u8)], from: u8, to: u8| {
            let mut reached = HashSet::from([from]);
            for _ in 0..8 {
                let more = edges.iter().filter(|(from, _)| reached.contains(from));
                let more: Vec<u8> = more.map(|(_, to)| *to).collect();
                reached.extend(more);
            }
            reached.contains(&to)
        };
        let (mut cycles, mut seed) = (0, 7_u32);
        for _ in 0..2_000 {
            let (mut graph, mut edges) = (OrderGraph::default(), Vec::new());
            for _ in 0..10 {
                seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                let edge = ((seed >> 8) as u8 % 6, (seed >> 20) as u8 % 6);
                let (held, requested) = edge;
                let is_new = held != requested && !edges.contains(&edge);
                let expected = is_new && reachable(&edges, requested, held);
                let cycle = graph.add(held, requested, edge);
                assert_eq!(!cycle.is_empty(), expected, "{edge:?} after {edges:?}");
                // Each nesting goes on where the one before it ends.
                let ends = cycle.iter().zip(cycle.iter().cycle().skip(1));
                assert!(ends.into_iter().all(|(one, next)| one.1 == next.0), "{cycle:?}");
                cycles += usize::from(expected);
                edges.push(edge);
            }
        }
        assert!(cycles > 1_000, "{cycles}");
    }
}
