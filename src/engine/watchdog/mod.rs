//! The watchdog renews holds without a fixed lease every third of their TTL, in batches, and
//! notices expired leases.
//!
//! It takes due holds in order of time and sends them in order of deadline, with enough batches in
//! flight to fill a round trip.
//!
//! - A batch has up to 500 locks, each with its own lease. `Gone` and `Taken` mean that the hold is
//!   lost. No reply means nothing: the renewal is due again soon, until the deadline passes.
//! - A batch whose refusal may concern one of its locks is halved, so that one lock cannot cost the
//!   others their leases. After 12 refusals in a row the server counts as refusing everything, and
//!   each batch is sent once.
//! - In a cluster, each master has its own limit of batches in flight: one that hangs delays no
//!   renewals of another.
//! - A shared lock's fixed lease is sent repeatedly while it lasts: Redisson's readers shorten the
//!   record's TTL.
//! - After a reconnect, all holds are checked at once, those with a fixed lease by a renewal of 1
//!   ms, which changes nothing.
//!
//! `LockGuard::lost` does not rely on this: it has its own timer at the deadline.

mod pending;

use std::{
    collections::{HashMap, HashSet},
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use nestlock_wire::{
    Acks, Arg, Call, Copies, Script,
    clock::{Instant, millis},
    log,
};

use self::pending::{Group, Pending};

use super::{
    core::{Core, LOCKS_AT_ONCE},
    hold::{
        Hold,
        due::POLL,
        state::{Due, DueRenewal},
    },
    kind::Kind,
    lease::{Keep, RenewalReply},
};

use crate::{
    error::{StoreError, StoreErrorKind},
    meter,
    owner::OwnerId,
    store::Renewed,
};

use futures_util::{
    future::join_all,
    stream::{FuturesUnordered, StreamExt},
};

/// Time that the server takes for one batch, rounded up. As many batches are in flight as fit into
/// a round trip, plus 2.
const WORK: Duration = Duration::from_millis(2);
/// Most batches in flight to one server.
const MAX_IN_FLIGHT: usize = 64;
/// Refused parts in a row after which the whole batch counts as refused. This is more than the
/// bisection needs to find the one bad lock of [`LOCKS_AT_ONCE`]. Sending each lock alone would
/// only hammer the server.
const MOST_REFUSALS: u32 = 12;

/// Pause before the client checks again whether a record exists.
const RECHECK: Duration = Duration::from_millis(500);
/// Shortest delay before retrying a renewal near its deadline.
const SOON: Duration = Duration::from_millis(50);

/// Returns the group of a hold. Holds of one group can be renewed by one request.
fn group_of(core: &Core, entry: &BatchEntry) -> Group {
    let kind = entry.hold.kind();
    (kind.renew().source.name, core.store.group_of(kind.record()))
}

/// Batches in flight per server. A silent server delays its own renewals only.
type Ways = HashMap<u16, usize>;

/// Servers that refused the last renewals as a whole.
type Refusing = Mutex<HashSet<u16>>;

/// A hold to renew in a batch.
struct BatchEntry {
    hold: Arc<Hold>,
    renewal: DueRenewal,
}

/// The server of a batch, and the set of servers that refuse all renewals.
#[derive(Clone, Copy)]
struct BatchTarget<'a> {
    server: u16,
    refusing: &'a Refusing,
}

impl BatchEntry {
    /// Makes the hold due again.
    fn not_renewed(&self) {
        let next = again(&self.renewal, Instant::now());
        self.hold.not_renewed(&self.renewal.generation, next);
    }
}

impl BatchTarget<'_> {
    fn refusing(&self) -> MutexGuard<'_, HashSet<u16>> {
        self.refusing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Runs the watchdog until the client ends.
