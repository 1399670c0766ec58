//! Tests of the connection against a peer that the test plays, at the other end of a pipe whose
//! capacity the test chooses.

mod together;

use std::sync::Mutex as StdMutex;

use futures_util::future::{join_all, poll_immediate};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};

use super::{driver::Driver, keeper::Keeper, *};
use crate::{
    address::{Address, Server},
    error::StoreError,
    push::Push,
    request::Request,
    resp::{Frame, Value},
    settings::ServerSettings,
    stream::{self, ReadHalf},
};

const LONG: Duration = Duration::from_secs(60);

/// Returns a connection whose socket holds this many unread bytes, and its other end.
fn connect(bytes: usize, sink: Option<Sink>) -> (Arc<OwnConnection>, DuplexStream) {
    let (here, there) = duplex(bytes);
    let (reader, writer) = tokio::io::split(here);
    let own = Handle::current();
    (
        OwnConnection::start(
            ReadHalf::Played(reader),
            WriteHalf::Played(writer),
            sink,
            LONG,
            own,
        ),
        there,
    )
}

/// Sends a request that reads `*1 $length word`. Its number is its place among the connection's
/// requests, from 1.
fn ask(connection: &Arc<OwnConnection>, word: &str, limit: Duration) -> SentRequest {
    ask_at(connection, word, Instant::now(), limit)
}

fn ask_at(
    connection: &Arc<OwnConnection>,
    word: &str,
    asked: Instant,
    limit: Duration,
) -> SentRequest {
    let encode = |out: &mut Vec<u8>, number, texts: &mut Texts| {
        Request::Words(&[word]).encode(number, out, texts)
    };
    let asked = connection.send(Until::new(asked, limit), Reply::Script, encode);
    asked.unwrap_or_else(|failure| panic!("{failure:?}"))
}

/// Returns the reply of a script, with this code, to the request of this number.
fn says(number: i64, code: i64) -> String {
    format!(":{}\r\n", number * 16 + code)
}

/// Returns the replies of scripts to the requests of these numbers. Each code is the number modulo
/// 7: 1, 2, 3 ..
fn says_each(numbers: std::ops::RangeInclusive<i64>) -> String {
    numbers.map(|number| says(number, number % 7)).collect()
}

fn bytes(words: &[&str]) -> Vec<u8> {
    let mut out = Vec::new();
    for word in words {
        Request::Words(&[word]).encode(0, &mut out, &mut Texts::default());
    }
    out
}

async fn read(peer: &mut DuplexStream, words: &[&str]) {
    let expected = bytes(words);
    let mut come = vec![0; expected.len()];
    peer.read_exact(&mut come).await.unwrap();
    assert_eq!(
        String::from_utf8_lossy(&come),
        String::from_utf8_lossy(&expected)
    );
}

/// Wherever the connection is cut, a request that was not sent to its last byte was not executed,
/// and any other may have been.
#[tokio::test]
async fn a_cut_at_each_byte_tells_what_may_have_been_executed() {
    let words = ["first", "the second", "3"];
    let ends: Vec<usize> = (1..=words.len())
        .map(|many| bytes(&words[..many]).len())
        .collect();
    for cut in 1..=ends[2] {
        let (connection, mut peer) = connect(cut, None);
        let asked = join_all(words.map(|word| ask(&connection, word, LONG)));
        let cutting = async {
            // By now all that fits has arrived. Nothing is read, so nothing more arrives.
            tokio::time::sleep(Duration::from_millis(2)).await;
            let mut come = vec![0; cut];
            peer.read_exact(&mut come).await.unwrap();
            assert_eq!(come, bytes(&words)[..cut]);
            // Do not await after the read: it made room, which the driver would fill.
            connection.end("cut");
        };
        let (told, ()) = tokio::join!(asked, cutting);
        for (end, told) in ends.iter().zip(told) {
            let expected = if *end <= cut {
                Failure::Ended
            } else {
                Failure::Unsent
            };
            assert_eq!(told, Err(expected), "{cut} of {ends:?}");
        }
    }
}

