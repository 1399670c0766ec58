//! Events of the process: its machine sleeps, it forks, it exits normally, its log hangs.

use std::{
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use crate::support::{Server, child::Worker, eventually};

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// Subtracts the nanoseconds in a file from `CLOCK_MONOTONIC`, which stands still on Linux while
/// the machine sleeps.
const SLEEP: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
static int (*real)(clockid_t, struct timespec *);
static int fd = -2;
int clock_gettime(clockid_t id, struct timespec *ts) {
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int r = real(id, ts);
    if (r == 0 && id == CLOCK_MONOTONIC) {
        if (fd == -2) { char *p = getenv("NESTLOCK_TEST_SLEPT"); fd = p ? open(p, O_RDONLY) : -1; }
        long long off = 0;
        if (fd >= 0 && pread(fd, &off, 8, 0) == 8) {
            long long t = ts->tv_sec * 1000000000LL + ts->tv_nsec - off;
            ts->tv_sec = t / 1000000000LL; ts->tv_nsec = t % 1000000000LL;
        }
    }
    return r;
}
"#;

/// Forks at each call of `getppid`, which nothing else here calls.
const FORK: &str = "
#include <unistd.h>
pid_t getppid(void) { return fork(); }
";

/// Compiles a library in this folder, to be loaded before all others.
fn library(folder: &Path, code: &str) -> PathBuf {
    let (source, library) = (folder.join("library.c"), folder.join("library.so"));
    std::fs::write(&source, code).unwrap();
    let mut compiler = Command::new("cc");
    let compiler = compiler
        .args(["-O1", "-shared", "-fPIC", "-o"])
        .args([&library, &source])
        .arg("-ldl");
    assert!(
        compiler
            .status()
            .expect("a C compiler, which Rust links with")
            .success()
    );
    library
}

/// Starts a worker that can fork.
#[cfg(target_os = "linux")]
fn forks() -> (Server, Worker) {
    let folder = tempfile::tempdir().unwrap();
    let library = library(folder.path(), FORK);
    let server = Server::start();
    let worker = Worker::start_in(&server, ms(30_000), &[("LD_PRELOAD", &library)]);
    (server, worker)
}

/// A forked child has the sockets of its parent and none of its threads. Its calls are refused:
/// they send nothing and break nothing.
#[cfg(target_os = "linux")]
#[test]
fn a_fork_is_refused_the_client_of_its_parent() {
    let (server, mut worker) = forks();
    worker.ask("lock held");
    worker.answer_to("locked held");
    let before = server.connections();
    worker.ask("fork free");
    assert_eq!(worker.answer(), "forked Forked Forked Closed");
    // The parent keeps its connections.
    worker.ask("lock other");
    worker.answer_to("locked other");
    worker.ask("unlock held");
    assert_eq!(worker.answer_to("unlocked held"), "ok");
    assert_eq!(
        server.connections() - before,
        1,
        "the connection that sends this query"
    );
    assert!(!server.exists("free") && !server.exists("held") && server.exists("other"));
}

/// With the socket, the child shares the epoll instance that notifies its parent. It used to
/// register an address of its own there.
#[cfg(target_os = "linux")]
#[test]
fn a_fork_that_ends_its_runtime_leaves_its_parent_alone() {
    let (server, mut worker) = forks();
    worker.ask(&format!("fork_runtime {} held", server.url()));
    assert_eq!(worker.answer_to("forked"), "Forked/Forked/Forked/true");
    assert_eq!(worker.answer_to("went on"), "false/true");
}

/// A mutex that another thread holds at the fork stays locked in the child for ever. The call is
/// refused before it would wait for that mutex.
#[cfg(target_os = "linux")]
#[test]
fn a_fork_during_calls_of_other_threads_is_refused() {
    let (_server, mut worker) = forks();
    worker.ask("fork_beside 150");
    assert_eq!(worker.answer_to("forked beside"), "Forked/0");
}

/// The child has no thread that would connect. Its calls are refused, and do not wait.
#[cfg(target_os = "linux")]
#[test]
fn a_fork_of_a_lazy_client_is_refused_before_its_first_use() {
    let (server, mut worker) = forks();
    worker.ask(&format!("lazy {}", server.url()));
    worker.answer_to("made");
    worker.ask("fork free");
    assert_eq!(worker.answer(), "forked Forked Forked Closed");
    // The parent still connects on first use.
    worker.ask("lock held");
    worker.answer_to("locked held");
    assert!(!server.exists("free") && server.exists("held"));
}

/// The machine sleeps past the lease: the guards are lost when it wakes, although `CLOCK_MONOTONIC`
/// stood still. The test stops the process for that time, and sets its clock back.
#[cfg(target_os = "linux")]
#[test]
fn a_machine_that_slept_knows_on_waking_that_its_locks_are_lost() {
    let folder = tempfile::tempdir().unwrap();
    let (library, slept) = (library(folder.path(), SLEEP), folder.path().join("slept"));
    std::fs::write(&slept, 0_i64.to_ne_bytes()).unwrap();

    let server = Server::start();
    let environment: [(&str, &Path); 2] =
        [("LD_PRELOAD", &library), ("NESTLOCK_TEST_SLEPT", &slept)];
    let mut worker = Worker::start_in(&server, ms(3000), &environment);
    worker.ask("lock renewed");
    worker.answer_to("locked renewed");
    worker.ask("lock leased 3000");
    worker.answer_to("locked leased");
    worker.stop();
    let asleep = ms(4000);
    std::thread::sleep(asleep);
    std::fs::write(
        &slept,
        i64::try_from(asleep.as_nanos()).unwrap().to_ne_bytes(),
    )
    .unwrap();
    assert!(!server.exists("renewed") && !server.exists("leased"));
    worker.cont();
    let woken = std::time::Instant::now();
    // Tasks that await the loss are notified as well, although no timer has advanced.
    worker.answer_to("lost");
    worker.answer_to("lost");
    for name in ["renewed", "leased"] {
        worker.ask(&format!("is_lost {name}"));
        assert_eq!(worker.answer_to("is_lost"), "true", "{name}");
    }
    // At 3 s of the worker's clock the leased lock would end anyway, so the limit is lower.
    assert!(woken.elapsed() < ms(1500), "{:?}", woken.elapsed());
}

/// The worker drops the guard, drops the client and exits, as `main` does at its end.
#[test]
fn a_process_that_drops_its_guard_and_ends_leaves_the_lock_free() {
    let server = Server::start();
    for round in 0..15 {
        let mut worker = Worker::start_in(&server, Duration::from_secs(30), &[]);
        worker.ask("lock nightly");
        worker.answer_to("locked nightly");
        worker.ask("leave");
        worker.wait();
        // The release is sent before the process ends, or never.
        assert!(
            !server.exists("nightly"),
            "round {round}: the lock of a process that is gone"
        );
    }
}

/// The end of a runtime drops its tasks. If one of them has the last handle, the release is still
/// sent.
#[test]
fn the_end_of_a_runtime_waits_for_the_releases_of_its_tasks() {
    let server = Server::start();
    for round in 0..40 {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let client = server.client().await;
            let guard = client.mutex("nightly").unwrap().lock().await.unwrap();
            tokio::spawn(async move {
                let _held = (guard, client);
                std::future::pending::<()>().await;
            });
            tokio::time::sleep(ms(5)).await;
        });
        drop(runtime);
        assert!(
            !server.exists("nightly"),
            "round {round}: the lock of a runtime that is gone"
        );
    }
}

/// The log subscriber hangs on its pipe or disk. Renewals do not wait for it.
#[tokio::test]
async fn a_log_that_hangs_stops_no_renewal() {
    let server = Server::start();
    let mut worker = Worker::start_in(&server, ms(900), &[]);
    for name in ["lost", "kept"] {
        worker.ask(&format!("lock {name}"));
        worker.answer_to(&format!("locked {name}"));
    }
    worker.ask("deaf");
    worker.answer_to("deaf");
    // A loss logs an event, and the log hangs there.
    let client = server.client().await;
    assert!(
        client
            .reentrant_lock("lost")
            .unwrap()
            .force_unlock()
            .await
            .unwrap()
    );
    worker.answer_to("lost lost");
    let start = std::time::Instant::now();
    eventually("several leases pass", || async {
        assert!(
            server.exists("kept"),
            "not renewed after {:?}",
            start.elapsed()
        );
        start.elapsed() > ms(3000)
    })
    .await;
    worker.ask("is_lost kept");
    assert_eq!(worker.answer_to("is_lost"), "false");
}
