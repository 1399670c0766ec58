//! Waiters that wait, arrive, are dropped and are woken concurrently, in thousands of orders under
//! shuttle.
//!
//! No timer fires here. A waiter that is not woken waits forever, and the run fails.

use std::{
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicUsize, Ordering::SeqCst},
    },
};

use nestlock_wire::{Push, clock::Instant};
use shuttle::future::{JoinHandle, block_on, yield_now};
use tokio::sync::{Semaphore, mpsc};

use super::{
    awaited::Awaited,
    lists::Popper,
    messages::deliver,
    queue::WaitQueue,
    subscriptions::{ChannelEvent, LINGER, Subscriptions, remove_abandoned},
    waiter::{PollTurn, Waiter, Woken},
};

use crate::{
    engine::{
        acquire::options::Acquire,
        begin::Beginning,
        core::Core,
        hold::{Entered, Hold, registry::Holds},
        janitor,
        jobs::Janitor,
        kind::Kind,
        settle::CallInFlight,
    },
    keys::LockName,
    lock::{self, Reentrant},
    options::{AcquireOptions, Config, Wait},
    owner::{ClientId, OwnerId},
    store::{
        Store,
        tests::{Server, stopped},
    },
    sync::{
        atomic::AtomicBool,
        spawn,
        tests::{Seen, explore, moments},
    },
};

/// A client and its server.
struct World {
    core: Arc<Core>,
    server: Arc<Server>,
    kind: Arc<dyn Kind>,
    /// Live guards of all owners.
    guards: AtomicUsize,
    seen: Seen,
}

impl World {
    fn new(seen: &Seen) -> Arc<Self> {
        Self::with_lists(seen).0
    }

    /// Like `new`, and also returns the events of waiters for lists.
    fn with_lists(seen: &Seen) -> (Arc<Self>, mpsc::UnboundedReceiver<ChannelEvent>) {
        let (server, mut published) = Server::start();
        let ((subscriptions, mut events), (signals, lists), (janitor, list)) =
            (Subscriptions::new(), Subscriptions::new(), Janitor::new());
        let config = Config::default();
        let core = Arc::new(Core {
            client: ClientId::random(),
            holds: Holds::new(config.command_timeout(), config.meter),
            config,
            store: Store::played_by(&server),
            beginning: Beginning::default(),
            subscriptions: Arc::new(subscriptions),
            signals,
            janitor,
            relays: mpsc::unbounded_channel().0,
            owner_locks_taken: AtomicU32::new(0),
            runtime: stopped(),
            note_slots: Semaphore::new(1),
            notes_refused: AtomicBool::new(false),
            closed: AtomicBool::new(false),
        });
        spawn(janitor::run(Arc::clone(&core), list));
        let reader = Arc::clone(&core);
        spawn(async move {
            while let Some((channel, text)) = published.recv().await {
                deliver(
                    &reader.subscriptions,
                    Push::Message {
                        channel: &channel,
                        text: text.as_bytes(),
                    },
                );
            }
        });
        let (subscriber, at, noted) = (Arc::clone(&core), Arc::clone(&server), seen.clone());
        // Like `messages::subscribe`, but a channel without waiters is unsubscribed at once.
        spawn(async move {
            while let Some(event) = events.recv().await {
                match event {
                    ChannelEvent::Subscribe(queue) => {
                        noted.note("a waiter");
                        at.subscribe(&queue.channel);
                        yield_now().await;
                        queue.live();
                    }
                    ChannelEvent::LastWaiterLeft(queue) => {
                        let mut left = vec![(Instant::now() - LINGER, queue)];
                        for channel in remove_abandoned(&subscriber.subscriptions, &mut left) {
                            noted.note("a wait queue was removed");
                            at.unsubscribe(&channel);
                        }
                    }
                }
                yield_now().await;
            }
        });
        let kind: Arc<dyn Kind> = Arc::new(Reentrant::new(&LockName::new("", "l", 1024).unwrap()));
        (
            Arc::new(Self {
                core,
                server,
                kind,
                guards: AtomicUsize::new(0),
                seen: seen.clone(),
            }),
            lists,
        )
    }

    fn owner(&self, name: &str) -> OwnerId {
        OwnerId::named(&self.core.client, name).unwrap()
    }

    /// Acquires the lock: under this name, or else as an owner of its own. With `gives_up`, the
    /// acquire may be dropped midway.
    async fn acquire(&self, owner: Option<&OwnerId>, gives_up: bool) -> Option<Entered> {
        let options = match owner {
            Some(owner) => AcquireOptions::new().owner(owner.clone()),
            None => AcquireOptions::new(),
        };
        // The scope ends before the first wait: under shuttle, other tasks run on this thread.
        let acquire = OwnerId::of_one_acquire(async {
            Acquire::new(&self.core, &self.kind, &options, Wait::Forever).unwrap()
        });
        let acquire = acquire.await.run();
        if !gives_up {
            return acquire.await.unwrap();
        }
        tokio::select! {
            biased;
            entered = pin!(acquire) => entered.unwrap(),
            () = moments(20) => {
                self.seen.note("an acquire was dropped");
                None
            }
        }
    }

