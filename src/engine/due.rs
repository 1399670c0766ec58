//! What the watchdog must look at, in order of time.
//!
//! Whoever changes a hold puts it where it belongs, so that nothing is ever searched for what is due: acquiring costs
//! the same however much is held. A bucket is a moment; a hold knows its bucket and its index there, so that it leaves
//! without a search too.

use std::{
    collections::BTreeMap,
    sync::{Arc, PoisonError},
    time::Duration,
};

use crate::{
    clock::Instant,
    sync::{
        Mutex, MutexGuard, Notify,
        atomic::{AtomicU32, AtomicU64, Ordering::Relaxed},
    },
};

/// The watchdog looks this often while anything is held: a timer does not notice that the machine slept.
pub(super) const LOOK: Duration = Duration::from_millis(250);
/// The bucket of what is in none.
const NOWHERE: u64 = u64::MAX;

/// Where something is in the queue: its bucket and its index there. Written under the queue's mutex only, which orders it
/// too: so all accesses are relaxed. Whoever reads a bucket without the mutex has the mutex of what is put, under which
/// nobody else puts it; it may be taken out meanwhile, and whoever took it will look.
#[derive(Debug)]
pub(super) struct Spot {
    bucket: AtomicU64,
    index: AtomicU32,
}

impl Default for Spot {
    fn default() -> Self {
        Self { bucket: AtomicU64::new(NOWHERE), index: AtomicU32::new(0) }
    }
}

/// What can stand in the queue.
pub(super) trait Queued {
    fn spot(&self) -> &Spot;
}

#[derive(Debug)]
pub(crate) struct DueQueue<T> {
    /// After how long a request cannot be under way any more, unless its future is not polled.
    overdue: Duration,
    buckets: Mutex<BTreeMap<u64, Vec<Arc<T>>>>,
    /// Until when the watchdog sleeps, in milliseconds. Relaxed: it is stored before the buckets are locked and looked at,
    /// and loaded after something was put there and they were unlocked; so either the watchdog sees what was put, or whoever
    /// put it sees that it must be woken.
    asleep_until: AtomicU64,
    sooner: Notify,
}

impl<T: Queued> DueQueue<T> {
    pub(super) fn new(command_timeout: Duration) -> Self {
        Self {
            overdue: command_timeout + Duration::from_secs(1),
            buckets: Mutex::default(),
            asleep_until: AtomicU64::new(0),
            sooner: Notify::new(),
        }
    }

    pub(super) fn overdue(&self) -> Duration {
        self.overdue
    }

    fn buckets(&self) -> MutexGuard<'_, BTreeMap<u64, Vec<Arc<T>>>> {
        self.buckets.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts something where it is due, or to others that are due up to `slack` earlier, so that many are due together; `None`:
    /// takes it out. What stands where it was due sooner stays there, since most of that is over by then: whoever takes it looks
    /// whether it is due, and puts it again. Call with its state locked: the last change wins.
    pub(crate) fn put(&self, what: &Arc<T>, due: Option<(Instant, Duration)>) {
        let due = due.map(|(at, slack)| {
            let at = at.as_millis().min(NOWHERE - 1);
            (at.saturating_sub(slack.as_millis() as u64), at)
        });
        let known = what.spot().bucket.load(Relaxed);
        // if it was taken out meanwhile, whoever took it will look
        if due.map_or(known == NOWHERE, |(_, to)| known <= to) {
            return;
        }
        let (mut out, mut first) = (None, NOWHERE);
        {
            let mut buckets = self.buckets();
            let old = what.spot().bucket.load(Relaxed);
            if let Some(others) = buckets.get_mut(&old) {
                let index = what.spot().index.load(Relaxed);
                out = Some(others.swap_remove(index as usize));
                if let Some(moved) = others.get(index as usize) {
                    moved.spot().index.store(index, Relaxed);
                } else if others.is_empty() {
                    buckets.remove(&old);
                }
            }
            if let Some((from, to)) = due {
                first = buckets.range(from..=to).next_back().map_or(to, |(bucket, _)| *bucket);
                let others = buckets.entry(first).or_default();
                what.spot().index.store(others.len() as u32, Relaxed);
                others.push(Arc::clone(what));
            }
            what.spot().bucket.store(first, Relaxed);
        }
        // not the last handle: the caller has one
        drop(out);
        if first < self.asleep_until.load(Relaxed) {
            self.sooner.notify_one();
        }
    }

