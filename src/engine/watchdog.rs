//! Renews leaseless holds every third of their TTL, in batches, and notices holds whose lease is over.
//!
//! What is due comes from a queue in order of time; what is sent goes in order of deadlines, as many batches at once as
//! fill the way to the server and back.

use std::{
    collections::{HashMap, HashSet},
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use super::{
    core::{Core, LOCKS_AT_ONCE},
    due::LOOK,
    hold::{Look, Renewal},
    kind::Kind,
    lease::Keep,
    pending::{Group, Pending},
};
use crate::{
    clock::Instant,
    error::{StoreError, StoreErrorKind},
    log, meter,
    options::{Copies, millis},
    owner::OwnerId,
    store::{Acks, Arg, Call, Renewed, Script},
};
use futures_util::{
    future::join_all,
    stream::{FuturesUnordered, StreamExt},
};

/// What the server takes for a batch, or a little more: so many batches are under way as fit into a round trip.
const WORK: Duration = Duration::from_millis(2);
const MOST_UNDER_WAY: usize = 64;
/// So often in a row parts of one batch are refused before all of it counts as refused: more often than it takes to find the
/// one lock of [`LOCKS_AT_ONCE`] that is to blame. To ask for each would only hammer the server.
const MOST_REFUSALS: u32 = 12;

/// After how long it is asked again whether a record is there.
const ASK_AGAIN: Duration = Duration::from_millis(500);
/// So soon at most a renewal is tried again because its lease is nearly over.
const SOON: Duration = Duration::from_millis(50);

/// What can be renewed by one request.
fn group_of(core: &Core, renewal: &Renewal) -> Group {
    let kind = renewal.hold.kind();
    (kind.renew().name, core.store.group_of(kind.record()))
}

/// How many batches are under way to each server: one that does not answer holds up its own renewals only.
type Ways = HashMap<u16, usize>;

/// The servers that have refused the last renewals as a whole.
type Refusing = Mutex<HashSet<u16>>;

/// Runs until the client ends.
pub(crate) async fn run(core: Arc<Core>) {
    let (refusing, server_of) = (Refusing::default(), |group| core.store.server_of(group));
    let (mut pending, mut under_way, mut ways) = (Pending::default(), FuturesUnordered::new(), Ways::new());
    let mut connections = core.store.connections();
    loop {
        let due = look(&core);
        if !due.is_empty() {
            pending.add(due.into_iter().map(|one| (group_of(&core, &one), one.deadline, one)), server_of);
        }
        loop {
            let most = at_once(&core);
            let is_free = |server| ways.get(&server).is_none_or(|under_way| *under_way < most);
            let Some((server, batch)) = pending.next(LOCKS_AT_ONCE, server_of, is_free) else { break };
            *ways.entry(server).or_default() += 1;
            let (core, refusing) = (&core, &refusing);
            under_way.push(async move {
                renew(core, (server, refusing), batch).await;
                server
            });
        }
        let longest = if core.holds.reap_again() { LOOK } else { core.config.watchdog_timeout / 3 };
        tokio::select! {
            Some(server) = under_way.next(), if !under_way.is_empty() => {
                ways.entry(server).and_modify(|under_way| *under_way -= 1);
            }
            // the server may be another one, or have forgotten everything
            changed = connections.changed() => match changed {
                Ok(()) => {
                    let now = Instant::now();
                    core.holds.for_each(|hold| hold.check_soon(now));
                }
                Err(_) => return,
            },
            () = core.holds.due.wait(longest) => {}
        }
    }
}

/// How many batches one server is asked for at once.
fn at_once(core: &Core) -> usize {
    // none of them is full
    if core.store.is_cluster() {
        return MOST_UNDER_WAY;
    }
    let fit = core.store.round_trip().as_nanos() / WORK.as_nanos();
    MOST_UNDER_WAY.min(2 + fit as usize)
}

/// Looks at what is due; returns what is to be renewed.
fn look(core: &Arc<Core>) -> Vec<Renewal> {
    let (now, mut renewals) = (Instant::now(), Vec::new());
    for hold in core.holds.due.take(now) {
        match hold.look(now) {
            Look::Nothing => {}
            Look::Renew(renewal) => renewals.push(renewal),
            Look::Ended => core.tidy(&hold),
            // it waits in a queue, and cannot ask: what is not polled loses its place, by the server's clock. Where it could
            // have asked, nobody polls it, and what is in doubt may be the lock itself
            Look::Stuck if !core.store.is_up(hold.kind().record()) && hold.bear_with_queue() => {}
            Look::Stuck => {
                log::later!(
                    WARN, lock = hold.lock_name(), owner = hold.owner();
                    "a request of a future that is not polled is undone"
                );
                core.orphan(&hold);
            }
        }
    }
    renewals
}

/// Renews one batch. A refusal that concerns one lock must not cost the others their renewal, so a batch that is refused is
/// halved; but not where everything is refused. One whose keys are on their way is asked for each alone.
async fn renew(core: &Arc<Core>, at: (u16, &Refusing), batch: Vec<Renewal>) {
    let Some(script) = batch.first().map(|renewal| renewal.hold.kind().renew()) else { return };
    let (server, refusing) = at;
    let refusing = || refusing.lock().unwrap_or_else(PoisonError::into_inner);
    let mut refused_in_a_row = 0;
    let mut parts = vec![batch];
    while let Some(mut part) = parts.pop() {
        let now = Instant::now();
        // whatever ended meanwhile needs no renewal
        part.retain(|renewal| renewal.hold.is_current(&renewal.generation));
        if part.is_empty() {
            continue;
        }
        let ttls: Vec<Duration> = part.iter().map(|renewal| renewal.keep.ttl(now)).collect();
        // who only asks whether the record is there changes nothing
        let copies = |renewal: &Renewal| {
            let replicas = (renewal.keep != Keep::AsItIs).then(|| renewal.generation.books().replicas)?;
            core.config.copies(replicas)
        };
        let copies_of_all = part.iter().filter_map(copies).max_by_key(|copies| copies.replicas);
        match core.store.renew(&call(script, &part, &ttls), copies_of_all).await {
            Ok((answers, acks)) => {
                // a replica that has not heard of it may end the record before
                let acks =
                    acks.inspect_err(|error| log::later!(DEBUG, error = error; "nobody knows who has a renewal"));
                let has_copies = |renewal: &Renewal| {
                    copies(renewal).is_none_or(|copies| matches!(acks, Ok(Some(acks)) if acks.suffice(copies)))
                };
                refusing().remove(&server);
                refused_in_a_row = 0;
                if meter::IS_ON {
                    let now = Instant::now();
                    let late = |renewal: &Renewal| Some(now.saturating_duration_since(renewal.due));
                    let counted = part.iter().zip(&answers);
                    let counted = counted.map(|(renewal, answer)| counted_as(renewal, outcome(*answer), late(renewal)));
                    core.config.meter.renewals(counted.collect());
                }
                for ((renewal, ttl), answer) in part.iter().zip(ttls).zip(answers) {
                    let Renewal { hold, generation, period, .. } = renewal;
                    if answer == Renewed::Unknown || answer == Renewed::Yes && !has_copies(renewal) {
                        hold.not_renewed(generation, again(renewal, Instant::now()));
                    } else {
                        hold.renewed(generation, answer, now, ttl, Some(now + *period));
                    }
                    // lost, or released meanwhile
                    core.tidy(hold);
                }
            }
            // some are here, and some have gone: halves, one after the other, would take a slow master longer than the leases
            Err(error) if error.kind() == StoreErrorKind::TryAgain && part.len() > 1 => {
                each_alone(core, at, part).await;
            }
            Err(error) => {
                refused_in_a_row += 1;
                let hopeless = refused_in_a_row >= MOST_REFUSALS || refusing().contains(&server);
                let halves = may_concern_one(&error) && !hopeless;
                if halves && part.len() > 1 {
                    let right = part.split_off(part.len() / 2);
                    parts.extend([right, part]);
                    continue;
                }
                if !halves {
                    part.extend(parts.drain(..).flatten());
                    refusing().insert(server);
                }
                log::later!(
                    WARN, locks = part.len(), error = error; "renewal failed; trying again until the lease ends"
                );
                if meter::IS_ON {
                    core.config
                        .meter
                        .renewals(part.iter().map(|renewal| counted_as(renewal, "failed", None)).collect());
                }
                for renewal in &part {
                    renewal.hold.not_renewed(&renewal.generation, again(renewal, Instant::now()));
                    core.tidy(&renewal.hold);
                }
            }
        }
    }
}

/// Renews each of a batch by a request of its own, all at once. In a box, as it is rare.
fn each_alone<'a>(
    core: &'a Arc<Core>,
    at: (u16, &'a Refusing),
    batch: Vec<Renewal>,
) -> Pin<Box<dyn Future<Output = ()> + Send + 'a>> {
    Box::pin(async move {
        join_all(batch.into_iter().map(|one| renew(core, at, vec![one]))).await;
    })
}

