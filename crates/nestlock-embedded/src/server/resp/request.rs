//! Requests: the parser that finds them in a client's bytes.

use super::{number::integer, reply::Text};

/// A request: the command's name and its arguments.
pub(crate) type Request = Vec<Vec<u8>>;

/// The maximum number of arguments in a request. Redis allows more, but no lock needs them.
const MAX_ARGS: i64 = 1024 * 1024;
/// The maximum length of a line without its line end, as in Redis.
const MAX_LINE: usize = 64 * 1024;
/// The maximum size of a request in bytes. Redis allows more, but no lock needs it.
pub(crate) const MAX_REQUEST: usize = 64 * 1024 * 1024;

/// Extracts requests from a client's bytes, however these are split into reads.
///
/// A length prefix reserves no memory: only bytes that have arrived use any.
#[derive(Debug, Default)]
pub(crate) struct Parser {
    input: Vec<u8>,
    /// The position of the next unread byte.
    at: usize,
    /// How many arguments of the current request are still missing.
    missing: i64,
    args: Request,
    /// The bytes in the arguments of the current request so far.
    taken: usize,
}

impl Parser {
    pub(crate) fn feed(&mut self, bytes: &[u8]) {
        if self.at > self.input.len() / 2 {
            self.input.drain(..self.at);
            self.at = 0;
            // release the memory of one large request
            if self.input.is_empty() && self.input.capacity() > 1024 * 1024 {
                self.input = Vec::new();
            }
        }
        self.input.extend_from_slice(bytes);
    }

    /// Returns how many bytes are still unparsed.
    pub(crate) fn waiting(&self) -> usize {
        self.input.len() - self.at
    }

    /// Returns the next complete request. Returns `None` if more bytes are needed. An error is a
    /// protocol violation: the connection has to be closed.
    pub(crate) fn next(&mut self) -> Result<Option<Request>, Text> {
        loop {
            if self.missing == 0 {
                match self.begin()? {
                    Begin::More => return Ok(None),
                    Begin::Inline(request) => return Ok(Some(request)),
                    Begin::Nothing => continue,
                    Begin::Args => {}
                }
            }
            while self.missing > 0 {
                let Some(arg) = self.argument()? else {
                    return Ok(None);
                };
                self.args.push(arg);
                self.missing -= 1;
            }
            self.taken = 0;
            return Ok(Some(std::mem::take(&mut self.args)));
        }
    }

    fn begin(&mut self) -> Result<Begin, Text> {
        if self.input.get(self.at).is_none() {
            return Ok(Begin::More);
        }
        if self.input[self.at] == b'*' {
            let Some(line) = self.line("too big mbulk count string")? else {
                return Ok(Begin::More);
            };
            let count = integer(&line[1..]).filter(|count| *count <= MAX_ARGS);
            let count = count.ok_or("Protocol error: invalid multibulk length")?;
            if count <= 0 {
                return Ok(Begin::Nothing);
            }
            self.missing = count;
            return Ok(Begin::Args);
        }
        // an inline request ends with `\n`; Redis searches for it with `strchr`, which stops at a
        // NUL
        let waiting = &self.input[self.at..];
        let end = waiting.iter().position(|byte| matches!(byte, b'\n' | 0));
        let Some(len) = end.filter(|end| waiting[*end] == b'\n') else {
            return if self.waiting() > MAX_LINE {
                Err("Protocol error: too big inline request".into())
            } else {
                Ok(Begin::More)
            };
        };
        let line = &self.input[self.at..self.at + len];
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        let words = words(line).ok_or("Protocol error: unbalanced quotes in request")?;
        self.at += len + 1;
        Ok(if words.is_empty() {
            Begin::Nothing
        } else {
            Begin::Inline(words)
        })
    }

    fn argument(&mut self) -> Result<Option<Vec<u8>>, Text> {
        let start = self.at;
        let Some(line) = self.line("too big bulk count string")? else {
            return Ok(None);
        };
        if line.first() != Some(&b'$') {
            let found = line.first().copied().unwrap_or(b'\r');
            return Err(Text(
                [b"Protocol error: expected '$', got '", &[found][..], b"'"]
                    .concat()
                    .into(),
            ));
        }
        let max = i64::try_from(MAX_REQUEST).unwrap_or(i64::MAX);
        let len = integer(&line[1..]).filter(|len| (0..=max).contains(len));
        let len = len
            .and_then(|len| usize::try_from(len).ok())
            .ok_or("Protocol error: invalid bulk length")?;
        if self.taken + len > MAX_REQUEST {
            return Err("Protocol error: request too large".into());
        }
        if self.waiting() < len + 2 {
            self.at = start;
            return Ok(None);
        }
        let arg = self.input[self.at..self.at + len].to_vec();
        self.at += len + 2;
        self.taken += len;
        Ok(Some(arg))
    }

