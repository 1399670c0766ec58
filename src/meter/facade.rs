//! Reports to the `metrics` crate: names, labels, and cached handles.
//!
//! A macro of `metrics` with labels costs 150 ns and three allocations per call; a cached handle
//! costs 30 ns and none. But a handle that is made before a recorder is installed never reports. So
//! each handle is made on first use.
//!
//! A recorder is the user's code, and so is the function that maps names to classes. Neither may
//! block the client's own thread, whose metrics the log thread reports. Acquires, releases and
//! wake-ups are reported where they happen.

use std::{
    cell::Cell,
    collections::HashMap,
    mem,
    panic::catch_unwind,
    ptr,
    sync::{LazyLock, Once, OnceLock},
    time::Duration,
};

use dashmap::DashMap;
use metrics::{
    Counter, Histogram, Unit, counter, describe_counter, describe_gauge, describe_histogram, gauge,
    histogram,
};
use nestlock_wire::log;

use super::{AcquireOutcome, HoldEnd, Of, RenewalOutcome, Source};

use crate::error::LossReason;

/// The maximum number of pairs of kind and class: with more, the classes are probably lock names.
const MOST: usize = 256;
/// The class of all further pairs, and of names at which the user's function panicked.
const OTHER: &str = "other";
/// The class of all locks if the user sets no function.
const ALL: &str = "all";

/// Maps a lock's name to its class. Locks of one class are counted together.
type Class = fn(&str) -> &'static str;

/// The metrics of one client.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Meter {
    class: Class,
}

impl Default for Meter {
    fn default() -> Self {
        Self { class: |_| ALL }
    }
}

/// The cached handles for one kind and class.
struct Handles {
    kind: &'static str,
    class: &'static str,
    acquired: OnceLock<Histogram>,
    reentered: OnceLock<Histogram>,
    busy: OnceLock<Histogram>,
    timeout: OnceLock<Histogram>,
    cancelled: OnceLock<Histogram>,
    released: OnceLock<Histogram>,
    lost: OnceLock<Histogram>,
    shut_down: OnceLock<Histogram>,
    left_to_lease: OnceLock<Histogram>,
    renewed: OnceLock<Counter>,
}

static HANDLES: LazyLock<DashMap<(&'static str, &'static str), &'static Handles>> =
    LazyLock::new(DashMap::new);

thread_local! {
    /// The handles that this thread used last, and probably uses next. The texts are compared by
    /// address, since a full lookup costs more than the report.
    static LAST: Cell<Option<(&'static str, &'static str, &'static Handles)>> = const { Cell::new(None) };
}

fn handles(kind: &'static str, class: &'static str) -> &'static Handles {
    if let Some((of_kind, of_class, last)) = LAST.get()
        && ptr::eq(of_kind, kind)
        && ptr::eq(of_class, class)
    {
        return last;
    }
    let found = find(kind, class);
    LAST.set(Some((kind, class, found)));
    found
}

fn find(kind: &'static str, class: &'static str) -> &'static Handles {
    if let Some(known) = HANDLES.get(&(kind, class)) {
        return *known;
    }
    let class = if HANDLES.len() < MOST { class } else { OTHER };
    *HANDLES.entry((kind, class)).or_insert_with(|| {
        // lives as long as the process: there are few
        Box::leak(Box::new(Handles {
            kind,
            class,
            acquired: OnceLock::new(),
            reentered: OnceLock::new(),
            busy: OnceLock::new(),
            timeout: OnceLock::new(),
            cancelled: OnceLock::new(),
            released: OnceLock::new(),
            lost: OnceLock::new(),
            shut_down: OnceLock::new(),
            left_to_lease: OnceLock::new(),
            renewed: OnceLock::new(),
        }))
    })
}

impl Meter {
    pub(crate) fn of_classes(class: Class) -> Self {
        Self { class }
    }

