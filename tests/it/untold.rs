//! Hand-overs whose result never reached the caller: the lock cannot be adopted, so it is released.
//! A hand-over whose result was returned stays.

use std::{
    future::{Future, poll_fn},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::Poll,
    time::Duration,
};

use futures::future::join_all;
use nestlock::{Error, Lock, LockClient};

use crate::{
    adopt::{KEEP, kinds, known_and_on_its_way, ms, rival},
    cancel::poll_times,
    contract::nothing_is_left,
    support::{
        Server, eventually,
        proxy::{Action, Proxy, Verb},
    },
};

/// Far shorter than the lease of a hand-over.
const SOON: Duration = Duration::from_secs(10);
/// Indices into [`kinds`]: one kind for each sort of script.
const SOME: [usize; 6] = [0, 4, 5, 7, 8, 9];

async fn impatient(proxy: &Proxy) -> LockClient {
    LockClient::builder()
        .command_timeout(ms(400))
        .connect(proxy.url())
        .await
        .unwrap()
}

async fn gets_it_soon(rival: &Lock, what: &str) -> nestlock::LockGuard {
    let guard = rival.try_lock_for(SOON).await.unwrap();
    guard.unwrap_or_else(|| panic!("{what}: it is held without a guard, and no client gets it"))
}

/// Polls a future until it ends or `has_happened` returns true; returns `None` in the second case.
async fn poll_until<F: Future + Unpin>(
    future: &mut F,
    has_happened: impl Fn() -> bool,
) -> Option<F::Output> {
    tokio::select! {
        biased;
        output = future => Some(output),
        () = eventually("it has happened", || async { has_happened() }) => None,
    }
}

/// A hand-over that is dropped at any poll is released, and one that was reported is not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hand_over_dropped_at_any_poll_is_released_unless_reported() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    for ((kind, here), (_, there)) in kinds(&a).into_iter().zip(kinds(&b)) {
        let rival = rival(&b, kind, &there);
        let (mut k, mut told) = (1, 0);
        while told < 3 {
            let guard = here.lock().await.unwrap();
            let outcome = poll_times(guard.hand_over(KEEP), k).await;
            drop(guard);
            if let Some(on_its_way) = outcome {
                told += 1;
                a.idle().await;
                assert!(
                    rival.try_lock().await.unwrap().is_none(),
                    "{kind}, {k} polls: the result was reported"
                );
                there
                    .adopt(&on_its_way.unwrap())
                    .await
                    .unwrap()
                    .unlock()
                    .await
                    .unwrap();
            } else {
                gets_it_soon(&rival, &format!("{kind}, {k} polls"))
                    .await
                    .unlock()
                    .await
                    .unwrap();
            }
            a.idle().await;
            assert_eq!(a.stats().holds, 0, "{kind}, {k} polls");
            k += 1;
        }
    }
    nothing_is_left(&server, &[&a, &b]).await;
}

