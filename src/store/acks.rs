//! Counts the replicas that have what a connection wrote: WAIT behind the scripts, on their own
//! connection.
//!
//! WAIT holds up every request behind it, so each connection has at most one in flight. An acquire
//! that finds none in flight sends its own WAIT in the same round trip. An acquire that finds one
//! waits for the next, which covers everything that was sent before it.
//!
//! The number is about the writes of this very connection, and nothing else: for a connection that
//! has not written, the server counts all replicas. So the number is valid only if a script has
//! confirmed, over the same connection, that it wrote.

use std::{
    pin::pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    task::Poll,
    time::Duration,
};

use futures_util::{
    FutureExt,
    future::{BoxFuture, Shared},
    poll,
};
use tokio::time::sleep;

use super::{
    link::{Epoch, Link},
    wire::{Connection, Failure, Request, Until, Value},
};
use crate::{
    clock::Instant,
    error::{Error, Result, StoreError, StoreErrorKind},
    options::{Copies, millis},
};

/// The copies that a write has.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Acks {
    pub(crate) replicas: u32,
    /// True if the server itself has it on disk.
    pub(crate) on_disk: bool,
}

impl Acks {
    /// Returns whether these copies are enough.
    pub(crate) fn suffice(self, copies: Copies) -> bool {
        self.replicas >= copies.replicas && (self.on_disk || !copies.fsync)
    }

    /// Returns the number of replicas, up to 255: each guard keeps it, in a single byte.
    pub(crate) fn counted(self) -> u8 {
        u8::try_from(self.replicas).unwrap_or(u8::MAX)
    }
}

type AcksReply = Shared<BoxFuture<'static, std::result::Result<Acks, Failure>>>;

/// A WAIT or WAITAOF.
struct WaitRequest {
    epoch: Epoch,
    number: u64,
    copies: Copies,
    reply: AcksReply,
}

/// The WAITs of a link.
#[derive(Default)]
pub(super) struct WaitRequests {
    /// Whether a request has needed one yet.
    any: AtomicBool,
    last: Mutex<Option<WaitRequest>>,
}

/// A script that was sent, whose copies may be counted later.
pub(crate) struct Receipt {
    connection: Connection,
    epoch: Epoch,
    /// The last WAIT that may have been sent before it.
    after: u64,
    copies: Copies,
}

impl std::fmt::Debug for Receipt {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Receipt")
            .field("epoch", &self.epoch)
            .field("after", &self.after)
            .finish_non_exhaustive()
    }
}

impl WaitRequests {
    fn last(&self) -> MutexGuard<'_, Option<WaitRequest>> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Polls the last WAIT for its reply, in case no other task waits for it.
    fn poll_last(&self) {
        let answer = self.last().as_ref().map(|last| last.reply.clone());
        let _ = answer.and_then(FutureExt::now_or_never);
    }

    /// Returns whether a request that is sent now stands behind a WAIT.
    pub(super) fn hold_up(&self) -> bool {
        // most clients never send one
        if !self.any.load(Ordering::Relaxed) {
            return false;
        }
        self.poll_last();
        self.last()
            .as_ref()
            .is_some_and(|last| last.reply.peek().is_none())
    }
}

/// Sends the next WAIT on this connection. It is queued when this returns.
fn next(
    last: &mut Option<WaitRequest>,
    connection: &Connection,
    epoch: Epoch,
    copies: Copies,
    limit: Duration,
) -> AcksReply {
    let number = last.as_ref().map_or(0, |last| last.number) + 1;
    let connection = connection.clone();
    let answer = async move { send_wait(&connection, copies, limit).await }
        .boxed()
        .shared();
    // the first poll sends it
    let _ = answer.clone().now_or_never();
    *last = Some(WaitRequest {
        epoch,
        number,
        copies,
        reply: answer.clone(),
    });
    answer
}

/// Sends a WAIT, and returns how many replicas have what this connection wrote. It waits for as
/// many as `copies` requires, up to `copies.timeout`.
async fn send_wait(
    connection: &Connection,
    copies: Copies,
    limit: Duration,
) -> std::result::Result<Acks, Failure> {
    let (replicas, patience) = (
        copies.replicas.to_string(),
        millis(copies.timeout).to_string(),
    );
    let words = ["WAITAOF", "1", &replicas, &patience];
    let plain = ["WAIT", &replicas, &patience];
    let words = if copies.fsync { &words[..] } else { &plain[..] };
    let until = Until::new(Instant::now(), copies.timeout + limit);
    let number = |value: &Value| {
        value
            .as_number()
            .and_then(|number| u32::try_from(number).ok())
    };
    let answer = connection.call(Request::Words(words), until).await?;
    let acks = match &answer {
        Value::Array(both) => match both.as_slice() {
            [own, replicas] => number(own).zip(number(replicas)),
            _ => None,
        },
        answer => number(answer).map(|replicas| (0, replicas)),
    };
    let (own, replicas) =
        acks.ok_or_else(|| Failure::Nonsense("WAIT was answered by something else".into()))?;
    Ok(Acks {
        replicas,
        on_disk: own > 0,
    })
}

