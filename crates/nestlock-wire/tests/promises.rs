//! Tests of the documented promises, through the public API alone, on real servers.

#![allow(clippy::unwrap_used)]

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use futures::{executor, future::join_all};
use nestlock_embedded::SpawnedServer;
use nestlock_wire::{
    Address, Arg, Arity, Bundle, Call, ConnectionSettings, CredentialProvider, Credentials, Dialer,
    Link, Login, NotConnected, Pace, Request, Script, ScriptSource, Server, ServerSettings,
    StoreError, StoreErrorKind, Until, Value, Wire, clock,
};
use tokio::{
    runtime::{Builder, Handle, Runtime},
    time::{sleep, timeout},
};
#[cfg(feature = "fred")]
use {
    fred::types::config::{Config, ConnectionConfig, PerformanceConfig},
    nestlock_wire::fred_client,
};

const SECOND: Duration = Duration::from_secs(1);

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

const fn always(fixed: usize) -> Arity {
    Arity { fixed, per_lock: 0 }
}

const fn source(lua: &'static str, args: usize) -> ScriptSource {
    ScriptSource {
        name: "test",
        lua,
        keys: always(1),
        args: always(args),
        is_atomic: false,
        names_keys: false,
    }
}

const fn script(lua: &'static str, args: usize, bundle: Option<&'static Bundle>) -> Script {
    Script::new(source(lua, args), |name| [name, "", "", "", ""], bundle)
}

fn settings(server: &SpawnedServer, own: Handle) -> ConnectionSettings {
    let at = Server::new("127.0.0.1", server.addr().port());
    ConnectionSettings::new(ServerSettings::new(Address::Tcp(at)), own)
}

async fn linked(settings: ConnectionSettings) -> Arc<Link> {
    let pace = Arc::new(Pace::new());
    Link::connect(Dialer::new(settings), &pace).await.unwrap()
}

/// The clients that carry requests.
const WIRES: &[Wire] = &[
    Wire::Own,
    #[cfg(feature = "fred")]
    Wire::Fred,
];

fn over(wire: Wire, settings: ConnectionSettings) -> Dialer {
    Dialer {
        wire,
        ..Dialer::new(settings)
    }
}

/// Returns how many connections the server has accepted.
async fn accepted(link: &Link) -> u64 {
    let info = link.command(&["INFO", "stats"], SECOND).await.unwrap();
    let prefix = "total_connections_received:";
    let mut lines = info.as_str().unwrap().lines();
    let number = lines.find_map(|line| line.strip_prefix(prefix));
    number.unwrap().trim().parse().unwrap()
}

/// Waits until this link has the only connection to the server.
async fn alone(link: &Link) {
    let begun = Instant::now();
    loop {
        let list = link.command(&["CLIENT", "LIST"], SECOND).await.unwrap();
        if list.as_str().unwrap().lines().count() == 1 {
            break;
        }
        assert!(begun.elapsed() < 10 * SECOND, "{list:?}");
        sleep(ms(10)).await;
    }
}

async fn link(server: &SpawnedServer) -> Arc<Link> {
    linked(settings(server, Handle::current())).await
}

fn runtime() -> Runtime {
    let mut builder = Builder::new_multi_thread();
    builder.worker_threads(1).enable_all().build().unwrap()
}

async fn run(
    link: &Link,
    script: &'static Script,
    key: &str,
    args: &[Arg],
) -> Result<Value, StoreError> {
    let call = Call::new(script, [key.into()], args.iter().cloned());
    let until = link.until(clock::Instant::now());
    let answer = link.eval(&call, until, false, None).await;
    answer.map(|reply| reply.value)
}

async fn get(link: &Link, key: &str) -> Value {
    link.command(&["GET", key], SECOND).await.unwrap()
}

/// Neither of its tasks keeps the link or its connection alive.
#[tokio::test]
async fn a_link_that_is_dropped_is_closed() {
    let server = SpawnedServer::start().unwrap();
    let (dropped, watches) = (link(&server).await, link(&server).await);
    dropped.command(&["PING"], SECOND).await.unwrap();
    drop(dropped);
    alone(&watches).await;
    watches.close().await;
}

