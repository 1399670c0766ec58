//! The runtime that reads the replies: the one in which the client was made, while that is polled;
//! otherwise the client's own thread.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
    thread,
    time::{Duration, Instant},
};

use nestlock::LockClient;
use tokio::runtime::{Builder, Runtime};

use crate::support::{
    Server,
    proxy::{Action, Proxy, Verb, with_wire},
};
#[cfg(feature = "rustls")]
use crate::tls;

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

fn current_thread() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

fn multi_thread() -> Runtime {
    Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap()
}

/// Tasks that lock and unlock until they are stopped, each a lock of its own, and one in eight also
/// a shared lock. Records the longest pair on an own lock, in milliseconds, and counts the rounds.
struct Work {
    stop: Arc<AtomicBool>,
    longest: Arc<AtomicU64>,
    pairs: Arc<AtomicU64>,
    tasks: Vec<tokio::task::JoinHandle<()>>,
}

impl Work {
    fn start(runtime: &Runtime, client: &LockClient, tasks: usize) -> Self {
        let (stop, longest, pairs): (Arc<AtomicBool>, Arc<AtomicU64>, Arc<AtomicU64>) =
            Default::default();
        let inside = Arc::new(AtomicU64::new(0));
        let tasks = (0..tasks).map(|n| {
            let (stop, longest, pairs, inside) =
                (stop.clone(), longest.clone(), pairs.clone(), inside.clone());
            let (own, shared) = (
                client.reentrant_lock(format!("own:{n}")),
                client.reentrant_lock("shared"),
            );
            let (own, shared) = (own.unwrap(), shared.unwrap());
            runtime.spawn(async move {
                while !stop.load(SeqCst) {
                    let began = Instant::now();
                    own.lock().await.unwrap().unlock().await.unwrap();
                    longest.fetch_max(u64::try_from(began.elapsed().as_millis()).unwrap(), SeqCst);
                    if n % 8 == 0 {
                        let guard = shared.lock().await.unwrap();
                        assert_eq!(inside.fetch_add(1, SeqCst), 0);
                        inside.fetch_sub(1, SeqCst);
                        guard.unlock().await.unwrap();
                    }
                    pairs.fetch_add(1, SeqCst);
                }
            })
        });
        Self {
            tasks: tasks.collect(),
            stop,
            longest,
            pairs,
        }
    }

    /// Stops the tasks, and returns the longest pair and the number of rounds.
    fn end(self, runtime: &Runtime) -> (Duration, u64) {
        self.stop.store(true, SeqCst);
        runtime.block_on(async {
            for task in self.tasks {
                tokio::time::timeout(ms(10_000), task)
                    .await
                    .expect("no task waits for ever")
                    .unwrap();
            }
        });
        (ms(self.longest.load(SeqCst)), self.pairs.load(SeqCst))
    }
}

/// Half of the command timeout. A call that misses a wake-up would wait for all of it, or for ever.
const SOON: Duration = Duration::from_millis(1_500);

/// A client works while the runtime that it was made in is not polled.
#[test]
fn a_client_works_while_its_own_runtime_is_not_polled() {
    let server = Server::start();
    let (made_in, elsewhere) = (current_thread(), multi_thread());
    let client = made_in.block_on(server.client());
    let work = Work::start(&elsewhere, &client, 32);
    thread::sleep(ms(2_000));
    let (longest, pairs) = work.end(&elsewhere);
    println!("{pairs} pairs, the longest call {longest:?}");
    assert!(longest < SOON && pairs > 100, "{pairs} pairs, {longest:?}");
}

/// Moves the socket to and fro while tasks work, and ends the runtime in which the client was made.
fn to_and_fro(connect: impl Future<Output = LockClient>) {
    let (made_in, elsewhere) = (current_thread(), multi_thread());
    let client = made_in.block_on(connect);
    let work = Work::start(&elsewhere, &client, 32);
    let began = Instant::now();
    let mut rounds = 0_u64;
    while began.elapsed() < ms(4_000) {
        made_in.block_on(async {
            // Every fourth time, long enough for this runtime to take the socket back.
            tokio::time::sleep(if rounds.is_multiple_of(4) {
                ms(1_100)
            } else {
                ms(rounds % 20)
            })
            .await;
            // The client works in this runtime as well.
            if rounds.is_multiple_of(3) {
                let lock = client.reentrant_lock("here").unwrap();
                lock.lock().await.unwrap().unlock().await.unwrap();
            }
        });
        thread::sleep(ms(rounds * 37 % 400));
        rounds += 1;
    }
    drop(made_in);
    thread::sleep(ms(300));
    let (longest, pairs) = work.end(&elsewhere);
    println!("{rounds} rounds, {pairs} pairs, the longest call {longest:?}");
    assert!(longest < SOON && pairs > 100, "{pairs} pairs, {longest:?}");
}

