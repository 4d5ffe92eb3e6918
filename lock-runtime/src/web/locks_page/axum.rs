//! The page as an axum router.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::Router;
use axum::body::Body;
use axum::extract::{OriginalUri, Request, State};
use axum::response::Response;
use axum::routing::get;
use bytes::Bytes;
use http::header::{CONTENT_TYPE, HeaderName};
use http::{HeaderValue, StatusCode};
use http_body::Frame;

use crate::web::locks_page::assets::{Asset, SCRIPT, STYLE};
use crate::web::locks_page::events::PageEvents;
use crate::web::locks_page::operator::PageRequest;
use crate::web::locks_page::{
    EVENT_STREAM, EVENTS, HEADERS, HTML, LONGEST_FORM, LocksPage, REFUSED, TEXT,
};

impl LocksPage {
    /// The page as a router. [`nest`](Router::nest) mounts it at a path of its own, without a slash at its end, and
    /// [`merge`](Router::merge) at the root.
    pub fn into_router<S: Clone + Send + Sync + 'static>(self) -> Router<S> {
        let asset =
            |asset: &'static Asset| get(move || async { response(asset.media_type, asset.text) });
        let mut pages = get(page);
        if self.authorization.is_some() {
            pages = pages.post(release);
        }
        Router::new()
            .route("/", pages)
            .route(&path(STYLE.name), asset(&STYLE))
            .route(&path(SCRIPT.name), asset(&SCRIPT))
            .route(&path(EVENTS), get(events))
            .with_state(self)
    }
}

fn path(name: &str) -> String {
    format!("/{name}")
}

async fn page(
    State(page): State<LocksPage>,
    OriginalUri(uri): OriginalUri,
    request: Request,
) -> Response {
    let may_release = page.operator(PageRequest::axum(&request.into_parts().0)).is_some();
    response(HTML, page.html(uri.path(), uri.query(), may_release).await)
}

async fn release(
    State(page): State<LocksPage>,
    OriginalUri(uri): OriginalUri,
    request: Request,
) -> Response {
    let (parts, body) = request.into_parts();
    let Some(operator) = page.sender(PageRequest::axum(&parts)) else {
        return with_status(StatusCode::FORBIDDEN, response(TEXT, REFUSED));
    };
    let Ok(form) = axum::body::to_bytes(body, LONGEST_FORM).await else {
        return with_status(
            StatusCode::PAYLOAD_TOO_LARGE,
            response(TEXT, "The form is too long.\n"),
        );
    };
    let form = String::from_utf8_lossy(&form);
    response(HTML, page.release(uri.path(), uri.query(), &form, &operator).await)
}

fn with_status(status: StatusCode, mut response: Response) -> Response {
    *response.status_mut() = status;
    response
}

async fn events(State(page): State<LocksPage>) -> Response {
    response(EVENT_STREAM, Body::new(EventBody(PageEvents::new(page))))
}

fn response(media_type: &'static str, body: impl Into<Body>) -> Response {
    let mut response = Response::new(body.into());
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(media_type));
    for (name, value) in HEADERS {
        headers.insert(HeaderName::from_static(name), HeaderValue::from_static(value));
    }
    response
}

struct EventBody(PageEvents);

impl http_body::Body for EventBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.0.poll_next(cx).map(|chunk| chunk.map(|chunk| Ok(Frame::data(chunk))))
    }
}