/// At any moment, whether the server is healthy or silent.
#[tokio::test]
async fn a_connect_that_is_dropped_leaves_nothing_behind() {
    for &wire in WIRES {
        let server = SpawnedServer::start().unwrap();
        let watches = link(&server).await;
        let dial = || over(wire, settings(&server, Handle::current()));
        for i in 0..200 {
            let dropped = timeout(Duration::from_micros(15 * i), dial().connect(SECOND)).await;
            if let Ok(connected) = dropped {
                connected.unwrap().end();
            }
        }
        alone(&watches).await;
        let before = accepted(&watches).await;
        server.stop().unwrap();
        assert!(timeout(ms(100), dial().connect(SECOND)).await.is_err());
        assert!(dial().connect(ms(100)).await.is_err());
        server.cont().unwrap();
        while accepted(&watches).await < before + 2 {
            sleep(ms(10)).await;
        }
        alone(&watches).await;
        watches.close().await;
    }
}

#[cfg(feature = "fred")]
#[tokio::test]
async fn a_client_of_freds_that_is_dropped_leaves_nothing_behind() {
    let server = SpawnedServer::start().unwrap();
    let watches = link(&server).await;
    let config = Config::from_url(&format!("redis://{}", server.addr())).unwrap();
    let before = accepted(&watches).await;
    server.stop().unwrap();
    let connects = fred_client(
        &config,
        PerformanceConfig::default(),
        ConnectionConfig::default(),
    );
    assert!(timeout(ms(100), connects).await.is_err());
    server.cont().unwrap();
    while accepted(&watches).await <= before {
        sleep(ms(10)).await;
    }
    alone(&watches).await;
    watches.close().await;
}

/// A provider that never returns.
struct Silent;

#[async_trait::async_trait]
impl CredentialProvider for Silent {
    async fn fetch(&self, _: &Address) -> Result<Credentials, NotConnected> {
        std::future::pending().await
    }
}

/// Links of one pace connect one after the other.
#[tokio::test]
async fn a_link_that_has_ended_holds_up_no_other() {
    let server = SpawnedServer::start().unwrap();
    let pace = Arc::new(Pace::new());
    let waits = Link::connect(Dialer::new(settings(&server, Handle::current())), &pace);
    let waits = waits.await.unwrap();
    let mut ended = Vec::new();
    for _ in 0..3 {
        let mut settings = settings(&server, Handle::current());
        settings.connect_timeout = 60 * SECOND;
        settings.server.credentials = Some(Silent.into());
        let dial = Dialer {
            first_limit: 60 * SECOND,
            ..Dialer::new(settings)
        };
        ended.push(Link::lazy(dial, &pace));
    }
    sleep(ms(50)).await;
    ended[0].abandon();
    ended[1].close().await;
    ended.remove(2);
    waits.reset().await;
    timeout(30 * SECOND, waits.wait_up())
        .await
        .expect("the others have given up their turns");
}

#[tokio::test]
async fn times_may_have_no_limit() {
    for &wire in WIRES {
        let server = SpawnedServer::start().unwrap();
        let watches = link(&server).await;
        let dial = || {
            let mut settings = settings(&server, Handle::current());
            (settings.connect_timeout, settings.command_timeout) = (Duration::MAX, Duration::MAX);
            over(wire, settings)
        };
        let pace = Arc::new(Pace::new());
        let leaves = Link::connect(dial(), &pace).await.unwrap();
        leaves.command(&["PING"], Duration::MAX).await.unwrap();
        leaves.leave();
        alone(&watches).await;
        server.stop().unwrap();
        let waits = Link::lazy(dial(), &pace);
        // longer than a handshake may take
        sleep(3 * SECOND).await;
        server.cont().unwrap();
        timeout(30 * SECOND, waits.wait_up())
            .await
            .expect("it connects");
    }
}

