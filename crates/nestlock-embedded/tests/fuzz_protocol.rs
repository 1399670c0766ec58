//! Bytes that are no requests, or only nearly, the same for both servers: what they answer, and when they hang up.
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

/// All that is said until the server has closed the connection, which it does when we have nothing more to say.
fn answer(addr: SocketAddr, bytes: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(addr).expect("a connection");
    stream.set_read_timeout(Some(Duration::from_secs(30))).expect("a socket");
    // a server that has hung up in the middle has closed its side
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
        wire.call(&["FLUSHALL"]).expect("an answer");
        wire.call(&["SCRIPT", "FLUSH"]).expect("an answer");
    });
}

#[test]
fn bytes_that_are_no_requests_are_answered_as_by_redis() {
    let pair = Pair::start();
    let (mut rng, mut wrong, mut closed) = (Rng::new(1), vec![], 0);
    let mut grammar = Grammar::new(1);
    for number in 0..20_000 {
        if number % 1000 == 0 {
            grammar = Grammar::new(rng.next());
            empty(pair.addrs());
        }
        let mut bytes = nonsense(&mut rng, &mut grammar, Limits::OfRedis);
        // several at once, or one in two parts that belong together
        if rng.percent(30) {
            bytes.extend(nonsense(&mut rng, &mut grammar, Limits::OfRedis));
        }
        let said = pair.addrs().map(|addr| answer(addr, &bytes));
        closed += usize::from(said.real.windows(15).any(|window| window == b"-ERR Protocol e"));
        if said.real != said.ours {
            wrong.push(format!("{}\n  real: {}\n  ours: {}", quoted(&bytes), quoted(&said.real), quoted(&said.ours)));
            // what differs now may differ because of this
            empty(pair.addrs());
        }
    }
    assert!(wrong.is_empty(), "{} differ:\n{}", wrong.len(), wrong[..wrong.len().min(30)].join("\n"));
    assert!(closed > 3000, "{closed} were no requests");
}
