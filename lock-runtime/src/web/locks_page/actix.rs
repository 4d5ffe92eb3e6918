//! The page as an actix-web scope.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use actix_web::body::{BodySize, MessageBody};
use actix_web::http::StatusCode;
use actix_web::http::header::CONTENT_TYPE;
use actix_web::web::{Bytes, Data, PayloadConfig, get, post};
use actix_web::{HttpRequest, HttpResponse, HttpResponseBuilder, Scope, web};

use crate::web::locks_page::assets::{Asset, SCRIPT, STYLE};
use crate::web::locks_page::events::PageEvents;
use crate::web::locks_page::operator::PageRequest;
use crate::web::locks_page::{
    EVENT_STREAM, EVENTS, HEADERS, HTML, LONGEST_FORM, LocksPage, REFUSED, TEXT,
};

impl LocksPage {
    /// The page as a scope at `path`, such as `"/locks"`.
    pub fn into_scope(self, path: &str) -> Scope {
        let asset = |asset: &'static Asset| {
            get().to(move || async { response(asset.media_type).body(asset.text) })
        };
        let allows_release = self.authorization.is_some();
        // Its files follow after a slash of their own.
        let mut scope = web::scope(path.trim_end_matches('/'))
            .app_data(Data::new(self))
            // In place of the limits and media types of the application.
            .app_data(PayloadConfig::new(LONGEST_FORM));
        if allows_release {
            scope = scope.route("", post().to(release)).route("/", post().to(release));
        }
        scope
            .route("", get().to(page))
            .route("/", get().to(page))
            .route(STYLE.name, asset(&STYLE))
            .route(SCRIPT.name, asset(&SCRIPT))
            .route(EVENTS, get().to(events))
    }
}

async fn page(page: Data<LocksPage>, request: HttpRequest) -> HttpResponse {
    let may_release = page.operator(PageRequest::actix(&request)).is_some();
    response(HTML).body(page.html(request.path(), request.uri().query(), may_release).await)
}

async fn release(page: Data<LocksPage>, request: HttpRequest, form: Bytes) -> HttpResponse {
    let Some(operator) = page.sender(PageRequest::actix(&request)) else {
        return response(TEXT).status(StatusCode::FORBIDDEN).body(REFUSED);
    };
    let (form, query) = (String::from_utf8_lossy(&form), request.uri().query());
    response(HTML).body(page.release(request.path(), query, &form, &operator).await)
}

async fn events(page: Data<LocksPage>) -> HttpResponse {
    let events = PageEvents::new(LocksPage::clone(&page));
    response(EVENT_STREAM).body(EventMessageBody(events))
}

fn response(media_type: &'static str) -> HttpResponseBuilder {
    let mut response = HttpResponse::Ok();
    response.insert_header((CONTENT_TYPE, media_type));
    for header in HEADERS {
        response.insert_header(header);
    }
    response
}

struct EventMessageBody(PageEvents);

impl MessageBody for EventMessageBody {
    type Error = Infallible;

    fn size(&self) -> BodySize {
        BodySize::Stream
    }

    fn poll_next(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Bytes, Infallible>>> {
        self.0.poll_next(cx).map(|chunk| chunk.map(Ok))
    }
}