#[tokio::test]
async fn a_sink_that_panics_once_hears_on() {
    for &wire in WIRES {
        let server = SpawnedServer::start().unwrap();
        let publishes = link(&server).await;
        let heard = Arc::new(AtomicU32::new(0));
        let mut settings = settings(&server, Handle::current());
        let counts = Arc::clone(&heard);
        settings.sink = Some(Arc::new(move |_| {
            assert!(counts.fetch_add(1, Ordering::SeqCst) > 0, "the first one");
        }));
        let pace = Arc::new(Pace::new());
        let listens = Link::connect(over(wire, settings), &pace).await.unwrap();
        listens.subscribe(&["c".into()]).await.unwrap();
        for text in ["1", "2", "3"] {
            let words = ["PUBLISH", "c", text];
            publishes.command(&words, SECOND).await.unwrap();
        }
        let begun = Instant::now();
        while heard.load(Ordering::SeqCst) < 3 {
            assert!(begun.elapsed() < 10 * SECOND, "{wire:?}: {heard:?}");
            sleep(ms(10)).await;
        }
    }
}

/// Another server may have decided otherwise since.
#[tokio::test]
async fn a_server_that_was_left_is_not_believed() {
    let server = SpawnedServer::start().unwrap();
    let (leaves, pushes) = (link(&server).await, link(&server).await);
    let asks = tokio::spawn({
        let leaves = Arc::clone(&leaves);
        async move { leaves.command(&["BLPOP", "k", "0"], 20 * SECOND).await }
    });
    while leaves.in_flight() == 0 {
        sleep(ms(1)).await;
    }
    leaves.leave();
    pushes.command(&["RPUSH", "k", "x"], SECOND).await.unwrap();
    let error = asks.await.unwrap().unwrap_err();
    assert!(error.may_have_executed(), "{error:?}");
}

/// A command inside a script may be refused when others have written already.
#[tokio::test]
async fn an_error_inside_a_script_says_that_it_may_have_run() {
    static WRONG: Script = script(
        "redis.call('incr', KEYS[1]) redis.call('lpush', KEYS[1], 'x')",
        0,
        None,
    );
    static UNKNOWN: Script = script(
        "redis.call('incr', KEYS[1]) redis.call('nosuch', KEYS[1])",
        0,
        None,
    );
    static CAUGHT: Script = script(
        "redis.call('incr', KEYS[1]) return redis.pcall('lpush', KEYS[1], 'x')",
        0,
        None,
    );
    let server = SpawnedServer::start().unwrap();
    let link = link(&server).await;
    for (key, script) in [
        ("wrong", &WRONG),
        ("unknown", &UNKNOWN),
        ("caught", &CAUGHT),
    ] {
        let error = run(&link, script, key, &[]).await.unwrap_err();
        assert!(error.may_have_executed(), "{error}");
        let words = ["EVAL", script.source.lua, "1", key];
        // the second time, because the counter is still a number
        let error = link.command(&words, SECOND).await.unwrap_err();
        assert!(error.may_have_executed(), "{error}");
        assert_eq!(get(&link, key).await.as_str(), Some("2"));
    }
    // refused before it ran
    let error = link.command(&["LPUSH", "wrong", "x"], SECOND).await;
    assert!(!error.unwrap_err().may_have_executed());
    link.close().await;
}

/// In a bundle, the error of a command arrives with its own text.
#[test]
fn an_error_in_a_bundle_says_that_its_script_may_have_run() {
    static ALONE: Bundle = Bundle::of(&[&WRONG.source]);
    static WRONG: Script = script(
        "redis.call('incr', KEYS[1]) redis.call('lpush', KEYS[1], 'x')",
        3,
        Some(&ALONE),
    );
    let server = SpawnedServer::start().unwrap();
    let one = Builder::new_current_thread().enable_all().build().unwrap();
    one.block_on(async {
        let link = link(&server).await;
        let args = ["a", "b", "c"].map(|arg| Arg::Text(arg.into()));
        // the first call carries the text; from then on, calls are bundled
        run(&link, &WRONG, "first", &args).await.unwrap_err();
        let keys: Vec<String> = (0..8).map(|n| format!("{n}")).collect();
        let runs = keys.iter().map(|key| run(&link, &WRONG, key, &args));
        for answer in join_all(runs).await {
            let error = answer.unwrap_err();
            assert!(error.may_have_executed(), "{error}");
        }
        link.close().await;
    });
}

