//! Credentials from a function of the program: tokens that expire, are refused, or do not come.

mod calls;
mod deployments;

use std::{
    collections::BTreeMap,
    future::Future,
    io,
    net::SocketAddr,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    thread,
    time::Duration,
};

use nestlock::{
    Credentials, Error, LockClient, LockClientBuilder, LockGuard, OwnerId, StoreErrorKind, Tuning,
};

use crate::{
    sentinel,
    support::{
        Server, WIRES, eventually,
        wire::{Reply, Wire},
        within,
    },
};

/// The most that a loaded machine may add to any limit.
const SLACK: Duration = Duration::from_secs(10);

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// A token service: each token is a user of its own. A user that is deleted loses its connections,
/// as a service closes those whose token has expired.
#[derive(Clone)]
struct Tokens {
    server: Arc<Server>,
    issued: Arc<AtomicU32>,
}

impl Tokens {
    fn start() -> Self {
        let server = Server::start_real();
        server.call(&["ACL", "SETUSER", "default", "on", ">admin"]);
        Self {
            server: Arc::new(server),
            issued: Arc::default(),
        }
    }

    fn admin(&self, words: &[&str]) -> Reply {
        admin(self.server.addr(), words)
    }

    /// Issues the next token.
    fn next(&self) -> Credentials {
        let user = format!("token{}", self.issued.fetch_add(1, Ordering::AcqRel) + 1);
        self.admin(&["ACL", "SETUSER", &user, "on", ">pw", "~*", "&*", "+@all"]);
        Credentials::new(user, "pw")
    }

    /// Returns the ids of the clients' connections, each with the number of its token.
    fn in_use(&self) -> BTreeMap<u64, u32> {
        let list = self.admin(&["CLIENT", "LIST"]);
        let field = |line: &str, name: &str| {
            let found = line.split(' ').find_map(|field| field.strip_prefix(name));
            found.and_then(|value| value.parse::<u64>().ok())
        };
        let lines = list.text().lines();
        lines
            .filter_map(|line| Some((field(line, "id=")?, field(line, "user=token")? as u32)))
            .collect()
    }

    /// Deletes the tokens older than those in use.
    fn expire(&self, deleted: &mut u32, oldest: u32) {
        while *deleted + 1 < oldest {
            *deleted += 1;
            self.admin(&["ACL", "DELUSER", &format!("token{deleted}")]);
        }
    }

    fn url(&self) -> String {
        format!("redis://{}", self.server.addr())
    }
}

fn admin(server: SocketAddr, words: &[&str]) -> Reply {
    let mut wire = Wire::connect(server).unwrap();
    // refused by a server that needs no password
    let _ = wire.call(&["AUTH", "admin"]).unwrap();
    wire.call(words).unwrap()
}

/// Makes a sentinel name this master.
fn name_master(sentinel: SocketAddr, master: SocketAddr) {
    let port = master.port().to_string();
    admin(sentinel, &["SENTINEL", "REMOVE", "mymaster"]);
    let monitor = ["SENTINEL", "MONITOR", "mymaster", "127.0.0.1", &port, "1"];
    admin(sentinel, &monitor);
}

/// Makes a sentinel name another master, and asserts that the holder at the old one is told.
async fn assert_told_of(master: SocketAddr, sentinel: SocketAddr, holder: &LockGuard) {
    name_master(sentinel, master);
    let told = tokio::time::timeout(ms(10_000) + SLACK, holder.lost()).await;
    assert!(told.is_ok(), "the holder is not told");
}

fn panic() -> io::Result<Credentials> {
    panic!("a bug in the program")
}

fn builder(wire: nestlock::Wire) -> LockClientBuilder {
    LockClient::builder().tuning(Tuning {
        wire,
        ..Tuning::default()
    })
}

