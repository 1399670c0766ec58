//! A hold moves from guard to guard, across clients. No other owner gets the lock in between, and
//! the hold moves only once.

use std::{collections::HashMap, fmt::Write as _, time::Duration};

use futures::future::join_all;
use nestlock::{
    AcquireOptions, Error, HandOver, Lock, LockClient, LossReason, OwnerId, RedLockOptions,
};

use crate::{
    cancel::poll_times,
    contract::nothing_is_left,
    support::{
        Server, eventually,
        proxy::{Action, Proxy, Verb},
    },
};

pub const KEEP: Duration = Duration::from_secs(60);

pub fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// Returns a lock of each kind with its name.
pub fn kinds(client: &LockClient) -> Vec<(&'static str, Lock)> {
    vec![
        ("mutex", client.mutex("mutex").unwrap()),
        ("reentrant", client.reentrant_lock("reentrant").unwrap()),
        (
            "non-reentrant",
            client.non_reentrant_lock("non-reentrant").unwrap(),
        ),
        ("spin", client.spin_lock("spin").unwrap()),
        ("fair", client.fair_lock("fair").unwrap()),
        ("fenced", client.fenced_lock("fenced").unwrap()),
        ("string", client.string_lock("string").unwrap()),
        ("signal", client.signal_lock("signal").unwrap()),
        ("read", client.read_write_lock("read").unwrap().read_lock()),
        (
            "write",
            client.read_write_lock("write").unwrap().write_lock(),
        ),
        (
            "permits",
            client.permits("permits", 1).unwrap().many(1).unwrap(),
        ),
    ]
}

/// Returns the lock that `lock` excludes: the same lock, or the write side for a reader.
pub fn rival(client: &LockClient, kind: &str, lock: &Lock) -> Lock {
    if kind == "read" {
        client.read_write_lock("read").unwrap().write_lock()
    } else {
        lock.clone()
    }
}

/// Returns a hold in hand-over whose scripts the server already knows, so that an adopt is one
/// request.
pub async fn known_and_on_its_way(here: &Lock, there: &Lock) -> HandOver {
    let first = here.lock().await.unwrap().hand_over(KEEP).await.unwrap();
    there.adopt(&first).await.unwrap().unlock().await.unwrap();
    here.lock().await.unwrap().hand_over(KEEP).await.unwrap()
}

#[tokio::test]
async fn a_hold_of_each_kind_moves_to_another_client_once() {
    let server = Server::start();
    let all = 0..kinds(&server.client().await).len();
    let clients = join_all(all.map(|at| OwnerId::scope(moves_once(&server, at)))).await;
    nothing_is_left(&server, &clients.iter().flatten().collect::<Vec<_>>()).await;
}

/// Moves a hold of one kind between clients of its own.
async fn moves_once(server: &Server, at: usize) -> [LockClient; 3] {
    // A renewal is due every second and has one second for its reply: longer than a busy machine
    // stalls this process.
    let quick = || server.client_with(|builder| builder.watchdog_timeout(ms(3_000)));
    let (a, b, c) = (quick().await, quick().await, server.client().await);
    let [(kind, here), (_, there), (_, elsewhere)] =
        [&a, &b, &c].map(|client| kinds(client).swap_remove(at));
    let rivals = [rival(&a, kind, &here), rival(&c, kind, &elsewhere)];
    let guard = here.lock().await.unwrap();
    let text = guard.hand_over(KEEP).await.unwrap().to_text();
    assert!(
        guard.is_lost() && guard.remaining().is_zero(),
        "{kind}: the giver has given it up"
    );
    assert!(
        matches!(guard.unlock().await, Err(Error::NotHeld { .. })),
        "{kind}"
    );
    // The entry may outlive the hand-over for a moment if the watchdog checks the hold just then.
    eventually("the giver forgets it", || async { a.stats().holds == 0 }).await;
    for rival in &rivals {
        assert!(
            rival.try_lock().await.unwrap().is_none(),
            "{kind}: another owner got it in between"
        );
    }
    let on_its_way = HandOver::from_text(&text).unwrap();
    let guard = there.adopt(&on_its_way).await.unwrap();
    for lock in [&here, &there, &elsewhere] {
        let again = lock.adopt(&on_its_way).await;
        assert!(
            matches!(
                again,
                Err(Error::NotHeld { .. } | Error::NotReentrant { .. })
            ),
            "{kind}: {again:?}"
        );
    }
    let holders = there.inspect().await.unwrap().unwrap().holders;
    assert_eq!(holders, [(guard.owner(), 1)], "{kind}");
    // The hold is renewed beyond its lease.
    let start = std::time::Instant::now();
    while start.elapsed() < ms(4_500) {
        assert!(!guard.is_lost(), "{kind}");
        assert!(
            rivals[1].try_lock().await.unwrap().is_none(),
            "{kind}: two owners hold it"
        );
        tokio::time::sleep(ms(50)).await;
    }
    // A waiter is woken.
    let waiter = tokio::spawn({
        let rival = rivals[1].clone();
        async move { rival.lock().await.unwrap().unlock().await }
    });
    guard.unlock().await.unwrap();
    waiter.await.unwrap().unwrap();
    [a, b, c]
}

