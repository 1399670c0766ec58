//! Elections: there is one leader at a time, and its work has ended before the next one starts.

use std::{
    future::{Future, poll_fn},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::SeqCst},
    },
    task::Poll,
    time::{Duration, Instant},
};

use nestlock::{Error, FencingToken, LockClient};
use nestlock_embedded::{EmbeddedServer, SpawnedServer};
use nestlock_recipes::leader::{Deposed, Leader};

use crate::support::{
    Child, OnDrop, child, client, eventually, exists, ms, poll_times, run_child, say,
};

fn candidate(client: &LockClient, identity: &str) -> Leader {
    Leader::new(client, "office").unwrap().identity(identity)
}

async fn leader_of(candidate: &Leader) -> Option<String> {
    candidate
        .leader()
        .await
        .unwrap()
        .map(|leading| leading.identity)
}

#[tokio::test]
async fn one_leads_at_a_time_and_all_know_who() {
    let server = EmbeddedServer::start().unwrap();
    let (a, b) = (
        candidate(&client(server.url()).await, "a:1 x"),
        candidate(&client(server.url()).await, "b:2"),
    );
    assert_eq!(b.leader().await.unwrap(), None);
    let first = a.campaign().await.unwrap();
    let leading = b.leader().await.unwrap().unwrap();
    assert_eq!(
        (&*leading.identity, leading.token),
        ("a:1 x", first.token())
    );
    // meanwhile neither the other candidate nor the same one, in the same task, leads
    for other in [&a, &b] {
        assert!(poll_times(other.campaign(), 5).await.is_none());
    }
    let next = tokio::spawn({
        let b = b.clone();
        async move { b.campaign().await.unwrap() }
    });
    assert!(first.remaining() > Duration::ZERO);
    let token = first.token();
    first.resign().await.unwrap();
    let second = next.await.unwrap();
    assert!(second.token() > token);
    assert_eq!(leader_of(&a).await.unwrap(), "b:2");
    drop(second);
    eventually("no candidate leads", || async {
        leader_of(&a).await.is_none()
    })
    .await;
}

/// A leader that is elected and has not written its identity yet is not taken for the previous
/// leader.
#[tokio::test]
async fn an_unannounced_leader_is_not_taken_for_the_one_before() {
    let server = EmbeddedServer::start().unwrap();
    let (a, b) = (client(server.url()).await, client(server.url()).await);
    candidate(&a, "past")
        .campaign()
        .await
        .unwrap()
        .resign()
        .await
        .unwrap();
    // holds the office without writing an identity
    let guard = b.fenced_lock("office").unwrap().lock().await.unwrap();
    assert_eq!(leader_of(&candidate(&a, "")).await, None);
    guard.unlock().await.unwrap();
}

/// A candidate is delayed between its election and its write until another one leads.
#[tokio::test]
async fn a_past_leader_does_not_overwrite_who_leads() {
    let server = EmbeddedServer::start().unwrap();
    let (a, b) = (client(server.url()).await, client(server.url()).await);
    let (past, next) = (
        candidate(&a, "past").lease(ms(60_000)),
        candidate(&b, "next"),
    );
    for _ in 0..50 {
        let mut campaign = Box::pin(past.campaign());
        // poll until the server has the request, and the client has no reply yet
        let elected = poll_fn(|cx| {
            if let Poll::Ready(term) = campaign.as_mut().poll(cx) {
                return Poll::Ready(Some(term));
            }
            let mut looks = (0..20).map(|_| {
                std::thread::sleep(ms(1));
                exists(server.addr(), "office")
            });
            if looks.any(|there| there) {
                Poll::Ready(None)
            } else {
                Poll::Pending
            }
        });
        if let Some(too_fast) = elected.await {
            too_fast.unwrap().resign().await.unwrap();
            continue;
        }
        server.advance(ms(61_000));
        let leads = next.campaign().await.unwrap();
        let refused = campaign.await;
        assert_eq!(leader_of(&next).await.as_deref(), Some("next"));
        leads.resign().await.unwrap();
        if matches!(refused, Err(Error::StaleToken { .. })) {
            return;
        }
    }
    panic!("it was never late");
}

