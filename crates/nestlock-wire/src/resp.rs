//! The part of RESP3 that a server uses here: requests are arrays of strings, replies may be
//! anything.
//!
//! The decoder is nestlock's own, because the peer may be an attacker in the server's place:
//! `redis-protocol` 6 recurses for each level of nesting, without a limit, so that 8 KB of `*1` end
//! the process. Here each length is checked against a limit before it is used, and memory is
//! allocated for bytes that have arrived, never for bytes that are only announced.
//!
//! What was parsed is not parsed again when more arrives.

use std::{borrow::Cow, fmt, mem};

use smallvec::SmallVec;

/// Longest string, in bytes: the server's default (`proto-max-bulk-len`).
const LONGEST_TEXT: usize = 512 << 20;
/// Longest line, in bytes: a length, a number, or an error.
const LONGEST_LINE: usize = 64 << 10;
/// Most elements of one frame, at all depths together.
const MOST_PARTS: usize = 1 << 20;
/// How many levels arrays may be nested inside the outermost one.
const DEEPEST: usize = 8;

/// A reply, or a part of one.
///
/// ```
/// use nestlock_wire::Value;
///
/// let reply = Value::decode(b"*2\r\n:1\r\n$2\r\n17\r\n");
/// assert_eq!(reply, Some(Value::Array(vec![Value::Integer(1), Value::text("17")])));
/// assert_eq!(Value::text("17").as_number(), Some(17));
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Value {
    /// No value.
    Null,
    /// A number.
    Integer(i64),
    /// A string of bytes.
    Text(Vec<u8>),
    /// Several replies.
    Array(Vec<Value>),
    /// An error inside an array.
    Refused(String),
    /// A double, a boolean or a big number, whose value is not kept: no script returns one.
    Other,
}

impl Value {
    /// Creates a text.
    #[must_use]
    pub fn text(text: &str) -> Self {
        Self::Text(text.as_bytes().to_vec())
    }

    /// Decodes a reply in RESP3. Returns `None` unless the bytes are exactly one reply.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        match decode(bytes, &mut Scan::default()) {
            Ok((Frame::Value(value), length)) if length == bytes.len() => Some(value),
            _ => None,
        }
    }

    /// Returns the value of an integer, or of a string that contains one, as in a record.
    #[must_use]
    pub fn as_number(&self) -> Option<i64> {
        match self {
            Self::Integer(number) => Some(*number),
            other => other.as_str()?.parse().ok(),
        }
    }

    /// Returns the text of a string, with invalid UTF-8 replaced. Returns `None` for anything else.
    #[must_use]
    pub fn as_lossy_str(&self) -> Option<Cow<'_, str>> {
        match self {
            Self::Text(text) => Some(String::from_utf8_lossy(text)),
            _ => None,
        }
    }

    /// Returns the text of a string in valid UTF-8. Returns `None` for anything else.
    #[must_use]
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Self::Text(text) => std::str::from_utf8(text).ok(),
            _ => None,
        }
    }
}

/// A complete frame.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Frame {
    Value(Value),
    /// The server's refusal of a request.
    Error(String),
    /// A push: a message, or a confirmation of a subscription or its end.
    Push(Vec<Value>),
}

/// Why there is no frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stop {
    /// The frame is incomplete, and needs at least this many bytes in total.
    More(usize),
    Nonsense(&'static str),
}

impl fmt::Display for Stop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::More(_) => f.write_str("the reply is incomplete"),
            Self::Nonsense(what) => f.write_str(what),
        }
    }
}

/// How far the next frame has been scanned. When more bytes arrive, the scan continues from there.
#[derive(Debug, Default)]
pub(crate) struct Scan {
    at: usize,
    /// How many elements are still missing in each open array, the outermost first.
    open: SmallVec<[usize; DEEPEST + 1]>,
    /// How many elements the frame has so far, in all its arrays.
    parts: usize,
}