pub(crate) async fn run(core: Arc<Core>) {
    let (refusing, server_of) = (Refusing::default(), |group| core.store.server_of(group));
    let (mut pending, mut under_way, mut ways) =
        (Pending::default(), FuturesUnordered::new(), Ways::new());
    let mut connections = core.store.connections();
    loop {
        let due = poll_due(&core);
        if !due.is_empty() {
            pending.add(
                due.into_iter()
                    .map(|one| (group_of(&core, &one), one.renewal.deadline, one)),
                server_of,
            );
        }
        loop {
            let most = at_once(&core);
            let is_free = |server| ways.get(&server).is_none_or(|under_way| *under_way < most);
            let entries = |one: &BatchEntry| usize::from(one.hold.entries());
            let Some((server, batch)) = pending.next(LOCKS_AT_ONCE, entries, server_of, is_free)
            else {
                break;
            };
            *ways.entry(server).or_default() += 1;
            let (core, refusing) = (&core, &refusing);
            under_way.push(async move {
                renew(core, BatchTarget { server, refusing }, batch).await;
                server
            });
        }
        // Poll: no event tells that the last other handle of a hold to forget is gone.
        let longest = if core.holds.reap_again() {
            POLL
        } else {
            core.config.watchdog_timeout / 3
        };
        tokio::select! {
            Some(server) = under_way.next(), if !under_way.is_empty() => {
                ways.entry(server).and_modify(|under_way| *under_way -= 1);
            }
            // A new connection may lead to another server, or to one that lost its data: check all
            // holds.
            changed = connections.changed() => match changed {
                Ok(()) => {
                    let now = Instant::now();
                    core.holds.for_each(|hold| hold.change(|state, _| state.check_soon(now)));
                }
                Err(_) => return,
            },
            () = core.holds.due.wait(longest) => {}
        }
    }
}

/// Returns how many batches may be in flight to one server.
fn at_once(core: &Core) -> usize {
    // In a cluster a batch covers one slot and is never full, so allow many.
    if core.store.is_cluster() {
        return MAX_IN_FLIGHT;
    }
    let fit = core.store.round_trip().as_nanos() / WORK.as_nanos();
    MAX_IN_FLIGHT.min(2 + fit as usize)
}

/// Polls the holds that are due. Returns those to renew.
fn poll_due(core: &Arc<Core>) -> Vec<BatchEntry> {
    let (now, mut renewals) = (Instant::now(), Vec::new());
    for hold in core.holds.due.take(now) {
        match hold.poll(now) {
            Due::Nothing => {}
            Due::Renew(renewal) => renewals.push(BatchEntry { hold, renewal }),
            Due::Ended => core.tidy(&hold),
            // The owner is in a wait queue and its server is unreachable, so its waiter cannot
            // send. That is not stuck: the server's own clock drops the place of a waiter that is
            // gone. If the server is reachable, the future is no longer polled, and the request in
            // doubt may hold the lock itself.
            Due::Stuck if !core.store.is_up(hold.kind().record()) && hold.bear() => {}
            Due::Stuck if hold.is_left() && hold.bear() => {}
            Due::Stuck => {
                log::later!(
                    WARN, lock = hold.lock_name(), owner = hold.owner();
                    "the future of a request is no longer polled; undoing the request"
                );
                core.orphan(&hold);
            }
        }
    }
    renewals
}

