//! Sends each request to the server that has its slot, and follows redirections.

use std::sync::Arc;

use crate::backend::redis::cluster::errors::{
    different_slots, no_server, slow, too_many_redirects,
};
use crate::backend::redis::cluster::fan_out::{BoxedCall, StragglerLimit, fan_out};
use crate::backend::redis::cluster::servers::Servers;
use crate::backend::redis::cluster::slot_refresh::SlotRefresh;
use crate::backend::redis::hash_slot::common_slot;
use crate::backend::redis::protocol::scripted_server::{RouteHint, ScriptedServer};
use crate::backend::redis::server_error::{self, Redirect};
use crate::backend::redis::slot_map::Address;
use crate::backend::{BackendError, FailureKind, TIME_PER_REQUEST};
use crate::base::key::Key;

/// How many times one request is redirected before it fails.
const MAX_REDIRECTS: usize = 4;

/// Knows the server of each slot. Shares the connections and the refresh of the slot map with the [`Cluster`](super::Cluster).
pub(crate) struct Router {
    pub(super) servers: Arc<Servers>,
    pub(super) refresh: Arc<SlotRefresh>,
}

/// What happens if the keys of one command are temporarily at two servers (`TRYAGAIN`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IfDivided {
    /// The request fails.
    Fail,
    /// The request is sent once more with [`RouteHint::Separate`]: it may share a command with other requests, or have fewer keys.
    SendSeparately,
}

/// How the first commands of a call are sent.
#[derive(Clone, Copy)]
pub(super) struct CallBegin {
    pub(super) hint: RouteHint,
    /// Whether answers to other requests of the caller are there already.
    pub(super) answers_wait: bool,
}

impl CallBegin {
    /// Requests that may share commands.
    pub(super) const FIRST: Self = Self { hint: RouteHint::Direct, answers_wait: false };
}

/// The next destination of a request.
struct Route {
    /// The place of the request in the call.
    at: usize,
    slot: u16,
    address: Address,
    hint: RouteHint,
}