/// The token of each connection is replaced again and again, and the old ones are deleted, while
/// locks are held, waited for and released: no call fails, and no connection is opened anew.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_that_expire_under_load_fail_no_call() {
    for &wire in WIRES {
        let tokens = Tokens::start();
        let fetch = {
            let tokens = tokens.clone();
            move || {
                let token = tokens.next().valid_for(ms(400));
                async { Ok::<_, io::Error>(token) }
            }
        };
        let client = builder(wire)
            .watchdog_timeout(ms(3_000))
            .credentials(fetch)
            .connect(tokens.url())
            .await
            .unwrap();
        let held = client.mutex("held").unwrap().lock().await.unwrap();
        let is_over = Arc::new(AtomicBool::new(false));
        let workers: Vec<_> = (0..8)
            .map(|n| {
                let lock = client.mutex(format!("job:{}", n % 3)).unwrap();
                let is_over = Arc::clone(&is_over);
                tokio::spawn(OwnerId::scope(async move {
                    let mut turns = 0;
                    while !is_over.load(Ordering::Acquire) {
                        lock.lock().await.unwrap().unlock().await.unwrap();
                        turns += 1;
                    }
                    turns
                }))
            })
            .collect();
        eventually("two connections", || async { tokens.in_use().len() == 2 }).await;
        let opened: Vec<_> = tokens.in_use().into_keys().collect();
        let mut deleted = 0;
        for _ in 0..10 {
            let seen = tokens.issued.load(Ordering::Acquire);
            within(SLACK, "both connections have new tokens", || async {
                tokens.in_use().values().all(|token| *token > seen)
            })
            .await;
            tokens.expire(&mut deleted, *tokens.in_use().values().min().unwrap());
        }
        assert!(deleted >= 8, "{deleted} tokens have expired");
        assert_eq!(tokens.in_use().into_keys().collect::<Vec<_>>(), opened);
        is_over.store(true, Ordering::Release);
        for worker in workers {
            assert!(worker.await.unwrap() > 0, "{wire:?}");
        }
        assert!(!held.is_lost());
        held.unlock().await.unwrap();
        client.shutdown().await.unwrap();
    }
}

/// A token that was replaced in the meantime is fetched once more, at connect and later.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_token_that_is_refused_is_fetched_once_more() {
    for &wire in WIRES {
        let tokens = Tokens::start();
        let calls = Arc::new(AtomicU32::new(0));
        let fetch = {
            let (tokens, calls) = (tokens.clone(), Arc::clone(&calls));
            move || {
                // every second one
                let is_stale = calls.fetch_add(1, Ordering::AcqRel).is_multiple_of(2);
                let token = if is_stale {
                    Credentials::new("token0", "stale")
                } else {
                    tokens.next()
                };
                let token = token.valid_for(ms(200));
                async { Ok::<_, io::Error>(token) }
            }
        };
        let client = builder(wire)
            .credentials(fetch)
            .connect(tokens.url())
            .await
            .unwrap();
        let guard = client.mutex("l").unwrap().lock().await.unwrap();
        let seen = tokens.issued.load(Ordering::Acquire);
        within(SLACK, "new tokens", || async {
            let in_use = tokens.in_use();
            in_use.len() == 2 && in_use.values().all(|token| *token > seen)
        })
        .await;
        guard.unlock().await.unwrap();
    }
}

/// Two refusals, or a function that fails or panics: the error says which.
#[tokio::test]
async fn the_error_says_why_there_are_no_credentials() {
    for &wire in WIRES {
        let server = Server::start_with(&["--requirepass", "pw"]);
        let url = format!("redis://{}", server.addr());
        let connect = |builder: LockClientBuilder| async {
            match builder.connect(&url).await {
                Err(Error::Connect { source, .. }) => (source.kind(), source.to_string()),
                other => panic!("{other:?}"),
            }
        };
        let calls = Arc::new(AtomicU32::new(0));
        let wrong = {
            let calls = Arc::clone(&calls);
            move || {
                calls.fetch_add(1, Ordering::AcqRel);
                async { Ok::<_, io::Error>(Credentials::new("default", "s3cret")) }
            }
        };
        let (kind, text) = connect(builder(wire).credentials(wrong)).await;
        assert_eq!(
            (kind, calls.load(Ordering::Acquire)),
            (StoreErrorKind::Auth, 2)
        );
        assert!(!text.contains("s3cret"), "{text}");
        let fails = || async { Err::<Credentials, _>("the vault is sealed") };
        let (kind, text) = connect(builder(wire).credentials(fails)).await;
        assert_eq!(kind, StoreErrorKind::Unavailable);
        assert!(text.contains("the vault is sealed"), "{text}");
        let panics = || async { panic() };
        let (kind, text) = connect(builder(wire).credentials(panics)).await;
        assert_eq!(kind, StoreErrorKind::Unavailable);
        assert!(text.contains("panicked"), "{text}");
    }
}