/// Renews one batch.
///
/// A refusal that concerns one lock must not cost the others their renewal, so a refused batch is
/// bisected, unless the server refuses everything. If the slot of the batch is migrating, each lock
/// is renewed by a request of its own.
async fn renew(core: &Arc<Core>, target: BatchTarget<'_>, batch: Vec<BatchEntry>) {
    let Some(script) = batch.first().map(|entry| entry.hold.kind().renew()) else {
        return;
    };
    let mut refused_in_a_row = 0;
    let mut parts = vec![batch];
    while let Some(mut part) = parts.pop() {
        let sent = Instant::now();
        // A generation that ended since it became due needs no renewal.
        part.retain(|entry| entry.hold.is_current(&entry.renewal.generation));
        if part.is_empty() {
            continue;
        }
        let ttls: Vec<Duration> = part
            .iter()
            .map(|entry| entry.renewal.keep.ttl(sent))
            .collect();
        let copies = part.iter().filter_map(|entry| copies(core, entry));
        let most = copies.max_by_key(|copies| copies.replicas);
        match core.store.renew(&call(script, &part, &ttls), most).await {
            Ok((renewed, acks)) => {
                target.refusing().remove(&target.server);
                refused_in_a_row = 0;
                let replies = part.iter().zip(ttls).zip(renewed);
                let replies = replies.map(|((entry, ttl), renewed)| RenewalReply {
                    renewed,
                    sent,
                    ttl,
                    next: Some(sent + entry.renewal.period),
                });
                take_in(core, &part, replies.collect(), acks);
            }
            // Some keys of the slot have moved. Bisecting one part after the other could take a
            // slow master longer than the leases.
            Err(error) if error.kind() == StoreErrorKind::TryAgain && part.len() > 1 => {
                each_alone(core, target, part).await;
            }
            Err(error) => {
                refused_in_a_row += 1;
                let hopeless =
                    refused_in_a_row >= MOST_REFUSALS || target.refusing().contains(&target.server);
                let halves = may_concern_one(&error) && !hopeless;
                if halves && part.len() > 1 {
                    let right = part.split_off(part.len() / 2);
                    parts.extend([right, part]);
                    continue;
                }
                // a server that refuses all renewals is reported once, until it accepts one
                let is_news = halves || target.refusing().insert(target.server);
                if !halves {
                    part.extend(parts.drain(..).flatten());
                }
                failed(core, &part, &error, is_news);
            }
        }
    }
}

/// Returns the copies that a renewal must have. A mere check of the record writes nothing, so it
/// waits for no replicas.
fn copies(core: &Core, entry: &BatchEntry) -> Option<Copies> {
    let replicas =
        (entry.renewal.keep != Keep::AsItIs).then(|| entry.renewal.generation.ledger().replicas)?;
    core.config.copies(replicas)
}

/// Takes in the replies to one batch.
fn take_in(
    core: &Core,
    part: &[BatchEntry],
    replies: Vec<RenewalReply>,
    acks: Result<Option<Acks>, StoreError>,
) {
    // Treat an unacknowledged renewal as failed: a replica without it may end the record earlier.
    let acks = acks.inspect_err(
        |error| log::later!(DEBUG, error = error; "WAIT failed; the renewal is unconfirmed"),
    );
    let has_copies = |entry: &BatchEntry| {
        copies(core, entry)
            .is_none_or(|copies| matches!(acks, Ok(Some(acks)) if acks.suffice(copies)))
    };
    if meter::IS_ON {
        let now = Instant::now();
        let counted = part.iter().zip(&replies).map(|(entry, reply)| {
            let late = now.saturating_duration_since(entry.renewal.due);
            counted_as(entry, outcome(reply.renewed), Some(late))
        });
        core.config.meter.renewals(counted.collect());
    }
    for (entry, reply) in part.iter().zip(replies) {
        match reply.renewed {
            Renewed::Unknown => entry.not_renewed(),
            Renewed::Yes if !has_copies(entry) => entry.not_renewed(),
            _ => entry.hold.renewed(&entry.renewal.generation, reply),
        }
        // The hold may be lost, or was released since.
        core.tidy(&entry.hold);
    }
}

