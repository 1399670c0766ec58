//! Tests with a scripted server at the other end of a real socket.

use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    sync::mpsc,
    thread,
    time::Instant,
};

use futures_util::future::poll_immediate;
use tokio::runtime::{Builder, Handle};

use super::*;
use crate::tests::{call, dialer_to};

/// Replies to the handshake: HELLO, HELLO with the name, CLIENT SETINFO twice, and PING with its
/// number, which ends the handshake.
fn greet(listener: &TcpListener) -> TcpStream {
    let (mut stream, mut come) = (listener.accept().unwrap().0, Vec::new());
    while !come.ends_with(b"PING\r\n$1\r\n5\r\n") {
        let mut chunk = [0; 1 << 10];
        let many = stream.read(&mut chunk).unwrap();
        assert!(many > 0, "the client has gone");
        come.extend_from_slice(&chunk[..many]);
    }
    stream
        .write_all(b"%0\r\n%0\r\n+OK\r\n+OK\r\n+5\r\n")
        .unwrap();
    stream
}

/// A request that was not sent is retried over the next connection, without more time: after a
/// command timeout, nestlock's watchdog treats the hold of an unreported acquire as abandoned.
#[test]
fn what_is_asked_again_has_one_command_timeout() {
    const TIMEOUT: Duration = Duration::from_secs(2);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let (cut, is_to_be_cut) = mpsc::channel::<()>();
    let server = thread::spawn(move || {
        let full = greet(&listener);
        is_to_be_cut.recv().unwrap();
        drop(full);
        // the next connection reads everything, and never replies
        let mut silent = greet(&listener);
        let mut come = Vec::new();
        let _ = silent.read_to_end(&mut come);
        come.windows(6).any(|window| window == b"victim")
    });
    let own = Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    own.block_on(async {
        let mut dial = dialer_to(address, Handle::current());
        dial.settings.command_timeout = TIMEOUT;
        let link = Link::connect(dial, &Arc::new(Pace::new())).await.unwrap();
        // more than the socket takes
        let large = "x".repeat(1 << 20);
        for _ in 0..16 {
            assert!(
                poll_immediate(link.eval(
                    &call(&large),
                    link.until(clock::Instant::now()),
                    false,
                    None
                ))
                .await
                .is_none()
            );
        }
        let (asked, victim) = (Instant::now(), call("victim"));
        let told = async {
            (
                link.eval(&victim, link.until(clock::Instant::now()), false, None)
                    .await
                    .unwrap_err(),
                asked.elapsed(),
            )
        };
        let cutting = async {
            sleep(TIMEOUT.mul_f64(0.75)).await;
            cut.send(()).unwrap();
        };
        let ((error, took), ()) = tokio::join!(told, cutting);
        assert_eq!(error.kind(), StoreErrorKind::Timeout, "{error}");
        assert!(took < TIMEOUT.mul_f64(1.5), "{took:?}");
        link.abandon();
    });
    assert!(server.join().unwrap(), "the request was not retried");
}

/// A request in doubt over one connection is never settled by a reply over another one, even on
/// another link.
#[test]
fn no_two_connections_of_a_client_have_one_number() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let server = thread::spawn(move || [greet(&listener), greet(&listener)]);
    let own = Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    own.block_on(async {
        let dial = dialer_to(address, Handle::current());
        let mut hears = dial.clone();
        hears.settings.sink = Some(Arc::new(|_| {}));
        let pace = Arc::new(Pace::new());
        let scripts = Link::connect(dial, &pace).await.unwrap();
        let messages = Link::connect(hears, &pace).await.unwrap();
        assert_ne!(scripts.epoch(), messages.epoch());
        assert!(![scripts.epoch(), messages.epoch()].contains(&Epoch::NONE));
        scripts.abandon();
        messages.abandon();
    });
    drop(server.join().unwrap());
}