/// The reply to a request whose caller has given up is not taken for the next one.
#[tokio::test]
async fn answers_find_their_callers_after_some_gave_up() {
    let (connection, mut peer) = connect(1 << 16, None);
    let late = ask(&connection, "late", Duration::from_millis(20));
    assert_eq!(late.await, Err(Failure::TimedOut));
    let dropped = ask(&connection, "dropped", LONG);
    drop(dropped);
    let kept = ask(&connection, "kept", LONG);
    let answers = async {
        read(&mut peer, &["late", "dropped", "kept"]).await;
        for byte in says_each(1..=3).bytes() {
            peer.write_all(&[byte]).await.unwrap();
            tokio::task::yield_now().await;
        }
    };
    assert_eq!(tokio::join!(kept, answers).0, Ok(Value::Integer(3)));
}

/// A request that the socket did not take in time fails as unsent, and is never sent.
#[tokio::test]
async fn what_was_not_sent_in_time_never_is() {
    let (connection, mut peer) = connect(bytes(&["first"]).len(), None);
    let first = ask(&connection, "first", LONG);
    let late = ask(&connection, "too late", Duration::from_millis(20));
    let last = ask(&connection, "last", LONG);
    assert_eq!(late.await, Err(Failure::LateUnsent));
    let answers = async {
        read(&mut peer, &["first", "last"]).await;
        peer.write_all((says(1, 1) + &says(3, 3)).as_bytes())
            .await
            .unwrap();
    };
    let (first, last, ()) = tokio::join!(first, last, answers);
    assert_eq!(
        (first, last),
        (Ok(Value::Integer(1)), Ok(Value::Integer(3)))
    );
}

/// The rest of a request that was sent in part cannot be dropped, and if it were sent late, the
/// request would be executed late: the connection ends.
#[tokio::test]
async fn a_late_request_that_was_partly_sent_ends_the_connection() {
    let (connection, mut peer) = connect(5, None);
    let first = ask(&connection, "first", Duration::from_millis(20));
    let next = ask(&connection, "next", LONG);
    assert_eq!(first.await, Err(Failure::Unsent));
    assert_eq!(next.await, Err(Failure::Unsent));
    let mut come = Vec::new();
    peer.read_to_end(&mut come).await.unwrap();
    assert_eq!(come, bytes(&["first"])[..5]);
    assert!(
        connection
            .send(
                Until::new(Instant::now(), LONG),
                Reply::Script,
                |_, _, _| None
            )
            .is_err()
    );
}

/// A request that is polled only once is sent, even while others are in flight, and even if its
/// caller was notified together with others.
#[tokio::test]
async fn what_is_polled_once_goes_out() {
    let (connection, mut peer) = connect(1 << 16, None);
    let mut first = ask(&connection, "first", LONG);
    let mut second = ask(&connection, "second", LONG);
    assert!(poll_immediate(&mut first).await.is_none());
    assert!(poll_immediate(&mut second).await.is_none());
    read(&mut peer, &["first"]).await;
    peer.write_all(says(1, 1).as_bytes()).await.unwrap();
    read(&mut peer, &["second"]).await;
    let mut third = ask(&connection, "third", LONG);
    assert!(poll_immediate(&mut third).await.is_none());
    peer.write_all(says(2, 2).as_bytes()).await.unwrap();
    read(&mut peer, &["third"]).await;
    let mut fourth = ask(&connection, "fourth", LONG);
    assert!(poll_immediate(&mut fourth).await.is_none());
    drop(ask(&connection, "fifth", LONG));
    read(&mut peer, &["fourth", "fifth"]).await;
    drop((ask(&connection, "6", LONG), ask(&connection, "7", LONG)));
    read(&mut peer, &["6", "7"]).await;
    // Five callers are notified together, and only one of them sends.
    let told = tokio::spawn(third);
    peer.write_all(says_each(3..=7).as_bytes()).await.unwrap();
    told.await.unwrap().unwrap();
    let mut last = ask(&connection, "last", LONG);
    assert!(poll_immediate(&mut last).await.is_none());
    read(&mut peer, &["last"]).await;
}

