//! The timer queue of the watchdog: holds in order of the time at which they are due.
//!
//! Every change to a hold re-queues it, so the watchdog never scans all holds, and an acquire costs
//! the same however many locks are held. A bucket is an instant. A hold knows its bucket and its
//! index there, so removing it needs no search either.
//!
//! A hold joins a bucket that is due up to a tenth of its period earlier, so that many are renewed
//! together. A hold that becomes due later stays in its bucket until that is due, and moves then: a
//! short hold is entered once, by its acquire, and removed once.
//!
//! The watchdog compares the queue with the clock every 250 ms at the latest, because no timer
//! notices that the machine slept.

use std::{
    collections::BTreeMap,
    sync::{Arc, PoisonError},
    time::Duration,
};

use nestlock_wire::clock::Instant;

use crate::sync::{
    Mutex, MutexGuard, Notify,
    atomic::{AtomicU32, AtomicU64, Ordering::Relaxed},
};

/// Poll interval of the watchdog while any lock is held: a timer does not notice that the machine
/// was suspended.
pub(crate) const POLL: Duration = Duration::from_millis(250);
/// The bucket of an entry that is not queued.
const NOWHERE: u64 = u64::MAX;

/// The position of an entry: its bucket and its index there.
///
/// Both are written under the queue's mutex only, which also orders them, so all accesses are
/// relaxed. `put` first reads the bucket without that mutex. It runs with the state of the entry
/// locked, so no other `put` moves the entry. The watchdog may take it out in between and then
/// polls it.
#[derive(Debug)]
pub(crate) struct QueueSlot {
    bucket: AtomicU64,
    index: AtomicU32,
}

impl Default for QueueSlot {
    fn default() -> Self {
        Self {
            bucket: AtomicU64::new(NOWHERE),
            index: AtomicU32::new(0),
        }
    }
}

/// An entry of a [`DueQueue`].
pub(crate) trait Queued {
    fn queue_slot(&self) -> &QueueSlot;
}

/// A queue of entries in order of time, which wakes its reader when an earlier entry is added.
#[derive(Debug)]
pub(crate) struct DueQueue<T> {
    /// Longest time that a request can be in flight while its future is polled.
    overdue: Duration,
    buckets: Mutex<BTreeMap<u64, Vec<Arc<T>>>>,
    /// When the watchdog wakes, in milliseconds.
    ///
    /// Relaxed is enough. The watchdog stores this before it locks the buckets. `put` loads it
    /// after it has unlocked them. So either the watchdog sees the new entry, or `put` sees that it
    /// must wake the watchdog.
    asleep_until: AtomicU64,
    sooner: Notify,
}

impl<T: Queued> DueQueue<T> {
    pub(crate) fn new(command_timeout: Duration) -> Self {
        Self {
            overdue: command_timeout + Duration::from_secs(1),
            buckets: Mutex::default(),
            asleep_until: AtomicU64::new(0),
            sooner: Notify::new(),
        }
    }

    pub(crate) fn overdue(&self) -> Duration {
        self.overdue
    }

    fn buckets(&self) -> MutexGuard<'_, BTreeMap<u64, Vec<Arc<T>>>> {
        self.buckets.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues an entry for when it is due, or removes it (`None`). It may go into a bucket up to
    /// `slack` earlier, so that many are due together.
    ///
    /// An entry that is queued earlier already stays there, because most holds end before that. The
    /// watchdog finds that it is not due yet and queues it again. Call with the state of the entry
    /// locked: the last change wins.
    pub(crate) fn put(&self, what: &Arc<T>, due: Option<(Instant, Duration)>) {
        let due = due.map(|(at, slack)| {
            let at = at.as_millis().min(NOWHERE - 1);
            (at.saturating_sub(slack.as_millis() as u64), at)
        });
        let known = what.queue_slot().bucket.load(Relaxed);
        // If the watchdog took it out since, it polls it and queues it again.
        if due.map_or(known == NOWHERE, |(_, to)| known <= to) {
            return;
        }
        let (mut out, mut first) = (None, NOWHERE);
        {
            let mut buckets = self.buckets();
            let old = what.queue_slot().bucket.load(Relaxed);
            if let Some(others) = buckets.get_mut(&old) {
                let index = what.queue_slot().index.load(Relaxed);
                out = Some(others.swap_remove(index as usize));
                if let Some(moved) = others.get(index as usize) {
                    moved.queue_slot().index.store(index, Relaxed);
                } else if others.is_empty() {
                    buckets.remove(&old);
                }
            }
            if let Some((from, to)) = due {
                first = buckets
                    .range(from..=to)
                    .next_back()
                    .map_or(to, |(bucket, _)| *bucket);
                let others = buckets.entry(first).or_default();
                what.queue_slot().index.store(others.len() as u32, Relaxed);
                others.push(Arc::clone(what));
            }
            what.queue_slot().bucket.store(first, Relaxed);
        }
        // Dropped after the mutex is released. It is not the last handle: the caller has one.
        drop(out);
        if first < self.asleep_until.load(Relaxed) {
            self.sooner.notify_one();
        }
    }

    /// Wakes the watchdog.
    pub(crate) fn wake(&self) {
        self.sooner.notify_one();
    }