/// Covers each fate of the request: lost before or after the script, executed late, or executed
/// twice.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dropped_hand_over_is_released_whatever_befalls_its_request() {
    let actions = [
        Action::Pass,
        Action::Lose,
        Action::Mute,
        Action::CutBefore,
        Action::Ghost(ms(150)),
        Action::Ghost(ms(600)),
        Action::Twice,
        Action::Late(ms(60)),
        Action::Slow(ms(150)),
    ];
    join_all(actions.map(async |action| {
        let server = Server::start();
        let proxy = Proxy::start(&server);
        let (client, other) = (impatient(&proxy).await, server.client().await);
        for at in SOME {
            let ((kind, here), (_, elsewhere)) = (
                kinds(&client).swap_remove(at),
                kinds(&other).swap_remove(at),
            );
            let rival = rival(&other, kind, &elsewhere);
            for again in [false, true] {
                let what = format!("{action:?}, {kind}, its own owner next: {again}");
                let first = known_and_on_its_way(&here, &elsewhere).await;
                elsewhere
                    .adopt(&first)
                    .await
                    .unwrap()
                    .unlock()
                    .await
                    .unwrap();
                let guard = here.lock().await.unwrap();
                proxy.forget_requests();
                let ghosts = proxy.ghosts() + usize::from(matches!(action, Action::Ghost(_)));
                proxy.once(Verb::Transfer, action);
                let mut hand_over = Box::pin(guard.hand_over(KEEP));
                let told = poll_until(&mut hand_over, || proxy.count(Verb::Transfer) > 0).await;
                drop(hand_over);
                drop(guard);
                if let Some(on_its_way) = told {
                    // the reply arrived before the poll that would have dropped the hand-over
                    elsewhere
                        .adopt(&on_its_way.unwrap())
                        .await
                        .unwrap()
                        .unlock()
                        .await
                        .unwrap();
                    proxy.pass();
                    continue;
                }
                let (locks, looks) = if again {
                    (&here, &elsewhere)
                } else {
                    (&rival, &rival)
                };
                let next = gets_it_soon(locks, &what).await;
                eventually("a late one is executed", || async {
                    proxy.ghosts() == ghosts
                })
                .await;
                let holders = looks
                    .inspect()
                    .await
                    .unwrap()
                    .unwrap_or_else(|| panic!("{what}: {next:?}"))
                    .holders;
                assert!(
                    holders
                        .iter()
                        .any(|(holder, holds)| (holder, *holds) == (&next.owner(), 1)),
                    "{what}: {holders:?}"
                );
                assert!(!next.is_lost(), "{what}");
                proxy.pass();
                if let Err(error) = next.unlock().await {
                    // the connection may be muted
                    assert!(error.is_transient(), "{what}: {error}");
                }
                gets_it_soon(&rival, &what).await.unlock().await.unwrap();
            }
        }
        nothing_is_left(&server, &[&client, &other]).await;
    }))
    .await;
}

/// The transfer executes after the giver's release was retried many times and refused each time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hand_over_that_precedes_the_givers_release_is_then_undone() {
    let server = Server::start();
    for at in SOME {
        let proxy = Proxy::start(&server);
        let (client, other) = (impatient(&proxy).await, server.client().await);
        let ((kind, here), (_, elsewhere)) = (
            kinds(&client).swap_remove(at),
            kinds(&other).swap_remove(at),
        );
        let first = known_and_on_its_way(&here, &elsewhere).await;
        elsewhere
            .adopt(&first)
            .await
            .unwrap()
            .unlock()
            .await
            .unwrap();
        let guard = here.lock().await.unwrap();
        proxy.forget_requests();
        let (owner, released) = (guard.owner().to_string(), Arc::new(AtomicBool::new(false)));
        let (may_be_released, mut moved) = (Arc::clone(&released), false);
        proxy.rule(move |request| match request.verb() {
            Some(Verb::Transfer) if !std::mem::replace(&mut moved, true) => {
                Action::Ghost(ms(1_500))
            }
            Some(Verb::Release)
                if !may_be_released.load(Ordering::SeqCst) && request.args().contains(&owner) =>
            {
                Action::Refuse("BUSY Redis is busy running a script.")
            }
            _ => Action::Pass,
        });
        let mut hand_over = Box::pin(guard.hand_over(KEEP));
        assert!(
            poll_until(&mut hand_over, || proxy.count(Verb::Transfer) > 0)
                .await
                .is_none(),
            "{kind}"
        );
        drop(hand_over);
        drop(guard);
        eventually("it is executed late", || async { proxy.ghosts() == 1 }).await;
        released.store(true, Ordering::SeqCst);
        gets_it_soon(&rival(&other, kind, &elsewhere), kind)
            .await
            .unlock()
            .await
            .unwrap();
        nothing_is_left(&server, &[&client, &other]).await;
    }
}