/// The server hangs: `lost` resolves a third of the lease before its end, and the work is dropped
/// at the end.
#[tokio::test]
async fn work_is_warned_before_its_lease_ends_and_then_dropped() {
    let server = EmbeddedServer::start().unwrap();
    let leader = candidate(&client(server.url()).await, "a").lease(ms(4_500));
    let term = leader.campaign().await.unwrap();
    server.pause();
    let told = Arc::new(AtomicU32::new(0));
    let lost = term
        .run(async {
            let deposed = term.lost().await;
            assert!(matches!(deposed, Deposed::NotRenewed), "{deposed}");
            let left = term.remaining();
            assert!(left > Duration::ZERO && left <= ms(1_500), "{left:?}");
            told.store(1, SeqCst);
            std::future::pending::<()>().await;
        })
        .await;
    assert!(matches!(lost, Err(Error::Lost { .. })) && told.load(SeqCst) == 1);
    assert!(matches!(
        term.lost().await,
        Deposed::Lost(Error::Lost { .. })
    ));
    server.resume();
}

#[tokio::test]
async fn what_is_asked_for_above_a_third_of_the_lease_counts_as_that() {
    let server = EmbeddedServer::start().unwrap();
    let leader = candidate(&client(server.url()).await, "a")
        .lease(ms(600))
        .step_down_before(Duration::MAX);
    let term = leader.campaign().await.unwrap();
    // the lease was renewed in the meantime
    assert!(tokio::time::timeout(ms(1_500), term.lost()).await.is_err());
}

/// Work never outlives its term: dropped by `lead`, with `lead`, or at a loss, it ends while the
/// record still exists.
#[tokio::test]
async fn work_ends_before_the_office_is_given_up() {
    let server = EmbeddedServer::start().unwrap();
    let client = client(server.url()).await;
    let leader = candidate(&client, "a");
    let (addr, dropped) = (server.addr(), Arc::new(AtomicU32::new(0)));
    let held = || {
        let dropped = Arc::clone(&dropped);
        OnDrop(move || {
            assert!(exists(addr, "office"), "given up, and the work is there");
            dropped.fetch_add(1, SeqCst);
        })
    };
    // the work ends by itself
    let lead = leader.lead(async |_| {
        let _held = held();
        tokio::task::yield_now().await;
    });
    tokio::select! {
        ended = lead => panic!("{ended}"),
        () = eventually("two terms", || async { dropped.load(SeqCst) >= 2 }) => {}
    }
    client.idle().await;
    assert!(!exists(addr, "office"));
    // `lead` is dropped with its work
    let seen = dropped.load(SeqCst);
    let lead = leader.lead(async |_| {
        let _held = held();
        std::future::pending::<()>().await;
    });
    tokio::select! {
        ended = lead => panic!("{ended}"),
        () = eventually("a term", || async { exists(addr, "office") }) => {}
    }
    client.idle().await;
    assert!(!exists(addr, "office") && dropped.load(SeqCst) <= seen + 1);
}

