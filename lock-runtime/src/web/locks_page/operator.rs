//! Requests to the page, and which of them may release locks.

use std::fmt::{self, Debug, Formatter};
use std::sync::Arc;

/// A request to a [`LocksPage`](crate::web::LocksPage), for the function that decides whether it may release locks.
#[derive(Clone, Copy)]
pub struct PageRequest<'a>(Source<'a>);

#[derive(Clone, Copy)]
enum Source<'a> {
    #[cfg(feature = "axum")]
    Axum(&'a http::request::Parts),
    #[cfg(feature = "actix")]
    Actix(&'a actix_web::HttpRequest),
}

impl<'a> PageRequest<'a> {
    #[cfg(feature = "axum")]
    pub(super) const fn axum(parts: &'a http::request::Parts) -> Self {
        Self(Source::Axum(parts))
    }

    #[cfg(feature = "actix")]
    pub(super) const fn actix(request: &'a actix_web::HttpRequest) -> Self {
        Self(Source::Actix(request))
    }

    /// The first header of this name, if its value is text.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&'a str> {
        match self.0 {
            #[cfg(feature = "axum")]
            Source::Axum(parts) => parts.headers.get(name)?.to_str().ok(),
            #[cfg(feature = "actix")]
            Source::Actix(request) => request.headers().get(name)?.to_str().ok(),
        }
    }

    /// A value that a middleware in front of the page has added to the request, such as the user that is logged in.
    #[must_use]
    pub fn extension<T: Clone + Send + Sync + 'static>(&self) -> Option<T> {
        match self.0 {
            #[cfg(feature = "axum")]
            Source::Axum(parts) => parts.extensions.get::<T>().cloned(),
            #[cfg(feature = "actix")]
            Source::Actix(request) => {
                actix_web::HttpMessage::extensions(request).get::<T>().cloned()
            }
        }
    }

    /// `false` if a browser sends it for a page of another site.
    pub(super) fn is_of_this_site(&self) -> bool {
        if let Some(site) = self.header("sec-fetch-site") {
            return site == "same-origin";
        }
        // Without TLS a browser sends only the origin, as the page's referrer policy allows. Other clients send neither.
        let Some(origin) = self.header("origin") else { return true };
        let host = origin.split_once("://").map(|(_, host)| host);
        host.is_some() && host == self.host()
    }

    /// HTTP/2 has it in the URI.
    fn host(&self) -> Option<&'a str> {
        let authority = match self.0 {
            #[cfg(feature = "axum")]
            Source::Axum(parts) => parts.uri.authority().map(http::uri::Authority::as_str),
            #[cfg(feature = "actix")]
            Source::Actix(request) => {
                request.uri().authority().map(actix_web::http::uri::Authority::as_str)
            }
        };
        self.header("host").or(authority)
    }
}

/// Without headers: they may have secrets.
impl Debug for PageRequest<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.debug_struct("PageRequest").finish_non_exhaustive()
    }
}

/// Returns the name of the operator that sends a request; `None` if it may not release locks.
pub(super) type Authorize = dyn Fn(&PageRequest<'_>) -> Option<String> + Send + Sync;

/// The function of the application.
#[derive(Clone)]
pub(super) struct Authorization(pub(super) Arc<Authorize>);

impl Debug for Authorization {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.debug_struct("Authorization").finish_non_exhaustive()
    }
}

#[cfg(all(test, feature = "axum"))]
mod tests {
    use super::*;

    #[test]
    fn a_form_of_another_site_is_told_from_one_of_the_page() {
        let is_of_this_site = |headers: &[(&str, &str)]| {
            let mut request = http::Request::post("/locks").header("host", "ops.example:8080");
            for (name, value) in headers {
                request = request.header(*name, *value);
            }
            PageRequest::axum(&request.body(()).unwrap().into_parts().0).is_of_this_site()
        };
        assert!(is_of_this_site(&[]), "no browser");
        assert!(is_of_this_site(&[("sec-fetch-site", "same-origin")]));
        assert!(is_of_this_site(&[("origin", "http://ops.example:8080")]));
        for other in ["cross-site", "same-site", "none"] {
            let headers = [("sec-fetch-site", other), ("origin", "http://ops.example:8080")];
            assert!(!is_of_this_site(&headers), "{other}");
        }
        for other in ["http://ops.example", "http://evil.example:8080", "null"] {
            assert!(!is_of_this_site(&[("origin", other)]), "{other}");
        }
    }
}
