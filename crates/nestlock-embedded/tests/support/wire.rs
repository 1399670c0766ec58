//! A plain connection that can pipeline.

use std::{
    io::{self, Read, Write},
    net::{SocketAddr, TcpStream},
    time::Duration,
};

use super::resp::{Value, request};

/// Far beyond what a loaded machine needs.
const PATIENCE: Duration = Duration::from_secs(30);

#[derive(Debug)]
pub struct Wire {
    stream: TcpStream,
    input: Vec<u8>,
    at: usize,
    markers: u64,
}

impl Wire {
    pub fn connect(addr: SocketAddr) -> io::Result<Self> {
        let stream = TcpStream::connect_timeout(&addr, PATIENCE)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        Ok(Self {
            stream,
            input: Vec::new(),
            at: 0,
            markers: 0,
        })
    }

    pub fn stream(&self) -> &TcpStream {
        &self.stream
    }

    pub fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes)
    }

    pub fn send<P: AsRef<[u8]>>(&mut self, parts: &[P]) -> io::Result<()> {
        self.write(&request(parts))
    }

    /// Sends a command and reads the next value, which is its reply unless messages are in flight.
    pub fn call<P: AsRef<[u8]>>(&mut self, parts: &[P]) -> io::Result<Value> {
        self.send(parts)?;
        self.read()
    }

    pub fn read(&mut self) -> io::Result<Value> {
        loop {
            if let Some((value, used)) =
                Value::parse(&self.input[self.at..]).map_err(io::Error::other)?
            {
                self.at += used;
                if self.at == self.input.len() {
                    self.input.clear();
                    self.at = 0;
                }
                return Ok(value);
            }
            let mut chunk = [0; 16384];
            let count = self.stream.read(&mut chunk)?;
            if count == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            self.input.extend(&chunk[..count]);
        }
    }

    /// Sends bytes, followed by a PING with a unique word.
    pub fn send_marked(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.markers += 1;
        let mut marked = bytes.to_vec();
        marked.extend(request(&[&b"PING"[..], &self.marker()]));
        self.write(&marked)
    }

    fn marker(&self) -> Vec<u8> {
        format!("\u{1}marker {}", self.markers).into_bytes()
    }

    /// Reads everything before the reply to the PING of [`Wire::send_marked`], or up to the end of the connection.
    pub fn read_to_marker(&mut self) -> (Vec<Value>, io::Result<()>) {
        let (marker, mut values) = (Value::Bulk(self.marker()), Vec::new());
        loop {
            match self.read() {
                // in subscriber mode of RESP2 it is {"pong", marker}
                Ok(value) if value == marker => return (values, Ok(())),
                Ok(Value::List(pair)) if pair.len() == 2 && pair[1] == marker => {
                    return (values, Ok(()));
                }
                Ok(value) => values.push(value),
                Err(error) => return (values, Err(error)),
            }
        }
    }
}
