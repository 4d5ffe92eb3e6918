//! Two instances of the web example settle every order once.
