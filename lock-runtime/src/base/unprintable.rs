//! Characters that text from elsewhere must not bring to a terminal or a page. `lockctl` includes this file too, so it
//! imports nothing of the library.

/// Whether `it` controls a terminal, is invisible, or changes the order of other characters.
pub(crate) fn is_unprintable(it: char) -> bool {
    let is_invisible = matches!(
        it,
        // Marks, embeddings, overrides and isolates of bidirectional text, and ends of lines.
        '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}'
            | '\u{e0000}'..='\u{e007f}'
    );
    it.is_control() || is_invisible
}