/// "What is sent after a drop comes second" holds without a poll.
#[tokio::test]
async fn a_request_is_sent_even_if_it_is_never_polled() {
    let (connection, mut peer) = connect(1 << 16, None);
    let first = ask(&connection, "first", LONG);
    let second = ask(&connection, "second", LONG);
    drop(second);
    read(&mut peer, &["first", "second"]).await;
    // Polled once, then never again: the next request takes it along.
    let mut third = ask(&connection, "third", LONG);
    assert!(poll_immediate(&mut third).await.is_none());
    drop(ask(&connection, "fourth", LONG));
    read(&mut peer, &["third", "fourth"]).await;
    drop((first, third));
}

#[tokio::test]
async fn what_no_server_says_ends_the_connection() {
    for nonsense in [
        "HTTP/1.1 400 Bad Request\r\n\r\n",
        ":17\r\n:2\r\n",
        ":17\r\n>3\r\n+subscribe\r\n+c\r\n:1\r\n",
        // The reply to another request, or to none.
        ":1\r\n",
        ":33\r\n",
        ":24\r\n",
        ":-9223372036854775808\r\n",
        "_\r\n",
        "+OK\r\n",
        "*0\r\n",
        "*2\r\n:2\r\n:1\r\n",
        "*2\r\n-ERR x\r\n:1\r\n",
        ">3\r\n+subscribe\r\n+c\r\n:1\r\n",
        "$99999999999\r\n",
        "*99999999\r\n",
        "",
    ] {
        let (connection, mut peer) = connect(1 << 16, None);
        let asked = ask(&connection, "asked", LONG);
        let ended = connection.ended();
        let talks = async {
            read(&mut peer, &["asked"]).await;
            peer.write_all(nonsense.as_bytes()).await.unwrap();
            // A close without a byte ends the connection, too.
            if nonsense.is_empty() {
                peer.shutdown().await.unwrap();
            }
        };
        let (told, (), ()) = tokio::join!(asked, talks, ended);
        assert!(
            matches!(told, Ok(Value::Integer(1)) | Err(Failure::Ended)),
            "{nonsense:?}: {told:?}"
        );
    }
}

/// Messages may arrive in between. A refusal is one reply for all channels, and does no harm.
#[tokio::test]
async fn a_subscription_counts_once_the_server_confirms_each_channel() {
    let heard: Arc<StdMutex<Vec<String>>> = Arc::default();
    let noted = Arc::clone(&heard);
    let sink: Sink = Arc::new(move |what| match what {
        Push::Message { channel, text } => {
            noted
                .lock()
                .unwrap()
                .push(format!("{channel} {}", String::from_utf8_lossy(text)));
        }
        Push::Missed | Push::Dropped { .. } => unreachable!(),
    });
    let (connection, mut peer) = connect(1 << 16, Some(sink));
    let subscribe = |acks| {
        let encode = |out: &mut Vec<u8>, number, texts: &mut Texts| {
            Request::Words(&["SUBSCRIBE"]).encode(number, out, texts)
        };
        connection
            .send(
                Until::new(Instant::now(), LONG),
                Reply::Pushes(acks),
                encode,
            )
            .unwrap_or_else(|failure| panic!("{failure:?}"))
    };
    let mut two = subscribe(2);
    let (refused, next) = (
        tokio::spawn(subscribe(3)),
        tokio::spawn(ask(&connection, "next", LONG)),
    );
    let (mut come, mut expected) = (Vec::new(), bytes(&["SUBSCRIBE"]));
    resp::write_ping(&mut expected, 2);
    expected.extend(bytes(&["SUBSCRIBE"]));
    resp::write_ping(&mut expected, 4);
    expected.extend(bytes(&["next"]));
    come.resize(expected.len(), 0);
    peer.read_exact(&mut come).await.unwrap();
    assert_eq!(
        String::from_utf8_lossy(&come),
        String::from_utf8_lossy(&expected)
    );
    peer.write_all(b">3\r\n+subscribe\r\n+a\r\n:1\r\n>3\r\n+message\r\n+a\r\n+0\r\n")
        .await
        .unwrap();
    while heard.lock().unwrap().is_empty() {
        tokio::task::yield_now().await;
    }
    assert!(poll_immediate(&mut two).await.is_none(), "one of two");
    peer.write_all(b">3\r\n+subscribe\r\n+b\r\n:2\r\n>3\r\n+message\r\n+b\r\n+1\r\n")
        .await
        .unwrap();
    while heard.lock().unwrap().len() < 2 {
        tokio::task::yield_now().await;
    }
    assert!(
        poll_immediate(&mut two).await.is_none(),
        "its PING has no reply yet"
    );
    peer.write_all(b"$1\r\n2\r\n").await.unwrap();
    assert_eq!(two.await, Ok(Value::Null));
    peer.write_all(b"-NOPERM no such channel\r\n>3\r\n+message\r\n+a\r\n+0\r\n$1\r\n4\r\n:81\r\n")
        .await
        .unwrap();
    assert_eq!(
        refused.await.unwrap(),
        Err(Failure::Refused("NOPERM no such channel".into()))
    );
    assert_eq!(next.await.unwrap(), Ok(Value::Integer(1)));
    assert_eq!(*heard.lock().unwrap(), ["a 0", "b 1", "a 0"]);
}

