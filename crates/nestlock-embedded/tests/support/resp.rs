//! RESP2 and RESP3 as values, with the distinctions of the wire: a null bulk string is not a null list.

use std::fmt::{self, Write as _};

#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Value {
    /// `+`
    Simple(Vec<u8>),
    /// `-`
    Error(Vec<u8>),
    /// `:`
    Int(i64),
    /// `$`
    Bulk(Vec<u8>),
    /// `$-1`
    NilBulk,
    /// `*-1`
    NilList,
    /// `_`
    Null,
    /// `,`, as it was written
    Double(Vec<u8>),
    /// `#`
    Bool(bool),
    /// `(`
    Big(Vec<u8>),
    /// `=`
    Verbatim(Vec<u8>),
    /// `*`
    List(Vec<Value>),
    /// `%`, keys and values in turn
    Map(Vec<Value>),
    /// `~`
    Set(Vec<Value>),
    /// `>`
    Push(Vec<Value>),
}

impl Value {
    /// Reads one value from the front. `None` if it is incomplete.
    pub fn parse(input: &[u8]) -> Result<Option<(Self, usize)>, String> {
        let Some(end) = input.windows(2).position(|pair| pair == b"\r\n") else {
            return Ok(None);
        };
        let (line, mut at) = (&input[..end], end + 2);
        let Some((&sign, rest)) = line.split_first() else {
            return Err("an empty line".into());
        };
        let text = || rest.to_vec();
        let number = || -> Result<i64, String> {
            let text = std::str::from_utf8(rest).map_err(|_| format!("not a number: {line:?}"))?;
            text.parse()
                .map_err(|_| format!("not a number: {:?}", quoted(line)))
        };
        let value = match sign {
            b'+' => Self::Simple(text()),
            b'-' => Self::Error(text()),
            b':' => Self::Int(number()?),
            b',' => Self::Double(text()),
            b'(' => Self::Big(text()),
            b'_' if rest.is_empty() => Self::Null,
            b'#' if rest == b"t" || rest == b"f" => Self::Bool(rest == b"t"),
            b'$' | b'=' => match number()? {
                -1 if sign == b'$' => Self::NilBulk,
                length => {
                    let length =
                        usize::try_from(length).map_err(|_| format!("invalid length {length}"))?;
                    let Some(body) = input.get(at..at + length + 2) else {
                        return Ok(None);
                    };
                    if !body.ends_with(b"\r\n") {
                        return Err(format!("no line end after {:?}", quoted(body)));
                    }
                    at += length + 2;
                    let body = body[..length].to_vec();
                    if sign == b'$' {
                        Self::Bulk(body)
                    } else {
                        Self::Verbatim(body)
                    }
                }
            },
            b'*' | b'%' | b'~' | b'>' => match number()? {
                -1 if sign == b'*' => Self::NilList,
                length => {
                    let length =
                        usize::try_from(length).map_err(|_| format!("invalid length {length}"))?;
                    let count = if sign == b'%' { length * 2 } else { length };
                    let mut items = Vec::new();
                    for _ in 0..count {
                        let Some((item, used)) = Self::parse(&input[at..])? else {
                            return Ok(None);
                        };
                        items.push(item);
                        at += used;
                    }
                    match sign {
                        b'*' => Self::List(items),
                        b'%' => Self::Map(items),
                        b'~' => Self::Set(items),
                        _ => Self::Push(items),
                    }
                }
            },
            _ => return Err(format!("not RESP: {:?}", quoted(line))),
        };
        Ok(Some((value, at)))
    }

    pub fn items(&self) -> Option<&[Self]> {
        match self {
            Self::List(items) | Self::Map(items) | Self::Set(items) | Self::Push(items) => {
                Some(items)
            }
            _ => None,
        }
    }

    /// The bytes of a text of any kind.
    pub fn text(&self) -> Option<&[u8]> {
        match self {
            Self::Simple(text) | Self::Error(text) | Self::Bulk(text) | Self::Verbatim(text) => {
                Some(text)
            }
            _ => None,
        }
    }

    pub fn is_error(&self) -> bool {
        matches!(self, Self::Error(_))
    }

    /// The code of an error: its first word.
    pub fn code(&self) -> Option<&[u8]> {
        match self {
            Self::Error(text) => text.split(|byte| *byte == b' ').next(),
            _ => None,
        }
    }