/// The function blocks its thread for longer than a lease: the watchdog renews all the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_function_that_blocks_costs_no_lease() {
    let server = Server::start_with(&["--requirepass", "pw"]);
    let calls = Arc::new(AtomicU32::new(0));
    let fetch = {
        let calls = Arc::clone(&calls);
        move || {
            let is_first = calls.fetch_add(1, Ordering::AcqRel) < 2;
            async move {
                if !is_first {
                    thread::sleep(ms(4_000));
                }
                Ok::<_, io::Error>(Credentials::new("default", "pw").valid_for(ms(500)))
            }
        }
    };
    let client = LockClient::builder()
        .watchdog_timeout(ms(3_000))
        .credentials(fetch)
        .connect(format!("redis://{}", server.addr()))
        .await
        .unwrap();
    let guard = client.mutex("l").unwrap().lock().await.unwrap();
    within(SLACK, "it blocks", || async {
        calls.load(Ordering::Acquire) >= 3
    })
    .await;
    tokio::time::sleep(ms(3_500)).await;
    assert!(!guard.is_lost());
    guard.unlock().await.unwrap();
}

/// The function blocks until the client has ended, and then uses a timer: it has a runtime of its
/// own for that.
#[test]
fn a_function_that_outlives_its_client_does_not_panic() {
    struct Seen(Arc<AtomicU32>, Arc<AtomicBool>);
    impl Drop for Seen {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::AcqRel);
            if thread::panicking() {
                self.1.store(true, Ordering::Release);
            }
        }
    }
    let server = Server::start_with(&["--requirepass", "pw"]);
    let (calls, ended) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
    let (panicked, is_over) = (
        Arc::new(AtomicBool::new(false)),
        Arc::new(AtomicBool::new(false)),
    );
    let fetch = {
        let (calls, is_over) = (Arc::clone(&calls), Arc::clone(&is_over));
        let (ended, panicked) = (Arc::clone(&ended), Arc::clone(&panicked));
        move || {
            let blocks = calls.fetch_add(1, Ordering::AcqRel) >= 2;
            let seen = Seen(Arc::clone(&ended), Arc::clone(&panicked));
            let is_over = Arc::clone(&is_over);
            async move {
                while blocks && !is_over.load(Ordering::Acquire) {
                    thread::sleep(ms(5));
                }
                tokio::time::sleep(ms(1)).await;
                drop(seen);
                Ok::<_, io::Error>(Credentials::new("default", "pw").valid_for(ms(100)))
            }
        }
    };
    tokio::runtime::Runtime::new().unwrap().block_on(async {
        let client = LockClient::builder()
            .credentials(fetch)
            .connect(format!("redis://{}", server.addr()))
            .await
            .unwrap();
        within(SLACK, "both connections wait for it", || async {
            calls.load(Ordering::Acquire) >= 3
        })
        .await;
        client.shutdown().await.unwrap();
    });
    // the client's thread ends with its last handle, a moment later
    thread::sleep(ms(200));
    is_over.store(true, Ordering::Release);
    let all = || ended.load(Ordering::Acquire) == calls.load(Ordering::Acquire);
    for _ in 0..2_000 {
        if all() {
            break;
        }
        thread::sleep(ms(5));
    }
    assert!(all(), "a call has not ended");
    assert!(!panicked.load(Ordering::Acquire));
}