impl Link {
    /// Sends a script, and a WAIT right behind it unless one is in flight.
    pub(super) async fn call_and_wait(
        &self,
        (epoch, connection): (Epoch, &Connection),
        request: Request<'_>,
        until: Until,
        copies: Copies,
    ) -> (std::result::Result<Value, Failure>, Receipt) {
        let mut asked = pin!(connection.call(request, until));
        let at_once = poll!(asked.as_mut());
        self.wait_requests.any.store(true, Ordering::Relaxed);
        self.wait_requests.poll_last();
        let (after, mut along) = {
            let mut last = self.wait_requests.last();
            let after = last.as_ref().map_or(0, |last| last.number);
            let is_idle = last
                .as_ref()
                .is_none_or(|last| last.epoch != epoch || last.reply.peek().is_some());
            let along = is_idle && at_once.is_pending();
            (
                after,
                along.then(|| next(&mut last, connection, epoch, copies, self.limit())),
            )
        };
        let receipt = Receipt {
            connection: connection.clone(),
            epoch,
            after,
            copies,
        };
        if let Poll::Ready(answer) = at_once {
            return (answer, receipt);
        }
        let answer = std::future::poll_fn(|cx| {
            // the WAIT is sent only if it is polled
            if along
                .as_mut()
                .is_some_and(|along| along.poll_unpin(cx).is_ready())
            {
                along = None;
            }
            asked.as_mut().poll(cx)
        });
        (answer.await, receipt)
    }

    /// Waits until enough replicas have what a script wrote, or the time for that is over. Returns
    /// how many have it.
    ///
    /// The script may have been executed, whatever this returns.
    pub(super) async fn acknowledged(
        &self,
        receipt: &Receipt,
        until: Until,
    ) -> Result<Acks, StoreError> {
        let Receipt {
            connection,
            epoch,
            after,
            copies,
        } = receipt;
        let rounds = async {
            loop {
                let (answer, is_for_it) = {
                    let mut last = self.wait_requests.last();
                    match &*last {
                        Some(round)
                            if round.epoch == *epoch
                                && round.number > *after
                                && round.copies.cover(*copies) =>
                        {
                            (round.reply.clone(), true)
                        }
                        Some(round) if round.epoch == *epoch && round.reply.peek().is_none() => {
                            (round.reply.clone(), false)
                        }
                        _ => (
                            next(&mut last, connection, *epoch, *copies, self.limit()),
                            true,
                        ),
                    }
                };
                let answer = answer.await;
                if is_for_it {
                    return answer;
                }
            }
        };
        let answer = self
            .in_time(until.remaining(Instant::now()), rounds)
            .await
            .unwrap_or(Err(Failure::TimedOut));
        let answer = if self.is_left() {
            Err(Failure::Ended)
        } else {
            answer
        };
        answer.map_err(|failure| self.failed(failure).that_may_have_executed())
    }

    /// Sends a WAIT that belongs to no script, and returns what the server counts.
    async fn count_replicas(&self, copies: Copies) -> Result<Acks, StoreError> {
        let (_, connection) = self.up().await?;
        // a WAIT prompts replicas that have not acknowledged yet
        send_wait(&connection, copies, self.limit())
            .await
            .map_err(|failure| self.failed(failure))
    }
}

/// How long to wait for replicas that may have been connecting when the client did.
const REPLICA_GRACE: Duration = Duration::from_secs(1);
/// How often the replicas are counted until then.
const POLL: Duration = Duration::from_millis(50);

/// Checks whether these servers have enough replicas for any lock to be acquired. Returns an error
/// before `limit` is over.
pub(super) async fn check(
    links: &[Arc<Link>],
    copies: Copies,
    address: &str,
    limit: Duration,
) -> Result<()> {
    let until = Instant::now() + REPLICA_GRACE.min(limit / 3);
    let copies = Copies {
        timeout: copies.timeout.min(limit / 6).max(Duration::from_millis(1)),
        ..copies
    };
    let refuse = |reason| Err(Error::InvalidConfig { reason });
    for link in links {
        loop {
            let acks = match link.count_replicas(copies).await {
                Ok(acks) => acks,
                Err(error)
                    if copies.fsync
                        && matches!(
                            error.kind(),
                            StoreErrorKind::Other | StoreErrorKind::UnknownCommand
                        ) =>
                {
                    return refuse(format!(
                        "fsync needs Redis 7.2 or Valkey, with `appendonly yes`; {address} said: {}",
                        error.said()
                    ));
                }
                Err(source) => {
                    return Err(Error::Connect {
                        address: address.to_owned(),
                        source: source.of_a_read(),
                    });
                }
            };
            if acks.replicas >= copies.replicas {
                // the disk may be slow, and each acquire checks it again
                break;
            }
            if Instant::now() >= until {
                return refuse(format!(
                    "replicas are {}, and of {}, {} answered: no lock could be had; ask for fewer, or add replicas",
                    copies.replicas,
                    link.address(),
                    acks.replicas
                ));
            }
            sleep(POLL).await;
        }
    }
    Ok(())
}