/// With many tasks on many threads, a socket that is always full, and replies in pieces, each
/// request gets its own reply. The test repeats this, because it takes a few runs until the socket
/// becomes writable before the writer has recorded that it was full.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn each_of_many_has_its_own_answer() {
    for _ in 0..60 {
        let (connection, peer) = connect(300, None);
        let peer = tokio::spawn(answer_in_pieces(peer));
        let tasks = (0..64_i64).map(|task| {
            let connection = Arc::clone(&connection);
            tokio::spawn(async move {
                for n in 0..100 {
                    let number = task * 1_000 + n;
                    let encode = |out: &mut Vec<u8>, named: u64, texts: &mut Texts| {
                        let word = format!("{named} {number}");
                        Request::Words(&[&word]).encode(named, out, texts)
                    };
                    let asked = connection
                        .send(Until::new(Instant::now(), LONG), Reply::Script, encode)
                        .unwrap();
                    // Some requests are dropped.
                    if number % 7 == 0 {
                        drop(asked);
                    } else {
                        assert_eq!(asked.await, Ok(Value::Array(vec![Value::Integer(number)])));
                    }
                }
            })
        });
        for ended in join_all(tasks.collect::<Vec<_>>()).await {
            ended.unwrap();
        }
        connection.end("over");
        peer.await.unwrap();
    }
}

/// Replies to each request with the request's number and the number in its word, until the client
/// stops reading.
async fn answer_in_pieces(peer: DuplexStream) {
    let (mut requests, mut answers) = tokio::io::split(peer);
    let (mut come, mut chunk) = (Vec::new(), [0; 77]);
    while let Ok(1..) = requests
        .read(&mut chunk)
        .await
        .inspect(|many| come.extend_from_slice(&chunk[..*many]))
    {
        // A request is an array of one word, so it can be decoded as a reply.
        while let Ok((Frame::Value(Value::Array(words)), length)) =
            resp::decode(&come, &mut resp::Scan::default())
        {
            come.drain(..length);
            let (named, number) = words[0].as_str().unwrap().split_once(' ').unwrap();
            let answer = format!("*2\r\n:{named}\r\n:{number}\r\n");
            for piece in answer.as_bytes().chunks(2) {
                if answers.write_all(piece).await.is_err() {
                    return;
                }
            }
        }
    }
}

