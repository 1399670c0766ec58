//! Bytes that no client sends.

use super::{
    grammar::Grammar,
    play::{Check, Command},
    resp::request,
    rng::Rng,
};

/// The embedded server takes requests of 64 MiB, Redis of 512 MiB for each word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Limits {
    /// No limits.
    Any,
    /// Nothing that exceeds the limit of only one server, and no reply that differs each time.
    OfRedis,
}

/// Bytes that a client should never send, or only a part of a request.
pub fn nonsense(rng: &mut Rng, grammar: &mut Grammar, limits: Limits) -> Vec<u8> {
    let length = rng.between(1, 60);
    match rng.below(16) {
        0 | 1 => rng.bytes(length),
        2 => {
            let mut bytes = rng.bytes(length);
            for _ in 0..rng.between(1, 4) {
                let at = rng.below(bytes.len() + 1);
                bytes.splice(at..at, *b"\r\n");
            }
            bytes
        }
        3..=6 => mutated(rng, grammar, limits),
        7 | 8 => {
            let mut bytes = request(&valid(grammar, limits).parts);
            bytes.truncate(rng.below(bytes.len()));
            bytes
        }
        9 if limits == Limits::Any => request(&grammar.command().parts),
        9 => request(&valid(grammar, limits).parts),
        10 => {
            // the first few exceed the limit of only one server
            const LENGTHS: [&[u8]; 18] = [
                b"*1000000000\r\n",
                b"*2147483647\r\n",
                b"*1\r\n$536870912\r\n",
                b"*2\r\n$3\r\nGET\r\n$400000000\r\n",
                b"*9223372036854775807\r\n",
                b"*99999999999999999999999\r\n",
                b"*1048576\r\n",
                b"*1\r\n$99999999999\r\n",
                b"*1\r\n$536870913\r\n",
                b"*2\r\n$3\r\nGET\r\n$60000000\r\n",
                b"*4294967297\r\n",
                b"*-1\r\n",
                b"*-9223372036854775808\r\n",
                b"*1\r\n$-1\r\n",
                b"*1\r\n$-9223372036854775809\r\n",
                b"*0\r\n",
                b"*\r\n",
                b"$5\r\nworld\r\n",
            ];
            match limits {
                Limits::Any => rng.pick(&LENGTHS).to_vec(),
                Limits::OfRedis => rng.pick(&LENGTHS[4..]).to_vec(),
            }
        }
        11 => {
            // words as typed by hand, possibly with an unclosed quote
            const WORDS: [&[u8]; 12] = [
                b"PING", b"\"", b"'", b"\\", b"\\x", b"\\xff", b" ", b"\t", b"SET", b"\0",
                b"\"a b\"", b"GET",
            ];
            let mut bytes: Vec<u8> = (0..length)
                .flat_map(|_| [*rng.pick(&WORDS.each_ref()), b" "].concat())
                .collect();
            bytes.extend(b"\r\n");
            bytes
        }
        12 => vec![b'a'; length * 40],
        13 => b"*1\r\n".repeat(length),
        14 => {
            const SIGNS: [&[u8]; 10] = [
                b"%1\r\n+a\r\n+b\r\n",
                b">1\r\n+a\r\n",
                b"_\r\n",
                b"#t\r\n",
                b",1.5\r\n",
                b"(1\r\n",
                b"~1\r\n:1\r\n",
                b"+OK\r\n",
                b"-ERR\r\n",
                b"=7\r\ntxt:abc\r\n",
            ];
            rng.pick(&SIGNS).to_vec()
        }
        _ if limits == Limits::Any => request(&grammar.listener_command(3).parts),
        _ => request(&listener(grammar).parts),
    }
}

/// A valid request other than a script.
fn valid(grammar: &mut Grammar, limits: Limits) -> Command {
    loop {
        let command = grammar.plain_command();
        if limits == Limits::Any || command.check == Check::Exact {
            return command;
        }
    }
}

/// A subscription request whose reply is the same each time: leaving all channels is confirmed in any order.
fn listener(grammar: &mut Grammar) -> Command {
    loop {
        let command = grammar.listener_command(2);
        let leaves = command.parts[0]
            .to_ascii_lowercase()
            .ends_with(b"unsubscribe");
        if !leaves || command.parts.len() > 1 {
            return command;
        }
    }
}

/// A request with some bytes changed. Not a script: a changed one may never end.
fn mutated(rng: &mut Rng, grammar: &mut Grammar, limits: Limits) -> Vec<u8> {
    let mut bytes = request(&valid(grammar, limits).parts);
    for _ in 0..rng.between(1, 4) {
        let at = rng.below(bytes.len());
        match rng.below(4) {
            0 => bytes[at] = rng.next() as u8,
            1 => bytes[at] = b"0123456789-$*\r\n"[rng.below(15)],
            2 => _ = bytes.remove(at),
            _ => bytes.insert(at, rng.next() as u8),
        }
        if bytes.is_empty() {
            break;
        }
    }
    bytes
}
