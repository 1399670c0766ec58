//! A fake node: redirects that a real one does not send, or not at that moment.

use std::{
    collections::VecDeque,
    io::{BufRead, BufReader, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    ops::RangeInclusive,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use nestlock::{Error, LockClient, LockGuard};
use nestlock_embedded::SpawnedCluster;

use crate::support::{scripts::naming, within};

/// A redirect to a dead node is followed by a refresh of the map.
#[tokio::test]
async fn a_redirect_to_a_node_that_is_gone_fails_no_try() {
    let fake = Fake::start();
    let client = LockClient::connect(format!("redis-cluster://{}", fake.addr))
        .await
        .unwrap();
    *fake.scripts.lock().unwrap() =
        format!("-MOVED {} 127.0.0.1:1\r\n", SpawnedCluster::slot_of("l"));
    let lock = client.mutex("l").unwrap();
    let tries = tokio::spawn(async move { lock.try_lock().await.map(|got| got.is_some()) });
    within(Duration::from_secs(5), "it gets a request", || async {
        fake.asked.load(Ordering::Acquire) > 0
    })
    .await;
    *fake.scripts.lock().unwrap() = ":1\r\n".into();
    assert!(tries.await.unwrap().unwrap());
}

/// An ASK holds for one request, and only at that moment: later, the slot may have moved, come back
/// and started to move again, and the new master then knows nothing of the holder at the old one.
/// So the client follows an ASK at once, or sends the request to the old master again.
#[tokio::test]
async fn what_was_true_a_while_ago_is_requested_again() {
    const GRANTED: &str = ":1\r\n";
    const BUSY: &str = "*2\r\n:0\r\n:5000\r\n";
    let (old, new) = (Fake::start(), Fake::start());
    *new.map.lock().unwrap() = old.all_slots();
    // leaves time for a retry in each case
    let limit = Duration::from_secs(20);
    let builder = LockClient::builder()
        .watchdog_timeout(3 * limit)
        .command_timeout(limit);
    let client = builder
        .connect(format!("redis-cluster://{}", old.addr))
        .await
        .unwrap();
    let lock = client.mutex("l").unwrap();
    let slot = SpawnedCluster::slot_of("l");
    let asks = format!("-ASK {slot} {}\r\n", new.addr);
    let at_once = |answer: &str| (Duration::ZERO, answer.to_owned());
    let late = (Duration::from_millis(700), asks.clone());
    let moved = vec![at_once(&format!("-MOVED {slot} {}\r\n", old.addr)); 8];
    let after_a_pause = |then: &[&str]| {
        [
            moved.clone(),
            then.iter().map(|answer| at_once(answer)).collect(),
        ]
        .concat()
    };
    for (what, first, is_granted) in [
        // there is no connection yet
        ("the first time", vec![at_once(&asks)], false),
        ("at once", vec![at_once(&asks)], true),
        ("after a pause", after_a_pause(&[&asks]), false),
        (
            "after a pause, and once more",
            after_a_pause(&[&asks, &asks]),
            true,
        ),
        ("late", vec![late.clone()], false),
        ("late, and once more", vec![late, at_once(&asks)], true),
    ] {
        let mut got = None;
        // a machine that stalls before the redirect is followed makes it late: try again
        for _ in 0..if is_granted { 5 } else { 1 } {
            new.says(&[], GRANTED);
            old.says(&first, BUSY);
            got = lock
                .try_lock()
                .await
                .unwrap_or_else(|error| panic!("{what}: {error}"));
            if got.is_some() {
                break;
            }
        }
        assert_eq!(got.is_some(), is_granted, "{what}");
        assert_eq!(
            new.asked.load(Ordering::Acquire),
            u32::from(is_granted),
            "{what}"
        );
        assert!(old.first.lock().unwrap().is_empty(), "{what}");
        old.says(&[], GRANTED);
        if let Some(guard) = got {
            guard.unlock().await.unwrap();
        }
    }
}

/// Returns a hold and both ends of its slot's migration. The next request about it is redirected
/// late, and finds nothing at the new master.
async fn held_while_its_slot_goes(lease: Duration) -> (LockClient, LockGuard, Fake, Fake) {
    let (old, new) = (Fake::start(), Fake::start());
    *new.map.lock().unwrap() = old.all_slots();
    let asks = format!("-ASK {} {}\r\n", SpawnedCluster::slot_of("l"), new.addr);
    let url = format!("redis-cluster://{}", old.addr);
    let client = LockClient::builder()
        .watchdog_timeout(lease)
        .connect(url)
        .await
        .unwrap();
    let lock = client.mutex("l").unwrap();
    // opens a connection to the new master
    new.says(&[], ":1\r\n");
    old.says(&vec![(Duration::ZERO, asks.clone()); 2], ":1\r\n");
    lock.lock().await.unwrap().unlock().await.unwrap();
    let guard = lock.lock().await.unwrap();
    new.says(&[], "*1\r\n:0\r\n");
    old.says(&[(Duration::from_millis(700), asks)], "*1\r\n:1\r\n");
    (client, guard, old, new)
}

/// A renewal follows a late redirect. A hold that it does not find there may have moved back, so it
/// is not lost.
#[tokio::test]
async fn what_a_late_renewal_does_not_find_is_not_lost() {
    let lease = Duration::from_secs(6);
    let (_client, guard, old, new) = held_while_its_slot_goes(lease).await;
    within(
        Duration::from_secs(5),
        "it gets another request",
        || async { old.asked.load(Ordering::Acquire) > 1 },
    )
    .await;
    assert_eq!(new.asked.load(Ordering::Acquire), 1);
    tokio::time::sleep(lease).await;
    assert!(!guard.is_lost());
}

/// A late extension that finds nothing is not in doubt either: it changed nothing.
#[tokio::test]
async fn a_late_extension_that_finds_nothing_was_refused() {
    let (_client, guard, _old, new) = held_while_its_slot_goes(Duration::from_secs(30)).await;
    let error = guard.extend(Duration::from_secs(60)).await.unwrap_err();
    assert!(
        matches!(error, Error::Store { .. }) && error.is_transient(),
        "{error:?}"
    );
    assert_eq!(new.asked.load(Ordering::Acquire), 1);
    assert!(!guard.is_lost());
}

/// A bounded wait that ends before a new master accepts a connection was refused: nothing was sent.
#[tokio::test]
async fn what_waited_for_a_connection_in_vain_was_refused() {
    let (old, new) = (Fake::start(), Fake::start());
    // the client retries at the old master now and then. At the end of the wait, the last redirect
    // has as much time as the client's PING took: more than this process stalls on a busy
    // machine
    *old.pings.lock().unwrap() = Duration::from_secs(1);
    let client = LockClient::connect(format!("redis-cluster://{}", old.addr))
        .await
        .unwrap();
    // far beyond either wait
    *new.greets.lock().unwrap() = Duration::from_secs(20);
    old.says(
        &[],
        &format!("-MOVED {} {}\r\n", SpawnedCluster::slot_of("l"), new.addr),
    );
    let lock = client.mutex("l").unwrap();
    for wait in [1_000, 2_500].map(Duration::from_millis) {
        let error = lock.try_lock_for(wait).await.unwrap_err();
        assert!(
            matches!(error, Error::Store { .. }) && error.is_transient(),
            "{wait:?}: {error:?}"
        );
    }
    assert_eq!(new.asked.load(Ordering::Acquire), 0);
}

/// The same for a wait that is shorter than the time that a redirected request has for a
/// connection.
#[tokio::test]
async fn a_wait_shorter_than_a_connect_ends_refused() {
    one_of_three(async || {
        let (old, new) = (Fake::start(), Fake::start());
        *old.pings.lock().unwrap() = Duration::from_millis(50);
        let client = LockClient::connect(format!("redis-cluster://{}", old.addr)).await?;
        *new.greets.lock().unwrap() = Duration::from_secs(20);
        old.says(
            &[],
            &format!("-MOVED {} {}\r\n", SpawnedCluster::slot_of("l"), new.addr),
        );
        let lock = client.mutex("l").unwrap();
        let error = lock
            .try_lock_for(Duration::from_millis(100))
            .await
            .unwrap_err();
        assert_eq!(new.asked.load(Ordering::Acquire), 0);
        match error {
            Error::Store { .. } => Ok(()),
            other => Err(other),
        }
    })
    .await;
}

/// A master whose redirects arrive too late to be followed gets no retry whose reply would arrive
/// after the timeout.
#[tokio::test]
async fn what_was_refused_late_was_refused() {
    let (old, new) = (Fake::start(), Fake::start());
    *new.map.lock().unwrap() = old.all_slots();
    let limit = Duration::from_secs(1);
    let url = format!("redis-cluster://{}", old.addr);
    let client = LockClient::builder()
        .command_timeout(limit)
        .connect(url)
        .await
        .unwrap();
    let asks = format!("-ASK {} {}\r\n", SpawnedCluster::slot_of("l"), new.addr);
    old.says(&vec![(Duration::from_millis(600), asks); 9], ":1\r\n");
    let error = client.mutex("l").unwrap().try_lock().await.unwrap_err();
    assert!(
        matches!(error, Error::Store { .. }) && error.is_transient(),
        "{error:?}"
    );
    assert_eq!(
        (
            old.asked.load(Ordering::Acquire),
            new.asked.load(Ordering::Acquire)
        ),
        (1, 0)
    );
}

/// Most nodes do not know yet that a slot has another master. The redirect of the old master
/// counts, and the client stays with the new one while it grants.
#[tokio::test]
async fn what_a_master_says_of_its_slot_counts_more_than_an_older_map() {
    one_of_three(async || {
        let [old, new, third] = [(); 3].map(|()| Fake::start());
        for fake in [&old, &new, &third] {
            *fake.map.lock().unwrap() = slots(&[(&old, 0..=16_382), (&third, 16_383..=16_383)]);
        }
        let client = LockClient::connect(format!("redis-cluster://{}", old.addr))
            .await
            .unwrap();
        old.says(
            &[],
            &format!("-MOVED {} {}\r\n", SpawnedCluster::slot_of("l"), new.addr),
        );
        new.says(&[(Duration::from_millis(150), ":1\r\n".into())], ":1\r\n");
        let lock = client.mutex("l").unwrap();
        lock.try_lock()
            .await
            .map(|guard| assert!(guard.is_some()))?;
        // if the nodes still report the old map a little later, the client believes them
        let new = new.addr.to_string();
        within(
            Duration::from_secs(4),
            "the map is queried once more",
            || async {
                client
                    .topology()
                    .nodes
                    .iter()
                    .all(|node| node.address != new)
            },
        )
        .await;
        Ok(())
    })
    .await;
}

/// In a failover, a master may learn that it has lost a slot before it learns the new master. The
/// client waits for the map, even if the map is outdated at first, if the request was delayed
/// before, or if the new master is slow to accept a connection.
#[tokio::test]
async fn a_master_that_does_not_know_its_slot_fails_no_try() {
    for (what, paused, known, greets) in [
        ("the map knows", 0, 0, 0),
        ("it knows a moment later", 0, 200, 0),
        ("after a pause", 1_700, 60, 0),
        ("the new one is slow", 0, 0, 600),
    ] {
        let [paused, known, greets] = [paused, known, greets].map(Duration::from_millis);
        one_of_three(async || {
            let (old, new) = (Fake::start(), Fake::start());
            let client = LockClient::connect(format!("redis-cluster://{}", old.addr))
                .await
                .unwrap();
            *new.greets.lock().unwrap() = greets;
            *new.map.lock().unwrap() = old.all_slots();
            let refusal = "-CLUSTERDOWN Hash slot not served\r\n";
            old.says(&[(paused, refusal.into())], refusal);
            new.says(&[], ":1\r\n");
            let lock = client.mutex("l").unwrap();
            let becomes_known = async {
                tokio::time::sleep(paused + known).await;
                for fake in [&old, &new] {
                    *fake.map.lock().unwrap() = new.all_slots();
                }
            };
            let (got, ()) = futures::join!(lock.try_lock(), becomes_known);
            got.map(|guard| assert!(guard.is_some(), "{what}"))
        })
        .await;
    }
}

/// A redirect names a master that has lost the slot by now and does not know the new one: the
/// client believes the map a moment later.
#[tokio::test]
async fn a_map_counts_where_the_new_master_does_not_know_its_slot() {
    one_of_three(async || {
        let [old, new, third] = [(); 3].map(|()| Fake::start());
        let client = LockClient::connect(format!("redis-cluster://{}", old.addr))
            .await
            .unwrap();
        for fake in [&old, &new, &third] {
            *fake.map.lock().unwrap() = third.all_slots();
        }
        old.says(
            &[],
            &format!("-MOVED {} {}\r\n", SpawnedCluster::slot_of("l"), new.addr),
        );
        new.says(&[], "-CLUSTERDOWN Hash slot not served\r\n");
        third.says(&[], ":1\r\n");
        client
            .mutex("l")
            .unwrap()
            .try_lock()
            .await
            .map(|guard| assert!(guard.is_some()))
    })
    .await;
}

/// A new master hangs and has been replaced: the client discards a late grant from it.
#[tokio::test]
async fn what_a_master_says_of_its_slot_counts_for_a_moment_only() {
    let [old, new, third] = [(); 3].map(|()| Fake::start());
    let client = LockClient::connect(format!("redis-cluster://{}", old.addr))
        .await
        .unwrap();
    for fake in [&old, &new, &third] {
        *fake.map.lock().unwrap() = slots(&[(&third, 0..=16_382), (&old, 16_383..=16_383)]);
    }
    old.says(
        &[],
        &format!("-MOVED {} {}\r\n", SpawnedCluster::slot_of("l"), new.addr),
    );
    new.says(&[(Duration::from_secs(2), ":1\r\n".into())], ":1\r\n");
    let error = client.mutex("l").unwrap().try_lock().await.unwrap_err();
    assert!(matches!(error, Error::Unconfirmed { .. }), "{error:?}");
}

/// A replaced master refuses in-flight requests late, and takes more than half a second to accept a
/// connection: it is slow, but does not hang.
#[tokio::test]
async fn a_slow_master_that_is_left_may_refuse_what_is_in_flight() {
    one_of_three(async || {
        // without the old one, a majority knows the new map
        let [old, new, third] = [(); 3].map(|()| Fake::start());
        let map = |first: &Fake| slots(&[(first, 0..=16_382), (&third, 16_383..=16_383)]);
        *old.map.lock().unwrap() = map(&old);
        let client = LockClient::connect(format!("redis-cluster://{}", old.addr))
            .await
            .unwrap();
        let moved = |name| format!("-MOVED {} {}\r\n", SpawnedCluster::slot_of(name), new.addr);
        for fake in [&old, &new, &third] {
            *fake.map.lock().unwrap() = map(&new);
        }
        *old.greets.lock().unwrap() = Duration::from_millis(600);
        old.says(
            &[
                (Duration::ZERO, moved("first")),
                (Duration::from_millis(1_500), moved("l")),
            ],
            &moved("l"),
        );
        new.says(&[], ":1\r\n");
        let [first, lock] = ["first", "l"].map(|name| client.mutex(name).unwrap());
        // its redirect makes the client refresh the map
        let (first, got) = futures::join!(first.try_lock(), lock.try_lock());
        first.unwrap();
        got.map(|guard| assert!(guard.is_some()))
    })
    .await;
}

/// A node without a host is on the host that sent the map; a node with the host `?` may be
/// anywhere, so the client sends it nothing.
#[tokio::test]
async fn a_node_without_a_host_is_what_the_protocol_says() {
    let slot = SpawnedCluster::slot_of("l");
    let host = "$9\r\n127.0.0.1\r\n";
    for (said, is_known) in [
        ("_\r\n", true),
        ("$0\r\n\r\n", true),
        ("$1\r\n?\r\n", false),
    ] {
        let (here, there) = (Fake::start(), Fake::start());
        let map = slots(&[
            (&there, slot..=slot),
            (&here, 0..=slot - 1),
            (&here, slot + 1..=16_383),
        ]);
        for fake in [&here, &there] {
            *fake.map.lock().unwrap() = map.replacen(host, said, 1);
            fake.says(&[], ":1\r\n");
        }
        let client = LockClient::connect(format!("redis-cluster://{}", here.addr))
            .await
            .unwrap();
        let is_known_now = || {
            client
                .topology()
                .nodes
                .iter()
                .any(|node| node.address == there.addr.to_string())
        };
        assert_eq!(is_known_now(), is_known, "{said:?}");
        // the same in a redirect
        let host = if is_known { "" } else { "?" };
        here.says(
            &[],
            &format!("-MOVED {slot} {host}:{}\r\n", there.addr.port()),
        );
        let got = client.mutex("l").unwrap().try_lock().await;
        let asked = there.asked.load(Ordering::Acquire);
        if is_known {
            assert!(got.unwrap().is_some() && asked == 1, "{said:?}");
        } else {
            let error = got.unwrap_err();
            assert!(
                matches!(error, Error::Store { .. }) && error.is_transient(),
                "{error:?}"
            );
            assert_eq!((asked, is_known_now()), (0, false));
        }
    }
    // no node has a usable address
    let fake = Fake::start();
    *fake.map.lock().unwrap() = fake.all_slots().replace(host, "$1\r\n?\r\n");
    let error = LockClient::connect(format!("redis-cluster://{}", fake.addr))
        .await
        .unwrap_err();
    assert!(
        error.to_string().contains("cluster-announce-hostname"),
        "{error}"
    );
}

/// Returns a slot map.
fn slots(of: &[(&Fake, RangeInclusive<u16>)]) -> String {
    let range = |(fake, slots): &(&Fake, RangeInclusive<u16>)| {
        let (first, last, port) = (slots.start(), slots.end(), fake.addr.port());
        format!("*3\r\n:{first}\r\n:{last}\r\n*3\r\n$9\r\n127.0.0.1\r\n:{port}\r\n$2\r\nid\r\n")
    };
    format!(
        "*{}\r\n{}",
        of.len(),
        of.iter().map(range).collect::<String>()
    )
}

/// Runs a round up to three times, as a stalling machine may fail one, but not three.
async fn one_of_three(round: impl AsyncFn() -> nestlock::Result<()>) {
    let mut errors = Vec::new();
    while errors.len() < 3 {
        match round().await {
            Ok(()) => return,
            Err(error) => errors.push(error),
        }
    }
    panic!("{errors:?}");
}

const HELLO: &str = "%1\r\n+proto\r\n:3\r\n";

/// A node of a one-node cluster, whose replies to scripts and whose map a test sets.
#[derive(Clone)]
struct Fake {
    addr: SocketAddr,
    /// The first replies to scripts, each with its delay.
    first: Arc<Mutex<VecDeque<(Duration, String)>>>,
    scripts: Arc<Mutex<String>>,
    map: Arc<Mutex<String>>,
    /// The delay of its reply to HELLO.
    greets: Arc<Mutex<Duration>>,
    /// The delay of its reply to a PING that proves no request: the one before it was a PING.
    pings: Arc<Mutex<Duration>>,
    asked: Arc<AtomicU32>,
}

impl Fake {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let fake = Self {
            addr: listener.local_addr().unwrap(),
            first: Arc::default(),
            // on connect, the client checks that scripts run
            scripts: Arc::new(Mutex::new(":1\r\n".into())),
            map: Arc::default(),
            greets: Arc::default(),
            pings: Arc::default(),
            asked: Arc::default(),
        };
        let node = fake.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let node = node.clone();
                std::thread::spawn(move || node.serve(stream));
            }
        });
        *fake.map.lock().unwrap() = fake.all_slots();
        fake
    }

    fn all_slots(&self) -> String {
        slots(&[(self, 0..=16_383)])
    }

    /// Sets the replies to scripts, and resets the counter of requests.
    fn says(&self, answers: &[(Duration, String)], then: &str) {
        *self.scripts.lock().unwrap() = then.into();
        *self.first.lock().unwrap() = answers.iter().cloned().collect();
        self.asked.store(0, Ordering::Release);
    }

    /// Serves one connection until the client closes it.
    fn serve(&self, mut stream: TcpStream) -> Option<()> {
        let mut requests = BufReader::new(stream.try_clone().ok()?);
        let mut line = || -> Option<String> {
            let mut line = String::new();
            (requests.read_line(&mut line).ok()? > 0).then(|| line.trim_end().to_owned())
        };
        let mut is_behind_a_ping = false;
        loop {
            let count: usize = line()?.strip_prefix('*')?.parse().ok()?;
            let mut words = Vec::new();
            for _ in 0..count {
                let mut left: usize = line()?.strip_prefix('$')?.parse().ok()?;
                // scripts have many lines
                let mut word = String::new();
                loop {
                    let part = line()?;
                    left = left.saturating_sub(part.len());
                    word.push_str(&part);
                    if left == 0 {
                        break;
                    }
                    left -= 1;
                }
                words.push(word);
            }
            let answer = match &*words[0] {
                "CLUSTER" => self.map.lock().unwrap().clone(),
                // the first HELLO of a connection
                "HELLO" if count == 2 => {
                    std::thread::sleep(*self.greets.lock().unwrap());
                    HELLO.into()
                }
                "HELLO" => HELLO.into(),
                "PUBSUB" => "*0\r\n".into(),
                "PING" if count > 1 => {
                    if is_behind_a_ping {
                        std::thread::sleep(*self.pings.lock().unwrap());
                    }
                    format!("${}\r\n{}\r\n", words[1].len(), words[1])
                }
                "EVAL" | "EVALSHA" => {
                    self.asked.fetch_add(1, Ordering::AcqRel);
                    let first = self.first.lock().unwrap().pop_front();
                    let answer = first.map_or_else(
                        || self.scripts.lock().unwrap().clone(),
                        |(pause, answer)| {
                            std::thread::sleep(pause);
                            answer
                        },
                    );
                    naming(&words[count - 1], &answer)
                }
                _ => "+OK\r\n".into(),
            };
            is_behind_a_ping = words[0] == "PING";
            stream.write_all(answer.as_bytes()).ok()?;
        }
    }
}

