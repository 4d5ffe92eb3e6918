//! Hostile input for tests.

/// Pseudo-random strings over `alphabet` and all of Unicode, the same in each run.
pub(crate) fn hostile(alphabet: &[u8]) -> impl Iterator<Item = String> {
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let mut random = move |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        usize::try_from(state >> 33).unwrap_or(0) % below
    };
    let alphabet: Vec<char> = String::from_utf8_lossy(alphabet).chars().collect();
    (0..40_000).map(move |_| {
        let length = random(24);
        (0..length)
            .map(|_| match random(12) {
                0 => u32::try_from(random(0x11_0000)).ok().and_then(char::from_u32).unwrap_or('<'),
                _ => alphabet[random(alphabet.len())],
            })
            .collect()
    })
}