    /// Returns the next line without its line end. Returns `None` if it is not complete.
    fn line(&mut self, too_long: &str) -> Result<Option<Vec<u8>>, Text> {
        let waiting = &self.input[self.at..];
        let end = waiting
            .iter()
            .take(MAX_LINE + 1)
            .position(|byte| matches!(byte, b'\r' | 0));
        let Some(len) = end.filter(|end| waiting[*end] == b'\r') else {
            return if waiting.len() > MAX_LINE {
                Err(format!("Protocol error: {too_long}").into())
            } else {
                Ok(None)
            };
        };
        if waiting.len() < len + 2 {
            return Ok(None);
        }
        let line = waiting[..len].to_vec();
        self.at += len + 2;
        Ok(Some(line))
    }
}

enum Begin {
    More,
    Nothing,
    Args,
    Inline(Request),
}

/// Splits an inline request into words. Returns `None` if its quotes do not match.
fn words(line: &[u8]) -> Option<Request> {
    let is_space = |byte: u8| byte.is_ascii_whitespace() || byte == 0x0b;
    // of the whitespace, only these bytes end a word
    let ends_word = |byte: u8| b" \n\r\t".contains(&byte);
    let mut words = Vec::new();
    let mut rest = line.iter().copied().peekable();
    loop {
        while rest.next_if(|byte| is_space(*byte)).is_some() {}
        let Some(first) = rest.peek().copied() else {
            return Some(words);
        };
        // a NUL ends the line, as in C
        if first == 0 {
            return Some(words);
        }
        let mut word = Vec::new();
        loop {
            match rest.next() {
                None | Some(0) => {
                    words.push(word);
                    return Some(words);
                }
                Some(byte) if ends_word(byte) => break,
                Some(b'"') => {
                    loop {
                        match rest.next()? {
                            b'"' => break,
                            b'\\' => word.push(escape(&mut rest)?),
                            0 => return None,
                            byte => word.push(byte),
                        }
                    }
                    if rest
                        .peek()
                        .is_some_and(|next| !is_space(*next) && *next != 0)
                    {
                        return None;
                    }
                    break;
                }
                Some(b'\'') => {
                    loop {
                        match rest.next()? {
                            b'\'' => break,
                            b'\\' if rest.next_if_eq(&b'\'').is_some() => word.push(b'\''),
                            0 => return None,
                            byte => word.push(byte),
                        }
                    }
                    if rest
                        .peek()
                        .is_some_and(|next| !is_space(*next) && *next != 0)
                    {
                        return None;
                    }
                    break;
                }
                Some(byte) => word.push(byte),
            }
        }
        words.push(word);
    }
}

fn escape(rest: &mut std::iter::Peekable<impl Iterator<Item = u8> + Clone>) -> Option<u8> {
    let hex = |byte: u8| {
        char::from(byte)
            .to_digit(16)
            .and_then(|digit| u8::try_from(digit).ok())
    };
    let mut ahead = rest.clone();
    if ahead.next() == Some(b'x')
        && let (Some(high), Some(low)) = (ahead.next().and_then(hex), ahead.next().and_then(hex))
    {
        *rest = ahead;
        return Some(high * 16 + low);
    }
    Some(match rest.next()? {
        b'n' => b'\n',
        b'r' => b'\r',
        b't' => b'\t',
        b'b' => 8,
        b'a' => 7,
        other => other,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(pieces: &[&[u8]]) -> Vec<Result<Request, String>> {
        let mut parser = Parser::default();
        let mut found = Vec::new();
        for piece in pieces {
            parser.feed(piece);
            loop {
                match parser.next() {
                    Ok(Some(request)) => found.push(Ok(request)),
                    Ok(None) => break,
                    Err(error) => {
                        found.push(Err(String::from_utf8_lossy(&error.0).into_owned()));
                        return found;
                    }
                }
            }
        }
        found
    }

    fn request(words: &[&str]) -> Request {
        words.iter().map(|word| word.as_bytes().to_vec()).collect()
    }

    #[test]
    fn requests_are_found_however_they_are_cut() {
        let bytes = b"*2\r\n$3\r\nGET\r\n$1\r\nk\r\nPING  \"a b\"\r\n*0\r\n*1\r\n$0\r\n\r\n";
        let wanted = [
            request(&["GET", "k"]),
            request(&["PING", "a b"]),
            request(&[""]),
        ]
        .map(Ok);
        assert_eq!(parse(&[bytes]), wanted);
        let single: Vec<&[u8]> = bytes.chunks(1).collect();
        assert_eq!(parse(&single), wanted);
    }

    #[test]
    fn violations_get_an_error_reply() {
        let error = |bytes: &[u8]| parse(&[bytes]).pop().unwrap().unwrap_err();
        assert_eq!(error(b"*x\r\n"), "Protocol error: invalid multibulk length");
        assert_eq!(
            error(b"*1048577\r\n"),
            "Protocol error: invalid multibulk length"
        );
        assert_eq!(
            error(b"*1\r\n$-1\r\n"),
            "Protocol error: invalid bulk length"
        );
        assert_eq!(
            error(b"*1\r\n$99999999999\r\n"),
            "Protocol error: invalid bulk length"
        );
        assert_eq!(
            error(b"*1\r\n:1\r\n"),
            "Protocol error: expected '$', got ':'"
        );
        assert_eq!(
            error(b"get \"k\n"),
            "Protocol error: unbalanced quotes in request"
        );
        assert_eq!(
            error(&vec![b'x'; MAX_LINE + 1]),
            "Protocol error: too big inline request"
        );
    }
}
