//! actix-web: an error as a response, a middleware that locks a route, and the order of a shutdown.

use std::fmt::{self, Display};
use std::future::{Future, Ready, ready};
use std::io;
use std::panic::Location;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::str::FromStr;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use actix_web::body::{EitherBody, MessageBody};
use actix_web::dev::{Server, Service, ServiceRequest, ServiceResponse, Transform};
use actix_web::http::header::{CONTENT_TYPE, RETRY_AFTER};
use actix_web::http::{Method, StatusCode};
use actix_web::{Error, HttpMessage, HttpRequest, HttpResponse, ResponseError};
use percent_encoding::percent_decode_str;

use crate::api::locked_future::Fuse;
use crate::api::serve::{Served, serve};
use crate::attribute::return_type::FromLockError;
use crate::base::call_site::LockLabel;
use crate::base::error::{ErrorKind, LockError};
use crate::base::fence::Fence;
use crate::base::key::Key;
use crate::base::problem::Problem;
use crate::web::body_lock::BodyLock;
use crate::web::locked_message_body::LockedMessageBody;
use crate::web::path_template::PathTemplate;
use crate::web::response::{mapped, problem};
use crate::web::route_lock::{RouteLock, route_settings};

/// The [`Problem`] of the error.
impl ResponseError for LockError {
    fn status_code(&self) -> StatusCode {
        status(&mapped(self))
    }

    fn error_response(&self) -> HttpResponse {
        response(&problem(self))
    }
}

/// The [`Problem`] of the error.
#[diagnostic::do_not_recommend]
impl FromLockError for HttpResponse {
    fn from_lock_error(error: LockError) -> Self {
        response(&problem(&error))
    }
}

fn response(problem: &Problem) -> HttpResponse {
    let mut response = HttpResponse::build(status(problem));
    response.insert_header((CONTENT_TYPE, Problem::MEDIA_TYPE));
    if let Some(seconds) = problem.retry_after_seconds() {
        response.insert_header((RETRY_AFTER, seconds));
    }
    response.body(problem.to_json())
}

fn status(problem: &Problem) -> StatusCode {
    StatusCode::from_u16(problem.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
}

/// An actix-web middleware: the route behind it serves a request only while the lock of that request is held. The response
/// for a lock that is not acquired, or lost, is that of its [`Problem`].
///
/// With [`for_path`](Self::for_path) it goes on a route, or on a resource, where the path parameters are known. Around a
/// resource it also locks requests of other methods, such as the `OPTIONS` of a browser. A handler finds the
/// [`Fence`](crate::Fence) of its request with `web::ReqData<Fence>`. The body of a request is read under the lock, and actix-web runs a handler to its end when the
/// client disconnects: `max_hold` bounds both.
///
/// ```
/// use std::time::Duration;
///
/// use actix_web::web;
/// use lock_runtime::Fence;
/// use lock_runtime::web::LockMiddleware;
///
/// async fn settle(fence: web::ReqData<Fence>) -> String {
///     format!("settled under {}", *fence)
/// }
///
/// let lock = LockMiddleware::for_path("order:<id>").ttl(Duration::from_secs(5)).max_hold(Duration::from_secs(30));
/// let settle = web::resource("/orders/{id}/settle").route(web::post().to(settle).wrap(lock));
/// # drop(settle);
/// ```
#[derive(Clone, Debug)]
#[must_use = "a middleware does nothing before it wraps a resource"]
pub struct LockMiddleware {
    route: Arc<RouteLock>,
    key: ResourceKey,
    /// Replaces the name of the lock.
    name: Option<LockLabel>,
    until_body_end: bool,
}

/// Where the key of a request to a resource comes from.
#[derive(Clone)]
enum ResourceKey {
    Path(Arc<PathTemplate>),
    /// And where the program gives it.
    Computed(Arc<dyn Fn(&HttpRequest) -> Key + Send + Sync>, &'static Location<'static>),
}

impl fmt::Debug for ResourceKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path(template) => template.fmt(f),
            Self::Computed(..) => f.write_str("Computed(..)"),
        }
    }
}