#[tokio::test]
async fn a_fenced_locks_next_guard_has_a_higher_token() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let (here, there) = (a.fenced_lock("l").unwrap(), b.fenced_lock("l").unwrap());
    let guard = here.lock().await.unwrap();
    let first = guard.fencing_token().unwrap();
    let guard = there
        .adopt(&guard.hand_over(KEEP).await.unwrap())
        .await
        .unwrap();
    let second = guard.fencing_token().unwrap();
    let guard = here
        .adopt(&guard.hand_over(KEEP).await.unwrap())
        .await
        .unwrap();
    let third = guard.fencing_token().unwrap();
    assert!(
        first < second && second < third,
        "{first:?} {second:?} {third:?}"
    );
    guard.unlock().await.unwrap();
}

#[tokio::test]
async fn the_giver_may_take_it_back_and_re_enter_it() {
    let server = Server::start();
    let client = server.client().await;
    let lock = client.reentrant_lock("l").unwrap();
    let guard = lock.lock().await.unwrap();
    let on_its_way = guard.hand_over(KEEP).await.unwrap();
    let back = lock.adopt(&on_its_way).await.unwrap();
    let nested = lock.lock().await.unwrap();
    assert_eq!(lock.hold_count(&back.owner()).await.unwrap(), 2);
    nested.unlock().await.unwrap();
    back.unlock().await.unwrap();
    // The old guard can no longer release anything.
    assert!(matches!(guard.unlock().await, Err(Error::NotHeld { .. })));
    nothing_is_left(&server, &[&client]).await;
}

/// An unclaimed hand-over is not renewed, whatever happens to the giver.
#[tokio::test]
async fn an_unclaimed_hand_over_is_over_in_time() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    for ((kind, here), (_, there)) in kinds(&a).into_iter().zip(kinds(&b)) {
        let guard = here.lock().await.unwrap();
        let on_its_way = guard.hand_over(ms(300)).await.unwrap();
        let left = there.remaining_lease().await.unwrap();
        // The record of a signal lock lives for whole seconds.
        let most = if kind == "signal" { ms(1000) } else { ms(300) };
        assert!(left.is_none_or(|left| left <= most), "{kind}: {left:?}");
        let start = std::time::Instant::now();
        eventually("it is free", || async {
            rival(&b, kind, &there).try_lock().await.unwrap().is_some()
        })
        .await;
        assert!(
            start.elapsed() < Duration::from_secs(10),
            "{kind}: as long as its lease"
        );
        assert!(
            matches!(there.adopt(&on_its_way).await, Err(Error::NotHeld { .. })),
            "{kind}"
        );
    }
    nothing_is_left(&server, &[&a, &b]).await;
}

#[tokio::test]
async fn the_givers_shutdown_leaves_it_alone() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let on_its_way = a
        .mutex("l")
        .unwrap()
        .lock()
        .await
        .unwrap()
        .hand_over(KEEP)
        .await
        .unwrap();
    a.shutdown().await.unwrap();
    let guard = b.mutex("l").unwrap().adopt(&on_its_way).await.unwrap();
    guard.unlock().await.unwrap();
}