    /// Checks what a guard relies on: the server records its owner, and the client knows its owner
    /// by this very hold.
    fn check_held(&self, owner: &OwnerId, hold: &Arc<Hold>) {
        if owner.turn().is_some_and(|turn| turn.get() > 1) {
            self.seen.note("it was handed off");
        }
        let (holder, count) = self.server.record("l").expect("a guard lives");
        assert!(
            *holder == *owner.as_str() && count > 0,
            "{owner:?}: {holder}, {count}"
        );
        let known = self
            .core
            .holds
            .get(&self.kind, owner)
            .expect("a guard lives");
        assert!(Arc::ptr_eq(&known, hold), "{owner:?} has two holds");
    }

    /// Acquires, checks, and releases: with a call that is awaited or dropped midway, or, with
    /// `gives_up`, without a call.
    async fn work(&self, name: Option<&str>, alone: bool, gives_up: bool) {
        let owner = name.map(|name| self.owner(name));
        let Some((hold, ticket)) = self.acquire(owner.as_ref(), gives_up).await else {
            return;
        };
        let others = self.guards.fetch_add(1, SeqCst);
        assert!(!alone || others == 0, "two guards");
        if others > 0 {
            self.seen.note("a nested guard");
        }
        moments(3).await;
        self.check_held(&ticket.generation.owner, &hold);
        self.guards.fetch_sub(1, SeqCst);
        if gives_up {
            return self.core.release_later(&hold, &ticket);
        }
        let under_way = CallInFlight {
            core: &self.core,
            hold,
        };
        tokio::select! {
            biased;
            released = self.core.release(&under_way.hold, ticket) => released.unwrap(),
            () = moments(30) => self.seen.note("a release was dropped"),
        }
    }

    /// Retries to forget holds that were still in use, as the watchdog does from time to time.
    async fn reap(&self) {
        for _ in 0..5 {
            moments(12).await;
            self.core.holds.reap_again();
        }
    }

    /// Checks that nothing is left in the end, on the server or in the client.
    async fn check_clean(&self) {
        self.core.janitor.idle().await;
        assert_eq!(self.server.record("l"), None);
        if self.core.holds.len() > 0 {
            self.seen.note("a hold was reaped later");
        }
        while self.core.holds.reap_again() {
            yield_now().await;
        }
        assert_eq!(self.core.holds.len(), 0, "{:?}", self.core.holds);
        while self.core.subscriptions.channels() > 0 {
            yield_now().await;
        }
    }
}

fn spawn_reaper(world: &Arc<World>) -> JoinHandle<()> {
    let world = Arc::clone(world);
    spawn(async move { world.reap().await })
}

fn sometimes() -> bool {
    shuttle::rand::Rng::gen_bool(&mut shuttle::rand::thread_rng(), 0.5)
}

/// Lets other tasks run until `is_so` returns `true`.
async fn until(is_so: impl Fn() -> bool) {
    while !is_so() {
        yield_now().await;
    }
}

/// Waits for the tasks to end. None of them may wait forever.
async fn all(tasks: Vec<JoinHandle<()>>) {
    for task in tasks {
        task.await.unwrap();
    }
}

#[test]
fn no_waiter_waits_in_vain_if_another_is_dropped() {
    let must_see = [
        "a waiter",
        "a wait queue was removed",
        "an acquire was dropped",
        "a release was dropped",
        "it was handed off",
    ];
    explore(1_000, &must_see, |seen| {
        let world = World::new(seen);
        block_on(async {
            let work = || {
                let world = Arc::clone(&world);
                spawn(async move { world.work(None, true, sometimes()).await })
            };
            let mut tasks = vec![work(), work(), work()];
            tasks.push(spawn_reaper(&world));
            all(tasks).await;
            world.check_clean().await;
        });
    });
}

/// A woken waiter may wait for the owner lock and be dropped there.
#[test]
fn no_waiter_waits_in_vain_if_one_is_dropped_before_its_turn() {
    explore(1_500, &["a waiter", "an acquire was dropped"], |seen| {
        let world = World::new(seen);
        block_on(async {
            let work = |(name, gives_up)| {
                let world = Arc::clone(&world);
                spawn(async move { world.work(Some(name), false, gives_up).await })
            };
            all([("a", false), ("b", true), ("b", false)].map(work).into()).await;
        });
    });
}