/// A client works while the runtime that it was made in is polled now and then.
#[test]
fn a_client_works_while_its_own_runtime_is_polled_now_and_then() {
    let server = Server::start();
    to_and_fro(server.client());
}

/// Over a Unix socket too, the connection moves between runtimes and outlives the one that it was
/// made in.
#[test]
fn the_same_over_a_unix_socket() {
    let server = Server::start_real();
    let url = with_wire(format!("redis+unix://{}", server.socket().display()));
    to_and_fro(async { LockClient::connect(url).await.unwrap() });
}

/// Over TLS too, the connection moves between runtimes and outlives the one that it was made in.
#[cfg(feature = "rustls")]
#[test]
fn the_same_over_tls() {
    let server = tls::start();
    to_and_fro(async { server.builder().connect(server.url()).await.unwrap() });
}

/// A client works on when the runtime that it was made in has ended.
#[test]
fn a_client_works_on_after_its_own_runtime_has_ended() {
    let server = Server::start();
    let elsewhere = multi_thread();
    for round in 0..10 {
        let made_in = if round % 2 == 0 {
            current_thread()
        } else {
            multi_thread()
        };
        let client = made_in.block_on(server.client());
        let work = Work::start(&elsewhere, &client, 100);
        thread::sleep(ms(40 * round));
        if round % 3 == 0 {
            made_in.shutdown_background();
        } else {
            drop(made_in);
        }
        thread::sleep(ms(300));
        let (longest, pairs) = work.end(&elsewhere);
        assert!(
            longest < SOON && pairs > 0,
            "round {round}: {pairs} pairs, {longest:?}"
        );
    }
}

/// The connections are cut while the runtime in which the client was made is blocked.
#[test]
fn a_blocked_runtime_and_a_cut_at_once() {
    let server = Server::start();
    let proxy = Proxy::start(&server);
    let (made_in, elsewhere) = (multi_thread(), multi_thread());
    let client = made_in
        .block_on(
            LockClient::builder()
                .watchdog_timeout(ms(1_500))
                .connect(proxy.url()),
        )
        .unwrap();
    let lock = client.reentrant_lock("held").unwrap();
    let held = elsewhere.block_on(lock.lock()).unwrap();
    for _ in 0..3 {
        // Both workers are blocked.
        let blocked: Vec<_> = (0..2)
            .map(|_| made_in.spawn(async { thread::sleep(ms(1_200)) }))
            .collect();
        thread::sleep(ms(100));
        proxy.cut();
        let began = Instant::now();
        elsewhere.block_on(async {
            let other = client.reentrant_lock("other").unwrap();
            other.lock().await.unwrap().unlock().await.unwrap();
        });
        assert!(began.elapsed() < SOON, "{:?}", began.elapsed());
        made_in.block_on(async {
            for task in blocked {
                task.await.unwrap();
            }
        });
        assert!(!held.is_lost());
    }
    elsewhere.block_on(held.unlock()).unwrap();
}

/// A client can be made in any runtime, or in none.
#[test]
fn a_client_is_made_anywhere() {
    let server = Server::start();
    let url = server.url();
    let pair = async |client: LockClient| {
        let lock = client.reentrant_lock("anywhere").unwrap();
        lock.lock().await.unwrap().unlock().await.unwrap();
        client
    };
    let runtime = multi_thread();
    let plain = futures::executor::block_on(LockClient::connect(&url)).unwrap();
    futures::executor::block_on(pair(plain.clone()));
    runtime.block_on(pair(plain));
    let handle = runtime.handle().clone();
    let there = url.clone();
    let blocking =
        runtime.spawn_blocking(move || handle.block_on(LockClient::connect(there)).unwrap());
    let blocking = runtime.block_on(blocking).unwrap();
    futures::executor::block_on(pair(blocking));
    let local = tokio::task::LocalSet::new();
    let single = current_thread();
    let client = local.block_on(&single, async { LockClient::connect(&url).await.unwrap() });
    runtime.block_on(pair(client.clone()));
    let joined = local.block_on(&single, async move {
        tokio::task::spawn_local(pair(client)).await.unwrap()
    });
    drop((local, single));
    futures::executor::block_on(pair(joined));
    for bare in [
        Builder::new_current_thread().build().unwrap(),
        Builder::new_multi_thread()
            .worker_threads(1)
            .build()
            .unwrap(),
    ] {
        let client = bare.block_on(LockClient::connect(&url)).unwrap();
        let client = bare.block_on(pair(client));
        runtime.block_on(pair(client));
    }
}

/// The thread that drops the last handle may be the one that reads. It does not wait for itself,
/// and the lock is released.
#[test]
fn the_last_handle_is_dropped_on_the_thread_that_reads() {
    let server = Server::start();
    for round in 0..10 {
        let made_in = current_thread();
        let name = format!("l{round}");
        let took = made_in.block_on(async {
            let client = server.client().await;
            let guard = client.reentrant_lock(&name).unwrap().lock().await.unwrap();
            let began = Instant::now();
            drop(guard);
            drop(client);
            began.elapsed()
        });
        drop(made_in);
        assert!(took < ms(450), "{took:?}");
        let until = Instant::now() + SOON;
        while server.exists(&name) {
            assert!(Instant::now() < until, "still held");
            thread::sleep(ms(5));
        }
    }
}