/// Calls that do not return are bounded in number. When they return, the client goes on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_that_block_do_not_pile_up() {
    let server = Server::start_with(&["--requirepass", "pw"]);
    let (calls, in_flight) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
    let is_over = Arc::new(AtomicBool::new(false));
    let fetch = {
        let (calls, in_flight) = (Arc::clone(&calls), Arc::clone(&in_flight));
        let is_over = Arc::clone(&is_over);
        move || {
            let blocks = calls.fetch_add(1, Ordering::AcqRel) >= 2;
            in_flight.fetch_add(1, Ordering::AcqRel);
            let (in_flight, is_over) = (Arc::clone(&in_flight), Arc::clone(&is_over));
            async move {
                while blocks && !is_over.load(Ordering::Acquire) {
                    thread::sleep(ms(5));
                }
                in_flight.fetch_sub(1, Ordering::AcqRel);
                Ok::<_, io::Error>(Credentials::new("default", "pw").valid_for(ms(60)))
            }
        }
    };
    let client = LockClient::builder()
        .connect_timeout(ms(400))
        .credentials(fetch)
        .connect(format!("redis://{}", server.addr()))
        .await
        .unwrap();
    let held = client.mutex("l").unwrap().lock().await.unwrap();
    within(ms(60_000), "16 calls block", || async {
        in_flight.load(Ordering::Acquire) >= 16
    })
    .await;
    tokio::time::sleep(ms(1_000)).await;
    assert_eq!(in_flight.load(Ordering::Acquire), 16);
    is_over.store(true, Ordering::Release);
    let before = calls.load(Ordering::Acquire);
    within(SLACK, "it is called again", || async {
        calls.load(Ordering::Acquire) > before + 2
    })
    .await;
    assert!(!held.is_lost());
    held.unlock().await.unwrap();
}

#[tokio::test]
async fn credentials_beside_a_login_in_the_url_are_refused() {
    for url in ["redis://u:p@127.0.0.1", "redis://:p@127.0.0.1"] {
        let none = || async { panic() };
        let error = LockClient::builder()
            .credentials(none)
            .connect(url)
            .await
            .unwrap_err();
        assert!(matches!(error, Error::InvalidConfig { .. }), "{error:?}");
        assert!(error.to_string().contains("credentials"), "{error}");
    }
}

/// Credentials that are valid, from a function that takes this long; and how many of its calls were
/// given up.
fn slow(took: Duration, user: &'static str) -> (impl Fn() -> Slow + Clone, Arc<AtomicU32>) {
    let given_up = Arc::new(AtomicU32::new(0));
    let count = Arc::clone(&given_up);
    let fetch = move || {
        let count = Arc::clone(&count);
        let fetch: Slow = Box::pin(async move {
            let call = counted(count);
            tokio::time::sleep(took).await;
            std::mem::forget(call);
            Ok(Credentials::new(user, "pw"))
        });
        fetch
    };
    (fetch, given_up)
}

type Slow = Pin<Box<dyn Future<Output = io::Result<Credentials>> + Send>>;

/// Counts when it is dropped.
fn counted(count: Arc<AtomicU32>) -> impl Drop + Send {
    struct Counts(Arc<AtomicU32>);
    impl Drop for Counts {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::AcqRel);
        }
    }
    Counts(count)
}

/// The time of a sentinel, or of one of several servers, is for its replies: a function that takes
/// longer, but not a quarter of the connect timeout, may do so.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_function_may_take_a_quarter_of_the_time() {
    let group = tokio::task::block_in_place(|| sentinel::start(0, 1));
    let allow = ["ACL", "SETUSER", "app", "on", ">pw", "~*", "&*", "+@all"];
    let master = group.servers()[0].addr();
    Wire::connect(master).unwrap().call(&allow).unwrap();
    let server = Server::start_with(&["--requirepass", "pw"]);
    let replica_of = format!("127.0.0.1 {}", server.addr().port());
    let auth = ["--requirepass", "pw", "--masterauth", "pw", "--replicaof"];
    let replica = Server::start_with(&[&auth[..], &[&replica_of]].concat());
    let list = format!("redis://{},{}", server.addr(), replica.addr());
    // the sentinel refuses the user that it does not know
    for (url, user) in [(group.url(), "app"), (list, "default")] {
        let (fetch, given_up) = slow(ms(2_100), user);
        let connected = LockClient::builder()
            .connect_timeout(ms(60_000))
            .credentials(fetch)
            .connect(&url)
            .await;
        let client = connected.unwrap_or_else(|error| panic!("{url}: {error}"));
        assert_eq!(given_up.load(Ordering::Acquire), 0, "{url}");
        client.shutdown().await.unwrap();
    }
}