    fn class(self, lock: &str) -> &'static str {
        // a panic of the user's code must not unwind through the client's
        catch_unwind(|| (self.class)(lock)).unwrap_or(OTHER)
    }

    fn handles(self, of: Of<'_>) -> &'static Handles {
        handles(of.kind, self.class(of.lock))
    }

    pub(crate) fn acquire(self, of: Of<'_>, outcome: AcquireOutcome, took: Duration) {
        let known = self.handles(of);
        let Handles { kind, class, .. } = *known;
        let kept = match outcome {
            AcquireOutcome::Acquired => &known.acquired,
            AcquireOutcome::Reentered => &known.reentered,
            AcquireOutcome::Busy => &known.busy,
            AcquireOutcome::Timeout => &known.timeout,
            AcquireOutcome::Cancelled => &known.cancelled,
            // rare: no cached handle
            AcquireOutcome::Error(error) => {
                let labels = [
                    ("kind", kind),
                    ("class", class),
                    ("outcome", "error"),
                    ("error.type", error),
                ];
                return histogram!("nestlock.acquire.duration", &labels).record(took);
            }
        };
        let labels = [
            ("kind", kind),
            ("class", class),
            ("outcome", outcome.name()),
        ];
        kept.get_or_init(|| histogram!("nestlock.acquire.duration", &labels))
            .record(took);
    }

    pub(crate) fn hold(self, of: Of<'_>, end: HoldEnd, held: Duration) {
        if end == HoldEnd::Released {
            return self.tell_hold(of, end, held);
        }
        // most often the watchdog reports this, and a recorder must not block it
        let (kind, lock) = (of.kind, of.lock.to_owned());
        log::tell(move || self.tell_hold(Of { kind, lock: &lock }, end, held));
    }

    fn tell_hold(self, of: Of<'_>, end: HoldEnd, held: Duration) {
        let known = self.handles(of);
        let Handles { kind, class, .. } = *known;
        let kept = match end {
            HoldEnd::Released => &known.released,
            HoldEnd::Lost(LossReason::ShutDown) => &known.shut_down,
            HoldEnd::Lost(_) => &known.lost,
            HoldEnd::LeftToLease => &known.left_to_lease,
        };
        let labels = [("kind", kind), ("class", class), ("end", end.name())];
        kept.get_or_init(|| histogram!("nestlock.hold.duration", &labels))
            .record(held);
        if let HoldEnd::Lost(reason) = end {
            let reason = match reason {
                LossReason::LeaseExpired => "lease_expired",
                LossReason::RecordMissing => "record_missing",
                LossReason::TakenOver => "taken_over",
                // a shutdown by the program is not a loss
                LossReason::ShutDown => return,
            };
            counter!("nestlock.losses", "kind" => kind, "class" => class, "reason" => reason)
                .increment(1);
        }
    }

    /// Reports a batch of renewals: lock, outcome and lateness of each.
    pub(crate) fn renewals(self, batch: Vec<RenewalOutcome>) {
        log::tell(move || {
            for RenewalOutcome {
                kind,
                lock,
                outcome,
                late,
            } in &batch
            {
                self.tell_renewal(Of { kind, lock }, outcome);
                if let Some(late) = late {
                    static KEPT: OnceLock<Histogram> = OnceLock::new();
                    KEPT.get_or_init(|| histogram!("nestlock.renewal.lateness"))
                        .record(*late);
                }
            }
        });
    }

    fn tell_renewal(self, of: Of<'_>, outcome: &'static str) {
        let known = self.handles(of);
        let count = || counter!("nestlock.renewals", "kind" => known.kind, "class" => known.class, "outcome" => outcome);
        match outcome {
            "renewed" => known.renewed.get_or_init(count).increment(1),
            _ => count().increment(1),
        }
    }

    pub(crate) fn wakeup(self, of: Of<'_>, source: Source) {
        let class = self.class(of.lock);
        let class = handles(of.kind, class).class;
        counter!("nestlock.wakeups", "kind" => of.kind, "class" => class, "source" => source.name()).increment(1);
    }

    pub(crate) fn settlement(outcome: &'static str) {
        log::tell(move || counter!("nestlock.settlements", "outcome" => outcome).increment(1));
    }

    pub(crate) fn ghost() {
        log::tell(|| counter!("nestlock.ghosts").increment(1));
    }

    pub(crate) fn reconnect(connection: &'static str) {
        log::tell(move || counter!("nestlock.reconnects", "connection" => connection).increment(1));
    }
}