/// Returns the first frame and its length in bytes. `scan` is the progress made with fewer bytes.
pub(crate) fn decode(bytes: &[u8], scan: &mut Scan) -> Result<(Frame, usize), Stop> {
    scan.go_on(bytes)?;
    let end = mem::take(scan).at;
    let mut reader = FrameReader { bytes, at: 0 };
    // skip attributes of the next reply; no supported server sends any
    while reader.peek()? == b'|' {
        reader.value()?;
    }
    let frame = match reader.peek()? {
        b'-' | b'!' => Frame::Error(String::from_utf8_lossy(reader.error()?).into_owned()),
        b'>' => match reader.value()? {
            Value::Array(parts) => Frame::Push(parts),
            _ => return Err(Stop::Nonsense("a RESP push that is null")),
        },
        _ => Frame::Value(reader.value()?),
    };
    Ok((frame, end))
}

impl Scan {
    /// Scans one frame without allocating memory for it.
    fn go_on(&mut self, bytes: &[u8]) -> Result<(), Stop> {
        let mut reader = FrameReader { bytes, at: self.at };
        loop {
            let depth = self.open.len();
            match reader.peek()? {
                b':' => _ = reader.number()?,
                b'_' | b'+' | b'-' | b'#' | b',' | b'(' => _ = reader.line()?,
                b'$' | b'!' | b'=' => _ = reader.text()?,
                kind @ (b'*' | b'~' | b'%' | b'>' | b'|') => {
                    if depth > DEEPEST || depth > 0 && matches!(kind, b'>' | b'|') {
                        return Err(Stop::Nonsense("RESP arrays nested too deeply"));
                    }
                    let parts = reader.parts()?.unwrap_or(0);
                    self.parts += parts;
                    if self.parts > MOST_PARTS {
                        return Err(Stop::Nonsense("a RESP array with too many elements"));
                    }
                    // an attribute is followed by the value that it describes
                    let parts = parts + usize::from(kind == b'|');
                    self.at = reader.at;
                    if parts > 0 {
                        self.open.push(parts);
                        continue;
                    }
                }
                _ => return Err(Stop::Nonsense("the reply is not RESP")),
            }
            self.at = reader.at;
            // the element is complete, and so is each array that ends with it
            while let Some(left) = self.open.last_mut() {
                *left -= 1;
                if *left > 0 {
                    break;
                }
                self.open.pop();
            }
            if self.open.is_empty() {
                return Ok(());
            }
        }
    }
}

/// A position in the bytes, to read from.
struct FrameReader<'b> {
    bytes: &'b [u8],
    at: usize,
}

impl<'b> FrameReader<'b> {
    fn peek(&self) -> Result<u8, Stop> {
        self.bytes
            .get(self.at)
            .copied()
            .ok_or(Stop::More(self.at + 1))
    }