    /// Readable RESP: one line for each value, list items indented by two spaces.
    pub fn lines(&self) -> Vec<String> {
        let of = |sign: char, text: &[u8]| vec![format!("{sign}{}", escaped(text))];
        let list = |sign: char, count: usize, items: &[Self]| {
            let inner = items
                .iter()
                .flat_map(Self::lines)
                .map(|line| format!("  {line}"));
            std::iter::once(format!("{sign}{count}"))
                .chain(inner)
                .collect()
        };
        match self {
            Self::Simple(text) => of('+', text),
            Self::Error(text) => of('-', text),
            Self::Int(number) => vec![format!(":{number}")],
            Self::Bulk(text) => vec![format!("${}", quoted(text))],
            Self::NilBulk => vec!["$nil".into()],
            Self::NilList => vec!["*nil".into()],
            Self::Null => vec!["_".into()],
            Self::Double(text) => of(',', text),
            Self::Bool(yes) => vec![format!("#{}", if *yes { 't' } else { 'f' })],
            Self::Big(text) => of('(', text),
            Self::Verbatim(text) => vec![format!("={}", quoted(text))],
            Self::List(items) => list('*', items.len(), items),
            Self::Map(items) => list('%', items.len() / 2, items),
            Self::Set(items) => list('~', items.len(), items),
            Self::Push(items) => list('>', items.len(), items),
        }
    }
}

impl fmt::Debug for Value {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lines: Vec<String> = self
            .lines()
            .iter()
            .map(|line| line.trim_start().to_owned())
            .collect();
        match lines.len() {
            1 => out.write_str(&lines[0]),
            _ => write!(out, "{} ({})", lines[0], lines[1..].join(" ")),
        }
    }
}

/// A request as sent over the wire.
pub fn request<P: AsRef<[u8]>>(parts: &[P]) -> Vec<u8> {
    let mut bytes = format!("*{}\r\n", parts.len()).into_bytes();
    for part in parts {
        let part = part.as_ref();
        bytes.extend(format!("${}\r\n", part.len()).as_bytes());
        bytes.extend(part);
        bytes.extend(b"\r\n");
    }
    bytes
}

/// Bytes in one line, escaped where they are not printable.
pub fn escaped(bytes: &[u8]) -> String {
    let mut text = String::new();
    for byte in bytes {
        match byte {
            b'\n' => text.push_str("\\n"),
            b'\r' => text.push_str("\\r"),
            b'"' => text.push_str("\\\""),
            b'\\' => text.push_str("\\\\"),
            0x20..=0x7e => text.push(char::from(*byte)),
            _ => _ = write!(text, "\\x{byte:02x}"),
        }
    }
    text
}

/// In quotes, as `redis-cli` reads it.
pub fn quoted(bytes: &[u8]) -> String {
    format!("\"{}\"", escaped(bytes))
}

/// A command that can be typed into `redis-cli`.
pub fn typed<P: AsRef<[u8]>>(parts: &[P]) -> String {
    let plain = |part: &[u8]| {
        !part.is_empty()
            && part
                .iter()
                .all(|byte| byte.is_ascii_graphic() && !b"\"'\\".contains(byte))
    };
    let words = parts.iter().map(AsRef::as_ref).map(|part| {
        if plain(part) {
            String::from_utf8_lossy(part).into_owned()
        } else {
            quoted(part)
        }
    });
    words.collect::<Vec<_>>().join(" ")
}

/// The words of a line: bare, or in quotes with the escapes of [`quoted`].
pub fn words(line: &str) -> Result<Vec<Vec<u8>>, String> {
    let (mut words, mut rest) = (Vec::new(), line.trim_start());
    while !rest.is_empty() {
        if let Some(inner) = rest.strip_prefix('"') {
            let (word, after) =
                unquoted(inner).ok_or_else(|| format!("no closing quote: {line}"))?;
            words.push(word);
            rest = after.trim_start();
        } else {
            let end = rest.find(' ').unwrap_or(rest.len());
            words.push(rest.as_bytes()[..end].to_vec());
            rest = rest[end..].trim_start();
        }
    }
    Ok(words)
}

/// The text before the closing quote, and the rest after it.
fn unquoted(text: &str) -> Option<(Vec<u8>, &str)> {
    let mut word = Vec::new();
    let mut letters = text.char_indices();
    loop {
        match letters.next()? {
            (at, '"') => return Some((word, &text[at + 1..])),
            (_, '\\') => match letters.next()?.1 {
                'n' => word.push(b'\n'),
                'r' => word.push(b'\r'),
                't' => word.push(b'\t'),
                'x' => {
                    let (from, _) = letters.next()?;
                    letters.next()?;
                    word.push(u8::from_str_radix(text.get(from..from + 2)?, 16).ok()?);
                }
                other => word.extend(other.encode_utf8(&mut [0; 4]).as_bytes()),
            },
            (_, letter) => word.extend(letter.encode_utf8(&mut [0; 4]).as_bytes()),
        }
    }
}
