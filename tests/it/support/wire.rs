//! A plain RESP connection to a server, independent of nestlock and fred.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpStream},
    time::Duration,
};

/// A reply of the server.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reply {
    Nil,
    Int(i64),
    Text(String),
    Error(String),
    List(Vec<Reply>),
}

impl Reply {
    pub fn int(&self) -> i64 {
        match self {
            Self::Int(number) => *number,
            other => panic!("not a number: {other:?}"),
        }
    }

    /// Returns the number, or `other` if the reply is not a number.
    pub fn int_or(&self, other: i64) -> i64 {
        if let Self::Int(number) = self {
            *number
        } else {
            other
        }
    }

    pub fn text(&self) -> &str {
        match self {
            Self::Text(text) | Self::Error(text) => text,
            other => panic!("not a text: {other:?}"),
        }
    }

    pub fn list(&self) -> &[Reply] {
        match self {
            Self::List(list) => list,
            other => panic!("not a list: {other:?}"),
        }
    }

    pub fn is_error(&self) -> bool {
        matches!(self, Self::Error(_))
    }
}

/// One connection (RESP2).
#[derive(Debug)]
pub struct Wire {
    stream: BufReader<TcpStream>,
}

impl Wire {
    pub fn connect(addr: SocketAddr) -> std::io::Result<Self> {
        let stream = TcpStream::connect(addr)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(Duration::from_secs(30)))?;
        Ok(Self {
            stream: BufReader::new(stream),
        })
    }

    /// Sets the read timeout, which is 30 s by default.
    pub fn limit(&self, limit: Duration) {
        self.stream
            .get_ref()
            .set_read_timeout(Some(limit))
            .expect("a time");
    }

    /// Sends a command and reads its reply.
    pub fn call(&mut self, parts: &[&str]) -> std::io::Result<Reply> {
        self.send(parts)?;
        self.read()
    }

    pub fn send(&mut self, parts: &[&str]) -> std::io::Result<()> {
        let mut bytes = format!("*{}\r\n", parts.len()).into_bytes();
        for part in parts {
            bytes.extend(format!("${}\r\n", part.len()).as_bytes());
            bytes.extend(part.as_bytes());
            bytes.extend(b"\r\n");
        }
        self.stream.get_mut().write_all(&bytes)
    }

    /// Reads one reply or message.
    pub fn read(&mut self) -> std::io::Result<Reply> {
        let mut line = String::new();
        if self.stream.read_line(&mut line)? == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        let (sign, rest) = line.trim_end_matches("\r\n").split_at(1);
        Ok(match sign {
            "+" => Reply::Text(rest.into()),
            "-" => Reply::Error(rest.into()),
            ":" => Reply::Int(rest.parse().expect("a number")),
            "$" => match rest.parse::<i64>().expect("a length") {
                -1 => Reply::Nil,
                len => {
                    let mut bytes = vec![0; len as usize + 2];
                    self.stream.read_exact(&mut bytes)?;
                    bytes.truncate(len as usize);
                    Reply::Text(String::from_utf8_lossy(&bytes).into_owned())
                }
            },
            "*" => match rest.parse::<i64>().expect("a length") {
                -1 => Reply::Nil,
                len => Reply::List(
                    (0..len)
                        .map(|_| self.read())
                        .collect::<std::io::Result<_>>()?,
                ),
            },
            other => panic!("not RESP2: {other:?}{rest:?}"),
        })
    }
}