/// The hand-over's text is all that survives the giver, and the server restarts with the data that
/// it persisted.
#[tokio::test]
async fn what_is_on_its_way_outlasts_a_restart_if_the_record_does() {
    for persists in [true, false] {
        let server = if persists {
            Server::start_with(&["--appendonly", "yes", "--appendfsync", "always"])
        } else {
            Server::start()
        };
        let (a, b, c) = (
            server.client().await,
            server.client().await,
            server.client().await,
        );
        let mut texts = Vec::new();
        for (_, here) in kinds(&a) {
            texts.push(
                here.lock()
                    .await
                    .unwrap()
                    .hand_over(KEEP)
                    .await
                    .unwrap()
                    .to_text(),
            );
        }
        server.restart();
        // Otherwise an adopt may be lost with the connection and end unconfirmed.
        for client in [&a, &b, &c] {
            let lock = client.reentrant_lock("reentrant").unwrap();
            eventually("it is connected again", || async {
                lock.is_locked().await.is_ok()
            })
            .await;
        }
        for (((kind, here), (_, there)), text) in kinds(&a).into_iter().zip(kinds(&b)).zip(&texts) {
            let on_its_way = HandOver::from_text(text).unwrap();
            let adopted = there.adopt(&on_its_way).await;
            if !persists {
                assert!(
                    matches!(adopted, Err(Error::NotHeld { .. })),
                    "{kind}: {adopted:?}"
                );
                let back = here.adopt(&on_its_way).await;
                assert!(
                    matches!(back, Err(Error::NotHeld { .. })),
                    "{kind}: {back:?}"
                );
                here.lock().await.unwrap().unlock().await.unwrap();
                continue;
            }
            let guard = adopted.unwrap_or_else(|error| panic!("{kind}: {error}"));
            let rival = rival(
                &c,
                kind,
                &kinds(&c)
                    .into_iter()
                    .find(|(name, _)| *name == kind)
                    .unwrap()
                    .1,
            );
            assert!(
                rival.try_lock().await.unwrap().is_none(),
                "{kind}: two owners hold it"
            );
            guard
                .unlock()
                .await
                .unwrap_or_else(|error| panic!("{kind}: {error}"));
        }
        nothing_is_left(&server, &[&a, &b, &c]).await;
    }
}

/// A hand-over that is refused leaves the hold as it was, and the error says why.
#[tokio::test]
async fn what_cannot_move_is_held_as_before() {
    let server = Server::start();
    let client = server.client().await;
    let refused = |outcome: nestlock::Result<HandOver>, why: &str| match outcome {
        Err(Error::CannotHandOver { reason, .. }) => assert!(reason.contains(why), "{reason}"),
        other => panic!("{other:?}"),
    };
    let lock = client.reentrant_lock("nested").unwrap();
    let (outer, inner) = (lock.lock().await.unwrap(), lock.lock().await.unwrap());
    refused(inner.hand_over(KEEP).await, "more than once");
    refused(outer.hand_over(KEEP).await, "more than once");
    assert_eq!(server.record("nested"), [(outer.owner().to_string(), 2)]);
    assert!(matches!(
        outer.hand_over(Duration::ZERO).await,
        Err(Error::InvalidLease { .. })
    ));
    // A nested hold that was dropped a moment ago does not block the hand-over.
    drop(inner);
    let guard = lock
        .adopt(&outer.hand_over(KEEP).await.unwrap())
        .await
        .unwrap();
    assert_eq!(server.record("nested"), [(guard.owner().to_string(), 1)]);
    guard.unlock().await.unwrap();
    drop(outer);

    let both = client.read_write_lock("both").unwrap();
    let (write, read) = (both.write().await.unwrap(), both.read().await.unwrap());
    refused(write.hand_over(KEEP).await, "reads and writes");
    refused(read.hand_over(KEEP).await, "reads and writes");
    write.unlock().await.unwrap();
    let on_its_way = read.hand_over(KEEP).await.unwrap();
    drop(read);
    both.read_lock()
        .adopt(&on_its_way)
        .await
        .unwrap()
        .unlock()
        .await
        .unwrap();

    let (kept, given) = (lock.lock().await.unwrap(), lock.lock().await.unwrap());
    let owner = given.leave_to_lease();
    refused(kept.hand_over(KEEP).await, "more than once");
    kept.unlock().await.unwrap();
    lock.release(&owner).await.unwrap();

    let members = [client.mutex("m1").unwrap(), client.mutex("m2").unwrap()];
    for several in [
        client.multi_lock(members.clone()).unwrap(),
        client
            .red_lock_over(members, RedLockOptions::new())
            .unwrap(),
    ] {
        let guard = several.lock().await.unwrap();
        refused(guard.hand_over(KEEP).await, "several");
        let other = client
            .mutex("m3")
            .unwrap()
            .lock()
            .await
            .unwrap()
            .hand_over(KEEP)
            .await
            .unwrap();
        assert!(matches!(
            several.adopt(&other).await,
            Err(Error::CannotHandOver { .. })
        ));
        guard.unlock().await.unwrap();
        client.mutex("m3").unwrap().force_unlock().await.unwrap();
    }
    nothing_is_left(&server, &[&client]).await;
}

