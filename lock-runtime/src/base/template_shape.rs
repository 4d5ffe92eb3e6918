//! Templates without the names of their placeholders.

use std::hash::{Hash, Hasher};

/// A key template as far as it determines the keys: `order:<id>` and `order:<order.id>` are equal, because they give the same
/// keys.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TemplateShape(&'static str);

impl TemplateShape {
    /// The templates of a call for several keys, which its text separates by commas.
    pub(crate) fn all_in(templates: &'static str) -> Vec<Self> {
        let (mut shapes, mut start, mut depth) = (Vec::new(), 0, 0_u32);
        for (at, c) in templates.char_indices() {
            match c {
                '<' => depth += 1,
                '>' => depth = depth.saturating_sub(1),
                ',' if depth == 0 && templates[at..].starts_with(", ") => {
                    shapes.push(Self(&templates[start..at]));
                    start = at + 2;
                }
                _ => {}
            }
        }
        shapes.push(Self(&templates[start..]));
        let mut distinct = Vec::with_capacity(shapes.len());
        for shape in shapes {
            if !distinct.contains(&shape) {
                distinct.push(shape);
            }
        }
        distinct
    }

    /// The texts between the placeholders. `<<` is no placeholder.
    fn texts(self) -> impl Iterator<Item = &'static str> {
        let mut rest = Some(self.0);
        std::iter::from_fn(move || {
            let text = rest?;
            let mut from = 0;
            while let Some(open) = text[from..].find('<').map(|at| from + at) {
                if text[open + 1..].starts_with('<') {
                    from = open + 2;
                    continue;
                }
                let Some(close) = text[open..].find('>').map(|at| open + at) else { break };
                rest = Some(&text[close + 1..]);
                return Some(&text[..open]);
            }
            rest = None;
            Some(text)
        })
    }
}

impl PartialEq for TemplateShape {
    fn eq(&self, other: &Self) -> bool {
        self.texts().eq(other.texts())
    }
}

impl Eq for TemplateShape {}

impl Hash for TemplateShape {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.texts().for_each(|text| text.hash(state));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_names_of_placeholders_do_not_count() {
        let one = TemplateShape("order:<id>:<line.nr()>");
        assert_eq!(one, TemplateShape("order:<order.id>:<0>"));
        for other in ["order:<id>", "order:<id>:", "orders:<id>:<nr>", "order:<id>:<nr>:x"] {
            assert_ne!(one, TemplateShape(other), "{other}");
        }
        assert_eq!(one.texts().collect::<Vec<_>>(), ["order:", ":", ""]);
    }

    #[test]
    fn literal_brackets_are_text() {
        let texts: Vec<_> = TemplateShape("a<<b>>:<id>").texts().collect();
        assert_eq!(texts, ["a<<b>>:", ""]);
        assert_ne!(TemplateShape("a<<b>>"), TemplateShape("a<<c>>"));
        // The template of a request is any text.
        assert_eq!(TemplateShape("a<b").texts().collect::<Vec<_>>(), ["a<b"]);
    }

    #[test]
    fn several_templates_are_separate_and_distinct() {
        let shapes = TemplateShape::all_in("acct:<from>, acct:<to>, log");
        assert_eq!(shapes, [TemplateShape("acct:<id>"), TemplateShape("log")]);
        assert_eq!(TemplateShape::all_in("a,b").len(), 1);
    }
}
