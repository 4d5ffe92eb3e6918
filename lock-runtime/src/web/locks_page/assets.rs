//! The files that the page refers to.

/// A file that the page refers to.
pub(super) struct Asset {
    pub(super) name: &'static str,
    pub(super) media_type: &'static str,
    pub(super) text: &'static str,
}

pub(super) const STYLE: Asset = Asset {
    name: "style.css",
    media_type: "text/css; charset=utf-8",
    text: include_str!("style.css"),
};

pub(super) const SCRIPT: Asset = Asset {
    name: "live.js",
    media_type: "text/javascript; charset=utf-8",
    text: include_str!("live.js"),
};