/// A server that hangs does not hold up the other tasks of the runtime.
#[test]
fn the_drop_of_the_last_handle_blocks_no_runtime() {
    let server = Server::start();
    for made_in in [current_thread(), multi_thread()] {
        let rounds = (0..5).map(|round| {
            let took = made_in.block_on(async {
                let client = server.client().await;
                let guard = client
                    .mutex(format!("l{round}"))
                    .unwrap()
                    .lock()
                    .await
                    .unwrap();
                server.stop();
                drop(guard);
                let began = Instant::now();
                drop(client);
                began.elapsed()
            });
            server.cont();
            took
        });
        // The shortest time counts, because a machine that stalls does not take half a second each
        // time.
        let shortest = rounds.min().unwrap();
        assert!(shortest < ms(250), "{shortest:?}");
    }
}

/// The end of a runtime waits for dropped handles: the process could end next, before the release
/// is sent.
#[test]
fn the_end_of_a_runtime_waits_for_what_was_dropped() {
    let server = Server::start();
    let proxy = Proxy::start(&server);
    for made_in in [current_thread(), multi_thread()] {
        proxy.each(Verb::Release, Action::Slow(ms(100)));
        made_in.block_on(async {
            let client = LockClient::connect(proxy.url()).await.unwrap();
            let guard = client.mutex("l").unwrap().lock().await.unwrap();
            drop(guard);
            drop(client);
        });
        drop(made_in);
        assert!(
            !server.exists("l"),
            "what a process that ends here would leave behind"
        );
        proxy.pass();
    }
}

/// Spawns a task that blocks for a while and spawns the next one. The runtime polls all woken
/// tasks, and is never idle.
fn keep_busy(step: Duration, until: Instant) {
    if Instant::now() < until {
        tokio::spawn(async move {
            thread::sleep(step);
            keep_busy(step, until);
        });
    }
}

/// This runtime polls its tasks, but checks its sockets so seldom that a lease would end in
/// between.
#[test]
fn a_runtime_that_is_polled_and_does_not_read_loses_no_lease() {
    let watchdog = ms(1_500);
    let single = Builder::new_current_thread;
    let multi = Builder::new_multi_thread;
    for (runtime, step) in [
        (
            single().enable_all().event_interval(5_000).build().unwrap(),
            ms(10),
        ),
        (
            single()
                .enable_all()
                .global_queue_interval(1)
                .build()
                .unwrap(),
            ms(20),
        ),
        (
            multi()
                .worker_threads(1)
                .enable_all()
                .event_interval(2_000)
                .build()
                .unwrap(),
            ms(2),
        ),
        (
            multi().worker_threads(1).enable_all().build().unwrap(),
            ms(24),
        ),
    ] {
        let server = Server::start();
        let client = LockClient::builder().watchdog_timeout(watchdog);
        let until = Instant::now() + 3 * watchdog;
        let (client, guard) = runtime.block_on(async {
            let client = client.connect(server.url()).await.unwrap();
            let guard = client.reentrant_lock("l").unwrap().lock().await.unwrap();
            keep_busy(step, until);
            (client, guard)
        });
        thread::scope(|scope| {
            scope.spawn(|| {
                // Another thread works with the same client in the meantime.
                while Instant::now() < until {
                    let lock = client.reentrant_lock("other").unwrap();
                    let began = Instant::now();
                    futures::executor::block_on(async {
                        lock.lock().await.unwrap().unlock().await.unwrap();
                    });
                    assert!(began.elapsed() < SOON, "{:?}", began.elapsed());
                    assert!(!guard.is_lost());
                    thread::sleep(ms(50));
                }
            });
            runtime.block_on(async {
                while Instant::now() < until {
                    tokio::time::sleep(ms(100)).await;
                }
            });
        });
        assert!(!guard.is_lost());
        futures::executor::block_on(guard.unlock()).unwrap();
    }
}

/// The socket moves to the client's own thread before the end of the runtime can break it.
#[test]
fn the_end_of_a_runtime_breaks_no_connection() {
    let server = Server::start_real();
    let elsewhere = multi_thread();
    for round in 0..40 {
        let made_in = if round % 2 == 0 {
            current_thread()
        } else {
            multi_thread()
        };
        let client = made_in.block_on(server.client());
        let work = Work::start(&elsewhere, &client, 16);
        // Gives the driver time to start.
        made_in.block_on(async { tokio::time::sleep(ms(40)).await });
        let before = server.connections();
        drop(made_in);
        thread::sleep(ms(40));
        work.end(&elsewhere);
        // The only new connection is the one that sends this query.
        assert_eq!(server.connections() - before, 1, "round {round}");
    }
}
