//! The handle of the embedded server: its lifetime, its clock, its pauses.
#![allow(missing_docs, clippy::unwrap_used)]

use std::{
    io::{BufRead, BufReader, Write},
    net::TcpStream,
    sync::mpsc,
    thread,
    time::Duration,
};

use nestlock_embedded::EmbeddedServer;

/// A connection that sends inline requests and reads replies of one line.
struct Line(BufReader<TcpStream>);

impl Line {
    fn to(server: &EmbeddedServer) -> Self {
        let stream = TcpStream::connect(server.addr()).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_secs(20)))
            .unwrap();
        Self(BufReader::new(stream))
    }

    fn send(&mut self, request: &str) {
        self.0
            .get_mut()
            .write_all(format!("{request}\r\n").as_bytes())
            .unwrap();
    }

    fn read(&mut self) -> String {
        let mut line = String::new();
        self.0.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    fn call(&mut self, request: &str) -> String {
        self.send(request);
        self.read()
    }
}

#[test]
fn a_url_names_a_port_of_the_loopback_interface() {
    let server = EmbeddedServer::start().unwrap();
    assert_eq!(
        server.url(),
        format!("redis://127.0.0.1:{}", server.addr().port())
    );
    assert_eq!(Line::to(&server).call("PING"), "+PONG");
}

#[test]
fn advance_ends_leases_at_once() {
    let server = EmbeddedServer::start().unwrap();
    let mut line = Line::to(&server);
    line.call("SET short v PX 30000");
    line.call("SET long v PX 90000");
    line.call("SET endless v");
    assert_eq!(line.call("DBSIZE"), ":3");
    server.advance(Duration::from_secs(29));
    assert_eq!(line.call("EXISTS short"), ":1");
    server.advance(Duration::from_secs(2));
    assert_eq!(line.call("EXISTS short"), ":0");
    assert_eq!(line.call("DBSIZE"), ":2");
    let left: i64 = line.call("PTTL long")[1..].parse().unwrap();
    assert!((50_000..=59_000).contains(&left), "{left}");
}

#[test]
fn advance_ends_the_wait_of_a_blocked_client() {
    let server = EmbeddedServer::start().unwrap();
    let mut line = Line::to(&server);
    line.send("BLPOP list 600");
    let mut other = Line::to(&server);
    while !other
        .call("EVAL \"return redis.call('info','clients'):match('blocked_clients:(%d+)')\" 0")
        .is_empty()
    {
        if other.read() == "1" {
            break;
        }
    }
    server.advance(Duration::from_secs(601));
    assert_eq!(line.read(), "*-1");
}

#[test]
fn a_paused_server_answers_when_it_is_resumed() {
    let server = EmbeddedServer::start().unwrap();
    let mut line = Line::to(&server);
    line.call("PING");
    server.pause();
    line.send("PING");
    let (sender, answer) = mpsc::channel();
    let reader = thread::spawn(move || sender.send(line.read()));
    // silence can only be waited for; no other assertion relies on it
    assert!(answer.recv_timeout(Duration::from_millis(100)).is_err());
    // meanwhile, clients can connect and the clock can be advanced
    let mut late = Line::to(&server);
    late.send("TIME");
    server.advance(Duration::from_secs(1));
    server.resume();
    assert_eq!(
        answer.recv_timeout(Duration::from_secs(20)).unwrap(),
        "+PONG"
    );
    assert_eq!(late.read(), "*2");
    reader.join().unwrap().unwrap();
}

#[test]
fn a_dropped_server_closes_its_port_and_can_come_back_there() {
    let server = EmbeddedServer::start().unwrap();
    let port = server.addr().port();
    let mut line = Line::to(&server);
    line.call("SET k v");
    drop(server);
    assert_eq!(line.read(), "");
    assert!(TcpStream::connect(("127.0.0.1", port)).is_err());
    let server = EmbeddedServer::start_on(port).unwrap();
    assert_eq!(Line::to(&server).call("EXISTS k"), ":0");
    assert!(EmbeddedServer::start_on(port).is_err());
}

/// A server that is paused and one that runs an endless script can both be dropped.
#[test]
fn a_drop_ends_a_paused_server_and_one_with_an_endless_script() {
    let paused = EmbeddedServer::start().unwrap();
    paused.pause();
    drop(paused);

    let busy = EmbeddedServer::start().unwrap();
    let mut line = Line::to(&busy);
    line.call("PING");
    line.send("EVAL \"while true do end\" 0");
    drop(busy);
}

#[test]
fn a_hundred_servers_do_not_disturb_each_other() {
    let servers: Vec<_> = (0..100).map(|_| EmbeddedServer::start().unwrap()).collect();
    for (number, server) in servers.iter().enumerate() {
        assert_eq!(Line::to(server).call(&format!("SET k {number}")), "+OK");
    }
    for (number, server) in servers.iter().enumerate() {
        let mut line = Line::to(server);
        assert_eq!(line.call("GET k"), format!("${}", number.to_string().len()));
        assert_eq!(line.read(), number.to_string());
    }
}

#[test]
fn a_handle_can_be_shared_between_threads() {
    fn shared<T: Send + Sync>(_: &T) {}
    shared(&EmbeddedServer::start().unwrap());
}