    /// Returns the bytes between the type byte and the end of the line.
    fn line(&mut self) -> Result<&'b [u8], Stop> {
        let from = self.at + 1;
        let rest = self.bytes.get(from..).unwrap_or_default();
        let Some(length) = rest
            .iter()
            .take(LONGEST_LINE)
            .position(|byte| *byte == b'\r')
        else {
            return Err(if rest.len() < LONGEST_LINE {
                Stop::More(self.bytes.len() + 1)
            } else {
                Stop::Nonsense("a RESP line that is too long")
            });
        };
        match rest.get(length + 1) {
            None => Err(Stop::More(self.bytes.len() + 1)),
            Some(b'\n') => {
                self.at = from + length + 2;
                Ok(&rest[..length])
            }
            Some(_) => Err(Stop::Nonsense("a RESP line with CR but no LF")),
        }
    }

    fn number(&mut self) -> Result<i64, Stop> {
        let line = self.line()?;
        let number = std::str::from_utf8(line)
            .ok()
            .and_then(|digits| digits.parse().ok());
        number.ok_or(Stop::Nonsense("invalid RESP integer"))
    }

    /// Returns a length. Returns `None` for -1, which stands for a null.
    fn length(&mut self, most: usize) -> Result<Option<usize>, Stop> {
        match self.number()? {
            -1 => Ok(None),
            length => match usize::try_from(length) {
                Ok(length) if length <= most => Ok(Some(length)),
                _ => Err(Stop::Nonsense("RESP length out of range")),
            },
        }
    }

    /// Returns a string with its length in front. Returns `None` for a null.
    fn text(&mut self) -> Result<Option<&'b [u8]>, Stop> {
        let Some(length) = self.length(LONGEST_TEXT)? else {
            return Ok(None);
        };
        let (from, end) = (self.at, self.at + length);
        match self.bytes.get(end..end + 2) {
            None => Err(Stop::More(end + 2)),
            Some(b"\r\n") => {
                self.at = end + 2;
                Ok(Some(&self.bytes[from..end]))
            }
            Some(_) => Err(Stop::Nonsense("a RESP string without CRLF at its end")),
        }
    }

    fn error(&mut self) -> Result<&'b [u8], Stop> {
        if self.peek()? == b'-' {
            self.line()
        } else {
            self.text().map(Option::unwrap_or_default)
        }
    }

    /// Returns the number of elements that follow, two for each pair of a map. Returns `None` for a
    /// null array.
    fn parts(&mut self) -> Result<Option<usize>, Stop> {
        let pairs = matches!(self.peek()?, b'%' | b'|');
        let length = self.length(MOST_PARTS)?;
        Ok(length.map(|length| if pairs { 2 * length } else { length }))
    }

    /// Reads one value. [`Scan`] has checked its nesting, which limits the recursion.
    fn value(&mut self) -> Result<Value, Stop> {
        let text =
            |text: Option<&[u8]>| text.map_or(Value::Null, |text| Value::Text(text.to_vec()));
        Ok(match self.peek()? {
            b':' => Value::Integer(self.number()?),
            b'_' => {
                self.line()?;
                Value::Null
            }
            b'+' => text(Some(self.line()?)),
            b'$' => text(self.text()?),
            // skip the three-letter format and its colon
            b'=' => text(self.text()?.map(|text| text.get(4..).unwrap_or_default())),
            b'!' | b'-' => Value::Refused(String::from_utf8_lossy(self.error()?).into_owned()),
            b'*' | b'~' | b'%' | b'>' | b'|' => match self.parts()? {
                None => Value::Null,
                Some(parts) => {
                    Value::Array((0..parts).map(|_| self.value()).collect::<Result<_, _>>()?)
                }
            },
            _ => {
                self.line()?;
                Value::Other
            }
        })
    }
}

/// Writes the head of a request of `words` words.
pub(crate) fn write_head(out: &mut Vec<u8>, words: usize) {
    write_number(out, b'*', words as u64);
}

pub(crate) fn write_word(out: &mut Vec<u8>, word: &[u8]) {
    write_number(out, b'$', word.len() as u64);
    out.extend_from_slice(word);
    out.extend_from_slice(b"\r\n");
}

/// Writes a word that is given in parts.
pub(crate) fn write_parts(out: &mut Vec<u8>, parts: &[&str]) {
    write_number(out, b'$', parts.iter().map(|part| part.len() as u64).sum());
    for part in parts {
        out.extend_from_slice(part.as_bytes());
    }
    out.extend_from_slice(b"\r\n");
}

/// Writes a PING with a number as its argument.
pub(crate) fn write_ping(out: &mut Vec<u8>, number: u64) {
    write_head(out, 2);
    write_word(out, b"PING");
    write_integer(out, number);
}

/// Writes a number as a word.
pub(crate) fn write_integer(out: &mut Vec<u8>, number: u64) {
    let (digits, from) = digits(number);
    write_word(out, &digits[from..]);
}

fn write_number(out: &mut Vec<u8>, kind: u8, number: u64) {
    // nearly all of them are lengths of one or two digits
    let short = [
        kind,
        b'0' + (number / 10 % 10) as u8,
        b'0' + (number % 10) as u8,
        b'\r',
        b'\n',
    ];
    match number {
        0..10 => out.extend_from_slice(&[short[0], short[2], short[3], short[4]]),
        10..100 => out.extend_from_slice(&short),
        _ => {
            let (digits, from) = digits(number);
            out.push(kind);
            out.extend_from_slice(&digits[from..]);
            out.extend_from_slice(b"\r\n");
        }
    }
}

