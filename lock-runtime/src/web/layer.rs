//! `tower`: a layer that runs a service only while a lock is held.

use std::fmt;
#[cfg(feature = "axum")]
use std::fmt::Display;
use std::future::Future;
use std::panic::Location;
use std::pin::Pin;
#[cfg(feature = "axum")]
use std::str::FromStr;
use std::sync::Arc;
use std::task::{Context, Poll};

use http::header::{CONTENT_TYPE, RETRY_AFTER};
use http::request::Parts;
use http::{HeaderValue, Method, Request, Response, StatusCode};
use http_body::Body;
use tower_layer::Layer;
use tower_service::Service;

use crate::api::locked_future::Fuse;
use crate::attribute::return_type::FromLockError;
use crate::base::call_site::LockLabel;
#[cfg(feature = "axum")]
use crate::base::error::ErrorKind;
use crate::base::error::LockError;
use crate::base::fence::Fence;
use crate::base::key::Key;
use crate::base::problem::Problem;
use crate::web::body_lock::BodyLock;
use crate::web::locked_body::LockedBody;
#[cfg(feature = "axum")]
use crate::web::path_template::PathTemplate;
use crate::web::response::problem;
use crate::web::route_lock::{RouteLock, route_settings};

/// A `tower` layer: the service behind it serves a request only while the lock of that request is held. The response for
/// a lock that is not acquired, or lost, is that of its [`Problem`]. When a client disconnects, the service's future is
/// dropped and the lock is released.
///
/// A handler finds the [`Fence`](crate::Fence) of its request in the request's extensions. The body of a request is read
/// under the lock: [`max_hold`](Self::max_hold) bounds what a client that stalls can do.
///
/// ```
/// use std::time::Duration;
///
/// # #[cfg(feature = "axum")] {
/// use axum::routing::post;
/// use axum::{Extension, Router};
/// use lock_runtime::Fence;
/// use lock_runtime::web::LockLayer;
///
/// async fn settle(Extension(fence): Extension<Fence>) -> String {
///     format!("settled under {fence}")
/// }
///
/// let lock = LockLayer::for_path("order:<id>").parameter::<u64>("id").max_hold(Duration::from_secs(30));
/// let settle = post(settle).route_layer(lock);
/// let routes: Router = Router::new().route("/orders/{id}/settle", settle);
/// # drop(routes);
/// # }
/// ```
#[derive(Clone, Debug)]
#[must_use = "a layer does nothing before it is added to a service"]
pub struct LockLayer {
    route: Arc<RouteLock>,
    key: RequestKey,
    /// Replaces the name of the lock.
    name: Option<LockLabel>,
    until_body_end: bool,
}

/// Where the key of a request comes from.
#[derive(Clone)]
enum RequestKey {
    #[cfg(feature = "axum")]
    Path(Arc<PathTemplate>),
    /// And where the program gives it.
    Computed(Arc<dyn Fn(&Parts) -> Key + Send + Sync>, &'static Location<'static>),
}

impl fmt::Debug for RequestKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            #[cfg(feature = "axum")]
            Self::Path(template) => template.fmt(f),
            Self::Computed(..) => f.write_str("Computed(..)"),
        }
    }
}

impl LockLayer {
    /// Locks by the path parameters of an axum route: `"order:<id>"` for `/orders/{id}`. The rules for templates are those
    /// of the attribute, with names only. [`parameter`](Self::parameter) gives a parameter a type.
    ///
    /// # Panics
    /// If the template is invalid.
    #[cfg(feature = "axum")]
    #[track_caller]
    pub fn for_path(template: &'static str) -> Self {
        Self::with_key(RequestKey::Path(Arc::new(PathTemplate::new(template))))
    }

    /// Reads the values of the path parameter `name` as `T`, as the handler does, and answers with 400 if one does not
    /// parse. Without it the text of the path is the value: `/orders/42` and `/orders/042` have two locks, although a
    /// handler may read one number.
    ///
    /// # Panics
    /// If the template has no such parameter.
    #[cfg(feature = "axum")]
    #[track_caller]
    pub fn parameter<T: FromStr + Display>(mut self, name: &'static str) -> Self {
        match &mut self.key {
            RequestKey::Path(template) => Arc::make_mut(template).set_type::<T>(name),
            RequestKey::Computed(..) => panic!("a computed lock key has no parameter `<{name}>`"),
        }
        self
    }

    /// Locks by a key that is computed from the head of the request. Values of a client are escaped only in the template of
    /// [`for_path`](Self::for_path). Here the program must ensure that two different values never give the same key.
    #[track_caller]
    pub fn new<K: Into<Key>>(key: impl Fn(&Parts) -> K + Send + Sync + 'static) -> Self {
        let key = Arc::new(move |parts: &Parts| key(parts).into());
        Self::with_key(RequestKey::Computed(key, Location::caller()))
    }

    fn with_key(key: RequestKey) -> Self {
        Self { route: Arc::default(), key, name: None, until_body_end: false }
    }

    route_settings!();

