//! Structs that are serialized field by field.

/// Implements `Serialize` for `$type`: each name with its value, which may use `$it`, the struct.
macro_rules! serialized_fields {
    ($type:ident, $it:ident => { $($name:ident: $value:expr,)+ }) => {
        impl serde::Serialize for $type {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                use serde::ser::SerializeStruct;
                let ($it, names) = (self, [$(stringify!($name)),+]);
                let mut fields = serializer.serialize_struct(stringify!($type), names.len())?;
                $(fields.serialize_field(stringify!($name), &$value)?;)+
                fields.end()
            }
        }
    };
}

pub(crate) use serialized_fields;