    /// Takes out all entries that are due.
    pub(crate) fn take(&self, now: Instant) -> Vec<Arc<T>> {
        let mut due = Vec::new();
        let mut buckets = self.buckets();
        while let Some(first) = buckets.first_entry()
            && *first.key() <= now.as_millis()
        {
            due.append(&mut first.remove());
        }
        for what in &due {
            what.queue_slot().bucket.store(NOWHERE, Relaxed);
        }
        due
    }

    /// Sleeps until an entry is due, or an earlier one is queued; at most `longest`.
    pub(crate) async fn wait(&self, longest: Duration) {
        let now = Instant::now();
        // Store first, then read the buckets: in the other order, an entry queued in between would
        // be missed.
        self.asleep_until.store(NOWHERE, Relaxed);
        let first = self.buckets().keys().next().copied();
        let until = first.map_or(now + longest, |first| {
            Instant::from_millis(first).min(now + POLL)
        });
        self.asleep_until.store(until.as_millis(), Relaxed);
        // Avoid spinning if an entry is due already.
        let pause = until
            .saturating_duration_since(now)
            .max(Duration::from_millis(1));
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = self.sooner.notified() => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use shuttle::future::block_on;

    use super::*;
    use crate::sync::{spawn, tests::explore};

    #[derive(Debug, Default)]
    struct Thing(QueueSlot);

    impl Queued for Thing {
        fn queue_slot(&self) -> &QueueSlot {
            &self.0
        }
    }

    /// Each entry is found: never late, and before its slack only if it was due earlier at some
    /// time.
    #[test]
    fn what_is_due_is_found_once_and_in_time() {
        shuttle::check_random(what_is_due_is_found, 1);
    }

    fn what_is_due_is_found() {
        let queue = DueQueue::new(Duration::from_secs(3));
        let all: Vec<Arc<Thing>> = (0..200).map(|_| Arc::default()).collect();
        // When the entry is due, and the earliest time at which it was due since it was queued.
        let mut wanted: Vec<Option<(u64, u64)>> = vec![None; all.len()];
        let (mut seed, mut now) = (7_u64, 1_000_000);
        let mut random = |below: u64| {
            seed = seed
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) % below
        };
        for _ in 0..20_000 {
            let at = random(200) as usize;
            let slack = [0, 0, 7, 100][random(4) as usize];
            let due = (random(5) > 0).then(|| (now + random(2000), slack));
            let of_clock =
                due.map(|(due, slack)| (Instant::from_millis(due), Duration::from_millis(slack)));
            queue.put(&all[at], of_clock);
            wanted[at] = due.map(|(due, slack)| {
                let from = due - slack;
                (
                    due,
                    wanted[at].map_or(from, |(_, soonest)| soonest.min(from)),
                )
            });
            if random(10) > 0 {
                continue;
            }
            now += random(300);
            for hold in queue.take(Instant::from_millis(now)) {
                let at = all
                    .iter()
                    .position(|known| Arc::ptr_eq(known, &hold))
                    .unwrap();
                let (due, soonest) = wanted[at].take().expect("it was put, and is found once");
                assert!(soonest <= now, "{} ms early", soonest - now);
                // The watchdog does the same.
                if due > now {
                    queue.put(&hold, Some((Instant::from_millis(due), Duration::ZERO)));
                    wanted[at] = Some((due, due));
                }
            }
            assert!(wanted.iter().flatten().all(|(due, _)| *due > now), "late");
        }
        drop(queue.take(Instant::from_millis(u64::MAX / 2)));
        assert!(queue.buckets().is_empty() && all.iter().all(|hold| Arc::strong_count(hold) == 1));
    }

    /// The watchdog sees each entry that is queued while it goes to sleep, or is woken.
    #[test]
    fn nothing_is_due_sooner_than_the_watchdog_wakes() {
        explore(
            3_000,
            &["it was woken", "it has seen what is due"],
            |seen| {
                let queue = Arc::new(DueQueue::new(Duration::from_secs(3)));
                let due = Instant::now() + Duration::from_millis(100);
                let put = |later| {
                    let queue = Arc::clone(&queue);
                    spawn(async move {
                        let thing = Arc::new(Thing::default());
                        queue.put(&thing, Some((due + 3 * later, Duration::ZERO)));
                        queue.put(&thing, Some((due + later, later / 2)));
                    })
                };
                let puts = [0, 7, 1_000].map(|later| put(Duration::from_millis(later)));
                block_on(async {
                    let mut sleep = pin!(queue.wait(Duration::from_secs(60)));
                    let mut is_over = futures::poll!(&mut sleep).is_ready();
                    for put in puts {
                        put.await.unwrap();
                    }
                    is_over = is_over || futures::poll!(&mut sleep).is_ready();
                    let has_seen = queue.asleep_until.load(Relaxed) <= due.as_millis();
                    assert!(
                        is_over || has_seen,
                        "asleep, and something is due at {due:?}: {queue:?}"
                    );
                    seen.note(if is_over {
                        "it was woken"
                    } else {
                        "it has seen what is due"
                    });
                });
            },
        );
    }
}