#[tokio::test]
async fn it_leads_again_after_each_loss_and_after_an_outage() {
    let server = EmbeddedServer::start().unwrap();
    let port = server.addr().port();
    let client = client(server.url()).await;
    let leader = candidate(&client, "a").lease(ms(300));
    let (terms, at_work) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
    let lead = tokio::spawn({
        let (terms, at_work) = (Arc::clone(&terms), Arc::clone(&at_work));
        async move {
            let mut last = None;
            leader
                .lead(|term| {
                    assert!(last.replace(term.token()) < Some(term.token()));
                    assert_eq!(at_work.fetch_add(1, SeqCst), 0);
                    terms.fetch_add(1, SeqCst);
                    let at_work = Arc::clone(&at_work);
                    async move {
                        let _work = OnDrop(|| assert_eq!(at_work.fetch_sub(1, SeqCst), 1));
                        let _term = term;
                        std::future::pending::<()>().await;
                    }
                })
                .await
        }
    });
    for term in 1..=3 {
        eventually("the next term", || async { terms.load(SeqCst) == term }).await;
        server.advance(Duration::from_secs(60));
    }
    eventually("the next term", || async { terms.load(SeqCst) == 4 }).await;
    drop(server);
    eventually("its end", || async { at_work.load(SeqCst) == 0 }).await;
    let _server = EmbeddedServer::start_on(port).unwrap();
    eventually("a term after the outage", || async {
        terms.load(SeqCst) == 5
    })
    .await;
    client.shutdown().await.unwrap();
    assert!(matches!(lead.await.unwrap(), Error::Closed));
}

#[tokio::test]
async fn an_observer_reports_changes_and_nothing_else() {
    let server = EmbeddedServer::start().unwrap();
    let client = client(server.url()).await;
    let mut observer = candidate(&client, "").observe();
    assert_eq!(observer.next().await.unwrap(), None);
    let (a, b) = (candidate(&client, "a"), candidate(&client, "b"));
    let term = a.campaign().await.unwrap();
    let leading = observer.next().await.unwrap().unwrap();
    assert_eq!((&*leading.identity, leading.token), ("a", term.token()));
    for _ in 0..40 {
        assert!(
            tokio::time::timeout(ms(30), observer.next()).await.is_err(),
            "nothing has changed"
        );
    }
    term.resign().await.unwrap();
    let term = b.campaign().await.unwrap();
    // dropped again and again, `next` still reports the change
    let observer = Arc::new(tokio::sync::Mutex::new(observer));
    eventually("the next leader is reported", || async {
        let mut observer = observer.lock().await;
        let told = tokio::time::timeout(ms(30), observer.next()).await;
        told.is_ok_and(|told| told.unwrap().is_some_and(|leading| leading.identity == "b"))
    })
    .await;
    drop(term);
}

/// Each future is dropped at each poll: then no candidate leads, and another one can.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_future_may_be_dropped_at_any_poll() {
    let server = EmbeddedServer::start().unwrap();
    let (a, b) = (client(server.url()).await, client(server.url()).await);
    let (leader, other) = (candidate(&a, "a"), candidate(&b, "b"));
    let free = async |what: &str, k: u32| {
        a.idle().await;
        assert!(
            !exists(server.addr(), "office"),
            "{what}, {k} polls: still held"
        );
        other.campaign().await.unwrap().resign().await.unwrap();
        assert_eq!(
            (a.stats().holds, a.stats().settling),
            (0, 0),
            "{what}, {k} polls"
        );
    };
    macro_rules! at_every_poll {
        ($what:literal, $call:expr) => {
            let (mut k, mut ends) = (1, 0);
            while ends < 3 {
                assert!(k < 100, "{} never ends", $what);
                ends += u32::from(poll_times($call, k).await.is_some());
                free($what, k).await;
                k += 1;
            }
        };
    }
    at_every_poll!("campaign", leader.campaign());
    at_every_poll!("run and resign", async {
        let term = leader.campaign().await.unwrap();
        term.run(tokio::task::yield_now()).await.unwrap();
        term.resign().await.unwrap();
    });
    at_every_poll!("lost", async {
        let term = leader.campaign().await.unwrap();
        tokio::select! {
            deposed = term.lost() => panic!("{deposed}"),
            () = tokio::time::sleep(ms(2)) => {}
        }
    });
    at_every_poll!("leader", leader.leader());
    let mut observer = leader.observe();
    at_every_poll!("next", tokio::time::timeout(ms(3), observer.next()));
    at_every_poll!(
        "lead",
        tokio::time::timeout(ms(8), leader.lead(async |_| tokio::task::yield_now().await))
    );
}