/// Endless redirects end at the timeout and are not followed in a tight loop; an invalid map
/// changes nothing.
#[tokio::test]
async fn what_servers_say_of_each_other_may_be_nonsense() {
    let fake = Fake::start();
    let (limit, addr) = (Duration::from_millis(500), fake.addr);
    let client = LockClient::builder()
        .command_timeout(limit)
        .connect(format!("redis-cluster://{addr}"))
        .await
        .unwrap();
    let lock = client.mutex("l").unwrap();
    let slot = SpawnedCluster::slot_of("l");
    let port = addr.port();
    for said in [
        format!("MOVED {slot} {addr}"),
        format!("MOVED {slot} :{port}"),
        format!("MOVED {slot} ?:{port}"),
        format!("MOVED {slot} 127.0.0.1:1"),
        format!("MOVED {slot} [::1]:1"),
        format!("ASK {slot} {addr}"),
        format!("ASK {slot} :{port}"),
        format!("ASK {slot} 127.0.0.1:1"),
        format!("MOVED 0 {addr}"),
        format!("MOVED 99999 {addr}"),
        format!("MOVED {slot}"),
        format!("MOVED {slot} nonsense"),
        format!("MOVED {slot} {addr}0"),
        "MOVED".into(),
        "ASK".into(),
        "TRYAGAIN Multiple keys request during rehashing of slot".into(),
        "CLUSTERDOWN The cluster is down".into(),
    ] {
        *fake.scripts.lock().unwrap() = format!("-{said}\r\n");
        within(
            Duration::from_secs(10),
            "its own map leads back to it",
            || async {
                fake.asked.store(0, Ordering::Release);
                let began = Instant::now();
                let error = lock.try_lock().await.unwrap_err();
                let (took, asked) = (began.elapsed(), fake.asked.load(Ordering::Acquire));
                assert!(error.is_transient(), "{said}: {error:?}");
                assert!(took < limit + Duration::from_secs(2), "{said}: {took:?}");
                assert!(asked < 40, "{said}: {asked} requests");
                asked > 0
            },
        )
        .await;
    }
    *fake.scripts.lock().unwrap() = "-TRYAGAIN a little later\r\n".into();
    for map in [
        "*0\r\n".to_owned(),
        "+OK\r\n".into(),
        "-ERR no\r\n".into(),
        "*1\r\n:1\r\n".into(),
        "*1\r\n*3\r\n:0\r\n:16384\r\n*2\r\n$1\r\na\r\n:1\r\n".into(),
        "*1\r\n*3\r\n:9\r\n:1\r\n*2\r\n$1\r\na\r\n:1\r\n".into(),
        "*1\r\n*4\r\n:0\r\n:16383\r\n*2\r\n_\r\n:1\r\n:7\r\n".into(),
    ] {
        *fake.map.lock().unwrap() = map.clone();
        assert!(lock.try_lock().await.unwrap_err().is_transient(), "{map}");
    }
    *fake.map.lock().unwrap() = fake.all_slots();
    *fake.scripts.lock().unwrap() = "_\r\n".into();
    within(
        Duration::from_secs(10),
        "it gets another request",
        || async {
            fake.asked.store(0, Ordering::Release);
            let _ = lock.try_lock().await;
            fake.asked.load(Ordering::Acquire) > 0
        },
    )
    .await;
}