/// A lost hold cannot be handed over, whether or not the client has noticed the loss.
#[tokio::test]
async fn what_was_lost_does_not_move() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let lock = a.reentrant_lock("l").unwrap();
    // The ledger knows of the first loss, but not of the second.
    let guard = lock
        .lock_with(AcquireOptions::new().lease(ms(20)))
        .await
        .unwrap();
    guard.lost().await;
    assert!(matches!(
        guard.hand_over(KEEP).await,
        Err(Error::Lost { .. })
    ));
    drop(guard);
    let guard = lock.lock().await.unwrap();
    b.reentrant_lock("l").unwrap().force_unlock().await.unwrap();
    let rival = b
        .reentrant_lock("l")
        .unwrap()
        .try_lock()
        .await
        .unwrap()
        .expect("free");
    let outcome = guard.hand_over(KEEP).await;
    assert!(
        matches!(
            outcome,
            Err(Error::Lost {
                reason: LossReason::RecordMissing,
                ..
            })
        ),
        "{outcome:?}"
    );
    drop(guard);
    assert!(!rival.is_lost());
    rival.unlock().await.unwrap();
    nothing_is_left(&server, &[&a, &b]).await;
}

/// Another name, another side or another kind cannot adopt a hand-over. The refusal sends nothing.
#[tokio::test]
async fn it_is_adopted_by_its_own_lock_only() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let guard = a
        .read_write_lock("l")
        .unwrap()
        .read_lock()
        .lock()
        .await
        .unwrap();
    let on_its_way = guard.hand_over(KEEP).await.unwrap();
    let sent = server.script_count();
    for wrong in [
        b.read_write_lock("other").unwrap().read_lock(),
        b.read_write_lock("l").unwrap().write_lock(),
        b.reentrant_lock("l").unwrap(),
    ] {
        assert!(matches!(
            wrong.adopt(&on_its_way).await,
            Err(Error::InvalidHandOver { .. })
        ));
    }
    drop(guard);
    // The adopt would give one owner two holds.
    let there = b.read_write_lock("l").unwrap().read_lock();
    assert_eq!(server.script_count(), sent, "nothing is sent");
    let reads = there.lock().await.unwrap();
    assert!(matches!(
        there.adopt(&on_its_way).await,
        Err(Error::NotReentrant { .. })
    ));
    reads.unlock().await.unwrap();
    there
        .adopt(&on_its_way)
        .await
        .unwrap()
        .unlock()
        .await
        .unwrap();
    nothing_is_left(&server, &[&a, &b]).await;
}