    /// Wakes the watchdog.
    pub(super) fn hurry(&self) {
        self.sooner.notify_one();
    }

    /// Takes out what is due.
    pub(crate) fn take(&self, now: Instant) -> Vec<Arc<T>> {
        let mut due = Vec::new();
        let mut buckets = self.buckets();
        while let Some(first) = buckets.first_entry()
            && *first.key() <= now.as_millis()
        {
            due.append(&mut first.remove());
        }
        for what in &due {
            what.spot().bucket.store(NOWHERE, Relaxed);
        }
        due
    }

    /// Sleeps until something is due, or somebody put something in that is due sooner; at most `longest`.
    pub(crate) async fn wait(&self, longest: Duration) {
        let now = Instant::now();
        // first what is put in from here on, then what is there
        self.asleep_until.store(NOWHERE, Relaxed);
        let first = self.buckets().keys().next().copied();
        let until = first.map_or(now + longest, |first| Instant::from_millis(first).min(now + LOOK));
        self.asleep_until.store(until.as_millis(), Relaxed);
        // no spinning
        let pause = until.saturating_duration_since(now).max(Duration::from_millis(1));
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
    struct Thing(Spot);

    impl Queued for Thing {
        fn spot(&self) -> &Spot {
            &self.0
        }
    }

    /// Whatever is put, moved and taken out, each hold is found: not after its time, and before its slack only where it was due
    /// then at some time.
    #[test]
    fn what_is_due_is_found_once_and_in_time() {
        shuttle::check_random(what_is_due_is_found, 1);
    }

    fn what_is_due_is_found() {
        let queue = DueQueue::new(Duration::from_secs(3));
        let all: Vec<Arc<Thing>> = (0..200).map(|_| Arc::default()).collect();
        // when it is due, and when it was due soonest since it stands there
        let mut wanted: Vec<Option<(u64, u64)>> = vec![None; all.len()];
        let (mut seed, mut now) = (7_u64, 1_000_000);
        let mut random = |below: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) % below
        };
        for _ in 0..20_000 {
            let at = random(200) as usize;
            let slack = [0, 0, 7, 100][random(4) as usize];
            let due = (random(5) > 0).then(|| (now + random(2000), slack));
            let of_clock = due.map(|(due, slack)| (Instant::from_millis(due), Duration::from_millis(slack)));
            queue.put(&all[at], of_clock);
            wanted[at] = due.map(|(due, slack)| {
                let from = due - slack;
                (due, wanted[at].map_or(from, |(_, soonest)| soonest.min(from)))
            });
            if random(10) > 0 {
                continue;
            }
            now += random(300);
            for hold in queue.take(Instant::from_millis(now)) {
                let at = all.iter().position(|known| Arc::ptr_eq(known, &hold)).unwrap();
                let (due, soonest) = wanted[at].take().expect("it was put, and is found once");
                assert!(soonest <= now, "{} ms early", soonest - now);
                // as the watchdog does
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

    /// Whatever is put in while the watchdog goes to sleep is seen by it, or wakes it.
    #[test]
    fn nothing_is_due_sooner_than_the_watchdog_wakes() {
        explore(3_000, &["it was woken", "it has seen what is due"], |seen| {
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
                assert!(is_over || has_seen, "asleep, and something is due at {due:?}: {queue:?}");
                seen.note(if is_over { "it was woken" } else { "it has seen what is due" });
            });
        });
    }
}