impl LockMiddleware {
    /// Locks by the path parameters of a resource: `"order:<id>"` for `/orders/{id}`. The rules for templates are those of
    /// the attribute, with names only. [`parameter`](Self::parameter) gives a parameter a type.
    ///
    /// # Panics
    /// If the template is invalid.
    #[track_caller]
    pub fn for_path(template: &'static str) -> Self {
        Self::with_key(ResourceKey::Path(Arc::new(PathTemplate::new(template))))
    }

    /// Reads the values of the path parameter `name` as `T`, as the handler does, and answers with 400 if one does not
    /// parse. Without it the text of the path is the value: `/orders/42` and `/orders/042` have two locks, although a
    /// handler may read one number.
    ///
    /// # Panics
    /// If the template has no such parameter.
    #[track_caller]
    pub fn parameter<T: FromStr + Display>(mut self, name: &'static str) -> Self {
        match &mut self.key {
            ResourceKey::Path(template) => Arc::make_mut(template).set_type::<T>(name),
            ResourceKey::Computed(..) => panic!("a computed lock key has no parameter `<{name}>`"),
        }
        self
    }

    /// Locks by a key that is computed from the request without its body, which has not arrived yet. Values of a client are
    /// escaped only in the template of [`for_path`](Self::for_path). Here the program must ensure that two different values
    /// never give the same key.
    ///
    /// ```
    /// use lock_runtime::web::LockMiddleware;
    ///
    /// let by_tenant = LockMiddleware::new(|request| match request.headers().get("tenant") {
    ///     Some(tenant) => format!("tenant:{tenant:?}"),
    ///     None => "tenant".to_owned(),
    /// });
    /// let routes = actix_web::App::new().wrap(by_tenant.template("tenant"));
    /// # drop(routes);
    /// ```
    #[track_caller]
    pub fn new<K: Into<Key>>(key: impl Fn(&HttpRequest) -> K + Send + Sync + 'static) -> Self {
        let key = Arc::new(move |request: &HttpRequest| key(request).into());
        Self::with_key(ResourceKey::Computed(key, Location::caller()))
    }

    fn with_key(key: ResourceKey) -> Self {
        Self { route: Arc::default(), key, name: None, until_body_end: false }
    }

    route_settings!();

    /// Holds the lock until the response body has ended, not only until the handler has returned. For bodies that are
    /// streams. A stream ends with an error if its lock is lost.
    ///
    /// At the end of the body the lock is released. The last part goes to the server when the release is answered, so that a
    /// client with the whole response finds the lock free. The server buffers each part, of any size: the lock does not last
    /// until the client has read it.
    pub fn until_body_end(self) -> Self {
        Self { until_body_end: true, ..self }
    }

    /// The key of a request.
    fn key_of(&self, request: &ServiceRequest) -> (Result<Key, LockError>, LockLabel) {
        let (key, label) = match &self.key {
            ResourceKey::Path(template) => {
                (rendered(template, request), LockLabel::Site(template.site()))
            }
            ResourceKey::Computed(key, at) => {
                let key = key(request.request());
                (Ok(key.clone()), LockLabel::Key(key, at))
            }
        };
        (key, self.name.clone().unwrap_or(label))
    }
}

impl<S, B> Transform<S, ServiceRequest> for LockMiddleware
where
    S: Service<ServiceRequest, Response = ServiceResponse<B>, Error = Error> + 'static,
    B: MessageBody + 'static,
{
    type Response = ServiceResponse<EitherBody<LockedMessageBody<B>>>;
    type Error = Error;
    type Transform = LockedService<S>;
    type InitError = ();
    type Future = Ready<Result<Self::Transform, ()>>;

    fn new_transform(&self, inner: S) -> Self::Future {
        ready(Ok(LockedService { inner: Rc::new(inner), lock: self.clone() }))
    }
}

/// The service of a [`LockMiddleware`].
pub struct LockedService<S> {
    inner: Rc<S>,
    lock: LockMiddleware,
}

