//! Tests of bundles: several requests that are sent as one.

use proptest::prelude::*;

use super::*;
use crate::tests::one_of_two;

/// Sends a script that the server has, as a request that can be bundled.
fn ask_part(connection: &Arc<OwnConnection>, name: &str, limit: Duration) -> SentRequest {
    let call = one_of_two(name, name.ends_with('o'));
    let encode = |out: &mut Vec<u8>, number, _: &mut Texts| {
        call.encode_part(call.script.text(false).1, number, out)
    };
    let asked = connection.send(Until::new(Instant::now(), limit), Reply::Script, encode);
    asked.unwrap_or_else(|failure| panic!("{failure:?}"))
}

/// Sends a request that reads `*1 $length number word`.
fn ask_numbered(connection: &Arc<OwnConnection>, word: &str, limit: Duration) -> SentRequest {
    let encode = |out: &mut Vec<u8>, number, texts: &mut Texts| {
        Request::Words(&[&format!("{number} {word}")]).encode(number, out, texts)
    };
    let asked = connection.send(Until::new(Instant::now(), limit), Reply::Script, encode);
    asked.unwrap_or_else(|failure| panic!("{failure:?}"))
}

/// Returns the words of the next request that is not a PING. Replies to the PINGs: after a refusal,
/// one follows all that is written.
async fn next(peer: &mut DuplexStream) -> Vec<String> {
    loop {
        let words = words_of(peer).await;
        if words[0] != "PING" {
            return words;
        }
        pong(peer, &words).await;
    }
}

async fn pong(peer: &mut DuplexStream, ping: &[String]) {
    peer.write_all(format!("+{}\r\n", ping[1]).as_bytes())
        .await
        .unwrap();
}

/// Reads the next request. Returns its words.
pub(super) async fn words_of(peer: &mut DuplexStream) -> Vec<String> {
    async fn number(peer: &mut DuplexStream) -> usize {
        let mut line = Vec::new();
        while !line.ends_with(b"\r\n") {
            line.push(peer.read_u8().await.unwrap());
        }
        String::from_utf8(line[1..line.len() - 2].to_vec())
            .unwrap()
            .parse()
            .unwrap()
    }
    let mut words = Vec::new();
    for _ in 0..number(peer).await {
        let mut word = vec![0; number(peer).await + 2];
        peer.read_exact(&mut word).await.unwrap();
        words.push(String::from_utf8(word[..word.len() - 2].to_vec()).unwrap());
    }
    words
}

/// Returns the names in a request or a bundle, and checks that each has the digit of its script.
fn names(words: &[String]) -> Vec<String> {
    match words {
        [word] => vec![word.clone()],
        [verb, _, many, rest @ ..] if verb.starts_with("EVAL") => {
            let (keys, args) = rest.split_at(many.parse().unwrap());
            let args = args.split_last().unwrap().1;
            let each = args.len() / keys.len();
            for (key, args) in keys.iter().zip(args.chunks(each)) {
                assert_eq!(args[each - 3..], ["owner", "2", ""], "{key}");
                let digit = if key.ends_with('o') { "2" } else { "1" };
                assert!(each == 3 || args[0] == digit, "{key} is {}", args[0]);
            }
            keys.to_vec()
        }
        other => panic!("{other:?}"),
    }
}

/// Sends a request, so that others gather while it is in flight, and two that can be bundled.
/// Replies to the first, and returns the two.
async fn two(connection: &Arc<OwnConnection>, peer: &mut DuplexStream) -> [SentRequest; 2] {
    let number = i64::try_from(lock(&connection.out).sent).unwrap() + 1;
    let first = ask(connection, "first", LONG);
    assert_eq!(names(&next(peer).await), ["first"]);
    let two = ["a", "bo"].map(|name| ask_part(connection, name, LONG));
    peer.write_all(says(number, 1).as_bytes()).await.unwrap();
    first.await.unwrap();
    two
}