fn level(count: usize) -> f64 {
    // an `f64` represents each `u32` exactly
    f64::from(u32::try_from(count).unwrap_or(u32::MAX))
}

type OfClass = HashMap<(&'static str, &'static str), f64>;

/// The levels of one client that the gauges show.
#[derive(Debug, Default)]
pub(crate) struct Levels {
    held: OfClass,
    waiters: OfClass,
    under_way: f64,
}

impl Levels {
    pub(crate) fn held(&mut self, meter: Meter, of: Of<'_>) {
        *self
            .held
            .entry((of.kind, meter.handles(of).class))
            .or_default() += 1.0;
    }

    pub(crate) fn waiters(&mut self, meter: Meter, of: Of<'_>, waiters: usize) {
        *self
            .waiters
            .entry((of.kind, meter.handles(of).class))
            .or_default() += level(waiters);
    }

    pub(crate) fn under_way(&mut self, requests: usize) {
        self.under_way = level(requests);
    }
}

/// One client's part in the gauges, which all clients of the process share. Dropping it subtracts
/// that part.
#[derive(Debug, Default)]
pub(crate) struct Gauges(Levels);

impl Gauges {
    pub(crate) fn set(&mut self, now: Levels) {
        move_by(mem::take(&mut self.0), &now);
        self.0 = now;
    }
}

impl Drop for Gauges {
    fn drop(&mut self) {
        let last = mem::take(&mut self.0);
        log::tell(move || move_by(last, &Levels::default()));
    }
}

/// Moves the gauges by the difference between two readings.
fn move_by(before: Levels, now: &Levels) {
    for (name, mut before, now) in [
        ("nestlock.held", before.held, &now.held),
        ("nestlock.waiters", before.waiters, &now.waiters),
    ] {
        for ((kind, class), level) in now {
            let change = level - before.remove(&(*kind, *class)).unwrap_or_default();
            gauge!(name, "kind" => *kind, "class" => *class).increment(change);
        }
        // pairs that are gone
        for ((kind, class), level) in before {
            gauge!(name, "kind" => kind, "class" => class).decrement(level);
        }
    }
    gauge!("nestlock.queue.depth").increment(now.under_way - before.under_way);
}

/// Describes each metric and its unit to the installed recorder.
pub(crate) fn describe() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        describe_histogram!(
            "nestlock.acquire.duration",
            Unit::Seconds,
            "How long acquires took"
        );
        describe_histogram!(
            "nestlock.hold.duration",
            Unit::Seconds,
            "How long locks were held"
        );
        describe_histogram!(
            "nestlock.renewal.lateness",
            Unit::Seconds,
            "How long after it was due a renewal was confirmed"
        );
        describe_counter!("nestlock.losses", "Holds that were lost");
        describe_counter!("nestlock.renewals", "Renewals of holds");
        describe_counter!("nestlock.wakeups", "Waiters that tried again, and why");
        describe_counter!("nestlock.settlements", "Background releases");
        describe_counter!(
            "nestlock.ghosts",
            "Owner names given up because a late request may still use them"
        );
        describe_counter!("nestlock.reconnects", "Reconnects");
        describe_gauge!("nestlock.held", "Locks that are held");
        describe_gauge!("nestlock.waiters", "Acquires that wait for a release");
        describe_gauge!("nestlock.queue.depth", "Requests in flight");
    });
}
