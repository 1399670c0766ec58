//! Replies and messages, and how they are written.

use std::{borrow::Cow, fmt::Write as _};

use super::number::double;

/// A one-line text: a status, or an error that begins with its code. It need not be UTF-8.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Text(pub(crate) Cow<'static, [u8]>);

impl Text {
    /// Creates a text from the bytes before the first NUL, as C would.
    pub(crate) fn until_nul(bytes: &[u8]) -> Self {
        Self(
            bytes
                .split(|byte| *byte == 0)
                .next()
                .unwrap_or_default()
                .to_vec()
                .into(),
        )
    }

    /// Returns the first word.
    pub(crate) fn code(&self) -> Cow<'_, str> {
        String::from_utf8_lossy(
            self.0
                .split(|byte| *byte == b' ')
                .next()
                .unwrap_or_default(),
        )
    }

    fn one_line(&self) -> Vec<u8> {
        self.0
            .iter()
            .map(|byte| if b"\r\n".contains(byte) { b' ' } else { *byte })
            .collect()
    }

    fn without_line_end(&self) -> Self {
        let end = self
            .0
            .iter()
            .rposition(|byte| !b"\r\n".contains(byte))
            .map_or(0, |last| last + 1);
        Self(self.0[..end].to_vec().into())
    }
}

impl From<&'static str> for Text {
    fn from(text: &'static str) -> Self {
        Self(text.as_bytes().into())
    }
}

impl From<String> for Text {
    fn from(text: String) -> Self {
        Self(text.into_bytes().into())
    }
}

/// A reply to a command, or a message.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Reply {
    Status(Text),
    Error(Text),
    Int(i64),
    Bulk(Vec<u8>),
    /// No value.
    Nil,
    /// No list. The same as [`Reply::Nil`] in RESP3.
    NilList,
    List(Vec<Reply>),
    Map(Vec<(Reply, Reply)>),
    Set(Vec<Reply>),
    Double(f64),
    Bool(bool),
    BigNumber(Vec<u8>),
    Verbatim(Vec<u8>),
    /// An out-of-band message, such as a published one. A list in RESP2.
    Push(Vec<Reply>),
    /// No reply: it has been written already, or follows later.
    Nothing,
}

/// A reply, or the text of an error.
pub(crate) type Outcome = Result<Reply, Text>;

/// The protocol versions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Protocol {
    Resp2,
    Resp3,
}

impl Reply {
    pub(crate) const OK: Self = Self::Status(Text(Cow::Borrowed(b"OK")));

    pub(crate) fn bulk(bytes: impl Into<Vec<u8>>) -> Self {
        Self::Bulk(bytes.into())
    }

    pub(crate) fn len(count: usize) -> Self {
        Self::Int(i64::try_from(count).unwrap_or(i64::MAX))
    }

    pub(crate) fn list(items: impl IntoIterator<Item = Self>) -> Self {
        Self::List(items.into_iter().collect())
    }

    pub(crate) fn write(&self, protocol: Protocol, out: &mut Vec<u8>) {
        let three = protocol == Protocol::Resp3;
        match self {
            Self::Status(text) => line(out, b'+', &text.one_line()),
            Self::Error(text) => line(out, b'-', &text.without_line_end().one_line()),
            Self::Int(number) => head(out, b':', *number),
            Self::Bulk(bytes) => bulk(out, b'$', bytes),
            Self::Nil | Self::NilList if three => out.extend_from_slice(b"_\r\n"),
            Self::Nil => out.extend_from_slice(b"$-1\r\n"),
            Self::NilList => out.extend_from_slice(b"*-1\r\n"),
            Self::List(items) => list(out, b'*', items, protocol),
            Self::Set(items) => list(out, if three { b'~' } else { b'*' }, items, protocol),
            Self::Push(items) => list(out, if three { b'>' } else { b'*' }, items, protocol),
            Self::Map(pairs) => {
                let len = if three { pairs.len() } else { pairs.len() * 2 };
                head(
                    out,
                    if three { b'%' } else { b'*' },
                    i64::try_from(len).unwrap_or(i64::MAX),
                );
                for (key, value) in pairs {
                    key.write(protocol, out);
                    value.write(protocol, out);
                }
            }
            Self::Double(number) if three => line(out, b',', double(*number).as_bytes()),
            Self::Double(number) => bulk(out, b'$', double(*number).as_bytes()),
            Self::Bool(yes) if three => {
                out.extend_from_slice(if *yes { b"#t\r\n" } else { b"#f\r\n" });
            }
            Self::Bool(yes) => head(out, b':', i64::from(*yes)),
            Self::BigNumber(digits) if three => line(out, b'(', digits),
            Self::BigNumber(digits) => bulk(out, b'$', digits),
            Self::Verbatim(text) if three => bulk(out, b'=', &[b"txt:", text.as_slice()].concat()),
            Self::Verbatim(text) => bulk(out, b'$', text),
            Self::Nothing => {}
        }
    }
}

fn head(out: &mut Vec<u8>, sign: u8, number: i64) {
    let mut text = String::new();
    let _ = write!(text, "{number}");
    line(out, sign, text.as_bytes());
}

fn line(out: &mut Vec<u8>, sign: u8, text: &[u8]) {
    out.push(sign);
    out.extend_from_slice(text);
    out.extend_from_slice(b"\r\n");
}

fn bulk(out: &mut Vec<u8>, sign: u8, bytes: &[u8]) {
    head(out, sign, i64::try_from(bytes.len()).unwrap_or(i64::MAX));
    out.extend_from_slice(bytes);
    out.extend_from_slice(b"\r\n");
}

fn list(out: &mut Vec<u8>, sign: u8, items: &[Reply], protocol: Protocol) {
    head(out, sign, i64::try_from(items.len()).unwrap_or(i64::MAX));
    for item in items {
        item.write(protocol, out);
    }
}
