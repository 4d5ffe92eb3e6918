//! `axum`: an error as a response.

use axum::body::Body;
use axum::response::{IntoResponse, Response};

use crate::attribute::return_type::FromLockError;
use crate::base::error::LockError;

/// The [`Problem`](crate::Problem) of the error.
impl IntoResponse for LockError {
    fn into_response(self) -> Response {
        Response::<Body>::from_lock_error(self)
    }
}

/// For handlers that return `Result<_, Response>`, and for `?` in them.
impl From<LockError> for Response {
    fn from(error: LockError) -> Self {
        error.into_response()
    }
}