/// A bundle takes 1 key and 3 arguments of each call. Other calls are sent alone: extra arguments
/// would be read as commands, and missing ones would be taken from the next call.
#[test]
fn a_call_that_fits_no_bundle_is_sent_alone() {
    static BOTH: Bundle = Bundle::of(&[&TWO.source, &FOUR.source]);
    static TWO: Script = script(
        "redis.call('set', KEYS[1], ARGV[1] .. ARGV[2]) return 1",
        2,
        Some(&BOTH),
    );
    static FOUR: Script = script(
        "redis.call('set', KEYS[1], ARGV[1] .. ARGV[4]) return 1",
        4,
        Some(&BOTH),
    );
    let server = SpawnedServer::start().unwrap();
    let one = Builder::new_current_thread().enable_all().build().unwrap();
    one.block_on(async {
        let link = link(&server).await;
        let all = ["1", "a", "1", "SET injected 1"].map(|arg| Arg::Text(arg.into()));
        for (script, args) in [(&TWO, 2), (&FOUR, 4)] {
            let args = &all[..args];
            // the first call carries the text; from then on, calls could be bundled
            run(&link, script, "first", args).await.unwrap();
            let keys: Vec<String> = (0..8).map(|n| format!("{n}")).collect();
            let runs = keys.iter().map(|key| run(&link, script, key, args));
            for answer in join_all(runs).await {
                assert_eq!(answer.unwrap(), Value::Integer(1));
            }
            let wanted = if args.len() == 2 {
                "1a"
            } else {
                "1SET injected 1"
            };
            for key in &keys {
                assert_eq!(get(&link, key).await.as_str(), Some(wanted));
            }
        }
        assert_eq!(get(&link, "injected").await, Value::Null);
        link.close().await;
    });
}

/// The future is first polled after its time: its caller may rely on it being over.
#[tokio::test]
async fn what_is_first_polled_too_late_is_not_sent() {
    static INCR: Script = script("redis.call('incr', KEYS[1]) return 1", 0, None);
    let server = SpawnedServer::start().unwrap();
    let link = link(&server).await;
    let call = Call::new(&INCR, ["late".into()], []);
    let until = Until::new(clock::Instant::now(), ms(50));
    let script = link.eval(&call, until, false, None);
    sleep(ms(60)).await;
    let error = script.await.unwrap_err();
    assert_eq!(
        (error.kind(), error.may_have_executed()),
        (StoreErrorKind::Overloaded, false)
    );
    let (_, connection) = link.up().await.unwrap();
    let command = connection.call(Request::Words(&["INCR", "late"]), until);
    assert!(!StoreError::from(command.await.unwrap_err()).may_have_executed());
    assert_eq!(get(&link, "late").await, Value::Null);
    link.close().await;
}

/// BLPOP treats zero as "forever". An element that it pops after its caller has gone is lost.
#[tokio::test]
async fn a_pop_of_no_time_or_of_all_time_ends_as_it_should() {
    let server = SpawnedServer::start().unwrap();
    let pushes = link(&server).await;
    let dialer = Dialer::new(settings(&server, Handle::current()));
    let pops = Link::blocking(dialer, &Arc::new(Pace::new()));
    pops.wait_up().await;
    let list = [Arc::from("list")];
    let none = timeout(10 * SECOND, pops.pop(&list, Duration::ZERO)).await;
    assert_eq!(none.unwrap().unwrap(), None);
    pushes
        .command(&["RPUSH", "list", "x"], SECOND)
        .await
        .unwrap();
    let length = pushes.command(&["LLEN", "list"], SECOND).await.unwrap();
    assert_eq!(length, Value::Integer(1));
    // longer than a server accepts
    let forever = timeout(10 * SECOND, pops.pop(&list, Duration::MAX)).await;
    assert!(forever.unwrap().is_err());
    pops.close().await;
    pushes.close().await;
}