/// One reader's hold moves while other readers keep theirs unchanged.
#[tokio::test]
async fn a_readers_hold_moves_while_others_read() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let (here, there) = (
        a.read_write_lock("l").unwrap().read_lock(),
        b.read_write_lock("l").unwrap().read_lock(),
    );
    let long = OwnerId::scope(here.lock_with(AcquireOptions::new().lease(KEEP)))
        .await
        .unwrap();
    let guard = here.lock().await.unwrap();
    let on_its_way = guard.hand_over(ms(5000)).await.unwrap();
    assert!(server.pttl("l") > 50_000, "the other one still reads");
    let adopted = there.adopt(&on_its_way).await.unwrap();
    assert!(server.pttl("l") > 50_000);
    long.unlock().await.unwrap();
    assert!(
        b.read_write_lock("l")
            .unwrap()
            .try_write()
            .await
            .unwrap_or(None)
            .is_none(),
        "another owner reads"
    );
    adopted.unlock().await.unwrap();
    assert_eq!(server.dump(), []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_many_that_adopt_the_same_one_gets_it() {
    let server = Server::start();
    let mut clients = Vec::new();
    for _ in 0..4 {
        clients.push(server.client().await);
    }
    for round in 0..25 {
        let name = format!("l{round}");
        let lock = |client: &LockClient| client.mutex(&name).unwrap();
        let on_its_way = lock(&clients[0])
            .lock()
            .await
            .unwrap()
            .hand_over(KEEP)
            .await
            .unwrap();
        let tries: Vec<_> = clients
            .iter()
            .map(|client| {
                let (lock, on_its_way) = (lock(client), on_its_way.clone());
                tokio::spawn(async move { lock.adopt(&on_its_way).await })
            })
            .collect();
        let mut adopted = Vec::new();
        for one in tries {
            match one.await.unwrap() {
                Ok(guard) => adopted.push(guard),
                Err(Error::NotHeld { .. }) => {}
                Err(error) => panic!("{error}"),
            }
        }
        assert_eq!(adopted.len(), 1);
        adopted.pop().unwrap().unlock().await.unwrap();
    }
}

/// An adopt that succeeds holds the lock, whatever happens to the request or its reply, and no hold
/// is left without a guard.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_and_replies_that_are_lost_cut_late_or_doubled() {
    let server = Server::start();
    let (proxy, beside) = (Proxy::start(&server), server.client().await);
    let actions = [
        Action::Lose,
        Action::Mute,
        Action::CutBefore,
        Action::Ghost(ms(150)),
        Action::Twice,
        Action::Late(ms(60)),
        Action::Refuse("BUSY Redis is busy running a script."),
    ];
    let mut outcomes: HashMap<&str, u32> = HashMap::new();
    let mut count = |what| *outcomes.entry(what).or_default() += 1;
    for (n, action) in actions.into_iter().enumerate() {
        for on_adopting in [false, true] {
            let client = || async {
                LockClient::builder()
                    .command_timeout(ms(400))
                    .connect(proxy.url())
                    .await
                    .unwrap()
            };
            let (a, b) = (client().await, client().await);
            let some = |kind: &usize| {
                ["mutex", "fenced", "signal", "read", "write"].contains(&kinds(&a)[*kind].0)
            };
            for kind in (0..kinds(&a).len()).filter(some) {
                let what = format!(
                    "{action:?}, on adopting: {on_adopting}, {}",
                    kinds(&a)[kind].0
                );
                let (here, there) = (kinds(&a)[kind].1.clone(), kinds(&b)[kind].1.clone());
                let guard = here.lock().await.unwrap();
                if !on_adopting {
                    proxy.once(Verb::Transfer, action);
                }
                let on_its_way = match guard.hand_over(KEEP).await {
                    Ok(on_its_way) => on_its_way,
                    Err(error) => {
                        assert!(error.is_transient(), "{what}: {error}");
                        count("hand-over failed");
                        drop(guard);
                        proxy.pass();
                        a.idle().await;
                        // This also holds if the hand-over ran but its reply was lost.
                        assert!(
                            !kinds(&beside)[kind].1.is_locked().await.unwrap(),
                            "{what}: held without a guard, for a minute"
                        );
                        continue;
                    }
                };
                if on_adopting {
                    proxy.once(Verb::Transfer, action);
                }
                match there.adopt(&on_its_way).await {
                    Ok(guard) => {
                        count("adopted");
                        let holders = kinds(&beside)[kind]
                            .1
                            .inspect()
                            .await
                            .unwrap()
                            .unwrap()
                            .holders;
                        assert_eq!(holders, [(guard.owner(), 1)], "{what}");
                        // Over a muted connection, the release takes longer than the command
                        // timeout.
                        if let Err(error) = guard.unlock().await {
                            assert!(error.is_transient(), "{what}: {error}");
                        }
                    }
                    Err(error) => {
                        assert!(error.is_transient() && on_adopting, "{what}: {error}");
                        count("adopting failed");
                        proxy.pass();
                        b.idle().await;
                        // A failed adopt leaves the hold in hand-over.
                        kinds(&beside)[kind].1.force_unlock().await.unwrap();
                    }
                }
                proxy.pass();
                a.idle().await;
                b.idle().await;
            }
            // A renewal of a hold that has just ended may still be in flight.
            eventually(&format!("{n}: nothing is held"), || async {
                a.stats().holds + b.stats().holds == 0
            })
            .await;
        }
    }
    // Most adopts succeed: all but those on a connection that stays mute beyond the command
    // timeout.
    assert!(outcomes["adopted"] >= 40, "{outcomes:?}");
}

