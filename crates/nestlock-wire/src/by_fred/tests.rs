//! The second wire against a server that the test plays.

use bytes::{Buf, BytesMut};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
    sync::mpsc,
};

use super::*;
use crate::{
    resp::{self, Frame, Scan},
    tests::{call, dialer_to},
};

/// Plays a server: replies to the handshake and to scripts, and reports each EVAL or EVALSHA,
/// and the HELLO with the connection's name.
async fn play(
    listener: TcpListener,
    scripts: mpsc::UnboundedSender<String>,
    says: fn(usize, &str) -> Option<String>,
) {
    let (mut stream, mut come, mut scan, mut many) = (
        listener.accept().await.unwrap().0,
        BytesMut::new(),
        Scan::default(),
        0,
    );
    loop {
        // fred sends HELLO as a line
        let is_line = come.first().is_some_and(|first| *first != b'*') && come.ends_with(b"\r\n");
        let words = match resp::decode(&come, &mut scan) {
            _ if is_line => {
                come.clear();
                vec![Value::text("HELLO")]
            }
            Ok((Frame::Value(Value::Array(words)), length)) => {
                come.advance(length);
                words
            }
            _ if stream.read_buf(&mut come).await.unwrap_or(0) == 0 => return,
            _ => continue,
        };
        let words: Vec<&str> = words.iter().filter_map(Value::as_str).collect();
        let reply = match &*words {
            ["HELLO", rest @ ..] => {
                let _ = if rest.is_empty() {
                    Ok(())
                } else {
                    scripts.send("HELLO".to_owned())
                };
                Some("%1\r\n$5\r\nproto\r\n:3\r\n".into())
            }
            ["INFO", ..] => Some("+redis_version:7.0.15\r\n".into()),
            ["CLIENT", "ID"] => Some(":1\r\n".into()),
            ["PING", word] => Some(format!("+{word}\r\n")),
            [verb @ ("EVAL" | "EVALSHA"), .., number] => {
                many += 1;
                let _ = scripts.send((*verb).to_owned());
                says(many, number)
            }
            _ => Some("+OK\r\n".into()),
        };
        let _ = stream.write_all(reply.unwrap_or_default().as_bytes()).await;
    }
}

/// Connects to a server whose reply to the n-th script is `says(n, number)`, counted from 1.
/// Also returns the commands that run scripts there.
async fn connected(
    says: fn(usize, &str) -> Option<String>,
) -> (Arc<FredConnection>, mpsc::UnboundedReceiver<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (scripts, mut run) = mpsc::unbounded_channel();
    tokio::spawn(play(listener, scripts, says));
    let dial = dialer_to(address, Handle::current());
    let connection = connect(&dial.settings)
        .await
        .unwrap_or_else(|refused| panic!("{refused:?}"));
    // the HELLO with the name, which the client does not wait for
    assert_eq!(run.recv().await.unwrap(), "HELLO");
    (connection, run)
}

/// Returns what a script that does nothing replies to the request of this number.
fn well(number: &str) -> Option<String> {
    number
        .parse::<i64>()
        .ok()
        .map(|number| format!(":{}\r\n", number * 16))
}

const LONG: Duration = Duration::from_secs(30);

/// The request that is created first is not always queued first.
#[tokio::test]
async fn no_digest_is_queued_before_its_text() {
    let (connection, mut run) = connected(|_, number| well(number)).await;
    let call = call("l");
    let never = connection.request(Request::Digest(&call, false), LONG);
    let late = connection.request(Request::Digest(&call, false), LONG);
    drop(never);
    for asked in [
        connection.request(Request::Digest(&call, false), LONG),
        late,
    ] {
        assert!(asked.await.is_ok());
        assert_eq!(run.recv().await.unwrap(), "EVAL");
    }
    assert!(
        connection
            .request(Request::Digest(&call, false), LONG)
            .await
            .is_ok()
    );
    assert_eq!(run.recv().await.unwrap(), "EVALSHA");
}

/// The call that sent the text was dropped, and the server refused it without reading the text.
#[tokio::test]
async fn a_text_goes_again_after_a_call_that_was_dropped() {
    let refuses = |many, number: &str| {
        if many == 1 {
            Some("-LOADING x\r\n".into())
        } else {
            well(number)
        }
    };
    let (connection, mut run) = connected(refuses).await;
    let call = call("l");
    let mut dropped = Box::pin(connection.request(Request::Digest(&call, false), LONG));
    assert!(dropped.as_mut().now_or_never().is_none());
    drop(dropped);
    // a spawned task reads the reply to the dropped call
    while connection.texts().knows(call.script.text(false).0) {
        tokio::task::yield_now().await;
    }
    assert!(
        connection
            .request(Request::Digest(&call, false), LONG)
            .await
            .is_ok()
    );
    assert_eq!(
        [run.recv().await.unwrap(), run.recv().await.unwrap()],
        ["EVAL"; 2]
    );
}

/// The text may or may not have arrived.
#[tokio::test]
async fn a_text_goes_again_after_a_call_that_failed() {
    let (connection, mut run) =
        connected(|many, number| if many == 1 { None } else { well(number) }).await;
    let call = call("l");
    let late = connection
        .request(Request::Digest(&call, false), LONG)
        .await;
    assert_eq!(late, Err(Failure::TimedOut));
    // the peer swallowed a reply, so its later ones are not trusted; the request is still sent
    let _ = connection
        .request(Request::Digest(&call, false), LONG)
        .await;
    assert_eq!(
        [run.recv().await.unwrap(), run.recv().await.unwrap()],
        ["EVAL"; 2]
    );
}
