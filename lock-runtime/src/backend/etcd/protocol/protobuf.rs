//! The wire format of Protocol Buffers.

/// The bytes are not a message of the expected form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MalformedMessage;

/// A message that is being written. Fields with default values are left out, as other writers do.
#[derive(Clone, Debug, Default)]
pub(crate) struct MessageWriter(Vec<u8>);

/// The wire types.
const VARINT: u64 = 0;
const FIXED_64: u64 = 1;
const BYTES: u64 = 2;
const FIXED_32: u64 = 5;

impl MessageWriter {
    pub(crate) fn into_bytes(self) -> Vec<u8> {
        self.0
    }

    pub(crate) fn int(&mut self, field: u64, value: i64) {
        if value != 0 {
            self.present_int(field, value);
        }
    }

    /// Even if it is zero: which field of a choice is present matters.
    pub(crate) fn present_int(&mut self, field: u64, value: i64) {
        self.varint(field << 3 | VARINT);
        self.varint(value.cast_unsigned());
    }

    pub(crate) fn bytes(&mut self, field: u64, value: &[u8]) {
        if !value.is_empty() {
            self.present_bytes(field, value);
        }
    }

    pub(crate) fn present_bytes(&mut self, field: u64, value: &[u8]) {
        self.varint(field << 3 | BYTES);
        self.varint(value.len() as u64);
        self.0.extend_from_slice(value);
    }

    /// A message within this one, even if it is empty.
    pub(crate) fn message(&mut self, field: u64, write: impl FnOnce(&mut Self)) {
        let mut inner = Self::default();
        write(&mut inner);
        self.present_bytes(field, &inner.0);
    }

    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }
}

/// A field of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FieldValue<'a> {
    Int(u64),
    Bytes(&'a [u8]),
}

impl<'a> FieldValue<'a> {
    pub(crate) const fn int(self) -> Result<i64, MalformedMessage> {
        match self {
            Self::Int(value) => Ok(value.cast_signed()),
            Self::Bytes(_) => Err(MalformedMessage),
        }
    }

    pub(crate) fn unsigned(self) -> Result<u64, MalformedMessage> {
        self.int().map(i64::cast_unsigned)
    }

    pub(crate) fn flag(self) -> Result<bool, MalformedMessage> {
        self.int().map(|value| value != 0)
    }

    pub(crate) const fn bytes(self) -> Result<&'a [u8], MalformedMessage> {
        match self {
            Self::Bytes(bytes) => Ok(bytes),
            Self::Int(_) => Err(MalformedMessage),
        }
    }

    pub(crate) fn text(self) -> Result<String, MalformedMessage> {
        self.bytes().map(|bytes| String::from_utf8_lossy(bytes).into_owned())
    }
}

/// Calls `take` with the number and value of each field of `message`. Fields of fixed size are skipped: none is used.
pub(crate) fn each_field<'a>(
    message: &'a [u8],
    mut take: impl FnMut(u64, FieldValue<'a>) -> Result<(), MalformedMessage>,
) -> Result<(), MalformedMessage> {
    let mut rest = message;
    while !rest.is_empty() {
        let tag = varint(&mut rest)?;
        match tag & 7 {
            VARINT => take(tag >> 3, FieldValue::Int(varint(&mut rest)?))?,
            BYTES => {
                let length = usize::try_from(varint(&mut rest)?).map_err(|_| MalformedMessage)?;
                take(tag >> 3, FieldValue::Bytes(taken(&mut rest, length)?))?;
            }
            FIXED_64 => drop(taken(&mut rest, 8)?),
            FIXED_32 => drop(taken(&mut rest, 4)?),
            _ => return Err(MalformedMessage),
        }
    }
    Ok(())
}

fn taken<'a>(rest: &mut &'a [u8], length: usize) -> Result<&'a [u8], MalformedMessage> {
    let (bytes, behind) = rest.split_at_checked(length).ok_or(MalformedMessage)?;
    *rest = behind;
    Ok(bytes)
}

fn varint(rest: &mut &[u8]) -> Result<u64, MalformedMessage> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let (byte, behind) = rest.split_first().ok_or(MalformedMessage)?;
        *rest = behind;
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Ok(value);
        }
    }
    Err(MalformedMessage)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(message: &[u8]) -> Result<Vec<(u64, FieldValue<'_>)>, MalformedMessage> {
        let mut fields = Vec::new();
        each_field(message, |number, value| {
            fields.push((number, value));
            Ok(())
        })?;
        Ok(fields)
    }

    #[test]
    fn what_is_written_is_read() {
        let mut writer = MessageWriter::default();
        writer.int(1, -1);
        writer.int(2, 0);
        writer.present_int(3, 0);
        writer.int(4, 300);
        writer.bytes(5, b"");
        writer.message(64, |inner| inner.bytes(1, b"ab"));
        writer.int(7, 1);
        let bytes = writer.into_bytes();
        let expected = [
            (1, FieldValue::Int(u64::MAX)),
            (3, FieldValue::Int(0)),
            (4, FieldValue::Int(300)),
            (64, FieldValue::Bytes(&[0x0a, 2, b'a', b'b'])),
            (7, FieldValue::Int(1)),
        ];
        assert_eq!(fields(&bytes).unwrap(), expected);
        assert_eq!(expected[0].1.int(), Ok(-1));
    }

    #[test]
    fn fields_of_fixed_size_are_skipped_and_other_bytes_refused() {
        let fixed = [0x09, 1, 2, 3, 4, 5, 6, 7, 8, 0x15, 1, 2, 3, 4, 0x18, 5];
        assert_eq!(fields(&fixed).unwrap(), [(3, FieldValue::Int(5))]);
        for malformed in [&[0x0a, 2, 1][..], &[0x08], &[0x08, 0x80], &[0x0b], &[0xff; 11]] {
            assert_eq!(fields(malformed), Err(MalformedMessage), "{malformed:?}");
        }
    }
}