/// One call serves the connections that a client makes at about the same time. If servers refuse
/// what it returned, one more serves them all.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_call_serves_several_connections() {
    let tokens = Tokens::start();
    let calls = Arc::new(AtomicU32::new(0));
    let fetch = {
        let (tokens, calls) = (tokens.clone(), Arc::clone(&calls));
        move || {
            let is_first = calls.fetch_add(1, Ordering::AcqRel) == 0;
            let stale = || Credentials::new("token0", "stale");
            let token = if is_first { stale() } else { tokens.next() };
            async { Ok::<_, io::Error>(token) }
        }
    };
    let client = LockClient::builder()
        .credentials(fetch)
        .connect(tokens.url())
        .await
        .unwrap();
    eventually("two connections", || async { tokens.in_use().len() == 2 }).await;
    assert_eq!(calls.load(Ordering::Acquire), 2);
    client.shutdown().await.unwrap();
}

/// Two masters among the addresses are found, also if calls of the function wait for each other.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_that_wait_for_each_other_hide_no_second_master() {
    let [one, two] = [(); 2].map(|()| Server::start_with(&["--requirepass", "pw"]));
    let turn = Arc::new(tokio::sync::Mutex::new(()));
    let fetch = move || {
        let turn = Arc::clone(&turn);
        async move {
            let _turn = turn.lock().await;
            tokio::time::sleep(ms(1_500)).await;
            Ok::<_, io::Error>(Credentials::new("default", "pw"))
        }
    };
    assert_finds_both(LockClient::builder().credentials(fetch), [&one, &two]).await;
}

/// Asserts that a client that connects to two masters is told so.
async fn assert_finds_both(builder: LockClientBuilder, [one, two]: [&Server; 2]) {
    let error = builder
        .connect_timeout(ms(30_000))
        .connect(format!("redis://{},{}", one.addr(), two.addr()))
        .await
        .unwrap_err();
    let text = error.to_string();
    assert!(
        text.contains("several of the addresses are masters"),
        "{text}"
    );
}

/// A first attempt to reconnect is short, since the server may hang. That is no reason to give up
/// the function.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reconnect_does_not_give_up_a_slow_function() {
    let server = Server::start_with(&["--requirepass", "pw"]);
    let (fetch, given_up) = slow(ms(1_500), "default");
    let client = LockClient::builder()
        .watchdog_timeout(ms(3_000))
        .connect_timeout(ms(30_000))
        .outage_patience(ms(30_000))
        .credentials(fetch)
        .connect(format!("redis://{}", server.addr()))
        .await
        .unwrap();
    // the first call serves the connections of its next 5 s
    tokio::time::sleep(ms(5_200)).await;
    let mut wire = server.wire();
    wire.call(&["AUTH", "pw"]).unwrap();
    wire.call(&["CLIENT", "KILL", "TYPE", "normal"]).unwrap();
    let _guard = client.mutex("l").unwrap().lock().await.unwrap();
    assert_eq!(given_up.load(Ordering::Acquire), 0);
}