/// The future is dropped at each await. The hold expires by itself, and the ledger keeps nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_adopt_dropped_at_any_poll_holds_no_longer_than_requested() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let (here, there) = (a.fenced_lock("l").unwrap(), b.fenced_lock("l").unwrap());
    let (mut k, mut ends) = (1, 0);
    while ends < 4 {
        let on_its_way = here.lock().await.unwrap().hand_over(ms(50)).await.unwrap();
        let adopted = poll_times(there.adopt(&on_its_way), k).await;
        ends += u32::from(adopted.is_some());
        drop(adopted);
        eventually("it is free", || async { !there.is_locked().await.unwrap() }).await;
        b.idle().await;
        assert_eq!(b.stats().holds, 0, "{k} polls");
        k += 1;
    }
}

/// A reader's hold lives for its own lease or for `keep`, and so does the record, whatever other
/// readers had.
#[tokio::test]
async fn a_readers_hold_ends_at_its_own_time_despite_other_readers() {
    let server = Server::start();
    let (a, b, c) = (
        server.client().await,
        server.client().await,
        server.client().await,
    );
    let [here, there, beside] =
        [&a, &b, &c].map(|client| client.read_write_lock("l").unwrap().read_lock());
    let lease = |lease| AcquireOptions::new().lease(lease);
    let is_free = || async {
        c.read_write_lock("l")
            .unwrap()
            .try_write()
            .await
            .unwrap()
            .is_some()
    };

    // The hold expires although another reader remains.
    let other = beside.lock().await.unwrap();
    let on_its_way = here.lock().await.unwrap().hand_over(ms(50)).await.unwrap();
    tokio::time::sleep(ms(300)).await;
    assert!(
        matches!(there.adopt(&on_its_way).await, Err(Error::NotHeld { .. })),
        "after its time"
    );
    other.unlock().await.unwrap();
    server.call(&["FLUSHALL"]);

    // The giver's own lease was longer.
    let guard = here.lock_with(lease(KEEP)).await.unwrap();
    let _ = beside
        .lock_with(lease(ms(300)))
        .await
        .unwrap()
        .leave_to_lease();
    let _ = guard.hand_over(ms(300)).await.unwrap();
    assert!(
        server.pttl("l") <= 300,
        "{} ms, when both have 300",
        server.pttl("l")
    );
    eventually("it is free", is_free).await;

    // The time to adopt it was longer too.
    let on_its_way = here.lock().await.unwrap().hand_over(KEEP).await.unwrap();
    let _ = beside
        .lock_with(lease(ms(300)))
        .await
        .unwrap()
        .leave_to_lease();
    let _ = there
        .adopt_with(&on_its_way, lease(ms(300)))
        .await
        .unwrap()
        .leave_to_lease();
    assert!(
        server.pttl("l") <= 300,
        "{} ms, when both have 300",
        server.pttl("l")
    );
    eventually("it is free", is_free).await;
}

#[tokio::test]
async fn a_half_that_was_dropped_a_moment_before_is_not_in_the_way() {
    let server = Server::start();
    let client = server.client().await;
    let both = client.read_write_lock("l").unwrap();
    for _ in 0..20 {
        let (write, read) = (both.write().await.unwrap(), both.read().await.unwrap());
        drop(read);
        let on_its_way = write.hand_over(KEEP).await.unwrap();
        both.write_lock()
            .adopt(&on_its_way)
            .await
            .unwrap()
            .unlock()
            .await
            .unwrap();
        let (write, read) = (both.write().await.unwrap(), both.read().await.unwrap());
        drop(write);
        let on_its_way = read.hand_over(KEEP).await.unwrap();
        both.read_lock()
            .adopt(&on_its_way)
            .await
            .unwrap()
            .unlock()
            .await
            .unwrap();
    }
    nothing_is_left(&server, &[&client]).await;
}

