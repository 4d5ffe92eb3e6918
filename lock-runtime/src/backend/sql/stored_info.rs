//! The column `info` of a lease: a text about its owner.

use std::io::Write;

use crate::backend::{Owner, OwnerInfo, OwnerTag};
use crate::base::owner_info::OwnerLabel;

/// The value for a grant: the tag of the owner, a space, and the text. Empty if there is no text.
pub(crate) fn stored_info(owner: &Owner, label: &OwnerLabel) -> Vec<u8> {
    let mut value = Vec::new();
    if label.is_some() {
        // A write to memory does not fail.
        let _ = write!(value, "{} {label}", owner.tag());
    }
    value
}

/// What the value says about this owner. A process of an older version, and a hand-off, leave the value of the former owner.
pub(crate) fn info_of(owner: OwnerTag, value: &[u8]) -> Option<OwnerInfo> {
    let text = value.strip_prefix(owner.to_string().as_bytes())?.strip_prefix(b" ")?;
    OwnerInfo::parse(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_about_its_owner_alone() {
        let [owner, other] = [Owner::random().unwrap(), Owner::random().unwrap()];
        let label = OwnerLabel::of_process(None);
        let value = stored_info(&owner, &label);
        assert_eq!(info_of(owner.tag(), &value), label.info());
        assert!(label.info().is_some());
        assert_eq!(info_of(other.tag(), &value), None);
        assert_eq!(stored_info(&owner, &OwnerLabel::EMPTY), b"");
        assert_eq!(info_of(owner.tag(), b""), None);
    }
}
