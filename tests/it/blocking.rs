//! Locks without async: plain threads, a thread pool, executors without tokio.

use std::{
    cell::Cell,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::atomic::{AtomicU32, Ordering::SeqCst},
    thread,
    time::{Duration, Instant},
};

use nestlock::{Error, LockClient, block_on};
use rayon::prelude::*;
use tokio::runtime::Builder;

use crate::support::Server;

fn client(server: &Server) -> LockClient {
    LockClient::connect_blocking(server.url()).unwrap()
}

/// Threads exclude each other, and a thread may take its own lock again.
#[test]
fn threads_are_owners() {
    let server = Server::start();
    let lock = client(&server).reentrant_lock("l").unwrap();
    let (inside, rounds) = (AtomicU32::new(0), AtomicU32::new(0));
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for _ in 0..20 {
                    let guard = lock.blocking_lock().unwrap();
                    assert_eq!(inside.fetch_add(1, SeqCst), 0);
                    let inner = lock.blocking_try_lock().unwrap().unwrap();
                    assert_eq!(inner.owner(), guard.owner());
                    inner.blocking_unlock().unwrap();
                    rounds.fetch_add(1, SeqCst);
                    inside.fetch_sub(1, SeqCst);
                    guard.blocking_unlock().unwrap();
                }
            });
        }
    });
    assert_eq!(rounds.into_inner(), 160);
    assert_eq!(server.dump(), []);
}

/// The jobs of a pool's thread are one owner: a mutex keeps them apart all the same.
#[test]
fn a_thread_pool_locks() {
    let server = Server::start();
    let client = client(&server);
    let counter = AtomicU32::new(0);
    (0..200).into_par_iter().for_each(|job| {
        let lock = client.mutex(format!("l:{}", job % 2)).unwrap();
        let guard = lock.blocking_lock().unwrap();
        if job % 2 == 0 {
            let before = counter.load(SeqCst);
            thread::yield_now();
            counter.store(before + 1, SeqCst);
        }
        drop(guard);
    });
    assert_eq!(counter.into_inner(), 100);
    block_on(client.idle());
    assert_eq!(server.dump(), []);
}

#[test]
fn every_form_waits_on_the_thread() {
    let server = Server::start();
    let client = client(&server);
    let stock = client.read_write_lock("stock").unwrap();
    let (one, other) = (
        stock.blocking_read().unwrap(),
        stock.blocking_read().unwrap(),
    );
    let busy = |wait| {
        let stock = &stock;
        thread::scope(|scope| {
            let write = move || stock.write_lock().blocking_try_lock_for(wait).unwrap();
            scope.spawn(write).join().unwrap().is_none()
        })
    };
    assert!(busy(Duration::from_millis(30)));
    one.blocking_unlock().unwrap();
    other.blocking_unlock().unwrap();
    stock.blocking_write().unwrap().blocking_unlock().unwrap();
    let permits = client.permits("jobs", 2).unwrap();
    let taken = [permits.blocking_acquire(), permits.blocking_acquire()];
    assert_eq!(block_on(permits.available_permits()).unwrap(), 0);
    for guard in taken {
        guard.unwrap().blocking_unlock().unwrap();
    }
    block_on(client.shutdown()).unwrap();
    let closed = client.mutex("l").unwrap().blocking_lock();
    assert!(matches!(closed, Err(Error::Closed)), "{closed:?}");
}

/// A thread that runs tasks would keep all of them from running. tokio says so in the same words.
#[test]
fn inside_a_runtime_it_panics_as_tokio_does() {
    let server = Server::start();
    let client = client(&server);
    let lock = client.reentrant_lock("l").unwrap();
    let polled = Cell::new(false);
    let panics = || {
        let call = AssertUnwindSafe(|| block_on(async { polled.set(true) }));
        let panic = catch_unwind(call).unwrap_err();
        let text = panic.downcast_ref::<&str>().map(ToString::to_string);
        let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
        let text = text.unwrap();
        assert!(
            text.contains("Cannot start a runtime from within a runtime"),
            "{text}"
        );
    };
    for runtime in [
        Builder::new_current_thread().build().unwrap(),
        Builder::new_multi_thread()
            .worker_threads(1)
            .build()
            .unwrap(),
    ] {
        runtime.block_on(async { panics() });
        assert!(!polled.get());
        // where tokio allows it
        let (theirs, runtime_entered) = (lock.clone(), runtime.enter());
        lock.blocking_lock().unwrap().blocking_unlock().unwrap();
        drop(runtime_entered);
        let blocking = move || theirs.blocking_lock().unwrap().blocking_unlock();
        runtime
            .block_on(runtime.spawn_blocking(blocking))
            .unwrap()
            .unwrap();
    }
}

/// The executor needs neither timers nor sockets: the client has its own.
#[test]
fn other_executors_lock() {
    let server = Server::start();
    let lock_in = async |name: &str| {
        let client = LockClient::connect(server.url()).await.unwrap();
        let (one, other) = (client.mutex(name).unwrap(), client.mutex(name).unwrap());
        let held = one.lock().await.unwrap();
        let wait = Duration::from_millis(20);
        assert!(other.try_lock_for(wait).await.unwrap().is_none());
        let (next, released) = futures::join!(other.lock(), held.unlock());
        released.unwrap();
        next.unwrap().unlock().await.unwrap();
        client.shutdown().await.unwrap();
    };
    block_on(lock_in("own"));
    futures::executor::block_on(lock_in("futures"));
    smol::block_on(lock_in("smol"));
    let executor = smol::Executor::new();
    let spawned = executor.spawn(lock_in("smol's task"));
    smol::block_on(executor.run(spawned));
    assert_eq!(server.dump(), []);
}

/// The client was connected on a runtime that runs no more: its own thread reads, soon.
#[test]
fn a_runtime_that_is_not_driven_costs_little() {
    let server = Server::start();
    let holder = client(&server).mutex("busy").unwrap();
    let (mut first, mut woken) = (0, 0);
    for round in 0..12 {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        let client = runtime.block_on(LockClient::connect(server.url())).unwrap();
        // the pause spreads the calls over the time between two checks
        thread::sleep(Duration::from_millis(20 * round));
        let free = client.mutex("free").unwrap();
        let outcome = free.blocking_try_lock_for(Duration::from_millis(60));
        first += u32::from(matches!(outcome, Ok(Some(_))));
        drop(outcome);

        let guard = holder.blocking_lock().unwrap();
        let busy = client.mutex("busy").unwrap();
        let waiter = thread::spawn(move || busy.blocking_lock().map(|_| Instant::now()));
        while client.stats().channels == 0 {
            thread::sleep(Duration::from_millis(5));
        }
        thread::sleep(Duration::from_millis(40));
        let freed = Instant::now();
        guard.blocking_unlock().unwrap();
        let late = waiter.join().unwrap().unwrap() - freed;
        woken += u32::from(late < Duration::from_millis(120));
    }
    assert!(
        first >= 8,
        "{first} of 12 calls for a free lock got it in time"
    );
    assert!(woken >= 8, "{woken} of 12 waiters were woken in time");
}