/// An owner that waits in the queue adopts in vain. Its queue entry is removed when its wait ends.
#[tokio::test]
async fn an_adopt_in_vain_leaves_a_place_in_the_queue_as_it_is() {
    let server = Server::start();
    let (a, b, c) = (
        server.client().await,
        server.client().await,
        server.client().await,
    );
    let fair = |client: &LockClient| client.fair_lock("fair").unwrap();
    let write = |client: &LockClient| client.read_write_lock("rw").unwrap().write_lock();
    for (kind, place) in [
        (
            &fair as &dyn Fn(&LockClient) -> Lock,
            "redisson_lock_queue:{fair}",
        ),
        (&write, "nestlock_rwlock_intent:{rw}"),
    ] {
        let over = kind(&a)
            .lock()
            .await
            .unwrap()
            .hand_over(ms(20))
            .await
            .unwrap();
        let rival = if place.contains("rw") {
            c.read_write_lock("rw").unwrap().read_lock()
        } else {
            kind(&c)
        };
        let holder = rival.lock().await.unwrap();
        OwnerId::scope(async {
            let there = kind(&b);
            let mut waits = Box::pin(there.lock());
            while tokio::time::timeout(ms(20), &mut waits).await.is_err() && !server.exists(place) {}
            // Keep polling the wait: otherwise its request may keep the owner lock that the adopt
            // needs.
            tokio::select! {
                waited = &mut waits => panic!("{waited:?}"),
                adopted = there.adopt(&over) => assert!(matches!(adopted, Err(Error::NotHeld { .. })), "{adopted:?}"),
            }
            drop(waits);
        })
        .await;
        b.idle().await;
        assert!(!server.exists(place), "{place}: no waiter is left");
        holder.unlock().await.unwrap();
    }
    nothing_is_left(&server, &[&a, &b, &c]).await;
}

/// Owner names appear in logs and errors, so they are not secret, and a forged text is refused. A
/// value may be used twice, so it does not name one hold.
#[tokio::test]
async fn a_forged_text_and_a_value_are_refused() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let guard = a.string_lock("l").unwrap().lock().await.unwrap();
    let mut text = "nl1.".to_owned();
    for byte in format!("string\n{}\nl", guard.owner()).bytes() {
        let _ = write!(text, "{byte:02x}");
    }
    assert!(matches!(
        HandOver::from_text(&text),
        Err(Error::InvalidHandOver { .. })
    ));
    let on_its_way = guard.hand_over(KEEP).await.unwrap();
    let value = AcquireOptions::new().value("worker");
    let refused = b
        .string_lock("l")
        .unwrap()
        .adopt_with(&on_its_way, value)
        .await;
    assert!(
        matches!(refused, Err(Error::InvalidOwner { .. })),
        "{refused:?}"
    );
    b.string_lock("l")
        .unwrap()
        .adopt(&on_its_way)
        .await
        .unwrap()
        .unlock()
        .await
        .unwrap();
}

/// The first request may have run although its reply was lost. The lease then counts from that
/// request.
#[tokio::test]
async fn a_repeated_adopt_relies_on_no_more_than_the_server_gives() {
    let server = Server::start();
    for at in 0..10 {
        let proxy = Proxy::start(&server);
        let (a, b) = (
            server.client().await,
            LockClient::connect(proxy.url()).await.unwrap(),
        );
        let ((kind, here), (_, there)) = (kinds(&a).swap_remove(at), kinds(&b).swap_remove(at));
        let on_its_way = known_and_on_its_way(&here, &there).await;
        proxy.once(Verb::Transfer, Action::Lose);
        proxy.refuse();
        let (guard, ()) = tokio::join!(
            there.adopt_with(&on_its_way, AcquireOptions::new().lease(ms(2_500))),
            async {
                tokio::time::sleep(ms(700)).await;
                proxy.heal();
            }
        );
        let guard = guard.unwrap();
        let (asked, remaining) = (std::time::Instant::now(), guard.remaining());
        let truth = server.pttl(if kind == "signal" {
            "lock:signal"
        } else {
            kind
        });
        // This process may stall between the two readings.
        let most = ms(truth.try_into().unwrap()) + asked.elapsed() + ms(50);
        assert!(
            remaining <= most,
            "{kind}: {remaining:?} where the server gives {truth} ms, at most {most:?}"
        );
        guard.unlock().await.unwrap();
    }
}