/// Replies to the request of these words, which end with its number. In `reply`, `{n}` stands for
/// that number, and `{1}` for an integer reply with the code 1. After a refusal, also replies to
/// the PING that proves it.
async fn answer(peer: &mut DuplexStream, words: &[String], reply: &str) {
    let number: i64 = words.last().unwrap().parse().unwrap();
    let reply = reply
        .replace("{n}", &number.to_string())
        .replace("{1}", &(number * 16 + 1).to_string());
    peer.write_all(reply.as_bytes()).await.unwrap();
    if reply.starts_with('-') {
        let ping = words_of(peer).await;
        assert_eq!(ping[0], "PING");
        pong(peer, &ping).await;
    }
}

#[tokio::test]
async fn each_has_an_answer_of_its_own() {
    let (connection, mut peer) = connect(1 << 16, None);
    for (reply, expected) in [
        (
            "*3\r\n:{n}\r\n:1\r\n*2\r\n:0\r\n:9\r\n",
            [
                Ok(Value::Integer(1)),
                Ok(Value::Array(vec![Value::Integer(0), Value::Integer(9)])),
            ],
        ),
        (
            "*3\r\n:{n}\r\n-OOM x\r\n_\r\n",
            [Err(Failure::Refused("OOM x".into())), Ok(Value::Null)],
        ),
        // An unknown error proves nothing: either script may have been executed.
        (
            "-ERR x\r\n",
            [
                Err(Failure::Refused("ERR x".into())),
                Err(Failure::Refused("ERR x".into())),
            ],
        ),
    ] {
        let [a, b] = two(&connection, &mut peer).await;
        let words = next(&mut peer).await;
        assert_eq!(names(&words), ["a", "bo"]);
        answer(&mut peer, &words, reply).await;
        assert_eq!([a.await, b.await], expected);
    }
    let nonsense = [
        "*2\r\n:{n}\r\n:1\r\n",
        ":{1}\r\n",
        "*4\r\n:{n}\r\n:1\r\n:1\r\n:1\r\n",
    ];
    for reply in nonsense
        .into_iter()
        .chain(["*3\r\n:1\r\n:1\r\n:1\r\n", "*2\r\n:1\r\n:1\r\n"])
    {
        let (connection, mut peer) = connect(1 << 16, None);
        let [a, b] = two(&connection, &mut peer).await;
        let words = next(&mut peer).await;
        answer(&mut peer, &words, reply).await;
        assert_eq!(
            [a.await, b.await],
            [Err(Failure::Ended), Err(Failure::Ended)]
        );
        assert!(connection.has_ended());
    }
}

/// A bundle carries its text the first time, and again if the server has lost it. If the user lacks
/// permission for a key, requests are no longer bundled.
#[tokio::test]
async fn what_is_refused_together_was_not_executed() {
    let (connection, mut peer) = connect(1 << 16, None);
    for (verb, reply) in [
        ("EVAL", "-LOADING x\r\n"),
        ("EVAL", "*3\r\n:{n}\r\n:1\r\n:1\r\n"),
        ("EVALSHA", "-NOSCRIPT x\r\n"),
        ("EVAL", "*3\r\n:{n}\r\n:1\r\n:1\r\n"),
        ("EVALSHA", "-NOPERM x\r\n"),
    ] {
        let [a, b] = two(&connection, &mut peer).await;
        let words = next(&mut peer).await;
        assert_eq!(
            (&*words[0], words[1].len() == 40),
            (verb, verb == "EVALSHA")
        );
        answer(&mut peer, &words, reply).await;
        let told = [a.await, b.await];
        if let Some(error) = reply.strip_prefix('-') {
            let error = error.trim_end().to_owned();
            // Each of them would be refused alone, too.
            let is_of_all = error.starts_with("LOADING");
            let refused = if is_of_all {
                Failure::Refused(error)
            } else {
                Failure::RefusedTogether(error)
            };
            assert_eq!(told, [Err(refused.clone()), Err(refused)]);
            assert!(!StoreError::from(told[0].clone().unwrap_err()).may_have_executed());
        }
    }
    let [a, b] = two(&connection, &mut peer).await;
    for name in ["a", "bo"] {
        let words = next(&mut peer).await;
        assert_eq!(names(&words), [name], "alone from then on");
        answer(&mut peer, &words, ":{1}\r\n").await;
    }
    assert_eq!(
        [a.await, b.await],
        [Ok(Value::Integer(1)), Ok(Value::Integer(1))]
    );
}