#[test]
fn a_candidate_process() {
    let Some(words) = child() else { return };
    let [url] = &words[..] else {
        panic!("{words:?}")
    };
    run_child(async move {
        let leader =
            candidate(&client(url).await, &std::process::id().to_string()).lease(ms(1_500));
        panic!(
            "{}",
            leader.lead(async |_| std::future::pending().await).await
        );
    });
}

#[test]
#[cfg(target_os = "linux")]
fn a_candidate_that_forks() {
    let Some(words) = child() else { return };
    let [url] = &words[..] else {
        panic!("{words:?}")
    };
    run_child(async move {
        let leader = candidate(&client(url).await, "forks");
        let out = std::io::stdout().lock();
        // the preloaded library of the test makes this a fork
        if std::os::unix::process::parent_id() == 0 {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_time()
                .build()
                .unwrap();
            let ended =
                std::thread::spawn(move || runtime.block_on(leader.lead(async |_| ())).to_string());
            say(ended.join().unwrap());
            std::process::exit(0);
        }
        drop(out);
        std::future::pending::<()>().await;
    });
}

/// Without this error the candidate would retry forever, since the client belongs to the parent.
#[test]
#[cfg(target_os = "linux")]
fn a_candidate_in_a_fork_gets_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let (source, library) = (folder.path().join("fork.c"), folder.path().join("fork.so"));
    // forks in `getppid`, which nothing else here calls
    std::fs::write(
        &source,
        "#include <unistd.h>\npid_t getppid(void) { return fork(); }\n",
    )
    .unwrap();
    let mut compiler = std::process::Command::new("cc");
    let compiler = compiler
        .args(["-shared", "-fPIC", "-o"])
        .args([&library, &source]);
    assert!(
        compiler
            .status()
            .expect("a C compiler, which Rust links with")
            .success()
    );
    let server = SpawnedServer::start().unwrap();
    let child = Child::start_in(
        "leader::a_candidate_that_forks",
        &[&server.url()],
        &[("LD_PRELOAD", &library)],
    );
    let told = child.line();
    assert!(told.contains("Forked"), "{told}");
}

/// The leader is killed: the next one leads once the lease has ended, with a higher token.
#[tokio::test]
async fn when_the_leader_is_killed_another_process_leads() {
    let server = SpawnedServer::start().unwrap();
    let observer = candidate(&client(server.url()).await, "");
    let start = || Child::start("leader::a_candidate_process", &[&server.url()]);
    let mut children = [start(), start(), start()];
    let next = async |last: Option<FencingToken>| loop {
        match observer.leader().await.unwrap() {
            Some(leading) if Some(leading.token) > last => return leading,
            _ => tokio::time::sleep(ms(2)).await,
        }
    };
    let mut leading = next(None).await;
    for _ in 0..3 {
        let leads = children
            .iter_mut()
            .find(|child| child.pid().to_string() == leading.identity)
            .expect("one of them");
        let killed = Instant::now();
        leads.kill();
        *leads = start();
        leading = tokio::time::timeout(Duration::from_secs(60), next(Some(leading.token)))
            .await
            .expect("the next one");
        println!(
            "the next one leads {:?} after the kill, with a lease of 1.5 s",
            killed.elapsed()
        );
    }
}

fn is_send<T: Send + 'static>(_: T) {}

#[tokio::test]
async fn its_futures_may_be_spawned() {
    let server = EmbeddedServer::start().unwrap();
    let leader = candidate(&client(server.url()).await, "a");
    is_send(async move {
        leader
            .campaign()
            .await
            .unwrap()
            .run(async {})
            .await
            .unwrap();
        leader.leader().await.unwrap();
        leader.observe().next().await.unwrap();
        leader
            .lead(|term| async move { drop(term.lost().await) })
            .await
    });
}