#[test]
fn an_owner_has_one_hold_if_a_call_comes_while_it_is_forgotten() {
    let must_see = [
        "a nested guard",
        "an acquire was dropped",
        "a release was dropped",
        "a hold was reaped later",
    ];
    explore(1_000, &must_see, |seen| {
        let world = World::new(seen);
        block_on(async {
            let work = || {
                let world = Arc::clone(&world);
                spawn(async move {
                    world.work(Some("a"), false, sometimes()).await;
                    world.work(Some("a"), false, sometimes()).await;
                })
            };
            all(vec![work(), work(), spawn_reaper(&world)]).await;
            world.check_clean().await;
        });
    });
}

/// A holder that re-enters a hold that was handed to it has it already. It does not wait for its
/// own release, even if others wait.
#[test]
fn a_holder_that_re_enters_a_handed_off_hold_does_not_wait() {
    explore(
        1_000,
        &["a waiter", "it was handed off", "a nested guard"],
        |seen| {
            let world = World::new(seen);
            block_on(async {
                // A hold that was nested is not handed off. Those that nest receive it from the one
                // that does not.
                let work = |nests: bool| {
                    let world = Arc::clone(&world);
                    spawn(async move {
                        let (hold, outer) = world
                            .acquire(None, false)
                            .await
                            .expect("it waits for as long as it takes");
                        let owner = &outer.generation.owner;
                        world.check_held(owner, &hold);
                        if nests {
                            let (again, inner) = world
                                .acquire(Some(owner), false)
                                .await
                                .expect("it has it already");
                            assert!(Arc::ptr_eq(&hold, &again) && hold.count() == 2, "{again:?}");
                            if owner.turn().is_some_and(|turn| turn.get() > 1) {
                                world.seen.note("a nested guard");
                            }
                            world.core.release(&again, inner).await.unwrap();
                        }
                        // Dropping this forgets the hold, as giving up a guard does.
                        let under_way = CallInFlight {
                            core: &world.core,
                            hold,
                        };
                        world.core.release(&under_way.hold, outer).await.unwrap();
                    })
                };
                all([false, true, true].map(work).into()).await;
                world.check_clean().await;
            });
        },
    );
}

/// Joins the wait queue of a read-write lock, which has two sides, as a waiter for one half.
fn half(world: &World, shares: bool) -> Waiter<'_> {
    let name = LockName::new("", "rw", 1024).unwrap();
    let kind: Arc<dyn Kind> = if shares {
        Arc::new(lock::ReadSide::new(&name))
    } else {
        Arc::new(lock::WriteSide::new(&name))
    };
    world.core.join(&kind, &Arc::from("rw"), true, None)
}

/// The waiters at the two sides of one wait queue.
struct Sides {
    world: Arc<World>,
    /// Waiters that have joined so far.
    waiting: AtomicUsize,
    /// Readers that were woken and not dropped.
    readers: AtomicUsize,
    /// Writers that were woken and not dropped.
    writers: AtomicUsize,
    /// Writers that were woken and have not reacted yet.
    told: AtomicUsize,
}

impl Sides {
    /// Waits until woken, then uses the permit. With `is_dropped`, the waiter is dropped before
    /// that, with a permit or without.
    async fn wait(&self, shares: bool, is_dropped: bool) {
        let waiter = half(&self.world, shares);
        self.waiting.fetch_add(1, SeqCst);
        let woken = tokio::select! {
            biased;
            woken = waiter.wait(None) => woken,
            () = moments(12), if is_dropped => return,
        };
        let Woken::Notified(permit) = woken else {
            panic!("{woken:?}")
        };
        assert!(
            shares || self.told.fetch_add(1, SeqCst) == 0,
            "one message woke two writers"
        );
        moments(3).await;
        if !shares {
            self.told.fetch_sub(1, SeqCst);
        }
        if is_dropped {
            return self.world.seen.note(if shares {
                "a reader with a permit"
            } else {
                "a writer with a permit"
            });
        }
        permit.forget();
        if shares { &self.readers } else { &self.writers }.fetch_add(1, SeqCst);
    }
}