impl Router {
    /// Sends each request to the server of its slot by `send`. One outcome each, in order.
    pub(crate) async fn route<T: Clone + Send + Sync, O: Send>(
        &self,
        requests: &[T],
        if_divided: IfDivided,
        keys: impl Fn(&T) -> &[Key] + Sync,
        send: impl for<'a> Fn(
            &'a ScriptedServer,
            RouteHint,
            &'a [T],
        ) -> BoxedCall<'a, Vec<Result<O, BackendError>>>
        + Sync,
    ) -> Vec<Result<O, BackendError>> {
        self.route_from(CallBegin::FIRST, requests, if_divided, keys, send).await
    }

    /// As [`route`](Self::route).
    pub(super) async fn route_from<T: Clone + Send + Sync, O: Send>(
        &self,
        begin: CallBegin,
        requests: &[T],
        if_divided: IfDivided,
        keys: impl Fn(&T) -> &[Key] + Sync,
        send: impl for<'a> Fn(
            &'a ScriptedServer,
            RouteHint,
            &'a [T],
        ) -> BoxedCall<'a, Vec<Result<O, BackendError>>>
        + Sync,
    ) -> Vec<Result<O, BackendError>> {
        let mut outcomes: Vec<_> = requests.iter().map(|_| None).collect();
        let mut routes = Vec::with_capacity(requests.len());
        for (at, request) in requests.iter().enumerate() {
            match self.first_route(at, keys(request), begin.hint) {
                Ok(route) => routes.push(route),
                Err(error) => outcomes[at] = Some(Err(error)),
            }
        }
        let mut redirects = 0;
        let count = u32::try_from(requests.len()).unwrap_or(u32::MAX);
        while !routes.is_empty() {
            // Sorted by slot as well: adjacent leases of one slot share a renewal.
            routes.sort_by(|a, b| (a.hint, &a.address, a.slot).cmp(&(b.hint, &b.address, b.slot)));
            let groups: Vec<_> =
                routes.chunk_by(|a, b| (a.hint, &a.address) == (b.hint, &b.address)).collect();
            let call = |&group| -> BoxedCall<'_, _> { Box::pin(self.send(requests, group, &send)) };
            let calls = groups.iter().map(call).collect();
            // The answers of other servers must be returned before the caller's request timeout.
            let limit = self.servers.shared.request_timeout / 8 + TIME_PER_REQUEST * count;
            let from_start = begin.answers_wait || outcomes.iter().any(Option::is_some);
            let answers = fan_out(calls, Some(StragglerLimit { limit, from_start })).await;
            let mut redirected = Vec::new();
            for (group, answer) in groups.into_iter().zip(answers) {
                let mut answer = answer.unwrap_or_default().into_iter();
                for route in group {
                    let outcome = answer.next().unwrap_or_else(|| Err(slow(&route.address)));
                    outcomes[route.at] = match outcome {
                        Ok(outcome) => Some(Ok(outcome)),
                        Err(error) => {
                            let next = self.redirect(route, &error, if_divided);
                            match next.filter(|_| redirects < MAX_REDIRECTS) {
                                Some(next) => {
                                    redirected.push(next);
                                    None
                                }
                                None => Some(Err(self.final_error(error))),
                            }
                        }
                    };
                }
            }
            routes = redirected;
            redirects += 1;
        }
        let outcome = |outcome: Option<_>| outcome.unwrap_or_else(|| Err(too_many_redirects()));
        outcomes.into_iter().map(outcome).collect()
    }

    /// The error for the caller. Unless the error needs a change from outside, the map may be wrong, and is refreshed.
    pub(super) fn final_error(&self, error: BackendError) -> BackendError {
        let is_redirect = server_error::redirect(&error).is_some();
        let error = if is_redirect { too_many_redirects() } else { error };
        if error.kind() != FailureKind::Rejected {
            self.refresh.request();
        }
        error
    }

    fn first_route(&self, at: usize, keys: &[Key], hint: RouteHint) -> Result<Route, BackendError> {
        let slot = common_slot(keys).map_err(|(one, other)| different_slots(one, other))?;
        let Some(address) = self.servers.slots.owner(slot) else {
            self.refresh.request();
            return Err(no_server(format!("no server has slot {slot} of the Redis Cluster")));
        };
        Ok(Route { at, slot, address, hint })
    }

    /// Sends the requests of `group` to their server, in one flight.
    async fn send<T: Clone, O>(
        &self,
        requests: &[T],
        group: &[Route],
        send: &impl for<'a> Fn(
            &'a ScriptedServer,
            RouteHint,
            &'a [T],
        ) -> BoxedCall<'a, Vec<Result<O, BackendError>>>,
    ) -> Vec<Result<O, BackendError>> {
        let Some(Route { address, hint, .. }) = group.first() else { return Vec::new() };
        let server = match self.servers.server(address).await {
            Ok(server) => server,
            Err(error) => return group.iter().map(|_| Err(error.clone())).collect(),
        };
        if requests.len() == 1 {
            return send(&server, *hint, requests).await;
        }
        let part: Vec<_> = group.iter().map(|route| requests[route.at].clone()).collect();
        send(&server, *hint, &part).await
    }

    /// The next destination of a request that failed with `error`, if there is a better one.
    fn redirect(&self, from: &Route, error: &BackendError, if_divided: IfDivided) -> Option<Route> {
        if if_divided == IfDivided::SendSeparately
            && let Some(separate) = from.separate(error)
        {
            return Some(separate);
        }
        let Route { at, slot, .. } = *from;
        match server_error::redirect(error)? {
            Redirect::Moved(to) => {
                let address = Address::parse(to, &from.address)?;
                if self.servers.slots.patch(slot, &address) {
                    self.refresh.note_move();
                }
                Some(Route { at, slot, address, hint: RouteHint::Direct })
            }
            Redirect::Ask(to) => {
                let address = Address::parse(to, &from.address)?;
                Some(Route { at, slot, address, hint: RouteHint::Asking })
            }
        }
    }
}

impl Route {
    /// The same server once more, for a request in a divided slot.
    ///
    /// A server before 7.0 redirects a command of which it has some keys and not others. What follows a redirection must have the
    /// keys of the command that was redirected: the new server would find those missing that have not moved yet.
    fn separate(&self, error: &BackendError) -> Option<Self> {
        let is_ask = matches!(server_error::redirect(error), Some(Redirect::Ask(_)));
        if self.hint != RouteHint::Direct || !(is_ask || server_error::is_try_again(error)) {
            return None;
        }
        let Self { at, slot, .. } = *self;
        Some(Self { at, slot, address: self.address.clone(), hint: RouteHint::Separate })
    }
}

#[cfg(test)]
mod tests {
    use redis::RedisError;

    use super::*;

    fn answer(text: &str) -> BackendError {
        let answer = redis::parse_redis_value(format!("-{text}\r\n").as_bytes());
        let error: RedisError = answer.unwrap().extract_error().unwrap_err();
        server_error::failure("a server", error)
    }

    #[test]
    fn a_command_with_fewer_keys_goes_to_the_source_of_a_slot_first() {
        let route = |hint| Route { at: 3, slot: 5, address: Address::new("a", 1), hint };
        for text in ["ASK 5 127.0.0.1:7001", "TRYAGAIN Multiple keys request"] {
            let next = route(RouteHint::Direct).separate(&answer(text)).unwrap();
            assert_eq!((next.at, next.slot, next.hint), (3, 5, RouteHint::Separate));
            assert_eq!(next.address, Address::new("a", 1), "{text}");
            for hint in [RouteHint::Separate, RouteHint::Asking] {
                assert!(route(hint).separate(&answer(text)).is_none(), "{text}");
            }
        }
        for text in ["MOVED 5 127.0.0.1:7001", "CLUSTERDOWN The cluster is down"] {
            assert!(route(RouteHint::Direct).separate(&answer(text)).is_none(), "{text}");
        }
    }
}