impl<S> fmt::Debug for LockedService<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockedService").field("lock", &self.lock).finish_non_exhaustive()
    }
}

impl<S, B> Service<ServiceRequest> for LockedService<S>
where
    S: Service<ServiceRequest, Response = ServiceResponse<B>, Error = Error> + 'static,
    B: MessageBody + 'static,
{
    type Response = ServiceResponse<EitherBody<LockedMessageBody<B>>>;
    type Error = Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Error>>>>;

    fn poll_ready(&self, cx: &mut Context<'_>) -> Poll<Result<(), Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&self, request: ServiceRequest) -> Self::Future {
        let (inner, lock) = (self.inner.clone(), self.lock.clone());
        Box::pin(async move {
            let (key, label) = lock.key_of(&request);
            let entered = match lock.route.enter(key, label).await {
                Ok(entered) => entered,
                // A response, not an error: middlewares around this one see it. A loss is an error, because the handler has
                // the request, of which actix-web allows no second handle meanwhile.
                Err(error) => return Ok(request.error_response(error).map_into_right_body()),
            };
            // Not that of a lock around this one.
            request.extensions_mut().remove::<Fence>();
            if let Some(fence) = entered.guard().fence() {
                request.extensions_mut().insert(fence);
            }
            let is_head = request.method() == Method::HEAD;
            let response = inner.call(request);
            let (response, lock) = if lock.until_body_end {
                BodyLock::run(entered, response).await?
            } else {
                (entered.run(Fuse::new(response)).await?, BodyLock::Unlocked)
            };
            let response = match response {
                Ok(response) => response,
                Err(error) => {
                    lock.release().await;
                    return Err(error);
                }
            };
            let size = response.response().body().size();
            if lock.is_held() && (is_head || size.is_eof()) {
                let response = response.map_body(|_, body| {
                    lock.drop_body(body);
                    EitherBody::left(LockedMessageBody::unsent(size))
                });
                lock.release().await;
                return Ok(response);
            }
            let locked =
                |_: &mut _, body| EitherBody::left(LockedMessageBody::new(body, size, lock));
            Ok(response.map_body(locked))
        })
    }
}

/// The key from the path of a request, which is decoded the same way as in `web::Path` and axum.
fn rendered(template: &PathTemplate, request: &ServiceRequest) -> Result<Key, LockError> {
    let mut values = Vec::new();
    for (name, value) in request.match_info().iter() {
        let value = percent_decode_str(value).decode_utf8().map_err(|_| {
            let cause = format!("the path parameter `{name}` is not valid UTF-8");
            LockError::new(ErrorKind::InvalidKey, cause)
        })?;
        values.push((name, value));
    }
    template.render(&values)
}

/// Runs `server` until SIGTERM or SIGINT, stops it first and the lock pools afterwards, as [`serve`](crate::serve) does.
/// The server is built with `disable_signals()`, and its `shutdown_timeout` is `grace` or longer.
///
/// ```no_run
/// use std::time::Duration;
///
/// use actix_web::{App, HttpServer};
///
/// #[actix_web::main]
/// async fn main() -> Result<(), Box<dyn std::error::Error>> {
///     lock_runtime::init("redis://127.0.0.1:6379").await?;
///     let server = HttpServer::new(App::new).bind(("0.0.0.0", 8080))?.disable_signals().run();
///     let served = lock_runtime::web::serve_actix(Duration::from_secs(10), server).await?;
///     println!("{:?}", served.locks);
///     served.output.transpose()?; // an error of the server
///     Ok(())
/// }
/// ```
///
/// Dropping the future leaves the pools open, as with [`serve`](crate::serve).
///
/// # Errors
/// Same as [`serve`](crate::serve).
pub async fn serve_actix(
    grace: Duration,
    server: Server,
) -> Result<Served<io::Result<()>>, LockError> {
    let handle = server.handle();
    serve(grace, move |stopped| async move {
        let mut server = pin!(server);
        let stopping = async {
            stopped.await;
            handle.stop(true).await;
        };
        tokio::select! {
            output = &mut server => output,
            () = stopping => server.await,
        }
    })
    .await
}