/// Returns the digits of a number, and where they begin.
fn digits(mut number: u64) -> ([u8; 20], usize) {
    let (mut digits, mut from) = ([b'0'; 20], 20);
    loop {
        from -= 1;
        digits[from] = b'0' + (number % 10) as u8;
        number /= 10;
        if number == 0 {
            return (digits, from);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn whole(bytes: &[u8]) -> Frame {
        let (frame, length) = decode(bytes, &mut Scan::default()).unwrap();
        assert_eq!(length, bytes.len());
        // no prefix is taken for the whole, and `More` names neither too few nor too many bytes
        let mut scan = Scan::default();
        for cut in 0..bytes.len() {
            match decode(&bytes[..cut], &mut scan) {
                Err(Stop::More(needed)) => {
                    assert!(needed > cut && needed <= bytes.len(), "{cut}: {needed}");
                }
                other => panic!("{cut}: {other:?}"),
            }
        }
        let again = decode(bytes, &mut scan).unwrap();
        assert_eq!(again, (frame, length));
        again.0
    }

    /// An array that arrives piece by piece is scanned only once. Otherwise a peer could keep the
    /// runtime busy.
    #[test]
    fn what_was_looked_at_is_not_looked_at_again() {
        let inner = format!("*3\r\n{}", ":1\r\n".repeat(3));
        let bytes = format!("*1000\r\n{}", inner.repeat(1_000));
        let mut scan = Scan::default();
        for come in 1..bytes.len() {
            assert!(matches!(
                decode(&bytes.as_bytes()[..come], &mut scan),
                Err(Stop::More(_))
            ));
            assert!(come - scan.at < "*1000\r\n".len(), "{} of {come}", scan.at);
        }
        let whole = decode(bytes.as_bytes(), &mut scan).unwrap();
        assert_eq!(whole.1, bytes.len());
        assert_eq!(
            (scan.at, scan.parts),
            (0, 0),
            "the next frame starts from zero"
        );
    }

    #[test]
    fn numbers_are_written_as_they_are() {
        for number in (0..2_000).chain([u64::MAX - 1, u64::MAX]) {
            let mut out = Vec::new();
            write_number(&mut out, b'*', number);
            assert_eq!(String::from_utf8(out), Ok(format!("*{number}\r\n")));
        }
    }

    #[test]
    fn what_servers_say() {
        let text = Value::text;
        for (bytes, frame) in [
            (":1\r\n", Frame::Value(Value::Integer(1))),
            (":-3\r\n", Frame::Value(Value::Integer(-3))),
            ("_\r\n", Frame::Value(Value::Null)),
            ("$-1\r\n", Frame::Value(Value::Null)),
            ("*-1\r\n", Frame::Value(Value::Null)),
            ("+PONG\r\n", Frame::Value(text("PONG"))),
            ("$2\r\n\r\n\r\n", Frame::Value(text("\r\n"))),
            ("=7\r\ntxt:a\r\n\r\n", Frame::Value(text("a\r\n"))),
            ("#t\r\n", Frame::Value(Value::Other)),
            (",1.5\r\n", Frame::Value(Value::Other)),
            (
                "-NOSCRIPT No matching script.\r\n",
                Frame::Error("NOSCRIPT No matching script.".into()),
            ),
            ("!5\r\nOOM x\r\n", Frame::Error("OOM x".into())),
            (
                "*3\r\n:0\r\n:-1\r\n*1\r\n$1\r\na\r\n",
                Frame::Value(Value::Array(vec![
                    Value::Integer(0),
                    Value::Integer(-1),
                    Value::Array(vec![text("a")]),
                ])),
            ),
            (
                "*2\r\n-ERR inside\r\n*0\r\n",
                Frame::Value(Value::Array(vec![
                    Value::Refused("ERR inside".into()),
                    Value::Array(vec![]),
                ])),
            ),
            (
                "%1\r\n+proto\r\n:3\r\n",
                Frame::Value(Value::Array(vec![text("proto"), Value::Integer(3)])),
            ),
            (
                ">3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$1\r\n0\r\n",
                Frame::Push(vec![text("message"), text("c"), text("0")]),
            ),
            (
                "|1\r\n+ttl\r\n:9\r\n:1\r\n",
                Frame::Value(Value::Integer(1)),
            ),
        ] {
            assert_eq!(whole(bytes.as_bytes()), frame, "{bytes:?}");
        }
    }

    #[test]
    fn what_no_server_says_is_nonsense_at_once() {
        let deep = "*1\r\n".repeat(100_000);
        let wide =
            format!("*{MOST_PARTS}\r\n{}", ":1\r\n".repeat(3)) + &format!("*{MOST_PARTS}\r\n");
        let endless = "+".to_owned() + &"x".repeat(LONGEST_LINE + 1);
        for bytes in [
            "HTTP/1.1 400 Bad Request\r\n\r\n",
            "\r\n",
            ":x\r\n",
            ":99999999999999999999\r\n",
            "$1\r\nab\r\n",
            "+a\rb\r\n",
            "$?\r\n",
            "*?\r\n",
            "$-2\r\n",
            "*-2\r\n",
            "$536870913\r\n",
            "$9223372036854775807\r\n",
            "*1048577\r\n",
            "%1048576\r\n",
            "*1\r\n>1\r\n:1\r\n",
            &deep,
            &wide,
            &endless,
        ] {
            let outcome = decode(bytes.as_bytes(), &mut Scan::default());
            assert!(
                matches!(outcome, Err(Stop::Nonsense(_))),
                "{:?}: {outcome:?}",
                &bytes[..bytes.len().min(40)]
            );
        }
        // this may still arrive; no memory is reserved for it
        assert_eq!(
            decode(b"$536870912\r\nabc", &mut Scan::default()),
            Err(Stop::More(12 + (512 << 20) + 2))
        );
    }

    fn value() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<i64>().prop_map(Value::Integer),
            proptest::collection::vec(any::<u8>(), 0..40).prop_map(Value::Text),
        ];
        leaf.prop_recursive(4, 40, 6, |inner| {
            proptest::collection::vec(inner, 0..6).prop_map(Value::Array)
        })
    }

    fn encode(value: &Value, out: &mut Vec<u8>) {
        match value {
            Value::Null => out.extend(b"_\r\n"),
            Value::Integer(number) => out.extend(format!(":{number}\r\n").bytes()),
            Value::Text(text) => write_word(out, text),
            Value::Array(parts) => {
                write_head(out, parts.len());
                for part in parts {
                    encode(part, out);
                }
            }
            Value::Refused(error) => out.extend(format!("-{error}\r\n").bytes()),
            Value::Other => unreachable!(),
        }
    }

    proptest! {
        #[test]
        fn what_is_cut_anywhere_is_read_in_the_end(values in proptest::collection::vec(value(), 1..5), step in 1..50_usize) {
            let mut bytes = Vec::new();
            for value in &values {
                encode(value, &mut bytes);
            }
            let (mut at, mut come, mut read, mut scan) = (0, 0, Vec::new(), Scan::default());
            while read.len() < values.len() {
                match decode(&bytes[at..come], &mut scan) {
                    Ok((Frame::Value(value), length)) => {
                        read.push(value);
                        at += length;
                    }
                    Err(Stop::More(needed)) => {
                        prop_assert!(at + needed > come && at + needed <= bytes.len());
                        come = (come + step).min(bytes.len());
                    }
                    other => prop_assert!(false, "{other:?}"),
                }
            }
            prop_assert_eq!(read, values);
            prop_assert_eq!(at, bytes.len());
        }

        #[test]
        fn nonsense_ends(bytes in proptest::collection::vec(prop_oneof![
            Just(b'*'), Just(b'$'), Just(b':'), Just(b'>'), Just(b'|'), Just(b'%'), Just(b'\r'), Just(b'\n'),
            Just(b'1'), Just(b'9'), Just(b'-'), any::<u8>(),
        ], 0..200)) {
            let mut at = 0;
            while let Ok((_, length)) = decode(&bytes[at..], &mut Scan::default()) {
                prop_assert!(length > 0);
                at += length;
            }
        }
    }
}
