//! A plain blocking connection for commands to servers: RESP2, one command at a time.

use std::{
    io::{self, BufRead, BufReader, ErrorKind, Read, Write},
    net::{SocketAddr, TcpStream},
    time::Duration,
};

use super::SpawnError;

/// The timeout for a connect and for a reply: far more than they take, even on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(10);

/// A server's reply, unless it is an error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Answer {
    Text(Vec<u8>),
    Number(i64),
    Nil,
    List(Vec<Answer>),
}

impl Answer {
    pub(super) fn text(&self) -> String {
        match self {
            Self::Text(text) => String::from_utf8_lossy(text).into_owned(),
            Self::Number(number) => number.to_string(),
            Self::Nil | Self::List(_) => String::new(),
        }
    }

    pub(super) fn items(self) -> Vec<Self> {
        if let Self::List(items) = self {
            items
        } else {
            Vec::new()
        }
    }

    /// Returns the value of this name, in a list of alternating names and values.
    pub(super) fn field(&self, name: &str) -> String {
        let Self::List(items) = self else {
            return String::new();
        };
        items
            .chunks(2)
            .find(|pair| pair[0].text() == name)
            .and_then(|pair| pair.get(1))
            .map_or(String::new(), Self::text)
    }
}

#[derive(Debug)]
pub(super) struct Link {
    addr: SocketAddr,
    stream: BufReader<TcpStream>,
}

impl Link {
    pub(super) fn open(addr: SocketAddr) -> Result<Self, SpawnError> {
        let open = || {
            let stream = TcpStream::connect_timeout(&addr, PATIENCE)?;
            stream.set_nodelay(true)?;
            stream.set_read_timeout(Some(PATIENCE))?;
            stream.set_write_timeout(Some(PATIENCE))?;
            Ok(BufReader::new(stream))
        };
        open()
            .map(|stream| Self { addr, stream })
            .map_err(|source| SpawnError::Unreachable { addr, source })
    }

    /// Sends a command, given as words separated by single spaces, and returns its reply.
    pub(super) fn call(&mut self, command: &str) -> Result<Answer, SpawnError> {
        let words: Vec<&[u8]> = command.split(' ').map(str::as_bytes).collect();
        self.call_words(&words)
    }

    pub(super) fn call_words(&mut self, words: &[&[u8]]) -> Result<Answer, SpawnError> {
        let mut request = format!("*{}\r\n", words.len()).into_bytes();
        for word in words {
            request.extend(format!("${}\r\n", word.len()).as_bytes());
            request.extend(*word);
            request.extend(b"\r\n");
        }
        let addr = self.addr;
        let answer = self
            .stream
            .get_mut()
            .write_all(&request)
            .and_then(|()| read(&mut self.stream));
        answer
            .map_err(|source| SpawnError::Unreachable { addr, source })?
            .map_err(|answer| {
                let words: Vec<_> = words
                    .iter()
                    .take(5)
                    .map(|word| String::from_utf8_lossy(word))
                    .collect();
                SpawnError::Refused {
                    addr,
                    command: words.join(" "),
                    answer,
                }
            })
    }
}

/// Reads one reply. An error inside a list makes the whole reply an error.
fn read(stream: &mut impl BufRead) -> io::Result<Result<Answer, String>> {
    let mut line = Vec::new();
    stream.read_until(b'\n', &mut line)?;
    let Some(line) = line.strip_suffix(b"\r\n") else {
        return Err(ErrorKind::UnexpectedEof.into());
    };
    let Some((sign, rest)) = line.split_first() else {
        return Err(ErrorKind::InvalidData.into());
    };
    let text = String::from_utf8_lossy(rest);
    let number = || {
        text.parse::<i64>()
            .map_err(|_| io::Error::new(ErrorKind::InvalidData, text.as_ref()))
    };
    Ok(match sign {
        b'+' => Ok(Answer::Text(rest.to_vec())),
        b'-' => Err(text.into_owned()),
        b':' => Ok(Answer::Number(number()?)),
        b'$' => match u64::try_from(number()?) {
            Err(_) => Ok(Answer::Nil),
            Ok(length) => {
                let mut body = Vec::new();
                stream.take(length + 2).read_to_end(&mut body)?;
                let Some(text) = body
                    .strip_suffix(b"\r\n")
                    .filter(|text| text.len() as u64 == length)
                else {
                    return Err(ErrorKind::UnexpectedEof.into());
                };
                Ok(Answer::Text(text.to_vec()))
            }
        },
        b'*' => match number()? {
            ..0 => Ok(Answer::Nil),
            // read all items, even after an error, so that the next reply starts at its beginning
            count => (0..count)
                .map(|_| read(stream))
                .collect::<io::Result<Vec<_>>>()?
                .into_iter()
                .collect::<Result<_, _>>()
                .map(Answer::List),
        },
        _ => return Err(ErrorKind::InvalidData.into()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(mut bytes: &[u8]) -> io::Result<Result<Answer, String>> {
        let answer = read(&mut bytes);
        assert!(answer.is_err() || bytes.is_empty(), "{bytes:?} is left");
        answer
    }

    #[test]
    fn answers_of_all_kinds() {
        let text = |text: &str| Answer::Text(text.into());
        for (bytes, wanted) in [
            ("+OK\r\n", Ok(text("OK"))),
            ("-ERR no\r\n", Err("ERR no".to_owned())),
            (":-3\r\n", Ok(Answer::Number(-3))),
            ("$4\r\na\r\nb\r\n", Ok(text("a\r\nb"))),
            ("$0\r\n\r\n", Ok(text(""))),
            ("$-1\r\n", Ok(Answer::Nil)),
            ("*-1\r\n", Ok(Answer::Nil)),
            ("*0\r\n", Ok(Answer::List(Vec::new()))),
            (
                "*2\r\n*1\r\n:1\r\n$1\r\nx\r\n",
                Ok(Answer::List(vec![
                    Answer::List(vec![Answer::Number(1)]),
                    text("x"),
                ])),
            ),
            ("*2\r\n-ERR a\r\n:1\r\n", Err("ERR a".to_owned())),
        ] {
            assert_eq!(answer(bytes.as_bytes()).unwrap(), wanted, "{bytes:?}");
        }
        for bytes in [
            "",
            "+OK",
            "$3\r\nab\r\n",
            "*2\r\n:1\r\n",
            ":x\r\n",
            "?\r\n",
            "\r\n",
        ] {
            assert!(answer(bytes.as_bytes()).is_err(), "{bytes:?}");
        }
    }

    #[test]
    fn a_field_is_found_by_its_name() {
        let list = "*4\r\n$1\r\na\r\n$1\r\nb\r\n$1\r\nb\r\n:7\r\n";
        let list = answer(list.as_bytes()).unwrap().unwrap();
        assert_eq!(["a", "b", "c"].map(|name| list.field(name)), ["b", "7", ""]);
    }
}