/// A call that panics, and leaves a blocked task behind, is over: the next ones are made.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_panic_beside_a_blocked_task_is_the_end_of_a_call() {
    let server = Server::start_with(&["--requirepass", "pw"]);
    let (calls, is_over) = (
        Arc::new(AtomicU32::new(0)),
        Arc::new(AtomicBool::new(false)),
    );
    let fetch = {
        let (calls, is_over) = (Arc::clone(&calls), Arc::clone(&is_over));
        move || {
            let panics = calls.fetch_add(1, Ordering::AcqRel) >= 2;
            let is_over = Arc::clone(&is_over);
            async move {
                if panics {
                    tokio::task::spawn_blocking(move || {
                        while !is_over.load(Ordering::Acquire) {
                            thread::sleep(ms(5));
                        }
                    });
                    panic()?;
                }
                Ok::<_, io::Error>(Credentials::new("default", "pw").valid_for(ms(100)))
            }
        }
    };
    let client = LockClient::builder()
        .credentials(fetch)
        .connect(format!("redis://{}", server.addr()))
        .await
        .unwrap();
    within(ms(60_000), "more calls than may be in flight", || async {
        calls.load(Ordering::Acquire) > 40
    })
    .await;
    is_over.store(true, Ordering::Release);
    client.shutdown().await.unwrap();
}

/// What a function panics with may itself panic when it is dropped. The process survives.
#[tokio::test]
async fn a_panic_within_a_panic_is_an_error() {
    struct Bomb;
    impl Drop for Bomb {
        fn drop(&mut self) {
            std::panic::panic_any(Self);
        }
    }
    let server = Server::start_with(&["--requirepass", "pw"]);
    let fetch = || async {
        std::panic::panic_any(Bomb);
        #[expect(unreachable_code)]
        Ok::<_, io::Error>(Credentials::new("default", "pw"))
    };
    let error = LockClient::builder()
        .credentials(fetch)
        .connect(format!("redis://{}", server.addr()))
        .await
        .unwrap_err();
    assert!(error.to_string().contains("panicked"), "{error}");
}

/// Calls that never return count for the client that made them. Another client of the same builder
/// makes its own.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_that_hang_count_for_one_client() {
    let server = Server::start_with(&["--requirepass", "pw"]);
    let url = format!("redis://{}", server.addr());
    let (calls, is_over) = (
        Arc::new(AtomicU32::new(0)),
        Arc::new(AtomicBool::new(false)),
    );
    let fetch = {
        let (calls, is_over) = (Arc::clone(&calls), Arc::clone(&is_over));
        move || {
            let hangs = calls.fetch_add(1, Ordering::AcqRel) < 16;
            let is_over = Arc::clone(&is_over);
            async move {
                while hangs && !is_over.load(Ordering::Acquire) {
                    thread::sleep(ms(5));
                }
                Ok::<_, io::Error>(Credentials::new("default", "pw"))
            }
        }
    };
    let builder = LockClient::builder().credentials(fetch);
    while calls.load(Ordering::Acquire) < 16 {
        // a call that is counted late may be the 17th, which returns
        _ = builder.clone().connect_timeout(ms(50)).connect(&url).await;
    }
    let other = builder.connect_timeout(ms(30_000)).connect(&url).await;
    is_over.store(true, Ordering::Release);
    other.unwrap().shutdown().await.unwrap();
}

/// fred's client writes a login into a line of text. One that would not arrive as it is, is refused
/// before anything is sent.
#[cfg(feature = "fred")]
#[tokio::test]
async fn fred_sends_no_login_that_is_more_than_a_word() {
    let server = Server::start();
    let connect = |password: String| async {
        let fetch = move || {
            let credentials = Credentials::new("default", password.clone());
            async { Ok::<_, io::Error>(credentials) }
        };
        let fred = builder(nestlock::Wire::Fred).credentials(fetch);
        fred.connect(format!("redis://{}", server.addr())).await
    };
    let long = "x".repeat(20_000);
    for password in [
        "x\r\nSET injected 1\r\n",
        "two words",
        "\"q\"",
        "",
        "\0",
        &long,
    ] {
        let error = connect(password.to_owned()).await.unwrap_err();
        let text = error.to_string();
        assert!(text.contains("fred's client cannot send"), "{text}");
        assert!(!error.is_transient(), "{text}");
    }
    assert_eq!(server.command_count("hello"), 0);
    assert_eq!(server.command_count("set"), 0);
    connect("any-word".to_owned()).await.unwrap();
}