/// A future that is not polled may never be polled again, so its hand-over is released. If it is
/// polled after all, it does not return a hand-over that was released.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unpolled_hand_over_ends_within_the_time_of_a_request() {
    let server = Server::start();
    let other = server.client().await;
    for at in SOME {
        let client = server
            .client_with(|builder| builder.command_timeout(ms(400)))
            .await;
        let ((kind, here), (_, elsewhere)) = (
            kinds(&client).swap_remove(at),
            kinds(&other).swap_remove(at),
        );
        let rival = rival(&other, kind, &elsewhere);
        for polled_in_time in [true, false] {
            let first = known_and_on_its_way(&here, &elsewhere).await;
            elsewhere
                .adopt(&first)
                .await
                .unwrap()
                .unlock()
                .await
                .unwrap();
            let guard = here.lock().await.unwrap();
            let owner = guard.owner();
            let mut parked = Box::pin(guard.hand_over(KEEP));
            if let Poll::Ready(on_its_way) =
                poll_fn(|cx| Poll::Ready(parked.as_mut().poll(cx))).await
            {
                // the reply arrived before the poll
                elsewhere
                    .adopt(&on_its_way.unwrap())
                    .await
                    .unwrap()
                    .unlock()
                    .await
                    .unwrap();
                continue;
            }
            eventually("it is executed", || async {
                elsewhere
                    .inspect()
                    .await
                    .unwrap()
                    .unwrap()
                    .holders
                    .iter()
                    .all(|(holder, _)| *holder != owner)
            })
            .await;
            if polled_in_time {
                let on_its_way = parked.await.unwrap();
                // longer than the client waits before it gives up unpolled futures
                tokio::time::sleep(ms(2_500)).await;
                client.idle().await;
                assert!(
                    rival.try_lock().await.unwrap().is_none(),
                    "{kind}: the result was reported"
                );
                elsewhere
                    .adopt(&on_its_way)
                    .await
                    .unwrap()
                    .unlock()
                    .await
                    .unwrap();
            } else {
                let next = gets_it_soon(&rival, kind).await;
                let outcome = parked.await;
                assert!(
                    matches!(outcome, Err(Error::Unconfirmed { .. })),
                    "{kind}: {outcome:?}"
                );
                assert!(!next.is_lost(), "{kind}");
                next.unlock().await.unwrap();
            }
            drop(guard);
        }
        nothing_is_left(&server, &[&client, &other]).await;
    }
}

/// Another call of the same owner comes between two tries: the hand-over may succeed or fail, but
/// in the end the lock is free.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hand_over_settled_by_another_call_is_released_or_reported() {
    let server = Server::start();
    let proxy = Proxy::start(&server);
    let (client, other) = (impatient(&proxy).await, server.client().await);
    let (mut told, mut settled) = (0, 0);
    for at in SOME.into_iter().cycle().take(48) {
        let ((kind, here), (_, elsewhere)) = (
            kinds(&client).swap_remove(at),
            kinds(&other).swap_remove(at),
        );
        let guard = here.lock().await.unwrap();
        proxy.once(Verb::Transfer, Action::Lose);
        let hand_over = async {
            match guard.hand_over(KEEP).await {
                Ok(on_its_way) => {
                    told += 1;
                    elsewhere
                        .adopt(&on_its_way)
                        .await
                        .unwrap()
                        .unlock()
                        .await
                        .unwrap();
                }
                Err(error) => {
                    assert!(
                        matches!(error, Error::Unconfirmed { .. }),
                        "{kind}: {error}"
                    );
                    settled += 1;
                }
            }
        };
        let next = async {
            // starts after the hand-over is in flight
            tokio::task::yield_now().await;
            gets_it_soon(&rival(&client, kind, &here), kind)
                .await
                .unlock()
                .await
                .unwrap();
        };
        tokio::join!(hand_over, next);
        proxy.pass();
    }
    println!("reported {told} times, settled by another call {settled} times");
    nothing_is_left(&server, &[&client, &other]).await;
}