/// A message wakes all readers and one writer, and the next writer if that one is dropped.
#[test]
fn a_message_wakes_all_readers_and_one_writer_or_its_successor() {
    explore(
        1_000,
        &["a reader with a permit", "a writer with a permit"],
        |seen| {
            let none = || AtomicUsize::new(0);
            let world = World::new(seen);
            let sides = Sides {
                world,
                waiting: none(),
                readers: none(),
                writers: none(),
                told: none(),
            };
            let sides = Arc::new(sides);
            block_on(async {
                let come = |(shares, is_dropped)| {
                    let sides = Arc::clone(&sides);
                    spawn(async move { sides.wait(shares, is_dropped).await })
                };
                let readers = [(true, false), (true, true), (true, false)].map(come);
                let writers = [(false, true), (false, false), (false, false)].map(come);
                until(|| sides.waiting.load(SeqCst) == 6).await;
                for message_number in 1..=2 {
                    deliver(
                        &sides.world.core.subscriptions,
                        Push::Message {
                            channel: "rw",
                            text: b"0",
                        },
                    );
                    until(|| {
                        sides.readers.load(SeqCst) == 2
                            && sides.writers.load(SeqCst) >= message_number
                    })
                    .await;
                }
                all(readers.into_iter().chain(writers).collect()).await;
            });
        },
    );
}

/// The woken waiter may retry in vain and wait again before the task that woke it continues.
#[test]
fn a_waiter_that_waits_for_a_list_again_is_woken_again() {
    explore(1_500, &["it waits again"], |seen| {
        let (world, lists) = World::with_lists(seen);
        let mut reader = Popper::new(Arc::clone(&world.core), lists);
        block_on(async {
            // An element arrives whenever the list is wanted. One that arrives before the waiter
            // sleeps is for that waiter.
            spawn(async move {
                while reader.wait_until_wanted().await {
                    let queue = reader.wanted.values().next().cloned().unwrap();
                    reader.deliver(&queue);
                    yield_now().await;
                }
            });
            let waiter = world.core.join_list(&world.kind, &Arc::from("list"));
            for _ in 0..3 {
                match waiter.wait(None).await {
                    Woken::Notified(permit) => permit.forget(),
                    other => panic!("{other:?}"),
                }
                seen.note("it waits again");
            }
        });
    });
}

#[test]
fn a_wait_queue_stays_for_as_long_as_a_waiter_is_in_it() {
    explore(1_500, &["a wait queue was removed"], |seen| {
        let world = World::new(seen);
        block_on(async {
            let passes = Arc::clone(&world);
            let passes = spawn(async move { drop(half(&passes, true)) });
            let stays = Arc::clone(&world);
            let stays = spawn(async move {
                let waiter = half(&stays, false);
                moments(6).await;
                let known = stays.core.subscriptions.get("rw").expect("one waits");
                assert!(
                    Arc::ptr_eq(&known, &waiter.queue),
                    "the waiter is in another queue"
                );
            });
            all(vec![passes, stays]).await;
        });
    });
}

/// Some made their attempt before messages came, and sleep after: each that gets in wakes the next.
#[test]
fn messages_that_find_too_few_waiters_wake_those_that_come() {
    explore(10, &["woken"], |seen| {
        let name = LockName::new("", "jobs", 1024).unwrap();
        let kind: Arc<dyn Kind> = Arc::new(lock::PermitRecord::new(&name, 9));
        let queue = Arc::new(WaitQueue::new(
            Awaited::Lock(kind),
            &Arc::from("jobs"),
            true,
        ));
        queue.side(0).add_waiter();
        queue.wake_for(1, false);
        queue.wake_for(1, false);
        // the second side has its first waiter only now
        let come = [0, 1].map(|side| {
            let (queue, seen) = (Arc::clone(&queue), seen.clone());
            spawn(async move {
                for _ in 0..3 {
                    let side = queue.side(side);
                    let permit = Arc::clone(&side.permits).try_acquire_owned();
                    permit.expect("it is woken").forget();
                    seen.note("woken");
                    side.go_on();
                }
            })
        });
        block_on(all(come.into()));
    });
}

/// The others would sleep until the next poll.
#[test]
fn a_poll_that_leads_to_no_attempt_wakes_the_next_waiter() {
    explore(300, &["woken"], |seen| {
        let world = World::new(seen);
        block_on(async {
            let (first, second) = (half(&world, false), half(&world, false));
            PollTurn::of(&first).forget();
            let turn = PollTurn::of(&first);
            let waits = second.wait(None);
            let fails = async {
                moments(3).await;
                drop((turn, first));
            };
            let (woken, ()) = futures_util::join!(waits, fails);
            assert!(matches!(woken, Woken::Notified(_)), "{woken:?}");
            seen.note("woken");
        });
    });
}

#[test]
fn no_waiter_waits_at_a_client_that_was_shut_down() {
    explore(300, &["a waiter"], |seen| {
        let world = World::new(seen);
        block_on(async {
            let come = |shares| {
                let world = Arc::clone(&world);
                spawn(async move {
                    let woken = half(&world, shares).wait(None).await;
                    assert!(matches!(woken, Woken::Closed), "{woken:?}");
                })
            };
            let come = [true, false, true].map(come);
            moments(5).await;
            world.core.close();
            all(come.into()).await;
            assert_eq!(world.core.subscriptions.channels(), 0);
        });
    });
}
