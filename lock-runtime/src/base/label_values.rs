//! Enums whose variants are the values of a metric's label.

/// Defines such an enum, each variant with its word. `ALL` has the variants in the order of their numbers, so an array with an entry
/// for each is indexed by `as usize`.
macro_rules! label_values {
    ($(#[$attr:meta])* $name:ident { $($(#[$variant_attr:meta])* $variant:ident = $word:literal,)+ }) => {
        $(#[$attr])*
        pub(crate) enum $name {
            $($(#[$variant_attr])* $variant,)+
        }

        impl $name {
            #[cfg(feature = "metrics")]
            pub(crate) const ALL: [Self; [$(Self::$variant),+].len()] = [$(Self::$variant),+];

            #[cfg_attr(not(feature = "metrics"), allow(dead_code))]
            pub(crate) const fn as_str(self) -> &'static str {
                match self {
                    $(Self::$variant => $word,)+
                }
            }
        }
    };
}

pub(crate) use label_values;