/// A request that another connection left unsent has less time left than those in front of it.
#[tokio::test]
async fn time_is_over_for_each_by_itself() {
    let (connection, mut peer) = connect(bytes(&["first"]).len(), None);
    while lock(&connection.out).alarm.is_none() {
        tokio::task::yield_now().await;
    }
    let now = Instant::now();
    let first = ask_at(&connection, "first", now, LONG);
    let kept = ask_at(&connection, "kept", now, LONG);
    let late = ask_at(
        &connection,
        "too late",
        now - LONG + Duration::from_millis(30),
        LONG,
    );
    let last = ask_at(&connection, "last", now, LONG);
    // Nothing flushes the buffer at that time: the keeper expires the request, though its alarm was
    // set for later.
    let asked = std::time::Instant::now();
    assert_eq!(late.await, Err(Failure::LateUnsent));
    assert!(asked.elapsed() < Duration::from_secs(5));
    let answers = async {
        read(&mut peer, &["first", "kept", "last"]).await;
        peer.write_all((says_each(1..=2) + &says(4, 3)).as_bytes())
            .await
            .unwrap();
    };
    let (first, kept, last, ()) = tokio::join!(first, kept, last, answers);
    assert_eq!(
        (first, kept, last),
        (
            Ok(Value::Integer(1)),
            Ok(Value::Integer(2)),
            Ok(Value::Integer(3))
        )
    );
}