#[tokio::test]
async fn a_command_without_words_is_refused() {
    let server = SpawnedServer::start().unwrap();
    let link = link(&server).await;
    let epoch = link.epoch();
    let error = link.command(&[], SECOND).await.unwrap_err();
    assert!(!error.may_have_executed());
    link.command(&["PING"], SECOND).await.unwrap();
    assert_eq!(link.epoch(), epoch);
    link.close().await;
}

/// No timer is left with which a request could wait for a connection.
#[test]
fn a_link_whose_runtime_has_ended_fails_each_call() {
    static ONE: Script = script("return 1", 0, None);
    let (server, caller) = (SpawnedServer::start().unwrap(), runtime());
    for is_connected in [true, false] {
        let own = runtime();
        let link = own.block_on(async {
            if is_connected {
                return link(&server).await;
            }
            let closed = ServerSettings::new(Address::Tcp(Server::new("127.0.0.1", 1)));
            let settings = ConnectionSettings::new(closed, own.handle().clone());
            Link::lazy(Dialer::new(settings), &Arc::new(Pace::new()))
        });
        drop(own);
        caller.block_on(async {
            let channel = ["channel".to_owned()];
            let all = async {
                let errors = [
                    link.command(&["PING"], SECOND).await.unwrap_err(),
                    run(&link, &ONE, "key", &[]).await.unwrap_err(),
                    link.subscribe(&channel).await.unwrap_err(),
                    link.unsubscribe(&channel).await.unwrap_err(),
                    link.barrier().await.unwrap_err(),
                ];
                link.reset().await;
                link.close().await;
                errors
            };
            let errors = timeout(10 * SECOND, all).await.unwrap();
            for error in errors {
                assert!(!error.may_have_executed(), "{is_connected}: {error}");
            }
        });
    }
}

/// A request in flight at that moment may still be executed. A call at that moment panics as little
/// as a later one.
#[test]
fn a_runtime_that_ends_under_calls_fails_each_of_them() {
    static ONE: Script = script("return 1", 0, None);
    let (server, caller) = (SpawnedServer::start().unwrap(), runtime());
    for _ in 0..20 {
        let own = runtime();
        let link = own.block_on(link(&server));
        // longer than a socket takes at once, so that the next ones wait unsent
        let long = "x".repeat(8 << 20);
        server.stop().unwrap();
        let calls: Vec<_> = (0..4)
            .map(|n| {
                let (link, long) = (Arc::clone(&link), long.clone());
                caller.spawn(async move {
                    match n {
                        0 => drop(link.command(&["SET", "key", &long], SECOND).await),
                        1 => drop(run(&link, &ONE, &long, &[]).await),
                        2 => drop(link.subscribe(&["channel".into()]).await),
                        _ => link.reset().await,
                    }
                })
            })
            .collect();
        std::thread::sleep(ms(5));
        drop(own);
        for call in calls {
            let ended = caller.block_on(async { timeout(20 * SECOND, call).await });
            ended.expect("it hangs").expect("it panics");
        }
        server.cont().unwrap();
    }
}

/// The caller may be on another executor, without tokio's timers.
#[test]
fn a_reset_needs_no_runtime_of_the_caller() {
    let (server, own) = (SpawnedServer::start().unwrap(), runtime());
    let link = own.block_on(link(&server));
    let epoch = link.epoch();
    executor::block_on(async {
        link.reset().await;
        link.wait_up().await;
        link.command(&["PING"], SECOND).await.unwrap();
    });
    assert!(link.epoch() != epoch);
    executor::block_on(link.close());
}

/// More than the 5 s in which the credentials of one call serve other connections.
const SHARED: Duration = Duration::from_millis(5_200);

/// The first login succeeds, and the second one panics.
struct PanicsOnce(Arc<AtomicU32>);

#[async_trait::async_trait]
impl CredentialProvider for PanicsOnce {
    async fn fetch(&self, _: &Address) -> Result<Credentials, NotConnected> {
        assert_ne!(
            self.0.fetch_add(1, Ordering::AcqRel),
            1,
            "a bug in the program"
        );
        Ok(Login::default().into())
    }
}