/// Records that a batch was not renewed: each hold is due again.
fn failed(core: &Core, part: &[BatchEntry], error: &StoreError, is_news: bool) {
    let (locks, first) = (
        part.len(),
        part.first().map_or("", |entry| entry.hold.lock_name()),
    );
    if is_news {
        log::later!(
            WARN, lock = first, locks = locks, error = error; "renewal failed; retrying until the lease ends"
        );
    } else {
        log::later!(DEBUG, lock = first, locks = locks, error = error; "renewal failed again");
    }
    if meter::IS_ON {
        let failed = part.iter().map(|entry| counted_as(entry, "failed", None));
        core.config.meter.renewals(failed.collect());
    }
    for entry in part {
        entry.not_renewed();
        core.tidy(&entry.hold);
    }
}

/// Renews each hold of a batch by a request of its own, all at once. Boxed, because it recurses
/// into [`renew`].
fn each_alone<'a>(
    core: &'a Arc<Core>,
    target: BatchTarget<'a>,
    batch: Vec<BatchEntry>,
) -> Pin<Box<dyn Future<Output = ()> + Send + 'a>> {
    Box::pin(async move {
        join_all(batch.into_iter().map(|one| renew(core, target, vec![one]))).await;
    })
}

fn counted_as(
    entry: &BatchEntry,
    outcome: &'static str,
    late: Option<Duration>,
) -> meter::RenewalOutcome {
    let kind = entry.hold.kind();
    meter::RenewalOutcome {
        kind: kind.about().label,
        lock: Arc::clone(kind.name()),
        outcome,
        late,
    }
}

/// Returns the outcome label of a renewal reply for the metrics.
fn outcome(answer: Renewed) -> &'static str {
    match answer {
        Renewed::Yes | Renewed::Endless => "renewed",
        Renewed::Gone => "gone",
        Renewed::Taken => "taken",
        Renewed::Unknown => "failed",
    }
}

/// Returns when to retry an unconfirmed renewal.
///
/// A mere check of the record has no deadline and is retried after [`RECHECK`]. Any other renewal
/// is retried after a tenth of its period, or sooner if the deadline is near: a granted hold starts
/// with less time than its period.
fn again(renewal: &DueRenewal, now: Instant) -> Instant {
    let DueRenewal {
        keep,
        period,
        deadline,
        ..
    } = renewal;
    let left = deadline.saturating_duration_since(now);
    now + match keep {
        Keep::AsItIs => RECHECK.min(*period),
        _ => (*period / 10).min(SOON.max(left / 4)),
    }
}

/// Returns whether the refusal may concern a single lock of the batch, rather than the script or
/// the state of the server.
fn may_concern_one(error: &StoreError) -> bool {
    use StoreErrorKind as K;
    !error.may_have_executed()
        && matches!(
            error.kind(),
            K::NoPermission | K::CrossSlot | K::Moved | K::TryAgain | K::WrongType | K::Other
        )
}

fn call(script: &'static Script, batch: &[BatchEntry], ttls: &[Duration]) -> Call {
    let keys = batch
        .iter()
        .map(|entry| Arc::clone(entry.hold.kind().record()));
    let of_one = |(entry, ttl): (&BatchEntry, &Duration)| {
        [
            entry
                .hold
                .kind_as_acquired()
                .renewed_owner(&entry.renewal.generation.owner),
            Arg::from(millis(*ttl)),
        ]
    };
    Call::new(script, keys, batch.iter().zip(ttls).flat_map(of_one))
}

/// Extends one hold to at least `lease` from now, by the watchdog's script. Returns when the
/// request was sent, and the reply.
pub(crate) async fn extend(
    core: &Core,
    kind: &Arc<dyn Kind>,
    owner: &OwnerId,
    lease: Duration,
    copies: Option<Copies>,
) -> (Instant, Result<(Renewed, Option<Acks>), StoreError>) {
    let call = Call::new(
        kind.renew(),
        vec![Arc::clone(kind.record())],
        vec![kind.renewed_owner(owner), millis(lease).into()],
    );
    let sent = Instant::now();
    let renewed = core
        .store
        .renew(&call, copies)
        .await
        .and_then(|(answers, acks)| Ok((answers[0], acks?)));
    (sent, renewed)
}