/// Each script's text is sent once, in an unbundled request, and again after the server has
/// forgotten a script, or refused one unread.
#[tokio::test]
async fn a_text_goes_along_once() {
    let (connection, mut peer) = connect(1 << 16, None);
    for (name, verb, reply) in [
        ("a", "EVAL", ":{1}\r\n"),
        ("a", "EVALSHA", ":{1}\r\n"),
        ("bo", "EVAL", ":{1}\r\n"),
        ("a", "EVALSHA", "-NOSCRIPT x\r\n"),
        ("bo", "EVAL", ":{1}\r\n"),
        ("a", "EVAL", "-OOM x\r\n"),
        ("a", "EVALSHA", "-BUSY x\r\n"),
        ("a", "EVAL", ":{1}\r\n"),
        ("a", "EVALSHA", ":{1}\r\n"),
    ] {
        let asked = ask_script(&connection, name, LONG);
        let words = next(&mut peer).await;
        assert_eq!(
            (&*words[0], names(&words)),
            (verb, vec![name.to_owned()]),
            "{reply}"
        );
        answer(&mut peer, &words, reply).await;
        assert_eq!(asked.await.is_ok(), reply.starts_with(':'));
    }
}

/// Sends a script by its text, or by its digest if its text was sent before.
fn ask_script(connection: &Arc<OwnConnection>, name: &str, limit: Duration) -> SentRequest {
    let call = one_of_two(name, name.ends_with('o'));
    let encode = |out: &mut Vec<u8>, number, texts: &mut Texts| {
        Request::Together(&call).encode(number, out, texts)
    };
    let asked = connection.send(Until::new(Instant::now(), limit), Reply::Script, encode);
    asked.unwrap_or_else(|failure| panic!("{failure:?}"))
}

/// A text is sent again if the call that carried it was dropped and the server refused it unread,
/// or if that call was never sent.
#[tokio::test]
async fn a_text_goes_again_after_a_call_is_dropped_or_unsent() {
    let (connection, mut peer) = connect(1 << 12, None);
    drop(ask_script(&connection, "a", LONG));
    let words = next(&mut peer).await;
    assert_eq!(
        words[0], "EVAL",
        "it is sent even though it was dropped before it was polled"
    );
    answer(&mut peer, &words, "-LOADING x\r\n").await;
    while !lock(&connection.out).waiting.is_empty() {
        tokio::task::yield_now().await;
    }
    let asked = ask_script(&connection, "a", LONG);
    let words = next(&mut peer).await;
    assert_eq!(words[0], "EVAL", "refused unread");
    answer(&mut peer, &words, ":{1}\r\n").await;
    assert!(asked.await.is_ok());

    // The pipe has no room for the text, and then its time is over.
    let filled = ask(&connection, &"x".repeat(1 << 13), LONG);
    assert_eq!(
        ask_script(&connection, "bo", Duration::from_millis(20)).await,
        Err(Failure::LateUnsent)
    );
    let asked = ask_script(&connection, "bo", LONG);
    next(&mut peer).await;
    let words = next(&mut peer).await;
    assert_eq!(words[0], "EVAL", "never sent");
    drop((filled, asked));
}