/// The runtime that reads replies stalls, and later ends. Each time, the client's own thread takes
/// over.
#[test]
fn the_runtime_that_reads_may_stop() {
    use tokio::runtime::Builder;
    let own = Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    let users = Builder::new_current_thread().enable_all().build().unwrap();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let answers = std::thread::spawn(move || {
        use std::io::{Read, Write};
        let (mut stream, mut chunk) = (listener.accept().unwrap().0, [0; 1 << 10]);
        // The client sends one request at a time, so each read is one request.
        let mut number = 0;
        while let Ok(1..) = stream.read(&mut chunk) {
            number += 1;
            stream.write_all(says(number, 1).as_bytes()).unwrap();
        }
    });
    let connection = own.block_on(own.spawn(async move {
        let at = Address::Tcp(Server::new(address.ip().to_string(), address.port()));
        let (reader, writer) = stream::open(&ServerSettings::new(at)).await.unwrap();
        OwnConnection::start(reader, writer, None, LONG, Handle::current())
    }));
    let connection = connection.unwrap();
    let is_elsewhere = |expected: bool| {
        let began = std::time::Instant::now();
        while connection.is_elsewhere() != expected {
            assert!(
                began.elapsed() < Duration::from_secs(5),
                "elsewhere: {}",
                !expected
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    let asks = || futures::executor::block_on(ask(&connection, "x", LONG));
    connection.drive_on(users.handle());
    assert_eq!(asks(), Ok(Value::Integer(1)));
    for _ in 0..3 {
        // The runtime is polled: it reads, as soon as it may again.
        users.block_on(async {
            let began = std::time::Instant::now();
            while !connection.is_elsewhere() {
                assert!(began.elapsed() < Duration::from_secs(5));
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            assert_eq!(ask(&connection, "x", LONG).await, Ok(Value::Integer(1)));
        });
        // It is not polled.
        assert_eq!(asks(), Ok(Value::Integer(1)));
        is_elsewhere(false);
    }
    users.block_on(async {
        while !connection.is_elsewhere() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    });
    drop(users);
    is_elsewhere(false);
    assert_eq!(asks(), Ok(Value::Integer(1)));
    connection.end("over");
    answers.join().unwrap();
}

/// The runtime stalls when it has read more than it has delivered, since one pass delivers a
/// limited number. The rest is not lost.
#[test]
fn what_was_read_is_delivered_after_its_reader_stops() {
    use tokio::runtime::Builder;
    const MANY: usize = 40;
    // `NOTIFY_BATCH / 2`: after this many, the driver lets the callers run.
    let asked = ["x"; 8];
    let length = bytes(&asked).len();
    let own = Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    let users = Builder::new_current_thread().enable_all().build().unwrap();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let peer = std::thread::spawn(move || {
        use std::io::{Read, Write};
        let mut stream = listener.accept().unwrap().0;
        stream.read_exact(&mut vec![0; length]).unwrap();
        let messages = ">3\r\n+message\r\n+c\r\n$1\r\n0\r\n".repeat(MANY);
        stream
            .write_all(
                format!(
                    "{}{messages}",
                    says_each(1..=i64::try_from(asked.len()).unwrap())
                )
                .as_bytes(),
            )
            .unwrap();
        // Keep the socket open until the client closes it.
        let _ = stream.read(&mut [0]);
    });
    let heard = Arc::new(AtomicU64::new(0));
    let counts = Arc::clone(&heard);
    let sink: Sink = Arc::new(move |_| _ = counts.fetch_add(1, Ordering::SeqCst));
    let connection = own.block_on(own.spawn(async move {
        let at = Address::Tcp(Server::new(address.ip().to_string(), address.port()));
        let (reader, writer) = stream::open(&ServerSettings::new(at)).await.unwrap();
        OwnConnection::start(reader, writer, Some(sink), LONG, Handle::current())
    }));
    let connection = connection.unwrap();
    connection.drive_on(users.handle());
    let there = Arc::clone(&connection);
    let stands_still = async move {
        while !there.is_elsewhere() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let told = join_all(asked.map(|word| ask(&there, word, LONG))).await;
        assert!(told.iter().all(Result::is_ok), "{told:?}");
        assert!(
            heard.load(Ordering::SeqCst) < MANY as u64,
            "all messages were delivered at once"
        );
        let began = std::time::Instant::now();
        while heard.load(Ordering::SeqCst) < MANY as u64 {
            assert!(
                began.elapsed() < Duration::from_secs(5),
                "{heard:?} of {MANY}"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    // A spawned task, so that it runs before the driver is polled again.
    users.block_on(async { tokio::spawn(stands_still).await.unwrap() });
    connection.end("over");
    peer.join().unwrap();
}

/// A runtime that is no longer polled keeps a task of each connection that it was to read, but not
/// the connection.
#[test]
fn no_task_keeps_a_connection_that_has_ended() {
    let own = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    let users = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let (connection, _peer) = own.block_on(async { connect(1 << 10, None) });
    connection.drive_on(users.handle());
    connection.end("over");
    let known = Arc::downgrade(&connection);
    drop(connection);
    let began = std::time::Instant::now();
    while known.strong_count() > 0 {
        assert!(began.elapsed() < Duration::from_secs(5));
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A reply that never ends does not count as one, however much of it arrives.
#[tokio::test]
async fn a_peer_that_only_trickles_is_not_heard() {
    let (connection, mut peer) = connect(1 << 16, None);
    let asked = ask(&connection, "asked", LONG);
    read(&mut peer, &["asked"]).await;
    peer.write_all(b"*3\r\n:1\r\n").await.unwrap();
    for _ in 0..3 {
        peer.write_all(b"*1\r\n").await.unwrap();
        tokio::task::yield_now().await;
        assert!(!connection.had_reply());
    }
    assert!(connection.reads.load(Ordering::Acquire) > 0);
    peer.write_all(b":1\r\n:2\r\n").await.unwrap();
    asked.await.unwrap();
    assert!(connection.had_reply() && !connection.had_reply());
    // Nor does a pushed message count.
    let heard = connection.reads.load(Ordering::Acquire);
    peer.write_all(b">3\r\n+message\r\n+a\r\n+0\r\n")
        .await
        .unwrap();
    while connection.reads.load(Ordering::Acquire) == heard {
        tokio::task::yield_now().await;
    }
    assert!(!connection.had_reply());
}

struct Panics;

impl Wake for Panics {
    fn wake(self: Arc<Self>) {
        panic!("a waker");
    }
}

/// A panic in a user's waker ends neither the driver nor the keeper.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waker_that_panics_affects_no_other() {
    let sink: Sink = Arc::new(|_| panic!("a sink"));
    let (connection, mut peer) = connect(1 << 16, Some(sink));
    let waker = Waker::from(Arc::new(Panics));
    let ask_and_panic = |word, limit| {
        let mut asked = ask(&connection, word, limit);
        // Otherwise the first poll would call the waker, to be polled again.
        asked.was_polled = true;
        assert!(
            Pin::new(&mut asked)
                .poll(&mut Context::from_waker(&waker))
                .is_pending()
        );
        asked
    };
    let asked = (
        ask_and_panic("answered", LONG),
        ask(&connection, "next", LONG),
    );
    read(&mut peer, &["answered"]).await;
    peer.write_all(b":17\r\n>3\r\n+message\r\n+a\r\n+0\r\n:34\r\n")
        .await
        .unwrap();
    assert_eq!(asked.1.await, Ok(Value::Integer(2)));
    assert_eq!(asked.0.await, Ok(Value::Integer(1)));
    // The same for requests without a reply.
    let late = (
        ask_and_panic("late", Duration::from_millis(20)),
        ask(&connection, "later", Duration::from_millis(60)),
    );
    assert_eq!(late.1.await, Err(Failure::TimedOut));
    assert_eq!(late.0.await, Err(Failure::TimedOut));
    assert!(!lock(&connection.out).is_ended);
}

/// If the keeper or the driver on the client's own thread ends, for whatever reason, so does the
/// connection: no request may wait for a reply that would never be delivered.
#[tokio::test]
async fn a_connection_ends_with_who_works_for_it() {
    let (connection, _peer) = connect(1 << 16, None);
    drop(Keeper(Arc::clone(&connection)));
    assert!(lock(&connection.out).is_ended);
    let (connection, _peer) = connect(1 << 16, None);
    let number = lock(&connection.incoming).as_ref().unwrap().driver;
    drop(Driver::new(&connection, number, true));
    assert!(lock(&connection.out).is_ended);
}

/// A PING that proves a refusal has less time than the requests in front of it. A request behind it
/// still times out on time.
#[tokio::test]
async fn a_request_behind_a_proof_is_late_in_time() {
    let (here, mut peer) = duplex(1 << 16);
    let (reader, writer) = tokio::io::split(here);
    let limit = Duration::from_millis(100);
    let connection = OwnConnection::start(
        ReadHalf::Played(reader),
        WriteHalf::Played(writer),
        None,
        limit,
        Handle::current(),
    );
    let mut first = ask(&connection, "first", LONG);
    assert!(poll_immediate(&mut first).await.is_none());
    let long = ask(&connection, "long", LONG);
    peer.write_all(b"-ERR no\r\n").await.unwrap();
    while lock(&connection.out).waiting.len() < 3 {
        tokio::task::yield_now().await;
    }
    let asked = std::time::Instant::now();
    assert_eq!(
        ask(&connection, "late", limit).await,
        Err(Failure::TimedOut)
    );
    assert!(asked.elapsed() < LONG / 10, "{:?}", asked.elapsed());
    drop((first, long));
}

/// A loading server refuses SSUBSCRIBE and the PING behind it. The subscription fails with the
/// first error.
#[tokio::test]
async fn a_subscription_whose_ping_is_refused_is_told() {
    let (connection, mut peer) = connect(1 << 16, None);
    let asked = connection.send(
        Until::new(Instant::now(), LONG),
        Reply::Echo(None),
        |out, number, texts| {
            Request::Words(&["SSUBSCRIBE", "c"]).encode(number, out, texts);
            resp::write_ping(out, number);
            None
        },
    );
    let asked = asked.unwrap_or_else(|failure| panic!("{failure:?}"));
    peer.write_all(b"-LOADING a\r\n-LOADING b\r\n")
        .await
        .unwrap();
    while lock(&connection.out).waiting.len() < 2 {
        tokio::task::yield_now().await;
    }
    peer.write_all(b"-LOADING c\r\n").await.unwrap();
    assert_eq!(asked.await, Err(Failure::Refused("LOADING a".into())));
}

/// A request that follows a refusal has a PING behind it, so that its own refusal is delivered
/// after one round trip, no matter which PING proved the first one.
#[tokio::test]
async fn what_is_asked_after_a_refusal_has_its_ping_along() {
    let sent = async |peer: &mut DuplexStream| together::words_of(peer).await.swap_remove(0);
    let (connection, mut peer) = connect(1 << 16, None);
    let refused = ask(&connection, "first", LONG);
    let heartbeat = connection
        .ping(Until::new(Instant::now(), LONG))
        .unwrap_or_else(|failure| panic!("{failure:?}"));
    let answers = async {
        let sent = [sent(&mut peer).await, sent(&mut peer).await];
        peer.write_all(b"-LOADING x\r\n-LOADING x\r\n")
            .await
            .unwrap();
        sent
    };
    let loading = Err(Failure::Refused("LOADING x".into()));
    let told = tokio::join!(refused, heartbeat, answers);
    assert_eq!(
        told,
        (
            loading.clone(),
            loading,
            ["first", "PING"].map(str::to_owned)
        )
    );
    let _again = ask(&connection, "again", LONG);
    assert_eq!(sent(&mut peer).await, "again");
    let behind = tokio::time::timeout(Duration::from_secs(10), sent(&mut peer)).await;
    assert_eq!(behind.as_deref(), Ok("PING"));
}

/// If a server does not know CLIENT SETINFO, no PING follows the requests after the handshake.
#[tokio::test]
async fn what_comes_after_a_refused_greeting_goes_alone() {
    let (connection, mut peer) = connect(1 << 16, None);
    let until = Until::new(Instant::now(), LONG);
    let greeting = connection.send(until, Reply::Greeting, |out, number, texts| {
        Request::Words(&["SETINFO"]).encode(number, out, texts);
        None
    });
    let greeting = greeting.unwrap_or_else(|failure| panic!("{failure:?}"));
    let proof = connection
        .ping(until)
        .unwrap_or_else(|failure| panic!("{failure:?}"));
    let answers = async {
        let sent = [
            together::words_of(&mut peer).await,
            together::words_of(&mut peer).await,
        ];
        peer.write_all(format!("-ERR unknown\r\n+{}\r\n", sent[1][1]).as_bytes())
            .await
            .unwrap();
    };
    let (greeting, proof, ()) = tokio::join!(greeting, proof, answers);
    assert_eq!(
        (greeting, proof),
        (Err(Failure::Refused("ERR unknown".into())), Ok(Value::Null))
    );
    let (first, second) = (ask(&connection, "first", LONG), async {
        let sent = together::words_of(&mut peer).await;
        peer.write_all(says(3, 1).as_bytes()).await.unwrap();
        sent
    });
    assert_eq!(
        tokio::join!(first, second),
        (Ok(Value::Integer(1)), vec!["first".to_owned()])
    );
    let (second, sent) = (
        ask(&connection, "second", LONG),
        together::words_of(&mut peer),
    );
    let ((), sent) = tokio::join!(async { drop(poll_immediate(second).await) }, sent);
    assert_eq!(sent, ["second"]);
}

/// While all replies are refusals and more requests are in flight, each refusal is delivered with
/// the reply to the next PING.
#[tokio::test]
async fn a_stream_of_refusals_is_told() {
    let (connection, mut peer) = connect(1 << 16, None);
    let peer = tokio::spawn(async move {
        // Each reply comes when two more requests are in flight.
        let mut behind = std::collections::VecDeque::new();
        loop {
            let words = together::words_of(&mut peer).await;
            let is_over = words == ["over"];
            behind.push_back(words);
            while behind.len() > 2 || is_over && !behind.is_empty() {
                let reply = match behind.pop_front().unwrap().as_slice() {
                    [_, word] => format!("+{word}\r\n"),
                    _ => "-READONLY x\r\n".into(),
                };
                peer.write_all(reply.as_bytes()).await.unwrap();
            }
            if is_over {
                // The PING that proves the last refusals.
                let ping = together::words_of(&mut peer).await;
                peer.write_all(format!("+{}\r\n", ping[1]).as_bytes())
                    .await
                    .unwrap();
                return peer;
            }
        }
    });
    let mut asked = Vec::new();
    for _ in 0..50 {
        asked.push(tokio::spawn(ask(&connection, "x", LONG)));
        tokio::task::yield_now().await;
    }
    let began = std::time::Instant::now();
    while asked.iter().filter(|asked| asked.is_finished()).count() < 40 {
        assert!(
            began.elapsed() < Duration::from_secs(5),
            "refusals are delivered only when nothing is in flight"
        );
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let over = tokio::spawn(ask(&connection, "over", LONG));
    for asked in join_all(asked).await {
        assert_eq!(asked.unwrap(), Err(Failure::Refused("READONLY x".into())));
    }
    drop((over, peer));
}