    /// Holds the lock until the response body has ended, not only until the handler has returned. For bodies that are
    /// streams. A stream ends with an error if its lock is lost.
    ///
    /// At the end of the body the lock is released. The last part goes to the server when the release is answered, so that a
    /// client with the whole response finds the lock free. The server buffers each part, of any size: the lock does not last
    /// until the client has read it.
    ///
    /// A stream that does not announce its end, in a response with a `Content-Length`, is dropped by the server after that
    /// number of bytes. Its lock is then released in the background, as for a client that disconnects. The next request needs
    /// a [`wait`](Self::wait).
    pub fn until_body_end(self) -> Self {
        Self { until_body_end: true, ..self }
    }

    /// The key of a request.
    async fn key_of(&self, parts: &mut Parts) -> (Result<Key, LockError>, LockLabel) {
        match &self.key {
            #[cfg(feature = "axum")]
            RequestKey::Path(template) => {
                use axum::extract::{FromRequestParts, RawPathParams};
                let label = LockLabel::Site(template.site());
                let parameters = RawPathParams::from_request_parts(parts, &()).await;
                let Ok(parameters) = parameters else {
                    let cause =
                        "the path of the request is not valid UTF-8, or belongs to no route";
                    return (Err(LockError::new(ErrorKind::InvalidKey, cause)), label);
                };
                (template.render(&parameters.iter().collect::<Vec<_>>()), label)
            }
            RequestKey::Computed(key, at) => {
                let key = key(parts);
                (Ok(key.clone()), LockLabel::Key(key, at))
            }
        }
    }
}

impl<S> Layer<S> for LockLayer {
    type Service = LockService<S>;

    fn layer(&self, inner: S) -> LockService<S> {
        LockService { inner, layer: self.clone() }
    }
}

/// The service of a [`LockLayer`].
#[derive(Clone, Debug)]
pub struct LockService<S> {
    inner: S,
    layer: LockLayer,
}

impl<S, B, R> Service<Request<B>> for LockService<S>
where
    S: Service<Request<B>, Response = Response<R>> + Clone + Send + 'static,
    S::Future: Send,
    S::Error: Send,
    B: Send + 'static,
    R: Body + Send + 'static,
    R::Data: From<String>,
{
    type Response = Response<LockedBody<R>>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        // The service that is ready serves this request; its clone is polled for readiness again.
        let next = self.inner.clone();
        let mut service = std::mem::replace(&mut self.inner, next);
        let layer = self.layer.clone();
        Box::pin(async move {
            let (mut parts, body) = request.into_parts();
            let is_head = parts.method == Method::HEAD;
            let (key, label) = layer.key_of(&mut parts).await;
            let label = layer.name.clone().unwrap_or(label);
            let entered = match layer.route.enter(key, label).await {
                Ok(entered) => entered,
                Err(error) => return Ok(refused(&error)),
            };
            // Not that of a lock around this one.
            parts.extensions.remove::<Fence>();
            if let Some(fence) = entered.guard().fence() {
                parts.extensions.insert(fence);
            }
            let response = service.call(Request::from_parts(parts, body));
            let (response, lock) = if layer.until_body_end {
                match BodyLock::run(entered, response).await {
                    Ok((Ok(response), lock)) => (response, lock),
                    Ok((Err(error), lock)) => {
                        lock.release().await;
                        return Err(error);
                    }
                    Err(error) => return Ok(refused(&error)),
                }
            } else {
                match entered.run(Fuse::new(response)).await {
                    Ok(response) => (response?, BodyLock::Unlocked),
                    Err(error) => return Ok(refused(&error)),
                }
            };
            if lock.is_held() && (is_head || response.body().is_end_stream()) {
                // A server drops such a body without a poll.
                let (head, body) = response.into_parts();
                let size = body.size_hint();
                lock.drop_body(body);
                lock.release().await;
                return Ok(Response::from_parts(head, LockedBody::unsent(size)));
            }
            Ok(response.map(|body| LockedBody::new(body, lock)))
        })
    }
}

/// The [`Problem`] of the error.
#[diagnostic::do_not_recommend]
impl<B: From<String>> FromLockError for Response<B> {
    fn from_lock_error(error: LockError) -> Self {
        of_problem(&problem(&error))
    }
}

/// For handlers that return `Result<_, StatusCode>`. It is the status of the [`Problem`], without the document and
/// `Retry-After`; `Result<_, Response>` has them.
impl From<LockError> for StatusCode {
    fn from(error: LockError) -> Self {
        status_of(&problem(&error))
    }
}

fn refused<R: Body>(error: &LockError) -> Response<LockedBody<R>>
where
    R::Data: From<String>,
{
    of_problem::<String>(&problem(error)).map(|text| LockedBody::problem(text.into()))
}

fn of_problem<B: From<String>>(problem: &Problem) -> Response<B> {
    let mut response = Response::new(problem.to_json().into());
    *response.status_mut() = status_of(problem);
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(Problem::MEDIA_TYPE));
    if let Some(seconds) = problem.retry_after_seconds() {
        headers.insert(RETRY_AFTER, seconds.into());
    }
    response
}

fn status_of(problem: &Problem) -> StatusCode {
    StatusCode::from_u16(problem.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
}
