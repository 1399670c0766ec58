//! Invalid and almost valid requests to both servers: the same replies, and the connection closes at the same point.
#![cfg(unix)]

mod support;

use std::{
    io::{Read, Write},
    net::{Shutdown, SocketAddr, TcpStream},
    time::Duration,
};

use support::{
    grammar::Grammar,
    nonsense::{Limits, nonsense},
    resp::quoted,
    rng::Rng,
    servers::{Both, Pair},
    wire::Wire,
};

/// Everything the server sends until it closes the connection, which it does when this side has closed.
fn answer(addr: SocketAddr, bytes: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(addr).expect("a connection");
    stream
        .set_read_timeout(Some(Duration::from_secs(30)))
        .expect("a socket");
    // the server may have closed the connection in the middle
    let _ = stream.write_all(bytes);
    let _ = stream.shutdown(Shutdown::Write);
    let (mut said, mut chunk) = (vec![], [0; 16384]);
    loop {
        match stream.read(&mut chunk) {
            Ok(0) => return said,
            Ok(count) => said.extend(&chunk[..count]),
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return said,
            Err(error) => panic!("{} is not closed: {error}", quoted(bytes)),
        }
    }
}

fn empty(addrs: Both<SocketAddr>) {
    addrs.map(|addr| {
        let mut wire = Wire::connect(addr).expect("a connection");
        wire.call(&["FLUSHALL"]).expect("a reply");
        wire.call(&["SCRIPT", "FLUSH"]).expect("a reply");
    });
}

#[derive(Debug, Default)]
struct Report {
    /// Strings that Redis rejected as a protocol violation.
    violations: usize,
    wrong: Vec<String>,
}

/// From the string `spoilt` on, one server gets additional bytes.
fn compare(addrs: Both<SocketAddr>, strings: usize, spoilt: Option<usize>) -> Report {
    let (mut rng, mut grammar, mut report) = (Rng::new(1), Grammar::new(1), Report::default());
    for number in 0..strings {
        if number % 1000 == 0 {
            grammar = Grammar::new(rng.next());
            empty(addrs);
        }
        let mut bytes = nonsense(&mut rng, &mut grammar, Limits::OfRedis);
        // several at once, or one string in two parts
        if rng.percent(30) {
            bytes.extend(nonsense(&mut rng, &mut grammar, Limits::OfRedis));
        }
        // repeat it: a random string may undo it before another one reads it
        if spoilt.is_some_and(|spoilt| number >= spoilt) {
            answer(addrs.ours, b"\r\nMSET s1 9 s2 9 s3 9\r\n");
        }
        let said = addrs.map(|addr| answer(addr, &bytes));
        report.violations += usize::from(
            said.real
                .windows(15)
                .any(|window| window == b"-ERR Protocol e"),
        );
        if said.real != said.ours {
            let said = said.map(|said| quoted(&said));
            report.wrong.push(format!(
                "{}\n  real: {}\n  ours: {}",
                quoted(&bytes),
                said.real,
                said.ours
            ));
            // later differences may be consequences of this one
            empty(addrs);
        }
    }
    report
}

#[test]
fn bytes_that_are_no_requests_are_answered_as_by_redis() {
    let Report { violations, wrong } = compare(Pair::start().addrs(), 20_000, None);
    assert!(
        wrong.is_empty(),
        "{} differ:\n{}",
        wrong.len(),
        wrong[..wrong.len().min(30)].join("\n")
    );
    assert!(violations > 3000, "only {violations} were violations");
}

#[test]
fn requests_to_one_server_only_are_noticed() {
    let wrong = compare(Pair::start().addrs(), 1000, Some(100)).wrong;
    assert!(!wrong.is_empty());
}