#[tokio::test]
async fn a_credential_provider_that_panics_is_asked_again() {
    let server = SpawnedServer::start().unwrap();
    let mut settings = settings(&server, Handle::current());
    let calls = Arc::new(AtomicU32::new(0));
    settings.server.credentials = Some(PanicsOnce(Arc::clone(&calls)).into());
    let link = linked(settings).await;
    tokio::time::sleep(SHARED).await;
    link.reset().await;
    timeout(20 * SECOND, link.wait_up()).await.unwrap();
    link.command(&["PING"], SECOND).await.unwrap();
    assert_eq!(calls.load(Ordering::Acquire), 3);
    link.close().await;
}

/// Panics when it is dropped.
struct PanicsOnDrop;

impl Drop for PanicsOnDrop {
    fn drop(&mut self) {
        panic!("a bug in the program");
    }
}

/// The second login hangs, and panics when its time is over.
struct PanicsLate(AtomicU32);

#[async_trait::async_trait]
impl CredentialProvider for PanicsLate {
    async fn fetch(&self, _: &Address) -> Result<Credentials, NotConnected> {
        if self.0.fetch_add(1, Ordering::AcqRel) == 1 {
            let _panics = PanicsOnDrop;
            std::future::pending::<()>().await;
        }
        Ok(Login::default().into())
    }
}

/// The callback that counts reconnects may panic, too.
#[tokio::test]
async fn a_link_outlives_a_panic_in_what_it_calls() {
    let server = SpawnedServer::start().unwrap();
    let mut settings = settings(&server, Handle::current());
    settings.server.credentials = Some(PanicsLate(AtomicU32::new(0)).into());
    let mut dialer = Dialer::new(settings);
    dialer.first_limit = ms(50);
    dialer.reconnected = |_| panic!("a bug in the program");
    let link = Link::connect(dialer, &Arc::new(Pace::new())).await.unwrap();
    tokio::time::sleep(SHARED).await;
    link.reset().await;
    timeout(20 * SECOND, link.wait_up()).await.unwrap();
    link.command(&["PING"], SECOND).await.unwrap();
    link.close().await;
}

/// The limit of a command counts from its first poll, while it waits for a connection, too.
#[tokio::test]
async fn the_wait_for_a_connection_is_within_the_limit() {
    // nothing replies there, and nothing refuses
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let at = Server::new("127.0.0.1", listener.local_addr().unwrap().port());
    let mut settings =
        ConnectionSettings::new(ServerSettings::new(Address::Tcp(at)), Handle::current());
    settings.command_timeout = 20 * SECOND;
    let link = Link::lazy(Dialer::new(settings), &Arc::new(Pace::new()));
    tokio::select! {
        biased;
        done = link.command(&["PING"], ms(1)) => assert!(!done.unwrap_err().may_have_executed()),
        // less than the patience of a command that sets no limit
        () = sleep(ms(150)) => panic!("it is still waiting"),
    }
    link.abandon();
}

/// fred's client treats zero as "no limit", and cannot limit a single script.
#[cfg(feature = "fred")]
#[tokio::test]
async fn limits_hold_over_freds_client() {
    static ONE: Script = script("return 1", 0, None);
    let server = SpawnedServer::start().unwrap();
    let mut settings = settings(&server, Handle::current());
    // beyond the patience of this test
    settings.command_timeout = 60 * SECOND;
    let mut dialer = Dialer::new(settings);
    dialer.wire = nestlock_wire::Wire::Fred;
    let link = Link::connect(dialer, &Arc::new(Pace::new())).await.unwrap();
    run(&link, &ONE, "key", &[]).await.unwrap();
    server.stop().unwrap();
    let call = Call::new(&ONE, ["key".into()], []);
    let until = Until::new(clock::Instant::now(), ms(100));
    let script = timeout(20 * SECOND, link.eval(&call, until, false, None)).await;
    assert_eq!(script.unwrap().unwrap_err().kind(), StoreErrorKind::Timeout);
    let command = link.command(&["PING"], Duration::ZERO);
    assert!(timeout(20 * SECOND, command).await.unwrap().is_err());
    server.cont().unwrap();
    link.abandon();
}
