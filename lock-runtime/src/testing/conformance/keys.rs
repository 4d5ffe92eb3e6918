//! Keys that a store may take for one.

use super::*;

impl<B: Backend> Suite<B> {
    pub(super) async fn unusual_keys_are_distinct(&self) {
        let long = "x".repeat(511);
        let (long, other_end) = (format!("{long}1"), format!("{long}2"));
        let odd = [
            "a b",
            "a b ",
            "a:b",
            "{a}b",
            "a{",
            "}",
            "ünï→☃",
            "u\u{308}nï→☃",
            "uni→☃",
            "a\r\nb",
            "a\0b",
            "a\0c",
            "*",
            "A",
            "a",
            &long,
            &other_end,
        ];
        let claims: Vec<_> = odd.iter().map(|key| claim([*key], LONG)).collect();
        for claim in &claims {
            let answer = attempt(&self.one, claim).await;
            let is_granted = matches!(answer, AcquireOutcome::Acquired { .. });
            assert!(
                is_granted,
                "{} is not told apart from a key before it",
                quoted(&claim.keys[0])
            );
        }
        for claim in &claims {
            assert_eq!(
                release(&self.other, claim).await,
                ReleaseOutcome::Freed,
                "{} is not told apart from a key that was released",
                quoted(&claim.keys[0])
            );
        }
    }
}

/// The key, without the middle of a long one.
fn quoted(key: &Key) -> String {
    match key.as_str() {
        long if long.len() > 100 => {
            format!("a key of {} bytes that ends in {:?}", long.len(), &long[long.len() - 4..])
        }
        text => format!("the key {text:?}"),
    }
}
