//! Records as bytes: the encoding named jute.

/// The bytes of a server do not have the form of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MalformedRecord;

/// A frame that is being written. [`finish`](Self::finish) fills in its length.
pub(crate) struct JuteWriter(Vec<u8>);

impl JuteWriter {
    pub(crate) fn new() -> Self {
        Self(vec![0; 4])
    }

    pub(crate) fn int(&mut self, value: i32) -> &mut Self {
        self.0.extend_from_slice(&value.to_be_bytes());
        self
    }

    pub(crate) fn long(&mut self, value: i64) -> &mut Self {
        self.0.extend_from_slice(&value.to_be_bytes());
        self
    }

    pub(crate) fn boolean(&mut self, value: bool) -> &mut Self {
        self.0.push(u8::from(value));
        self
    }

    pub(crate) fn buffer(&mut self, bytes: &[u8]) -> &mut Self {
        self.int(i32::try_from(bytes.len()).unwrap_or(i32::MAX));
        self.0.extend_from_slice(bytes);
        self
    }

    pub(crate) fn text(&mut self, text: &str) -> &mut Self {
        self.buffer(text.as_bytes())
    }

    pub(crate) fn finish(mut self) -> Vec<u8> {
        let length = u32::try_from(self.0.len() - 4).unwrap_or(u32::MAX);
        self.0[..4].copy_from_slice(&length.to_be_bytes());
        self.0
    }
}

/// The rest of a frame.
#[derive(Clone, Copy, Debug)]
pub(crate) struct JuteReader<'a>(&'a [u8]);

impl<'a> JuteReader<'a> {
    pub(crate) const fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    #[cfg(test)]
    const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn take(&mut self, count: usize) -> Result<&'a [u8], MalformedRecord> {
        let (taken, rest) = self.0.split_at_checked(count).ok_or(MalformedRecord)?;
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], MalformedRecord> {
        self.take(N)?.try_into().map_err(|_| MalformedRecord)
    }

    pub(crate) fn int(&mut self) -> Result<i32, MalformedRecord> {
        Ok(i32::from_be_bytes(self.array()?))
    }

    pub(crate) fn long(&mut self) -> Result<i64, MalformedRecord> {
        Ok(i64::from_be_bytes(self.array()?))
    }

    pub(crate) fn boolean(&mut self) -> Result<bool, MalformedRecord> {
        Ok(self.take(1)? != [0])
    }

    /// Empty for a buffer that is absent.
    pub(crate) fn buffer(&mut self) -> Result<&'a [u8], MalformedRecord> {
        match self.int()? {
            -1 => Ok(&[]),
            length => self.take(usize::try_from(length).map_err(|_| MalformedRecord)?),
        }
    }

    pub(crate) fn text(&mut self) -> Result<&'a str, MalformedRecord> {
        std::str::from_utf8(self.buffer()?).map_err(|_| MalformedRecord)
    }

    /// The elements of a list, each read by `element`.
    pub(crate) fn list<T>(
        &mut self,
        mut element: impl FnMut(&mut Self) -> Result<T, MalformedRecord>,
    ) -> Result<Vec<T>, MalformedRecord> {
        let count = self.int()?.max(0);
        let mut elements = Vec::new();
        for _ in 0..count {
            elements.push(element(self)?);
        }
        Ok(elements)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let mut writer = JuteWriter::new();
        writer.int(-7).long(i64::MIN).boolean(true).text("/a/ü").buffer(&[1, 2]);
        let bytes = writer.finish();
        assert_eq!(bytes.len() - 4, usize::from(bytes[3]));
        let mut reader = JuteReader::new(&bytes[4..]);
        assert_eq!(reader.int(), Ok(-7));
        assert_eq!(reader.long(), Ok(i64::MIN));
        assert_eq!(reader.boolean(), Ok(true));
        assert_eq!(reader.text(), Ok("/a/ü"));
        assert_eq!(reader.buffer(), Ok(&[1, 2][..]));
        assert!(reader.is_empty());
        assert_eq!(reader.int(), Err(MalformedRecord));
    }

    #[test]
    fn a_length_beyond_the_frame_is_malformed() {
        let long = [0x7f, 0xff, 0xff, 0xff, 1];
        assert_eq!(JuteReader::new(&long).buffer(), Err(MalformedRecord));
        assert_eq!(JuteReader::new(&long).list(JuteReader::long), Err(MalformedRecord));
        assert_eq!(JuteReader::new(&[0xff; 4]).buffer(), Ok(&[][..]));
        assert_eq!(JuteReader::new(&[0xff, 0xff, 0xff, 0xfe]).buffer(), Err(MalformedRecord));
    }
}