/// If a proxy delivered such a bundle twice, an acquire that found its lock busy would get it the
/// second time, after the release behind it.
#[tokio::test]
async fn no_two_about_one_lock_go_together() {
    let (connection, mut peer) = connect(1 << 16, None);
    let first = ask(&connection, "first", LONG);
    let asked = ["a", "b", "a", "c", "a"].map(|name| ask_part(&connection, name, LONG));
    let all = tokio::spawn(async move { (first.await, join_all(asked).await) });
    for (expected, reply) in [
        (&["first"][..], ":17\r\n"),
        (&["a", "b"], "*3\r\n:{n}\r\n:1\r\n:1\r\n"),
        (&["a", "c"], "*3\r\n:{n}\r\n:1\r\n:1\r\n"),
        (&["a"], ":{1}\r\n"),
    ] {
        let words = next(&mut peer).await;
        assert_eq!(names(&words), expected);
        if expected == ["first"] {
            peer.write_all(reply.as_bytes()).await.unwrap();
        } else {
            answer(&mut peer, &words, reply).await;
        }
    }
    assert!(all.await.unwrap().1.iter().all(Result::is_ok));
}

/// Both requests count as sent when the last byte is.
#[tokio::test]
async fn a_cut_at_each_byte_of_two_tells_what_may_have_been_executed() {
    // Let the server learn the text, so that the next bundle is sent by digest.
    let learn = async |connection: &Arc<OwnConnection>, peer: &mut DuplexStream| {
        let told = two(connection, peer).await;
        let words = next(peer).await;
        answer(peer, &words, "*3\r\n:{n}\r\n:1\r\n:1\r\n").await;
        join_all(told).await;
    };
    let whole = {
        let (connection, mut peer) = connect(1 << 16, None);
        learn(&connection, &mut peer).await;
        let _asked = two(&connection, &mut peer).await;
        let mut out = Vec::new();
        let words = next(&mut peer).await;
        Request::Words(&words.iter().map(String::as_str).collect::<Vec<_>>()).encode(
            0,
            &mut out,
            &mut Texts::default(),
        );
        out.len()
    };
    for cut in 0..=whole {
        let (connection, mut peer) = connect(1 << 12, None);
        learn(&connection, &mut peer).await;
        // Fill the pipe up to about `cut` bytes.
        let padding = "x".repeat((1 << 12) - cut - bytes(&["", "first"]).len() - 4);
        let first = ask(&connection, "first", LONG);
        let filled = ask(&connection, &padding, LONG);
        let asked = ["a", "bo"].map(|name| ask_part(&connection, name, LONG));
        let told = join_all(asked);
        let ending = async {
            tokio::time::sleep(Duration::from_millis(2)).await;
            connection.end("cut");
        };
        let (told, filled, ()) = tokio::join!(told, filled, ending);
        drop(first);
        assert_eq!(filled, Err(Failure::Ended), "{cut} of {whole}");
        let room = (1 << 12) - bytes(&["first", &padding]).len();
        let expected = if room >= whole {
            Failure::Ended
        } else {
            Failure::Unsent
        };
        assert_eq!(
            told,
            [Err(expected.clone()), Err(expected)],
            "{room} of {whole}"
        );
    }
}