fn counted_as(renewal: &Renewal, outcome: &'static str, late: Option<Duration>) -> meter::Renewal {
    let kind = renewal.hold.kind();
    meter::Renewal { kind: kind.about().label, lock: Arc::clone(kind.name()), outcome, late }
}

/// What an answer is counted as.
fn outcome(answer: Renewed) -> &'static str {
    match answer {
        Renewed::Yes | Renewed::Endless => "renewed",
        Renewed::Gone => "gone",
        Renewed::Taken => "taken",
        Renewed::Unknown => "failed",
    }
}

/// When a renewal that was not confirmed is tried again. What only asks whether the record is there waits for no lease's end.
/// What was granted has less time at first than its period.
fn again(renewal: &Renewal, now: Instant) -> Instant {
    let Renewal { keep, period, deadline, .. } = renewal;
    let left = deadline.saturating_duration_since(now);
    now + match keep {
        Keep::AsItIs => ASK_AGAIN.min(*period),
        _ => (*period / 10).min(SOON.max(left / 4)),
    }
}

/// Whether the script was refused for what it names, rather than for what it is, or for the server's state.
fn may_concern_one(error: &StoreError) -> bool {
    use StoreErrorKind as K;
    !error.may_have_executed()
        && matches!(error.kind(), K::NoPermission | K::CrossSlot | K::Moved | K::TryAgain | K::WrongType | K::Other)
}

fn call(script: &'static Script, batch: &[Renewal], ttls: &[Duration]) -> Call {
    let keys = batch.iter().map(|renewal| Arc::clone(renewal.hold.kind().record()));
    let of_one =
        |(renewal, ttl): (&Renewal, &Duration)| [Arg::from(&renewal.generation.owner), Arg::from(millis(*ttl))];
    Call::new(script, keys, batch.iter().zip(ttls).flat_map(of_one))
}

/// Lets a hold live for at least `lease` from now: the watchdog's script on one lock.
pub(crate) async fn extend(
    core: &Core,
    kind: &Arc<dyn Kind>,
    owner: &OwnerId,
    lease: Duration,
    copies: Option<Copies>,
) -> (Instant, Result<(Renewed, Option<Acks>), StoreError>) {
    let call = Call::new(kind.renew(), vec![Arc::clone(kind.record())], vec![owner.into(), millis(lease).into()]);
    let sent = Instant::now();
    let renewed = core.store.renew(&call, copies).await.and_then(|(answers, acks)| Ok((answers[0], acks?)));
    (sent, renewed)
}