/// The lease does not count from a request that surely never ran. Otherwise a short lease could not
/// be adopted after an outage.
#[tokio::test]
async fn an_adopt_that_could_not_be_sent_at_first_has_its_full_lease() {
    let server = Server::start();
    let proxy = Proxy::start(&server);
    let (a, b) = (
        server.client().await,
        LockClient::connect(proxy.url()).await.unwrap(),
    );
    let on_its_way = a
        .mutex("l")
        .unwrap()
        .lock()
        .await
        .unwrap()
        .hand_over(KEEP)
        .await
        .unwrap();
    let mut refusals = 0;
    proxy.rule(move |request| {
        if request.verb() != Some(Verb::Transfer) || refusals == 5 {
            return Action::Pass;
        }
        refusals += 1;
        Action::Refuse("LOADING not yet")
    });
    let lease = AcquireOptions::new().lease(ms(1_000));
    let asked = std::time::Instant::now();
    let guard = b
        .mutex("l")
        .unwrap()
        .adopt_with(&on_its_way, lease)
        .await
        .unwrap();
    let (took, remaining) = (asked.elapsed(), guard.remaining());
    assert!(
        remaining + took > ms(1_100),
        "{remaining:?} left of a second, {took:?} after the first request"
    );
    guard.unlock().await.unwrap();
}

/// The adopt ran, but its lease is over when the reply arrives. The lock is free, and a retry would
/// not help.
#[tokio::test]
async fn an_adopt_whose_lease_is_over_before_its_reply_fails_at_once() {
    let server = Server::start();
    let proxy = Proxy::start(&server);
    let (a, b) = (
        server.client().await,
        LockClient::connect(proxy.url()).await.unwrap(),
    );
    for ((kind, here), (_, there)) in kinds(&a).into_iter().zip(kinds(&b)) {
        let on_its_way = known_and_on_its_way(&here, &there).await;
        proxy.forget_requests();
        proxy.once(Verb::Transfer, Action::Late(ms(250)));
        let asked = std::time::Instant::now();
        let late = there
            .adopt_with(&on_its_way, AcquireOptions::new().lease(ms(100)))
            .await;
        let took = asked.elapsed();
        let Err(error @ Error::Unconfirmed { .. }) = late else {
            panic!("{kind}: {late:?}")
        };
        assert!(
            error.to_string().contains("after the lease had ended"),
            "{kind}: {error}"
        );
        assert!(took >= ms(250) && took < ms(750), "{kind}: {took:?}");
        assert_eq!(
            proxy.count(Verb::Transfer),
            1,
            "{kind}: it sent another request"
        );
        b.idle().await;
        assert_eq!(b.stats().holds, 0, "{kind}");
        // The record of a signal lock lives for a whole second.
        let guard = rival(&a, kind, &here)
            .try_lock_for(ms(3_000))
            .await
            .unwrap();
        guard
            .unwrap_or_else(|| panic!("{kind}: it is held without a guard, and no owner gets it"))
            .unlock()
            .await
            .unwrap();
    }
    nothing_is_left(&server, &[&a, &b]).await;
}

/// The reply is lost, and the future is not polled again before its retry.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_adopt_unpolled_between_tries_ends_within_a_requests_time() {
    let server = Server::start();
    for at in [0, 4, 7, 9] {
        let proxy = Proxy::start(&server);
        let a = server.client().await;
        let b = LockClient::builder()
            .command_timeout(ms(2_500))
            .connect(proxy.url())
            .await
            .unwrap();
        let ((kind, here), (_, there)) = (kinds(&a).swap_remove(at), kinds(&b).swap_remove(at));
        let on_its_way = known_and_on_its_way(&here, &there).await;
        proxy.once(Verb::Transfer, Action::Lose);
        proxy.refuse();
        let (asked, tried) = (proxy.count(Verb::Transfer), proxy.connections());
        let parked = there.adopt_with(&on_its_way, AcquireOptions::new().lease(ms(30_000)));
        let mut parked = Box::pin(parked);
        let is_refused =
            async || proxy.count(Verb::Transfer) > asked && proxy.connections() > tried + 1;
        let between_two_tries = async {
            eventually("its reply is lost, and it is refused", is_refused).await;
            // Give the future time to see the refusal.
            tokio::time::sleep(ms(100)).await;
        };
        tokio::select! {
            ended = &mut parked => panic!("{kind}: {ended:?}"),
            () = between_two_tries => {}
        }
        proxy.heal();
        let guard = here.try_lock_for(ms(12_000)).await.unwrap();
        guard
            .unwrap_or_else(|| panic!("{kind}: it is held for a future that is not polled"))
            .unlock()
            .await
            .unwrap();
        drop(parked);
    }
}