/// While one of the two has time left, the rest of their bundle stays to be sent. When both are
/// late, it ends the connection if a part was sent.
#[tokio::test]
async fn two_half_sent_requests_end_the_connection_once_both_are_late() {
    for is_in_part in [true, false] {
        let (connection, mut peer) = connect(1 << 12, None);
        let fits = (1 << 12) - bytes(&["", "first"]).len() - 3 - if is_in_part { 20 } else { 0 };
        let first = ask(&connection, "first", LONG);
        let filled = ask(&connection, &"x".repeat(fits), LONG);
        let began = Instant::now();
        // Far enough apart that a machine that stalls in between does not make both late at once.
        let two = [("a", 20), ("bo", 1000)];
        let two =
            two.map(|(name, limit)| ask_part(&connection, name, Duration::from_millis(limit)));
        let last = ask(&connection, "last", LONG);
        let [a, b] = two.map(|asked| async move { (asked.await, began.elapsed()) });
        let answers = async {
            if !is_in_part {
                tokio::time::sleep(Duration::from_millis(1100)).await;
                read(&mut peer, &["first", &"x".repeat(fits), "last"]).await;
                // The two, requests 3 and 4, were dropped.
                peer.write_all((says(1, 1) + &says(2, 2) + &says(5, 3)).as_bytes())
                    .await
                    .unwrap();
            }
        };
        let (_, _, (a, a_took), (b, b_took), last, ()) =
            tokio::join!(first, filled, a, b, last, answers);
        assert_eq!(a, Err(Failure::TimedOut), "it may still be sent");
        assert!(
            a_took < b_took && b_took < LONG / 2,
            "{a_took:?}, {b_took:?}"
        );
        let ends = if is_in_part {
            (Err(Failure::Unsent), Err(Failure::Unsent))
        } else {
            (Err(Failure::LateUnsent), Ok(Value::Integer(3)))
        };
        assert_eq!((b, last), ends);
        assert_eq!(connection.has_ended(), is_in_part);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    /// Whatever is sent, dropped or late, and whatever the capacity of the pipe, requests are sent
    /// in order, and each caller gets the reply to its own request.
    #[test]
    fn each_hears_of_its_own_request(
        asked in proptest::collection::vec((0..4_u8, 0..3_u8), 1..200),
        room in 1..2_000_usize,
        groups in proptest::collection::vec(1..30_usize, 200),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async move {
            let (connection, mut peer) = connect(room, None);
            let names: Vec<String> = asked.iter().enumerate().map(|(n, (kind, _))| match kind {
                0 => format!("{n}"),
                1 => format!("{n}o"),
                _ => format!("{n}p"),
            }).collect();
            let server = async {
                let mut sent = Vec::new();
                loop {
                    let words = next(&mut peer).await;
                    let (words, number) = match words.as_slice() {
                        [word] => {
                            let (number, word) = word.split_once(' ').unwrap();
                            (vec![word.to_owned()], number.to_owned())
                        }
                        _ => (words.clone(), words.last().unwrap().clone()),
                    };
                    if words == ["over"] {
                        peer.write_all(format!("*2\r\n:{number}\r\n+over\r\n").as_bytes()).await.unwrap();
                        return sent;
                    }
                    let of_it = super::together::names(&words);
                    let answers: Vec<String> = of_it.iter().map(|name| format!("+{name}\r\n")).collect();
                    let answer = format!("*{}\r\n:{number}\r\n{}", of_it.len() + 1, answers.concat());
                    sent.extend(of_it);
                    peer.write_all(answer.as_bytes()).await.unwrap();
                }
            };
            let client = async {
                let (mut at, mut unsent, mut kept) = (0, Vec::new(), Vec::new());
                for group in groups {
                    for (name, (kind, fate)) in names.iter().zip(&asked).skip(at).take(group) {
                        // Some have no time left.
                        let limit = if *fate == 1 { Duration::ZERO } else { LONG };
                        let request = if *kind < 2 { ask_part(&connection, name, limit) } else { ask_numbered(&connection, name, limit) };
                        if *fate < 2 {
                            kept.push((name.clone(), tokio::spawn(request)));
                        }
                    }
                    at += group;
                    tokio::task::yield_now().await;
                }
                for (name, told) in kept {
                    match told.await.unwrap() {
                        // An unbundled request gets an array, and a request of a bundle gets its
                        // own value.
                        Ok(Value::Array(told)) => assert_eq!(told, [Value::text(&name)]),
                        Ok(told) => assert_eq!(told, Value::text(&name)),
                        Err(Failure::LateUnsent) => unsent.push(name),
                        Err(Failure::TimedOut) => {}
                        Err(failure) => panic!("{name}: {failure:?}"),
                    }
                }
                ask_numbered(&connection, "over", LONG).await.unwrap();
                unsent
            };
            let (sent, unsent) = tokio::join!(server, client);
            let expected: Vec<String> = names.iter().filter(|name| !unsent.contains(name)).cloned().collect();
            assert_eq!(sent, expected);
        });
    }
}
